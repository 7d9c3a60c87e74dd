//! The members that keep tensors that never change, so that these need not come from the broker again.

use std::collections::{BTreeMap, BTreeSet};

use fusionllm_plan::Cluster;
use fusionllm_program::{PeerId, TensorKey};
use fusionllm_protocol::{Assignment, MemberId};

/// The shelves of all members, as they have said. A member that begins anew has another number.
#[derive(Default)]
pub(super) struct Shelves {
    /// By member: the generation of its last assignment, and what it is to keep of that.
    assigned: BTreeMap<MemberId, (u32, BTreeSet<TensorKey>)>,
    kept: BTreeMap<MemberId, BTreeSet<TensorKey>>,
}

impl Shelves {
    /// Notes what a member is to keep.
    pub(super) fn assign(&mut self, member: MemberId, assignment: &Assignment) {
        self.assigned.insert(member, (assignment.generation, assignment.shelved()));
    }

    /// A member keeps what it was assigned in this generation.
    pub(super) fn confirm(&mut self, member: MemberId, generation: u32) {
        if let Some((_, keys)) = self.assigned.get(&member).filter(|(assigned, _)| *assigned == generation) {
            self.kept.entry(member).or_default().extend(keys.iter().cloned());
        }
    }

    /// The member from which peer `to` of a generation gets a tensor soonest: itself, or one with a faster link to it
    /// than the broker has. `None` if that is the broker. `members` are those of the generation.
    pub(super) fn nearest(
        &self,
        key: &TensorKey,
        to: PeerId,
        members: &[MemberId],
        cluster: Option<&Cluster>,
    ) -> Option<MemberId> {
        let has = |member: &MemberId| self.kept.get(member).is_some_and(|kept| kept.contains(key));
        let me = members.get(to.0 as usize)?;
        if has(me) {
            return Some(*me);
        }
        let rate = |from: PeerId| cluster.and_then(|c| c.link(from, to)).map_or(0.0, |link| link.bandwidth);
        let others = (0..).map(PeerId).zip(members).filter(|(_, member)| has(member));
        let best = others.map(|(peer, member)| (rate(peer), *member)).max_by(|a, b| a.0.total_cmp(&b.0));
        best.filter(|(found, _)| *found > rate(PeerId::BROKER)).map(|(_, member)| member)
    }
}

#[cfg(test)]
mod tests {
    use fusionllm_plan::{Device, DirectLink, Link, Place, Rates};

    use super::*;

    /// Three devices and the broker. The first two have fast lines to each other.
    fn cluster() -> Cluster {
        let rates = Rates { matmul: 1e9, convolution: 1e9, memory: 1e9, overhead: 1e-6 };
        let devices = ["a", "b", "c"].map(|name| Device::new(name, rates, 1 << 30));
        let line = |from, to, bandwidth| DirectLink { from, to, link: Link { latency: 0.01, bandwidth } };
        let slow = (0..3).flat_map(|i| (0..3).map(move |j| (i, j))).filter(|(i, j)| i != j).map(|(i, j)| {
            let bandwidth = if i + j == 1 { 1e8 } else { 1e5 };
            line(Place::Device(i), Place::Device(j), bandwidth)
        });
        let broker = (0..3).flat_map(|i| [(Place::Broker, Place::Device(i)), (Place::Device(i), Place::Broker)]);
        let lines = slow.chain(broker.map(|(from, to)| line(from, to, 1e6))).collect();
        Cluster::new(devices.to_vec(), Vec::new(), lines, Some(Place::Broker)).unwrap()
    }

    #[test]
    fn a_tensor_comes_from_where_it_is_nearest() {
        let members = [MemberId(4), MemberId(5), MemberId(6)];
        let key = TensorKey::value("w");
        let mut shelves = Shelves::default();
        let nearest = |shelves: &Shelves, to| shelves.nearest(&key, PeerId(to), &members, None);
        assert_eq!(nearest(&shelves, 0), None);
        shelves.assigned.insert(members[0], (3, BTreeSet::from([key.clone()])));
        shelves.confirm(members[0], 2);
        assert_eq!(nearest(&shelves, 0), None, "that was an earlier assignment");
        shelves.confirm(members[0], 3);
        assert_eq!(nearest(&shelves, 0), Some(members[0]));
        assert_eq!(nearest(&shelves, 1), None, "nothing is known of the links");
        let cluster = cluster();
        let nearest = |to| shelves.nearest(&key, PeerId(to), &members, Some(&cluster));
        assert_eq!((nearest(0), nearest(1)), (Some(members[0]), Some(members[0])), "in one place");
        assert_eq!(nearest(2), None, "the broker has the faster line");
    }
}
