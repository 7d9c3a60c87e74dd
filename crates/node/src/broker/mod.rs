//! The broker's driver: gathers peers, plans, streams data, and carries out what the state machine asks for.

mod assign;
mod codec_updates;
mod conductor;
mod contents;
mod course;
mod entry;
mod evaluation;
mod feeds;
mod generation;
mod links;
mod local;
mod notices;
mod observer;
mod options;
mod owner;
mod planner;
mod records;
mod shelves;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use conductor::Conductor;
use course::Course;
use entry::{Incoming, KnownKeys, Visitors, accept, admission, open_endpoint, renewed, write_tickets};
use feeds::Feeds;
use fusionllm_data::Dataset;
use fusionllm_events::Event;
use fusionllm_graph::Advice;
use fusionllm_plan::Plan;
use fusionllm_program::PASSES_IN_FLIGHT;
use fusionllm_protocol::{EvalSchedule, Roster, Run, RunOptions, RunSettings, TrainingProgress};
use fusionllm_transport::{Endpoint, EndpointOptions, PeerKey, Relay};
use fusionllm_workbench::model::{Origin, models};
use fusionllm_workspace::config::{Choice, Job, Network, Train};
use fusionllm_workspace::run_dir::GRAPH;
use links::{Links, call_back};
use local::{Children, LocalPeers};
pub use observer::Observer;
pub use options::{BrokerOptions, Entry, LocalPeer, Peers};
use owner::MAX_OWNERS;
use planner::PlannerThread;
pub use records::Resume;
use records::{Identity, Left, Store, Subject, check, checkpoints_under_way, read_atlas};
#[cfg(feature = "decoders")]
pub(crate) use records::{reads_key, reads_state};
use shelves::Shelves;
use tokio::sync::{Semaphore, mpsc};

use crate::NodeError;
use crate::keys::allowed;
use crate::machine::interrupts::{self, Interrupts};
use crate::web::{Listening, Page, Site};

/// Conducts a run from the first joiner to the last step.
///
/// # Errors
///
/// The job, the data, the plan and the checkpoint do not fit each other; a peer is lost or fails; the disk fails; or
/// the user stops the run before it began.
pub async fn conduct(
    job: &Job,
    options: BrokerOptions,
    observer: &mut dyn Observer,
) -> Result<TrainingProgress, NodeError> {
    let BrokerOptions { peers, listen, advertise, plan, known, directory, resume, entry, dashboard } = options;
    let (mut job, plan) = (job.clone(), plan.map(Plan::without_idle));
    settle_micro_batch(&mut job, plan.as_ref(), resume.as_ref())?;
    // Only joiners outlive their broker.
    let joiners = matches!(peers, Peers::Joiners(_));
    let parts = resume.map(|r| r.parts(joiners && directory.is_none())).transpose()?;
    let (resume, left) = parts.unwrap_or_default();
    // All input is checked before anybody waits and before anything is written.
    let data = Dataset::open(&job.data, job.train.seed)?;
    let models = models(&mut job)?;
    let model = &models[0];
    let (origin, notes) = Origin::open(&job, model, resume.is_none())?;
    let frozen = origin.digest_of_frozen(&model.forward)?;
    if let Some(checkpoint) = &resume {
        check(checkpoint, &job, &data, model, frozen.as_deref())?;
    }
    let feeds = Feeds::new(model, &data)?;
    let mut early = Vec::new();
    let mut note = |observer: &mut dyn Observer, text: String| {
        let event = Event::note(text);
        observer.event(&event);
        early.push(event);
    };
    if let Some(text) = model.doubt(job.train.batch) {
        note(observer, text);
    }
    let allowed = entry.allow.as_deref().map(allowed).transpose()?;
    notes.into_iter().for_each(|text| note(observer, text));
    let done = resume.as_ref().map_or(0, |checkpoint| checkpoint.state().step);
    lowest_rate(&job.train, done).into_iter().for_each(|text| note(observer, text));
    let subject = joiners.then(|| Subject::new(&job, &data, model, frozen.clone()));
    if let (Some(left), Some(subject)) = (&left, &subject) {
        left.check(subject, &job.train)?;
    }
    let under_way = checkpoints_under_way(model, job.train.optimizer.update_rule());
    let course = Course::new(&job, models, plan, &peers, known)?;
    if let Course::Start(planned) = &course {
        job = planned.job.clone();
    }
    let page = match Listening::open(dashboard).await?.transpose() {
        Ok(page) => page,
        Err(text) => {
            note(observer, text);
            None
        }
    };
    let (events, incoming) = mpsc::unbounded_channel();
    let keeper_events = {
        let events = events.clone();
        move |event| drop(events.send(Incoming::Keeper(event)))
    };
    let mut store = Store::open(directory.as_deref(), resume, left.as_ref(), subject, frozen, &job, keeper_events)?;
    origin.keep_graph(&store.directory().join(GRAPH)).inspect_err(|_| store.discard_unbegun())?;
    store.take_notes().into_iter().for_each(|text| note(observer, text));
    // Processes of this machine need no relay.
    let relay = if joiners { job.network.relay.clone() } else { Relay::None };
    let pinned = matches!(peers, Peers::Emulated { .. });
    let options = EndpointOptions { listen, advertise, relay, pinned, ..EndpointOptions::new() };
    let result = match open_endpoint(options, &mut store, observer).await {
        Ok((endpoint, identity)) => {
            let opened = Event::Opened { directory: store.directory().display().to_string() };
            observer.event(&opened);
            observer.opened(store.directory());
            early.into_iter().chain([opened]).for_each(|event| store.tell(event));
            let page = start_page(page, &mut store, &events, observer);
            let of_run = (endpoint.clone(), identity);
            let origin = Arc::new(origin);
            let site = page.site().clone();
            let preparation = Preparation { job, data, under_way, feeds, origin, of_run, entry, allowed, left, site };
            let result = preparation.conduct(&peers, course, &mut store, (events, incoming), observer).await;
            page.stop().await;
            // The file leads nowhere, but the run has its result.
            let _ = store.remove_dashboard();
            let forgotten = if is_suspended(&result) { Ok(()) } else { store.forget_state() };
            let result = forgotten.and(result).map_err(|e| store.with_safe_step(e));
            let reason = result.as_ref().err().map(Advice::one_line).unwrap_or_default();
            endpoint.close(&reason).await;
            result
        }
        Err(e) => Err(e),
    };
    if result.is_err() {
        store.discard_unbegun();
    }
    result
}

