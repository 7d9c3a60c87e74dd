//! The units and scripts in `deploy`, played through kills, restarts and the end of a run. A container has no systemd,
//! so the test does what a unit's lines say.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::ExitStatus;

use crate::scene::{Process, Scene, TINY};

/// A unit of systemd on a machine of its own.
struct Unit {
    lines: Vec<(String, String)>,
}

impl Unit {
    /// Reads a unit. `machine` has the machine's state. The other paths are those of the scene.
    fn read(name: &str, scene: &Scene, machine: &str) -> Self {
        let text = fs::read_to_string(deploy(name)).unwrap().replace("\\\n", " ");
        let home = scene.directory.path().join(machine);
        fs::create_dir_all(home.join("fusionllm-join")).unwrap();
        let text = text
            .replace("/usr/local/bin/fusionllm", env!("CARGO_BIN_EXE_fusionllm"))
            .replace("exec fusionllm", concat!("exec ", env!("CARGO_BIN_EXE_fusionllm")))
            .replace("/etc/fusionllm", scene.directory.path().to_str().unwrap())
            .replace("0.0.0.0:4433", "127.0.0.1:0")
            .replace("%H", "box")
            .replace("%S", home.to_str().unwrap());
        let lines = text.lines().filter(|line| !line.starts_with('#')).filter_map(|line| line.split_once('='));
        Self { lines: lines.map(|(key, value)| (key.to_owned(), value.to_owned())).collect() }
    }

    fn value(&self, key: &str) -> &str {
        self.lines.iter().find(|(k, _)| k == key).map_or("", |(_, value)| value)
    }

    /// Does what systemd does when the machine is switched on, and after [`Self::restarts`].
    fn start(&self, scene: &Scene) -> Process {
        let input = self.value("StandardInput").strip_prefix("file:").unwrap_or("/dev/null");
        let command = format!("exec {} < {input}", self.value("ExecStart"));
        scene.start_words(&["sh", "-c", &command], &[])
    }

    /// Whether systemd starts it again after this end.
    fn restarts(&self, status: ExitStatus) -> bool {
        assert_eq!(self.value("Restart"), "on-failure");
        !status.success() && status.code().is_none_or(|code| self.value("RestartPreventExitStatus") != code.to_string())
    }
}

fn deploy(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy").join(name)
}

/// A job that is over after this many steps.
fn write_job(scene: &Scene, steps: u64) {
    let job = format!(
        "[model]\nfamily = \"gpt2\"\nn_layer = 2\nn_embd = 16\nn_head = 2\n[data]\ncontext = 16\n\
         [train]\nsteps = {steps}\nbatch = 4\nmicro_batch = 1\n[eval]\nevery = 4\nbatches = 2\n"
    );
    fs::write(scene.directory.path().join("job.toml"), job).unwrap();
}

fn ticket(scene: &Scene) -> String {
    fs::read_to_string(scene.run().join("ticket")).unwrap()
}

#[test]
fn a_joiners_unit_comes_back_with_a_ticket_that_has_run_out() {
    let scene = Scene::new();
    let args = ["broker", "--listen", "127.0.0.1:0", "--peers", "1", "--ticket-uses", "1", "--run-dir", "run"];
    let mut broker = scene.start(&[], &[&args[..], &TINY].concat());
    broker.line("fusionllm join ");
    fs::write(scene.directory.path().join("ticket"), ticket(&scene)).unwrap();
    let unit = Unit::read("fusionllm-join.service", &scene, "first");
    let joiner = unit.start(&scene);
    broker.line("box joined");
    broker.line("validation");
    // Nobody new may join with it any more, in two ways.
    scene.start(&[], &["revoke", "run"]).ends_well();
    joiner.signal("KILL");
    assert!(unit.restarts(joiner.end().0));
    let joiner = unit.start(&scene);
    broker.line("box joined");
    broker.line("validation");

    // Another machine is called the same, and has another ticket.
    let invited = scene.output(&["invite", "run"]);
    fs::write(scene.directory.path().join("ticket"), invited.trim().strip_prefix("fusionllm join ").unwrap()).unwrap();
    let twin = Unit::read("fusionllm-join.service", &scene, "second");
    let other = twin.start(&scene);
    broker.line("box-2 joined");
    // One of them is silent for a while, and comes back to its own place.
    joiner.signal("STOP");
    broker.line("box has not answered");
    other.signal("KILL");
    assert!(twin.restarts(other.end().0));
    let other = twin.start(&scene);
    broker.line("box-2 joined");
    joiner.signal("CONT");
    broker.line("validation");

    broker.signal("TERM");
    broker.ends_well();
    for (unit, process) in [(&unit, joiner), (&twin, other)] {
        let (status, rest) = process.end();
        assert!(!unit.restarts(status), "{status}: {rest}");
    }
}

