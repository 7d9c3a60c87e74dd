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
    write_samples(&dir.path().join("samples.safetensors"));
    let archive = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/zoo").join(name).canonicalize().unwrap();
    let job = format!(
        "[model]\nfile = {archive:?}\n[data]\nkind = \"tensors\"\nfiles = [\"samples.safetensors\"]\nvalidation = 0.5\n\
         [eval]\nevery = 1\n[train]\nsteps = 2\n{train}\n"
    );
    let path = dir.path().join("job.toml");
    fs::write(&path, job).unwrap();
    (dir, path)
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
