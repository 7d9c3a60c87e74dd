//! Runs that start from the weights of another run, or of a file from elsewhere.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::json;

use super::{call, losses};

/// A safetensors file of these tensors of single-precision floats and of integers.
fn write_tensors(path: &Path, floats: &[(&str, &[usize], Vec<f32>)], integers: &[(&str, &[usize], Vec<i64>)]) {
    let (mut header, mut bytes) = (serde_json::Map::new(), Vec::new());
    let mut add = |name: &str, dtype: &str, shape: &[usize], content: Vec<u8>| {
        let begin = bytes.len();
        bytes.extend(content);
        header.insert(name.into(), json!({"dtype": dtype, "shape": shape, "data_offsets": [begin, bytes.len()]}));
    };
    for (name, shape, numbers) in floats {
        add(name, "F32", shape, numbers.iter().flat_map(|x| x.to_le_bytes()).collect());
    }
    for (name, shape, numbers) in integers {
        add(name, "I64", shape, numbers.iter().flat_map(|x| x.to_le_bytes()).collect());
    }
    let header = serde_json::Value::from(header).to_string();
    fs::write(path, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &bytes].concat()).unwrap();
}

/// Numbers between -1 and 1 that follow no pattern.
fn numbers(count: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * 2_654_435_761) % 1009) as f32 / 504.0 - 1.0).collect()
}

/// All steps of a job see the same batch, and no optimizer state is left behind, so a run from the weights of another
/// goes on as that would have.
const PLAIN: &str = "[train]\nbatch = 4\nmicro_batch = 2\n[train.optimizer]\nname = \"sgd\"\nlr = 0.05\nmomentum = 0.0\n\
                     warmup = 0\ndecay = \"none\"\n[eval]\nevery = 1\nbatches = 0\n";

/// A ResNet with the images of a tiny CIFAR-10.
fn resnet() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let image = |i: usize| {
        let pixels = (0..3072).map(|p| ((p * 31 + i * 977) * 2_654_435_761 % 251) as u8);
        [(i % 10) as u8].into_iter().chain(pixels).collect::<Vec<u8>>()
    };
    fs::write(dir.path().join("train.bin"), (0..4).flat_map(image).collect::<Vec<u8>>()).unwrap();
    fs::write(dir.path().join("test.bin"), (4..8).flat_map(image).collect::<Vec<u8>>()).unwrap();
    let data = "train = [\"train.bin\"]\ntest = [\"test.bin\"]\naugment = false\nshuffle = false";
    job(&dir, &format!("[model]\nfamily = \"resnet\"\nwidth = 4\n[data]\n{data}\n{PLAIN}"));
    dir
}

/// A job for `loaded.pt2` of the zoo, which has batch norm, a frozen parameter and a buffer of class weights.
fn imported() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    write_samples(dir.path(), 0.0);
    let archive = zoo("loaded.pt2");
    let data = "kind = \"tensors\"\nfiles = [\"samples.safetensors\"]\nvalidation = 0.5\nshuffle = false";
    job(&dir, &format!("[model]\nfile = {archive:?}\n[data]\n{data}\n{PLAIN}"));
    dir
}

fn write_samples(dir: &Path, shift: f32) {
    let x = numbers(8 * 6).into_iter().map(|x| x + shift).collect();
    let y = (0..8).map(|i| i % 3).collect();
    write_tensors(&dir.join("samples.safetensors"), &[("x", &[8, 6], x)], &[("y", &[8], y)]);
}

fn zoo(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/zoo").join(name).canonicalize().unwrap()
}

fn job(dir: &tempfile::TempDir, text: &str) {
    fs::write(dir.path().join("job.toml"), text).unwrap();
}

/// Trains, and returns what was said.
fn train(dir: &Path, run: &str, steps: u32, more: &[&str]) -> String {
    let (run, steps) = (format!("--run-dir={run}"), format!("--steps={steps}"));
    let ran = call(dir, &[&["train", "job.toml", "--peers=2", &run, &steps], more].concat());
    assert_eq!(ran.status, 0, "{}", ran.err);
    ran.err
}

/// Regression: running statistics, frozen parameters and class weights of the file were not read, so a ResNet of 59.5 %
/// began at 20 %.
#[test]
fn a_run_from_the_weights_of_another_goes_on_as_that_would_have() {
    for (dir, weights) in [(resnet(), None), (imported(), Some(zoo("loaded.weights.safetensors")))] {
        let dir = dir.path();
        let weights = weights.map(|weights| format!("--set=model.weights={}", weights.display()));
        let weights: Vec<&str> = weights.iter().map(String::as_str).collect();
        train(dir, "whole", 4, &weights);
        train(dir, "half", 2, &weights);
        let exported = call(dir, &["export", "half", "-o", "out"]);
        assert_eq!(exported.status, 0, "{}", exported.err);
        let whole = losses(&dir.join("whole"));
        assert_eq!(losses(&dir.join("half")), whole[..2]);
        for weights in ["out/model.safetensors", "half/checkpoints/step-2/model.safetensors"] {
            let said = train(dir, "rest", 2, &[&format!("--set=model.weights={weights}")]);
            assert!(!said.contains("note: "), "{said}");
            assert_eq!(losses(&dir.join("rest")), whole[2..], "{weights}");
            fs::remove_dir_all(dir.join("rest")).unwrap();
        }
        // The peers of a run that is resumed need the buffers, too.
        let resumed = call(dir, &["train", "--peers=1", "--steps=4", "--resume", "half"]);
        assert_eq!(resumed.status, 0, "{}", resumed.err);
        assert_eq!(losses(&dir.join("half")), whole);
    }
}

