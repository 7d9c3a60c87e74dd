//! A joiner's answers while the broker measures its machine. [`fusionllm_protocol::Survey`] is the broker's side.

use fusionllm_graph::Advice;
use fusionllm_plan::{Device, HOST_LINK_RATE};
use fusionllm_program::Program;
use fusionllm_protocol::{FromPeer, MachineProfile, MemberId};
use fusionllm_transport::PeerAddr;
use fusionllm_workbench::machine::memory;
use fusionllm_workbench::profile::measure_briefly;

use super::observer::JoinEvent;
use super::shared::Shared;
use crate::NodeError;
use crate::machine::disk;
use crate::net::probe::probe;
use crate::net::traffic::measure_traffic;

/// Measures this machine, unless there is a profile of it, with these operators of the job's model.
pub(super) async fn measure(
    shared: &Shared,
    profile: Option<Device>,
    programs: Vec<Program>,
) -> Result<FromPeer, NodeError> {
    let (backend, slowdown) = (shared.backend.clone(), shared.slowdown);
    let memory = shared.memory.or_else(memory::for_tensors);
    // A worker on the processor has tensors elsewhere, too, but in the same memory.
    let of_device = shared.backend.device();
    let host_link = (of_device.threads.is_none() && of_device.memory_bytes.is_some()).then_some(HOST_LINK_RATE);
    let measured = tokio::task::spawn_blocking(move || match profile {
        Some(device) => Ok((device, None)),
        None => {
            let disk = disk::rates().unwrap_or_default();
            let (mut device, left_out) = measure_briefly(&backend, slowdown, memory, &programs)?;
            measure_traffic(&mut device, backend.as_ref());
            Ok::<_, NodeError>((Device { disk, host_link, ..device }, left_out))
        }
    });
    let (device, left_out) = measured.await.map_err(|e| NodeError::State(e.to_string()))??;
    if let Some(left_out) = left_out {
        shared.observer.tell(JoinEvent::LeftOut(left_out));
    }
    let memory = memory.unwrap_or(device.memory);
    let Device { rates, measured: operators, scratch, disk, host_link, .. } = device;
    let slowdown = shared.slowdown;
    let machine = MachineProfile { rates, memory, slowdown, operators, scratch, disk, host_link };
    Ok(FromPeer::Machine(Box::new(machine)))
}

/// Measures the links to a member and back. The answer names no links if the two cannot reach each other.
pub(super) async fn measure_links(
    shared: &Shared,
    with: MemberId,
    addr: Option<PeerAddr>,
    patience_s: f64,
) -> FromPeer {
    let probed = match addr {
        Some(addr) => probe(&shared.endpoint, &addr, patience_s).await,
        None => Err(NodeError::Protocol("the broker has not told its address".into())),
    };
    if let Err(e) = &probed {
        // The broker, which gets no links, says who cannot reach whom.
        tracing::info!("no link to {with}: {}", e.one_line());
    }
    let probed = probed.ok();
    let relayed = probed.is_some_and(|probed| probed.relayed);
    FromPeer::Links { with, links: probed.map(|probed| (probed.there, probed.back)), relayed }
}
