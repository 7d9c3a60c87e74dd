//! A relay server of one's own.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};

use data_encoding::BASE32_NOPAD;
use fusionllm_data::{DiskError, flush};
use fusionllm_transport::relay::{RelayOptions, serve};
use fusionllm_transport::{Allowed, RelayUrl, Secret};

use crate::NodeError;
use crate::machine::interrupts::Interrupts;

/// The options with which a relay runs.
pub struct RelayCommand {
    /// The TCP and UDP address to listen on.
    pub listen: SocketAddr,
    /// The name or address by which machines reach the relay, with or without a port; `None` to guess.
    pub host: Option<String>,
    /// A file with the relay's secret, which is made if it is missing; `None` for a new secret each time.
    pub secret: Option<PathBuf>,
}

/// Runs a relay until it is asked to stop, by Ctrl-C or any signal to end. Calls `on_start` with its URL, whose secret is
/// readable, and its address.
///
/// # Errors
///
/// The file is no secret and cannot be made, the host is no name, or the address is in use.
pub async fn relay(
    command: RelayCommand,
    on_start: impl FnOnce(&RelayUrl, SocketAddr) -> Result<(), NodeError>,
) -> Result<(), NodeError> {
    let RelayCommand { listen, host, secret } = command;
    let secret = secret.map_or_else(|| Ok(Secret::generate()), |path| read_or_make(&path))?;
    let mut interrupts = Interrupts::new()?;
    let server = serve(RelayOptions { listen, secret, allowed: Allowed::Any }).await?;
    let host = host.unwrap_or_else(|| guess(listen.ip()).to_string());
    let url = server.url(&with_port(&host, server.addr().port())).map_err(|_| {
        let hint = "give the name or address by which other machines reach this one, such as relay.example.org";
        NodeError::input_with_hint(format!("--host {host:?} is not a host"), hint)
    })?;
    on_start(&url, server.addr())?;
    interrupts.next().await;
    server.close().await;
    Ok(())
}

/// The host with a port.
fn with_port(host: &str, port: u16) -> String {
    match host.parse::<IpAddr>() {
        Ok(ip) => SocketAddr::new(ip, port).to_string(),
        // An IPv6 address in brackets has colons of its own.
        Err(_) if host.rsplit(']').next().is_some_and(|end| end.contains(':')) => host.to_owned(),
        Err(_) => format!("{host}:{port}"),
    }
}

/// The address by which other machines probably reach one that listens on `ip`.
pub(crate) fn guess(ip: IpAddr) -> IpAddr {
    if !ip.is_unspecified() {
        return ip;
    }
    // Sends nothing: the system only chooses the interface that leads to the outside. The address is for examples.
    let outside = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).and_then(|socket| {
        socket.connect((Ipv4Addr::new(192, 0, 2, 1), 9))?;
        socket.local_addr()
    });
    outside.map_or(Ipv4Addr::LOCALHOST.into(), |addr| addr.ip())
}

/// The secret in a file. A missing file is made, for this user alone.
fn read_or_make(path: &Path) -> Result<Secret, NodeError> {
    match std::fs::read_to_string(path) {
        Ok(text) => parse(text.trim()).ok_or_else(|| {
            NodeError::input_with_hint(
                format!("{}: this is not a relay's secret", path.display()),
                "name a file that `fusionllm relay --secret` made, or one that does not exist yet",
            )
        }),
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            let secret = Secret::generate();
            write_private(path, &format!("{}\n", secret_text(&secret))).map_err(DiskError::at(path, "written"))?;
            Ok(secret)
        }
        Err(e) => Err(DiskError::at(path, "read")(e).into()),
    }
}

/// The text of a secret, as files and addresses have it.
pub(crate) fn secret_text(secret: &Secret) -> String {
    BASE32_NOPAD.encode(secret.as_bytes()).to_ascii_lowercase()
}

/// The secret in a text.
pub(crate) fn parse(text: &str) -> Option<Secret> {
    let bytes = BASE32_NOPAD.decode(text.to_ascii_uppercase().as_bytes()).ok()?;
    bytes.try_into().ok().map(Secret::from_bytes)
}

fn write_private(path: &Path, text: &str) -> io::Result<()> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let mut file = options.open(path)?;
    file.write_all(text.as_bytes())?;
    flush(&file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_stays_in_its_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("relay.secret");
        let made = read_or_make(&path).unwrap();
        assert_eq!(read_or_make(&path).unwrap(), made);
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        }
        std::fs::write(&path, "something else").unwrap();
        let error = read_or_make(&path).unwrap_err().to_string();
        assert!(error.ends_with("relay.secret: this is not a relay's secret"), "{error}");
    }

    #[test]
    fn a_host_gets_the_port_unless_it_has_one() {
        let at = |host| with_port(host, 3340);
        assert_eq!(at("relay.example.org"), "relay.example.org:3340");
        assert_eq!(at("relay.example.org:80"), "relay.example.org:80");
        assert_eq!(at("192.0.2.7"), "192.0.2.7:3340");
        assert_eq!(at("2001:db8::1"), "[2001:db8::1]:3340");
        assert_eq!(at("[2001:db8::1]"), "[2001:db8::1]:3340");
        assert_eq!(at("[2001:db8::1]:80"), "[2001:db8::1]:80");
    }
}
