use std::fs;
use std::path::Path;

use fusionllm_plan::Compressor;
use insta::assert_snapshot;

use super::*;
use crate::printed;

fn job(text: &str) -> Result<Job, JobError> {
    Job::parse("job.toml", text, Path::new("/nowhere"), &[])
}

fn error(text: &str) -> String {
    printed(job(text).unwrap_err())
}

fn with(overrides: &[&str]) -> Result<Job, JobError> {
    let overrides: Vec<String> = overrides.iter().map(|s| s.to_string()).collect();
    Job::parse("job.toml", "[train]\nbatch = 8\n", Path::new("/nowhere"), &overrides)
}

/// A directory with a few files of data.
fn directory() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("corpus")).unwrap();
    for name in ["corpus/b.txt", "corpus/a.txt", "corpus/[x].txt", "train.bin", "test.bin"] {
        fs::write(dir.path().join(name), "text").unwrap();
    }
    dir
}

#[test]
fn an_empty_job_is_a_whole_one() {
    assert_snapshot!(job("").unwrap().to_toml().unwrap(), @r#"
    [model]
    family = "gpt2"
    vocab_size = 256
    n_positions = 128
    n_embd = 768
    n_layer = 12
    n_head = 12
    activation_function = "gelu_new"
    resid_pdrop = 0.1
    embd_pdrop = 0.1
    attn_pdrop = 0.1
    layer_norm_epsilon = 0.00001
    initializer_range = 0.02
    tie_word_embeddings = true
    _attn_implementation = "sdpa"

    [data]
    kind = "text"
    tokenizer = "bytes"
    context = 128
    validation = 0.1

    [train]
    steps = 1000
    batch = 16
    micro_batch = 2
    seed = 1
    schedule = "auto"

    [train.optimizer]
    name = "adamw"
    betas = [0.9, 0.95]
    eps = 0.00000001
    lr = 0.0003
    weight_decay = 0.1
    clip = 1.0
    warmup = 0
    decay = "none"
    decay_steps = 1000
    min_lr = 0.000029999999999999997

    [plan]

    [compression]
    name = "none"
    ratio = 30.0
    guard = false
    error_feedback = false
    shared_masks = false
    stochastic_rounding = false
    spectral_watch = 0

    [checkpoint]
    every = 200
    keep = 3

    [eval]
    every = 100
    batches = 10
    "#);
}

#[test]
fn the_quick_start_is_a_job() {
    let job = Job::quick_start(&[]).unwrap();
    assert_eq!(Job::parse("q", &job.to_toml().unwrap(), Path::new("/x"), &[]).unwrap(), job);
    assert_eq!(Job::quick_start(&["train.steps=7".into()]).unwrap().train.steps, 7);
}

/// The job of the design document, with its data in place.
#[test]
fn a_language_model_job_survives_writing() {
    let dir = directory();
    let text = r#"
        [model]
        family = "gpt2"
        n_layer = 8
        n_embd = 256
        [data]
        kind = "text"
        files = ["corpus/?.txt", "corpus/[x].txt", "corpus/a.txt"]
        tokenizer = "bytes"
        context = 128
        [train]
        steps = 1000
        batch = 16
        micro_batch = 2
        seed = 1
        optimizer = { name = "adamw", lr = 3e-4, weight_decay = 0.1, clip = 1.0, warmup = 100, decay = "cosine" }
        [plan]
        scheduler = "op-fence"
        [compression]
        name = "adatopk"
        ratio = 30
        [checkpoint]
        every = 200
        keep = 3
    "#;
    fs::write(dir.path().join("job.toml"), text).unwrap();
    let job = Job::load(&dir.path().join("job.toml"), &[]).unwrap();
    let Data::Text(data) = &job.data else { panic!("not text") };
    let names = ["corpus/a.txt", "corpus/b.txt", "corpus/[x].txt"].map(|n| dir.path().join(n));
    assert_eq!(data.files, names);
    let Family::Gpt2(gpt2) = &job.model.family else { panic!("not gpt2") };
    assert_eq!((gpt2.n_head, gpt2.vocab_size, gpt2.n_positions), (4, 256, 128));

    let again = Job::parse("again", &job.to_toml().unwrap(), Path::new("/elsewhere"), &[]).unwrap();
    assert_eq!(again, job);
}

#[test]
fn an_image_job_survives_writing() {
    let dir = directory();
    let text = r#"
        model = { family = "resnet", depth = 50 }
        data = { kind = "cifar10", train = "train.bin", test = ["test.bin"], augment = false }
        train = { schedule = "gpipe", optimizer = { name = "sgd", lr = 0.05, momentum = 0 } }
    "#;
    let job = Job::parse("job.toml", text, dir.path(), &[]).unwrap();
    assert_eq!(job.train.optimizer.rule, Rule::Sgd { momentum: 0.0, nesterov: false });
    let again = Job::parse("again", &job.to_toml().unwrap(), Path::new("/elsewhere"), &[]).unwrap();
    assert_eq!(again, job);
}

#[test]
fn a_published_configuration_is_read() {
    let dir = directory();
    let config = dir.path().join("config.json");
    let text = r#"
        model = { config = "config.json", n_layer = 3, resid_pdrop = 0 }
        data = { context = 16 }
    "#;
    let load = || Job::parse("job.toml", text, dir.path(), &[]);
    fs::write(
        &config,
        r#"{"model_type": "gpt2", "n_layer": 2, "n_embd": 60, "n_head": 3, "vocab_size": 300,
            "n_positions": 32, "attn_pdrop": 0.2, "n_inner": null, "architectures": ["GPT2LMHeadModel"]}"#,
    )
    .unwrap();
    let Family::Gpt2(gpt2) = load().unwrap().model.family else { panic!("not gpt2") };
    // The job file stands before config.json, which stands before the defaults.
    assert_eq!((gpt2.n_layer, gpt2.n_embd, gpt2.n_head), (3, 60, 3));
    assert_eq!((gpt2.vocab_size, gpt2.n_positions), (300, 32));
    assert_eq!((gpt2.resid_pdrop, gpt2.attn_pdrop, gpt2.embd_pdrop), (0.0, 0.2, 0.1));

    let error = |json: &str| {
        fs::write(&config, json).unwrap();
        let message = printed(load().unwrap_err());
        message.replace(&dir.path().display().to_string(), "DIR")
    };
    assert_snapshot!(error("{\"n_layer\": 2,\n \"n_embd\": }"), @r"
    DIR/config.json:2:12: expected value at line 2 column 12
    hint: give a config.json as Hugging Face publishes them
    ");
    assert_snapshot!(error("{\"n_embd\": \"wide\"}"), @r#"
    DIR/config.json: `model.n_embd` takes a whole number, not the text "wide"
    hint: write n_embd = 1
    "#);
    assert_snapshot!(error("{\"model_type\": \"llama\"}"), @r#"
    DIR/config.json: `model_type` is not "gpt2"
    hint: use the configuration of a plain GPT-2
    "#);
    assert_snapshot!(error("{\"n_inner\": 0}"), @r"
    DIR/config.json: `model.n_inner` is 0
    hint: it must be at least 1
    ");
    assert_snapshot!(error("{\"scale_attn_by_inverse_layer_idx\": true}"), @r"
    DIR/config.json: `scale_attn_by_inverse_layer_idx` = true is not supported
    hint: use the configuration of a plain GPT-2
    ");
}

#[test]
fn defaults_follow_other_settings() {
    let job = job("model = { n_embd = 100 }\ndata = { context = 32, tokenizer = \"gpt2\" }").unwrap();
    let Family::Gpt2(gpt2) = &job.model.family else { panic!("not gpt2") };
    assert_eq!((gpt2.n_head, gpt2.vocab_size, gpt2.n_positions), (1, 50_257, 32));
    let micro_batch = |batch: usize| with(&[&format!("train.batch={batch}")]).unwrap().train.micro_batch.value;
    assert_eq!([1, 8, 16, 50, 64].map(micro_batch), [1, 1, 2, 5, 8]);
}

#[test]
fn auto_is_on_its_guard_and_who_names_a_codec_is_not() {
    let compression = |settings: &str| job(&format!("compression = {{ {settings} }}")).unwrap().compression;
    assert!(compression("name = \"auto\"").guard && !compression("name = \"adatopk\"").guard);
    assert!(!compression("name = \"auto\", guard = false").guard && compression("name = \"int4\", guard = true").guard);
    let all = compression("error_feedback = true, stochastic_rounding = true, spectral_watch = 50");
    assert_eq!((all.error_feedback, all.stochastic_rounding, all.spectral_watch), (true, true, 50));
    assert!(compression("name = \"topk\", shared_masks = true").shared_masks);
    let refused = |settings: &str| printed(job(&format!("compression = {{ {settings} }}")).unwrap_err());
    let both = refused("name = \"adatopk\", shared_masks = true, error_feedback = true");
    assert!(both.contains("set one of shared_masks and error_feedback"), "{both}");
    let dense = refused("name = \"int8\", shared_masks = true");
    assert!(dense.contains("`int8` leaves nothing out") && dense.contains("name topk or adatopk"), "{dense}");
}

/// What is left open is written as such, and has a value all the same.
#[test]
fn auto_leaves_a_choice_to_the_planner() {
    let job = with(&["train.batch=96", "train.micro_batch=auto"]).unwrap();
    assert_eq!(job.train.micro_batch, Choice { value: 12, open: true });
    assert_eq!(job.train.sizes(), [12, 96, 48, 24, 6, 3, 1]);
    assert!(job.train.schedule.open && job.train.schedules().len() == fusionllm_plan::Schedule::ALL.len());
    assert_eq!(Job::parse("q", &job.to_toml().unwrap(), Path::new("/x"), &[]).unwrap(), job);
    let made = with(&["train.batch=96", "train.schedule=zb-h1"]).unwrap().train;
    assert_eq!((made.sizes(), made.schedules()), (vec![12], vec![fusionllm_plan::Schedule::ZeroBubble]));
    assert!(with(&["train.micro_batch=few"]).unwrap_err().to_string().contains("`train.micro_batch`"));
}

#[test]
fn overrides_stand_before_the_file() {
    let job = with(&[
        "train.batch = 32",
        "train.optimizer.name=sgd",
        "train.optimizer.lr=1e-2",
        "train.schedule=gpipe",
        "train.steps=1e3",
        "model.n_layer=1_0",
        "train.optimizer.decay=\"cosine\"",
        "compression={ name = \"int8\" }",
        "train.optimizer.lr=0.5",
    ])
    .unwrap();
    assert_eq!((job.train.batch, job.train.steps), (32, 1000));
    assert_eq!(job.train.schedule, Choice::made(fusionllm_plan::Schedule::GPipe));
    assert_eq!(job.compression.name, Compressor::Int8);
    let optimizer = job.train.optimizer;
    assert_eq!((optimizer.lr, optimizer.decay), (0.5, Decay::Cosine));
    assert_eq!(optimizer.rule, Rule::Sgd { momentum: 0.9, nesterov: false });
}

#[test]
fn the_optimizer_in_the_plans_terms() {
    let job =
        with(&["train.optimizer={ lr = 1.0, warmup = 2, decay = \"cosine\", min_lr = 0, clip = 0 }", "train.steps=6"]);
    let optimizer = job.unwrap().train.optimizer;
    // Half a cosine over the four updates after the warm-up; the first of them has the full rate.
    let rates: Vec<f64> = (1..=6).map(|update| optimizer.learning_rate().at(update)).collect();
    let expected = [0.5, 1.0, 1.0, 0.5 + 0.125f64.sqrt(), 0.5, 0.5 - 0.125f64.sqrt()];
    assert!(rates.iter().zip(expected).all(|(r, e)| (r - e).abs() < 1e-12), "{rates:?}");
    assert_eq!(optimizer.clip_norm(), None);
    assert_eq!(with(&[]).unwrap().train.optimizer.clip_norm(), Some(1.0));
    assert_eq!(optimizer.update_rule().slots(), ["exp_avg", "exp_avg_sq"]);
}

/// A run that is told to stop early has the learning rates of the whole one: `decay_steps` is what the file says.
#[test]
fn stopping_early_does_not_change_the_rates() {
    let mut job = with(&["train.optimizer.decay=cosine", "train.steps=100"]).unwrap();
    job.train.steps = 10;
    let again = Job::parse("again", &job.to_toml().unwrap(), Path::new("/"), &[]).unwrap();
    assert_eq!((again.train.steps, again.train.optimizer.decay_steps), (10, 100));
}

#[test]
fn errors_in_overrides() {
    let error = |setting: &str| printed(with(&[setting]).unwrap_err());
    assert_snapshot!(error("train.bath=4"), @r"
    --set train.bath=4: unknown setting `bath` in [train]
    hint: did you mean `batch`? [train] takes steps, batch, micro_batch, seed, schedule, optimizer
    ");
    assert_snapshot!(error("trian.batch=4"), @r"
    --set trian.batch=4: unknown section `trian`
    hint: did you mean `train`? the sections are model, data, train, plan, compression, checkpoint, eval
    ");
    assert_snapshot!(error("train.batch"), @r"
    --set train.batch: an override needs a value
    hint: write --set section.key=value, such as --set train.steps=100
    ");
    assert_snapshot!(error("train..batch=4"), @r"
    --set train..batch=4: an override needs the name of a setting
    hint: write --set section.key=value, such as --set train.steps=100
    ");
    assert_snapshot!(error("train.batch=many"), @r#"
    --set train.batch=many: `train.batch` takes a whole number, not the text "many"
    hint: write batch = 1
    "#);
    assert_snapshot!(error("train.batch.size=4"), @r"
    --set train.batch.size=4: `train.batch` takes a whole number, not a table
    hint: write batch = 1
    ");
    assert_snapshot!(error("train=4"), @r"
    --set train=4: `train` is a section, not 4
    hint: write [train] on a line, and its settings below
    ");
    assert_snapshot!(error("train.optimizer.betas=[0.9, 0.95"), @r#"
    --set train.optimizer.betas=[0.9, 0.95: unclosed array, expected `]`
    hint: the value has TOML's syntax: 3, 1e-4, true, word, "text", ["a", "b"]
    "#);
    assert_snapshot!(error("train.optimizer.betas=[0.9, 1.5]"), @r"
    --set train.optimizer.betas=[0.9, 1.5]: `train.optimizer.betas` is out of range
    hint: both must be at least 0 and below 1
    ");
    assert_snapshot!(error("train.batch=9223372036854775808"), @r"
    --set train.batch=9223372036854775808: 9223372036854775808 is out of range
    hint: use a number below 2^63
    ");
    assert_snapshot!(error("train.micro_batch=3"), @r#"
    --set train.micro_batch=3: `train.batch` = 8 does not divide into micro-batches of 3
    hint: write micro_batch = 2, another divisor of 8, or "auto"
    "#);
}

#[test]
fn errors_of_form() {
    assert_snapshot!(error("[train]\nsteps = 10\nbatch ="), @r"
    job.toml:3:8: string values must be quoted, expected literal string
    hint: the file is TOML: sections as [train], settings as name = value, text in quotes
    ");
    assert_snapshot!(error("[train]\nsteps = 10\nsteps = 11"), @r"
    job.toml:3:1: duplicate key
    hint: the file is TOML: sections as [train], settings as name = value, text in quotes
    ");
    assert_snapshot!(error("[train\nsteps = 10"), @r"
    job.toml:1:7: unclosed table, expected `]`
    hint: the file is TOML: sections as [train], settings as name = value, text in quotes
    ");
    assert_snapshot!(error("[data]\n# Größe\nkind = 'text\n"), @r"
    job.toml:3:13: invalid literal string, expected `'`
    hint: the file is TOML: sections as [train], settings as name = value, text in quotes
    ");
}

#[test]
fn errors_in_names() {
    assert_snapshot!(error("[train]\nsteps = 10\nbtach = 4"), @r"
    job.toml:3:1: unknown setting `btach` in [train]
    hint: did you mean `batch`? [train] takes steps, batch, micro_batch, seed, schedule, optimizer
    ");
    assert_snapshot!(error("[trian]\nsteps = 10"), @r"
    job.toml:1:2: unknown section `trian`
    hint: did you mean `train`? the sections are model, data, train, plan, compression, checkpoint, eval
    ");
    assert_snapshot!(error("steps = 10"), @r"
    job.toml:1:1: the setting `steps` stands outside the sections
    hint: put it below its section's header; the sections are model, data, train, plan, compression, checkpoint, eval
    ");
    assert_snapshot!(error("[train.optimizer]\nlearning_rate = 1"), @r"
    job.toml:2:1: unknown setting `learning_rate` in [train.optimizer]
    hint: did you mean `lr`? [train.optimizer] takes name, betas, eps, lr, weight_decay, clip, warmup, decay, decay_steps, min_lr
    ");
    assert_snapshot!(error("[train]\noptimizer = { name = \"sgd\", betas = [0.9, 0.99] }"), @r"
    job.toml:2:29: unknown setting `betas` in [train.optimizer]
    hint: [train.optimizer] takes name, momentum, nesterov, lr, weight_decay, clip, warmup, decay, decay_steps, min_lr
    ");
    assert_snapshot!(error("[model]\nfamily = \"gtp2\""), @r#"
    job.toml:2:10: `model.family` cannot be "gtp2"
    hint: did you mean `gpt2`? it is one of gpt2, resnet, imported
    "#);
    assert_snapshot!(error("[model]\nn_layers = 2"), @r"
    job.toml:2:1: unknown setting `n_layers` in [model]
    hint: did you mean `n_layer`? [model] takes family, weights, config, n_embd, n_layer, n_head, n_inner, vocab_size, n_positions, resid_pdrop, embd_pdrop, attn_pdrop, layer_norm_epsilon, activation_function, tie_word_embeddings, initializer_range, _attn_implementation
    ");
    assert_snapshot!(error("[data]\ntokenizer = \"bpe\""), @r#"
    job.toml:2:13: `data.tokenizer` cannot be "bpe"
    hint: did you mean `bytes`? it is one of bytes, gpt2
    "#);
    assert_snapshot!(error("[plan]\nscheduler = \"opfence\""), @r#"
    job.toml:2:13: `plan.scheduler` cannot be "opfence"
    hint: did you mean `op-fence`? it is one of equal-number, equal-compute, op-fence, exact
    "#);
    assert_snapshot!(error("[compression]\nname = \"top-k\""), @r#"
    job.toml:2:8: `compression.name` cannot be "top-k"
    hint: did you mean `topk`? it is one of none, adatopk, topk, bf16, int8, int4, int4-hadamard, nvfp4, auto
    "#);
}

/// Users of PyTorch's trainers write these names.
#[test]
fn names_of_other_trainers_are_translated() {
    let hint = |text: &str| job(text).unwrap_err().hint;
    assert_snapshot!(hint("[train]\ngradient_accumulation = 4"), @"gradients accumulate over batch / micro_batch micro-batches: set train.batch and train.micro_batch");
    assert_snapshot!(hint("[train]\ndtype = \"bf16\""), @"leave it out: parameters and activations are float32; [compression] makes messages smaller");
    assert_snapshot!(hint("[train]\nmicro_batch = \"four\""), @r#"write micro_batch = 1, or micro_batch = "auto", with which the planner chooses"#);
}

#[test]
fn errors_in_types() {
    assert_snapshot!(error("[train]\nsteps = \"10\""), @r#"
    job.toml:2:9: `train.steps` takes a whole number, not the text "10"
    hint: write steps = 1
    "#);
    assert_snapshot!(error("[train]\nsteps = 10.5"), @r"
    job.toml:2:9: `train.steps` takes a whole number, not 10.5
    hint: write steps = 1
    ");
    assert_snapshot!(error("[train]\nsteps = -1"), @r"
    job.toml:2:9: `train.steps` is -1
    hint: it must be at least 1
    ");
    assert_snapshot!(error("train = 3"), @r"
    job.toml:1:9: `train` is a section, not 3
    hint: write [train] on a line, and its settings below
    ");
    assert_snapshot!(error("[[train]]\nsteps = 1"), @r"
    job.toml:1:1: `train` is a section, not a list
    hint: write [train] on a line, and its settings below
    ");
    assert_snapshot!(error("[train.optimizer]\nlr = true"), @r"
    job.toml:2:6: `train.optimizer.lr` takes a number, not true
    hint: write lr = 0.1
    ");
    assert_snapshot!(error("[train.optimizer]\nlr = nan"), @r"
    job.toml:2:6: `train.optimizer.lr` is NaN
    hint: it must be above 0
    ");
    assert_snapshot!(error("[train.optimizer]\nlr = 0"), @r"
    job.toml:2:6: `train.optimizer.lr` is 0
    hint: it must be above 0
    ");
    assert_snapshot!(error("[train.optimizer]\nbetas = 0.9"), @r"
    job.toml:2:9: `train.optimizer.betas` takes two numbers, not 0.9
    hint: write betas = [0.9, 0.95]
    ");
    assert_snapshot!(error("[train.optimizer]\nbetas = [0.9]"), @r"
    job.toml:2:9: `train.optimizer.betas` takes two numbers
    hint: write betas = [0.9, 0.95]
    ");
    assert_snapshot!(error("[model]\ntie_word_embeddings = \"yes\""), @r#"
    job.toml:2:23: `model.tie_word_embeddings` takes true or false, not the text "yes"
    hint: write tie_word_embeddings = true
    "#);
    assert_snapshot!(error("[data]\nfiles = [\"a\", 3]"), @r#"
    job.toml:2:15: `data.files` takes a list of strings, not 3
    hint: write files = ["a.txt", "b.txt"]
    "#);
    assert_snapshot!(error("[data]\nfiles = 1979-05-27"), @r#"
    job.toml:2:9: `data.files` takes a list of strings, not a date
    hint: write files = ["a.txt", "b.txt"]
    "#);
}

#[test]
fn errors_in_meaning() {
    assert_snapshot!(error("[train]\nbatch = 10\nmicro_batch = 4"), @r#"
    job.toml:3:15: `train.batch` = 10 does not divide into micro-batches of 4
    hint: write micro_batch = 2, another divisor of 10, or "auto"
    "#);
    assert_snapshot!(error("[train]\nbatch = 2\nmicro_batch = 4"), @r#"
    job.toml:3:15: `train.batch` = 2 does not divide into micro-batches of 4
    hint: write micro_batch = 2, another divisor of 2, or "auto"
    "#);
    assert_snapshot!(error("[train.optimizer]\nlr = 1e-4\nmin_lr = 1e-3"), @r"
    job.toml:3:10: `train.optimizer.min_lr` = 0.001 is above `lr` = 0.0001
    hint: lower min_lr, or leave it out
    ");
    assert_snapshot!(error("[model]\nn_embd = 100\nn_head = 3"), @r"
    job.toml:3:10: `model.n_head` = 3 does not divide `model.n_embd` = 100
    hint: write n_head = 1, or another divisor of 100
    ");
    assert_snapshot!(error("[model]\nattn_pdrop = 1"), @r"
    job.toml:2:14: `model.attn_pdrop` is 1
    hint: it must be a probability: at least 0 and below 1
    ");
    assert_snapshot!(error("[model]\nn_embd = 1e15"), @r"
    job.toml:2:10: `model.n_embd` is 1000000000000000
    hint: it must be at most 2147483647
    ");
    assert_snapshot!(error("[model]\nvocab_size = 255"), @r#"
    job.toml:2:14: `model.vocab_size` is 255, but the tokenizer "bytes" has 256 tokens
    hint: write vocab_size = 256, or leave it out
    "#);
    assert_snapshot!(error("[model]\nn_positions = 64"), @r"
    job.toml: `data.context` is 128, but the model has 64 positions
    hint: lower data.context, or raise model.n_positions
    ");
    assert_snapshot!(error("[model]\nfamily = \"resnet\"\ndepth = 20\n[data]\nkind = \"text\""), @r"
    job.toml:3:9: there is no ResNet-20
    hint: depth is one of 18, 34, 50, 101, 152
    ");
    assert_snapshot!(error("[model]\nfamily = \"resnet\"\n[data]\nkind = \"text\""), @r#"
    job.toml:4:8: a resnet learns from images, not from text
    hint: write kind = "cifar10" in [data], or family = "gpt2" in [model]
    "#);
    assert_snapshot!(error("[model]\nfamily = \"resnet\""), @r#"
    job.toml: [data] names no training images
    hint: write train = ["data_batch_*.bin"], the files of CIFAR-10's binary version
    "#);
    assert_snapshot!(error("[compression]\nratio = 0.5"), @r"
    job.toml:2:9: `compression.ratio` is 0.5
    hint: it must be at least 1
    ");
    assert_snapshot!(error("[checkpoint]\nkeep = 0"), @r"
    job.toml:2:8: `checkpoint.keep` is 0
    hint: it must be at least 1
    ");
}

#[test]
fn errors_about_files() {
    let dir = directory();
    let error = |text: &str| {
        let message = printed(Job::parse("job.toml", text, dir.path(), &[]).unwrap_err());
        message.replace(&dir.path().display().to_string(), "DIR")
    };
    assert_snapshot!(error("[data]\nfiles = [\"corpus/*.text\"]"), @r#"
    job.toml:2:9: no file matches "corpus/*.text" in DIR
    hint: paths start at the job file's directory
    "#);
    assert_snapshot!(error("[data]\nfiles = [\"corpus\"]"), @r#"
    job.toml:2:9: "corpus" is a directory
    hint: name the files in it: "corpus/*"
    "#);
    assert_snapshot!(error("[data]\nfiles = [\"corpus/***\"]"), @r#"
    job.toml:2:9: "corpus/***" is not a valid pattern: wildcards are either regular `*` or recursive `**`
    hint: * stands for any part of a name, ** for any directories, [ab] for one of the letters
    "#);
    assert_snapshot!(error("[data]\nvalidation = \"held-out.txt\""), @r#"
    job.toml:2:14: no file matches "held-out.txt" in DIR
    hint: paths start at the job file's directory
    "#);
    assert_snapshot!(error("[model]\nweights = \"model.safetensors\""), @r#"
    job.toml:2:11: no file matches "model.safetensors" in DIR
    hint: paths start at the job file's directory
    "#);
    assert_snapshot!(error("model = { family = \"gpt2\" }\ndata = { kind = \"cifar10\", train = \"train.bin\" }"), @r#"
    job.toml:2:17: a gpt2 learns from text, not from images
    hint: write kind = "text" in [data], or family = "resnet" in [model]
    "#);
    assert_snapshot!(error("model = { family = \"resnet\", num_classes = 9 }\ndata = { train = \"train.bin\" }"), @r"
    job.toml:1:44: `model.num_classes` is 9, but CIFAR-10 has 10
    hint: write num_classes = 10, or leave it out
    ");
    let missing = printed(Job::load(Path::new("no/such/job.toml"), &[]).unwrap_err());
    assert_snapshot!(missing, @r"
    no/such/job.toml: the job file cannot be read: No such file or directory (os error 2)
    hint: give the path of a job file, or none at all for the quick start
    ");
}

proptest::proptest! {
    /// Whatever a file or an override says, the answer is a job or an error, never a panic.
    #[test]
    fn no_text_makes_the_reader_panic(
        // A sound job with a piece of it replaced by something that TOML uses.
        start in 0usize..700,
        length in 0usize..40,
        put in "[\\[\\]{}=\"'.,#a-z0-9_\\- \n\u{e4}]{0,8}",
        setting in "[a-z.]{0,8}(=[\\[\\]{}=\"'.,a-z0-9_\\-]{0,8})?",
    ) {
        let sound = include_str!("quick_start.toml");
        let start = sound.floor_char_boundary(start);
        let end = sound.floor_char_boundary(start + length);
        let text = format!("{}{put}{}", &sound[..start], &sound[end..]);
        let _ = Job::parse("job.toml", &text, Path::new("/nowhere"), &[]);
        let _ = Job::parse("job.toml", &text, Path::new("/nowhere"), &[format!("train.{setting}"), setting]);
    }
}
