//! The requests of a run's owner to its broker: how the run is doing, and who takes part.
//!
//! Without a broker that answers, the run's directory says which results are safe.

use std::path::{Path, PathBuf};
use std::time::Duration;

use fusionllm_protocol::{Answer, FromPeer, Question, Request, VERSION};
pub use fusionllm_protocol::{IncidentStatus, MemberStatus, RunPhase, RunStatus, Standing};
use fusionllm_transport::{
    Allowed, ConnectError, Connection, DisconnectReason, Endpoint, EndpointOptions, Lanes, Ticket,
};
use fusionllm_workspace::checkpoint::Checkpoints;
use fusionllm_workspace::run_dir::{RunFiles, read_metrics, read_owner_ticket};
use serde::Serialize;

use crate::NodeError;
use crate::keys;
use crate::net;
use crate::net::reach::reach;

/// The time in which the broker must be reached. A person waits.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// The time in which the broker has to answer. It may be writing to a slow disk.
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);

/// A run, as its owner names it.
#[derive(Debug, Clone)]
pub struct OwnedRun {
    pub(super) directory: Option<PathBuf>,
    /// The owner's ticket; `None` if the directory has none, because the run is over.
    pub(super) ticket: Option<Ticket>,
}

/// The state of a run, as it was found.
#[derive(Debug, Clone, PartialEq)]
pub enum Found {
    /// The broker of the run has answered.
    Running(Box<RunStatus>),
    /// No broker has answered, so this is what the run directory tells.
    Resting(Resting),
}

/// A run whose broker does not run, or cannot be reached.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Resting {
    /// Whether it was trained to its end, or stopped in good order.
    pub over: bool,
    /// The reason why no broker was asked, or why none answered.
    pub reason: String,
    /// Steps in the metrics.
    pub step: u64,
    /// The step at which the run stops, if its job says so.
    pub steps: Option<u64>,
    /// The loss of the last of these steps.
    pub loss: Option<f64>,
    /// The step of the last whole checkpoint.
    pub saved: Option<u64>,
}

impl OwnedRun {
    /// The run that `text` names: a run directory, or an owner's ticket.
    ///
    /// # Errors
    ///
    /// It is neither.
    pub fn new(text: &str) -> Result<Self, NodeError> {
        let directory = Path::new(text.trim());
        if directory.is_dir() {
            let ticket = read_owner_ticket(directory)?.map(|text| text.parse()).transpose()?;
            return Ok(Self { directory: Some(directory.to_owned()), ticket });
        }
        match text.parse() {
            Ok(ticket) => Ok(Self { directory: None, ticket: Some(ticket) }),
            Err(e) => Err(NodeError::input_with_hint(
                format!("this is neither a run directory nor an owner's ticket: {e}"),
                "give a directory such as runs/0001, or the line in its file owner-ticket",
            )),
        }
    }

    /// The state of the run.
    ///
    /// # Errors
    ///
    /// The broker refuses; or it cannot be reached, and no directory is known.
    pub async fn status(&self) -> Result<Found, NodeError> {
        let reason = match &self.ticket {
            None => "it has no owner's ticket, so no broker runs for it".to_owned(),
            Some(ticket) => match (ask(ticket, Question::Status).await, &self.directory) {
                (Ok(Answer::Status(status)), _) => return Ok(Found::Running(status)),
                (Ok(other), _) => return Err(unexpected(&other)),
                (Err(NodeError::BrokerUnreachable(_)), Some(_)) => {
                    "its broker does not run, or cannot be reached from here".to_owned()
                }
                (Err(e), _) => return Err(e),
            },
        };
        let directory = self.directory.as_deref().unwrap_or(Path::new("."));
        let files = RunFiles::read(directory)?;
        let metrics = read_metrics(directory)?;
        let last = metrics.last();
        Ok(Found::Resting(Resting {
            over: files.over,
            reason,
            step: last.map_or(0, |m| m.step),
            steps: files.steps,
            loss: last.and_then(|m| m.loss),
            saved: Checkpoints::new(files.checkpoints).list()?.last().map(|(step, _)| *step),
        }))
    }

    /// Puts a member out for good. Its key cannot come back. Returns one sentence about what was done.
    ///
    /// # Errors
    ///
    /// The broker cannot be reached, or refuses.
    pub async fn kick(&self, name: &str) -> Result<String, NodeError> {
        self.done(Question::Kick { name: name.to_owned() }).await
    }

    /// Takes back one ticket for peers, or all of them. Returns one sentence about what was done.
    ///
    /// # Errors
    ///
    /// The text is no ticket; the broker cannot be reached, or refuses.
    pub async fn revoke(&self, ticket: Option<&str>) -> Result<String, NodeError> {
        let ticket = ticket.map(str::parse::<Ticket>).transpose()?;
        self.done(Question::Revoke { secret: ticket.map(|t| *t.secret.as_bytes()) }).await
    }

