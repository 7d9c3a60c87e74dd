use fusionllm_program::PeerId;
use serde_json::{Value, json};

use fusionllm_plan::Cluster;
use fusionllm_plan::{Activity, Simulation};

/// One recorded step as a trace in the [format] that Chrome and Perfetto open. Each peer is a process. One of its
/// threads computes; for each receiver, another thread sends. Times are in microseconds.
///
/// [format]: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
pub fn chrome_trace(cluster: &Cluster, simulation: &Simulation) -> String {
    const MICRO: f64 = 1e6;
    let mut events: Vec<Value> = Vec::new();
    // The broker comes last.
    let process = |p: PeerId| if p == PeerId::BROKER { simulation.peers.len() as u32 } else { p.0 };
    // By sender and receiver: the thread.
    let mut threads: std::collections::BTreeMap<(PeerId, PeerId), u32> = std::collections::BTreeMap::new();
    let name = |events: &mut Vec<Value>, kind: &str, pid: u32, tid: u32, name: &str| {
        events.push(json!({ "ph": "M", "name": kind, "pid": pid, "tid": tid, "args": { "name": name } }));
    };
    let peers = (0..simulation.peers.len() as u32).map(PeerId);
    for p in peers.chain([PeerId::BROKER]) {
        name(&mut events, "process_name", process(p), 0, cluster.name(p));
        if p != PeerId::BROKER {
            name(&mut events, "thread_name", process(p), 0, "computes");
        }
    }
    for s in &simulation.spans {
        let (what, category) = match s.activity {
            Activity::Forward => ("forward", "compute"),
            Activity::Backward => ("backward", "compute"),
            Activity::WeightGrad => ("weight gradients", "compute"),
            Activity::Update => ("update", "compute"),
            Activity::Offload => ("offload and load", "compute"),
            Activity::Wait => ("wait", "wait"),
            Activity::Verdict => ("wait for the verdict", "wait"),
        };
        let title = s.micro_batch.map_or(what.to_owned(), |m| format!("{what} {m}"));
        events.push(json!({
            "ph": "X", "name": title, "cat": category, "pid": process(s.peer), "tid": 0,
            "ts": s.start * MICRO, "dur": (s.end - s.start) * MICRO,
        }));
    }
    for (id, t) in simulation.transfers.iter().enumerate() {
        let next = threads.len() as u32 + 1;
        let tid = *threads.entry((t.from, t.to)).or_insert_with(|| {
            name(&mut events, "thread_name", process(t.from), next, &format!("sends to {}", cluster.name(t.to)));
            next
        });
        events.push(json!({
            "ph": "X", "name": t.tensor.to_string(), "cat": "send", "pid": process(t.from), "tid": tid,
            "ts": t.start * MICRO, "dur": (t.end - t.start) * MICRO,
            "args": { "value": t.tensor.value().to_string(), "bytes": t.bytes, "queued_us": (t.start - t.sent) * MICRO },
        }));
        // An arrow from the sender to the receiver's activity on arrival.
        let arrow = json!({ "cat": "send", "name": "message", "id": id });
        for (phase, pid, tid, at) in [("s", process(t.from), tid, t.end), ("f", process(t.to), 0, t.arrived)] {
            let mut event = arrow.clone();
            if let Some(event) = event.as_object_mut() {
                event.extend([
                    ("ph".to_owned(), json!(phase)),
                    ("pid".to_owned(), json!(pid)),
                    ("tid".to_owned(), json!(tid)),
                    ("ts".to_owned(), json!(at * MICRO)),
                ]);
                if phase == "f" {
                    event.insert("bp".into(), json!("e"));
                }
            }
            events.push(event);
        }
    }
    json!({ "displayTimeUnit": "ms", "traceEvents": events }).to_string()
}
