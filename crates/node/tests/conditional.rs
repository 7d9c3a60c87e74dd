//! Tests that need a small disk of their own or the images of CIFAR-10.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::error::Error;
use std::fs;
use std::path::Path;

use fusionllm_data::{Cifar10, Data, Dataset};
use fusionllm_graph::{Advice, HostTensor, TensorType};
use fusionllm_workspace::checkpoint::{Checkpoint, CheckpointError, Checkpoints, Part, State};
use requirements::Missing;
use small_disk::SmallDisk;

#[path = "../../cli/tests/support/requirements.rs"]
mod requirements;
#[path = "../../cli/tests/support/small_disk.rs"]
#[allow(dead_code, reason = "not all that include this need all of it")]
mod small_disk;

requirements::main!(a_full_disk_harms_no_earlier_checkpoint, real_images_are_normalised);

fn checkpoints(disk: &SmallDisk) -> Checkpoints {
    Checkpoints::new(disk.path().join("checkpoints"))
}

type Tensors = Vec<(Part, &'static str, HostTensor)>;

fn floats(shape: &[usize]) -> HostTensor {
    let values: Vec<f32> = (0..shape.iter().product::<usize>()).map(|i| i as f32).collect();
    HostTensor::from_f32(shape, &values).unwrap()
}

fn few() -> Tensors {
    vec![(Part::Model, "weight", floats(&[3, 5])), (Part::Optimizer, "weight.exp_avg", floats(&[3, 5]))]
}

fn state(step: u64) -> State {
    State { step, updates: step, ..State::default() }
}

/// The message of an error, its causes and its hint.
fn described(error: CheckpointError) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(e) = cause {
        text += &format!(": {e}");
        cause = e.source();
    }
    text + "; " + &error.hint().unwrap_or_default()
}

/// Writes a checkpoint, on a disk that is filled up after the last tensor if `fill`.
fn save(disk: &SmallDisk, step: u64, tensors: &Tensors, fill: bool) -> Result<(), String> {
    let types = |part| -> Vec<(String, TensorType)> {
        let of_part = tensors.iter().filter(|(p, ..)| *p == part);
        of_part.map(|(_, name, tensor)| ((*name).to_owned(), tensor.ty().clone())).collect()
    };
    let mut writer = checkpoints(disk).begin(step, &types(Part::Model), &types(Part::Optimizer)).unwrap();
    for (part, name, tensor) in tensors {
        writer.put(*part, name, tensor).map_err(described)?;
    }
    if fill {
        disk.fill();
    }
    writer.commit(state(step)).map(|_| ()).map_err(described)
}

/// The disk fills up within a tensor or after the last one, of the next checkpoint or of one of the same step. Each
/// case has its own disk, because the system may take time to free what was removed.
fn a_full_disk_harms_no_earlier_checkpoint() -> Result<(), Missing> {
    let large = vec![(Part::Model, "large", floats(&[1 << 18]))];
    for (step, tensors) in [(6, large), (6, few()), (5, few())] {
        let disk = SmallDisk::mount(1)?;
        save(&disk, 5, &few(), false).unwrap();
        let message = save(&disk, step, &tensors, true).unwrap_err();
        assert!(message.contains("cannot be written: No space left on device"), "{message}");
        assert!(message.contains("all earlier checkpoints are intact"), "{message}");

        let kept: Vec<u64> = checkpoints(&disk).list().unwrap().into_iter().map(|(step, _)| step).collect();
        assert_eq!(kept, [5]);
        let files = fs::read_dir(disk.path().join("checkpoints")).unwrap();
        assert_eq!(files.count(), 1, "no half checkpoint stays");
        let checkpoint = Checkpoint::open(&disk.path().join("checkpoints/step-5")).unwrap();
        assert_eq!(*checkpoint.state(), state(5));
        for (part, name, tensor) in few() {
            assert_eq!(checkpoint.read(part, name).unwrap(), tensor, "{name}");
        }
    }
    Ok(())
}

/// The constants bring each colour of real images to mean 0 and deviation 1. So the layout of the files is read right,
/// too.
fn real_images_are_normalised() -> Result<(), Missing> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/data/cifar-10-batches-bin/data_batch_1.bin");
    if !path.is_file() {
        let reason = "CIFAR-10 is not in examples/data: examples/cifar10.sh fetches it";
        return Err(Missing { requirement: "cifar10", reason: reason.into() });
    }
    let config = Cifar10 { train: vec![path], test: vec![], augment: false, shuffle: true, group: 1 };
    let data = Dataset::open(&Data::Cifar10(config), 1).unwrap();
    assert_eq!(data.train_samples(), 10_000);
    let (name, pixels) = data.train_batch(0, 2000).unwrap().tensors.swap_remove(0);
    assert_eq!((name.as_ref(), pixels.shape()), ("pixel_values", &[2000, 3, 32, 32][..]));
    let values = pixels.to_f64();
    for colour in 0..3 {
        let of_colour: Vec<f64> = values.chunks(1024).skip(colour).step_by(3).flatten().copied().collect();
        let mean = of_colour.iter().sum::<f64>() / of_colour.len() as f64;
        let variance = of_colour.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / of_colour.len() as f64;
        assert!(mean.abs() < 0.05 && (variance.sqrt() - 1.0).abs() < 0.05, "{colour}: {mean} {variance}");
    }
    Ok(())
}
