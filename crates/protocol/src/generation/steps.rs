//! How the broker judges a step: the verdict on its norms, and the reports once all peers are done.

use std::collections::{BTreeMap, BTreeSet};

use fusionllm_events::Event;
use fusionllm_graph::ValueId;
use fusionllm_program::{PassKind, PeerId, Poison};

use super::pass::{Judgement, Pass};
use super::program_outline::{Sentence, When, remedy};
use super::{GenerationAction, StepRecord};
use super::{GenerationMachine, Outcome};
use crate::{Notice, ToPeer, TrainingProgress};

/// A run fails after this many consecutive steps that were skipped because they were not finite.
pub(super) const MAX_SKIPPED_STEPS: u32 = 20;

/// A peer is put out after this many inspected passes in a row in which its own findings contradict its numbers.
const MAX_CONTRADICTIONS: u32 = 3;

/// People are told how often steps are skipped after this many, and after twice as many each time.
const MANY_SKIPPED_STEPS: u64 = 8;

/// The findings of skipped steps and of inspected passes.
#[derive(Debug, Default)]
pub(super) struct Findings {
    /// All skipped steps of the generation.
    skipped: u64,
    /// Whether the last inspected pass that was not finite showed why.
    explained: bool,
    /// The finding that was told to people last.
    told: Option<Finding>,
    /// The last finding in words.
    culprit: Option<String>,
    /// Inspected passes in a row in which a peer contradicted itself.
    contradictions: BTreeMap<PeerId, u32>,
}

/// The reason why a step was skipped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Finding {
    /// A number was first not finite in this place of this peer.
    Poison(PeerId, Poison),
    /// A peer contradicted itself.
    Contradiction(PeerId),
    /// All that the peers sent was finite. Only what the broker computes from it is not.
    Sum,
}

impl GenerationMachine {
    /// Takes a peer's squared norms, and gives the verdict once all peers' have come.
    ///
    /// A peer's norms cannot be verified, so the broker relies on its sender's word. It refuses a norm that no gradient
    /// of the type can have. A norm that is not finite skips the step. Then the next steps are inspected, and a peer
    /// that cannot say why is put out. Any other norm looks like that of some honest peer:
    ///
    /// - A tiny one, such as 0 or 1e-300, looks like that of parameters that do not matter to the loss, such as those
    ///   behind a dead ReLU. The global norm is then too small, and gradients are clipped less, or not at all. The
    ///   factor is at most 1 whatever the norms are, so no gradient grows beyond what its owner computed, and updates
    ///   stay finite.
    /// - A huge one looks like that of a gradient that explodes. With clipping, the gradients of this step count next
    ///   to nothing.
    ///
    /// In both cases the peer could do as much harm with a false gradient, which the broker never sees.
    pub(super) fn norms(&mut self, from: PeerId, number: u64, squared_norms: Vec<(ValueId, f64)>) -> Outcome {
        let settings = self.settings;
        let (peers, update) = (self.peers.len(), self.updates + 1);
        let (pass, expected) = self.current(from, number)?;
        let kind = pass.batch.kind();
        if kind == PassKind::Eval || !pass.voted.insert(from) {
            return Err("sent norms that nobody waits for");
        }
        if !expected.all_reported(kind, &pass.reports) {
            return Err("sent norms before its reports");
        }
        if !squared_norms.iter().map(|(p, _)| p).eq(expected.norms()) {
            return Err("sent norms of other gradients than its own");
        }
        if !squared_norms.iter().all(|(p, norm)| expected.is_possible(*p, *norm)) {
            return Err("sent a norm that no gradient of its type can have");
        }
        pass.norms.extend(squared_norms);
        if pass.voted.len() < peers {
            return Ok(Vec::new());
        }
        let judgement = pass.judge(&settings, update);
        pass.judgement = Some(judgement);
        let (verdict, look) = (judgement.verdict, pass.look);
        self.updates += u64::from(verdict.apply);
        if !look {
            // The passes issued from now on are inspected. Earlier passes in flight are not.
            self.inspect = !verdict.apply;
        }
        Ok(self.broadcast(ToPeer::Verdict { pass: number, verdict }).collect())
    }

