//! The choice of a graphics adapter.

#![cfg(feature = "wgpu")]
#![allow(clippy::unwrap_used)]

use fusionllm_backend::{BackendError, open};

/// The error lists the adapters that exist, or says that there are none. So it does not depend on the machine.
#[test]
fn one_that_does_not_exist_is_an_error() {
    for which in ["burn-wgpu:77", "burn-wgpu:quantum", "burn-wgpu:"] {
        let Err(BackendError::Device { backend, reason }) = open(which).map(|b| b.device()) else {
            panic!("{which} was opened");
        };
        assert_eq!(backend, which);
        assert!(reason.starts_with("this machine"), "{reason}");
    }
}

#[test]
fn backends_on_the_processor_have_no_choice_of_device() {
    let Err(BackendError::Unknown { name, .. }) = open("cpu:0").map(|b| b.device()) else { panic!("opened cpu:0") };
    assert_eq!(name, "cpu:0");
}
