//! Runs whose numbers are not finite, with a real broker and two peers over loopback. People read which operator made
//! the number, and nobody is put out.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use fusionllm_events::Event;
use fusionllm_graph::{DType, HostTensor};
use fusionllm_node::{BrokerOptions, JoinOptions, NodeError, Observer, Peers, conduct, join};
use fusionllm_transport::Ticket;
use fusionllm_workspace::config::Job;
use fusionllm_workspace::run_dir::Summary;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

/// Nothing here takes longer, even on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// The events that people read.
struct Reader {
    tickets: UnboundedSender<Ticket>,
    skipped: Vec<u64>,
    poisoned: Vec<(u64, String)>,
    /// How often steps were skipped, and of how many.
    skipping: Vec<(u64, u64)>,
    lost: Vec<String>,
    summary: Option<Summary>,
}

impl Observer for Reader {
    fn event(&mut self, event: &Event) {
        match event {
            Event::Step(metrics) if metrics.skipped => self.skipped.push(metrics.step),
            Event::Poisoned { peer, step, what, advice } => {
                self.poisoned.push((*step, format!("{peer:?} {what}; {advice}")));
            }
            Event::Skipping { skipped, of, .. } => self.skipping.push((*skipped, *of)),
            Event::Lost { peer, reason, .. } => self.lost.push(format!("{peer}: {reason}")),
            _ => {}
        }
    }

    fn invite(&mut self, ticket: &Ticket) {
        self.tickets.send(ticket.clone()).unwrap();
    }

    fn finished(&mut self, summary: &Summary) {
        self.summary = Some(summary.clone());
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
    let (reader, error) = failed(&job).await;
    let NodeError::Run(reason) = error else { panic!("{error:?}") };
    (reader, reason)
}

/// Conducts a run of two peers to its bad end.
async fn failed(job: &Job) -> (Reader, NodeError) {
    let (reader, ended) = ended(job).await;
    (reader, ended.unwrap_err())
}

/// Conducts a run of two peers to its end.
async fn ended(job: &Job) -> (Reader, Result<(), NodeError>) {
    let root = tempfile::tempdir().unwrap();
    let options = BrokerOptions {
        listen: Some(([127, 0, 0, 1], 0).into()),
        directory: Some(root.path().join("run")),
        ..BrokerOptions::new(Peers::Joiners(2))
    };
    let (tickets, mut ticket) = unbounded_channel();
    let mut reader = Reader {
        tickets,
        skipped: Vec::new(),
        poisoned: Vec::new(),
        skipping: Vec::new(),
        lost: Vec::new(),
        summary: None,
    };
    let peers = async {
        let ticket = ticket.recv().await.unwrap();
        tokio::join!(join(peer(&ticket, "left")), join(peer(&ticket, "right")))
    };
    let both = async { tokio::join!(conduct(job, options, &mut reader), peers) };
    let (ended, (left, right)) = tokio::time::timeout(PATIENCE, both).await.expect("stuck");
    // A run that came to its end has told its peers so.
    assert_eq!(left.is_err() && right.is_err(), !matches!(ended, Ok(_) | Err(NodeError::NothingApplied { .. })));
    assert_eq!(reader.lost, [""; 0], "nobody is put out");
    (reader, ended.map(drop))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_operator_that_overflows_is_named_and_stands_in_the_error() {
    let (reader, reason) = diverge("1e30").await;
    let [(step, line)] = &reader.poisoned[..] else { panic!("one line, not one a step: {:?}", reader.poisoned) };
    // It was looked at again.
    assert_eq!(reader.skipped[0], *step, "{:?}", reader.skipped);
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

/// The job of a model that divides each row by its sum, on 24 rows of which these hold zeros.
fn shares(dir: &Path, zeros: &[usize], steps: u64) -> Job {
    let numbers: Vec<f32> = (0..24 * 8).map(|i| if zeros.contains(&(i / 8)) { 0.0 } else { (i % 7) as f32 }).collect();
    let classes: Vec<i64> = (0..24).map(|i| i % 3).collect();
    let tensors = BTreeMap::from([
        ("x", HostTensor::from_f32([24, 8], &numbers).unwrap()),
        ("y", HostTensor::from_i64([24], &classes).unwrap()),
    ]);
    write_tensors(&dir.join("rows.safetensors"), &tensors);
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/zoo/shares.pt2");
    let text = format!(
        "[model]\nfile = {model:?}\n[data]\nkind = \"tensors\"\nfiles = [\"rows.safetensors\"]\nvalidation = 0.0\n\
         [eval]\nevery = 0\n[train]\nsteps = {steps}\nbatch = 4\nmicro_batch = 2\n[plan]\nscheduler = \"equal-compute\"\n"
    );
    Job::parse("job.toml", &text, dir, &[]).unwrap()
}

/// Regression: three machines were put out in turn for a 0 / 0 of the model's own, and the run waited for others for
/// ever. One row of the data is zero, so each sixth step is skipped. Its batch is looked at again, and the operator is
/// named.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_quotient_of_zeros_from_the_data_is_named_and_nobodys_fault() {
    let dir = tempfile::tempdir().unwrap();
    let (reader, ended) = ended(&shares(dir.path(), &[5], 60)).await;
    ended.unwrap();
    let Reader { skipped, poisoned, skipping, summary, .. } = reader;
    assert_eq!(skipped.len(), 10, "{skipped:?}");
    let (step, line) = &poisoned[0];
    assert_eq!(*step, skipped[0], "the first one is explained, although the step after it is fine");
    assert!(line.contains("made the first number that is not finite: the result of div "), "{line}");
    assert!(line.contains(" in forward of micro-batch ") && line.contains("(its samples: "), "{line}");
    assert!(line.contains("/rows.safetensors, row 5"), "{line}");
    assert!(line.ends_with(
        "; steps beside it are fine, so look at the data of this step, and at what the model makes of them"
    ));
    assert_eq!(skipping, [(8, skipped[7])]);
    let summary = summary.unwrap();
    assert_eq!((summary.steps, summary.skipped_steps), (60, 10));
    assert!(summary.skipped_because.as_ref().is_some_and(|why| why.contains("the result of div ")), "{summary:?}");
    assert!(summary.loss_last.is_none_or(f64::is_finite));
}

/// All rows are zero, so no step is applied, and the run fails after 20 of them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_that_always_divides_by_zero_ends_the_run_and_not_its_members() {
    let dir = tempfile::tempdir().unwrap();
    let all: Vec<usize> = (0..24).collect();
    let (reader, error) = failed(&shares(dir.path(), &all, 60)).await;
    assert_eq!(reader.skipped.len(), 20);
    let reason = error.to_string();
    assert!(reason.contains("not finite in 20 consecutive steps up to step 20; "), "{reason}");
    assert!(reason.contains("the result of div "), "{reason}");
}

/// A run that ends while all its steps are skipped has failed, although earlier ones were applied.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_that_ends_without_learning_fails() {
    let dir = tempfile::tempdir().unwrap();
    let mut job = shares(dir.path(), &[], 14);
    // The first updates make the parameters overflow.
    job.train.optimizer.lr = 1e38;
    job.train.optimizer.warmup = 0;
    let (reader, error) = failed(&job).await;
    assert!(reader.skipped.len() >= 10 && reader.skipped.len() < 14, "{:?}", reader.skipped);
    let NodeError::NothingApplied { message, hint } = &error else { panic!("{error:?}") };
    assert!(message.starts_with("the run ended without learning: the loss or a gradient was not finite in the last "));
    assert!(message.contains(" steps; \"") && !hint.is_empty(), "{message}, {hint}");
}

