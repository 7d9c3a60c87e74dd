use fusionllm_program::{Optimizer, PeerId, Program};

use super::options::{PlanOptions, Workload};
use super::prepare::{PreparedPlan, prepare, with_codecs};
use crate::compile::compile;
use crate::cost::Cluster;
use crate::error::PlanError;
use crate::offload::{Drafts, MEMORY_SHARES, Offloaded, most_waiting, offload, sentence};
use crate::plan::Plan;
use crate::simulate::Simulation;

/// Micro-batches of a draft beside those that wait for backward at once.
const EXTRA_MICRO_BATCHES: u32 = 2;

/// A plan for known machines, ready to run.
#[derive(Debug, Clone, PartialEq)]
pub struct Scheduled {
    /// The plan. Its peers are the devices it uses, in the cluster's order.
    pub plan: Plan,
    /// By peer of the plan: its device in the cluster that was planned for.
    pub devices: Vec<PeerId>,
    /// The cluster of these devices. Device `i` runs peer `i`.
    pub cluster: Cluster,
    /// Index of the workload that the plan is for.
    pub workload: usize,
    /// The training Programs of the plan, one per peer.
    pub programs: Vec<Program>,
    /// The predicted step.
    pub simulation: Simulation,
    /// Seconds of a step by [`Problem::evaluate`](crate::search::Problem::evaluate). `None` from the baselines.
    pub estimate_s: Option<f64>,
    /// The least cost that [`Problem::evaluate`](crate::search::Problem::evaluate) gives any plan, for any workload,
    /// schedule and number of replicas. It does not bound the simulated step. See [`crate::search::lower_bound`].
    pub lower_bound_s: f64,
    /// Sentences for the user, such as which devices are not used and why.
    pub notes: Vec<String>,
}

impl Scheduled {
    /// Gives the plan's links the codecs that a rule chooses.
    pub(super) fn compress(&mut self, workload: Workload<'_>, options: &PlanOptions) -> Result<(), PlanError> {
        let Self { plan, programs, cluster, .. } = self;
        let PlanOptions { compression, optimizer, .. } = *options;
        // Programs differ in the gradients that are masked, too.
        let masks_alike = plan.compression.compressor.shares_masks() == compression.compressor.shares_masks();
        let (plan, cluster) = (plan.clone(), Some(&*cluster));
        let PreparedPlan { plan, programs, simulation } = match masks_alike {
            true => with_codecs(plan, std::mem::take(programs), cluster, compression, optimizer)?.0,
            false => prepare(plan, workload, cluster, compression, optimizer)?,
        };
        (self.plan, self.programs) = (plan, programs);
        if let Some(simulation) = simulation {
            self.simulation = simulation;
        }
        Ok(())
    }

    /// Whether each device has enough memory.
    pub(super) fn fits(&self) -> bool {
        self.simulation.peers.iter().zip(self.cluster.devices()).all(|(p, d)| p.peak_bytes <= d.memory)
    }

    /// Lets the peers that lack memory offload tensors, if every peer then needs no more than a share of its memory. The
    /// shares are tried in order, and if none is enough, nothing changes.
    pub(super) fn offload(
        &mut self,
        workload: Workload<'_>,
        optimizer: Optimizer,
        shares: &[f64],
    ) -> Result<(), PlanError> {
        if self.fits() {
            return Ok(());
        }
        let drafts = self.drafts(workload)?;
        let mut tries = shares
            .iter()
            .map(|share| offload(&self.programs, &drafts, &self.simulation, &self.cluster, optimizer, *share));
        let offloaded = tries.find_map(Result::transpose).transpose()?;
        let Some(Offloaded { choices, programs, simulation }) = offloaded else { return Ok(()) };
        let sentences = self.plan.peers.iter().zip(&programs).filter_map(|(name, program)| sentence(name, program));
        self.notes.extend(sentences);
        (self.plan.offload, self.programs, self.simulation) = (choices, programs, simulation);
        let full = self.simulation.peers.iter().zip(self.cluster.devices());
        let full = full.filter(|(load, device)| load.peak_bytes as f64 > MEMORY_SHARES[0] * device.memory as f64);
        self.notes.extend(full.map(|(load, device)| {
            let percent = 100.0 * load.peak_bytes as f64 / device.memory as f64;
            format!(
                "{} is expected to need {percent:.0} % of its memory, so little is left for what is not predicted",
                device.name
            )
        }));
        Ok(())
    }

    /// The Programs of a step with as few micro-batches as wait for backward at once, and some more, in which the step
    /// has reached its steady state.
    fn drafts(&self, workload: Workload<'_>) -> Result<Drafts, PlanError> {
        let waiting = self.programs.iter().map(most_waiting).max().unwrap_or(1);
        let turns = self.plan.stages.iter().map(|stage| stage.peers.len() as u32).max().unwrap_or(1);
        let few = (waiting + EXTRA_MICRO_BATCHES).saturating_mul(turns);
        if few >= self.plan.micro_batches {
            return Ok(Drafts { programs: self.programs.clone(), repeats: 1.0 });
        }
        let plan = Plan { micro_batches: few, ..self.plan.clone() };
        let programs = compile(&plan, workload.forward, workload.train)?;
        Ok(Drafts { programs, repeats: f64::from(self.plan.micro_batches) / f64::from(few) })
    }

    /// Plans are compared by whether some device lacks memory, then by the seconds of a step.
    pub(super) fn key(&self, step_factor: f64) -> (bool, f64) {
        (!self.fits(), step_factor * self.simulation.step_s)
    }
}
