mod errors;
mod folders;

use std::fs;
use std::path::Path;

use fusionllm_data::Differences;
use fusionllm_data::weights::{Weights, WeightsError};
use fusionllm_graph::{Advice, DType};
use fusionllm_plan::Compressor;
use insta::assert_snapshot;

use super::*;

fn job(text: &str) -> Result<Job, JobError> {
    Job::parse("job.toml", text, Path::new("/nowhere"), &[])
}

fn with(overrides: &[&str]) -> Result<Job, JobError> {
    let overrides: Vec<String> = overrides.iter().map(|s| s.to_string()).collect();
    Job::parse("job.toml", "[train]\nbatch = 8\n", Path::new("/nowhere"), &overrides)
}

/// A directory with a few files of data.
fn directory() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("corpus")).unwrap();
    for name in ["corpus/.hidden", "corpus/b.txt", "corpus/a.txt", "corpus/[x].txt", "train.bin", "test.bin"] {
        fs::write(dir.path().join(name), "text").unwrap();
    }
    dir
}

#[test]
fn an_empty_job_has_all_defaults() {
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
    shuffle = true
    documents = "joined"

    [train]
    steps = 1000
    stop = 1000
    batch = 16
    micro_batch = 2
    seed = 1
    schedule = "auto"
    precision = "f32"

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
    ratio = 10.0
    loss_budget = "0.5 %"
    guard = false
    stochastic_rounding = false
    spectral_watch = 0

    [checkpoint]
    every = 200
    keep = 3
    keep_best = false
    copies = true

    [eval]
    every = 100
    batches = 10

    [network]
    relay = "none"
    "#);
}

