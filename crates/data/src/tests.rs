use std::collections::BTreeMap;
use std::fs;

use fusionllm_graph::Advice;
use fusionllm_graph::HostTensor;
use insta::assert_snapshot;
use tempfile::TempDir;

use super::*;
use crate::write_tensors;

fn text(dir: &TempDir, files: &[(&str, &[u8])]) -> Text {
    let files = files.iter().map(|(name, bytes)| {
        let path = dir.path().join(name);
        fs::write(&path, bytes).unwrap();
        path
    });
    Text {
        files: files.collect(),
        tokenizer: Tokenizer::Bytes,
        context: 4,
        validation: Validation::Fraction(0.0),
        shuffle: true,
        documents: Documents::Joined,
    }
}

fn open(text: Text, seed: u64) -> Dataset {
    Dataset::open(&Data::Text(text), seed).unwrap()
}

fn error(dir: &TempDir, data: Data) -> String {
    let Err(error) = Dataset::open(&data, 1) else { panic!("the data are accepted") };
    let message = error.report();
    message.replace(&dir.path().display().to_string(), "DIR")
}

fn ints(batch: &Batch, name: &str) -> Vec<i64> {
    let (_, tensor) = batch.tensors.iter().find(|(n, _)| *n == name).unwrap();
    tensor.to_i64().unwrap()
}

/// All held-out samples.
fn held_out(data: &Dataset) -> Batch {
    let all: Vec<usize> = (0..data.eval_samples()).collect();
    data.held_out(&all, |_| true).unwrap()
}

/// Characters that follow each other from the space on, so that a token tells its position. They begin again after 90.
fn counting(len: u8) -> Vec<u8> {
    (0..len).map(|i| b' ' + i % 90).collect()
}

#[test]
fn labels_are_the_next_tokens() {
    let dir = tempfile::tempdir().unwrap();
    let data = open(text(&dir, &[("a", &counting(41))]), 1);
    assert_eq!(data.train_samples(), 9);
    let batch = data.train_batch(0, 9).unwrap();
    let (inputs, labels) = (ints(&batch, "input_ids"), ints(&batch, "labels"));
    assert!(inputs.iter().zip(&labels).all(|(x, y)| x + 1 == *y));
    assert!(inputs.chunks(4).all(|row| row.windows(2).all(|w| w[0] + 1 == w[1])));
    for ((name, tensor), (input, ty)) in batch.tensors.iter().zip(data.inputs(9)) {
        assert_eq!((name, tensor.ty()), (&input, &ty));
    }
}

#[test]
fn an_epoch_has_every_context_once() {
    let dir = tempfile::tempdir().unwrap();
    let data = open(text(&dir, &[("a", &counting(41))]), 1);
    let mut offsets = std::collections::BTreeSet::new();
    for epoch in 0..20 {
        let batch = data.train_batch(epoch * 9, 9).unwrap();
        let mut starts: Vec<i64> = ints(&batch, "input_ids").chunks(4).map(|row| row[0]).collect();
        starts.sort_unstable();
        assert!(starts.windows(2).all(|w| w[0] + 4 == w[1]), "{starts:?}");
        offsets.insert(starts[0]);
    }
    assert_eq!(offsets.into_iter().collect::<Vec<_>>(), [32, 33, 34, 35]);
}

/// The samples that a run draws depend on its seed and position, not on how they are split in batches.
#[test]
fn a_resumed_run_draws_the_same_samples() {
    let dir = tempfile::tempdir().unwrap();
    let data = || open(text(&dir, &[("a", &counting(200))]), 5);
    let straight: Vec<i64> = (0..40).flat_map(|i| ints(&data().train_batch(i * 3, 3).unwrap(), "input_ids")).collect();
    let resumed = ints(&data().train_batch(57, 63).unwrap(), "input_ids");
    assert_eq!(straight[57 * 4..], resumed);
    let other = open(text(&dir, &[("a", &counting(200))]), 6);
    assert_ne!(ints(&other.train_batch(57, 63).unwrap(), "input_ids"), resumed);
}