#[test]
fn a_brokers_unit_lives_through_kills_and_ends_with_its_run() {
    let scene = Scene::new();
    write_job(&scene, 1000);
    // It was killed before it had written more than its job.
    fs::create_dir(scene.run()).unwrap();
    fs::write(scene.run().join("job.toml"), "").unwrap();
    fs::write(scene.run().join("metrics.jsonl"), "").unwrap();
    let unit = Unit::read("fusionllm-broker.service", &scene, "broker");
    assert_eq!(unit.value("KillSignal"), "SIGKILL", "joiners wait through a reboot");
    let mut broker = unit.start(&scene);
    broker.line("fusionllm join ");
    // It is killed before anybody has joined, and the ticket stays valid.
    let ticket = ticket(&scene);
    broker.signal("KILL");
    assert!(unit.restarts(broker.end().0));
    let mut broker = unit.start(&scene);
    broker.line("fusionllm join ");
    let joiners: Vec<_> = (0..4).map(|i| scene.join(ticket.trim(), &format!("m{i}"))).collect();
    broker.line("validation");
    broker.signal("KILL");
    assert!(unit.restarts(broker.end().0));
    let mut broker = unit.start(&scene);
    broker.line("training goes on");
    let (status, rest) = broker.end();
    assert!(status.success() && !unit.restarts(status), "{status}: {rest}");
    assert_eq!((scene.saved_step(), scene.last_step()), (1000, 1000));
    joiners.into_iter().for_each(|joiner| drop(joiner.ends_well()));
    // The machine is started again.
    let rest = unit.start(&scene).ends_well();
    assert!(rest.contains("run: the run is over, after 1000 steps"), "{rest}");
    assert!(scene.run().join("summary.json").exists());
    // A job that is wrong is not tried for ever.
    fs::remove_dir_all(scene.run()).unwrap();
    fs::write(scene.directory.path().join("job.toml"), "[train]\nstepps = 3\n").unwrap();
    let (status, rest) = unit.start(&scene).end();
    assert!(status.code() == Some(2) && !unit.restarts(status), "{status}: {rest}");
}

#[test]
fn a_job_of_slurm_goes_on_where_the_last_one_ended() {
    let scene = Scene::new();
    write_job(&scene, 3000);
    let bin = scene.directory.path().join("bin");
    fs::create_dir(&bin).unwrap();
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_fusionllm"), bin.join("fusionllm")).unwrap();
    // Slurm's command starts one task on each node.
    let srun = "#!/bin/sh\nfor i in 0 1; do SLURM_PROCID=$i \"$@\" & done\nwait\n";
    fs::write(bin.join("srun"), srun).unwrap();
    fs::set_permissions(bin.join("srun"), fs::Permissions::from_mode(0o755)).unwrap();
    let script = deploy("slurm.sh");
    let sbatch = || {
        let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
        let variables = [("PATH", path), ("SLURM_NNODES", "2".to_owned())];
        scene.start_words(&["bash", script.to_str().unwrap(), "job.toml"], &variables)
    };
    let run = scene.directory.path().join("run-job");
    // The job's time ends, and then the next one's. Slurm tells the script alone.
    for signal in ["TERM", "KILL"] {
        let mut job = sbatch();
        job.line("validation");
        job.signal(signal);
        match signal {
            "TERM" => drop(job.ends_well()),
            // It kills the whole job.
            _ => job.kill_all(),
        }
        let keys = scene.directory.path().join("run-job.keys");
        assert_eq!(fs::read_dir(keys).unwrap().count(), 2, "a task keeps its key");
    }
    let rest = sbatch().ends_well();
    assert!(rest.contains("training goes on"), "{rest}");
    assert!(run.join("checkpoints/step-3000").exists());
    let rest = sbatch().ends_well();
    assert!(rest.contains("run-job: the run is over, after 3000 steps"), "{rest}");
}
