use std::fs;
use std::path::PathBuf;

use fusionllm_graph::Advice;
use insta::assert_snapshot;
use tempfile::TempDir;

use super::*;
use crate::{ChatTemplate, Data, Dataset, Example, Message, Tokenizer};

/// A template that ends each turn with a dot, and asks for an answer with `A:`.
const PLAIN: &str = "{% for m in messages %}{{ 'A:' if m.role == 'assistant' else 'Q:' }}{{ m.content }}.{% endfor %}\
     {% if add_generation_prompt %}A:{% endif %}";

/// The same, and the answers are marked.
const MARKED: &str = "{% for m in messages %}{% if m.role == 'assistant' %}A:{% generation %}{{ m.content }}.\
     {% endgeneration %}{% else %}Q:{{ m.content }}.{% endif %}{% endfor %}";

struct Folder(TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.path().join(name);
        fs::write(&path, content).unwrap();
        path
    }

    fn chats(&self, lines: &[&str]) -> Chats {
        let template = self.write("plain.jinja", PLAIN);
        Chats {
            files: vec![self.write("chats.jsonl", lines.join("\n"))],
            tokenizer: Tokenizer::Bytes,
            template: Some(ChatTemplate::open(&template, &Tokenizer::Bytes).unwrap()),
            context: 40,
            validation: Validation::Fraction(0.0),
            shuffle: false,
            packing: false,
            train_on: TrainOn::Answers,
            on_error: OnError::Fail,
        }
    }

    fn template(&self, source: &str) -> ChatTemplate {
        ChatTemplate::open(&self.write("other.jinja", source), &Tokenizer::Bytes).unwrap()
    }

    fn error(&self, chats: Chats) -> String {
        let Err(error) = Dataset::open(&Data::Chats(chats), 1) else { panic!("the data are accepted") };
        self.without_path(&error)
    }

    fn without_path(&self, error: &DataError) -> String {
        error.report().replace(&self.0.path().display().to_string(), "DIR")
    }
}

fn open(chats: Chats) -> Dataset {
    Dataset::open(&Data::Chats(chats), 7).unwrap()
}

/// A sample's text, with brackets around what is trained on.
fn shown(example: &Example) -> String {
    let mut text = String::new();
    for run in example.tokens.iter().zip(&example.trained).collect::<Vec<_>>().chunk_by(|a, b| a.1 == b.1) {
        let piece = Tokenizer::Bytes.decode(&run.iter().map(|(token, _)| **token).collect::<Vec<_>>());
        text += &if *run[0].1 { format!("[{piece}]") } else { piece };
    }
    text
}

fn sample(data: &Dataset, consumed: u64) -> String {
    shown(&data.example(consumed).unwrap().unwrap())
}

fn ints(batch: &Batch, name: &str) -> Vec<i64> {
    batch.tensors.iter().find(|(n, _)| *n == name).unwrap().1.to_i64().unwrap()
}

const TWO: &str = r#"{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"},
    {"role": "user", "content": "So"}, {"role": "assistant", "content": "No"}]}"#;

fn two() -> String {
    TWO.replace('\n', " ")
}

fn asked(question: &str, answer: &str) -> String {
    format!(
        r#"{{"messages": [{{"role": "user", "content": "{question}"}}, {{"role": "assistant", "content": "{answer}"}}]}}"#
    )
}

#[test]
fn answers_are_trained_on_with_and_without_marks() {
    let folder = Folder::new();
    let plain = folder.chats(&[&two()]);
    assert_eq!(sample(&open(plain.clone()), 0), "Q:Hi.A:[Ho.]Q:So.A:[No.]");
    let marked = Chats { template: Some(folder.template(MARKED)), ..plain.clone() };
    assert_eq!(sample(&open(marked), 0), "Q:Hi.A:[Ho.]Q:So.A:[No.]");
    let all = Chats { train_on: TrainOn::All, ..plain };
    assert_eq!(sample(&open(all), 0), "Q[:Hi.A:Ho.Q:So.A:No.]");
}