/// The run's page is drawn for those who watch. If it is served, people are told where.
fn start_page(
    at: Option<Listening>,
    store: &mut Store,
    events: &mpsc::UnboundedSender<Incoming>,
    observer: &mut dyn Observer,
) -> Page {
    if let Some(url) = at.as_ref().map(Listening::url) {
        observer.dashboard(&url);
        if let Err(e) = store.write_dashboard(&url) {
            let event = Event::note(format!("other commands do not find the run's page: {}", e.one_line()));
            observer.event(&event);
            store.tell(event);
        }
    }
    let events = events.clone();
    // The run may be over.
    let ask = move |answer| drop(events.send(Incoming::Look(answer)));
    Page::start(store.board().clone(), Box::new(ask), at)
}

/// Whether members keep what they have, for a broker that goes on with the run.
fn is_suspended(result: &Result<TrainingProgress, NodeError>) -> bool {
    matches!(result, Err(NodeError::Suspended(_)))
}

/// Replaces `micro_batch = "auto"` by the size that the given plan or the resumed run uses, if there is one.
fn settle_micro_batch(job: &mut Job, plan: Option<&Plan>, resume: Option<&Resume>) -> Result<(), NodeError> {
    if !job.train.micro_batch.open {
        return Ok(());
    }
    let of_run = resume.map(|r| Network::at(r.directory())).transpose();
    let of_run = of_run?.map(|n| n.micro_batch);
    let of_plan = plan.and_then(|p| job.train.batch.checked_div(p.micro_batches as usize));
    let divides = |size: &usize| *size > 0 && job.train.batch.is_multiple_of(*size);
    if let Some(size) = of_plan.or(of_run).filter(divides) {
        job.train.micro_batch = Choice::made(size);
    }
    Ok(())
}

/// A sentence about a run that goes on after the decay of its learning rate, from step `done` on.
fn lowest_rate(train: &Train, done: u64) -> Option<String> {
    let rate = train.optimizer.learning_rate();
    let end = rate.falls_until().filter(|end| *end < train.stop)?;
    // The last digits of a product such as 0.1 x 3e-4 say nothing.
    let min = format!("{:.3e}", rate.min).parse().unwrap_or(rate.min);
    Some(format!(
        "from step {} to {}, the learning rate stays at its minimum of {min:e}: its decay ends at step {end} \
         (train.optimizer.decay_steps)",
        end.max(done) + 1,
        train.stop
    ))
}

