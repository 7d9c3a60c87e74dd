//! The file of a machine's identity, and the list of keys that may join a run.
//!
//! An identity file is one line: `fusionllm-identity-1`, a blank, and the secret key in base32. On Unix only its owner
//! can read it.
//!
//! A list has one public key per line. What follows a `#` is a comment.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::Path;

use fusionllm_data::{DiskError, write_private};
use fusionllm_transport::{InvalidPeerKey, PeerKey, SecretKey};

use crate::NodeError;

/// Names the format and its version.
const MAGIC: &str = "fusionllm-identity-1 ";

/// The largest file that is read. A list of ten thousand keys is smaller.
const MAX_BYTES: u64 = 1 << 20;

/// Reads the identity in the file at `path`. If there is no file, it writes a new identity there.
///
/// # Errors
///
/// The file cannot be read or written, or it holds something else.
pub(crate) fn identity(path: &Path) -> Result<SecretKey, NodeError> {
    match read(path) {
        Ok(text) => parse_identity(&text).ok_or_else(|| {
            NodeError::input_with_hint(
                format!("{}: this is no identity of this version of fusionllm", path.display()),
                "give the path of a new file: an identity is written there",
            )
        }),
        Err(e) if e.source.kind() == io::ErrorKind::NotFound => {
            let key = SecretKey::generate();
            write_private(path, format!("{MAGIC}{}\n", key.full()).as_bytes())?;
            Ok(key)
        }
        Err(e) => Err(e.into()),
    }
}

/// The key in the text of an identity file.
pub(crate) fn parse_identity(text: &str) -> Option<SecretKey> {
    text.trim().strip_prefix(MAGIC).and_then(|key| key.parse().ok())
}

/// Reads the list of keys in the file at `path`.
///
/// # Errors
///
/// The file cannot be read, or a line is no key.
pub(crate) fn allowed(path: &Path) -> Result<BTreeSet<PeerKey>, NodeError> {
    parse_allowed(&read(path)?).map_err(|(line, e)| {
        NodeError::input_with_hint(
            format!("{}:{line}: {e}", path.display()),
            "write one key per line, as `fusionllm identity FILE` prints it, and comments after #",
        )
    })
}

/// The keys in the text of a list. The error has the number of the line that is no key.
pub(crate) fn parse_allowed(text: &str) -> Result<BTreeSet<PeerKey>, (usize, InvalidPeerKey)> {
    let lines = text.lines().map(|line| line.split('#').next().unwrap_or_default().trim());
    let keys = (1..).zip(lines).filter(|(_, line)| !line.is_empty());
    keys.map(|(number, line)| line.parse().map_err(|e| (number, e))).collect()
}

fn read(path: &Path) -> Result<String, DiskError> {
    let text = || {
        let size = fs::metadata(path)?.len();
        if size > MAX_BYTES {
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("it has {size} bytes")));
        }
        fs::read_to_string(path)
    };
    text().map_err(DiskError::at(path, "read"))
}

#[cfg(test)]
mod tests {
    use fusionllm_graph::Advice;
    use insta::assert_snapshot;

    use super::*;

    #[test]
    fn an_identity_is_made_once_and_is_private() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("me.key");
        let key = identity(&path).unwrap().public();
        assert_eq!(identity(&path).unwrap().public(), key);
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        }
        let list = dir.path().join("allow");
        fs::write(&list, format!("# friends\n\n{}  # me\n", key.full())).unwrap();
        assert_eq!(allowed(&list).unwrap(), BTreeSet::from([key]));
    }

    #[test]
    fn other_files_are_refused_and_stay() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        fs::write(&path, "secret\nabc\n").unwrap();
        let place = dir.path().display().to_string();
        let [identity, list] = [identity(&path).unwrap_err().report(), allowed(&path).unwrap_err().report()];
        assert_snapshot!(identity.replace(&place, "DIR"), @"
        DIR/x: this is no identity of this version of fusionllm
        hint: give the path of a new file: an identity is written there
        ");
        assert_snapshot!(list.replace(&place, "DIR"), @r#"
        DIR/x:1: not a peer key: expected 52 characters of base32 (a-z, 2-7), got "secret"
        hint: write one key per line, as `fusionllm identity FILE` prints it, and comments after #
        "#);
        assert_eq!(fs::read_to_string(&path).unwrap(), "secret\nabc\n");
    }
}
