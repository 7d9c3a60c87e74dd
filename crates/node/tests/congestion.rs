//! The simulator predicts transfers with the constants of the real congestion control and of the emulated queues.

use fusionllm_plan::congestion as simulated;
use fusionllm_transport::{congestion as real, emulator};

#[test]
fn the_simulator_and_the_transport_agree_on_congestion_control() {
    assert_eq!(simulated::INITIAL_WINDOW, real::INITIAL_WINDOW_BYTES);
    assert_eq!(simulated::STREAM_WINDOW, u64::from(real::STREAM_WINDOW_BYTES));
    assert_eq!(simulated::MAX_WINDOW, real::MAX_WINDOW_BYTES);
    assert_eq!(simulated::WINDOW_GAIN, real::WINDOW_GAIN);
    assert_eq!(simulated::MAX_SPREAD_S, real::MAX_SPREAD_TIME.as_secs_f64());
    assert_eq!(simulated::SEND_FACTOR, real::PACING_GAIN);
}

#[test]
fn the_simulator_and_the_emulator_agree_on_queues() {
    assert_eq!(simulated::QUEUE_S, emulator::QUEUE_TIME.as_secs_f64());
    assert_eq!(simulated::MIN_QUEUE, emulator::MIN_QUEUE_BYTES);
}
