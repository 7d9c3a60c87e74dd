use fusionllm_graph::Advice;
use fusionllm_graph::DType;
use insta::assert_snapshot;
use tempfile::TempDir;

use super::*;

fn floats(shape: &[usize], first: f32) -> HostTensor {
    let n = shape.iter().product::<usize>();
    let values: Vec<f32> = (0..n).map(|i| first + i as f32).collect();
    HostTensor::from_f32(shape, &values).unwrap()
}

/// A model of three tensors, one of them wider, and the optimiser's for one.
fn tensors(first: f32) -> [(Part, &'static str, HostTensor); 4] {
    [
        (Part::Model, "wte.weight", floats(&[3, 5], first)),
        (Part::Model, "ln.bias", floats(&[3], first + 100.0)),
        (Part::Model, "steps", HostTensor::from_i64([], &[first as i64]).unwrap()),
        (Part::Optimizer, "wte.weight.exp_avg", floats(&[3, 5], first + 200.0)),
    ]
}

fn types(part: Part) -> Vec<(String, TensorType)> {
    let of_part = tensors(0.0).into_iter().filter(|(p, ..)| *p == part);
    of_part.map(|(_, name, tensor)| (name.to_owned(), tensor.ty().clone())).collect()
}

fn state(step: u64) -> State {
    State { step, updates: step - 1, samples: 16 * step, seed: 7, loss_first: Some(5.5), ..Default::default() }
}

fn begin(dir: &TempDir, step: u64) -> CheckpointWriter {
    let checkpoints = Checkpoints::new(dir.path().join("checkpoints"));
    checkpoints.begin(step, &types(Part::Model), &types(Part::Optimizer)).unwrap()
}

fn save(dir: &TempDir, step: u64) -> PathBuf {
    let mut writer = begin(dir, step);
    for (part, name, tensor) in tensors(step as f32) {
        writer.put(part, name, &tensor).unwrap();
    }
    writer.put_extra("config.json", b"{}").unwrap();
    writer.commit(state(step)).unwrap()
}

/// Whether the checkpoint is whole and as `save` wrote it.
fn assert_whole(path: &Path, step: u64) {
    let checkpoint = Checkpoint::open(path).unwrap();
    assert_eq!(*checkpoint.state(), state(step));
    for (part, name, tensor) in tensors(step as f32) {
        assert_eq!(checkpoint.read(part, name).unwrap(), tensor, "{name}");
    }
    assert_eq!(checkpoint.read_extra("config.json").unwrap(), b"{}");
}

fn hide(dir: &TempDir, error: CheckpointError) -> String {
    error.report().replace(&dir.path().display().to_string(), "DIR")
}

fn names(dir: &TempDir) -> Vec<String> {
    let entries = fs::read_dir(dir.path().join("checkpoints")).unwrap();
    let mut names: Vec<String> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn saved_tensors_are_read_back() {
    let dir = tempfile::tempdir().unwrap();
    let path = save(&dir, 200);
    assert_eq!(path, dir.path().join("checkpoints/step-200"));
    assert_whole(&path, 200);
    let checkpoint = Checkpoint::open(&path).unwrap();
    checkpoint.check(Part::Model, &types(Part::Model)).unwrap();
    checkpoint.check(Part::Optimizer, &types(Part::Optimizer)).unwrap();
    let names: Vec<&str> = checkpoint.tensor_types(Part::Model).map(|(name, _)| name).collect();
    assert_eq!(names, ["ln.bias", "steps", "wte.weight"]);
}

/// The file is one that other programs read, every tensor aligned to its elements.
#[test]
fn the_model_is_a_safetensors_file() {
    let dir = tempfile::tempdir().unwrap();
    let file = fs::read(save(&dir, 2).join("model.safetensors")).unwrap();
    let (header, metadata) = safetensors::SafeTensors::read_metadata(&file).unwrap();
    assert_eq!(metadata.metadata().as_ref().unwrap()["format"], "pt");
    for (name, info) in metadata.tensors() {
        let at = 8 + header + info.data_offsets.0;
        assert_eq!(at * 8 % info.dtype.bitsize(), 0, "{name} at {at}");
    }
    let bias = safetensors::SafeTensors::deserialize(&file).unwrap().tensor("ln.bias").unwrap().data().to_vec();
    assert_eq!(bias, floats(&[3], 102.0).bytes());
}

#[test]
fn the_order_of_arrival_does_not_matter() {
    let dir = tempfile::tempdir().unwrap();
    let forward = fs::read(save(&dir, 3).join("model.safetensors")).unwrap();
    let mut writer = begin(&dir, 3);
    for (part, name, tensor) in tensors(3.0).into_iter().rev() {
        writer.put(part, name, &tensor).unwrap();
    }
    let backward = fs::read(writer.commit(state(3)).unwrap().join("model.safetensors")).unwrap();
    assert_eq!(forward, backward);
}

#[test]
fn a_tensor_is_written_and_read_in_pieces() {
    let dir = tempfile::tempdir().unwrap();
    let whole = fs::read(save(&dir, 3).join("model.safetensors")).unwrap();
    let mut writer = begin(&dir, 3);
    let mut open = tensors(3.0).to_vec();
    // A piece of each tensor in turn.
    for start in (0..).step_by(8) {
        open.retain(|(.., tensor)| start == 0 || start < tensor.bytes().len());
        for (part, name, tensor) in &open {
            let piece = &tensor.bytes()[start..(start + 8).min(tensor.bytes().len())];
            writer.put_piece(*part, name, tensor.ty(), start, piece).unwrap();
        }
        if open.is_empty() {
            break;
        }
    }
    let path = writer.commit(state(3)).unwrap();
    assert_eq!(fs::read(path.join("model.safetensors")).unwrap(), whole);

    let checkpoint = Checkpoint::open(&path).unwrap();
    for (part, name, tensor) in tensors(3.0) {
        let mut reading = checkpoint.begin_reading(part, name).unwrap();
        assert_eq!(reading.ty(), tensor.ty());
        let mut read = Vec::new();
        while read.len() < tensor.bytes().len() {
            read.extend(checkpoint.read_piece(&mut reading, 5).unwrap());
        }
        assert_eq!(read, tensor.bytes());
        assert!(checkpoint.read_piece(&mut reading, 5).unwrap().is_empty());
    }
    // A changed byte is found with the last piece.
    let [(part, name, tensor), ..] = tensors(3.0);
    let file = path.join("model.safetensors");
    let at = whole.windows(tensor.bytes().len()).position(|bytes| bytes == tensor.bytes()).unwrap();
    let mut damaged = whole;
    damaged[at] ^= 1;
    fs::write(&file, damaged).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    let mut reading = checkpoint.begin_reading(part, name).unwrap();
    let last = tensor.bytes().len() - 1;
    checkpoint.read_piece(&mut reading, last).unwrap();
    assert!(checkpoint.read_piece(&mut reading, 1).is_err());
}

#[test]
fn pieces_that_do_not_follow_each_other_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let tensor = floats(&[3], 0.0);
    let (ty, bytes) = (tensor.ty(), tensor.bytes());
    let put = |pieces: &[(usize, usize)]| {
        let mut writer = begin(&dir, 1);
        let put = |(start, end): &(usize, usize)| writer.put_piece(Part::Model, "ln.bias", ty, *start, &bytes[..*end]);
        hide(&dir, pieces.iter().try_for_each(put).unwrap_err())
    };
    assert_snapshot!(put(&[(4, 4)]), @"checkpoint of step 1: bytes 4 to 8 of `ln.bias` came after 0");
    assert_snapshot!(put(&[(0, 4), (0, 4)]), @"checkpoint of step 1: bytes 0 to 4 of `ln.bias` came after 4");
    assert_snapshot!(put(&[(0, 8), (8, 8)]), @"checkpoint of step 1: bytes 8 to 16 of `ln.bias` came after 8");
    let mut writer = begin(&dir, 1);
    writer.put_piece(Part::Model, "ln.bias", ty, 0, &bytes[..4]).unwrap();
    assert_snapshot!(hide(&dir, writer.commit(state(1)).unwrap_err()), @"checkpoint of step 1: 3 tensors did not come, the first is `ln.bias`");
}

#[test]
fn tensors_that_were_not_announced_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = begin(&dir, 1);
    let tensor = floats(&[3], 0.0);
    writer.put(Part::Model, "ln.bias", &tensor).unwrap();
    let error = |r: Result<(), CheckpointError>| hide(&dir, r.unwrap_err());
    assert_snapshot!(error(writer.put(Part::Model, "ln.bias", &tensor)), @"checkpoint of step 1: `ln.bias` came twice");
    assert_snapshot!(error(writer.put(Part::Optimizer, "ln.bias", &tensor)), @"checkpoint of step 1: nobody asked for `ln.bias`");
    assert_snapshot!(error(writer.put(Part::Model, "wte.weight", &tensor)), @"checkpoint of step 1: `wte.weight` came as f32[3], not f32[3, 5]");
    for name in ["manifest.json", "model.safetensors", "../job.toml", "a/b", "..", ""] {
        assert!(writer.put_extra(name, b"").is_err(), "{name:?}");
    }
    assert_snapshot!(hide(&dir, writer.commit(state(1)).unwrap_err()), @"checkpoint of step 1: 2 tensors did not come, the first is `steps`");
    assert!(names(&dir).is_empty());

    assert_snapshot!(hide(&dir, begin(&dir, 1).commit(state(2)).unwrap_err()), @"checkpoint of step 1: its state is that of step 2");

    let twice = [types(Part::Model), types(Part::Model)].concat();
    let begun = Checkpoints::new(dir.path().join("checkpoints")).begin(1, &twice, &[]);
    assert_snapshot!(hide(&dir, begun.unwrap_err()), @"checkpoint of step 1: two tensors have the name `wte.weight`");
    assert!(names(&dir).is_empty());
}

