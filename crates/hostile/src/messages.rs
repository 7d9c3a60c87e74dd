//! Messages between the machines of a run, and what a broker keeps of them on its disk.

use std::sync::Arc;

use fusionllm_compress::{Element, decode as decode_tensor};
use fusionllm_program::LearningRate;
use fusionllm_protocol::{
    Answer, Atlas, BulkHeader, ExpectedPeers, FromPeer, MemberId, Past, PeerHello, Probe, Roster, Run, RunOptions,
    RunSettings, RunState, Survey, TensorHeader, ToPeer, TrainingProgress, decode, hello_version,
};
use fusionllm_transport::PeerAddr;

pub(crate) fn from_peer(bytes: &[u8]) -> bool {
    let _ = hello_version(bytes);
    decode::<FromPeer>(bytes).is_ok()
}

pub(crate) fn to_peer(bytes: &[u8]) -> bool {
    decode::<ToPeer>(bytes).is_ok()
}

pub(crate) fn peer_hello(bytes: &[u8]) -> bool {
    decode::<PeerHello>(bytes).is_ok()
}

pub(crate) fn bulk_header(bytes: &[u8]) -> bool {
    match decode(bytes) {
        Ok(BulkHeader::Saved { ty, key, start: _, step: _ }) => {
            let _ = (ty.numel(), ty.bytes(), key.to_string());
            ty.check().is_ok()
        }
        other => other.is_ok(),
    }
}

pub(crate) fn tensor_header(bytes: &[u8]) -> bool {
    decode::<TensorHeader>(bytes).is_ok()
}

pub(crate) fn probe(bytes: &[u8]) -> bool {
    decode::<Probe>(bytes).is_ok()
}

pub(crate) fn answer(bytes: &[u8]) -> bool {
    decode::<Answer>(bytes).is_ok()
}

pub(crate) fn address(bytes: &[u8]) -> bool {
    decode::<PeerAddr>(bytes).is_ok_and(|addr| !addr.to_string().is_empty())
}

/// The settings of a short run, for tests.
pub fn short_run() -> RunSettings {
    RunSettings {
        version: 1,
        start: TrainingProgress::default(),
        steps: 5,
        micro_batches: 2,
        eval: None,
        checkpoint: None,
        checkpoints_under_way: 2,
        learning_rate: LearningRate { base: 1.0, warmup: 0, cosine_until: None, min: 0.0 },
        clip: None,
        window: 2,
        passes_before: 0,
    }
}

/// Goes on with a run from this state, until its members have not come back.
pub(crate) fn run_state(bytes: &[u8]) -> bool {
    let Ok(state) = decode::<RunState>(bytes) else { return false };
    let roster = Roster::new(ExpectedPeers::Any(2), state.admission().clone());
    let _ = state.newest_step();
    let mut run = Run::restore(
        RunOptions { settings: short_run(), measured: true, programs: Arc::default(), copies: true },
        roster,
        state,
        Atlas::default(),
        &Past { away_s: 5.0, steps: vec![(1, 0.5)] },
    );
    for second in 0..30 {
        run.tick(f64::from(second));
    }
    let _ = (run.status(30.0), run.state());
    true
}

pub(crate) fn atlas(bytes: &[u8]) -> bool {
    let Ok(atlas) = decode::<Atlas>(bytes) else { return false };
    let [a, b] = [MemberId(0), MemberId(1)];
    let _ = (Survey::is_needed(&[a, b], &atlas), atlas.flops(a), atlas.link(a, b), atlas.highest_bandwidth(b));
    let _ = atlas.cluster(&[]);
    true
}

/// Decodes an encoded tensor. The receiver decides the number of elements, and the bytes may say another.
pub(crate) fn codec(bytes: &[u8]) -> bool {
    let sizes = [0, 1, 2, 31, 32, 33, 64, 100, 1000];
    let decodes = |n: usize, element| decode_tensor(bytes, element, None, &mut vec![0.0; n]).is_ok();
    // All sizes are tried. `any` would stop at the first.
    sizes.iter().filter(|n| decodes(**n, Element::F32) | decodes(**n, Element::Bf16)).count() > 0
}
