//! Attempts to join a run: strangers, members and the owner meet a real broker, over loopback.
#![allow(clippy::unwrap_used)]

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use fusionllm_events::Event;
use fusionllm_node::owner::{Found, OwnedRun, RunPhase, RunStatus, Standing};
use fusionllm_node::{BrokerOptions, Entry, JoinOptions, NodeError, Observer, Participation, Peers, conduct, join};
use fusionllm_protocol::{
    Contact, FromPeer, Hello, MAX_CONTROL_BYTES, MAX_HELLO_BYTES, ToPeer, VERSION, decode, encode,
};
use fusionllm_transport::{
    Connection, DisconnectReason, Endpoint, EndpointOptions, Lane, Lanes, PeerAddr, ReceiveError, Secret, SendError,
    Ticket,
};
use fusionllm_workspace::config::Job;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::JoinHandle;

/// Nothing here takes longer, even on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// The events that the broker tells people.
#[derive(Debug)]
enum Told {
    Ticket(Ticket),
    Joined(String),
    TurnedAway(String),
    Lost(String, String),
    Step(u64),
    Finished,
}

struct Watcher(UnboundedSender<Told>);

impl Observer for Watcher {
    fn event(&mut self, event: &Event) {
        let told = match event.clone() {
            Event::Joined { peer, .. } => Told::Joined(peer),
            Event::TurnedAway { reason } => Told::TurnedAway(reason),
            Event::Lost { peer, reason, .. } => Told::Lost(peer, reason),
            Event::Step(metrics) => Told::Step(metrics.step),
            Event::Finished { .. } => Told::Finished,
            _ => return,
        };
        let _ = self.0.send(told);
    }

    fn invite(&mut self, ticket: &Ticket) {
        let _ = self.0.send(Told::Ticket(ticket.clone()));
    }
}

/// A running broker, as its owner and its visitors see it.
struct Scene {
    ticket: Ticket,
    directory: PathBuf,
    told: UnboundedReceiver<Told>,
}

/// A joiner that is no program of ours.
struct Stranger {
    endpoint: Endpoint,
    connection: Connection,
    lanes: Lanes,
}

/// Plays a scene with a broker that waits for `peers` peers to train `steps` steps.
async fn play<F: Future<Output = ()>>(entry: Entry, peers: usize, steps: u64, scene: impl FnOnce(Scene) -> F) {
    let settings = [
        "model.n_layer=2",
        "model.n_embd=16",
        "model.n_head=2",
        "data.context=16",
        "train.batch=4",
        "train.micro_batch=1",
        "eval.every=0",
        "plan.scheduler=equal-compute",
    ];
    let mut settings = settings.map(str::to_owned).to_vec();
    settings.push(format!("train.steps={steps}"));
    let job = Job::quick_start(&settings).unwrap();
    let root = tempfile::tempdir().unwrap();
    let directory = root.path().join("run");
    let (said, mut told) = unbounded_channel();
    let options = BrokerOptions {
        listen: Some(([127, 0, 0, 1], 0).into()),
        directory: Some(directory.clone()),
        entry,
        ..BrokerOptions::new(Peers::Joiners(peers))
    };
    let mut watcher = Watcher(said);
    let mut broker = Box::pin(conduct(&job, options, &mut watcher));
    let mut broker_ended = None;
    let play = async {
        let Some(Told::Ticket(ticket)) = told.recv().await else { panic!("the broker has no ticket") };
        scene(Scene { ticket, directory, told }).await;
    };
    let mut play = std::pin::pin!(tokio::time::timeout(PATIENCE, play));
    loop {
        tokio::select! {
            ended = &mut broker, if broker_ended.is_none() => broker_ended = Some(ended),
            played = &mut play => return played.unwrap_or_else(|_| panic!("stuck; the broker: {broker_ended:?}")),
        }
    }
}

