//! A run whose parameters overflow, with a real broker and two peers over loopback: people read who made the number.
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use fusionllm_node::config::Job;
use fusionllm_node::{BrokerOptions, Event, JoinOptions, NodeError, Observer, Peers, conduct, join};
use fusionllm_transport::Ticket;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

/// Nothing here takes longer, even on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// What people read.
struct Reader {
    tickets: UnboundedSender<Ticket>,
    skipped: Vec<u64>,
    poisoned: Vec<(u64, String)>,
}

impl Observer for Reader {
    fn event(&mut self, event: Event<'_>) {
        match event {
            Event::Listening { ticket, .. } => self.tickets.send(ticket.clone()).unwrap(),
            Event::Step { record, .. } if !record.applied => self.skipped.push(record.step),
            Event::Poisoned { name, step, what, advice } => {
                self.poisoned.push((step, format!("{name:?} {what}; {advice}")));
            }
            _ => {}
        }
    }
}

fn peer(ticket: &Ticket, name: &str) -> JoinOptions {
    let backend = fusionllm_backend::open("cpu").unwrap();
    JoinOptions { name: name.into(), memory: Some(1 << 30), ..JoinOptions::new(ticket.clone(), backend) }
}

/// Conducts a run of two peers at this learning rate to its bad end.
async fn diverge(lr: &str) -> (Reader, String) {
    let settings = [
        "model.n_layer=2",
        "model.n_embd=16",
        "model.n_head=2",
        "data.context=16",
        "train.batch=4",
        "train.micro_batch=2",
        "train.steps=60",
        "train.optimizer.warmup=0",
        "eval.every=0",
        "plan.scheduler=equal-compute",
    ];
    let mut settings = settings.map(str::to_owned).to_vec();
    settings.push(format!("train.optimizer.lr={lr}"));
    let job = Job::quick_start(&settings).unwrap();
    let root = tempfile::tempdir().unwrap();
    let options = BrokerOptions {
        listen: Some(([127, 0, 0, 1], 0).into()),
        directory: Some(root.path().join("run")),
        ..BrokerOptions::new(Peers::Joiners(2))
    };
    let (tickets, mut ticket) = unbounded_channel();
    let mut reader = Reader { tickets, skipped: Vec::new(), poisoned: Vec::new() };
    let peers = async {
        let ticket = ticket.recv().await.unwrap();
        tokio::join!(join(peer(&ticket, "left")), join(peer(&ticket, "right")))
    };
    let both = async { tokio::join!(conduct(&job, options, &mut reader), peers) };
    let (ended, (left, right)) = tokio::time::timeout(PATIENCE, both).await.expect("stuck");
    let Err(NodeError::Run(reason)) = ended else { panic!("{ended:?}") };
    assert!(left.is_err() && right.is_err(), "both are told that the run has failed");
    (reader, reason)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_operator_that_overflows_is_named_and_stands_in_the_error() {
    let (reader, reason) = diverge("1e30").await;
    let [(step, line)] = &reader.poisoned[..] else { panic!("one line, not one a step: {:?}", reader.poisoned) };
    // The passes in flight when the first step was skipped were not inspected.
    assert!(reader.skipped.contains(step) && reader.skipped[0] < *step, "{:?}", reader.skipped);
    assert!(line.contains("made the first number that is not finite: the result of "), "{line}");
    assert!(line.contains(" in forward of micro-batch "), "{line}");
    assert!(reason.ends_with(line.as_str()), "{reason}");
    assert_eq!(reader.skipped.len(), 20);
}

/// The update itself overflows, so the parameters are not finite before any operator has run.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_parameter_that_is_not_finite_is_named() {
    let (reader, reason) = diverge("1e200").await;
    let [(_, line)] = &reader.poisoned[..] else { panic!("{:?}", reader.poisoned) };
    assert!(line.contains(" has ") && line.contains("was not finite before the step"), "{line}");
    assert!(reason.ends_with(line.as_str()), "{reason}");
}
