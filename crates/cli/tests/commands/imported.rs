//! Models from PyTorch's `torch.export`.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::json;

use super::call;

/// Eight samples of 16 tokens below 100 in `x` and `y`.
fn write_samples(path: &Path) {
    let column: Vec<u8> = (0..8 * 16i64).flat_map(|i| (i * 7 % 100).to_le_bytes()).collect();
    let half = column.len();
    let tensor = |begin: usize| json!({"dtype": "I64", "shape": [8, 16], "data_offsets": [begin, begin + half]});
    let header = json!({"x": tensor(0), "y": tensor(half)}).to_string();
    fs::write(path, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &column, &column].concat()).unwrap();
}

/// A directory with samples and a job that trains a language model, which was exported for two samples and shifts its
/// labels by itself.
fn shifted(train: &str) -> (tempfile::TempDir, PathBuf) {
    exported("shifted.pt2", train)
}

fn exported(name: &str, train: &str) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let archive = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/zoo").join(name).canonicalize().unwrap();
    let path = exported_at(dir.path(), &archive, train);
    (dir, path)
}

/// Writes samples into `directory`, and a job that trains the model of an archive on them.
pub(super) fn exported_at(directory: &Path, archive: &Path, train: &str) -> PathBuf {
    write_samples(&directory.join("samples.safetensors"));
    let job = format!(
        "[model]\nfile = {archive:?}\n[data]\nkind = \"tensors\"\nfiles = [\"samples.safetensors\"]\nvalidation = 0.5\n\
         [eval]\nevery = 1\n[train]\nsteps = 2\n{train}\n"
    );
    let path = directory.join("job.toml");
    fs::write(&path, job).unwrap();
    path
}

/// Regression: the report had an accuracy of 1387 %, and samples under the name of targets.
#[test]
fn where_targets_are_unknown_samples_are_counted_and_no_accuracy_is_shown() {
    let (dir, _) = shifted("batch = 4\nmicro_batch = 2");
    let ran = call(dir.path(), &["train", "job.toml", "--peers=2", "--run-dir=run"]);
    assert_eq!(ran.status, 0, "{}", ran.err);
    let said = format!("{}{}", ran.err, ran.out);
    assert!(said.contains("samples/s") && said.contains("validation loss"), "{said}");
    assert!(!said.contains("accuracy") && !said.contains("targets/s"), "{said}");
    let metrics = fs::read_to_string(dir.path().join("run/metrics.jsonl")).unwrap();
    assert!(metrics.contains("val_loss") && !metrics.contains("val_accuracy"), "{metrics}");
}

/// `torch.export` makes one input of a tensor that is given twice, and a model of tokens then trains on its labels.
#[test]
fn an_input_that_the_model_does_not_read_is_told() {
    let (dir, _) = exported("one_tensor_twice.pt2", "batch = 2\nmicro_batch = 2");
    let ran = call(dir.path(), &["train", "job.toml", "--peers=1", "--run-dir=run"]);
    assert_eq!(ran.status, 0, "{}", ran.err);
    assert!(
        ran.err.contains("one_tensor_twice: the model does not read `x`. If torch.export.export got"),
        "{}",
        ran.err
    );
    let (dir, _) = shifted("batch = 2\nmicro_batch = 2");
    let ran = call(dir.path(), &["train", "job.toml", "--peers=1", "--run-dir=run"]);
    assert!(!ran.err.contains("does not read"), "{}", ran.err);
}

/// Regression: the advice was `micro_batch = 2` even where that does not divide the batch.
#[test]
fn a_model_of_a_fixed_batch_trains_with_the_advice_followed() {
    for (train, advice) in [
        ("batch = 3\nmicro_batch = 1", "batch = 4 and micro_batch = 2"),
        ("batch = 4\nmicro_batch = 4", "micro_batch = 2"),
    ] {
        let (dir, path) = shifted(train);
        let args = ["train", "job.toml", "--peers=1", "--run-dir=run"];
        let failure = call(dir.path(), &args).failure(2, dir.path());
        let asked = format!("hint: write {advice} in [train], or export the model with a dynamic batch dimension");
        assert!(failure.ends_with(&asked), "{failure}");
        let job = fs::read_to_string(&path).unwrap();
        let followed = advice.split(" and ").fold(job.replace(train, ""), |job, line| format!("{job}{line}\n"));
        fs::write(&path, followed).unwrap();
        let ran = call(dir.path(), &args);
        assert_eq!(ran.status, 0, "{}", ran.err);
    }
    // The planner takes the size of the archive, which is none of those that it would try.
    let (dir, _) = shifted("batch = 6\nmicro_batch = \"auto\"");
    let ran = call(dir.path(), &["train", "job.toml", "--peers=1", "--run-dir=run"]);
    assert_eq!(ran.status, 0, "{}", ran.err);
}

