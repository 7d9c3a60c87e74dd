//! Files and texts: of a run, of a user, and of other programs.

use std::fs;
use std::path::{Path, PathBuf};

use fusionllm_data::weights::Weights;
use fusionllm_data::{ChatTemplate, Chats, Cifar10, Data, Dataset, Message, OnError, Tokenizer, TrainOn, Validation};
use fusionllm_graph::{Graph, StateTensor, TensorType, autodiff};
use fusionllm_import::ImportOptions;
use fusionllm_node::{RelayUrl, decoders};
use fusionllm_plan::SavedPlan;
use fusionllm_transport::Ticket;
use fusionllm_workbench::model::imported::ImportedModel;
use fusionllm_workspace::checkpoint::{Checkpoint, Part};
use fusionllm_workspace::config::{Job, Testbed, load_profile};

/// A plan with more work than this is not simulated: micro-batches times operators.
const MAX_PLANNED: u64 = 20_000;

pub(crate) fn broker_key(bytes: &[u8]) -> bool {
    decoders::is_broker_key(bytes)
}

pub(crate) fn broker_state(bytes: &[u8]) -> bool {
    decoders::is_broker_state(bytes)
}

pub(crate) fn ticket(bytes: &[u8]) -> bool {
    as_text(bytes).is_some_and(|text| text.parse::<Ticket>().is_ok_and(|ticket| !ticket.to_string().is_empty()))
}

pub(crate) fn relay_url(bytes: &[u8]) -> bool {
    as_text(bytes).is_some_and(|text| text.parse::<RelayUrl>().is_ok_and(|url| !url.to_string().is_empty()))
}

pub(crate) fn relay_secret(bytes: &[u8]) -> bool {
    as_text(bytes).is_some_and(decoders::is_relay_secret)
}

pub(crate) fn identity(bytes: &[u8]) -> bool {
    as_text(bytes).is_some_and(decoders::is_identity)
}

pub(crate) fn allowed_keys(bytes: &[u8]) -> bool {
    as_text(bytes).is_some_and(decoders::is_allowed_keys)
}

/// A safetensors file, of which every tensor is read.
pub(crate) fn weights(bytes: &[u8]) -> bool {
    in_file(bytes, "model.safetensors", |path| {
        let Ok(weights) = Weights::open(path) else { return false };
        let tensor = |(name, ty): (&str, TensorType)| StateTensor { names: vec![name.into()], ty, trained: true };
        let state: Vec<StateTensor> = weights.tensor_types().map(tensor).collect();
        weights.compare(&state).is_ok() && state.iter().all(|tensor| weights.state_tensor(tensor).is_ok())
    })
}

/// A `tokenizer.json`, with which a text is encoded and decoded.
pub(crate) fn tokenizer(bytes: &[u8]) -> bool {
    in_file(bytes, "tokenizer.json", |path| {
        let Ok(tokenizer) = Tokenizer::open(path) else { return false };
        let text = "a </s> <s>Gr\u{f6}\u{df}e \u{65e5}\n\n  it's 123 [CLS]<|im_end|>";
        let (plain, special) = (tokenizer.encode(text), tokenizer.encode_with_special(text));
        plain.is_ok_and(|tokens| {
            tokens.iter().all(|token| tokenizer.bytes(*token).is_some()) && !tokenizer.decode(&tokens).is_empty()
        }) && special.is_ok()
    })
}

/// The manifest of a checkpoint without tensors.
pub(crate) fn manifest(bytes: &[u8]) -> bool {
    const NO_TENSORS: &[u8] = b"\x08\0\0\0\0\0\0\0{}      ";
    in_file(bytes, "manifest.json", |path| {
        let directory = path.parent().unwrap_or(path);
        let write = |name| fs::write(directory.join(name), NO_TENSORS).is_ok();
        if !write("model.safetensors") || !write("optimizer.safetensors") {
            return false;
        }
        let Ok(checkpoint) = Checkpoint::open(directory) else { return false };
        let _ = (checkpoint.state(), checkpoint.read(Part::Model, "w"), checkpoint.read_extra("config.json"));
        true
    })
}

