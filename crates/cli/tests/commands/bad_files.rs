//! Each file that a job or an option names: missing, empty, cut short, a directory, or in another encoding. One message
//! names the file and says what to do, and the exit status is 2. `--nocapture` prints the table.

use std::fs;
use std::path::Path;

use super::call;

/// A kind of file, which is called `given` in the arguments or in the job.
struct Kind {
    name: &'static str,
    /// The job, unless the job is the file in question.
    job: &'static str,
    args: &'static [&'static str],
    /// The start of a valid file.
    cut_short: Vec<u8>,
    /// Faults that are none for this kind.
    valid: &'static [&'static str],
}

const SMALL: &str = "[model]\nn_layer = 1\nn_embd = 16\nn_head = 1\n";

fn kinds() -> Vec<Kind> {
    let zoo = |name: &str| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/zoo").join(name);
        let bytes = fs::read(path).unwrap();
        bytes[..bytes.len() / 2].to_vec()
    };
    let kind = |name, job, cut_short: Vec<u8>| Kind { name, job, args: &["train", "job.toml"], cut_short, valid: &[] };
    vec![
        Kind { args: &["train", "given"], valid: &["empty"], ..kind("job", "", b"[train\nsteps".to_vec()) },
        Kind {
            // Any bytes are text for this tokenizer.
            valid: &["cut short", "in Latin-1"],
            ..kind("text", "[data]\nfiles = [\"given\"]\n", b"text".repeat(100))
        },
        kind("text for gpt2", "[data]\nfiles = [\"given\"]\ntokenizer = \"gpt2\"\n", b"caf\xc3".to_vec()),
        kind("images", "[model]\nfamily = \"resnet\"\n[data]\ntrain = [\"given\"]\n", vec![0; 5000]),
        kind(
            "tensors",
            "[model]\nfile = \"net.pt2\"\n[data]\nkind = \"tensors\"\nfiles = [\"given\"]\n",
            zoo("gpt2.weights.safetensors"),
        ),
        kind("archive", "[model]\nfile = \"given\"\n", zoo("resnet_tiny.pt2")),
        kind("weights", "[model]\nn_layer = 1\nn_embd = 16\nweights = \"given\"\n", zoo("gpt2.weights.safetensors")),
        kind("config", "[model]\nconfig = \"given\"\n", b"{\"n_layer\": 2".to_vec()),
        kind("plan", "[plan]\nfile = \"given\"\n", b"{\"fusionllm_plan\": 1".to_vec()),
        Kind {
            args: &["train", "job.toml", "--testbed", "given"],
            ..kind("testbed", SMALL, b"[[device]]\nname = \"a".to_vec())
        },
        Kind {
            args: &["train", "job.toml", "--testbed", "testbed.toml"],
            ..kind("profile", SMALL, b"[[device]]\nname = \"a".to_vec())
        },
    ]
}

#[test]
fn every_wrong_file_has_one_message_with_what_to_do() {
    let latin1 = b"# caf\xe9\n".repeat(100);
    let utf16: Vec<u8> =
        [0xff, 0xfe].into_iter().chain("[train]\nsteps = 1\n".encode_utf16().flat_map(u16::to_le_bytes)).collect();
    println!("| file | fault | message | advice |\n| --- | --- | --- | --- |");
    let mut wrong = Vec::new();
    for kind in kinds() {
        let faults: [(&str, Option<&[u8]>); 6] = [
            ("missing", None),
            ("a directory", None),
            ("empty", Some(b"")),
            ("cut short", Some(&kind.cut_short)),
            ("in UTF-16", Some(&utf16)),
            ("in Latin-1", Some(&latin1)),
        ];
        for (fault, content) in faults.into_iter().filter(|(fault, _)| !kind.valid.contains(fault)) {
            let dir = tempfile::tempdir().unwrap();
            let given = dir.path().join("given");
            match content {
                Some(bytes) => fs::write(&given, bytes).unwrap(),
                None if fault == "a directory" => fs::create_dir(&given).unwrap(),
                None => {}
            }
            fs::write(dir.path().join("job.toml"), kind.job).unwrap();
            fs::write(dir.path().join("net.pt2"), "").unwrap();
            let testbed = "[[device]]\nname = \"a\"\nprofile = \"given\"\n";
            fs::write(dir.path().join("testbed.toml"), testbed).unwrap();
            let ran = call(dir.path(), kind.args);
            let text = ran.err.trim_end().replace('\n', " ");
            let (message, advice) = text.split_once(" hint: ").unwrap_or((&text, ""));
            println!("| {} | {fault} | {message} | {advice} |", kind.name);
            let one = ran.err.matches("error: ").count() == 1 && ran.err.starts_with("error: ");
            let named = message.contains("given");
            if ran.status != 2 || !one || !named || advice.is_empty() || ran.err.contains("panicked") {
                wrong.push(format!("{} {fault}: status {}: {text}", kind.name, ran.status));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
