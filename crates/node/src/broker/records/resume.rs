//! The state that a broker leaves behind, so that another one goes on with its run.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use fusionllm_data::Dataset;
use fusionllm_events::IncidentSummary;
use fusionllm_protocol::{Atlas, Past, RunState, VERSION, decode, encode};
use fusionllm_transport::{Secret, SecretKey};
use fusionllm_workbench::model::Model;
use fusionllm_workspace::checkpoint::{Checkpoint, CheckpointError};
use fusionllm_workspace::config::{Job, Train};
use fusionllm_workspace::run_dir::{RunDir, last_record, read_metrics};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::NodeError;

/// The place where a run goes on: a checkpoint, or the point where its broker was killed.
#[derive(Debug)]
pub struct Resume {
    path: PathBuf,
    checkpoint: Option<Checkpoint>,
    left: Option<Left>,
}

impl Resume {
    /// Finds the run or checkpoint at `path`: a run directory, or a checkpoint.
    ///
    /// # Errors
    ///
    /// There is neither a checkpoint nor the state of a killed broker, or it cannot be read.
    pub fn find(path: &Path) -> Result<Self, NodeError> {
        let left = RunDir::read_state(path)?.map(|bytes| Left::parse(&bytes, path)).transpose()?;
        let checkpoint = match Checkpoint::find(path) {
            Err(CheckpointError::Missing { .. }) if left.is_some() => None,
            found => Some(found?),
        };
        Ok(Self { path: path.to_owned(), checkpoint, left })
    }

    /// The job file of the run.
    pub fn job(&self) -> PathBuf {
        self.directory().join("job.toml")
    }

    /// The directory of the run that goes on. `None` if the checkpoint stands outside of any, so that a new run begins.
    pub fn run(&self) -> Option<&Path> {
        match (&self.left, &self.checkpoint) {
            (None, Some(checkpoint)) => run_of(checkpoint.path()),
            _ => Some(&self.path),
        }
    }

    /// The run whose last step by this job is on the disk: its directory and that step. Nothing is left to do in it.
    pub fn over(&self, job: &Job) -> Option<(&Path, u64)> {
        let step = self.checkpoint.as_ref().map(|checkpoint| checkpoint.state().step)?;
        self.run().filter(|_| step >= job.train.stop).map(|run| (run, step))
    }

    /// The number of peers that an unfinished run waited for before it started.
    pub fn peers(&self) -> Option<usize> {
        self.left.as_ref().map(|left| left.wanted)
    }

    /// The newest directory with the run's job: that of the run itself, or that of the checkpoint.
    pub(crate) fn directory(&self) -> &Path {
        match (&self.left, &self.checkpoint) {
            (None, Some(checkpoint)) => checkpoint.path(),
            _ => &self.path,
        }
    }

    /// The newest checkpoint, and the state that the broker left, if `left` is wanted.
    pub(crate) fn parts(self, left: bool) -> Result<(Option<Checkpoint>, Option<Left>), NodeError> {
        match self.left.filter(|_| left) {
            Some(left) => Ok((self.checkpoint, Some(left))),
            None if self.checkpoint.is_none() => Err(CheckpointError::Missing { path: self.path }.into()),
            None => Ok((self.checkpoint, None)),
        }
    }
}

/// The run directory that a checkpoint stands in.
pub(super) fn run_of(checkpoint: &Path) -> Option<&Path> {
    let checkpoints = checkpoint.parent()?;
    (checkpoints.file_name()? == "checkpoints").then(|| checkpoints.parent())?
}

/// The model, data and seed of a run. A run with another subject cannot go on with its tensors.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Subject {
    graph: String,
    data: String,
    seed: u64,
    /// The digest of the parameters that are not trained.
    frozen: Option<String>,
}

impl Subject {
    pub(crate) fn new(job: &Job, data: &Dataset, model: &Model, frozen: Option<String>) -> Self {
        Self { graph: model.forward.digest(), data: data.digest().to_owned(), seed: job.train.seed, frozen }
    }
}