#[test]
fn a_relay_is_a_word_or_a_url() {
    for relay in ["none", "default", "http://192.0.2.1:3340/?token=abc"] {
        let job = job(&format!("[network]\nrelay = {relay:?}")).unwrap();
        assert!(job.to_toml().unwrap().ends_with(&format!("[network]\nrelay = {relay:?}\n")));
    }
    assert_snapshot!(job("[network]\nrelay = \"yes\"").unwrap_err().report(), @r#"
    job.toml:2:9: `network.relay` cannot be "yes"
    hint: write "none", "default", or the URL that `fusionllm relay` prints
    "#);
}

#[test]
fn the_quick_start_is_a_job() {
    let job = Job::quick_start(&[]).unwrap();
    assert_eq!(Job::parse("q", &job.to_toml().unwrap(), Path::new("/x"), &[]).unwrap(), job);
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
        copies = true
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
    let mut job = Job::parse("job.toml", text, dir.path(), &[]).unwrap();
    assert_eq!(job.train.optimizer.rule, Rule::Sgd { momentum: 0.0, nesterov: false });
    // A job that was written names its size.
    assert!(std::mem::take(&mut job.train.default_micro_batch));
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
        let message = load().unwrap_err().report();
        message.replace(&dir.path().display().to_string(), "DIR")
    };
    assert_snapshot!(error("{\"n_layer\": 2,\n \"n_embd\": }"), @r"
    DIR/config.json:2:12: expected value at line 2 column 12
    hint: give a config.json as Hugging Face publishes them
    ");
    assert_snapshot!(error("{\"n_embd\": \"wide\"}"), @r#"
    DIR/config.json: `model.n_embd` takes a whole number, not the text "wide"
    hint: it must be a whole number of at least 1
    "#);
    assert_snapshot!(error("{\"model_type\": \"llama\"}"), @r"
    DIR/config.json: `hidden_size` is missing
    hint: fetch the whole config.json of the model
    ");
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
fn only_auto_compression_has_the_guard_by_default() {
    let compression = |settings: &str| job(&format!("compression = {{ {settings} }}")).unwrap().compression;
    assert!(compression("name = \"auto\"").guard && !compression("name = \"adatopk\"").guard);
    assert!(!compression("name = \"auto\", guard = false").guard && compression("name = \"int4\", guard = true").guard);
    let all = compression("stochastic_rounding = true, spectral_watch = 50");
    assert_eq!((all.stochastic_rounding, all.spectral_watch), (true, 50));
}

#[test]
fn the_ratio_and_the_budget_of_compression_follow_its_rule() {
    let read = |settings: &str| job(&format!("compression = {{ {settings} }}"));
    let ratio = |name: &str| read(&format!("name = \"{name}\"")).unwrap().compression.ratio;
    assert_eq!(["auto", "adatopk", "topk", "adatopk-published"].map(ratio), [10.0, 10.0, 10.0, 30.0]);
    let budget = |settings: &str| read(settings).unwrap().compression.loss_budget.share();
    assert_eq!([budget(""), budget("loss_budget = \"1 %\""), budget("loss_budget = \"0.25%\"")], [0.005, 0.01, 0.0025]);
    assert_eq!(with(&["compression.loss_budget=2%"]).unwrap().compression.loss_budget.share(), 0.02);
    let refused = |settings: &str| read(settings).unwrap_err().report();
    for (settings, words) in [
        ("error_feedback = true", "the error of one sample's activation would be added to that of another"),
        ("shared_masks = true", "gradients always keep the places that top-k sent of the activation"),
        ("loss_budget = 0.5", "`compression.loss_budget` needs a unit\nhint: write loss_budget = \"0.5 %\""),
        ("loss_budget = \"120 %\"", "`compression.loss_budget` is above 100 %"),
    ] {
        assert!(refused(settings).contains(words), "{}", refused(settings));
    }
}

/// An open setting is written as `auto`, and still has a value.
#[test]
fn auto_settings_are_chosen_by_the_planner() {
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
fn overrides_replace_the_file() {
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
    assert_eq!(job.compression.compressor, Compressor::Int8);
    let optimizer = job.train.optimizer;
    assert_eq!((optimizer.lr, optimizer.decay), (0.5, Decay::Cosine));
    assert_eq!(optimizer.rule, Rule::Sgd { momentum: 0.9, nesterov: false });
}

#[test]
fn the_optimizer_of_the_plan() {
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

/// A run that stops early, or goes on for longer, is the same job: `decay_steps` and the rates stay.
#[test]
fn where_a_run_stops_does_not_change_the_job() {
    let text = "[train]\nsteps = 40\noptimizer = { decay = \"cosine\" }";
    let lengths = |text: &str, set: &[&str]| {
        let overrides: Vec<String> = set.iter().map(|s| (*s).to_owned()).collect();
        let mut job = Job::parse("job.toml", text, Path::new("/"), &overrides).unwrap();
        let again = Job::parse("again", &job.to_toml().unwrap(), Path::new("/"), &[]).unwrap();
        // A job that was written names its size.
        job.train.default_micro_batch = false;
        assert_eq!(again, job);
        (job.train.steps, job.train.stop, job.train.optimizer.decay_steps)
    };
    assert_eq!(lengths(text, &[]), (40, 40, 40));
    for set in [
        &["train.steps=20"][..],
        &["train.steps = 2e1"],
        &["train.steps=30", "train.steps=20"],
        &["train={ steps = 20, optimizer = { decay = \"cosine\" } }"],
        &["train.stop=20"],
        &["train.stop=20", "train.steps=30"],
    ] {
        assert_eq!(lengths(text, set), (40, 20, 40), "{set:?}");
    }
    assert_eq!(lengths(text, &["train.steps=80"]), (40, 80, 40));
    assert_eq!(lengths(text, &["train.steps=20", "train.optimizer.decay_steps=30"]), (40, 20, 30));
    // A job without a length takes that of the command line.
    assert_eq!(lengths("", &["train.steps=20"]), (20, 20, 20));
    assert_eq!(lengths("[train]\nstop = 10", &[]), (1000, 10, 1000));
    assert_eq!(lengths(text, &["train={ batch = 4 }"]), (1000, 1000, 1000));
    // A run goes on by the job in its directory.
    let stopped = Job::parse("job.toml", text, Path::new("/"), &["train.steps=20".into()]).unwrap().to_toml().unwrap();
    assert_eq!(lengths(&stopped, &[]), (40, 20, 40));
    assert_eq!(lengths(&stopped, &["train.steps=40"]), (40, 40, 40));
    let quick = Job::quick_start(&["train.steps=7".into()]).unwrap().train;
    assert_eq!((quick.steps, quick.stop, quick.optimizer.decay_steps), (7, 7, 7));
    assert_eq!(Job::quick_start(&[]).unwrap().train.steps, 400);
}

/// The settings of the quick start's GPT-2 are those of no other network.
#[test]
fn the_quick_start_takes_another_network() {
    let llama = ["model.family=llama", "model.hidden_size=64", "model.intermediate_size=96"];
    let sizes = ["model.num_attention_heads=2", "model.num_hidden_layers=1"];
    let overrides: Vec<String> = llama.into_iter().chain(sizes).map(str::to_owned).collect();
    let job = Job::quick_start(&overrides).unwrap();
    assert!(matches!(job.model.family, Family::Decoder(_)));
    assert_eq!(job.train.batch, 16);
    // Nor are its data those of another kind: the archive is what is missing, and the images are.
    for (other, missing) in [("model.file=absent.pt2", "absent.pt2"), ("model.family=resnet", "no training images")] {
        let error = Job::quick_start(&[other.into()]).unwrap_err().to_string();
        assert!(error.contains(missing), "{error}");
    }
    let Family::Gpt2(gpt2) = Job::quick_start(&["model.family=gpt2".into()]).unwrap().model.family else {
        panic!("no GPT-2");
    };
    assert_eq!(gpt2.n_layer, 4);
}

/// The configuration in the zoo builds the model of the weights in the zoo.
#[test]
fn the_zoos_weights_fit_their_model() {
    let zoo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/zoo");
    let text = "model = { config = \"gpt2.config.json\", weights = \"gpt2.weights.safetensors\", vocab_size = 256 }
                data = { context = 16 }";
    let job = Job::parse("job.toml", text, &zoo, &[]).unwrap();
    let weights = Weights::open(job.model.weights.as_deref().unwrap()).unwrap();
    let Family::Gpt2(mut config) = job.model.family else { panic!("not gpt2") };
    let check = |config: &fusionllm_models::Gpt2Config| {
        let graph = config.build(1, 16, DType::F32).unwrap();
        weights.compare(&graph.state().collect::<Vec<_>>())
    };
    // The tokenizer has more tokens than the model.
    assert!(matches!(check(&config), Err(WeightsError::OtherModel { .. })));
    config.vocab_size = 100;
    let Differences { missing, extra } = check(&config).unwrap();
    assert!(missing.is_empty() && extra.is_empty(), "{missing:?} {extra:?}");
}

/// A folder that `testdata/tokenizers/make.py` made.
fn tokenizer() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/tokenizers/llama")
}

#[test]
fn a_tokenizer_is_a_name_or_a_path() {
    let dir = directory();
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        fs::copy(tokenizer().join(name), dir.path().join(name)).unwrap();
    }
    let read = |written: &str| {
        let text = format!("[data]\ntokenizer = \"{written}\"\n[model]\nfamily = \"gpt2\"\n");
        Job::parse("job.toml", &text, dir.path(), &[]).map_err(|e| e.report())
    };
    let (file, folder) = (read("tokenizer.json").unwrap(), read(".").unwrap());
    let Family::Gpt2(gpt2) = &file.model.family else { panic!("no GPT-2") };
    let Data::Text(text) = &file.data else { panic!("no text") };
    assert_eq!((gpt2.vocab_size, &file.data), (text.tokenizer.vocabulary(), &folder.data));
    let path = dir.path().join("tokenizer.json");
    assert!(file.to_toml().unwrap().contains(&format!("tokenizer = {:?}\n", path.display().to_string())));
    assert!(file.to_toml_in_run(Path::new("../..")).unwrap().contains("tokenizer = \"../../tokenizer\"\n"));
    let told = |written: &str| read(written).unwrap_err().replace(&dir.path().display().to_string(), "DIR");
    assert_snapshot!(told("none.json"), @r#"
    job.toml:2:13: `data.tokenizer` cannot be "none.json": DIR/none.json is not there
    hint: it is the path of a tokenizer.json or of its folder, or it is one of "bytes", "gpt2"
    "#);
    assert_snapshot!(told("corpus"), @r#"
    job.toml:2:13: DIR/corpus: there is no tokenizer.json here
    hint: let transformers write one: python3 -c 'from transformers import AutoTokenizer; AutoTokenizer.from_pretrained("DIR").save_pretrained("DIR")'
    "#);
}

#[test]
fn a_model_from_hugging_face_has_the_tokenizer_beside_it() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("config.json"), "{\"model_type\": \"gpt2\", \"vocab_size\": 50257}").unwrap();
    let read = || Network::at(dir.path()).map(|network| network.tokenizer.unwrap()).map_err(|e| e.report());
    assert_eq!(read().unwrap(), fusionllm_data::Tokenizer::Gpt2);
    fs::copy(tokenizer().join("tokenizer.json"), dir.path().join("tokenizer.json")).unwrap();
    assert!(matches!(read().unwrap(), fusionllm_data::Tokenizer::File(_)));
    fs::write(dir.path().join("tokenizer.json"), "{}").unwrap();
    assert!(read().unwrap_err().contains("no tokenizer: it has no `model`"));
}
