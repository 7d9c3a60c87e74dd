//! Mistakes of users. Each gets one message that names the thing, the place and the remedy. The status is 2, and
//! nothing is written.

use std::fs;
use std::path::Path;

use fusionllm_graph::{Builder, DType, Init};
use insta::assert_snapshot;

use super::{TINY, call, finished_run};

/// A directory with these files.
fn directory(files: &[(&str, &str)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, content) in files {
        fs::write(dir.path().join(name), content).unwrap();
    }
    dir
}

/// The message of a call that must refuse its input and write nothing.
fn refused(dir: &Path, args: &[&str]) -> String {
    let names = || {
        let mut names: Vec<_> = fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name()).collect();
        names.sort();
        names
    };
    let before = names();
    let message = call(dir, args).failure(2, dir);
    assert_eq!(names(), before, "a refused call leaves nothing behind");
    assert!(message.starts_with("error: "), "{message}");
    message
}

#[test]
fn an_address_for_the_page_that_is_taken() {
    let dir = directory(&[]);
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = taken.local_addr().unwrap().to_string();
    let message = refused(dir.path(), &["train", "--dashboard", &addr]).replace(&addr, "ADDR");
    let (message, rest) = message.split_once("\ncaused by: ").unwrap();
    assert_eq!(message, "error: --dashboard ADDR: cannot listen at this address");
    assert!(rest.ends_with("\nhint: choose another port; port 0 takes any that is free"), "{rest}");
}