/// The state that a broker writes down while its run goes on.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Left {
    /// The run's directory.
    #[serde(skip)]
    pub(crate) directory: PathBuf,
    /// Seconds since the Unix epoch.
    written: f64,
    /// The last sign of life of the broker that wrote it, in seconds since the Unix epoch.
    #[serde(skip)]
    seen: f64,
    subject: Subject,
    /// The number of peers that the run waits for before it starts.
    wanted: usize,
    pub(crate) loss_first: Option<f64>,
    pub(crate) incidents: Vec<IncidentSummary>,
    pub(crate) run: RunState,
}

impl Left {
    pub(crate) fn new(
        subject: Subject,
        wanted: usize,
        loss_first: Option<f64>,
        incidents: Vec<IncidentSummary>,
        run: RunState,
    ) -> Self {
        let now = unix_time();
        Self { directory: PathBuf::new(), written: now, seen: now, subject, wanted, loss_first, incidents, run }
    }

    /// The bytes for the disk.
    pub(crate) fn to_bytes(&self) -> Result<Vec<u8>, NodeError> {
        versioned(self)
    }

    fn parse(bytes: &[u8], path: &Path) -> Result<Self, NodeError> {
        let parsed = of_version(bytes).map(|left: Self| {
            let recorded = last_record(path).and_then(|time| time.duration_since(UNIX_EPOCH).ok());
            let seen = recorded.map_or(left.written, |time| time.as_secs_f64().max(left.written));
            Self { directory: path.to_owned(), seen, ..left }
        });
        parsed.map_err(|e| {
            NodeError::input_with_hint(
                format!("{}: what the broker left here cannot be read: {e}", path.display()),
                "remove the file `state` there to go on from the newest checkpoint",
            )
        })
    }

    /// The steps that the broker had done, and the time since then.
    ///
    /// # Errors
    ///
    /// The metrics cannot be read.
    pub(crate) fn past(&self) -> Result<Past, NodeError> {
        let steps = read_metrics(&self.directory)?.iter().map(|m| (m.step, m.step_s)).collect();
        Ok(Past { away_s: (unix_time() - self.seen).max(0.0), steps })
    }

    /// Refuses to go on with another model, other data, or fewer steps than were done.
    pub(crate) fn check(&self, subject: &Subject, train: &Train) -> Result<(), NodeError> {
        let path = &self.directory;
        if self.subject != *subject {
            return Err(NodeError::input_with_hint(
                format!("{}: the job, the data or the seed has changed since the broker was there", path.display()),
                "resume without a job file, or start a new run from a checkpoint's model.safetensors with model.weights",
            ));
        }
        match self.run.newest_step() {
            done if done > train.stop => Err(over(path, done, train)),
            _ => Ok(()),
        }
    }
}

/// The error for a run that has done all steps that the job asks for.
pub(super) fn over(path: &Path, done: u64, train: &Train) -> NodeError {
    let hint = match train.steps {
        steps if steps > done => format!("go on to the end of the job with --steps {steps}"),
        _ => "ask for more with --steps".to_owned(),
    };
    let message =
        format!("{}: the run is at step {done} already, and is asked to stop at {}", path.display(), train.stop);
    NodeError::input_with_hint(message, hint)
}

/// Bytes that begin with the protocol's version, because another version has other fields.
fn versioned(value: &impl Serialize) -> Result<Vec<u8>, NodeError> {
    let bytes = encode(value).map_err(NodeError::State)?;
    Ok([&VERSION.to_le_bytes()[..], &bytes].concat())
}

/// Reads a value that [`versioned`] wrote.
fn of_version<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, String> {
    match bytes.split_first_chunk() {
        Some((version, value)) if u32::from_le_bytes(*version) == VERSION => decode(value),
        _ => Err("another version of this program wrote it".into()),
    }
}

/// Whether these bytes are a state that a broker leaves behind.
#[cfg(feature = "decoders")]
pub(crate) fn reads_state(bytes: &[u8]) -> bool {
    of_version::<Left>(bytes).is_ok()
}