#[test]
fn labels_are_the_next_tokens_of_answers() {
    let folder = Folder::new();
    let data = open(Chats { context: 12, ..folder.chats(&[&asked("Hi", "Ho")]) });
    let batch = data.train_batch(0, 2).unwrap();
    let row: Vec<i64> = b"Q:Hi.A:Ho\0\0\0".iter().map(|b| i64::from(*b)).collect();
    assert_eq!(ints(&batch, "input_ids"), [row.clone(), row].concat());
    let mut labels = vec![IGNORED; 12];
    labels[6..9].copy_from_slice(&[i64::from(b'H'), i64::from(b'o'), i64::from(b'.')]);
    assert_eq!(ints(&batch, "labels"), [labels.clone(), labels].concat());
    for ((name, tensor), (input, ty)) in batch.tensors.iter().zip(data.inputs(2)) {
        assert_eq!((name, tensor.ty()), (&input, &ty));
    }
}

#[test]
fn all_forms_are_read() {
    let folder = Folder::new();
    let data = open(
        folder.chats(&[
            r#"{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}], "id": 7}"#,
            r#"{"prompt": "1 + 1 = ", "completion": "2", "tools": null}"#,
            "",
            r#"{"text": "as it is", "meta": {"a": [1, 2]}}"#,
            r#"{"prompt": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}],
            "completion": [{"role": "assistant", "content": "Hum"}]}"#
                .replace('\n', " ")
                .as_str(),
        ]),
    );
    // Where messages lead to a completion, their own answers are not trained on.
    let expected = ["Q:Hi.A:[Ho.]", "1 + 1 = [2]", "a[s it is]", "Q:Hi.A:Ho.A:[Hum.]"];
    // In the last one, the template asks for an answer before the completion.
    for (number, expected) in expected.iter().enumerate() {
        assert_eq!(sample(&data, number as u64), *expected);
    }
    assert!(data.train_origin(2).ends_with("chats.jsonl, line 4"));
}