#[test]
fn job_files() {
    let dir = directory(&[
        ("broken.toml", "[train\nsteps = 3\n"),
        ("misspelt.toml", "[train]\nstep = 3\n"),
        ("wrong.toml", "[model]\nn_embd = 30\nn_head = 4\n"),
    ]);
    let train = |job: &str| refused(dir.path(), &["train", job]);
    assert_snapshot!(train("nowhere.toml"), @r"
    error: nowhere.toml: the job file cannot be read: No such file or directory (os error 2)
    hint: give the path of a job file, or none at all for the quick start
    ");
    assert_snapshot!(train("broken.toml"), @r"
    error: broken.toml:1:7: unclosed table, expected `]`
    hint: the file is TOML: sections as [train], settings as name = value, text in quotes
    ");
    assert_snapshot!(train("misspelt.toml"), @"
    error: misspelt.toml:2:1: unknown setting `step` in [train]
    hint: did you mean `steps`? [train] takes steps, stop, batch, micro_batch, seed, schedule, precision, optimizer
    ");
    assert_snapshot!(train("wrong.toml"), @r"
    error: wrong.toml:3:10: `model.n_head` = 4 does not divide `model.n_embd` = 30
    hint: write n_head = 3, or another divisor of 30
    ");
}

#[test]
fn testbeds() {
    let device = |name: &str, more: &str| {
        format!(
            "[[device]]\nname = \"{name}\"\ntflops = 0.1\nmemory_bandwidth = \"10 GB/s\"\nmemory = \"1 GiB\"\n{more}"
        )
    };
    let link = "[[link]]\nbetween = [\"a\", \"b\"]\nrate = \"8 Mbps\"\nlatency = \"5 ms\"\n";
    let file = |a: &str, b: &str, link: &str| [device("a", a), device("b", b), link.to_owned()].concat();
    let crowd = device("crowd", "count = 1000\nsite = \"home\"\n[[site]]\nname = \"home\"\nrate = \"1 Gbps\"\n");
    let dir = directory(&[
        ("crowd.toml", &crowd),
        ("apart.toml", &file("", "", "")),
        ("odd.toml", &file("backend = \"burn-gpu\"\nslowdown = 9\n", "slowdown = 9\n", link)),
        ("good.toml", &file("slowdown = 2\n", "slowdown = 2\n", link)),
    ]);
    let train = |testbed: &str, more: &[&str]| {
        refused(dir.path(), &[&["train", "--testbed", testbed], more, &TINY[..]].concat())
    };
    assert!(train("nowhere.toml", &[]).contains("nowhere.toml"));
    let crowd = train("crowd.toml", &[]);
    assert!(crowd.contains("crowd.toml: its devices ask for 1000.0 cores, and this machine has "), "{crowd}");
    assert!(train("apart.toml", &[]).contains("apart.toml"));
    let odd = train("odd.toml", &[]);
    assert!(odd.contains("odd.toml: backend \"burn-gpu\" of device \"a\""), "{odd}");
    // A request that cannot be carried out is not dropped in silence.
    assert_snapshot!(refused(dir.path(), &[&["train", "--set=plan.scheduler=op-fence"], &TINY[..]].concat()), @r"
    error: the scheduler op-fence needs the devices and their links, but none are known
    hint: describe them in a file for --testbed, or use equal-compute
    ");
    assert!(train("good.toml", &["--set=plan.scheduler=fence"]).contains("`plan.scheduler` cannot be \"fence\""));
}

/// Models and machines without any possible plan. Each case says what is missing, how much of it, and where.
#[test]
fn what_cannot_be_planned() {
    let device = |name: &str, memory: &str| {
        format!("[[device]]\nname = \"{name}\"\ntflops = 0.1\nmemory_bandwidth = \"10 GB/s\"\nmemory = \"{memory}\"\n")
    };
    let link = |rate: &str| format!("[[link]]\nbetween = [\"a\", \"b\"]\nrate = \"{rate}\"\n");
    let two = |memory: [&str; 2], link: String| device("a", memory[0]) + &device("b", memory[1]) + &link;
    let dir = directory(&[
        ("job.toml", "[model]\nn_layer = 2\nn_embd = 64\nn_head = 2\n[data]\ncontext = 32\n[train]\nbatch = 8\n"),
        ("none.toml", "[[site]]\nname = \"home\"\n"),
        ("apart.toml", &two(["1 GiB"; 2], String::new())),
        ("still.toml", &two(["1 GiB"; 2], link("0 bps"))),
        ("tiny.toml", &two(["200 KiB", "300 KiB"], link("1 Gbps"))),
        ("small.toml", &two(["700 KiB", "900 KiB"], link("1 Gbps"))),
        ("tight.toml", &two(["1 MiB", "1 MiB"], link("1 Gbps"))),
    ]);
    let plan = |testbed: &str| refused(dir.path(), &["plan", "job.toml", "--testbed", testbed]);
    assert_snapshot!(plan("none.toml"), @r#"
    error: none.toml: there are no devices
    hint: describe each machine in a table [[device]] with a name and a gpu
    "#);
    assert_snapshot!(plan("apart.toml"), @r#"
    error: apart.toml:7:8: no link leads from broker to b
    hint: join their sites or the devices themselves by a [[link]], give both sites an uplink, or say where the broker stands: [broker] at = "NAME"
    "#);
    assert_snapshot!(plan("still.toml"), @r#"
    error: still.toml:13:8: `link.rate` is 0 bps
    hint: it must be above zero, such as rate = "8 Mbps"
    "#);
    assert_snapshot!(plan("tiny.toml"), @r#"error: memory: operator "transformer.wte.embedding" alone needs 512 KiB with its parameters and activations, but the largest device, b, has 300 KiB; use a smaller micro-batch, or a device with more memory"#);
    assert_snapshot!(plan("small.toml"), @"error: memory: parameters, gradients and optimizer state take 1.93 MiB, but all 2 devices together have 1.56 MiB: 380 KiB are missing; add devices, or use a smaller model");
    assert_snapshot!(plan("tight.toml"), @"error: memory: no cut fits the devices' memory: the cut in proportion to memory lacks 460 KiB on a, 690 KiB on b; use smaller micro-batches, or add devices");
}

#[test]
fn options() {
    let dir = directory(&[("plan.json", "{}")]);
    let train = |args: &[&str]| refused(dir.path(), &[&["train"], args].concat());
    // The advice was to write `-- -1`, which is no number of peers either.
    for (option, value) in [("--peers", "-1"), ("--steps", "-1"), ("--steps", "0"), ("--steps", "many")] {
        let message = train(&[option, value]);
        assert!(message.starts_with(&format!("error: invalid value '{value}' for '{option} <N>': ")), "{message}");
        assert!(message.contains("it must be a whole number of at least 1"), "{message}");
    }
    assert_snapshot!(train(&["--set", "train.setps=3"]), @"
    error: --set train.setps=3: unknown setting `setps` in [train]
    hint: did you mean `steps`? [train] takes steps, stop, batch, micro_batch, seed, schedule, precision, optimizer
    ");
    assert_snapshot!(train(&["--peers", "0"]), @"error: --peers 0 must lie in 1 to 64");
    assert_snapshot!(refused(dir.path(), &["broker", "--peers", "0"]), @"error: --peers 0: a run needs at least one peer");
    let backend = train(&["--backend", "burn-gpu"]);
    assert!(
        backend.starts_with(r#"error: --backend burn-gpu: there is no backend "burn-gpu" in this build; known: cpu"#),
        "{backend}"
    );
    assert!(backend.contains("\nhint: a GPU takes part through PyTorch or JAX"), "{backend}");
    let device = train(&["--backend", "cpu:0"]);
    assert!(device.ends_with("\nhint: cpu takes no device: write --backend cpu"), "{device}");
    if cfg!(not(feature = "burn")) {
        let burn = train(&["--backend", "burn"]);
        assert!(burn.ends_with("\nhint: `cargo install --path crates/cli --features burn` brings it"), "{burn}");
    }
    assert_snapshot!(train(&["--plan", "plan.json"]), @r"
    error: plan.json: plan file: not a FusionLLM plan: missing field `fusionllm_plan` at line 1 column 2
    hint: a plan is a file that `fusionllm plan -o` wrote
    ");
}

#[test]
fn data_files() {
    let job = "[data]\nfiles = [\"empty.txt\"]\n";
    let images = "[model]\nfamily = \"resnet\"\n[data]\ntrain = [\"short.bin\"]\n";
    let few = "[data]\nfiles = [\"few.txt\"]\n";
    let missing = "[data]\nfiles = [\"corpus/*.txt\"]\n";
    let dir = directory(&[
        ("text.toml", job),
        ("empty.txt", ""),
        ("images.toml", images),
        ("short.bin", "only a little"),
        ("few.toml", few),
        ("few.txt", "a few words"),
        ("missing.toml", missing),
    ]);
    let train = |job: &str| refused(dir.path(), &["train", job]);
    assert_snapshot!(train("text.toml"), @r"
    error: DIR/empty.txt: the file is empty
    hint: fill it, or leave it out of [data]
    ");
    assert_snapshot!(train("images.toml"), @r"
    error: DIR/short.bin: 13 bytes are 0 images of 3073 bytes and 13 bytes more
    hint: the file is cut short, or not of CIFAR-10's binary version: fetch it again
    ");
    assert_snapshot!(train("few.toml"), @r"
    error: the text to train on has 10 tokens, but one sample takes 129 (`data.context` and the token after it)
    hint: name more text in data.files, lower data.context, or lower data.validation
    ");
    assert_snapshot!(train("missing.toml"), @r#"
    error: missing.toml:2:9: `data.files`: no file matches "corpus/*.txt" in DIR
    hint: paths start at this file's directory
    "#);
}

#[test]
fn relays() {
    let dir = directory(&[("text", "no secret\n")]);
    assert_snapshot!(refused(dir.path(), &["relay", "--listen", "127.0.0.1:0", "--secret", "text"]), @r"
    error: text: this is not a relay's secret
    hint: name a file that `fusionllm relay --secret` made, or one that does not exist yet
    ");
    assert_snapshot!(refused(dir.path(), &["relay", "--listen", "127.0.0.1:0", "--host", "my relay"]), @r#"
    error: --host "my relay" is not a host
    hint: give the name or address by which other machines reach this one, such as relay.example.org
    "#);
    assert_snapshot!(refused(dir.path(), &["doctor", "--relay", "relay.example.org"]), @r#"
    error: --relay "relay.example.org" is not a relay
    hint: give "default", or the URL that `fusionllm relay` printed
    "#);
    assert_snapshot!(refused(dir.path(), &["broker", "--advertise", "0.0.0.0:4433"]), @r"
    error: --advertise 0.0.0.0:4433: no machine can connect to that address
    hint: give the address and port that lead here from outside, and the port here with --listen
    ");
    assert_snapshot!(refused(dir.path(), &["train", "--set=network.relay=here"]), @r#"
    error: --set network.relay=here: `network.relay` cannot be "here"
    hint: write "none", "default", or the URL that `fusionllm relay` prints
    "#);
}

#[test]
fn tickets() {
    let dir = directory(&[]);
    let join = |ticket: &str| refused(dir.path(), &["join", ticket]);
    assert_snapshot!(join("  "), @r"
    error: the ticket is empty
    hint: copy the whole line after `fusionllm join` that the broker printed
    ");
    assert_snapshot!(join("No ticket!"), @r"
    error: this is not a ticket: a ticket is one line of about 120 letters and digits
    hint: copy the whole line after `fusionllm join` that the broker printed
    ");
    assert_snapshot!(join(&"a0".repeat(60)), @r"
    error: the ticket has '0' at position 2, but a ticket has only the characters a-z and 2-7
    hint: copy the whole line after `fusionllm join` that the broker printed
    ");
    assert_snapshot!(join(&"a".repeat(120)), @r"
    error: the ticket has a typo: its checksum does not match
    hint: copy the whole line after `fusionllm join` that the broker printed
    ");
}

#[test]
fn graphs_whose_shapes_do_not_fit() {
    let mut b = Builder::new("affine");
    let x = b.input("x", DType::F32, [4, 3]).unwrap();
    let w = b.parameter("w", DType::F32, [2, 3], Init::Constant(0.0)).unwrap();
    let y = b.linear(x, w, None).unwrap();
    b.output("y", y).unwrap();
    let whole = b.finish().unwrap().to_json().unwrap();
    let mut graph: serde_json::Value = serde_json::from_str(&whole).unwrap();
    graph["graph"]["values"][1]["type"]["shape"] = serde_json::json!([2, 5]);
    let dir = directory(&[
        ("misfit.json", &graph.to_string()),
        ("cut.json", &whole[..whole.len() / 2]),
        ("later.json", &whole.replace("\"fusionllm_graph\": 1", "\"fusionllm_graph\": 2")),
        ("bert.json", r#"{"model_type": "bert"}"#),
    ]);
    let show = |file: &str| refused(dir.path(), &["graph", "show", file]);
    assert_snapshot!(show("misfit.json"), @r"
    error: misfit.json: linear (linear): the last dimension of the operand is 3, but that of the weight is 5; operands: f32[4, 3], f32[2, 5]
    hint: mend the operator named there, or write the graph anew
    ");
    assert_snapshot!(show("cut.json"), @r"
    error: cut.json: graph file: not a FusionLLM graph: EOF while parsing an object at line 35 column 9
    hint: write the graph anew; this file is damaged or of another kind
    ");
    assert_snapshot!(show("later.json"), @r"
    error: later.json: graph file: it has format version 2, but this program reads version 1
    hint: write the graph anew; this file is damaged or of another kind
    ");
    assert_snapshot!(show("bert.json"), @r#"
    error: DIR/bert.json: the family "bert" is not known
    hint: the families are gpt2, llama, mistral, qwen2, qwen3, gemma2, gemma3_text, phi3, olmo2, smollm3, gpt_neox; export another model with torch.export
    "#);
    assert_snapshot!(show("nowhere"), @r"
    error: nowhere: cannot be read
    caused by: No such file or directory (os error 2)
    hint: give a graph file, a .pt2 archive, a job file, a run directory, or a config.json from Hugging Face
    ");
}

/// A copy of the run's checkpoint in `dir`, and its path there.
fn copy_of_checkpoint(dir: &Path) -> std::path::PathBuf {
    let (directory, _) = finished_run();
    let copy = dir.join("copy/checkpoints/step-3");
    fs::create_dir_all(&copy).unwrap();
    for entry in fs::read_dir(directory.join("run/checkpoints/step-3")).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), copy.join(entry.file_name())).unwrap();
    }
    copy
}

#[test]
fn checkpoints() {
    let dir = directory(&[]);
    let generate = |path: &str| refused(dir.path(), &["generate", path, "--prompt", "x"]);
    assert_snapshot!(generate("nowhere"), @r"
    error: nowhere: this checkpoint is not there
    hint: give a run directory such as runs/0001, a checkpoint in it, or a directory from Hugging Face
    ");
    assert_snapshot!(generate("."), @r"
    error: .: there is no checkpoint here
    hint: give a run directory with a checkpoint in it, or a checkpoint, such as runs/0001/checkpoints/step-200
    ");

    let copy = copy_of_checkpoint(dir.path());
    let model = copy.join("model.safetensors");
    let whole = fs::read(&model).unwrap();
    fs::write(&model, &whole[..whole.len() - 100]).unwrap();
    let truncated = generate("copy");
    assert!(
        truncated
            .contains("copy/checkpoints/step-3: the checkpoint is damaged: model.safetensors: the file is cut short"),
        "{truncated}"
    );
    assert_eq!(refused(dir.path(), &["train", "--resume", "copy", "--steps", "5"]), truncated);
    assert_eq!(refused(dir.path(), &["export", "copy", "--format", "hf", "-o", "out"]), truncated);

    // One bit of one weight is changed.
    let mut flipped = whole.clone();
    *flipped.last_mut().unwrap() ^= 1;
    fs::write(&model, &flipped).unwrap();
    let message = generate("copy");
    assert!(message.contains("is not what was saved"), "{message}");
}

#[test]
fn runs_that_cannot_go_on() {
    let (directory, _) = finished_run();
    let before = fs::read(directory.join("run/metrics.jsonl")).unwrap();
    let job = fs::read(directory.join("run/job.toml")).unwrap();
    let train = |args: &[&str]| refused(directory, &[&["train"], args].concat());
    assert_snapshot!(train(&["--run-dir", "run"]), @r"
    error: run: another run is there (plan.json)
    hint: choose another --run-dir, or continue that run: --resume run, without --run-dir
    ");
    assert_snapshot!(train(&["--resume", "run"]), @r"
    error: run/checkpoints/step-3: the run is at step 3 already, and is asked to stop at 3
    hint: ask for more with --steps
    ");
    let other = train(&["--resume", "run", "--steps", "5", "--set", "model.n_embd=32"]);
    assert!(other.starts_with("error: run/checkpoints/step-3: the checkpoint is of another model: `transformer.wte.weight` is f32[256, 16] there, and f32[256, 32] in the job\n"), "{other}");
    assert_snapshot!(train(&["--resume", "run", "--steps", "5", "--seed", "9"]), @r"
    error: run/checkpoints/step-3: the run's seed was 1, not 9
    hint: leave train.seed as it was
    ");
    assert_eq!(fs::read(directory.join("run/metrics.jsonl")).unwrap(), before, "refusing harms no earlier run");
    assert_eq!(fs::read(directory.join("run/job.toml")).unwrap(), job);
    assert!(directory.join("run/summary.json").exists());
}

/// Regression: the directory stayed, and the next attempt was told to resume from it, which could not work.
#[test]
fn a_broker_that_cannot_listen_leaves_no_run() {
    let taken = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let listen = format!("--listen={}", taken.local_addr().unwrap());
    let dir = directory(&[]);
    for run_dir in [&["--run-dir", "a/run"][..], &[]] {
        let message = refused(dir.path(), &[&["broker", &listen][..], run_dir, &TINY].concat());
        assert!(message.starts_with("error: cannot listen on 127.0.0.1:"), "{message}");
        assert!(!message.contains("run directory"), "{message}");
    }
}

#[test]
fn a_run_directory_that_cannot_be_made() {
    let dir = directory(&[("file", "")]);
    let ran = call(dir.path(), &[&["train", "--steps", "1", "--run-dir", "file/run"], &TINY[..]].concat());
    assert_snapshot!(ran.failure(1, dir.path()), @r"
    error: file/run: cannot be created
    caused by: Not a directory (os error 20)
    hint: a file stands where a directory is needed: choose another path, or remove that file
    ");
}
