//! The thread that makes plans, so that the broker's loop never waits for one.

use std::collections::BTreeMap;
use std::sync::{Arc, mpsc};

use fusionllm_plan::{Cluster, compile_forward};
use fusionllm_program::{PeerId, Program};
use fusionllm_protocol::{ExpectedReports, Formation, MemberId, share_of};
use fusionllm_workbench::WorkbenchError;
use fusionllm_workbench::model::Model;
use fusionllm_workbench::planning::{Planned, place, plan_blind, plan_for};
use fusionllm_workspace::config::{Choice, Job, Known};

use super::evaluation::HeldOut;
use crate::NodeError;

/// The cost of a new generation besides moving tensors: connecting, compiling and the first step, in seconds.
const REGROUP_S: f64 = 5.0;

/// Everything that plans are made from.
pub(super) struct Planner {
    pub(super) job: Job,
    /// The models that the planner chooses from. After the first plan, only its model is left.
    pub(super) models: Vec<Model>,
    /// A plan that is already made, for the first generation.
    pub(super) first: Option<Planned>,
    /// A given plan whose codecs follow the measured links, for the first generation.
    pub(super) given: Option<Planned>,
    /// The machines, if they are known without measuring.
    pub(super) testbed: Option<Cluster>,
    /// The machines and links that the user describes. They count more than measurements.
    pub(super) known: Option<Known>,
    /// The number of held-out samples.
    pub(super) held_out: usize,
}

/// A request for a plan.
pub(super) struct Request {
    /// The members, with their names.
    pub(super) members: Vec<(MemberId, String)>,
    /// The members' machines and links, if they are measured.
    pub(super) cluster: Option<Cluster>,
    /// Sentences about them.
    pub(super) notes: Vec<String>,
}

/// A plan for members, with everything that a generation needs.
pub(super) struct Proposal {
    pub(super) planned: Planned,
    /// The evaluation programs, one per peer.
    pub(super) eval: Vec<Program>,
    pub(super) formation: Formation,
}

/// A handle on the thread, which ends with it.
pub(super) struct PlannerThread {
    requests: mpsc::Sender<Request>,
}

impl PlannerThread {
    /// Starts the thread. It answers the requests in order, to `done`.
    pub(super) fn start(
        mut planner: Planner,
        done: impl Fn(Result<Box<Proposal>, NodeError>) + Send + 'static,
    ) -> Result<Self, NodeError> {
        let (requests, queue) = mpsc::channel::<Request>();
        let work = move || {
            for request in queue {
                done(planner.propose(request).map(Box::new));
            }
        };
        let thread = std::thread::Builder::new().name("planner".into()).spawn(work);
        thread.map_err(|e| NodeError::State(format!("cannot start a thread: {e}")))?;
        Ok(Self { requests })
    }

    pub(super) fn request(&self, request: Request) {
        // The thread lives as long as this handle.
        let _ = self.requests.send(request);
    }
}

impl Planner {
    fn propose(&mut self, request: Request) -> Result<Proposal, NodeError> {
        let names: Vec<&str> = request.members.iter().map(|(_, name)| name.as_str()).collect();
        let (cluster, notes) = match (&self.known, request.cluster) {
            (Some(known), Some(measured)) => known.correct(&measured).map(|(cluster, notes)| (Some(cluster), notes))?,
            (_, cluster) => (cluster, Vec::new()),
        };
        let mut planned = self.plan(&names, cluster)?;
        planned.notes.extend(request.notes.into_iter().chain(notes));
        if !planned.named {
            // A small model may have work for some of the members only.
            let count = planned.plan.peers.len();
            planned.plan.peers = names.iter().take(count).map(|name| (*name).to_owned()).collect();
        }
        let id = |name: &String| request.members.iter().find(|(_, n)| n == name).map(|(id, _)| *id);
        let members: Option<Vec<MemberId>> = planned.plan.peers.iter().map(id).collect();
        let members = members.ok_or_else(|| NodeError::State("the plan names a peer that is not there".into()))?;
        let eval =
            compile_forward(&planned.plan, &planned.model.forward, &planned.model.eval, &planned.model.reports())?;
        // A run keeps its micro-batches, so that its losses do not depend on who takes part.
        self.job.train.micro_batch = Choice::made(planned.model.micro_batch);
        self.models.retain(|m| m.micro_batch == planned.model.micro_batch);
        let held_out = HeldOut::of(&planned.job, self.held_out, &planned.model);
        planned.notes.extend(held_out.note(&planned.job, self.held_out));
        let formation = formation(members, &planned, &eval, held_out);
        Ok(Proposal { planned, eval, formation })
    }