/// Regression: a run of which every step was skipped reported success, and advised a lower learning rate.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_that_applies_no_step_fails_and_names_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    let images = vec![f32::NAN; 8 * 3 * 32 * 32];
    let tensors = BTreeMap::from([
        ("x", HostTensor::from_f32([8, 3, 32, 32], &images).unwrap()),
        ("y", HostTensor::from_i64([8], &[0; 8]).unwrap()),
    ]);
    write_tensors(&dir.path().join("rows.safetensors"), &tensors);
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/zoo/hf_vit.pt2");
    let text = format!(
        "[model]\nfile = {model:?}\n[data]\nkind = \"tensors\"\nfiles = [\"rows.safetensors\"]\n\
         [train]\nsteps = 8\nbatch = 4\nmicro_batch = 2\n[plan]\nscheduler = \"equal-compute\"\n"
    );
    let job = Job::parse("job.toml", &text, dir.path(), &[]).unwrap();
    let (reader, error) = failed(&job).await;
    assert_eq!(reader.skipped.len(), 8);
    let NodeError::NothingApplied { message, hint } = &error else { panic!("{error:?}") };
    assert!(message.starts_with("no step was applied: "), "{message}");
    assert!(message.contains("not finite in any of 8 steps"), "{message}");
    assert!(message.contains("got an input that is not finite"), "{message}");
    assert_eq!(hint, "look for such numbers in the data");
    assert!(message.contains("/rows.safetensors, row ") && message.contains(": `x` holds NaN)"), "{message}");
}

/// Writes a safetensors file.
fn write_tensors(path: &Path, tensors: &BTreeMap<&str, HostTensor>) {
    let mut entries = serde_json::Map::new();
    let mut data = Vec::new();
    for (name, tensor) in tensors {
        let begin = data.len();
        data.extend_from_slice(tensor.bytes());
        let dtype = if tensor.dtype() == DType::F32 { "F32" } else { "I64" };
        let entry = serde_json::json!({"dtype": dtype, "shape": tensor.shape(), "data_offsets": [begin, data.len()]});
        entries.insert((*name).to_owned(), entry);
    }
    let header = serde_json::Value::Object(entries).to_string();
    let length = (header.len() as u64).to_le_bytes();
    std::fs::write(path, [&length[..], header.as_bytes(), &data].concat()).unwrap();
}