#[test]
fn the_newest_checkpoint_is_found_and_the_oldest_are_removed() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::new(dir.path().join("checkpoints"));
    assert_eq!(checkpoints.list().unwrap(), []);
    checkpoints.clean().unwrap();
    checkpoints.prune(100, 3, None).unwrap();
    assert_snapshot!(hide(&dir, Checkpoint::find(dir.path()).unwrap_err()), @r"
    DIR: there is no checkpoint here
    hint: give a run directory with a checkpoint in it, or a checkpoint, such as runs/0001/checkpoints/step-200
    ");
    for step in [9, 10, 100, 20] {
        save(&dir, step);
    }
    // An unfinished checkpoint is none, in whatever way it is unfinished.
    let unfinished = begin(&dir, 300);
    fs::create_dir(dir.path().join("checkpoints/step-400")).unwrap();
    assert_eq!(Checkpoint::find(dir.path()).unwrap().state().step, 100);
    assert_eq!(Checkpoint::find(&dir.path().join("checkpoints")).unwrap().state().step, 100);
    assert_eq!(Checkpoint::find(&dir.path().join("checkpoints/step-9")).unwrap().state().step, 9);
    assert!(Checkpoint::find(&dir.path().join("checkpoints/step-400")).is_err());

    checkpoints.prune(100, 2, None).unwrap();
    assert_eq!(names(&dir), ["step-100", "step-20", "step-300.partial", "step-400"]);
    drop(unfinished);
    assert_eq!(names(&dir), ["step-100", "step-20", "step-400"]);
    fs::create_dir(dir.path().join("checkpoints/step-500.partial")).unwrap();
    checkpoints.clean().unwrap();
    assert_eq!(names(&dir), ["step-100", "step-20"]);
}

