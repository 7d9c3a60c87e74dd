//! Runs in odd places: moved, copied, and on poor file systems.

use std::fs;
use std::path::{Path, PathBuf};

use super::imported::exported_at;
use super::{TINY, call, losses};

/// A project in `place`, with an archive, samples, and a run of two steps that is to have four.
fn project(place: &Path) -> PathBuf {
    let archive = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/zoo/shifted.pt2");
    fs::create_dir_all(place.join("models")).unwrap();
    fs::copy(archive, place.join("models/shifted.pt2")).unwrap();
    exported_at(place, Path::new("models/shifted.pt2"), "batch = 4\nmicro_batch = 2\n[checkpoint]\nevery = 1");
    let ran = call(place, &["train", "job.toml", "--peers=2", "--run-dir=runs/1"]);
    assert_eq!(ran.status, 0, "{}", ran.err);
    place.join("runs/1")
}

/// The weights that a run's export has.
fn exported_from(run: &Path) -> Vec<u8> {
    let to = tempfile::tempdir().unwrap();
    let out = to.path().join("out").display().to_string();
    let ran = call(to.path(), &["export", &run.display().to_string(), "-o", &out, "--format=pt2-weights"]);
    assert_eq!(ran.status, 0, "{}", ran.err);
    fs::read(to.path().join("out/model.safetensors")).unwrap()
}

/// The losses of the run's third and fourth step.
fn went_on(run: &Path) -> Vec<(f64, Option<f64>)> {
    let from = tempfile::tempdir().unwrap();
    let ran = call(from.path(), &["train", "--resume", &run.display().to_string(), "--steps=4", "--peers=2"]);
    assert_eq!(ran.status, 0, "{}", ran.err);
    losses(run)[2..].to_vec()
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap().map(Result::unwrap) {
        let target = to.join(entry.file_name());
        match entry.file_type().unwrap().is_dir() {
            true => copy(&entry.path(), &target),
            false => drop(fs::copy(entry.path(), target).unwrap()),
        }
    }
}

/// Regression: the archive was looked for where it had been, though checkpoints have the weights.
#[test]
fn a_moved_run_of_an_imported_model_is_exported_and_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let old = dir.path().join("old");
    let run = project(&old);
    let weights = exported_from(&run);
    let stayed = dir.path().join("stayed");
    copy(&run, &stayed);

    // The whole project is moved. The run and one of its checkpoints find what was moved with them.
    let new = dir.path().join("elsewhere/new");
    fs::create_dir_all(new.parent().unwrap()).unwrap();
    fs::rename(&old, &new).unwrap();
    assert!(exported_from(&new.join("runs/1")) == weights);
    assert!(exported_from(&new.join("runs/1/checkpoints/step-2")) == weights);
    let expected = went_on(&new.join("runs/1"));

    // The run alone is there, and the archive is gone: the run has the graph, and checkpoints have the weights.
    fs::create_dir_all(&old).unwrap();
    fs::rename(new.join("samples.safetensors"), old.join("samples.safetensors")).unwrap();
    assert!(exported_from(&stayed) == weights);
    assert_eq!(went_on(&stayed), expected);
    assert!(fs::metadata(stayed.join("graph.pt2")).unwrap().len() < weights.len() as u64 + 65_536);

    // Without its data, it says where they were.
    fs::remove_file(old.join("samples.safetensors")).unwrap();
    let ran = call(dir.path(), &["train", "--resume", "stayed", "--steps=6"]);
    assert_eq!(ran.status, 2, "{}", ran.err);
    assert!(ran.err.contains("no file matches") && ran.err.contains("samples.safetensors"), "{}", ran.err);
}

