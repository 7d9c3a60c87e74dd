use fusionllm_transport::{PeerAddr, Secret, SecretKey, Ticket};

/// A safetensors file with three tensors.
pub(super) fn weights() -> Vec<u8> {
    let header = r#"{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"b":{"dtype":"BF16","shape":[],"data_offsets":[24,26]},"c":{"dtype":"I64","shape":[1,0],"data_offsets":[26,26]}}"#;
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[7; 26]].concat()
}

/// Valid texts for the decoder of this name.
pub(super) fn texts(name: &str) -> Vec<Vec<u8>> {
    let key = SecretKey::from_bytes([3; 32]);
    let texts: Vec<String> = match name {
        "ticket" => {
            let addrs = vec!["192.168.1.7:4433".parse().unwrap(), "[2001:db8::1]:9".parse().unwrap()];
            let relay = Some("http://192.0.2.1:3340/?token=abc".parse().unwrap());
            let addr = PeerAddr { relay, ..PeerAddr::new(key.public(), addrs) };
            let plain = Ticket::new(PeerAddr::new(key.public(), Vec::new()), Secret::from_bytes([0xa5; 16]));
            let full = Ticket { expires: Some(1_800_000_000), ..Ticket::new(addr, Secret::from_bytes([1; 16])) };
            vec![plain.to_string(), full.to_string()]
        }
        "relay-url" => ["http://192.0.2.1:3340/?token=abc", "https://relay.example.org", "http://[2001:db8::1]:80/"]
            .map(String::from)
            .to_vec(),
        "relay-secret" => vec!["abcdefghijklmnopqrstuvwxya".into()],
        "identity" => vec![format!("fusionllm-identity-1 {}\n", key.full())],
        "allowed-keys" => vec![format!("# friends\n\n{}  # me\n{0}\n", key.public().full())],
        "manifest" => vec![MANIFEST.into()],
        "job" => vec![
            JOB.into(),
            include_str!("../../../../workspace/src/config/quick_model.toml").into(),
            include_str!("../../../../workspace/src/config/quick_start.toml").into(),
        ],
        "testbed" => vec![
            TESTBED.into(),
            include_str!("../../../../../examples/three-homes/testbed.toml").into(),
            include_str!("../../../../../examples/testbeds/two-clusters.toml").into(),
        ],
        "profile" => vec![PROFILE.into()],
        name => panic!("the decoder {name} has no samples"),
    };
    texts.into_iter().map(String::into_bytes).collect()
}

const MANIFEST: &str = r#"{"format": "fusionllm-checkpoint", "version": 1, "state": {"step": 7, "updates": 6,
"samples": 100, "seed": 1, "graph": "0123", "data": "4567", "loss_first": 5.5}, "model": {}, "optimizer": {},
"extra": {}}"#;

const JOB: &str = r#"
[model]
family = "gpt2"
n_layer = 2
n_embd = 16
n_head = 2
vocab_size = 300
[data]
context = 16
validation = 0.1
[train]
steps = 10
batch = 8
micro_batch = 2
seed = 3
optimizer = { name = "adamw", lr = 2e-3, weight_decay = 0.1, betas = [0.9, 0.99], clip = 1.0, warmup = 100, decay = "cosine" }
[plan]
scheduler = "op-fence"
[compression]
name = "adatopk"
ratio = 10.0
[checkpoint]
every = 5
[eval]
every = 5
batches = 2
[network]
relay = "http://192.0.2.1:3340/"
"#;

const TESTBED: &str = r#"
[broker]
at = "a"
[[device]]
name = "a"
site = "home"
gpu = "RTX 3090"
efficiency = 0.5
[[device]]
name = "b"
count = 2
tflops = 1.5
memory_bandwidth = "20 GB/s"
memory = "8 GiB"
overhead = "5 us"
slowdown = 1.5
operators = { mm = [[1e6, 1e-3], [1e9, 0.5]] }
[[site]]
name = "home"
rate = "1 Gbps"
latency = "0.2 ms"
uplink = { rate = "100 Mbps", latency = "8 ms" }
[[link]]
between = ["home", "b-0"]
rate = "10 Mbps"
latency = "20 ms"
[[link]]
between = ["home", "b-1"]
rate = "10 Mbps"
"#;

const PROFILE: &str = r#"
[[device]]
name = "cpu-2"
backend = "cpu"
threads = 2
tflops = 0.05
convolution_tflops = 0.04
memory_bandwidth = "10 GB/s"
memory = "4 GiB"
overhead = "3 us"
[device.operators]
mm = [[1e6, 1e-3], [1e9, 0.5]]
add = [[1e3, 1e-6]]
[device.scratch]
mm = [[1e6, 1e3]]
"#;

/// Lines with conversations of every form.
pub(super) fn chats() -> Vec<Vec<u8>> {
    let lines = [
        r#"{"messages": [{"role": "user", "content": "a\nb \u00e9"}, {"role": "assistant", "content": "", "x": [1]}]}"#,
        r#"{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "tools": null}"#,
        r#"{"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]}"#,
        r#"{"prompt": "a", "completion": "b", "id": 7}"#,
        r#"{"text": "ab"}"#,
    ];
    lines.iter().map(|line| line.as_bytes().to_vec()).chain([lines.join("\n").into_bytes()]).collect()
}

/// Templates for chats.
pub(super) fn templates() -> Vec<Vec<u8>> {
    let sources = [
        "{{- bos_token }}{% for m in messages %}\n{%- if m['role'] == 'assistant' %}A: {% generation %}{{ m.content | \
         trim }}{{ eos_token }}{% endgeneration %}{% else %}{{ m.role ~ ': ' + m['content'].strip() }}{% endif %}\n{% \
         endfor %}{% if add_generation_prompt %}A: {% endif %}",
        "{% set ns = namespace(n=0) %}{% macro say(m) %}{{ m | tojson(indent=2) }}{% endmacro %}{% for m in \
         messages[::-1] %}{% set ns.n = ns.n + loop.index %}{{ say(m) }}{% if ns.n > 9 %}{% break %}{% endif %}{% endfor %}\
         {{ strftime_now('%d %b %Y') }}{{ messages[-1].content.split('m')[0] }}",
    ];
    sources.map(|source| source.as_bytes().to_vec()).to_vec()
}

/// Tokenizers of every kind.
pub(super) fn tokenizers() -> Vec<Vec<u8>> {
    let made = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/tokenizers");
    let read = |name| std::fs::read(made.join(name).join("tokenizer.json")).unwrap();
    ["byte_level", "llama", "unigram", "word_piece"].map(read).to_vec()
}
