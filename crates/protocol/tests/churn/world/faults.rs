//! The faults of a scenario, as they befall the world.

use fusionllm_protocol::FromPeer;

use super::{Event, World};
use crate::scenario::Fault;

impl World {
    pub(super) fn fault(&mut self, fault: Fault) {
        if !self.has_object(fault) {
            return;
        }
        self.history.faults.push(fault);
        match fault {
            Fault::Kill(m) => {
                self.machines[m].dead = true;
                self.silent(m, f64::INFINITY);
            }
            Fault::Sleep(m, seconds) => {
                let machine = &mut self.machines[m];
                machine.asleep_until = machine.asleep_until.max(self.now + seconds);
                self.silent(m, seconds);
            }
            Fault::CutOff(m, seconds) => {
                let machine = &mut self.machines[m];
                machine.cut_off_until = machine.cut_off_until.max(self.now + seconds);
                self.silent(m, seconds);
            }
            Fault::Part(a, b, seconds) => {
                self.parted.insert((a.min(b), a.max(b)), self.now + seconds);
            }
            Fault::Leave(m) => {
                self.machines[m].leaving = true;
                self.tell(m, FromPeer::Leaving);
            }
            Fault::Slow(m, times) => self.machines[m].slower = Some(times),
            Fault::Join(m) => self.start_machine(m),
            Fault::Pause(seconds) => self.broker_paused_until = self.broker_paused_until.max(self.now + seconds),
            Fault::Restart(seconds) => self.broker_dies(seconds),
            Fault::Interrupt => {
                let actions = self.run.interrupt(self.now);
                self.carry_out(actions);
            }
        }
    }

    /// Whether there is something that the fault can befall.
    fn has_object(&self, fault: Fault) -> bool {
        let runs = |m: usize| self.machines.get(m).is_some_and(|machine| machine.joined && !machine.dead);
        match fault {
            Fault::Kill(m) | Fault::Sleep(m, _) | Fault::CutOff(m, _) | Fault::Leave(m) | Fault::Slow(m, _) => runs(m),
            Fault::Part(a, b, _) => a != b && runs(a) && runs(b),
            Fault::Join(m) => !self.machines[m].joined,
            Fault::Pause(_) => true,
            Fault::Restart(_) | Fault::Interrupt => !self.broker_dead,
        }
    }

    /// Nothing is heard of a machine for a while, for a reason that nobody learns. After 30 s, its connection times
    /// out.
    fn silent(&mut self, m: usize, seconds: f64) {
        if seconds > 30.0 {
            let connection = self.machines[m].connection;
            self.at(self.now + 30.0, Event::HangUp(m, connection));
        }
    }

    /// Kills the broker. Messages on the way to it are lost, and so is everything that it has not written.
    fn broker_dies(&mut self, seconds: f64) {
        self.broker_dead = true;
        self.life += 1;
        self.broker_paused_until = 0.0;
        for m in 0..self.machines.len() {
            let machine = &mut self.machines[m];
            machine.member = None;
            if std::mem::take(&mut machine.connected) {
                machine.connection += 1;
                let connection = machine.connection;
                self.at(self.now + 30.0, Event::Orphaned(m, connection));
            }
        }
        self.at(self.now + seconds, Event::Reborn);
    }
}