/// The parts of a run that exist before its first joiner.
struct Preparation {
    job: Job,
    data: Dataset,
    /// The number of checkpoints that may be under way at once.
    under_way: usize,
    feeds: Feeds,
    origin: Arc<Origin>,
    /// The run's endpoint, and the broker's identity.
    of_run: (Endpoint, Identity),
    entry: Entry,
    allowed: Option<BTreeSet<PeerKey>>,
    /// The state that an earlier broker left.
    left: Option<Left>,
    site: Arc<Site>,
}

impl Preparation {
    async fn conduct(
        self,
        peers: &Peers,
        course: Course,
        store: &mut Store,
        (events, mut incoming): (mpsc::UnboundedSender<Incoming>, mpsc::UnboundedReceiver<Incoming>),
        observer: &mut dyn Observer,
    ) -> Result<TrainingProgress, NodeError> {
        let Self { job, data, under_way, feeds, origin, of_run, entry, allowed, left, site } = self;
        let (endpoint, identity) = of_run;
        let admission = match &left {
            Some(left) => renewed(left.run.admission(), &entry, allowed)?,
            None => admission(&identity, &entry, allowed)?,
        };
        let ticket = write_tickets(endpoint.addr(), &identity, &admission, store)?;
        let places = course.places();
        let wanted = places.count();
        let settings = settings(&job, &data, store.start(), under_way);
        let measured = matches!(course, Course::Measure { .. });
        let options =
            RunOptions { settings, measured, programs: course.samples(&job).into(), copies: job.checkpoint.copies };
        let roster = Roster::new(places, admission);
        let run = match left {
            Some(left) => {
                let past = left.past()?;
                Run::restore(options, roster, left.run, read_atlas(store.directory())?, &past)
            }
            None => Run::new(options, roster),
        };

        let known = KnownKeys::default();
        observer.invite(&ticket);
        let event = match run.has_begun() {
            true => Event::Continued { peers: run.awaited() },
            false => Event::Listening { wanted },
        };
        observer.event(&event);
        store.tell(event);
        match run.has_begun() {
            true => call_back(&endpoint, run.roster()),
            false => store.persist(wanted, run.state())?,
        }
        tokio::spawn(accept(endpoint, known.clone(), events.clone()));
        tokio::spawn({
            let events = events.clone();
            // The run may be over.
            interrupts::report(Interrupts::new()?, move |stop| drop(events.send(Incoming::Interrupt(stop))))
        });
        let planner = course.planner(&job, data.eval_samples())?;
        let LocalPeers { emulation, peers: local } = LocalPeers::new(peers, wanted, planner.testbed.clone(), &ticket)?;
        let children = Children::start(&local, Some(store.directory()), {
            let events = events.clone();
            move |reason| drop(events.send(Incoming::Child(reason)))
        })?;
        let mut conductor = Conductor {
            run,
            links: Links::default(),
            current: None,
            planner: PlannerThread::start(planner, {
                let events = events.clone();
                // The run may be over.
                move |plan| drop(events.send(Incoming::Planned(plan)))
            })?,
            proposal: None,
            data,
            feeds,
            origin,
            emulation,
            children: (!matches!(peers, Peers::Joiners(_))).then_some(local.len()),
            known,
            visitors: Visitors::new(),
            site,
            owners: Arc::new(Semaphore::new(MAX_OWNERS)),
            ticket,
            shelves: Shelves::default(),
            store,
            observer,
            events,
            clock: Instant::now(),
        };
        let result = conductor.conduct(&mut incoming).await;
        for reason in conductor.emulation.take().map(|e| e.shortfalls()).unwrap_or_default() {
            conductor.tell(Event::note(reason));
        }
        match &result {
            Ok(_) => children.finish().await,
            Err(e) => {
                if !is_suspended(&result) {
                    conductor.stop_all(&e.one_line());
                }
                // The endpoint stays open until every peer has read the reason.
                conductor.links.goodbye().await;
                children.stop().await;
            }
        }
        result
    }
}

/// The settings of every generation.
fn settings(job: &Job, data: &Dataset, start: TrainingProgress, under_way: usize) -> RunSettings {
    let evaluates = job.eval.every > 0 && data.eval_samples() > 0;
    RunSettings {
        version: 1,
        start,
        steps: job.train.stop,
        micro_batches: 1,
        // The plans say how many passes it takes.
        eval: evaluates.then_some(EvalSchedule { steps: job.eval.every, passes: 0 }),
        checkpoint: Some(job.checkpoint.every),
        checkpoints_under_way: under_way,
        learning_rate: job.train.optimizer.learning_rate(),
        clip: job.train.optimizer.clip_norm(),
        window: PASSES_IN_FLIGHT as u64,
        passes_before: 0,
    }
}