/// The first number that forward returned was trained: an accuracy, whose gradient is 0.
#[test]
fn of_several_outputs_the_loss_is_trained_and_named() {
    let (dir, path) = exported("several_outputs.pt2", "batch = 4\nmicro_batch = 2");
    let train = |args: &[&str]| call(dir.path(), &[&["train", "job.toml", "--peers=1"], args].concat());
    let first = |run: &str| {
        let metrics = fs::read_to_string(dir.path().join(run).join("metrics.jsonl")).unwrap();
        let step: serde_json::Value = serde_json::from_str(metrics.lines().next().unwrap()).unwrap();
        (step["loss"].as_f64().unwrap(), step["grad_norm"].as_f64().unwrap(), step.get("val_accuracy").is_some())
    };
    let told = "several_outputs.pt2: output 2 (`loss`) is the loss, not output 1 (`penalty`); `loss` in [model], or \
                --loss, chooses another; no parameter has a gradient of output 0 (`accuracy`)\n";
    let ran = train(&["--run-dir=run"]);
    assert!(ran.status == 0 && ran.err.contains(told), "{}", ran.err);
    let (loss, grad_norm, has_accuracy) = first("run");
    assert!(loss < 20.0 && grad_norm > 0.0 && has_accuracy, "{loss} {grad_norm}");

    for (run, choice) in [("by-name", "model.loss=penalty"), ("by-position", "model.loss=1")] {
        let ran = train(&["--run-dir", run, "--set", choice]);
        assert!(ran.status == 0 && ran.err.contains("output 1 (`penalty`) is the loss, not"), "{}", ran.err);
        // The sum of squares of 800 normal numbers.
        let (penalty, _, has_accuracy) = first(run);
        assert!((600.0..1000.0).contains(&penalty) && !has_accuracy, "{penalty}");
        assert!(fs::read_to_string(dir.path().join(run).join("job.toml")).unwrap().contains("\nloss = "));
    }
    let refused = |choice: &str| train(&["--set", choice]).failure(2, path.parent().unwrap());
    let hint = "hint: name another one by its position or name: output 1 (`penalty`) and output 2 (`loss`)";
    let accuracy = refused("model.loss=0");
    assert!(
        accuracy.contains("several_outputs.pt2: no parameter has a gradient of output 0 (`accuracy`)\n"),
        "{accuracy}"
    );
    assert!(accuracy.ends_with(hint) && refused("model.loss=3").ends_with(hint), "{accuracy}");
}

/// Regression: a third of the steps of a run was skipped, and the words for it were hard to find. The model divides each
/// row by its sum, and one row in twelve is zero.
#[test]
fn skipped_steps_stand_in_the_report_with_the_operator_and_the_advice() {
    let dir = tempfile::tempdir().unwrap();
    let numbers: Vec<u8> =
        (0..24 * 8u16).flat_map(|i| if i / 8 % 12 == 5 { 0.0 } else { f32::from(i % 7) }.to_le_bytes()).collect();
    let classes: Vec<u8> = (0..24i64).flat_map(|i| (i % 3).to_le_bytes()).collect();
    let ends = [numbers.len(), numbers.len() + classes.len()];
    let header = json!({
        "x": {"dtype": "F32", "shape": [24, 8], "data_offsets": [0, ends[0]]},
        "y": {"dtype": "I64", "shape": [24], "data_offsets": ends},
    });
    let header = header.to_string();
    let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &numbers, &classes].concat();
    fs::write(dir.path().join("rows.safetensors"), file).unwrap();
    let archive = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/zoo/shares.pt2").canonicalize().unwrap();
    let job = format!(
        "[model]\nfile = {archive:?}\n[data]\nkind = \"tensors\"\nfiles = [\"rows.safetensors\"]\nvalidation = 0.0\n\
         shuffle = false\n[eval]\nevery = 0\n[train]\nsteps = 30\nbatch = 4\nmicro_batch = 2\n"
    );
    fs::write(dir.path().join("job.toml"), job).unwrap();
    let ran = call(dir.path(), &["train", "job.toml", "--peers=3", "--run-dir=run"]);
    assert_eq!(ran.status, 0, "{}", ran.err);
    // The lines end where a terminal would.
    let words = ran.out.split_whitespace().collect::<Vec<_>>().join(" ");
    let (_, line) = words.split_once("skipped ").unwrap();
    assert!(line.contains("10 of 30 steps (33 %) taught the model nothing"), "{line}");
    assert!(line.contains("made the first number that is not finite: the result of div "), "{line}");
    assert!(line.contains("/rows.safetensors, row 5"), "{line}");
    assert!(line.contains("look at the data of this step"), "{line}");
    assert!(ran.err.contains("step 23: 8 of 23 steps were skipped so far"), "{}", ran.err);
    assert!(!ran.err.contains("goes on without") && !ran.err.contains("waiting for more"), "{}", ran.err);
    let summary: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(dir.path().join("run/summary.json")).unwrap()).unwrap();
    assert_eq!(summary["skipped_steps"], 10);
    assert_eq!(summary["peers"].as_array().unwrap().len(), 3);
    assert!(summary["skipped_because"].as_str().unwrap().contains("the result of div "), "{summary}");
}