/// Regression: a damaged newest checkpoint stopped a resume, although an older one was there.
#[test]
fn an_older_checkpoint_is_offered_in_the_place_of_a_damaged_one() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::new(dir.path().join("checkpoints"));
    for step in [5, 10, 20, 30] {
        save(&dir, step);
    }
    let path = |step: u64| dir.path().join(format!("checkpoints/step-{step}"));
    for step in [10, 20] {
        fs::write(path(step).join("model.safetensors"), "short").unwrap();
    }
    assert_eq!(
        Checkpoint::open(&path(20)).unwrap_err().older(),
        Some((5, path(5))),
        "not a later one, nor a damaged one"
    );
    fs::remove_dir_all(path(5)).unwrap();
    assert_eq!(Checkpoint::open(&path(20)).unwrap_err().older(), None);
    // A run that goes on from an older checkpoint makes the later ones void, once it has written another.
    save(&dir, 15);
    checkpoints.prune(15, 3, None).unwrap();
    assert_eq!(names(&dir), ["step-10", "step-15"]);
}

#[test]
fn a_checkpoint_of_the_same_step_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::new(dir.path().join("checkpoints"));
    save(&dir, 5);
    let path = save(&dir, 5);
    assert_whole(&path, 5);
    assert_eq!(names(&dir), ["step-5"]);
    // A crash between the two renames: the checkpoint to be replaced still counts, until the new one is there.
    let old = dir.path().join("checkpoints/step-5.old");
    fs::rename(&path, &old).unwrap();
    checkpoints.clean().unwrap();
    assert_eq!(checkpoints.list().unwrap(), [(5, old.clone())]);
    assert_whole(&old, 5);
    save(&dir, 5);
    assert_eq!(checkpoints.list().unwrap(), [(5, path)]);
    assert_eq!(names(&dir), ["step-5"]);
}