    /// Completes a step, or another look at one, that all peers have completed.
    pub(super) fn step_over(&mut self, pass: Pass, step: u64, step_s: f64) -> Vec<GenerationAction> {
        let Some(Judgement { verdict, loss, grad_norm }) = pass.judgement else { return Vec::new() };
        if pass.look {
            // If the model has changed since, all may be finite now. Then places that were met explain nothing.
            let finite = loss.is_finite() && grad_norm.is_finite();
            return if finite { Vec::new() } else { self.find(&pass, step) };
        }
        self.progress = TrainingProgress { step, updates: self.progress.updates + u64::from(verdict.apply) };
        if let Some(saving) = self.saving.iter_mut().find(|s| s.step == step) {
            saving.updates = Some(self.progress.updates);
        }
        let findings = match verdict.apply {
            true => {
                self.skipped = 0;
                self.findings.contradictions.clear();
                Vec::new()
            }
            false => self.step_skipped(&pass, step),
        };
        let sent = pass.done.values().flat_map(|r| &r.sent);
        let record = StepRecord {
            step,
            version: pass.version,
            loss,
            grad_norm,
            lr: verdict.lr,
            applied: verdict.apply,
            step_s,
            bytes_sent: sent.fold(0, |sum, s| sum.saturating_add(s.bytes)),
            peers: pass.done.into_values().collect(),
        };
        [GenerationAction::Step(record)].into_iter().chain(findings).collect()
    }

    /// Finds out why a step was skipped, or has its batch looked at again if it was not inspected.
    ///
    /// Once the reason is known, another look would rarely show more, so only some skipped steps get one.
    fn step_skipped(&mut self, pass: &Pass, step: u64) -> Vec<GenerationAction> {
        self.skipped += 1;
        self.findings.skipped += 1;
        let skipped = self.findings.skipped;
        let mut actions = Vec::new();
        if pass.inspect || !self.is_spoilt(pass) {
            actions.extend(self.find(pass, step));
        } else if (skipped.is_power_of_two() || !self.findings.explained) && !self.passes.iter().any(|p| p.look) {
            self.look = Some(pass.batch.step());
        }
        if skipped >= MANY_SKIPPED_STEPS && skipped.is_power_of_two() {
            let (of, why) = (step - self.settings.start.step, self.findings.culprit.clone());
            let event = Event::Skipping { step, skipped, of, why };
            actions.push(GenerationAction::Notice(Notice::Event(event)));
        }
        actions
    }

    /// Says what a pass that is not finite has shown.
    fn find(&mut self, pass: &Pass, step: u64) -> Vec<GenerationAction> {
        let contradictory = self.contradictory(pass);
        let found = match self.culprit(pass) {
            Some((peer, poison)) => Some(Finding::Poison(peer, poison)),
            None if !contradictory.is_empty() => contradictory.first().copied().map(Finding::Contradiction),
            None => self.is_spoilt_by_the_broker(pass).then_some(Finding::Sum),
        };
        self.findings.explained = found.is_some() && contradictory.is_empty();
        let mut actions = Vec::new();
        if let Some(found) = found {
            let when = self.when();
            let (peer, sentence) = self.describe(&found, when);
            let member = peer.map(|peer| &self.peers[peer.0 as usize]);
            let name = member.map_or_else(|| "the broker".to_owned(), |member| format!("{:?}", member.name));
            let Sentence { what, advice } = sentence;
            self.findings.culprit = Some(format!("{name} {what}; {advice}"));
            let told = match found {
                Finding::Poison(peer, poison) => Finding::Poison(peer, poison.of_any_micro_batch()),
                other => other,
            };
            if self.findings.told.replace(told) != Some(told) {
                let member = member.map(|member| member.member);
                let micro_batch = match found {
                    Finding::Poison(_, poison) if when == When::Alone => poison.tensor.micro_batch(),
                    _ => None,
                };
                actions.push(GenerationAction::Notice(Notice::Poisoned { member, step, what, advice, micro_batch }));
            }
        }
        let before = std::mem::take(&mut self.findings.contradictions);
        let count = |peer: PeerId| (peer, before.get(&peer).map_or(1, |times| times + 1));
        self.findings.contradictions = contradictory.into_iter().map(count).collect();
        for (peer, times) in &self.findings.contradictions {
            if *times >= MAX_CONTRADICTIONS {
                let what = contradiction().what;
                let reason = format!("in {times} inspected steps in a row, it {what}");
                actions.push(GenerationAction::Expel(self.peers[peer.0 as usize].member, reason));
            }
        }
        actions
    }

