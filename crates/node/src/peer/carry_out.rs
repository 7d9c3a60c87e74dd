//! Carries out the actions that the follower asks for.

use std::collections::VecDeque;

use fusionllm_graph::Advice;
use fusionllm_protocol::FollowerAction;

use super::generation::Generation;
use super::session::Session;
use crate::NodeError;

impl Session {
    /// Carries out actions, and those that follow from them.
    pub(super) fn carry_out(&mut self, actions: Vec<FollowerAction>) {
        let mut queue = VecDeque::from(actions);
        while let Some(action) = queue.pop_front() {
            queue.extend(self.act(action));
        }
    }

    /// Carries out an action. Returns those that follow from it.
    fn act(&mut self, action: FollowerAction) -> Vec<FollowerAction> {
        match (action, &mut self.generation) {
            (FollowerAction::Stop, _) => self.generation = None,
            (FollowerAction::Forget { step }, _) => self.shared.vault.forget(step),
            (FollowerAction::Begin { generation }, _) => {
                if let Err(e) = self.begin(generation) {
                    return self.follower.ended(generation, Some(e.one_line()));
                }
            }
            (FollowerAction::Draw { keys }, Some(current)) => current.draw(keys),
            (FollowerAction::Take { step, keys }, Some(current)) => match self.shared.vault.find(step, &keys) {
                Some(kept) => current.take(keys, kept),
                None => {
                    let number = current.number();
                    return self.follower.failed(number, format!("the cut after step {step} is incomplete"));
                }
            },
            (FollowerAction::Fetch { from, step, keys }, Some(current)) => current.fetch(from, step, keys),
            (FollowerAction::Copy { of, step, keys, bytes_per_s }, Some(current)) => {
                current.copy(of, step, keys, bytes_per_s);
            }
            (FollowerAction::Connect { with }, current) => {
                if let Some(current) = current {
                    current.connect(with);
                }
                return self.use_early_links();
            }
            (FollowerAction::Start { generation }, _) => {
                if let Err(e) = self.start() {
                    return self.follower.failed(generation, e.one_line());
                }
            }
            (FollowerAction::Tell(message), _) => {
                if let Some(broker) = &self.broker
                    && let Err(e) = broker.outbox.control(&message)
                {
                    tracing::warn!("the broker was not told: {}", e.one_line());
                }
            }
            (FollowerAction::Serve(number), _) => {
                if let Some(asked) = self.requests.remove(&number) {
                    match self.shared.vault.find(asked.step, &asked.keys) {
                        Some(kept) => drop(tokio::spawn(asked.request.serve(kept, self.shared.clone()))),
                        None => drop(tokio::spawn(asked.request.refuse())),
                    }
                }
            }
            (FollowerAction::Refuse(number), _) => {
                if let Some(asked) = self.requests.remove(&number) {
                    tokio::spawn(asked.request.refuse());
                }
            }
            // The generation that needs the tensors has ended.
            (
                FollowerAction::Draw { .. }
                | FollowerAction::Take { .. }
                | FollowerAction::Fetch { .. }
                | FollowerAction::Copy { .. },
                None,
            ) => {}
        }
        Vec::new()
    }

    fn begin(&mut self, generation: u32) -> Result<(), NodeError> {
        let assigned = self.assigned.take().filter(|a| a.assignment.generation == generation);
        let assigned = assigned.ok_or_else(|| NodeError::State("an assignment is missing".into()))?;
        self.generation = Some(Generation::begin(assigned, &self.shared)?);
        self.shared.progress.enter(generation);
        self.took_part = true;
        Ok(())
    }

    fn start(&mut self) -> Result<(), NodeError> {
        match (&mut self.generation, &self.broker) {
            (Some(generation), Some(broker)) => generation.start(broker.outbox.clone()),
            _ => Err(NodeError::State("there is nothing to start".into())),
        }
    }

    /// Uses the connections of neighbours that were assigned earlier than this peer. Others stay or are closed.
    fn use_early_links(&mut self) -> Vec<FollowerAction> {
        let mut actions = Vec::new();
        for (key, (generation, connection, lanes)) in std::mem::take(&mut self.early) {
            match self.member(key) {
                Some(member) => actions.extend(self.link(member, generation, connection, lanes)),
                None => connection.close("this is no member of the run"),
            }
        }
        actions
    }
}