#[test]
fn damage_is_detected() {
    let dir = tempfile::tempdir().unwrap();
    let other = tempfile::tempdir().unwrap();
    let (path, other) = (save(&dir, 5), save(&other, 6));
    let (model, manifest) = (path.join("model.safetensors"), path.join("manifest.json"));
    let whole = fs::read(&model).unwrap();
    let written = fs::read_to_string(&manifest).unwrap();
    let error = || {
        let opened = Checkpoint::open(&path);
        let read = opened.and_then(|c| c.read(Part::Model, "wte.weight"));
        hide(&dir, read.unwrap_err())
    };

    fs::write(&model, &whole[..whole.len() - 4]).unwrap();
    assert_snapshot!(error(), @r"
    DIR/checkpoints/step-5: the checkpoint is damaged: model.safetensors: the file is cut short: 300 bytes, but its header describes 304
    hint: use another one; the checkpoints of a run are in its directory checkpoints/
    ");
    // A model of the same shapes, from another checkpoint.
    fs::copy(other.join("model.safetensors"), &model).unwrap();
    assert_snapshot!(error(), @r"
    DIR/checkpoints/step-5: the checkpoint is damaged: `wte.weight` in model.safetensors is not what was saved
    hint: use another one; the checkpoints of a run are in its directory checkpoints/
    ");
    fs::copy(other.join("optimizer.safetensors"), &model).unwrap();
    assert_snapshot!(error(), @r"
    DIR/checkpoints/step-5: the checkpoint is damaged: model.safetensors is of another checkpoint
    hint: use another one; the checkpoints of a run are in its directory checkpoints/
    ");
    fs::remove_file(&model).unwrap();
    assert_snapshot!(error(), @r"
    DIR/checkpoints/step-5: the checkpoint is damaged: model.safetensors is missing
    hint: use another one; the checkpoints of a run are in its directory checkpoints/
    ");
    fs::write(&model, &whole).unwrap();
    assert_whole(&path, 5);

    fs::write(&manifest, &written[..written.len() / 2]).unwrap();
    assert_snapshot!(error(), @r"
    DIR/checkpoints/step-5: the checkpoint is damaged: manifest.json: EOF while parsing a string at line 15 column 50
    hint: use another one; the checkpoints of a run are in its directory checkpoints/
    ");
    fs::write(&manifest, "[]").unwrap();
    assert_snapshot!(error(), @r"
    DIR/checkpoints/step-5: the checkpoint is damaged: manifest.json is not a checkpoint's
    hint: use another one; the checkpoints of a run are in its directory checkpoints/
    ");
    fs::write(&manifest, r#"{"format": "fusionllm-checkpoint", "version": 2}"#).unwrap();
    assert_snapshot!(error(), @r"
    DIR/checkpoints/step-5: the checkpoint has version 2 of the layout, but this program reads version 1
    hint: use the release that wrote it
    ");
    fs::write(&manifest, &written).unwrap();

    fs::write(path.join("config.json"), "{ }").unwrap();
    let extra = Checkpoint::open(&path).unwrap().read_extra("config.json").unwrap_err();
    assert_snapshot!(hide(&dir, extra), @r"
    DIR/checkpoints/step-5: the checkpoint is damaged: config.json is not what was saved
    hint: use another one; the checkpoints of a run are in its directory checkpoints/
    ");
    fs::remove_file(path.join("config.json")).unwrap();
    assert_snapshot!(error(), @r"
    DIR/checkpoints/step-5: the checkpoint is damaged: config.json is missing
    hint: use another one; the checkpoints of a run are in its directory checkpoints/
    ");
}

#[test]
fn a_checkpoint_of_another_model_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::open(&save(&dir, 5)).unwrap();
    let error = |expected: Vec<(String, TensorType)>| hide(&dir, checkpoint.check(Part::Model, &expected).unwrap_err());
    let (mut reshaped, mut more) = (types(Part::Model), types(Part::Model));
    reshaped[0].1 = TensorType::new(DType::F32, [5, 3]);
    more.push(("head".into(), TensorType::new(DType::F32, [1])));
    assert_snapshot!(error(reshaped), @r"
    DIR/checkpoints/step-5: the checkpoint is of another model: `wte.weight` is f32[3, 5] there, and f32[5, 3] in the job
    hint: [model] and train.optimizer.name must have the settings of the run that wrote the checkpoint
    ");
    assert_snapshot!(error(more), @r"
    DIR/checkpoints/step-5: the checkpoint is of another model: it has no `head`
    hint: [model] and train.optimizer.name must have the settings of the run that wrote the checkpoint
    ");
    assert_snapshot!(error(types(Part::Model)[..2].to_vec()), @r"
    DIR/checkpoints/step-5: the checkpoint is of another model: the job has no `steps`
    hint: [model] and train.optimizer.name must have the settings of the run that wrote the checkpoint
    ");
}