#[test]
fn plain_texts_begin_and_end_as_the_tokenizer_says() {
    let folder = Folder::new();
    let made = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../testdata/tokenizers/llama");
    let tokenizer = Tokenizer::open(&made).unwrap();
    let chats = Chats { tokenizer: tokenizer.clone(), ..folder.chats(&[r#"{"prompt": "One", "completion": " two"}"#]) };
    let example = open(chats).example(0).unwrap().unwrap();
    let [start, end] = ["<s>", "</s>"].map(|text| tokenizer.token(text).unwrap());
    assert_eq!((example.tokens.first(), example.tokens.last()), (Some(&start), Some(&end)));
    assert_eq!(tokenizer.decode(&example.tokens), "<s> One two</s>");
    assert_eq!(example.trained.last(), Some(&true));
    assert!(!example.trained[1]);
}

/// The text of a template without the tokens of its own, in a tokenizer whose words have their blank in front.
#[test]
fn a_token_that_begins_in_the_blank_before_an_answer_is_trained_on() {
    let folder = Folder::new();
    let made = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../testdata/tokenizers/llama");
    let tokenizer = Tokenizer::open(&made).unwrap();
    let source = "{% for m in messages %}{{ bos_token if loop.first }}{% if m.role == 'assistant' %} {% generation %}\
         {{ m.content }}{{ eos_token }}{% endgeneration %}{% else %}[{{ m.content }}]{% endif %}{% endfor %}";
    let template = ChatTemplate::open(&folder.write("llama.jinja", source), &tokenizer).unwrap();
    let line = asked("the king", "the queen");
    let chats = Chats { tokenizer: tokenizer.clone(), template: Some(template), ..folder.chats(&[&line]) };
    let example = open(chats).example(0).unwrap().unwrap();
    let trained: Vec<u32> =
        example.tokens.iter().zip(&example.trained).filter(|(_, trained)| **trained).map(|(token, _)| *token).collect();
    assert_eq!(trained, tokenizer.encode_with_special("the queen</s>").unwrap());
}

#[test]
fn long_conversations_are_cut_if_an_answer_is_left() {
    let folder = Folder::new();
    let data = open(Chats { context: 9, ..folder.chats(&[&two()]) });
    let example = data.example(0).unwrap().unwrap();
    assert_eq!((shown(&example).as_str(), example.cut), ("Q:Hi.A:[Ho.]", 10));
    assert_snapshot!(data, @"1 file of chats, 0.00 MB: 1 conversation to train on, 0 held out; of the first 1, 1 are cut to 9 tokens");
    let error = folder.error(Chats { context: 6, ..folder.chats(&[&two()]) });
    assert_snapshot!(error, @r#"
    1 of the first 1 conversations is broken:
      DIR/chats.jsonl, line 1: it has 20 tokens, and no answer begins within `data.context` = 6
    hint: raise data.context, or shorten the conversation; or write on_error = "skip" in [data] to leave such lines out
    "#);
}

#[test]
fn each_kind_of_broken_line_is_named() {
    let folder = Folder::new();
    let lines = [
        "{\"messages\": [",
        "[1, 2]",
        r#"{"question": "a", "answer": "b"}"#,
        r#"{"messages": []}"#,
        r#"{"messages": "text"}"#,
        r#"{"messages": ["text"]}"#,
        r#"{"messages": [{"role": "user"}]}"#,
        r#"{"messages": [{"role": "user", "content": [{"type": "text"}]}]}"#,
        r#"{"messages": [{"role": "user", "content": "a"}]}"#,
        r#"{"messages": [{"role": null, "content": "a"}]}"#,
        r#"{"prompt": "a"}"#,
        r#"{"completion": "a"}"#,
        r#"{"prompt": "a", "completion": ["b"]}"#,
        r#"{"prompt": "a", "completion": ""}"#,
        r#"{"prompt": [{"role": "user", "content": "a"}], "completion": "b"}"#,
        r#"{"text": ""}"#,
        r#"{"text": 7}"#,
        r#"{"messages": [{"role": "assistant", "content": "a"}], "tools": [{}]}"#,
    ];
    let each: Vec<String> = lines.iter().map(|line| folder.error(folder.chats(&[line]))).collect();
    let told: Vec<&str> = each.iter().map(|error| error.split_once("\n  ").unwrap().1).collect();
    assert_snapshot!(told.join("\n"), @r#"
    DIR/chats.jsonl, line 1: column 14: this is no JSON
    hint: write one JSON object on each line, without line breaks inside; or write on_error = "skip" in [data] to leave such lines out
    DIR/chats.jsonl, line 1: this is no JSON object
    hint: write one JSON object on each line, without line breaks inside; or write on_error = "skip" in [data] to leave such lines out
    DIR/chats.jsonl, line 1: the object has no field `messages`, `prompt` or `text`, but "question", "answer"
    hint: write an object with `messages`, a list of objects with `role` and `content`; or with `prompt` and `completion`; or with `text`; or write on_error = "skip" in [data] to leave such lines out
    DIR/chats.jsonl, line 1: `messages` is an empty list
    hint: write an object with `messages`, a list of objects with `role` and `content`; or with `prompt` and `completion`; or with `text`; or write on_error = "skip" in [data] to leave such lines out
    DIR/chats.jsonl, line 1: `messages` is a text, not a list of messages
    hint: write an object with `messages`, a list of objects with `role` and `content`; or with `prompt` and `completion`; or with `text`; or write on_error = "skip" in [data] to leave such lines out
    DIR/chats.jsonl, line 1: message 1 of `messages` is a text, not an object
    hint: write `role` and `content` as texts in each message; calls of tools and images are not read; or write on_error = "skip" in [data] to leave such lines out
    DIR/chats.jsonl, line 1: message 1 of `messages` has no `content`
    hint: write `role` and `content` as texts in each message; calls of tools and images are not read; or write on_error = "skip" in [data] to leave such lines out
    DIR/chats.jsonl, line 1: the `content` of message 1 of `messages` is a list, not a text
    hint: write `role` and `content` as texts in each message; calls of tools and images are not read; or write on_error = "skip" in [data] to leave such lines out
    DIR/chats.jsonl, line 1: there is no answer: no message has the role "assistant"
    hint: add an answer with the role "assistant", or write train_on = "all" in [data]; or write on_error = "skip" in [data] to leave such lines out
    DIR/chats.jsonl, line 1: the `role` of message 1 of `messages` is null, not a text
    hint: write `role` and `content` as texts in each message; calls of tools and images are not read; or write on_error = "skip" in [data] to leave such lines out
    DIR/chats.jsonl, line 1: it has a `prompt`, but no `completion`
    hint: write an object with `messages`, a list of objects with `role` and `content`; or with `prompt` and `completion`; or with `text`; or write on_error = "skip" in [data] to leave such lines out
    DIR/chats.jsonl, line 1: it has a `completion`, but no `prompt`
    hint: write an object with `messages`, a list of objects with `role` and `content`; or with `prompt` and `completion`; or with `text`; or write on_error = "skip" in [data] to leave such lines out
    DIR/chats.jsonl, line 1: `completion` is a list, not a text
    hint: write an object with `messages`, a list of objects with `role` and `content`; or with `prompt` and `completion`; or with `text`; or write on_error = "skip" in [data] to leave such lines out
    DIR/chats.jsonl, line 1: its completion is empty
    hint: add an answer with the role "assistant", or write train_on = "all" in [data]; or write on_error = "skip" in [data] to leave such lines out
    DIR/chats.jsonl, line 1: `completion` is a text, not a list of messages
    hint: write an object with `messages`, a list of objects with `role` and `content`; or with `prompt` and `completion`; or with `text`; or write on_error = "skip" in [data] to leave such lines out
    DIR/chats.jsonl, line 1: its text is empty
    hint: add an answer with the role "assistant", or write train_on = "all" in [data]; or write on_error = "skip" in [data] to leave such lines out
    DIR/chats.jsonl, line 1: `text` is a number, not a text
    hint: write an object with `messages`, a list of objects with `role` and `content`; or with `prompt` and `completion`; or with `text`; or write on_error = "skip" in [data] to leave such lines out
    DIR/chats.jsonl, line 1: it has `tools`, which are not read
    hint: leave conversations with tools out; or write on_error = "skip" in [data] to leave such lines out
    "#);
    let error = folder.error(folder.chats(&lines));
    assert_snapshot!(error, @r#"
    18 of 18 lines are broken:
      DIR/chats.jsonl, line 1: column 14: this is no JSON
      DIR/chats.jsonl, line 2: this is no JSON object
      DIR/chats.jsonl, line 3: the object has no field `messages`, `prompt` or `text`, but "question", "answer"
      DIR/chats.jsonl, line 4: `messages` is an empty list
      DIR/chats.jsonl, line 5: `messages` is a text, not a list of messages
      and 13 more
    hint: write one JSON object on each line, without line breaks inside; or write on_error = "skip" in [data] to leave such lines out
    "#);
    let skipping = Chats { on_error: OnError::Skip, ..folder.chats(&[&lines[..], &[&asked("a", "b")]].concat()) };
    assert_snapshot!(open(skipping), @"1 file of chats, 0.00 MB: 1 conversation to train on, 0 held out, 18 broken and left out");
    let none = Chats { on_error: OnError::Skip, ..folder.chats(&lines) };
    assert_snapshot!(folder.error(none), @r#"
    18 of 18 lines are broken:
      DIR/chats.jsonl, line 1: column 14: this is no JSON
      DIR/chats.jsonl, line 2: this is no JSON object
      DIR/chats.jsonl, line 3: the object has no field `messages`, `prompt` or `text`, but "question", "answer"
      DIR/chats.jsonl, line 4: `messages` is an empty list
      DIR/chats.jsonl, line 5: `messages` is a text, not a list of messages
      and 13 more
    hint: write one JSON object on each line, without line breaks inside; or write on_error = "skip" in [data] to leave such lines out
    "#);
    let latin = Chats { files: vec![folder.write("latin.jsonl", b"{\"text\": \"\xe9\"}\n")], ..folder.chats(&[]) };
    assert_snapshot!(folder.error(latin), @r#"
    1 of 1 lines is broken:
      DIR/latin.jsonl, line 1: byte 10 of the line is not UTF-8
    hint: convert the file to UTF-8, such as with iconv -f ISO-8859-1 -t UTF-8 OLD > NEW, or fetch it again if it was cut short; or write on_error = "skip" in [data] to leave such lines out
    "#);
    let empty = Chats { files: vec![folder.write("empty.jsonl", "")], ..folder.chats(&[]) };
    assert_snapshot!(folder.error(empty), @"
    DIR/empty.jsonl: the file is empty
    hint: fill it, or leave it out of [data]
    ");
}

#[test]
fn what_a_template_does_not_take_is_named() {
    let folder = Folder::new();
    let refusing = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system here') }}{% endif %}\
         {{ m.content }}{% endfor %}";
    let line = asked("a", "b").replace("user", "system");
    let refused = Chats { template: Some(folder.template(refusing)), ..folder.chats(&[&line]) };
    assert_snapshot!(folder.error(refused), @r#"
    1 of the first 1 conversations is broken:
      DIR/chats.jsonl, line 1: the chat template refuses the messages: no system here
    hint: change the conversation to what the template takes; or write on_error = "skip" in [data] to leave such lines out
    "#);
    let failing = "{{ messages[0].role }}\n{{ messages[7].role }}";
    let failed = Chats { template: Some(folder.template(failing)), ..folder.chats(&[&line]) };
    assert_snapshot!(folder.error(failed), @r#"
    1 of the first 1 conversations is broken:
      DIR/chats.jsonl, line 1: line 2 of the chat template: undefined value
    hint: correct the template, or name another one with `template` in [data]; or write on_error = "skip" in [data] to leave such lines out
    "#);
    let differing = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}think{% endif %}";
    let unknown = Chats { template: Some(folder.template(differing)), ..folder.chats(&[&line]) };
    assert_snapshot!(folder.error(unknown), @r#"
    1 of the first 1 conversations is broken:
      DIR/chats.jsonl, line 1: where message 2 begins is unknown, because the chat template writes what is before it differently when it asks for an answer
    hint: name a template that has {% generation %} and {% endgeneration %} around the answers, or write train_on = "all" in [data]; or write on_error = "skip" in [data] to leave such lines out
    "#);
    let last =
        "{% for m in messages %}{{ m.content }}{% if loop.last and m.role == 'assistant' %}!{% endif %}{% endfor %}";
    let unknown = Chats { template: Some(folder.template(last)), ..folder.chats(&[&two()]) };
    assert_snapshot!(folder.error(unknown), @r#"
    1 of the first 1 conversations is broken:
      DIR/chats.jsonl, line 1: where message 2 ends is unknown, because the chat template writes it differently once others follow
    hint: name a template that has {% generation %} and {% endgeneration %} around the answers, or write train_on = "all" in [data]; or write on_error = "skip" in [data] to leave such lines out
    "#);
    let marked = Chats { template: Some(folder.template(MARKED)), ..folder.chats(&[&asked("a", "b\u{fdd0}")]) };
    assert_snapshot!(folder.error(marked), @r#"
    1 of the first 1 conversations is broken:
      DIR/chats.jsonl, line 1: a message has the character U+FDD0, which no text may have
    hint: change the conversation to what the template takes; or write on_error = "skip" in [data] to leave such lines out
    "#);
    let none = Chats { template: None, ..folder.chats(&[&line]) };
    assert_snapshot!(folder.error(none), @r#"
    the conversations need the model's template for chats, and there is none
    hint: write template = "PATH" in [data], the model's template for chats in Jinja
    "#);
}

#[test]
fn templates_that_are_not_valid_are_named_with_their_line() {
    let folder = Folder::new();
    let open = |path: PathBuf| folder.without_path(&ChatTemplate::open(&path, &Tokenizer::Bytes).unwrap_err());
    assert_snapshot!(open(folder.write("bad.jinja", "{% for m in messages %}\n{{ m.content }\n{% endfor %}")), @r#"
    DIR/bad.jinja: line 2 of the chat template: syntax error: unexpected `}`, expected end of variable block
    hint: fetch the model's folder again, or write template = "PATH" in [data], a template in Jinja
    "#);
    assert_snapshot!(open(folder.write("bad.json", r#"{"chat_template": 7}"#)), @r#"
    DIR/bad.json: `chat_template` is no text, and no list with a template "default"
    hint: fetch the model's folder again, or write template = "PATH" in [data], a template in Jinja
    "#);
    assert_snapshot!(open(folder.write("none.json", "{}")), @r#"
    DIR/none.json: there is no chat template here: no chat_template.jinja, and no chat_template in a tokenizer_config.json
    hint: fetch the model's folder again, or write template = "PATH" in [data], a template in Jinja
    "#);
    let path = folder.0.path().join("empty");
    fs::create_dir(&path).unwrap();
    assert_snapshot!(open(path), @r#"
    DIR/empty: there is no chat template here: no chat_template.jinja, and no chat_template in a tokenizer_config.json
    hint: fetch the model's folder again, or write template = "PATH" in [data], a template in Jinja
    "#);
}

/// Regressions: both made the program end.
#[test]
fn odd_templates_are_refused() {
    let folder = Folder::new();
    assert!(ChatTemplate::open(&folder.write("empty.jinja", "{%}{% generation %}"), &Tokenizer::Bytes).is_err());
    let wide = folder.template("{{ messages | tojson(indent=9223372036854775807) }}");
    assert_eq!(
        wide.render(&[], false).unwrap_err().to_string(),
        "line 1 of the chat template: invalid operation: tojson indents by 64 blanks at most"
    );
}

#[test]
fn the_template_of_a_folder_is_found() {
    let folder = Folder::new();
    let open = || ChatTemplate::open(folder.0.path(), &Tokenizer::Gpt2).unwrap();
    let text = |template: &ChatTemplate| template.render(&[Message::new("user", "a")], true).unwrap().text;
    folder.write("tokenizer_config.json", r#"{"chat_template": "one {{ bos_token }}"}"#);
    assert_eq!(text(&open()), "one <|endoftext|>");
    let named = r#"{"chat_template": [{"name": "tools", "template": "a"}, {"name": "default", "template": "two"}]}"#;
    folder.write("tokenizer_config.json", named);
    assert_eq!(text(&open()), "two");
    folder.write("chat_template.jinja", "three{{ eos_token }}");
    assert_eq!(text(&open()), "three<|endoftext|>");
    assert_eq!(open().source(), "three{{ eos_token }}");
}

#[test]
fn fields_beside_the_content_reach_the_template() {
    let folder = Folder::new();
    let source = "{% for m in messages %}{{ m.name }}{{ m.reasoning_content }}{{ m.content }}{{ m.none is defined }}\
         {% endfor %}";
    let line = r#"{"messages": [{"role": "assistant", "content": "c", "name": "N", "thinking": "T", "none": null}]}"#;
    let train_on = TrainOn::All;
    let data = open(Chats { template: Some(folder.template(source)), train_on, ..folder.chats(&[line]) });
    assert_eq!(sample(&data, 0), "N[TcFalse]");
}

fn numbered(count: usize) -> Vec<String> {
    (0..count).map(|i| asked(&format!("q{i}"), &format!("a{i}"))).collect()
}

#[test]
fn a_resumed_run_draws_the_same_samples() {
    let folder = Folder::new();
    let lines = numbered(30);
    let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
    let data = || open(Chats { shuffle: true, ..folder.chats(&lines) });
    let straight = data();
    let drawn: Vec<i64> = (0..40).flat_map(|i| ints(&straight.train_batch(i * 3, 3).unwrap(), "input_ids")).collect();
    assert_eq!(drawn[57 * 40..], ints(&data().train_batch(57, 63).unwrap(), "input_ids"));
    let mut epoch: Vec<&[i64]> = drawn[..30 * 40].chunks(40).collect();
    epoch.sort_unstable();
    epoch.dedup();
    assert_eq!(epoch.len(), 30);
    assert_ne!(drawn[..30 * 40], drawn[30 * 40..60 * 40]);
}

#[test]
fn packed_conversations_share_samples_and_keep_their_positions() {
    let folder = Folder::new();
    let lines = numbered(3);
    let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
    let chats = folder.chats(&lines);
    let alone = open(chats.clone());
    let length = alone.example(0).unwrap().unwrap().tokens.len() - 1;
    let context = 2 * length + 3;
    let packed = open(Chats { packing: true, context, ..chats });
    let [first, second] = [0, 1].map(|sample| packed.train_batch(sample, 1).unwrap());
    let row = |batch: &Batch, name: &str| ints(batch, name);
    let [one, two, three] = [0, 1, 2].map(|sample| alone.train_batch(sample, 1).unwrap());
    for (name, padding) in [("input_ids", 0), ("labels", IGNORED)] {
        let joined = |parts: &[&Batch]| {
            let mut all: Vec<i64> = parts.iter().flat_map(|batch| row(batch, name)[..length].to_vec()).collect();
            all.resize(context, padding);
            all
        };
        assert_eq!(row(&first, name), joined(&[&one, &two]));
        // The epoch ends, and no conversation is in a sample twice.
        assert_eq!(row(&second, name), joined(&[&three]));
    }
    let places = |lengths: &[usize]| lengths.iter().flat_map(|n| 0..*n as i64).collect::<Vec<_>>();
    assert_eq!(row(&first, "position_ids"), places(&[length, length, 3]));
    assert_eq!(row(&second, "position_ids"), places(&[length, length + 3]));
    assert_eq!(packed.train_samples(), 2);
    assert!(packed.to_string().ends_with("3 conversations to train on, 0 held out, packed into about 2 samples"));
}

#[test]
fn packing_leaves_nothing_out_and_is_the_same_from_any_place() {
    let folder = Folder::new();
    let lines: Vec<String> = (0..50).map(|i| asked(&format!("q{i}"), &"a".repeat(1 + 7 * i % 30))).collect();
    let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
    let chats = Chats { packing: true, shuffle: true, context: 90, ..folder.chats(&lines) };
    let data = open(chats.clone());
    let trained = |batch: &Batch| ints(batch, "labels").iter().filter(|label| **label != IGNORED).count();
    let alone = open(Chats { packing: false, ..chats.clone() });
    let all = trained(&alone.train_batch(0, 50).unwrap());
    let (mut drawn, mut samples) = (0, 0);
    while drawn < 3 * all {
        drawn += trained(&data.train_batch(samples, 1).unwrap());
        samples += 1;
    }
    assert_eq!(drawn, 3 * all, "epochs end with a sample");
    assert!(samples < 3 * 50 / 2, "{samples}");
    let late = samples - 4;
    assert_eq!(open(chats).train_batch(late, 3).unwrap(), data.train_batch(late, 3).unwrap());
}

#[test]
fn held_out_conversations_are_not_packed() {
    let folder = Folder::new();
    let lines = numbered(4);
    let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
    let half = Chats { validation: Validation::Fraction(0.5), ..folder.chats(&lines) };
    let alone = open(half.clone()).held_out(&[0, 1], |name| name != "position_ids").unwrap();
    let packed = open(Chats { packing: true, ..half });
    assert_eq!(packed.held_out(&[0, 1], |name| name != "position_ids").unwrap(), alone);
    assert_eq!(packed.eval_samples(), 2);
}

#[test]
fn the_last_conversations_are_held_out() {
    let folder = Folder::new();
    let lines = numbered(10);
    let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
    let open = |validation| open(Chats { validation, ..folder.chats(&lines) });
    let texts = |data: &Dataset| {
        let all: Vec<usize> = (0..data.eval_samples() + 1).collect();
        let rows = ints(&data.held_out(&all, |name| name == "input_ids").unwrap(), "input_ids");
        rows.chunks(40).map(|row| row[3]).collect::<Vec<_>>()
    };
    let data = open(Validation::Fraction(0.25));
    assert_eq!((data.train_samples(), texts(&data)), (8, vec![i64::from(b'8'), i64::from(b'9')]));
    let data = open(Validation::Fraction(0.01));
    assert_eq!((data.train_samples(), texts(&data)), (9, vec![i64::from(b'9')]));
    assert!(data.eval_origin(0).ends_with("chats.jsonl, line 10"));
    let other = folder.write("other.jsonl", asked("q3", "a"));
    let data = open(Validation::Files(vec![other]));
    assert_eq!((data.train_samples(), texts(&data)), (10, vec![i64::from(b'3')]));
    let one = Chats { validation: Validation::Fraction(0.1), ..folder.chats(&lines[..1]) };
    assert_snapshot!(folder.error(one), @"
    there is no conversation to train on
    hint: name more files in data.files, or lower data.validation
    ");
}

/// Lines after the first ones are found to be broken only when they are drawn.
#[test]
fn the_next_conversation_takes_the_place_of_a_broken_one() {
    let folder = Folder::new();
    let mut lines = numbered(CHECKED + 4);
    for broken in [CHECKED + 1, CHECKED + 3] {
        lines[broken] = asked(&"long ".repeat(20), "a");
    }
    let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
    let chats = folder.chats(&lines);
    let data = open(Chats { on_error: OnError::Skip, ..chats.clone() });
    assert_eq!(data.train_samples(), CHECKED + 4);
    let at = |place: usize| sample(&data, place as u64);
    assert_eq!(at(CHECKED + 1), format!("Q:q{0}.A:[a{0}.]", CHECKED + 2));
    assert_eq!(at(CHECKED + 3), "Q:q0.A:[a0.]");
    assert_eq!(data.train_batch(CHECKED as u64 + 1, 1).unwrap(), data.train_batch(CHECKED as u64 + 2, 1).unwrap());
    let data = open(chats);
    let error = data.train_batch(CHECKED as u64 + 1, 1).unwrap_err();
    assert_snapshot!(folder.without_path(&error), @r#"
    a conversation is broken:
      DIR/chats.jsonl, line 258: it has 107 tokens, and no answer begins within `data.context` = 40
    hint: raise data.context, or shorten the conversation; or write on_error = "skip" in [data] to leave such lines out
    "#);
}

#[test]
fn digests_tell_data_apart() {
    let folder = Folder::new();
    let digest = |chats: Chats| open(chats).digest().to_owned();
    let first = digest(folder.chats(&[&asked("a", "b")]));
    assert_eq!(first, digest(folder.chats(&[&asked("a", "b")])));
    assert_ne!(first, digest(folder.chats(&[&asked("a", "c")])));
    let marked = Chats { template: Some(folder.template(MARKED)), ..folder.chats(&[&asked("a", "b")]) };
    assert_ne!(first, digest(marked));
}

#[test]
fn a_file_that_changes_is_told() {
    let folder = Folder::new();
    let data = open(folder.chats(&[&asked("a", "b")]));
    folder.write("chats.jsonl", asked("a", "bb"));
    assert_snapshot!(folder.without_path(&data.train_batch(0, 1).unwrap_err()), @"
    DIR/chats.jsonl: the file has changed since it was opened
    hint: bring back the file as it was and resume the run, or start a new run with the changed file
    ");
}

/// Lines that are longer than a block, and blocks that end within a line, are read whole.
#[test]
fn lines_of_all_lengths_are_read() {
    let folder = Folder::new();
    let long = asked("q", &"x".repeat(9 << 20));
    let short = numbered(3);
    let lines: Vec<&str> = [&short[0], &long, &short[1], &short[2]].map(String::as_str).into();
    let data = open(folder.chats(&lines));
    assert_eq!(data.train_samples(), 4);
    assert_eq!(sample(&data, 3), "Q:q2.A:[a2.]");
    assert_eq!(data.example(1).unwrap().unwrap().cut, 4 + 2 + (9 << 20) + 1 - 41);
}

#[test]
fn chats_are_told_from_text_by_their_first_line() {
    let folder = Folder::new();
    let is = |line: &str| crate::has_chats(&folder.write("a.jsonl", line));
    assert!(is(&format!("\n{}\n", two())));
    assert!(is(r#"{"prompt": "a", "completion": "b"}"#));
    assert!(!is(r#"{"text": "a"}"#));
    assert!(!is("no JSON") && !is("") && !crate::has_chats(folder.0.path()));
}
