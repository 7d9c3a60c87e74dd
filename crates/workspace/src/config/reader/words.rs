//! Settings of other trainers, and what they are called here.
//!
//! The words are those of `transformers` (`TrainingArguments`, and the configurations of TRL), PyTorch Lightning,
//! axolotl, nanoGPT, DeepSpeed and `torchrun`.

/// A word of other trainers: how it is written there, in lower case and with underscores, and what to do here.
const WORDS: &[(&[&str], &str)] = &[
    (
        &[
            "max_steps",
            "total_steps",
            "num_steps",
            "n_steps",
            "iterations",
            "max_iters",
            "num_iterations",
            "train_steps",
            "iters",
            "max_train_steps",
        ],
        "here it is `train.steps`",
    ),
    (
        &["epochs", "num_train_epochs", "max_epochs", "num_epochs", "n_epochs", "total_epochs", "min_epochs"],
        "a job has a length in steps: set `train.steps`; an epoch is the number of samples divided by `train.batch`",
    ),
    (
        &["batch_size", "train_batch_size", "global_batch_size", "total_batch_size"],
        "here it is `train.batch`: the samples of a step, on all machines together",
    ),
    (
        &[
            "per_device_train_batch_size",
            "per_device_batch_size",
            "per_gpu_train_batch_size",
            "micro_batch_size",
            "train_micro_batch_size_per_gpu",
            "device_batch_size",
        ],
        "here it is `train.micro_batch`, the samples that go through the model at once; `train.batch` is the whole step",
    ),
    (
        &[
            "gradient_accumulation",
            "gradient_accumulation_steps",
            "accumulate_grad_batches",
            "grad_accum",
            "grad_accumulation_steps",
            "accumulation_steps",
        ],
        "gradients accumulate over batch / micro_batch micro-batches: set `train.batch` and `train.micro_batch`",
    ),
    (&["learning_rate", "lr", "max_lr", "peak_lr", "base_lr"], "here it is `train.optimizer.lr`"),
    (&["weight_decay", "wd"], "here it is `train.optimizer.weight_decay`"),
    (
        &["adam_beta1", "adam_beta2", "beta1", "beta2", "adam_betas", "betas"],
        "here it is `train.optimizer.betas`, such as [0.9, 0.95]",
    ),
    (&["adam_epsilon", "adam_eps", "eps", "epsilon"], "here it is `train.optimizer.eps`"),
    (
        &["max_grad_norm", "gradient_clip_val", "gradient_clipping", "grad_clip", "clip_grad", "clip_grad_norm"],
        "here it is `train.optimizer.clip`",
    ),
    (&["warmup_steps", "num_warmup_steps", "warmup_iters", "lr_warmup_steps"], "here it is `train.optimizer.warmup`"),
    (&["warmup_ratio"], "here warm-up is a number of steps: `train.optimizer.warmup`"),
    (
        &["lr_scheduler_type", "lr_scheduler", "lr_schedule", "lr_decay_style"],
        "here it is `train.optimizer.decay`, such as \"cosine\"",
    ),
    (&["min_learning_rate"], "here it is `train.optimizer.min_lr`"),
    (&["lr_decay_iters", "lr_decay_steps"], "here it is `train.optimizer.decay_steps`"),
    (&["optim", "optimizer_name", "optimizer_type"], "here it is `train.optimizer.name`, such as \"adamw\""),
    (
        &["fp16", "half_precision", "mixed_precision", "amp", "use_amp", "precision_plugin", "fp16_full_eval"],
        "there is no fp16 here: write `train.precision` = \"bf16\" or \"f32\"",
    ),
    (
        &["bf16", "dtype", "torch_dtype", "param_dtype", "compute_dtype", "tf32", "bf16_full_eval"],
        "here it is `train.precision`, \"bf16\" or \"f32\"",
    ),
    (&["data_seed", "random_seed", "manual_seed"], "here it is `train.seed`, for data, weights and dropout"),
    (
        &[
            "eval_steps",
            "eval_strategy",
            "evaluation_strategy",
            "eval_interval",
            "val_check_interval",
            "steps_per_eval",
            "eval_every",
        ],
        "here it is `eval.every`, a number of steps",
    ),
    (&["eval_iters", "limit_val_batches", "max_eval_batches", "val_batches"], "here it is `eval.batches`"),
    (
        &[
            "save_steps",
            "save_strategy",
            "save_interval",
            "saves_per_epoch",
            "checkpoint_every",
            "save_every",
            "enable_checkpointing",
            "always_save_checkpoint",
            "every_n_train_steps",
        ],
        "here it is `checkpoint.every`, a number of steps",
    ),
    (&["save_total_limit", "save_top_k"], "here it is `checkpoint.keep`"),
    (
        &["output_dir", "default_root_dir", "save_dir", "out_dir", "logdir"],
        "the option --run-dir names the directory of a run",
    ),
    (
        &[
            "logging_steps",
            "log_every_n_steps",
            "log_interval",
            "report_to",
            "wandb_project",
            "logging_dir",
            "logging_strategy",
            "steps_per_report",
            "logger",
            "run_name",
            "wandb_entity",
            "wandb_run_id",
            "disable_tqdm",
        ],
        "every step is in the run's metrics.jsonl and in its tensorboard/ directory, and nothing has to be set for it",
    ),
    (
        &[
            "max_seq_length",
            "max_seq_len",
            "max_length",
            "seq_len",
            "seq_length",
            "sequence_length",
            "sequence_len",
            "block_size",
            "model_max_length",
            "cutoff_len",
        ],
        "here it is `data.context`",
    ),
    (
        &["model_name_or_path", "pretrained_model_name_or_path", "base_model", "model_name", "model_id"],
        "here it is `model.path`, a folder in the form of Hugging Face on this machine",
    ),
    (
        &[
            "dataset",
            "datasets",
            "dataset_name",
            "train_file",
            "train_files",
            "data_path",
            "train_data",
            "dataset_path",
        ],
        "here it is `data.files`, such as [\"corpus/*.txt\"]",
    ),
    (
        &["validation_split_percentage", "val_size", "test_size", "val_set_size", "validation_split"],
        "here it is `data.validation`, a part such as 0.1",
    ),
    (&["tokenizer_name", "tokenizer_path", "tokenizer_name_or_path"], "here it is `data.tokenizer`"),
    (
        &[
            "train_on_inputs",
            "mask_prompt",
            "train_on_prompt",
            "train_on_responses_only",
            "assistant_only_loss",
            "completion_only_loss",
            "response_template",
            "roles_to_train",
        ],
        "here it is `data.train_on`, \"answers\" or \"all\", with kind = \"chats\" in [data]",
    ),
    (
        &["chat_template", "chat_template_path", "chat_template_jinja"],
        "here it is `data.template`, the path of a template in Jinja, with kind = \"chats\" in [data]",
    ),
    (
        &["dataset_text_field", "text_column", "field_messages"],
        "the field's name says what it is: `text`, `messages`, or `prompt` and `completion`; see `data.kind`",
    ),
    (&["resume_from_checkpoint", "ckpt_path", "resume_from"], "the option --resume names a run or a checkpoint"),
    (
        &[
            "gradient_checkpointing",
            "activation_checkpointing",
            "use_reentrant",
            "gradient_checkpointing_kwargs",
            "activation_checkpointing_kwargs",
            "activation_offloading",
            "offload_optimizer",
            "cpu_offload",
            "use_gradient_checkpointing",
        ],
        "the planner has activations computed again where a machine's memory asks for it, so nothing is set for it",
    ),
    (
        &[
            "deepspeed",
            "fsdp",
            "ddp",
            "strategy",
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "device_map",
            "fsdp_config",
            "zero_stage",
            "zero_optimization",
            "stage",
            "pp_size",
            "tp_size",
            "pipeline_parallel_degree",
            "tensor_parallel_degree",
            "parallelism_config",
            "sync_batchnorm",
        ],
        "the planner cuts the model over the machines that are there, so nothing is set for it; see `plan.scheduler`",
    ),
    (
        &["nproc_per_node", "devices", "num_processes", "world_size", "num_gpus", "gpus", "n_gpu"],
        "the option --peers says how many processes `train` starts, or how many machines `broker` waits for",
    ),
    (
        &[
            "nnodes",
            "num_nodes",
            "node_rank",
            "local_rank",
            "rank",
            "rdzv_endpoint",
            "rdzv_backend",
            "rdzv_id",
            "rdzv_conf",
            "standalone",
            "max_restarts",
            "monitor_interval",
            "ddp_timeout",
            "ddp_backend",
        ],
        "machines join with the ticket that `fusionllm broker` prints, and need no numbers",
    ),
    (
        &["master_addr", "master_port", "main_process_ip", "main_process_port"],
        "machines join with the ticket that `fusionllm broker` prints; --listen and --advertise name its addresses",
    ),
    (
        &[
            "dataloader_num_workers",
            "num_workers",
            "dataloader_pin_memory",
            "pin_memory",
            "dataloader_prefetch_factor",
            "dataloader_persistent_workers",
            "dataset_num_proc",
            "prefetch_factor",
        ],
        "the broker reads the data ahead of the steps, so nothing is set for it",
    ),
    (
        &[
            "packing",
            "sample_packing",
            "pack_sequences",
            "packing_strategy",
            "padding_free",
            "group_by_length",
            "pad_to_sequence_len",
        ],
        "texts are always packed; see `data.documents`. Of chats it is `data.packing`",
    ),
    (&["lora_r", "lora_rank", "r"], "here it is `lora.rank`"),
    (&["lora_alpha"], "here it is `lora.alpha`"),
    (&["lora_dropout"], "here it is `lora.dropout`"),
    (
        &["target_modules", "lora_target_modules", "lora_target_linear", "modules_to_save", "lora_modules"],
        "here it is `lora.targets`, such as [\"q_proj\", \"v_proj\"]; by default all linear layers of the blocks",
    ),
    (
        &[
            "use_lora",
            "use_peft",
            "peft_type",
            "peft_config",
            "fine_tune_type",
            "finetuning_type",
            "adapter",
            "adapter_path",
        ],
        "adapters are trained where the job has [lora], with rank = 16; `lora.weights` is a folder of adapters to start from",
    ),
    (
        &["load_in_4bit", "load_in_8bit", "qlora", "quantization", "quantization_config", "bnb_4bit_compute_dtype"],
        "weights are not quantized here; `model.frozen_dtype` = \"bf16\" halves those that are not trained",
    ),
    (
        &["freeze_layers", "frozen_layers", "unfrozen_parameters", "freeze_backbone"],
        "here it is `model.freeze`, a list of names or parts of them",
    ),
    (
        &["neftune_noise_alpha", "label_smoothing_factor", "label_smoothing"],
        "the loss is the cross-entropy, without noise and smoothing; a model of one's own may have another: see `model.file`",
    ),
    (
        &["load_best_model_at_end", "metric_for_best_model", "greater_is_better", "early_stopping_patience"],
        "`checkpoint.keep_best` = true keeps the checkpoint with the lowest validation loss; `eval.every` says how often",
    ),
    (&["per_device_eval_batch_size", "eval_batch_size"], "a validation takes `train.micro_batch` samples at once"),
    (
        &[
            "torch_compile",
            "compile",
            "use_liger_kernel",
            "attn_implementation",
            "flash_attention",
            "xformers_attention",
        ],
        "each peer computes with the kernels of its backend, so nothing is set for it; see --backend",
    ),
    (
        &["use_cpu", "no_cuda", "accelerator", "device"],
        "the option --backend of `train` and `join` names what a peer computes with",
    ),
    (
        &["push_to_hub", "hub_model_id", "hub_token", "hub_strategy"],
        "nothing is uploaded; `fusionllm export` writes a folder that other programs load",
    ),
    (
        &["init_from", "pretrained", "from_pretrained", "load_weights"],
        "here it is `model.path`, a folder in the form of Hugging Face, or `model.weights`, a safetensors file",
    ),
    (&["shuffle_dataset", "train_sampling_strategy", "dataloader_shuffle"], "here it is `data.shuffle`, true or false"),
    (&["overwrite_output_dir"], "a new run has a directory of its own, and --run-dir refuses one with another run"),
    (
        &["do_train", "do_eval", "do_predict", "eval_only"],
        "`fusionllm train` trains, and measures the validation loss as `eval.every` says",
    ),
];