/// Whether these bytes are a broker's identity.
#[cfg(feature = "decoders")]
pub(crate) fn reads_key(bytes: &[u8]) -> bool {
    Identity::parse(bytes).is_some()
}

fn unix_time() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

/// The measured machines and links, for another broker. Without them they are measured again.
pub(crate) fn read_atlas(directory: &Path) -> Result<Atlas, NodeError> {
    let bytes = RunDir::read_atlas(directory)?;
    Ok(bytes.and_then(|bytes| of_version(&bytes).ok()).unwrap_or_default())
}

pub(crate) fn write_atlas(run: &RunDir, atlas: &Atlas) -> Result<(), NodeError> {
    Ok(run.write_atlas(&versioned(atlas)?)?)
}

/// The identity of a run's broker: its key, its ports and the tickets' secrets. With it, a ticket stays valid when the
/// broker is started again.
///
/// ```text
///  offset  bytes
///   0      32     seed of the Ed25519 key
///   32     16     secret of the ticket for peers
///   48     16     secret of the owner's ticket
///   64     2      UDP port over IPv4, little-endian
///   66     2      UDP port over IPv6, little-endian
/// ```
#[derive(Clone)]
pub(crate) struct Identity {
    pub(crate) key: SecretKey,
    /// The secrets of the tickets for peers and for the owner.
    pub(crate) secrets: [Secret; 2],
    /// The UDP ports over IPv4 and IPv6; 0 for any free port.
    pub(crate) ports: [u16; 2],
}

impl Identity {
    pub(crate) fn generate() -> Self {
        let secrets = [Secret::generate(), Secret::generate()];
        Self { key: SecretKey::generate(), secrets, ports: [0; 2] }
    }

    /// The identity of this run's broker. A run that has none yet gets a new one, which is not written.
    pub(crate) fn of(run: &RunDir) -> Result<Self, NodeError> {
        let Some(bytes) = run.read_identity()? else { return Ok(Self::generate()) };
        Self::parse(&bytes).ok_or_else(|| {
            NodeError::input_with_hint(
                format!("{}: the broker's key there is damaged", run.path().display()),
                "remove the file `broker-key` there; joiners then need the new ticket",
            )
        })
    }

    /// An address to listen on, with the port that joiners know if any will do.
    pub(crate) fn with_port(&self, mut addr: SocketAddr) -> SocketAddr {
        if addr.port() == 0 {
            addr.set_port(self.ports[usize::from(addr.is_ipv6())]);
        }
        addr
    }

    fn parse(bytes: &[u8]) -> Option<Self> {
        let (key, rest) = bytes.split_first_chunk::<32>()?;
        let (peers, rest) = rest.split_first_chunk::<16>()?;
        let (owner, rest) = rest.split_first_chunk::<16>()?;
        let [a, b, c, d] = *<&[u8; 4]>::try_from(rest).ok()?;
        let ports = [u16::from_le_bytes([a, b]), u16::from_le_bytes([c, d])];
        Some(Self { key: SecretKey::from_bytes(*key), secrets: [*peers, *owner].map(Secret::from_bytes), ports })
    }

    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let ports = self.ports.map(u16::to_le_bytes);
        let [peers, owner] = &self.secrets;
        [&self.key.to_bytes()[..], peers.as_bytes(), owner.as_bytes(), &ports[0], &ports[1]].concat()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identity_survives_the_disk() {
        let identity = Identity { ports: [4433, 5544], ..Identity::generate() };
        let again = Identity::parse(&identity.to_bytes()).unwrap();
        assert_eq!(again.key.public(), identity.key.public());
        assert_eq!((&again.secrets, again.ports), (&identity.secrets, identity.ports));
        let bytes = identity.to_bytes();
        assert!(Identity::parse(&bytes[..67]).is_none() && Identity::parse(&[&bytes[..], &[0]].concat()).is_none());
    }
}
