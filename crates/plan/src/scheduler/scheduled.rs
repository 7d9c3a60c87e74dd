use fusionllm_program::{Optimizer, PeerId, Program};

use super::options::{PlanOptions, Workload};
use super::prepare::{PreparedPlan, prepare};
use crate::cost::Cluster;
use crate::error::PlanError;
use crate::offload::{Offloaded, offload, sentence};
use crate::plan::Plan;
use crate::simulate::Simulation;

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
        let plan = self.plan.clone();
        let PreparedPlan { plan, programs, simulation } =
            prepare(plan, workload, Some(&self.cluster), options.compression, options.optimizer)?;
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

    /// Lets the peers that lack memory offload tensors, if every peer then fits into its memory. Otherwise nothing
    /// changes.
    pub(super) fn offload(&mut self, optimizer: Optimizer) -> Result<(), PlanError> {
        if self.fits() {
            return Ok(());
        }
        let Some(offloaded) = offload(&self.programs, &self.simulation, &self.cluster, optimizer)? else {
            return Ok(());
        };
        let Offloaded { choices, programs, simulation } = offloaded;
        let sentences = self.plan.peers.iter().zip(&programs).filter_map(|(name, program)| sentence(name, program));
        self.notes.extend(sentences);
        (self.plan.offload, self.programs, self.simulation) = (choices, programs, simulation);
        Ok(())
    }

    /// Plans are compared by whether some device lacks memory, then by the seconds of a step.
    pub(super) fn key(&self, step_factor: f64) -> (bool, f64) {
        (!self.fits(), step_factor * self.simulation.step_s)
    }
}
