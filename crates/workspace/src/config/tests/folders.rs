//! Models from Hugging Face folders.

use super::*;

const LLAMA: &str = r#"{
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 300, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64,
    "rope_scaling": null, "rope_parameters": {"rope_type": "linear", "rope_theta": 500, "factor": 2.0},
    "eos_token_id": [2, 3], "tie_word_embeddings": true
}"#;

fn folder(config: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("model")).unwrap();
    fs::write(dir.path().join("model/config.json"), config).unwrap();
    dir
}

fn read(dir: &tempfile::TempDir, text: &str, set: &[&str]) -> Result<Job, JobError> {
    let set: Vec<String> = ["data.tokenizer=bytes"].iter().chain(set).map(|set| set.to_string()).collect();
    Job::parse("job.toml", text, dir.path(), &set)
}

fn decoder(job: &Job) -> &fusionllm_models::Decoder {
    let Family::Decoder(decoder) = &job.model.family else { panic!("no decoder") };
    decoder
}

const PATH: &str = "[model]\npath = \"model\"\n";

#[test]
fn a_folder_is_a_model_with_its_weights() {
    let dir = folder(LLAMA);
    let job = read(&dir, PATH, &[]).unwrap();
    assert_eq!(decoder(&job).model_type, "llama");
    assert_eq!(job.model.weights, Some(dir.path().join("model")));
    // The configuration alone starts from the seed.
    let fresh = read(&dir, "[model]\nconfig = \"model/config.json\"", &[]).unwrap();
    assert_eq!((fresh.model.weights, fresh.model.family), (None, job.model.family.clone()));
    // The written job needs no config.json, and has its nulls.
    fs::remove_file(dir.path().join("model/config.json")).unwrap();
    let text = job.to_toml().unwrap();
    let model: String = text.lines().take_while(|line| !line.starts_with("[data]")).map(|l| format!("{l}\n")).collect();
    assert_snapshot!(model.replace(&dir.path().display().to_string(), "DIR"), @r#"
    [model]
    family = "llama"
    architectures = ["LlamaForCausalLM"]
    eos_token_id = [2, 3]
    hidden_size = 32
    intermediate_size = 48
    max_position_embeddings = 64
    num_attention_heads = 4
    num_hidden_layers = 2
    rope_scaling = "none"
    tie_word_embeddings = true
    vocab_size = 300
    weights = "DIR/model"

    [model.rope_parameters]
    factor = 2.0
    rope_theta = 500
    rope_type = "linear"
    "#);
    assert_eq!(read(&dir, &text, &[]).unwrap().model, job.model);
}

/// Without a job file, too.
#[test]
fn the_quick_start_takes_a_folder() {
    let dir = folder(LLAMA);
    let path = format!("model.path={}/model", dir.path().display());
    // A model that has learnt from tokens does not silently learn from bytes.
    let refused = Job::quick_start(std::slice::from_ref(&path)).unwrap_err().report();
    assert_snapshot!(refused.replace(&dir.path().display().to_string(), "DIR"), @r#"
    the quick start's job: DIR/model has no tokenizer.json, and `data.tokenizer` is not written
    hint: it is the path of a tokenizer.json or of its folder, or it is one of "bytes", "gpt2"
    "#);
    let job = Job::quick_start(&[path, "data.tokenizer=bytes".into()]).unwrap();
    assert_eq!((decoder(&job).model_type, job.train.steps), ("llama", 400));
    assert!(job.train.optimizer.lr < 1e-3, "{:?}", job.train.optimizer);
}

#[test]
fn settings_of_the_job_replace_those_of_the_folder() {
    let dir = folder(LLAMA);
    let job = read(&dir, &format!("{PATH}attention_dropout = 0.1"), &["model.num_key_value_heads=2"]).unwrap();
    assert_eq!((decoder(&job).attention.dropout, decoder(&job).attention.key_value_heads), (0.1, 2));
    assert_eq!(read(&dir, &job.to_toml().unwrap(), &[]).unwrap().model, job.model);
    let mistral = folder(&LLAMA.replace("llama", "mistral").replace("\"rope_scaling\"", "\"sliding_window\""));
    let windows = |job: Job| decoder(&job).layers[0].window;
    let heads = "model.num_key_value_heads=2";
    assert_eq!(windows(read(&mistral, PATH, &[heads]).unwrap()), None);
    assert_eq!(windows(read(&mistral, PATH, &[heads, "model.sliding_window=7"]).unwrap()), Some(7));
}

/// A model without a folder takes its sizes from the data where it names none.
#[test]
fn a_family_needs_no_folder() {
    let text = "[model]\nfamily = \"qwen3\"\nhidden_size = 32\nintermediate_size = 48\nnum_hidden_layers = 2
        num_attention_heads = 4\nnum_key_value_heads = 2\nhead_dim = 8\n[data]\ncontext = 32";
    let job = job(text).unwrap();
    assert_eq!((decoder(&job).vocab_size, decoder(&job).longest()), (256, 32));
    let again = Job::parse("job.toml", &job.to_toml().unwrap(), Path::new("/"), &[]).unwrap();
    assert_eq!(again.model, job.model);
}

#[test]
fn errors_in_folders() {
    let dir = folder(LLAMA);
    let error = |text: &str, set: &[&str]| {
        read(&dir, text, set).unwrap_err().report().replace(&dir.path().display().to_string(), "DIR")
    };
    assert_snapshot!(error("[model]\npath = \"models\"", &[]), @r#"
    job.toml:2:8: `model.path`: there is no folder "models" in DIR
    hint: name a Hugging Face folder, with config.json and safetensors files; paths start at this file's directory
    "#);
    assert_snapshot!(error("[model]\npath = \".\"", &[]), @r#"
    job.toml:2:8: `model.path`: the folder "." holds no config.json
    hint: name a Hugging Face folder, with config.json and safetensors files; paths start at this file's directory
    "#);
    assert_snapshot!(error("[model]\npath = \"model/config.json\"", &[]), @r#"
    job.toml:2:8: `model.path`: "model/config.json" is no folder
    hint: name a Hugging Face folder, with config.json and safetensors files; paths start at this file's directory
    "#);
    assert_snapshot!(error(PATH, &["model.family=qwen2"]), @r#"
    --set model.family=qwen2: `model.family` is "qwen2", but the config.json describes a llama
    hint: leave family out: config.json has it
    "#);
    assert_snapshot!(error(PATH, &["model.family=lama"]), @r#"
    --set model.family=lama: `model.family` cannot be "lama"
    hint: did you mean "llama"? it is one of "gpt2", "resnet", "imported", "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "olmo2", "smollm3", "gpt_neox"
    "#);
    assert_snapshot!(error(PATH, &["model.n_embd=64"]), @r"
    --set model.n_embd=64: `n_embd` = 64 is not understood, and may change what the model computes
    hint: remove the key if the model is the same without it, or export the model with torch.export
    ");
    assert_snapshot!(error(PATH, &["model.hidden_size=30"]), @r"
    --set model.hidden_size=30: `hidden_size` is 30, but it must be a multiple of `num_attention_heads` = 4
    hint: correct it, or fetch config.json again
    ");
    assert_snapshot!(error(PATH, &["data.context=129"]), @r"
    DIR/model/config.json: `max_position_embeddings` = 128 is too small: data.context is 129 tokens
    hint: raise it, or lower the other
    ");
    assert_snapshot!(error(PATH, &["data.tokenizer=gpt2"]), @r"
    DIR/model/config.json: `vocab_size` = 300 is too small: the tokenizer has 50257 tokens
    hint: raise it, or lower the other
    ");
    let images = ["data.kind=cifar10", "data.train=model/config.json"].map(str::to_owned);
    assert_snapshot!(Job::parse("job.toml", PATH, dir.path(), &images).unwrap_err().report(), @r#"
    --set data.kind=cifar10: `data.kind`: a language model learns from text, not from images
    hint: write kind = "text" in [data], or family = "resnet" in [model]
    "#);
    let damaged = |from: &str, to: &str| {
        fs::write(dir.path().join("model/config.json"), LLAMA.replace(from, to)).unwrap();
        error(PATH, &[])
    };
    assert_snapshot!(damaged("\"llama", "\"mamba"), @r#"
    DIR/model/config.json: the family "mamba" is not known
    hint: the families are gpt2, llama, mistral, qwen2, qwen3, gemma2, gemma3_text, phi3, olmo2, smollm3, gpt_neox; export another model with torch.export
    "#);
    assert_snapshot!(damaged("64", "\"64\""), @r#"
    DIR/model/config.json: `max_position_embeddings` is "64", but it must be a whole number above 0
    hint: correct it, or fetch config.json again
    "#);
    assert_snapshot!(damaged("linear", "spiral"), @r#"
    DIR/model/config.json: `rope_parameters.rope_type` is "spiral", but it must be "default", "linear", "dynamic", "llama3", "yarn" or "longrope"
    hint: correct it, or fetch config.json again
    "#);
    assert_snapshot!(damaged("\"rope_scaling\": null", "\"alibi\": true"), @r"
    DIR/model/config.json: `alibi` = true is not understood, and may change what the model computes
    hint: remove the key if the model is the same without it, or export the model with torch.export
    ");
    assert_snapshot!(damaged("300,", "300"), @r"
    DIR/model/config.json:2:85: expected `,` or `}` at line 2 column 85
    hint: give a config.json as Hugging Face publishes them
    ");
}