    /// Makes another ticket for peers. `valid`: for how long; `uses`: for how many machines; `None` for no limit.
    ///
    /// # Errors
    ///
    /// The broker cannot be reached, or refuses.
    pub async fn invite(&self, valid: Option<Duration>, uses: Option<u32>) -> Result<String, NodeError> {
        match ask(self.ticket()?, Question::Invite { seconds: valid.map(|v| v.as_secs()), uses }).await? {
            Answer::Ticket { text } => Ok(text.parse::<Ticket>()?.to_string()),
            other => Err(unexpected(&other)),
        }
    }

    async fn done(&self, question: Question) -> Result<String, NodeError> {
        match ask(self.ticket()?, question).await? {
            Answer::Done { what } => Ok(net::printable(&what)),
            other => Err(unexpected(&other)),
        }
    }

    fn ticket(&self) -> Result<&Ticket, NodeError> {
        self.ticket.as_ref().ok_or_else(|| {
            let directory = self.directory.as_deref().unwrap_or(Path::new("."));
            NodeError::input(format!("{}: no broker runs here: there is no owner's ticket", directory.display()))
        })
    }
}

pub(super) fn unexpected(answer: &Answer) -> NodeError {
    match answer {
        Answer::Refused { reason } => NodeError::Denied(net::printable(reason)),
        _ => NodeError::Protocol("the broker answered another question".into()),
    }
}

/// Asks one question, on a connection of its own.
async fn ask(ticket: &Ticket, question: Question) -> Result<Answer, NodeError> {
    let endpoint = endpoint().await?;
    let answer = tokio::time::timeout(CONNECT_TIMEOUT + ANSWER_TIMEOUT, exchange(&endpoint, ticket, question)).await;
    let answer = answer.unwrap_or_else(|_| Err(late()));
    close(&endpoint, &answer).await;
    answer
}

/// An endpoint that asks a broker, and that nobody connects to.
pub(super) async fn endpoint() -> Result<Endpoint, NodeError> {
    let options = EndpointOptions {
        allowed: Allowed::Only(std::collections::BTreeSet::new()),
        connect_timeout: CONNECT_TIMEOUT,
        ..EndpointOptions::new()
    };
    Ok(Endpoint::bind(options).await?)
}

/// Closes the endpoint after this result. A broker that was not reached need not hear of the end.
pub(super) async fn close<T>(endpoint: &Endpoint, result: &Result<T, NodeError>) {
    if !matches!(result, Err(NodeError::BrokerUnreachable(_))) {
        endpoint.close("").await;
    }
}

pub(super) fn late() -> NodeError {
    NodeError::Network(format!("the broker did not answer within {ANSWER_TIMEOUT:?}"))
}

async fn exchange(endpoint: &Endpoint, ticket: &Ticket, question: Question) -> Result<Answer, NodeError> {
    let (connection, mut lanes) = request(endpoint, ticket, question).await?;
    let answer = answer(&mut lanes).await;
    connection.close("");
    answer
}

/// Connects to the broker, and asks the question.
pub(super) async fn request(
    endpoint: &Endpoint,
    ticket: &Ticket,
    question: Question,
) -> Result<(Connection, Lanes), NodeError> {
    let (connection, lanes) = reach(endpoint, &ticket.addr, |_| ()).await.map_err(|e| match e {
        // Only these errors mean that nobody is there.
        NodeError::BrokerUnreachable(
            e @ (ConnectError::NobodyListens(_)
            | ConnectError::NoAnswer { .. }
            | ConnectError::Unreachable(..)
            | ConnectError::Handshake(..)),
        ) => NodeError::BrokerUnreachable(e),
        NodeError::BrokerUnreachable(e) => NodeError::Connect(e),
        e => e,
    })?;
    let request = Request { version: VERSION, secret: *ticket.secret.as_bytes(), question };
    net::send_control(&connection, &FromPeer::Ask(request)).await?;
    Ok((connection, lanes))
}

/// Waits for the next answer.
pub(super) async fn answer(lanes: &mut Lanes) -> Result<Answer, NodeError> {
    match net::next_control(&mut lanes.control).await {
        Ok(Some(answer)) => Ok(answer),
        Ok(None) => Err(NodeError::Protocol("the broker did not answer".into())),
        Err(NodeError::Lost(DisconnectReason::ClosedByPeer(reason))) => Err(NodeError::Denied(format!(
            "it closed the connection: {}; install the same FusionLLM on both",
            net::printable(&reason)
        ))),
        Err(e) => Err(e),
    }
}

/// The public key of the identity in the file at `path`, as a list of allowed keys takes it. If there is no file, a new
/// identity is written there.
///
/// # Errors
///
/// The file cannot be read or written, or it holds something else.
pub fn public_key(path: &Path) -> Result<String, NodeError> {
    Ok(keys::identity(path)?.public().full())
}