#[test]
fn the_last_part_of_each_file_is_held_out() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = text(&dir, &[("a", b"0123456789abcdefghijklmnopqrst"), ("b", b"ABCDEFGHIJKLMNOPQRSTUVWXYZ0123")]);
    config.validation = Validation::Fraction(0.2);
    let data = open(config, 1);
    // The held-out text is "opqrst" and "YZ0123": eleven targets, in contexts of four.
    let batch = held_out(&data);
    let bytes = |b: &[u8]| b.iter().map(|&b| i64::from(b)).collect::<Vec<_>>();
    assert_eq!(ints(&batch, "input_ids"), bytes(b"opqrstYZ012\0"));
    assert_eq!(ints(&batch, "labels"), [bytes(b"pqrstYZ0123"), vec![IGNORED]].concat());
    // Samples may come in any order, and more than once.
    let batch = data.held_out(&[1, 0, 1, 3], |name| name == "labels").unwrap();
    assert_eq!(batch.tensors.len(), 1);
    assert_eq!(ints(&batch, "labels").iter().step_by(4).copied().collect::<Vec<_>>(), bytes(b"tpt"));
    assert_snapshot!(data, @"2 files of text, 0.00 MB: 48 tokens to train on, 12 held out");
}

#[test]
fn held_out_files_of_their_own() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = text(&dir, &[("a", b"0123456789"), ("b", b"abcdefghi")]);
    config.validation = Validation::Files(vec![config.files.pop().unwrap()]);
    let data = open(config, 1);
    let letters: Vec<i64> = (b'b'..=b'i').map(i64::from).collect();
    assert_eq!(ints(&held_out(&data), "labels"), letters);
    assert!(ints(&data.train_batch(0, 1).unwrap(), "input_ids").iter().all(|&t| t < 64));
}

#[test]
fn documents_start_with_gpt2s_mark() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = text(&dir, &[("a", b" one two three"), ("b", b" four five six")]);
    (config.tokenizer, config.context) = (Tokenizer::Gpt2, 7);
    let data = open(config, 1);
    let batch = data.train_batch(0, 1).unwrap();
    let tokens: Vec<u32> = ints(&batch, "input_ids").iter().map(|&t| t as u32).collect();
    assert_eq!(Tokenizer::Gpt2.decode(&tokens), "<|endoftext|> one two three<|endoftext|> four five");
}

/// A tokenizer with the token 2 between documents, which starts each with 1.
fn llama() -> Tokenizer {
    Tokenizer::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/tokenizers/llama")).unwrap()
}

#[test]
fn json_lines_are_documents() {
    let dir = tempfile::tempdir().unwrap();
    let lines = b"{\"text\": \"one two\", \"id\": 3}\n\n{\"text\": \"\"}\r\n{\"text\": \"th\\u00e9\\n\"}";
    let tokens = |tokenizer: Tokenizer, file: (&str, &[u8])| {
        let config = Text { tokenizer, context: 1, shuffle: false, ..text(&dir, &[file]) };
        let data = open(config, 1);
        ints(&data.train_batch(0, data.train_samples()).unwrap(), "input_ids")
    };
    let document = |tokenizer: &Tokenizer, text: &str| {
        let text = tokenizer.encode(text).unwrap();
        tokenizer.before_document().into_iter().chain(text).map(i64::from).collect::<Vec<_>>()
    };
    for tokenizer in [Tokenizer::Bytes, Tokenizer::Gpt2, llama()] {
        let documents = ["one two", "", "th\u{e9}\n"].map(|text| document(&tokenizer, text)).concat();
        // The last token is a label, and the one before makes room for the offset.
        let drawn = tokens(tokenizer, ("a.jsonl", lines));
        assert_eq!(drawn, documents[..drawn.len()]);
        assert_eq!(drawn.len(), documents.len() - 2);
    }
    // A text file is one document, whatever is in it.
    let drawn = tokens(llama(), ("a.txt", b"<s> {\"text\": 1}</s>"));
    assert_eq!(drawn, document(&llama(), "<s> {\"text\": 1}</s>")[..drawn.len()]);
}