    /// When the step was skipped that a finding is about.
    fn when(&self) -> When {
        match (self.progress.updates, self.skipped) {
            (0, _) => When::Untrained,
            (_, 0) => When::Alone,
            _ => When::Trained,
        }
    }

    /// The peer that a finding is about, if it is not about the broker, and what it says.
    fn describe(&self, found: &Finding, when: When) -> (Option<PeerId>, Sentence) {
        match found {
            Finding::Poison(peer, poison) => {
                let names: Vec<&str> = self.peers.iter().map(|p| p.name.as_str()).collect();
                let outline = self.peers[peer.0 as usize].expected.outline();
                (Some(*peer), outline.describe(poison, &names, when))
            }
            Finding::Contradiction(peer) => (Some(*peer), contradiction()),
            Finding::Sum => {
                let what = "got losses and norms that are all finite, but their sum over the batch is not".into();
                (None, Sentence { what, advice: remedy(when) })
            }
        }
    }

    /// Whether any peer has sent a loss or a norm that is not finite.
    fn is_spoilt(&self, pass: &Pass) -> bool {
        self.peers.iter().any(|participant| pass.is_spoilt_by(&participant.expected))
    }

    /// Whether the loss or the norm of the batch is not finite, although all that the peers have sent is.
    fn is_spoilt_by_the_broker(&self, pass: &Pass) -> bool {
        let finite = |j: Judgement| j.loss.is_finite() && j.grad_norm.is_finite();
        pass.judgement.is_some_and(|j| !finite(j)) && !self.is_spoilt(pass)
    }

    /// The peers whose loss or norms are not finite, and which have found no reason. An honest peer finds one, because
    /// such a number is computed from values that the peer has looked at.
    fn contradictory(&self, pass: &Pass) -> BTreeSet<PeerId> {
        let peers = (0..).map(PeerId).zip(&self.peers);
        let spoilt = peers.filter(|(peer, participant)| {
            let silent = pass.done.get(peer).is_some_and(|report| report.poison.is_none());
            silent && pass.is_spoilt_by(&participant.expected)
        });
        spoilt.map(|(peer, _)| peer).collect()
    }

    /// The peer at which a number was first not finite, as far as the peers say.
    fn culprit(&self, pass: &Pass) -> Option<(PeerId, Poison)> {
        let found = |peer: &PeerId| pass.done.get(peer).and_then(|report| report.poison);
        let order = |(peer, poison): &(PeerId, Poison)| {
            // A number that came from a peer with an explanation of its own is not the first.
            let passed_on = poison.from.is_some_and(|from| found(&from).is_some());
            let outline = self.peers[peer.0 as usize].expected.outline();
            (poison.cause, passed_on, outline.order(poison), *peer)
        };
        let all = pass.done.keys().filter_map(|peer| Some((*peer, found(peer)?)));
        all.min_by_key(order)
    }

    /// The reason why the run fails after too many skipped steps.
    pub(super) fn diverged(&self) -> String {
        let step = self.progress.step;
        let why = self.findings.culprit.as_deref().unwrap_or(remedy(self.when()));
        format!("the loss or gradient was not finite in {MAX_SKIPPED_STEPS} consecutive steps up to step {step}; {why}")
    }
}

fn contradiction() -> Sentence {
    Sentence {
        what: "sent a loss or norms that are not finite, but found no such number that they come from".into(),
        advice: "the run goes on without it if it does so again",
    }
}