impl Scene {
    /// The next word that `pick` chooses.
    async fn hear<T>(&mut self, mut pick: impl FnMut(Told) -> Option<T>) -> T {
        loop {
            let told = self.told.recv().await.expect("the broker ended");
            if let Some(picked) = pick(told) {
                return picked;
            }
        }
    }

    async fn turned_away(&mut self) -> String {
        self.hear(|told| if let Told::TurnedAway(reason) = told { Some(reason) } else { None }).await
    }

    async fn finished(&mut self) {
        self.hear(|told| matches!(told, Told::Finished).then_some(())).await;
    }

    /// A peer of ours.
    fn join(&self, name: &str, identity: Option<&Path>) -> JoinHandle<Result<Participation, NodeError>> {
        self.join_with(&self.ticket, name, identity)
    }

    fn join_with(
        &self,
        ticket: &Ticket,
        name: &str,
        identity: Option<&Path>,
    ) -> JoinHandle<Result<Participation, NodeError>> {
        let backend = fusionllm_backend::open("cpu").unwrap();
        tokio::spawn(join(JoinOptions {
            name: name.into(),
            identity: identity.map(Path::to_owned),
            memory: Some(1 << 30),
            ..JoinOptions::new(ticket.clone(), backend)
        }))
    }

    fn owned(&self) -> OwnedRun {
        OwnedRun::new(self.directory.to_str().unwrap()).unwrap()
    }

    async fn status(&self) -> RunStatus {
        match self.owned().status().await.unwrap() {
            Found::Running(status) => *status,
            Found::Resting(resting) => panic!("{resting:?}"),
        }
    }

    fn hello(&self, from: &Endpoint) -> Hello {
        Hello {
            version: VERSION,
            secret: *self.ticket.secret.as_bytes(),
            process: 1,
            name: "stranger".into(),
            backend: "cpu".into(),
            device: "cpu".into(),
            slow_bf16: false,
            processor: None,
            addr: encode(&from.addr()).unwrap(),
        }
    }

    async fn stranger(&self) -> Stranger {
        let options = EndpointOptions { listen: Some(([127, 0, 0, 1], 0).into()), ..EndpointOptions::new() };
        let endpoint = Endpoint::bind(options).await.unwrap();
        let (connection, lanes) = endpoint.connect(&self.ticket.addr).await.unwrap();
        Stranger { endpoint, connection, lanes }
    }

    /// Says a hello that must be refused. Returns the reason that the stranger reads.
    async fn refused(&mut self, change: impl FnOnce(&mut Hello)) -> String {
        let mut stranger = self.stranger().await;
        let mut hello = self.hello(&stranger.endpoint);
        change(&mut hello);
        stranger.say(&FromPeer::Hello(hello)).await;
        let reason = stranger.refusal().await;
        assert_eq!(self.turned_away().await, reason, "people read the same");
        reason
    }
}

impl Stranger {
    async fn say(&self, message: &FromPeer) {
        self.send(encode(message).unwrap()).await;
    }

    async fn send(&self, payload: Vec<u8>) {
        self.connection.send(Lane::Control, &[], &[payload.into()]).await.unwrap();
    }

    /// Sends as much as the broker takes of a message that is too long.
    async fn flood(&self, bytes: u64) {
        let sent = self.connection.send(Lane::Control, &[], &[vec![0; bytes as usize].into()]).await;
        assert!(matches!(sent, Ok(()) | Err(SendError::Unread(_) | SendError::Disconnected(_))), "{sent:?}");
    }

    async fn hear(&mut self) -> Result<ToPeer, ReceiveError> {
        let frame = self.lanes.control.next().await?.expect("the lane ended");
        Ok(decode(&frame.read(MAX_CONTROL_BYTES).await?).unwrap())
    }

    async fn refusal(&mut self) -> String {
        match self.hear().await.unwrap() {
            ToPeer::Refused { reason } => reason,
            other => panic!("{other:?}"),
        }
    }

