//! Messages about wrong job files and overrides.

use std::path::Path;

use fusionllm_graph::Advice;
use insta::assert_snapshot;

use super::{directory, job, with};
use crate::config::Job;

fn error(text: &str) -> String {
    job(text).unwrap_err().report()
}

#[test]
fn errors_in_overrides() {
    let error = |setting: &str| with(&[setting]).unwrap_err().report();
    assert_snapshot!(error("train.bath=4"), @"
    --set train.bath=4: unknown setting `bath` in [train]
    hint: did you mean `batch`? [train] takes steps, stop, batch, micro_batch, seed, schedule, precision, optimizer
    ");
    assert_snapshot!(error("trian.batch=4"), @r"
    --set trian.batch=4: unknown section `trian`
    hint: did you mean `train`? the sections are model, data, lora, train, plan, compression, checkpoint, eval, network
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
    hint: it must be a whole number of at least 1
    "#);
    assert_snapshot!(error("train.batch.size=4"), @r"
    --set train.batch.size=4: `train.batch` takes a whole number, not a table
    hint: it must be a whole number of at least 1
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
    --set train.batch=9223372036854775808: `train.batch` is 9223372036854775808
    hint: it must be at most 2147483647
    ");
    assert_snapshot!(error("train.micro_batch=3"), @r#"
    --set train.micro_batch=3: `train.micro_batch` = 3 does not divide `train.batch` = 8
    hint: write micro_batch = 2, another divisor of 8, or "auto"
    "#);
}

#[test]
fn errors_of_form() {
    assert_snapshot!(error("[train]\nsteps = 10\nbatch ="), @r"
    job.toml:3:8: `batch`: string values must be quoted, expected literal string
    hint: the file is TOML: sections as [train], settings as name = value, text in quotes
    ");
    assert_snapshot!(error("[train]\nsteps = 10\nsteps = 11"), @r"
    job.toml:3:1: `steps`: duplicate key
    hint: the file is TOML: sections as [train], settings as name = value, text in quotes
    ");
    assert_snapshot!(error("[train\nsteps = 10"), @r"
    job.toml:1:7: unclosed table, expected `]`
    hint: the file is TOML: sections as [train], settings as name = value, text in quotes
    ");
    assert_snapshot!(error("[data]\n# Größe\nkind = 'text\n"), @r"
    job.toml:3:13: `kind`: invalid literal string, expected `'`
    hint: the file is TOML: sections as [train], settings as name = value, text in quotes
    ");
}

#[test]
fn errors_in_names() {
    assert_snapshot!(error("[train]\nsteps = 10\nbtach = 4"), @"
    job.toml:3:1: unknown setting `btach` in [train]
    hint: did you mean `batch`? [train] takes steps, stop, batch, micro_batch, seed, schedule, precision, optimizer
    ");
    assert_snapshot!(error("[trian]\nsteps = 10"), @r"
    job.toml:1:2: unknown section `trian`
    hint: did you mean `train`? the sections are model, data, lora, train, plan, compression, checkpoint, eval, network
    ");
    assert_snapshot!(error("steps = 10"), @r"
    job.toml:1:1: the setting `steps` stands outside the sections
    hint: put it below its section's header; the sections are model, data, lora, train, plan, compression, checkpoint, eval, network
    ");
    assert_snapshot!(error("[train.optimizer]\nlearning_rate = 1"), @r"
    job.toml:2:1: unknown setting `learning_rate` in [train.optimizer]
    hint: here it is `train.optimizer.lr`
    ");
    assert_snapshot!(error("[train]\noptimizer = { name = \"sgd\", betas = [0.9, 0.99] }"), @r"
    job.toml:2:29: unknown setting `betas` in [train.optimizer]
    hint: [train.optimizer] takes name, momentum, nesterov, lr, min_lr, weight_decay, clip, warmup, decay, decay_steps, groups
    ");
    assert_snapshot!(error("[[train.optimizer.groups]]\nlr = 1e-4"), @r#"
    job.toml:1:1: a group of `train.optimizer.groups` names no parameters
    hint: write parameters = ["bias"], with names of parameters; `*` stands for any text
    "#);
    assert_snapshot!(error("[[train.optimizer.groups]]\nparameters = \"bias\""), @"
    job.toml:2:14: a group of `train.optimizer.groups` says nothing about its parameters
    hint: write lr or weight_decay beside it
    ");
    assert_snapshot!(error("[model]\nfamily = \"gtp2\""), @r#"
    job.toml:2:10: `model.family` cannot be "gtp2"
    hint: did you mean "gpt2"? it is one of "gpt2", "resnet", "imported", "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "olmo2", "smollm3", "gpt_neox"
    "#);
    assert_snapshot!(error("[model]\nn_layers = 2"), @r"
    job.toml:2:1: unknown setting `n_layers` in [model]
    hint: did you mean `n_layer`? [model] takes family, path, config, weights, freeze, frozen_dtype, n_embd, n_layer, n_head, n_inner, vocab_size, n_positions, resid_pdrop, embd_pdrop, attn_pdrop, layer_norm_epsilon, activation_function, tie_word_embeddings, initializer_range, _attn_implementation
    ");
    assert_snapshot!(error("[data]\ntokenizer = \"bpe\""), @r#"
    job.toml:2:13: `data.tokenizer` cannot be "bpe": /nowhere/bpe is not there
    hint: it is the path of a tokenizer.json or of its folder, or it is one of "bytes", "gpt2"
    "#);
    assert_snapshot!(error("[plan]\nscheduler = \"opfence\""), @r#"
    job.toml:2:13: `plan.scheduler` cannot be "opfence"
    hint: did you mean "op-fence"? it is one of "equal-number", "equal-compute", "op-fence", "exact"
    "#);
    assert_snapshot!(error("[compression]\nname = \"top-k\""), @r#"
    job.toml:2:8: `compression.name` cannot be "top-k"
    hint: did you mean "topk"? it is one of "none", "adatopk", "adatopk-published", "topk", "bf16", "int8", "int4", "int4-hadamard", "nvfp4", "auto"
    "#);
}

/// PyTorch's trainers have these settings.
#[test]
fn names_of_other_trainers_are_translated() {
    let hint = |text: &str| job(text).unwrap_err().hint;
    assert_snapshot!(hint("[train]\ngradient_accumulation = 4"), @"gradients accumulate over batch / micro_batch micro-batches: set `train.batch` and `train.micro_batch`");
    assert_snapshot!(hint("[train]\ndtype = \"bf16\""), @r#"here it is `train.precision`, "bf16" or "f32""#);
    assert_snapshot!(hint("[train]\nmicro_batch = \"four\""), @r#"it must be a whole number of at least 1, or micro_batch = "auto", with which the planner chooses"#);
}

#[test]
fn errors_in_types() {
    assert_snapshot!(error("[train]\nsteps = \"10\""), @r#"
    job.toml:2:9: `train.steps` takes a whole number, not the text "10"
    hint: write steps = 10
    "#);
    assert_snapshot!(error("[train]\nsteps = 10.5"), @r"
    job.toml:2:9: `train.steps` takes a whole number, not 10.5
    hint: it must be a whole number of at least 1
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
    hint: it must be a number above 0
    ");
    assert_snapshot!(error("[train.optimizer]\nlr = nan"), @r"
    job.toml:2:6: `train.optimizer.lr` is NaN
    hint: it must be a finite number above 0
    ");
    assert_snapshot!(error("[train.optimizer]\nlr = 0"), @r"
    job.toml:2:6: `train.optimizer.lr` is 0
    hint: it must be above 0
    ");
    assert_snapshot!(error("[train.optimizer]\nbetas = 0.9"), @r"
    job.toml:2:9: `train.optimizer.betas` takes two numbers, not 0.9
    hint: write two numbers in brackets, such as betas = [0.9, 0.95]
    ");
    assert_snapshot!(error("[train.optimizer]\nbetas = [0.9]"), @r"
    job.toml:2:9: `train.optimizer.betas` takes two numbers
    hint: write two numbers in brackets, such as betas = [0.9, 0.95]
    ");
    assert_snapshot!(error("[data]\nvalidation = \"10 %\""), @r#"
    job.toml:2:14: `data.validation` takes a number, not the text "10 %"
    hint: write validation = 0.1
    "#);
    assert_snapshot!(error("[data]\nvalidation = 7% # of all"), @"
    job.toml:2:14: `validation`: string values must be quoted, expected literal string
    hint: write validation = 0.07
    ");
    assert_snapshot!(error("[model]\ntie_word_embeddings = \"yes\""), @r#"
    job.toml:2:23: `model.tie_word_embeddings` takes true or false, not the text "yes"
    hint: write tie_word_embeddings = true
    "#);
    assert_snapshot!(error("[data]\nfiles = [\"a\", 3]"), @r#"
    job.toml:2:15: `data.files` takes a list of strings, not 3
    hint: write files = ["PATH"], the paths or patterns of files
    "#);
    assert_snapshot!(error("[data]\nfiles = 1979-05-27"), @r#"
    job.toml:2:9: `data.files` takes a list of strings, not a date
    hint: write files = ["PATH"], the paths or patterns of files
    "#);
}

#[test]
fn errors_in_meaning() {
    assert_snapshot!(error("[train]\nprecision = \"fp16\""), @r#"
    job.toml:2:13: `train.precision`: fp16 has so small a range that gradients vanish in it without a loss scale, which there is not
    hint: write precision = "bf16", which has the range of f32
    "#);
    assert_snapshot!(error("[train]\nbatch = 10\nmicro_batch = 4"), @r#"
    job.toml:3:15: `train.micro_batch` = 4 does not divide `train.batch` = 10
    hint: write micro_batch = 5, another divisor of 10, or "auto"
    "#);
    assert_snapshot!(error("[train]\nbatch = 2\nmicro_batch = 4"), @r#"
    job.toml:3:15: `train.micro_batch` = 4 does not divide `train.batch` = 2
    hint: write micro_batch = 2, another divisor of 2, or "auto"
    "#);
    assert_snapshot!(error("[train.optimizer]\nlr = 1e-4\nmin_lr = 1e-3"), @r"
    job.toml:3:10: `train.optimizer.min_lr` is 0.001
    hint: it must be at least 0 and at most lr = 0.0001
    ");
    assert_snapshot!(error("[model]\nn_embd = 100\nn_head = 3"), @r"
    job.toml:3:10: `model.n_head` = 3 does not divide `model.n_embd` = 100
    hint: write n_head = 2, or another divisor of 100
    ");
    assert_snapshot!(error("[model]\nattn_pdrop = 1"), @r"
    job.toml:2:14: `model.attn_pdrop` is 1
    hint: it must be at least 0 and below 1
    ");
    assert_snapshot!(error("[model]\nn_embd = 1e15"), @r"
    job.toml:2:10: `model.n_embd` is 1000000000000000
    hint: it must be at most 2147483647
    ");
    assert_snapshot!(error("[model]\nvocab_size = 255"), @r"
    job.toml:2:14: `model.vocab_size` is 255
    hint: it must be at least 256: the tokenizer has 256 tokens
    ");
    assert_snapshot!(error("[model]\nn_positions = 64"), @r"
    job.toml:2:15: `model.n_positions` is 64
    hint: it must be at least 128: data.context is 128 tokens
    ");
    assert_snapshot!(error("[model]\nfamily = \"resnet\"\ndepth = 20\n[data]\nkind = \"text\""), @r"
    job.toml:3:9: `model.depth` is 20, and there is no ResNet-20
    hint: it is one of 18, 34, 50, 101, 152
    ");
    assert_snapshot!(error("[model]\nfamily = \"resnet\"\n[data]\nkind = \"text\""), @r#"
    job.toml:4:8: `data.kind`: a resnet learns from images, not from text
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
        let message = Job::parse("job.toml", text, dir.path(), &[]).unwrap_err().report();
        message.replace(&dir.path().display().to_string(), "DIR")
    };
    assert_snapshot!(error("[data]\nfiles = [\"corpus/*.text\"]"), @r#"
    job.toml:2:9: `data.files`: no file matches "corpus/*.text" in DIR
    hint: did you mean "corpus/b.txt"? paths start at this file's directory
    "#);
    assert_snapshot!(error("[data]\nfiles = [\"corpus\"]"), @r#"
    job.toml:2:9: `data.files`: "corpus" is a directory
    hint: name the files in it: write files = ["corpus/*"]
    "#);
    assert_snapshot!(error("[data]\nfiles = [\"corpus/***\"]"), @r#"
    job.toml:2:9: `data.files`: "corpus/***" is not a valid pattern: wildcards are either regular `*` or recursive `**`
    hint: * stands for any part of a name, ** for any directories, [ab] for one of the letters
    "#);
    assert_snapshot!(error("[data]\nvalidation = \"held-out.txt\""), @r#"
    job.toml:2:14: `data.validation`: no file matches "held-out.txt" in DIR
    hint: paths start at this file's directory
    "#);
    assert_snapshot!(error("[model]\nweights = \"model.safetensors\""), @r#"
    job.toml:2:11: `model.weights`: no file matches "model.safetensors" in DIR
    hint: paths start at this file's directory
    "#);
    assert_snapshot!(error("model = { family = \"gpt2\" }\ndata = { kind = \"cifar10\", train = \"train.bin\" }"), @r#"
    job.toml:2:17: `data.kind`: a language model learns from text, not from images
    hint: write kind = "text" in [data], or family = "resnet" in [model]
    "#);
    assert_snapshot!(error("model = { family = \"resnet\", num_classes = 9 }\ndata = { train = \"train.bin\" }"), @r"
    job.toml:1:44: `model.num_classes` is 9
    hint: it must be at least 10: CIFAR-10 has 10 classes
    ");
    let missing = Job::load(Path::new("no/such/job.toml"), &[]).unwrap_err().report();
    assert_snapshot!(missing, @r"
    no/such/job.toml: the job file cannot be read: No such file or directory (os error 2)
    hint: give the path of a job file, or none at all for the quick start
    ");
}

proptest::proptest! {
    /// Any file or override gives a job or an error, never a panic.
    #[test]
    fn wrong_text_never_panics(
        // A sound job with a piece of it replaced by something that TOML uses.
        start in 0usize..700,
        length in 0usize..40,
        put in "[\\[\\]{}=\"'.,#a-z0-9_\\- \n\u{e4}]{0,8}",
        setting in "[a-z.]{0,8}(=[\\[\\]{}=\"'.,a-z0-9_\\-]{0,8})?",
    ) {
        let sound = concat!(include_str!("../quick_model.toml"), include_str!("../quick_start.toml"));
        let start = sound.floor_char_boundary(start);
        let end = sound.floor_char_boundary(start + length);
        let text = format!("{}{put}{}", &sound[..start], &sound[end..]);
        let _ = Job::parse("job.toml", &text, Path::new("/nowhere"), &[]);
        let _ = Job::parse("job.toml", &text, Path::new("/nowhere"), &[format!("train.{setting}"), setting]);
    }
}

#[test]
fn groups_of_rows_fit_into_micro_batches() {
    let dir = directory();
    let error = |train: &str| {
        let text =
            format!("[model]\nfamily = \"resnet\"\n[data]\ntrain = [\"train.bin\"]\ngroup = 4\n[train]\n{train}");
        Job::parse("job.toml", &text, dir.path(), &[]).unwrap_err().report()
    };
    assert_snapshot!(error("batch = 16\nmicro_batch = 2"), @"
    job.toml:5:9: `train.micro_batch` = 2 does not hold whole groups of `data.group` = 4
    hint: write micro_batch = 4 in [train], or another multiple of 4
    ");
    assert_snapshot!(error("batch = 16\nmicro_batch = \"auto\""), @r#"
    job.toml:5:9: `train.micro_batch` is "auto", but `data.group` = 4 needs a size
    hint: write micro_batch = 4 in [train], or another multiple of 4
    "#);
    assert_snapshot!(error("batch = 6\nmicro_batch = 2"), @"
    job.toml:5:9: `train.micro_batch` = 2 does not hold whole groups of `data.group` = 4
    hint: write a multiple of 4 for batch and micro_batch in [train]
    ");
    assert_snapshot!(job("[data]\ndocuments = \"apart\"").unwrap_err().report(), @r#"
    job.toml:2:13: documents cannot be kept apart: this tokenizer has no token between them
    hint: use a tokenizer with one, such as tokenizer = "gpt2", or leave `documents` out
    "#);
    assert_snapshot!(job("[data]\ngroup = 4").unwrap_err().report(), @r#"
    job.toml:2:9: `data.group` is for rows of tensors and images; a text has none, only contexts that are cut from it
    hint: leave group out, or write the rows to safetensors files with kind = "tensors"
    "#);
}