/// A run cannot go on with other data. The advice, followed to the letter, starts from its weights.
#[test]
fn a_run_with_other_data_starts_from_the_weights() {
    let dir = imported();
    train(dir.path(), "first", 2, &[&format!("--set=model.weights={}", zoo("loaded.weights.safetensors").display())]);
    write_samples(dir.path(), 1.0);
    let refused = call(dir.path(), &["train", "--resume", "first", "--steps=4"]).failure(2, dir.path());
    let (message, advice) = refused.split_once("\nhint: restore the files, or start a new run with ").unwrap();
    assert!(message.contains("first/checkpoints/step-2: the data have changed since"), "{message}");
    let line = advice.strip_suffix(" in [model]").unwrap();
    assert_eq!(line, "weights = \"DIR/first/checkpoints/step-2/model.safetensors\"");
    let weights = line.replace("DIR", &dir.path().canonicalize().unwrap().display().to_string());
    let text = fs::read_to_string(dir.path().join("job.toml")).unwrap();
    job(&dir, &text.replace("[model]", &format!("[model]\n{weights}")));
    let said = train(dir.path(), "second", 2, &[]);
    assert!(!said.contains("note: "), "{said}");
    // The buffer of class weights is that of the first run's file.
    let exported = |run: &str| {
        assert_eq!(call(dir.path(), &["export", run, "-o", &format!("{run}.out")]).status, 0);
        let bytes = fs::read(dir.path().join(format!("{run}.out/model.safetensors"))).unwrap();
        let weights: Vec<u8> = [0.25f32, 1.0, 3.0].iter().flat_map(|x| x.to_le_bytes()).collect();
        bytes.windows(weights.len()).any(|window| window == weights)
    };
    assert!(exported("first") && exported("second"));
}

/// A buffer that the archive holds is one that is folded into the graph, which another file would change.
#[test]
fn a_run_does_not_go_on_with_another_constant() {
    let dir = imported();
    let copied = dir.path().join("copied.safetensors");
    fs::copy(zoo("loaded.weights.safetensors"), &copied).unwrap();
    train(dir.path(), "run", 2, &["--set=model.weights=copied.safetensors"]);
    let mut bytes = fs::read(&copied).unwrap();
    let weights: Vec<u8> = [0.25f32, 1.0, 3.0].iter().flat_map(|x| x.to_le_bytes()).collect();
    let at = bytes.windows(weights.len()).position(|window| window == weights).unwrap();
    bytes[at..at + 4].copy_from_slice(&2.0f32.to_le_bytes());
    fs::write(&copied, bytes).unwrap();
    let refused = call(dir.path(), &["train", "--resume", "run", "--steps=4"]).failure(2, dir.path());
    let message =
        "run/checkpoints/step-2: `class_weights` is another tensor now: model.file or model.weights has changed";
    assert!(refused.contains(message), "{refused}");
}

#[test]
fn what_a_file_of_weights_lacks_and_has_besides_is_told() {
    let dir = imported();
    let weights = |floats: &[(&str, &[usize])]| {
        let floats: Vec<_> = floats.iter().map(|(n, s)| (*n, *s, numbers(s.iter().product()))).collect();
        write_tensors(&dir.path().join("w.safetensors"), &floats, &[]);
    };
    let trained: [(&str, &[usize]); 5] = [
        ("body.0.weight", &[8, 6]),
        ("body.1.weight", &[8]),
        ("body.1.bias", &[8]),
        ("body.3.weight", &[3, 8]),
        ("body.3.bias", &[3]),
    ];
    weights(&[&trained[..], &[("ema.weight", &[3])]].concat());
    let said = train(dir.path(), "run", 1, &["--set=model.weights=w.safetensors"]);
    let path = dir.path().canonicalize().unwrap();
    let notes: Vec<String> = said
        .lines()
        .filter(|line| line.starts_with("note: "))
        .map(|line| line.replace(&format!("{}/", path.display()), ""))
        .collect();
    insta::assert_snapshot!(notes.join("\n"), @r"
    note: w.safetensors: it lacks 4 tensors of the model, so they start as in the archive: `body.1.running_mean`, `body.1.running_var`, `class_weights` and 1 more
    note: w.safetensors: the model has no place for 1 tensor in it: `ema.weight`
    ");

    let refused = |floats: &[(&str, &[usize])]| {
        weights(floats);
        let args = ["train", "job.toml", "--run-dir=no", "--set=model.weights=w.safetensors"];
        call(dir.path(), &args).failure(2, dir.path())
    };
    insta::assert_snapshot!(refused(&trained[..3]), @r"
    error: DIR/w.safetensors: the model's `body.3.weight` and 1 more are not among the 3 tensors
    hint: [model] must have the settings of the model that the weights come from
    ");
    insta::assert_snapshot!(refused(&[&trained[..], &[("class_weights", &[4])]].concat()), @r"
    error: DIR/w.safetensors: `class_weights` is f32[4] there, but the model takes f32[3]
    hint: [model] must have the settings of the model that the weights come from
    ");
    let wrapped: Vec<(String, &[usize])> = trained.iter().map(|(n, s)| (format!("module.{n}"), *s)).collect();
    let wrapped: Vec<(&str, &[usize])> = wrapped.iter().map(|(n, s)| (n.as_str(), *s)).collect();
    insta::assert_snapshot!(refused(&wrapped), @r#"
    error: DIR/w.safetensors: the model's `body.0.weight` and 4 more are not among the 5 tensors
    hint: its names begin with `module.`, and the model's do not: save the file again with {name.removeprefix("module."): tensor for name, tensor in state.items()}
    "#);
    assert!(!dir.path().join("no").exists());
}