    /// Waits until the broker closes the connection, and returns the reason.
    async fn closed(&self) -> String {
        match self.connection.closed().await.reason {
            DisconnectReason::ClosedByPeer(reason) => reason,
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stranger_without_the_ticket_is_refused() {
    play(Entry::default(), 1, 1, async |mut scene| {
        let reason = scene.refused(|hello| hello.secret = [0; 16]).await;
        assert!(reason.contains("secret is wrong"), "{reason}");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_expired_ticket_is_refused() {
    let entry = Entry { valid: Some(Duration::ZERO), ..Entry::default() };
    play(entry, 1, 1, async |mut scene| {
        assert!(scene.ticket.expires.is_some(), "joiners see it in the ticket");
        let reason = scene.refused(|_| {}).await;
        assert!(reason.contains("has expired"), "{reason}");
        // Neither the joiner's clock counts, nor its own reading of the ticket.
        let forged = Ticket { expires: None, ..scene.ticket.clone() };
        let refused = scene.join_with(&forged, "a", None).await.unwrap();
        assert!(matches!(&refused, Err(NodeError::Refused(reason)) if reason.contains("has expired")), "{refused:?}");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_ticket_is_used_up_revoked_and_replaced() {
    let entry = Entry { uses: Some(1), ..Entry::default() };
    play(entry, 2, 3, async |mut scene| {
        let first = scene.join("a", None);
        scene.hear(|told| matches!(told, Told::Joined(name) if name == "a").then_some(())).await;
        let reason = scene.refused(|_| {}).await;
        assert!(reason.contains("used up"), "{reason}");

        let owned = scene.owned();
        assert_eq!(owned.revoke(None).await.unwrap(), "1 ticket revoked; members stay");
        let again = owned.revoke(None).await.unwrap_err().to_string();
        assert_eq!(again, "the broker refused: no such ticket is valid");
        let reason = scene.refused(|_| {}).await;
        assert!(reason.contains("revoked"), "{reason}");

        let another: Ticket = owned.invite(None, Some(1)).await.unwrap().parse().unwrap();
        let second = scene.join_with(&another, "b", None);
        scene.finished().await;
        assert!(
            first.await.unwrap().unwrap().took_part && second.await.unwrap().unwrap().took_part,
            "both trained to the end"
        );
    })
    .await;
}

/// A thief that reads a hello can send it again, but cannot prove its sender's key.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stolen_hello_does_not_give_its_senders_place() {
    play(Entry::default(), 2, 1, async |mut scene| {
        let victim = scene.stranger().await;
        let hello = scene.hello(&victim.endpoint);
        victim.say(&FromPeer::Hello(hello.clone())).await;
        scene.hear(|told| matches!(told, Told::Joined(_)).then_some(())).await;

        let reason = scene.refused(|h| *h = hello).await;
        assert!(reason.contains("another key than its connection"), "{reason}");
        let status = scene.status().await;
        let members: Vec<_> = status.members.iter().map(|m| (m.name.as_str(), m.standing)).collect();
        assert_eq!(members, [("stranger", Standing::Present)]);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_joiner_of_another_version_reads_what_to_do() {
    play(Entry::default(), 1, 1, async |mut scene| {
        let reason = scene.refused(|hello| hello.version = VERSION + 1).await;
        assert!(reason.contains("install the same FusionLLM"), "{reason}");
        // Version 6 had one field less.
        let mut stranger = scene.stranger().await;
        let secret = *scene.ticket.secret.as_bytes();
        stranger.send(encode(&(0u32, 6u32, secret, "a", "cpu", "cpu", [0u8; 3])).unwrap()).await;
        let reason = stranger.refusal().await;
        assert!(reason.contains("version 6") && reason.contains("install the same FusionLLM"), "{reason}");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frames_that_are_too_large_end_the_connection_and_not_the_run() {
    play(Entry::default(), 2, 3, async |mut scene| {
        // A stranger's first message.
        let stranger = scene.stranger().await;
        stranger.flood(MAX_HELLO_BYTES + 1).await;
        assert_eq!(stranger.closed().await, "say hello first");
        // A member's message.
        let member = scene.stranger().await;
        member.say(&FromPeer::Hello(scene.hello(&member.endpoint))).await;
        scene.hear(|told| matches!(told, Told::Joined(_)).then_some(())).await;
        member.flood(MAX_CONTROL_BYTES + 1).await;
        let (name, reason) =
            scene.hear(|told| if let Told::Lost(name, reason) = told { Some((name, reason)) } else { None }).await;
        assert_eq!(name, "stranger");
        assert!(reason.contains("4194305"), "{reason}");
        // Two others train.
        let peers = ["a", "b"].map(|name| scene.join(name, None));
        scene.finished().await;
        for peer in peers {
            assert!(peer.await.unwrap().unwrap().took_part);
        }
    })
    .await;
}

/// A member claims the addresses of others, and of the receivers themselves. A member that connects over loopback, as
/// here, may be met there. Addresses that belong to nobody are dropped.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lying_addresses_are_not_handed_on() {
    play(Entry::default(), 2, 1, async |mut scene| {
        let mut liars = Vec::new();
        for name in ["a", "b"] {
            let liar = scene.stranger().await;
            let lies = ["0.0.0.0:9", "224.0.0.1:9", "[ff02::1]:9", "10.0.0.7:0", "[::]:1", "10.0.0.7:9"];
            let mut addrs: Vec<SocketAddr> = lies.iter().map(|a| a.parse().unwrap()).collect();
            addrs.extend(liar.endpoint.addr().addrs);
            addrs.extend((0..40).map(|i| SocketAddr::from(([192, 0, 2, i], 9))));
            let addr = encode(&PeerAddr::new(liar.endpoint.key(), addrs)).unwrap();
            liar.say(&FromPeer::Hello(Hello { name: name.into(), addr, ..scene.hello(&liar.endpoint) })).await;
            scene.hear(|told| matches!(told, Told::Joined(_)).then_some(())).await;
            liars.push(liar);
        }
        // The plan is made without measurements, so the members learn of each other from their assignment.
        let frame = liars[0].lanes.bulk.next().await.unwrap().unwrap();
        let bytes = frame.read(fusionllm_protocol::MAX_ASSIGNMENT_BYTES).await.unwrap();
        let assignment: fusionllm_protocol::Assignment = decode(&bytes).unwrap();
        let theirs = |contact: &Contact| decode::<PeerAddr>(&contact.addr).unwrap();
        let other = assignment.peers.iter().find(|c| c.name == "b").map(theirs).unwrap();
        assert_eq!(other.addrs[0], "10.0.0.7:9".parse().unwrap(), "a private address may be true");
        assert_eq!(other.addrs[1], liars[1].endpoint.addr().addrs[0]);
        assert_eq!(other.addrs.len(), 16, "{other}");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_keys_on_the_list_join() {
    let dir = tempfile::tempdir().unwrap();
    let (file, list) = (dir.path().join("me"), dir.path().join("list"));
    let key = fusionllm_node::owner::public_key(&file).unwrap();
    std::fs::write(&list, format!("# friends\n{key} # me\n")).unwrap();
    let entry = Entry { allow: Some(list), ..Entry::default() };
    play(entry, 1, 2, async |mut scene| {
        let reason = scene.refused(|_| {}).await;
        assert!(reason.contains("not on the run's list"), "{reason}");
        let me = scene.join("me", Some(&file));
        scene.finished().await;
        assert!(me.await.unwrap().unwrap().took_part);
    })
    .await;
}

/// The owner looks, puts a member out for good, and the run goes on without it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_is_kicked_while_the_run_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let identity = dir.path().join("identity");
    play(Entry::default(), 2, 1_000_000, async |mut scene| {
        let status = scene.status().await;
        assert_eq!((status.phase, status.wanted, status.members.len()), (RunPhase::Waiting, 2, 0));

        let (kicked, stays) = (scene.join("a", Some(&identity)), scene.join("b", None));
        scene.hear(|told| matches!(told, Told::Step(3)).then_some(())).await;
        let status = scene.status().await;
        assert_eq!((status.phase, status.steps, status.generation), (RunPhase::Training, 1_000_000, 1));
        assert!(status.step >= 3 && status.loss.is_some() && status.step_s.is_some() && status.left_s.is_some());
        assert_eq!(status.members.len(), 2, "the owner is no member");
        for m in &status.members {
            assert!(m.operators.is_some_and(|n| n > 0) && m.share_bytes.is_some_and(|n| n > 0), "{m:?}");
            assert!(m.standing == Standing::Present && m.silent_s.is_some(), "{m:?}");
        }

        let nobody = scene.owned().kick("c").await.unwrap_err().to_string();
        assert_eq!(nobody, "the broker refused: no member is called \"c\"; there are a, b");
        scene.owned().kick("a").await.unwrap();
        let (name, reason) =
            scene.hear(|told| if let Told::Lost(name, reason) = told { Some((name, reason)) } else { None }).await;
        assert_eq!((name.as_str(), reason.as_str()), ("a", "the run's owner put it out"));
        let out = kicked.await.unwrap();
        assert!(matches!(&out, Err(NodeError::PutOut(reason)) if reason.contains("owner")), "{out:?}");
        let again = scene.join("another-name", Some(&identity)).await.unwrap();
        assert!(matches!(&again, Err(NodeError::Refused(reason)) if reason.contains("for good")), "{again:?}");

        scene.hear(|told| matches!(told, Told::Step(_)).then_some(())).await;
        let status = scene.status().await;
        assert_eq!(
            status.incidents.iter().map(|i| (i.kind.as_str(), i.peer.as_str())).collect::<Vec<_>>(),
            [("kicked", "a")]
        );
        assert_eq!(status.members.iter().map(|m| m.name.as_str()).collect::<Vec<_>>(), ["b"]);
        stays.abort();
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_peers_ticket_does_not_make_an_owner_and_the_owners_no_peer() {
    play(Entry::default(), 1, 1, async |mut scene| {
        let as_owner = OwnedRun::new(&scene.ticket.to_string()).unwrap().status().await.unwrap_err().to_string();
        assert!(as_owner.contains("not the owner's ticket"), "{as_owner}");
        assert!(scene.turned_away().await.contains("not the owner's ticket"));
        let guessed = Ticket::new(scene.ticket.addr.clone(), Secret::generate()).to_string();
        assert!(OwnedRun::new(&guessed).unwrap().kick("a").await.unwrap_err().to_string().contains("not the owner's"));
        scene.turned_away().await;

        let text = std::fs::read_to_string(scene.directory.join("owner-ticket")).unwrap();
        let owners: Ticket = text.parse().unwrap();
        let reason = scene.refused(|hello| hello.secret = *owners.secret.as_bytes()).await;
        assert!(reason.contains("owner's ticket"), "{reason}");
    })
    .await;
}

/// Without a broker, the directory says what is safe.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_directory_of_a_finished_run_says_how_it_ended() {
    play(Entry::default(), 1, 3, async |mut scene| {
        let peer = scene.join("a", None);
        scene.finished().await;
        peer.await.unwrap().unwrap();
        match scene.owned().status().await.unwrap() {
            Found::Resting(resting) => {
                assert_eq!((resting.over, resting.step, resting.saved), (true, 3, Some(3)));
                assert_eq!(resting.steps, Some(3));
            }
            Found::Running(status) => panic!("{status:?}"),
        }
        assert!(scene.owned().kick("a").await.unwrap_err().to_string().contains("no broker runs here"));
    })
    .await;
}
