use fusionllm_events::Event;
use fusionllm_graph::Advice;
use insta::assert_snapshot;

use super::*;

fn line(step: u64) -> StepMetrics {
    StepMetrics { step, loss: Some(5.5), step_s: 0.25, tokens_per_s: 512.0, bytes_sent: 1024, ..Default::default() }
}

#[test]
fn a_run_writes_the_documented_files() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a/run");
    let mut run = RunDir::create(Some(&path), "[train]\n").unwrap();
    run.write_plan("{}").unwrap();
    run.write_tickets("fusionllmabc", "fusionllmowner").unwrap();
    assert_eq!(fs::read_to_string(path.join("ticket")).unwrap(), "fusionllmabc\n");
    assert_eq!(read_owner_ticket(&path).unwrap().as_deref(), Some("fusionllmowner\n"));
    #[cfg(unix)]
    for name in ["ticket", "owner-ticket"] {
        use std::os::unix::fs::PermissionsExt;
        assert_eq!(fs::metadata(path.join(name)).unwrap().permissions().mode() & 0o777, 0o600, "{name}");
    }
    run.record(&StepMetrics { lr: 3e-4, grad_norm: Some(1.5), ..line(1) }).unwrap();
    let measured = StepMetrics { val_loss: Some(2.0), val_accuracy: Some(0.5), ..line(2) };
    run.record(&measured).unwrap();
    run.record(&StepMetrics { loss: None, skipped: true, ..line(3) }).unwrap();
    let peers = vec![PeerSummary { name: "a0".into(), backend: "cpu".into(), operators: 37, ..Default::default() }];
    let links = vec![LinkSummary {
        from: "a0".into(),
        to: "b0".into(),
        codec: "none".into(),
        ratio: Some(1.0),
        ..Default::default()
    }];
    let summary =
        Summary { steps: 3, loss_first: Some(5.5), loss_last: Some(f64::NAN), peers, links, ..Default::default() };
    run.write_summary(&summary).unwrap();
    run.remove_tickets().unwrap();
    assert_eq!(read_owner_ticket(&path).unwrap(), None);

    let mut names: Vec<_> = fs::read_dir(&path).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["events.jsonl", "job.toml", "metrics.jsonl", "plan.json", "summary.json", "tensorboard"]);
    assert_eq!(read_metrics(&path).unwrap()[1], measured);
    assert_snapshot!(fs::read_to_string(path.join("metrics.jsonl")).unwrap(), @r#"
    {"step":1,"loss":5.5,"step_s":0.25,"tokens_per_s":512.0,"bytes_sent":1024,"lr":0.0003,"grad_norm":1.5}
    {"step":2,"loss":5.5,"step_s":0.25,"tokens_per_s":512.0,"bytes_sent":1024,"lr":0.0,"grad_norm":null,"val_loss":2.0,"val_accuracy":0.5}
    {"step":3,"loss":null,"step_s":0.25,"tokens_per_s":512.0,"bytes_sent":1024,"lr":0.0,"grad_norm":null,"skipped":true}
    "#);
    assert_snapshot!(fs::read_to_string(path.join("summary.json")).unwrap(), @r#"
    {
      "steps": 3,
      "skipped_steps": 0,
      "loss_first": 5.5,
      "loss_last": null,
      "median_step_s": null,
      "predicted_step_s": null,
      "bytes_sent_per_step": null,
      "training_overhead_ratio": null,
      "overhead_s": {},
      "scheduler": "",
      "schedule": "",
      "micro_batches": 0,
      "compression": "",
      "peers": [
        {
          "name": "a0",
          "backend": "cpu",
          "device": "",
          "operators": 37,
          "compute_s": null,
          "predicted_compute_s": null,
          "codec_s": null,
          "peak_memory_bytes": null,
          "resident_memory_bytes": null,
          "predicted_memory_bytes": null
        }
      ],
      "links": [
        {
          "from": "a0",
          "to": "b0",
          "codec": "none",
          "ratio": 1.0,
          "relative_error": null,
          "bytes_per_step": null,
          "measured_bytes_per_s": null
        }
      ],
      "incidents": []
    }
    "#);
}

/// A run that never begins removes its files. A file that was there before it is not among them.
#[test]
fn a_file_with_the_name_of_the_graph_is_not_taken_for_the_runs_own() {
    let dir = tempfile::tempdir().unwrap();
    let graph = dir.path().join("graph.pt2");
    fs::write(&graph, "a model of the user").unwrap();
    assert!(matches!(RunDir::create(Some(dir.path()), ""), Err(RunDirError::Taken { found: "graph.pt2", .. })));
    assert!(graph.exists() && !dir.path().join("job.toml").exists());
}

#[test]
fn another_run_is_not_overwritten() {
    let dir = tempfile::tempdir().unwrap();
    let hide = |e: RunDirError| e.report().replace(&dir.path().display().to_string(), "DIR");
    let path = dir.path().join("run");
    drop(RunDir::create(Some(&path), "first").unwrap());
    assert_snapshot!(hide(RunDir::create(Some(&path), "second").unwrap_err()), @r"
    DIR/run: another run is there (metrics.jsonl)
    hint: choose another --run-dir; the run there has no checkpoint to continue from
    ");
    fs::remove_file(path.join("metrics.jsonl")).unwrap();
    assert_snapshot!(hide(RunDir::create(Some(&path), "second").unwrap_err()), @r"
    DIR/run: another run is there (job.toml)
    hint: choose another --run-dir; the run there has no checkpoint to continue from
    ");
    assert!(fs::read_to_string(path.join("job.toml")).unwrap().ends_with("first"));

    let run = RunDir::resume(&path, 0).unwrap();
    assert_snapshot!(hide(RunDir::resume(&path, 0).unwrap_err()), @r"
    DIR/run: another process is running in this directory
    hint: wait for it, stop it, or choose another --run-dir
    ");
    drop(run);
    assert_snapshot!(hide(RunDir::resume(dir.path(), 0).unwrap_err()), @r"
    DIR: there is no run here (job.toml is missing)
    hint: give the directory of a run, such as runs/0001
    ");
    fs::write(dir.path().join("file"), "").unwrap();
    assert_snapshot!(hide(RunDir::create(Some(&dir.path().join("file")), "").unwrap_err()), @r"
    DIR/file: cannot be created
    caused by: File exists (os error 17)
    hint: a file stands where a directory is needed: choose another path, or remove that file
    ");
}

/// Regression: a broker whose port was taken left its directory behind, and the next attempt took that for a run to
/// continue.
#[test]
fn a_run_that_never_began_leaves_nothing_of_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a/run");
    let run = RunDir::create(Some(&path), "").unwrap();
    run.write_identity(b"key").unwrap();
    run.discard();
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "the directories were made for the run");

    fs::create_dir_all(&path).unwrap();
    fs::write(path.join("notes.txt"), "").unwrap();
    RunDir::create(Some(&path), "").unwrap().discard();
    let left: Vec<_> = fs::read_dir(&path).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left, ["notes.txt"]);

    drop(RunDir::create(Some(&path), "first").unwrap());
    RunDir::resume(&path, 0).unwrap().discard();
    assert!(path.join("job.toml").is_file(), "a run that was there before stays");
    fs::write(path.join("state"), "").unwrap();
    let error = RunDir::create(Some(&path), "second").unwrap_err().report();
    let path = path.display();
    assert!(error.ends_with(&format!("or continue that run: --resume {path}, without --run-dir")), "{error}");
}

#[test]
fn resuming_removes_later_steps() {
    let dir = tempfile::tempdir().unwrap();
    let mut run = RunDir::create(Some(dir.path()), "").unwrap();
    for step in 1..=4 {
        run.record(&line(step)).unwrap();
    }
    // The process stopped in the middle of a line.
    run.metrics.write_all(b"{\"step\": 5, \"lo").unwrap();
    run.write_summary(&Summary::default()).unwrap();
    fs::create_dir_all(run.checkpoints().join("step-5.partial")).unwrap();
    drop(run);
    assert_eq!(read_metrics(dir.path()).unwrap().len(), 4);

    let mut run = RunDir::resume(dir.path(), 2).unwrap();
    run.record(&line(3)).unwrap();
    let steps: Vec<u64> = read_metrics(dir.path()).unwrap().iter().map(|m| m.step).collect();
    assert_eq!(steps, [1, 2, 3]);
    assert!(!dir.path().join("summary.json").exists());
    assert_eq!(fs::read_dir(run.checkpoints()).unwrap().count(), 0);
}

#[test]
fn a_resumed_run_goes_on_with_its_events() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run");
    let event = |step| Timed { time: step as f64, event: Event::Saved { step } };
    let mut run = RunDir::create(Some(&path), "").unwrap();
    assert_eq!(read_events(&path).unwrap(), []);
    run.tell(&event(1)).unwrap();
    drop(run);
    let mut run = RunDir::resume(&path, 0).unwrap();
    run.tell(&event(2)).unwrap();
    assert_eq!(read_events(&path).unwrap(), [event(1), event(2)]);
    // A line that is not whole, and an event of a later version.
    let mut text = fs::read_to_string(path.join("events.jsonl")).unwrap();
    text += "{\"time\":3.0,\"event\":\"teleported\"}\n{\"time\":4.0,\"ev";
    fs::write(path.join("events.jsonl"), text).unwrap();
    assert_eq!(read_events(&path).unwrap(), [event(1), event(2)]);
    fs::remove_file(path.join("events.jsonl")).unwrap();
    assert_eq!(read_events(&path).unwrap(), []);
}

#[test]
fn runs_are_numbered() {
    let dir = tempfile::tempdir().unwrap();
    let runs = dir.path().join("runs");
    assert_eq!(next_in(&runs).unwrap(), (runs.join("0001"), vec![runs.join("0001"), runs.clone()]));
    fs::create_dir(runs.join("0041")).unwrap();
    fs::create_dir(runs.join("mine")).unwrap();
    assert_eq!(next_in(&runs).unwrap(), (runs.join("0042"), vec![runs.join("0042")]));
}

#[test]
fn runs_that_begin_at_once_do_not_meet() {
    let dir = tempfile::tempdir().unwrap();
    let (runs, begin) = (dir.path().join("runs"), std::sync::Barrier::new(8));
    let take = || {
        begin.wait();
        (0..16).map(|_| next_in(&runs).unwrap().0).collect::<Vec<_>>()
    };
    let mut taken: Vec<PathBuf> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(take)).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    taken.sort();
    taken.dedup();
    assert_eq!(taken.len(), 8 * 16);
}

#[test]
fn a_full_disk_has_a_hint() {
    let path = Path::new("runs/0001/metrics.jsonl");
    let error = DiskError::at(path, "written")(io::Error::from(io::ErrorKind::StorageFull));
    assert_snapshot!(error.report(), @r"
    runs/0001/metrics.jsonl: cannot be written
    caused by: no storage space
    hint: free some space, then continue with --resume; all earlier checkpoints are intact
    ");
}

#[test]
fn a_run_keeps_the_files_of_its_tokenizer() {
    let dir = tempfile::tempdir().unwrap();
    let made = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/tokenizers");
    let open = |path: &Path| Tokenizer::open(path).unwrap();
    let run = RunDir::create(Some(&dir.path().join("run")), "").unwrap();
    let own = run.path().join("tokenizer");
    run.keep_tokenizer(&Tokenizer::Gpt2, None).unwrap();
    assert!(!own.exists());
    let names = || {
        let mut names: Vec<_> = fs::read_dir(&own).unwrap().map(|e| e.unwrap().file_name()).collect();
        names.sort();
        names
    };
    run.keep_tokenizer(&open(&made.join("byte_level")), None).unwrap();
    assert_eq!(names(), ["chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]);
    // Its own files stay, and those of another one replace them.
    run.keep_tokenizer(&open(&own), None).unwrap();
    assert_eq!(open(&own), open(&made.join("byte_level")));
    run.keep_tokenizer(&open(&made.join("llama/tokenizer.json")), None).unwrap();
    assert_eq!((names().len(), open(&own)), (2, open(&made.join("llama"))));
    run.discard();
    assert!(!run.path().exists());
}
