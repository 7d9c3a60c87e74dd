//! The best checkpoint of a run.

use std::path::{Path, PathBuf};

use super::{CHECKPOINTS, read_metrics};
use crate::checkpoint::{CheckpointError, Checkpoints};

/// The step and the directory of the checkpoint of a run that has the lowest validation loss. `None` if no checkpoint's
/// step was validated.
///
/// # Errors
///
/// The run's directory cannot be read.
pub fn best_checkpoint(run: &Path) -> Result<Option<(u64, PathBuf)>, CheckpointError> {
    let losses = read_metrics(run)?.into_iter().filter_map(|metrics| Some((metrics.step, metrics.val_loss?)));
    // A step that was done again, after the run went back, counts as it was done last.
    let losses: std::collections::BTreeMap<u64, f64> = losses.collect();
    let saved = Checkpoints::new(run.join(CHECKPOINTS)).list()?.into_iter();
    let validated = saved.filter_map(|(step, path)| Some((*losses.get(&step)?, step, path)));
    Ok(validated.min_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, step, path)| (step, path)))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn the_lowest_validation_loss_decides_among_saved_steps() {
        let run = tempfile::tempdir().unwrap();
        let line = |step: u64, val_loss: f64| {
            format!(
                r#"{{"step":{step},"loss":1.0,"step_s":1.0,"tokens_per_s":1.0,"bytes_sent":0,"lr":1.0,"grad_norm":1.0,"val_loss":{val_loss}}}"#
            )
        };
        // Step 4 was done twice, and step 6 has no checkpoint.
        let lines = [line(2, 3.0), line(4, 1.0), line(4, 2.5), line(6, 0.5), line(8, 2.9)];
        fs::write(run.path().join("metrics.jsonl"), lines.join("\n")).unwrap();
        assert_eq!(read_metrics(run.path()).unwrap().len(), 5);
        assert_eq!(best_checkpoint(run.path()).unwrap(), None, "nothing is saved");
        for step in [2, 4, 8] {
            let checkpoint = run.path().join(format!("checkpoints/step-{step}"));
            fs::create_dir_all(&checkpoint).unwrap();
            fs::write(checkpoint.join("manifest.json"), "{}").unwrap();
        }
        let best = best_checkpoint(run.path()).unwrap();
        assert_eq!(best.map(|(step, _)| step), Some(4));
    }
}