/// Advice about a setting or an option that other trainers have.
pub fn word_of_others(word: &str) -> Option<&'static str> {
    let word = word.trim_start_matches('-').replace('-', "_").to_lowercase();
    WORDS.iter().find(|(words, _)| words.contains(&word.as_str())).map(|(_, hint)| *hint)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use fusionllm_graph::Advice;

    use super::*;
    use crate::config::Job;

    fn words() -> impl Iterator<Item = &'static str> {
        WORDS.iter().flat_map(|(words, _)| words.iter().copied())
    }

    #[test]
    fn every_word_is_there_once() {
        let all: BTreeSet<&str> = words().collect();
        assert_eq!(all.len(), words().count());
        assert!(all.len() >= 100, "{}", all.len());
        assert_eq!(word_of_others("--per-device-train-batch-size"), word_of_others("per_device_train_batch_size"));
        assert_eq!(word_of_others("steps"), None);
    }

    /// A word leads to ours wherever a person writes it. A word that is a setting of ours in that place is none.
    #[test]
    fn words_of_others_lead_to_ours() {
        for word in words() {
            let hint = word_of_others(word).unwrap();
            for place in ["", "train.", "train.optimizer.", "data."] {
                let setting = format!("{place}{word}=3");
                let Err(error) = Job::quick_start(std::slice::from_ref(&setting)) else { continue };
                let known = format!("unknown setting `{word}`");
                let outside = format!("the setting `{word}` stands outside the sections");
                let text = error.to_string();
                let ours = hint.contains(&format!("`{place}{word}`"));
                if !ours && (text.contains(&known) || text.contains(&outside)) {
                    assert_eq!(error.hint().as_deref(), Some(hint), "{setting}");
                }
            }
        }
    }

    /// The settings that hints name are ours.
    #[test]
    fn hints_name_settings_of_ours() {
        let job = Job::quick_start(&[]).unwrap().to_toml().unwrap().parse::<toml::Table>().unwrap();
        let job: BTreeSet<String> = crate::run_dir::settings(&job).into_iter().map(|(key, _)| key).collect();
        // They are written only where they are set.
        let rare = [
            "plan.scheduler",
            "data.files",
            "data.template",
            "data.train_on",
            "data.packing",
            "model.path",
            "model.file",
            "model.weights",
            "model.freeze",
            "model.frozen_dtype",
            "lora.rank",
            "lora.alpha",
            "lora.dropout",
            "lora.targets",
            "lora.weights",
        ];
        for (_, hint) in WORDS {
            for name in hint.split('`').skip(1).step_by(2).filter(|name| name.contains('.')) {
                assert!(job.contains(name) || rare.contains(&name), "{name}");
            }
        }
    }
}
