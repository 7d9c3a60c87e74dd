//! A run whose members say what a test has them say.

use std::collections::VecDeque;
use std::sync::Arc;

use fusionllm_graph::ops::AdamwStep;
use fusionllm_program::{Instruction, LearningRate, Optimizer, Poison, Program};
use fusionllm_protocol::{
    Action, Admission, Arrival, ComputeCommand, ExpectedPeers, ExpectedReports, Farewell, Formation, FromPeer,
    Heartbeat, Hello, Invitation, MemberId, Notice, PassReport, Past, Roster, Run, RunOptions, RunPhase, RunSettings,
    Standing, TicketRole, ToPeer, TrainingProgress, VERSION, share_of,
};

use super::programs;

const OPTIMIZER: Optimizer = Optimizer::Adamw(AdamwStep { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 });
pub(crate) const PEERS: [u8; 16] = [7; 16];
pub(crate) const OWNERS: [u8; 16] = [9; 16];

/// A run, its time, and what happened since it was last asked.
pub(crate) struct Stage {
    pub(crate) run: Run,
    pub(crate) options: RunOptions,
    pub(crate) now: f64,
    pub(crate) actions: Vec<Action>,
    /// The training programs of the generation.
    pub(crate) programs: Vec<Program>,
    /// The passes that were issued and not carried out, and whether they are inspected.
    pub(crate) issued: VecDeque<(u64, bool)>,
    /// The steps of the passes that were issued, counted from 0.
    pub(crate) fed: Vec<u64>,
    /// The micro-batch's share of the loss.
    pub(crate) weight: f64,
}

/// The numbers that a peer sends in a step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Said {
    pub(crate) loss: f64,
    pub(crate) squared_norm: f64,
    /// The peer's finding, only in a step that is inspected.
    pub(crate) poison: Option<Poison>,
}

pub(crate) fn hello(m: usize, process: u64) -> Hello {
    Hello {
        version: VERSION,
        secret: PEERS,
        process,
        name: format!("m{m}"),
        backend: "b".into(),
        device: "d".into(),
        slow_bf16: false,
        processor: None,
        addr: Vec::new(),
    }
}

impl Stage {
    /// A run that waits for this many members.
    pub(crate) fn new(wanted: usize, ticket: Invitation) -> Self {
        let settings = RunSettings {
            version: 1,
            start: TrainingProgress::default(),
            steps: 60,
            micro_batches: 1,
            eval: None,
            checkpoint: Some(0),
            checkpoints_under_way: 1,
            learning_rate: LearningRate { base: 1.0, warmup: 0, cosine_until: None, min: 0.0 },
            clip: None,
            window: 1,
            passes_before: 0,
        };
        let mut admission = Admission::new(None);
        admission.invite(ticket).unwrap();
        admission.invite(Invitation::new(TicketRole::Owner, OWNERS)).unwrap();
        let roster = Roster::new(ExpectedPeers::Any(wanted), admission);
        let options = RunOptions { settings, measured: false, programs: Arc::default(), copies: true };
        Self {
            run: Run::new(options.clone(), roster),
            options,
            now: 0.0,
            actions: Vec::new(),
            programs: Vec::new(),
            issued: VecDeque::new(),
            fed: Vec::new(),
            weight: 1.0,
        }
    }

    /// A run of three peers, of which all but the third are ready.
    pub(crate) fn loading() -> Self {
        Self::load(Self::new(3, Invitation::new(TicketRole::Peer, PEERS)))
    }

    fn load(mut stage: Self) -> Self {
        for m in 0..3 {
            stage.join(m, 0).unwrap();
        }
        stage.say(0, FromPeer::Ready { generation: 1 });
        stage.say(1, FromPeer::Ready { generation: 1 });
        assert_eq!(stage.run.status(stage.now).phase, RunPhase::Loading);
        stage
    }

    pub(crate) fn training() -> Self {
        Self::start(Self::loading())
    }

    /// A run of three peers that train, and whose gradients are clipped at this norm.
    pub(crate) fn clipping(norm: f64) -> Self {
        let mut stage = Self::new(3, Invitation::new(TicketRole::Peer, PEERS));
        stage.options.settings.clip = Some(norm);
        stage.run = Run::new(stage.options.clone(), Roster::new(ExpectedPeers::Any(3), PEERS));
        Self::start(Self::load(stage))
    }

    fn start(mut stage: Self) -> Self {
        stage.say(2, FromPeer::Ready { generation: 1 });
        assert_eq!(stage.run.status(stage.now).phase, RunPhase::Training);
        stage.actions.clear();
        stage
    }

    /// Kills the broker, and lets another one go on from the state that it wrote.
    pub(crate) fn kill_broker(&mut self, past: &Past) {
        let (state, atlas) = (self.run.state(), self.run.atlas().clone());
        let roster = Roster::new(ExpectedPeers::Any(3), state.admission().clone());
        self.run = Run::restore(self.options.clone(), roster, state, atlas, past);
        self.now = 0.0;
    }