/// CIFAR-10's binary form.
pub(crate) fn images(bytes: &[u8]) -> bool {
    in_file(bytes, "train.bin", |path| {
        let data = Data::Cifar10(Cifar10 {
            train: vec![path.to_owned()],
            test: Vec::new(),
            augment: true,
            shuffle: true,
            group: 1,
        });
        let Ok(data) = Dataset::open(&data, 1) else { return false };
        data.train_batch(0, 2).is_ok()
    })
}

/// Lines with conversations.
pub(crate) fn chats(bytes: &[u8]) -> bool {
    in_file(bytes, "chats.jsonl", |path| {
        let template = path.with_extension("jinja");
        let source =
            "{% for m in messages %}{{ m | tojson }}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}";
        if fs::write(&template, source).is_err() {
            return false;
        }
        let data = Data::Chats(Chats {
            files: vec![path.to_owned()],
            tokenizer: Tokenizer::Bytes,
            template: ChatTemplate::open(&template, &Tokenizer::Bytes).ok(),
            context: 64,
            validation: Validation::Fraction(0.0),
            shuffle: true,
            packing: false,
            train_on: TrainOn::Answers,
            on_error: OnError::Skip,
        });
        Dataset::open(&data, 1).is_ok_and(|data| data.train_batch(0, 2).is_ok())
    })
}

/// A template for chats, which writes some messages.
pub(crate) fn template(bytes: &[u8]) -> bool {
    in_file(bytes, "chat_template.jinja", |path| {
        let Ok(template) = ChatTemplate::open(path, &Tokenizer::Gpt2) else { return false };
        let said = [("system", "Be brief."), ("user", "Gr\u{f6}\u{df}e?"), ("assistant", "1.8 <m>\n")];
        let messages = said.map(|(role, content)| Message::new(role, content));
        template.render(&messages, false).is_ok() && template.render(&messages[..2], true).is_ok()
    })
}

/// An archive of `torch.export`, of which every tensor is read.
pub(crate) fn archive(bytes: &[u8]) -> bool {
    in_file(bytes, "net.pt2", |path| {
        let Ok(mut model) = ImportedModel::open(path, None, ImportOptions::default()) else { return false };
        let graph = model.imported().graph.clone();
        let read = graph.parameters().chain(graph.buffers()).all(|v| model.initial(graph.value(v)).is_ok());
        read && use_graph(&graph)
    })
}

pub(crate) fn graph(bytes: &[u8]) -> bool {
    let Some(Ok(graph)) = as_text(bytes).map(Graph::from_json) else { return false };
    use_graph(&graph)
}

/// Calls the functions that every command calls with a graph.
fn use_graph(graph: &Graph) -> bool {
    let _ = (graph.digest(), graph.to_string(), graph.evaluation());
    if let Some(loss) = graph.outputs.get("loss") {
        let _ = autodiff::differentiate(graph, *loss);
    }
    true
}

/// A plan file, which is simulated if it is small.
pub(crate) fn plan(bytes: &[u8]) -> bool {
    let Some(Ok(saved)) = as_text(bytes).map(SavedPlan::from_json) else { return false };
    if u64::from(saved.plan.micro_batches) * (1 + saved.graph.nodes.len() as u64) <= MAX_PLANNED {
        // An error is an answer.
        let _ = saved.simulate(true);
    }
    true
}

pub(crate) fn job(bytes: &[u8]) -> bool {
    as_text(bytes).is_some_and(|text| Job::parse("job.toml", text, &nowhere(), &[]).is_ok_and(|j| j.to_toml().is_ok()))
}

pub(crate) fn testbed(bytes: &[u8]) -> bool {
    as_text(bytes).is_some_and(|text| Testbed::parse("testbed.toml", text, &nowhere()).is_ok())
}

pub(crate) fn profile(bytes: &[u8]) -> bool {
    in_file(bytes, "device.toml", |path| load_profile(path).is_ok())
}

/// The directory at which relative paths in texts start. Nothing is there.
fn nowhere() -> PathBuf {
    PathBuf::from("/nowhere")
}

fn as_text(bytes: &[u8]) -> Option<&str> {
    std::str::from_utf8(bytes).ok()
}

/// Reads the bytes from a file of this name, in a directory of its own.
fn in_file(bytes: &[u8], name: &str, read: impl FnOnce(&Path) -> bool) -> bool {
    let Ok(directory) = tempfile::tempdir() else { return false };
    let path = directory.path().join(name);
    fs::write(&path, bytes).is_ok() && read(&path)
}
