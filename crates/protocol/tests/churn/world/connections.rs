//! Connections of machines to the broker.

use fusionllm_protocol::{Arrival, ComputesOn, FromPeer, Hello, MemberId, VERSION};

use super::delays::Delay;
use super::{Event, World};

impl World {
    pub(super) fn orphaned(&mut self, m: usize, connection: u32) {
        let machine = &mut self.machines[m];
        if machine.connection != connection || machine.done {
            return;
        }
        machine.connection += 1;
        if machine.leaving {
            machine.dead = true;
            return;
        }
        let actions = machine.follower.disconnected();
        self.follow(m, actions);
        self.at(self.now + 1.0, Event::Dial(m));
    }

    pub(super) fn dial(&mut self, m: usize) {
        if self.machines[m].cut_off_until > self.now || self.broker_paused_until > self.now || self.broker_dead {
            let again = self.now + self.delay(Delay::Redial, m);
            return self.at(again, Event::Dial(m));
        }
        if self.machines[m].connected {
            return;
        }
        let hello = Hello {
            version: VERSION,
            secret: [7; 16],
            process: 0,
            name: format!("m{m}"),
            backend: "b".into(),
            device: "d".into(),
            slow_bf16: false,
            processor: Some(ComputesOn { id: [(m / 4) as u8; 16], cores: 2, busy: 1.0, profiled: false }),
            addr: vec![m as u8],
        };
        let machine = &mut self.machines[m];
        machine.connection += 1;
        machine.connected = true;
        machine.lanes = [self.now; 3];
        // Every third machine is behind the same router.
        let from = m.is_multiple_of(3).then_some([192, 0, 2, 1].into());
        let arrival = Arrival { identity: [m as u8; 32], from, unix_s: self.now as u64 };
        match self.run.join(arrival, hello, self.now) {
            Ok((member, actions)) => {
                self.machines[m].member = Some(member);
                self.carry_out(actions);
            }
            Err(_) => self.machines[m].done = true,
        }
    }

    /// Both ends find that a connection has timed out.
    pub(super) fn hang_up(&mut self, m: usize, connection: u32) {
        let machine = &mut self.machines[m];
        if machine.connection != connection || !machine.connected {
            return;
        }
        machine.connected = false;
        machine.connection += 1;
        let (member, alive) = (machine.member.unwrap(), !machine.dead && !machine.done);
        if alive {
            let actions = self.machines[m].follower.disconnected();
            self.follow(m, actions);
            let later = self.awake(m).max(self.now) + 1.0;
            self.at(later, Event::Dial(m));
        }
        let actions = self.run.gone(member, "it stopped answering", self.now);
        self.carry_out(actions);
    }

    /// The time of arrival of a message that is sent now, in the order of its lane.
    pub(super) fn arrival(&mut self, m: usize, lane: usize, delay: Delay) -> f64 {
        let delay = self.delay(delay, m);
        let machine = &mut self.machines[m];
        let at = (self.now + delay).max(machine.lanes[lane]).max(machine.cut_off_until);
        machine.lanes[lane] = at;
        at
    }

    pub(super) fn tell(&mut self, m: usize, message: FromPeer) {
        if self.machines[m].connected {
            let delay = if let FromPeer::Heartbeat(_) = message { Delay::Heartbeat } else { Delay::Up };
            let (at, connection) = (self.arrival(m, 0, delay), self.machines[m].connection);
            self.at(at, Event::Up(m, connection, message));
        }
    }

    pub(super) fn machine_of(&self, member: MemberId) -> Option<usize> {
        self.machines.iter().position(|m| m.member == Some(member))
    }
}