    pub(crate) fn join(&mut self, m: usize, process: u64) -> Result<MemberId, String> {
        let arrival = Arrival { identity: [m as u8; 32], from: None, unix_s: self.now as u64 };
        let (member, actions) = self.run.join(arrival, hello(m, process), self.now)?;
        self.carry_out(actions);
        Ok(member)
    }

    pub(crate) fn say(&mut self, m: u32, message: FromPeer) {
        let actions = self.run.message(MemberId(m), message, self.now);
        self.carry_out(actions);
    }

    /// Passes time, in which these members send heartbeats without progress.
    pub(crate) fn pass(&mut self, seconds: f64, alive: &[u32]) {
        let end = self.now + seconds;
        while self.now < end {
            self.now += 0.5;
            for m in alive {
                self.say(*m, FromPeer::Heartbeat(Heartbeat { generation: 1, progress: 1, ..Heartbeat::default() }));
            }
            let actions = self.run.tick(self.now);
            self.carry_out(actions);
        }
    }

    /// Answers requests for plans, and keeps all other actions.
    pub(crate) fn carry_out(&mut self, actions: Vec<Action>) {
        for action in actions {
            if let Action::Send(MemberId(to), ToPeer::Compute(ComputeCommand::Run { pass, inspect, .. })) = action
                && self.run.peers().first() == Some(&MemberId(to))
            {
                self.issued.push_back((pass, inspect));
            }
            if let Action::Feed(pass, batch) = action {
                self.run.set_weights(pass, vec![self.weight], vec![0.5]);
                self.fed.push(batch.step());
            }
            let Action::Plan { members, .. } = &action else {
                self.actions.push(action);
                continue;
            };
            let programs = programs(members.len(), 1);
            (self.programs, self.issued) = (programs.iter().map(|(train, _)| train.clone()).collect(), VecDeque::new());
            let share = |(train, _)| Arc::new(share_of(train, OPTIMIZER).into_keys().collect());
            let formation = Formation {
                predicted_compute_s: Vec::new(),
                cluster: None,
                expected: programs.iter().map(|(train, eval)| ExpectedReports::new(train, eval)).collect(),
                shares: programs.iter().map(|(train, eval)| share((train, eval))).collect(),
                share_bytes: vec![64; members.len()],
                version: 1,
                micro_batches: 1,
                eval_passes: 2,
                predicted_step_s: Some(0.1),
                move_s: 0.0,
                members: members.clone(),
            };
            let actions = self.run.planned(formation, self.now);
            self.carry_out(actions);
        }
    }

    /// All peers are ready for the generation that was assigned last.
    pub(crate) fn all_ready(&mut self) {
        let generation = self.run.status(self.now).generation;
        for member in self.run.peers().to_vec() {
            self.say(member.0, FromPeer::Ready { generation });
        }
    }

    /// Carries out the next pass. `lie` changes the numbers that peers send in an honest step. Returns whether the pass
    /// was inspected.
    pub(crate) fn step(&mut self, mut lie: impl FnMut(u32, &mut Said)) -> bool {
        let (pass, inspected) = self.issued.pop_front().unwrap();
        self.now += 0.1;
        let peers: Vec<u32> = self.run.peers().iter().map(|m| m.0).collect();
        let said = peers.iter().map(|peer| {
            let mut said = Said { loss: 2.0, squared_norm: 4.0, poison: None };
            lie(*peer, &mut said);
            said
        });
        let said: Vec<Said> = said.collect();
        for ((m, said), program) in peers.iter().zip(&said).zip(self.programs.clone()) {
            for i in &program.instructions {
                if let Instruction::Report { report, micro_batch, .. } = *i {
                    self.say(*m, FromPeer::Report { pass, report, micro_batch, value: said.loss });
                }
            }
            let squared_norms = program.owned().map(|(parameter, _)| (parameter, said.squared_norm)).collect();
            self.say(*m, FromPeer::Norms { pass, squared_norms });
        }
        for (m, said) in peers.iter().zip(said) {
            let poison = said.poison.filter(|_| inspected);
            self.say(*m, FromPeer::PassDone { pass, report: PassReport { poison, ..PassReport::default() } });
        }
        inspected
    }

    /// The reason why this member is gone, as people read it.
    pub(crate) fn lost(&self, m: u32) -> Option<&str> {
        self.actions.iter().rev().find_map(|a| match a {
            Action::Notice(Notice::Lost { member, reason, .. }) if member.0 == m => Some(reason.as_str()),
            _ => None,
        })
    }

    /// The last message that this member is told.
    pub(crate) fn stopped(&self, m: u32) -> Option<&Farewell> {
        self.actions.iter().rev().find_map(|a| match a {
            Action::Send(MemberId(to), ToPeer::Stop(farewell)) if *to == m => Some(farewell),
            _ => None,
        })
    }

    pub(crate) fn standing(&self, m: u32) -> Standing {
        self.run.roster().get(MemberId(m)).unwrap().standing
    }

    /// The run goes on with these peers.
    pub(crate) fn goes_on_with(&self, peers: &[u32]) {
        let peers: Vec<MemberId> = peers.iter().map(|m| MemberId(*m)).collect();
        assert_eq!(self.run.peers(), peers, "{:?}", self.actions);
    }
}