    fn plan(&mut self, names: &[&str], measured: Option<Cluster>) -> Result<Planned, WorkbenchError> {
        let covers = |p: &Planned| match p.named {
            true => p.plan.peers.iter().all(|name| names.contains(&name.as_str())),
            false => p.plan.peers.len() <= names.len(),
        };
        if let Some(first) = self.first.take().filter(covers) {
            return Ok(first);
        }
        let known = self.testbed.as_ref().map(|testbed| {
            let devices: Vec<PeerId> = names.iter().filter_map(|name| testbed.find(name)).collect();
            testbed.select(&devices)
        });
        let cluster = match known.transpose()? {
            Some(known) => Some(known),
            None => measured,
        };
        if let Some(given) = self.given.take().filter(covers) {
            return match &cluster {
                Some(cluster) => place(given, cluster)?.prepared(),
                None => given.prepared(),
            };
        }
        match cluster {
            Some(cluster) => plan_for(&self.job, self.models.clone(), &cluster),
            None => {
                let model = self.models.first().cloned();
                let model = model.ok_or_else(|| WorkbenchError::State("there is no model to plan for".into()))?;
                plan_blind(&self.job, model, names.len())?.prepared()
            }
        }
    }
}

fn formation(members: Vec<MemberId>, planned: &Planned, eval: &[Program], held_out: HeldOut) -> Formation {
    let optimizer = planned.job.train.optimizer.update_rule();
    let shares: Vec<BTreeMap<_, _>> = planned.programs.iter().map(|train| share_of(train, optimizer)).collect();
    let share_bytes: Vec<u64> =
        shares.iter().map(|share| share.values().map(|ty| ty.bytes() as u64).sum::<u64>()).collect();
    let expected = planned.programs.iter().zip(eval).map(|(train, eval)| ExpectedReports::new(train, eval)).collect();
    Formation {
        expected,
        version: planned.plan.version,
        micro_batches: planned.plan.micro_batches,
        eval_passes: held_out.passes(planned.plan.micro_batches),
        predicted_step_s: planned.predicted.as_ref().map(|p| p.step_s),
        predicted_compute_s: planned.predicted.iter().flat_map(|p| p.peers.iter().map(|l| l.compute_s)).collect(),
        cluster: planned.cluster.clone(),
        move_s: move_s(planned, &share_bytes),
        share_bytes,
        shares: shares.into_iter().map(|share| Arc::new(share.into_keys().collect())).collect(),
        members,
    }
}

/// Seconds until the peers of a plan have their shares, if each takes all of its share over its fastest link.
fn move_s(planned: &Planned, share_bytes: &[u64]) -> f64 {
    let Some(cluster) = &planned.cluster else { return REGROUP_S };
    let count = share_bytes.len() as u32;
    let seconds = (0..).zip(share_bytes).map(|(to, bytes)| {
        let others = (0..count).filter(|from| *from != to).map(PeerId).chain([PeerId::BROKER]);
        let rates = others.filter_map(|from| cluster.link(from, PeerId(to))).map(|l| l.bandwidth);
        *bytes as f64 / rates.fold(f64::MIN_POSITIVE, f64::max)
    });
    REGROUP_S + seconds.fold(0.0, f64::max)
}