#[test]
fn documents_apart_have_positions_of_their_own() {
    let dir = tempfile::tempdir().unwrap();
    let lines = b"{\"text\": \"one two\"}\n{\"text\": \"\"}\n{\"text\": \"three <s> four\"}\n";
    let config = Text {
        tokenizer: llama(),
        context: 6,
        documents: Documents::Apart,
        shuffle: false,
        validation: Validation::Files(vec![dir.path().join("a.jsonl")]),
        ..text(&dir, &[("a.jsonl", lines)])
    };
    let data = open(config, 1);
    let batch = data.held_out(&[0, 1, 2, 3], |_| true).unwrap();
    // The token 2 begins each document.
    assert_snapshot!(format!("{:?}\n{:?}", ints(&batch, "input_ids"), ints(&batch, "position_ids")), @r"
    [2, 1, 464, 353, 344, 336, 2, 1, 2, 1, 491, 365, 326, 352, 287, 340, 289, 369, 336, 0, 0, 0, 0, 0]
    [0, 1, 2, 3, 4, 5, 0, 1, 0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5]
    ");
    let names: Vec<_> = batch.tensors.iter().map(|(name, tensor)| (name.clone(), tensor.ty().clone())).collect();
    assert_eq!(names, data.inputs(4));
}

#[test]
fn errors_in_json_lines() {
    let dir = tempfile::tempdir().unwrap();
    let of = |lines: &str, tokenizer| {
        let config = Text { tokenizer, ..text(&dir, &[("a.jsonl", lines.as_bytes())]) };
        error(&dir, Data::Text(config))
    };
    let good = "{\"text\": \"a\"}\n\n";
    assert_snapshot!(of(&format!("{good}{{\"text\": \"a"), Tokenizer::Bytes), @r#"
    DIR/a.jsonl: line 3: column 11: this is no JSON
    hint: write one JSON object on each line, with the document in its field "text"; or write kind = "chats" for conversations
    "#);
    let problem = |lines: &str| of(&format!("{good}{lines}"), llama()).lines().next().unwrap().to_owned();
    assert_snapshot!(problem("[\"a\"]"), @"DIR/a.jsonl: line 3: this is no JSON object");
    assert_snapshot!(problem("{\"content\": \"a\", \"id\": 1}"), @r#"DIR/a.jsonl: line 3: the object has no field "text", but "content", "id""#);
    assert_snapshot!(problem("{}"), @r#"DIR/a.jsonl: line 3: the object has no field "text", but none"#);
    assert_snapshot!(problem("{\"text\": null}"), @r#"DIR/a.jsonl: line 3: the field "text" is no string"#);
    assert_snapshot!(of("\n\n\n\n", Tokenizer::Bytes), @r"
    the text to train on has 0 tokens, but one sample takes 5 (`data.context` and the token after it)
    hint: name more text in data.files, lower data.context, or lower data.validation
    ");
}

#[test]
fn without_files_the_sample_text_is_used() {
    let config = Text {
        files: vec![],
        tokenizer: Tokenizer::Bytes,
        context: 128,
        validation: Validation::Fraction(0.1),
        shuffle: true,
        documents: Documents::Joined,
    };
    let data = open(config, 1);
    assert_snapshot!(data, @"1 file of text, 0.26 MB: 233489 tokens to train on, 25943 held out");
    let sample = sample::text();
    assert!(sample.starts_with("KING RICHARD II:\nOld John of Gaunt,"), "{sample:.80}");
    assert!(sample.ends_with("Than this of Juliet and her Romeo.\n"));
    // The report of the quick start continues the beginning of the held-out text, which is a whole speech.
    let held_out = data.held_out(&[0], |name| name == "input_ids").unwrap().tensors.remove(0).1.to_i64().unwrap();
    let held_out: Vec<u8> = held_out.into_iter().map(|byte| byte as u8).collect();
    assert!(held_out.starts_with(b"LADY CAPULET:\nAy, you have been"), "{held_out:?}");
}

#[test]
fn digests_tell_data_apart() {
    let dir = tempfile::tempdir().unwrap();
    let digest = |files: &[(&str, &[u8])]| open(text(&dir, files), 1).digest().to_owned();
    let one = digest(&[("a", b"0123456789"), ("b", b"abc")]);
    assert_eq!(one, digest(&[("c", b"0123456789"), ("d", b"abc")]));
    assert_ne!(one, digest(&[("a", b"012345678"), ("b", b"9abc")]));
    assert_ne!(one, digest(&[("a", b"abc"), ("b", b"0123456789")]));
}

#[test]
fn compressed_texts_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let plain = b"{\"text\": \"The first document.\"}\n{\"text\": \"And another one.\"}\n";
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    std::io::Write::write_all(&mut gzip, plain).unwrap();
    let zstd = ruzstd::encoding::compress_to_vec(&plain[..], ruzstd::encoding::CompressionLevel::Fastest);
    let drawn = |name: &str, bytes: &[u8]| {
        let data = open(text(&dir, &[(name, bytes)]), 1);
        (data.digest().to_owned(), data.train_batch(0, 4).unwrap())
    };
    let expected = drawn("a.jsonl", plain);
    assert_eq!(drawn("a.jsonl.gz", &gzip.finish().unwrap()), expected);
    assert_eq!(drawn("a.jsonl.zst", &zstd), expected);
}

#[test]
fn small_files_are_held_out_together() {
    let dir = tempfile::tempdir().unwrap();
    let contents: Vec<(String, String)> = (0..60).map(|i| (format!("{i:02}"), format!("file {i:02}"))).collect();
    let files: Vec<(&str, &[u8])> = contents.iter().map(|(name, text)| (&name[..], text.as_bytes())).collect();
    let config = Text { validation: Validation::Fraction(0.1), ..text(&dir, &files) };
    // 42 of 420 bytes, of which one predicts the first of the others.
    let data = open(config.clone(), 1);
    assert_snapshot!(data, @"60 files of text, 0.00 MB: 378 tokens to train on, 42 held out");
    assert_eq!(data.eval_samples(), 41usize.div_ceil(config.context));
}

#[test]
fn errors_in_text() {
    let dir = tempfile::tempdir().unwrap();
    let of = |files: &[(&str, &[u8])], tokenizer, validation| {
        let config = Text { tokenizer, validation, ..text(&dir, files) };
        error(&dir, Data::Text(config))
    };
    let (none, tenth) = (Validation::Fraction(0.0), Validation::Fraction(0.1));
    assert_snapshot!(of(&[("a", b"0123456789"), ("b", b"")], Tokenizer::Bytes, none.clone()), @r"
    DIR/b: the file is empty
    hint: fill it, or leave it out of [data]
    ");
    assert_snapshot!(of(&[("a", b"0123")], Tokenizer::Bytes, none.clone()), @r"
    the text to train on has 4 tokens, but one sample takes 5 (`data.context` and the token after it)
    hint: name more text in data.files, lower data.context, or lower data.validation
    ");
    assert_snapshot!(of(&[("a", b"0123456789")], Tokenizer::Bytes, tenth), @r"
    the held-out text has 1 tokens, too few to predict one from another
    hint: raise data.validation, or write validation = 0 to hold nothing out
    ");
    assert_snapshot!(of(&[("a", b"caf\xc3")], Tokenizer::Gpt2, none.clone()), @r#"
    DIR/a: byte 3 is not UTF-8
    hint: convert the file to UTF-8, such as with iconv -f ISO-8859-1 -t UTF-8 OLD > NEW, or fetch it again if it was cut short
    "#);
    // Bytes are tokens, but a text in another encoding is still a mistake.
    assert_snapshot!(of(&[("a", b"caf\xe9 au lait")], Tokenizer::Bytes, none.clone()), @"
    DIR/a: byte 3 is not UTF-8
    hint: convert the file to UTF-8, such as with iconv -f ISO-8859-1 -t UTF-8 OLD > NEW, or fetch it again if it was cut short
    ");
    assert_snapshot!(of(&[("a", b"\x89PNG\r\n\x1a\n")], Tokenizer::Bytes, none.clone()), @"
    DIR/a: this is a PNG picture, not text
    hint: leave it out of [data], which takes texts in UTF-8
    ");
    assert_snapshot!(of(&[("a.gz", b"\x1f\x8b\x08\0\0")], Tokenizer::Bytes, none.clone()), @"
    DIR/a.gz: it cannot be unpacked: unexpected end of file
    hint: fetch the file again
    ");
    let mut gone = text(&dir, &[("a", b"0123456789")]);
    fs::remove_file(&gone.files[0]).unwrap();
    assert_snapshot!(error(&dir, Data::Text(gone.clone())), @r"
    DIR/a: cannot be read
    caused by: No such file or directory (os error 2)
    hint: check the path and that you may read the file
    ");
    gone.files = vec![dir.path().to_owned()];
    assert_snapshot!(error(&dir, Data::Text(gone)), @r"
    DIR: cannot be read
    caused by: Is a directory (os error 21)
    hint: check the path and that you may read the file
    ");
}

/// An image of label `label` whose pixel (y, x) is 8y of red, 8x of green, and 0 of blue.
fn record(label: u8) -> Vec<u8> {
    let grid = |value: fn(u8, u8) -> u8| (0..32).flat_map(move |y| (0..32).map(move |x| value(y, x)));
    let (red, green, blue) = (grid(|y, _| 8 * y), grid(|_, x| 8 * x), grid(|_, _| 0));
    [label].into_iter().chain(red).chain(green).chain(blue).collect()
}

fn cifar10(dir: &TempDir, train: &[u8], test: &[u8], augment: bool) -> Cifar10 {
    let file = |name: &str, bytes: &[u8]| {
        let path = dir.path().join(name);
        fs::write(&path, bytes).unwrap();
        vec![path]
    };
    Cifar10 { train: file("train.bin", train), test: file("test.bin", test), augment, shuffle: true, group: 1 }
}

fn pixels(batch: &Batch) -> Vec<f32> {
    let (name, tensor) = &batch.tensors[0];
    assert_eq!((name.as_ref(), tensor.shape()[1..].to_vec()), ("pixel_values", vec![3, 32, 32]));
    tensor.to_f32_exact().unwrap()
}

#[test]
fn images_are_normalised() {
    let dir = tempfile::tempdir().unwrap();
    let test = [record(7), record(8), record(9)].concat();
    let config = cifar10(&dir, &record(3), &test, false);
    let data = Dataset::open(&Data::Cifar10(config), 1).unwrap();
    assert_snapshot!(data, @"CIFAR-10: 1 images to train on, 3 held out");

    let batch = data.train_batch(0, 1).unwrap();
    assert_eq!(ints(&batch, "labels"), [3]);
    let values = pixels(&batch);
    let close = |a: f32, b: f32| assert!((a - b).abs() < 1e-6, "{a} {b}");
    close(values[5 * 32 + 9], (40.0 / 255.0 - 0.4914) / 0.2470);
    close(values[1024 + 5 * 32 + 9], (72.0 / 255.0 - 0.4822) / 0.2435);
    close(values[2048 + 5 * 32 + 9], -0.4465 / 0.2616);

    assert_eq!(ints(&held_out(&data), "labels"), [7, 8, 9]);
    let batch = data.held_out(&[2, 1], |_| true).unwrap();
    assert_eq!(ints(&batch, "labels"), [9, 8]);
    for ((name, tensor), (input, ty)) in batch.tensors.iter().zip(data.inputs(2)) {
        assert_eq!((name, tensor.ty()), (&input, &ty));
    }
}

/// Red counts rows and green columns, so the pixels tell how an image was moved.
#[test]
fn augmentation_mirrors_and_shifts() {
    let dir = tempfile::tempdir().unwrap();
    let data = || {
        let config = cifar10(&dir, &record(3), &record(3), true);
        Dataset::open(&Data::Cifar10(config), 1).unwrap()
    };
    let batch = data().train_batch(0, 300).unwrap();
    assert_eq!(batch, data().train_batch(0, 300).unwrap());
    let mut seen = std::collections::BTreeSet::new();
    for image in pixels(&batch).chunks(3 * 1024) {
        let byte = |i: usize, mean: f32, std: f32| ((image[i] * std + mean) * 255.0).round() as i32;
        let at = |y: usize, x: usize| {
            let i = y * 32 + x;
            (byte(i, 0.4914, 0.2470) / 8, byte(1024 + i, 0.4822, 0.2435) / 8)
        };
        // The middle is never cropped away.
        let (row, column) = at(16, 16);
        let (_, right) = at(16, 17);
        let mirrored = right < column;
        let from = if mirrored { 15 } else { 16 };
        let (down, aside) = (row - 16, column - from);
        assert!(down.abs() <= 4 && aside.abs() <= 4, "{down} {aside}");
        if down > 0 {
            assert_eq!(byte(31 * 32 + 16, 0.4914, 0.2470), 0, "outside is black");
        }
        seen.insert((mirrored, down, aside));
    }
    assert!(seen.len() > 100, "{} of 162 views in 300 draws", seen.len());
}

/// A file of `rows` rows that hold their own numbers, from `first` on.
fn numbered(dir: &TempDir, name: &str, first: i64, rows: i64) -> PathBuf {
    let path = dir.path().join(name);
    let values: Vec<i64> = (first..first + rows).collect();
    let tensor = HostTensor::from_i64([values.len()], &values).unwrap();
    write_tensors(&path, &BTreeMap::from([("y", tensor)])).unwrap();
    path
}

#[test]
fn rows_come_in_order_or_in_whole_groups() {
    let dir = tempfile::tempdir().unwrap();
    let files = vec![numbered(&dir, "a", 0, 6), numbered(&dir, "b", 6, 9)];
    let open = |shuffle, group, validation| {
        let config = Tensors { files: files.clone(), validation: Validation::Fraction(validation), shuffle, group };
        Dataset::open(&Data::Tensors(config), 1).unwrap()
    };
    let drawn = |data: &Dataset, first, n| ints(&data.train_batch(first, n).unwrap(), "y");
    let ordered = open(false, 1, 0.2);
    assert_eq!((ordered.train_samples(), ordered.eval_samples()), (12, 3));
    assert_eq!(drawn(&ordered, 4, 4), [4, 5, 6, 7]);
    assert_eq!(drawn(&ordered, 22, 4), [10, 11, 0, 1], "the next epoch begins anew");

    // A fifth of 15 rows and a little more: one whole group is held out.
    let grouped = open(true, 3, 0.3);
    assert_eq!((grouped.train_samples(), grouped.eval_samples()), (12, 3));
    assert_eq!(ints(&held_out(&grouped), "y"), [12, 13, 14]);
    let (first, second) = (drawn(&grouped, 0, 12), drawn(&grouped, 12, 12));
    for epoch in [&first, &second] {
        assert!(epoch.chunks(3).all(|g| g[0] % 3 == 0 && g[1] == g[0] + 1 && g[2] == g[0] + 2), "{epoch:?}");
        assert!((0..12).all(|n| epoch.contains(&n)));
    }
    assert_ne!(first, second);
    // A resumed run draws from any position.
    assert_eq!(drawn(&grouped, 6, 6), first[6..]);
}

#[test]
fn a_single_number_is_that_of_all_samples() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, temperature: f32| {
        let path = dir.path().join(name);
        let rows = HostTensor::from_i64([3], &[1, 2, 3]).unwrap();
        let number = HostTensor::from_f32([], &[temperature]).unwrap();
        write_tensors(&path, &BTreeMap::from([("temperature", number), ("y", rows)])).unwrap();
        path
    };
    let of = |files| Data::Tensors(Tensors { files, validation: Validation::Fraction(0.0), shuffle: true, group: 1 });
    let data = Dataset::open(&of(vec![file("a", 0.5), file("b", 0.5)]), 1).unwrap();
    assert_eq!(data.train_samples(), 6);
    let batch = data.train_batch(0, 2).unwrap();
    let (_, number) = batch.tensors.iter().find(|(name, _)| *name == "temperature").unwrap();
    assert_eq!((number.shape(), number.to_f64()), (&[][..], vec![0.5]));
    assert!(data.inputs(2).contains(&("temperature".into(), TensorType::new(DType::F32, []))));
    assert_snapshot!(error(&dir, of(vec![file("a", 0.5), file("b", 0.7)])), @"
    DIR/b: its single numbers are not those of the first file
    hint: every file has the same tensors: one for each of the model's inputs, with a row a sample, or a single number that is the same in all files
    ");
}

#[test]
fn a_tensor_of_a_type_that_is_not_read_is_named() {
    use safetensors::tensor::{Dtype, TensorView};
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a");
    let pixels = TensorView::new(Dtype::U8, vec![2, 1], &[1, 2]).unwrap();
    safetensors::serialize_to_file([("pixels", pixels)], None, &path).unwrap();
    let config = Tensors { files: vec![path], validation: Validation::Fraction(0.0), shuffle: true, group: 1 };
    assert_snapshot!(error(&dir, Data::Tensors(config)), @"
    DIR/a: `pixels` has elements of the type U8, which is not read
    hint: convert it before it is saved: tensor.long() for whole numbers, tensor.float() for others
    ");
}

#[test]
fn rows_that_are_no_whole_groups_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let files = vec![numbered(&dir, "a", 0, 4), numbered(&dir, "b", 4, 3)];
    let config = Tensors { files, validation: Validation::Fraction(0.0), shuffle: true, group: 2 };
    assert_snapshot!(error(&dir, Data::Tensors(config)), @"
    DIR/b: 3 rows are no whole groups of 2 (`data.group`)
    hint: write a divisor of the number of rows for data.group, or remove the rows of the last, incomplete group
    ");
}

#[test]
fn errors_in_images() {
    let dir = tempfile::tempdir().unwrap();
    let of = |train: &[u8], test: &[u8]| error(&dir, Data::Cifar10(cifar10(&dir, train, test, true)));
    assert_snapshot!(of(&record(0)[..3000], &record(0)), @r"
    DIR/train.bin: 3000 bytes are 0 images of 3073 bytes and 3000 bytes more
    hint: the file is cut short, or not of CIFAR-10's binary version: fetch it again
    ");
    assert_snapshot!(of(&[record(0), record(10)].concat(), &record(0)), @r"
    DIR/train.bin: image 1 has label 10, but labels are 0 to 9
    hint: the file is not of CIFAR-10's binary version
    ");
    assert_snapshot!(of(&record(0), b""), @r"
    DIR/test.bin: the file is empty
    hint: fill it, or leave it out of [data]
    ");
}

/// nanoGPT's notes count 301,966 GPT-2 tokens in the first nine tenths of this text and 36,059 in the rest. Here the
/// marks of a text's start are left out, and tokens are divided, not letters.
#[test]
fn real_text_has_the_known_number_of_tokens() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/data/tinyshakespeare.txt");
    let config = Text {
        files: vec![path],
        tokenizer: Tokenizer::Gpt2,
        context: 256,
        validation: Validation::Fraction(0.1),
        shuffle: true,
        documents: Documents::Joined,
    };
    let Source::Text(corpus) = open(config, 1).source else { panic!("not text") };
    let total = corpus.tokens() - 2;
    assert!(total.abs_diff(301_966 + 36_059) <= 1, "{total}");
}

/// Regression: text in UTF-16 was trained on without a message, as letters and zeros in turn.
#[test]
fn text_in_wide_characters_is_refused_whatever_the_tokenizer() {
    let dir = tempfile::tempdir().unwrap();
    let wide: Vec<u8> = [0xff, 0xfe].into_iter().chain("A text.".encode_utf16().flat_map(u16::to_le_bytes)).collect();
    let [bytes, gpt2] = [Tokenizer::Bytes, Tokenizer::Gpt2].map(|tokenizer| {
        let text = Text { tokenizer, ..text(&dir, &[("a", &wide)]) };
        error(&dir, Data::Text(text))
    });
    assert_eq!(bytes, gpt2);
    assert_snapshot!(bytes, @r"
    DIR/a: the text is in UTF-16, not in UTF-8
    hint: save it in UTF-8, or convert it: iconv -f UTF-16 -t UTF-8 OLD > NEW
    ");
}

#[test]
fn a_batch_larger_than_the_data_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let data = open(text(&dir, &[("a", &counting(41))]), 1);
    assert_eq!(data.repeated(9), None);
    assert_snapshot!(data.repeated(10).unwrap(), @"train.batch = 10 is more than the 9 samples to train on, so each step repeats some of them");
}

#[test]
fn a_number_that_is_not_finite_has_a_file_and_a_row() {
    let dir = tempfile::tempdir().unwrap();
    let rows = |name: &str, x: [f32; 4]| {
        let path = dir.path().join(name);
        let (x, y) = (HostTensor::from_f32([2, 2], &x).unwrap(), HostTensor::from_i64([2], &[0; 2]).unwrap());
        write_tensors(&path, &BTreeMap::from([("x", x), ("y", y)])).unwrap();
        path
    };
    let files =
        vec![rows("a", [f32::NEG_INFINITY, 0.0, 0.0, 0.0]), rows("b", [0.0, 0.0, 0.0, f32::NAN]), rows("c", [0.0; 4])];
    let tensors = Tensors { files, validation: Validation::Fraction(0.0), shuffle: false, group: 1 };
    let data = Dataset::open(&Data::Tensors(tensors), 1).unwrap();
    let found = |first, samples| data.not_finite(first, samples);
    let place = |name: &str| dir.path().join(name).display().to_string();
    assert_eq!(found(0, 6).unwrap(), format!("{}, row 1: `x` holds NaN", place("b")));
    assert_eq!(found(0, 3).unwrap(), format!("{}, row 0: `x` holds an infinite number", place("a")));
    assert_eq!(found(4, 2), None);
}