/// A run that was copied with a file of its own reads its own, and not that of the run that it was copied from.
#[test]
fn a_copied_run_has_files_of_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("runs/1");
    fs::create_dir_all(&run).unwrap();
    fs::write(run.join("text.txt"), "a text of the run's own, ".repeat(200)).unwrap();
    let files = format!("--set=data.files=[{:?}]", run.join("text.txt").display().to_string());
    let start = ["train", "--steps=2", "--peers=1", "--run-dir=runs/1", &files];
    let ran = call(dir.path(), &[&start[..], &TINY].concat());
    assert_eq!(ran.status, 0, "{}", ran.err);
    copy(&run, &dir.path().join("copied"));
    fs::write(run.join("text.txt"), "another text, which nobody has trained on, ".repeat(200)).unwrap();
    let ran = call(dir.path(), &["train", "--resume=copied", "--steps=3", "--peers=1"]);
    assert_eq!(ran.status, 0, "{}", ran.err);
    let ran = call(dir.path(), &["train", "--resume=runs/1", "--steps=3", "--peers=1"]);
    assert!(ran.err.contains("the data have changed since"), "{}", ran.err);
}

/// The weights that a run started from are needed only where some of them are not in its checkpoints.
#[test]
fn a_run_goes_on_without_the_weights_that_it_has_trained() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let args = ["train", "--steps=1", "--peers=1", "--run-dir=first"];
    assert_eq!(call(dir.path(), &[&args[..], &TINY].concat()).status, 0);
    fs::copy(at("first/checkpoints/step-1/model.safetensors"), at("weights.safetensors")).unwrap();
    let start = ["train", "--steps=2", "--peers=1", "--set=model.weights=weights.safetensors"];
    let whole = [&start[..], &["--run-dir=whole"], &TINY].concat();
    let part = [&start[..], &["--run-dir=part", "--set=model.freeze=[\"h.0\"]"], &TINY].concat();
    assert_eq!((call(dir.path(), &whole).status, call(dir.path(), &part).status), (0, 0));
    fs::rename(at("weights.safetensors"), at("moved.safetensors")).unwrap();

    let ran = call(dir.path(), &["train", "--resume=whole", "--steps=3", "--peers=1"]);
    assert_eq!(ran.status, 0, "{}", ran.err);
    let part = ["train", "--resume=part", "--steps=3", "--peers=1"];
    insta::assert_snapshot!(call(dir.path(), &part).failure(2, dir.path()), @r"
    error: DIR/weights.safetensors: the weights that the run started from are not there
    hint: put them back; a run goes on with them from elsewhere with --resume RUN --set model.weights=PATH
    ");
    let ran = call(dir.path(), &[&part[..], &["--set=model.weights=moved.safetensors"]].concat());
    assert_eq!(ran.status, 0, "{}", ran.err);
}

/// Lustre, NFS and file systems in user space say in several ways that they have no locks, and that they do not flush a
/// directory.
#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
#[test]
fn a_run_goes_on_where_files_cannot_be_locked_or_flushed() {
    use std::collections::BTreeMap;

    use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};

    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_owned();
    // The filter is that of one thread, and of the processes that it starts.
    let ran = std::thread::spawn(move || {
        let refuse = |number: i64, error: i32| {
            let rules = BTreeMap::from([(number, Vec::new())]);
            let action = SeccompAction::Errno(error as u32);
            let arch = std::env::consts::ARCH.try_into().unwrap();
            let filter = SeccompFilter::new(rules, SeccompAction::Allow, action, arch).unwrap();
            seccompiler::apply_filter(&BpfProgram::try_from(filter).unwrap()).unwrap();
        };
        refuse(libc::SYS_flock, libc::ENOLCK);
        refuse(libc::SYS_fsync, libc::EINVAL);
        let args = ["train", "--steps=2", "--peers=1", "--run-dir=run"];
        call(&path, &[&args[..], &TINY].concat())
    });
    let ran = ran.join().unwrap();
    assert_eq!(ran.status, 0, "{}", ran.err);
    assert!(ran.err.contains("there are no locks on this file system (No locks available"), "{}", ran.err);
    assert!(ran.err.contains("does not say when a file is on the disk (Invalid argument"), "{}", ran.err);
    let ran = call(dir.path(), &["train", "--resume=run", "--steps=3", "--peers=1"]);
    assert_eq!(ran.status, 0, "{}", ran.err);
    assert!(!ran.err.contains("no locks on this file system"), "{}", ran.err);
}
