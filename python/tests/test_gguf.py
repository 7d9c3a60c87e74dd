"""Models exported for llama.cpp: names and values by its own tables, logits and tokens by llama.cpp itself."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from requirements import needs, needs_torch

pytestmark = [needs("wheel", shutil.which("fusionllm") is not None, "needs the program on the PATH"), needs_torch]

TOKENIZERS = Path(__file__).resolve().parents[2] / "testdata/tokenizers"

SIZES = {
    "vocab_size": 402,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    # Larger than usual, so that a wrong tensor changes the logits by far.
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
LONG = {
    **{"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 512},
    **{"short_factor": [1 + i / 10 for i in range(8)], "long_factor": [2 + i / 10 for i in range(8)]},
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
GEMMA = {"num_key_value_heads": 2, "head_dim": 32, "sliding_window": 24, "query_pre_attn_scalar": 32}

#: The family of each case, llama.cpp's name of it, and the settings.
CASES = {
    "llama": ("llama", "llama", {"num_key_value_heads": 2, "head_dim": 32}),
    "llama with biases": ("llama", "llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama3": ("llama", "llama", {"num_key_value_heads": 2, "rope_parameters": LLAMA3}),
    "llama with yarn": ("llama", "llama", {"rope_parameters": YARN | {"attention_factor": 1.3}}),
    "llama for long texts": ("llama", "llama", {"rope_parameters": LONG, "max_position_embeddings": 1024}),
    "llama for longer texts": ("llama", "llama", {"rope_parameters": LINEAR}),
    "mistral": ("mistral", "llama", {"num_key_value_heads": 2, "sliding_window": 100}),
    "qwen2": ("qwen2", "qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", "qwen3", {"num_key_value_heads": 2, "head_dim": 32, "rope_parameters": YARN}),
    "gemma2": ("gemma2", "gemma2", {**GEMMA, "num_hidden_layers": 4}),
    "gemma3": ("gemma3_text", "gemma3", {**GEMMA, "num_hidden_layers": 7}),
    "phi3": ("phi3", "phi3", {"num_key_value_heads": 2, "pad_token_id": 0, "partial_rotary_factor": 0.5}),
    "phi3 for long texts": (
        "phi3",
        "phi3",
        {
            **{"pad_token_id": 0, "rope_parameters": LONG, "max_position_embeddings": 1024},
            **{"original_max_position_embeddings": 512, "tie_word_embeddings": True},
        },
    ),
    "olmo2": ("olmo2", "olmo2", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "smollm3": ("smollm3", "smollm3", {"num_key_value_heads": 2, "num_hidden_layers": 5, "pad_token_id": 0}),
    "gpt_neox": ("gpt_neox", "gptneox", {}),
    "gpt_neox, one after the other": ("gpt_neox", "gptneox", {"use_parallel_residual": False, "rotary_pct": 1.0}),
    "gpt2": ("gpt2", "gpt2", {"n_positions": 128, "n_inner": 80, "tie_word_embeddings": False}),
}

#: llama.cpp takes GELU from a table of half precision, and these families have it.
ROUGH = {"gemma2", "gemma3_text", "gpt_neox", "gpt2"}

#: Settings that `transformers` reads from a file. It overlooks others.
READ_BY_TRANSFORMERS = {
    "llama": {"num_key_value_heads": 2},
    "qwen2": {"num_key_value_heads": 2},
    "gpt2": {"max_position_embeddings": 1024},
}


def export(source: Path, out: Path, *more: object) -> subprocess.CompletedProcess[str]:
    command = ["fusionllm", "export", str(source), "--format", "gguf", "-o", str(out), *map(str, more)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def exported(source: Path, out: Path) -> Path:
    done = export(source, out)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in out.iterdir()] == ["model.gguf"]
    return out / "model.gguf"


def ask_llama_cpp(model: Path, requests: list[dict]) -> list:
    pytest.importorskip("xllamacpp")
    helper = Path(__file__).with_name("llama_cpp_answers.py")
    done = subprocess.run(
        [sys.executable, helper, model], input=json.dumps(requests), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def make_model(family: str, settings: dict, path: Path, tokenizer: Path = TOKENIZERS / "byte_level"):
    """A small random model with a tokenizer of the same size."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **settings})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(path)
    for name in ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]:
        if (tokenizer / name).exists():
            shutil.copy(tokenizer / name, path)
    return model


def read(path: Path) -> tuple[dict, dict]:
    """The metadata and the tensors of a file, by llama.cpp's own reader."""
    gguf = pytest.importorskip("gguf")
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    return fields, {tensor.name: tensor for tensor in reader.tensors}


def in_their_form(name: str, family: str, config, tensor):
    """A tensor of a checkpoint as llama.cpp reads it."""
    module = name.split(".")[-2]
    heads = config.num_attention_heads
    if family in ("llama", "mistral", "smollm3") and module in ("q_proj", "k_proj"):
        heads = heads if module == "q_proj" else config.num_key_value_heads
        return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(tensor.shape)
    if family in ("gemma2", "gemma3_text") and module.endswith("norm"):
        return tensor + 1
    if family == "gpt2" and module in ("c_attn", "c_proj", "c_fc"):
        return tensor.T if tensor.ndim == 2 else tensor
    if module == "query_key_value":
        return tensor.unflatten(0, (heads, 3, -1)).transpose(0, 1).reshape(tensor.shape)
    return tensor


@pytest.mark.parametrize("case", CASES)
def test_llama_cpp_computes_the_same(case: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    gguf = pytest.importorskip("gguf")
    family, architecture, settings = CASES[case]
    model = make_model(family, settings, tmp_path / "source")
    file = exported(tmp_path / "source", tmp_path / "out")
    fields, tensors = read(file)

    # Names by the table of llama.cpp's converter, and all of them are names of the architecture.
    [arch] = [arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture]
    assert fields["general.architecture"] == architecture
    table = gguf.get_tensor_name_map(arch, len(list(model.modules())))
    known = {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[arch]}
    expected = {}
    for name, tensor in model.state_dict().items():
        if model.config.tie_word_embeddings and name in ("lm_head.weight", "embed_out.weight"):
            if family not in ("olmo2", "gpt_neox"):
                continue
        theirs = table.get_name(name, try_suffixes=(".weight", ".bias"))
        expected[theirs] = in_their_form(name, family, model.config, tensor)
        number = next((part for part in theirs.split(".") if part.isdigit()), "")
        pattern = theirs.rsplit(".", 1)[0].replace(f"blk.{number}.", "blk.{bid}.")
        assert pattern in known, theirs
    scaled = {"llama3": {"rope_freqs.weight"}}.get(case, set())
    if "for long texts" in case:
        scaled = {"rope_factors_long.weight", "rope_factors_short.weight"}
    assert set(tensors) == set(expected) | scaled
    for name, tensor in expected.items():
        assert tensors[name].tensor_type == gguf.GGMLQuantizationType.F32
        assert list(tensors[name].shape) == list(reversed(tensor.shape)), name
        assert (torch.tensor(tensors[name].data) == tensor).all(), name

    # The next token's probabilities, after texts that are shorter and longer than a window.
    ids = torch.randint(3, 400, (90,), generator=torch.Generator().manual_seed(7)).tolist()
    lengths = [9, 10, 30, 61, 90]
    said = ask_llama_cpp(file, [{"tokens": ids[:length]} for length in lengths])
    assert sum(answer is not None for answer in said) >= 2
    for length, answer in zip(lengths, said):
        with torch.no_grad():
            ours = torch.log_softmax(model(torch.tensor([ids[:length]])).logits[0, -1], -1).tolist()
        if answer is not None:
            theirs = [answer[str(token)] for token in range(len(ours))]
            # Of an unlikely token, llama.cpp gives no exact number.
            differences = [abs(a - b) for a, b in zip(ours, theirs) if a > -12]
            assert max(differences) < (0.02 if family in ROUGH else 5e-4), (length, max(differences))


@pytest.mark.parametrize("family", READ_BY_TRANSFORMERS)
def test_transformers_opens_the_file(family: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = make_model(family, READ_BY_TRANSFORMERS[family], tmp_path / "source")
    exported(tmp_path / "source", tmp_path / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", gguf_file="model.gguf").eval()
    ids = torch.randint(3, 400, (1, 20), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        assert (again(ids).logits - model(ids).logits).abs().max() < 1e-3


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_keep_their_element_type(dtype: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    gguf = pytest.importorskip("gguf")
    model = make_model("llama", {}, tmp_path / "source").to(getattr(torch, dtype))
    model.save_pretrained(tmp_path / "source")
    fields, tensors = read(exported(tmp_path / "source", tmp_path / "out"))
    types = gguf.GGMLQuantizationType
    wanted, number = {"bfloat16": (types.BF16, 32), "float16": (types.F16, 1)}[dtype]
    assert fields["general.file_type"] == number
    assert {t.tensor_type for t in tensors.values() if len(t.shape) == 2} == {wanted}
    assert {t.tensor_type for t in tensors.values() if len(t.shape) == 1} == {types.F32}
    up = tensors["blk.1.ffn_up.weight"].data
    stored = model.model.layers[1].mlp.up_proj.weight.detach().view(torch.int16).numpy().tobytes()
    assert up.tobytes() == stored


#: Settings that llama.cpp has no place for, and a part of the message.
REFUSALS = {
    "activation": ("llama", {"hidden_act": "gelu"}, "its activation is gelu, and in llama it is always silu"),
    "bias": ("qwen3", {"num_key_value_heads": 2, "attention_bias": True}, "its queries have biases"),
    "heads": ("qwen2", {"num_key_value_heads": 2, "head_dim": 32}, "its heads are 128 wide together"),
    "scale": ("gemma2", {**GEMMA, "query_pre_attn_scalar": 100}, "its scores are multiplied by 0.1"),
    "caps": ("gemma2", {**GEMMA, "final_logit_softcapping": None}, "bounds of its scores or logits differ"),
    "windows": ("gemma3_text", {**GEMMA, "layer_types": ["full_attention"] * 3}, "its windows are not in all layers"),
    "positions": ("smollm3", {"no_rope_layers": [1, 0, 1], "pad_token_id": 0}, "its layers without positions"),
    "rotary": ("qwen2", {"num_key_value_heads": 2, "rope_parameters": LLAMA3}, 'its rope_type is "llama3"'),
    "yarn": ("llama", {"rope_parameters": YARN | {"beta_fast": 16.0}}, "`beta_fast`"),
    "head": ("gemma2", {**GEMMA, "tie_word_embeddings": False}, "its output layer has a weight of its own"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_models_that_llama_cpp_does_not_compute_are_refused(case: str, tmp_path: Path) -> None:
    family, settings, reason = REFUSALS[case]
    make_model(family, settings, tmp_path / "source")
    done = export(tmp_path / "source", tmp_path / "out")
    assert done.returncode == 2 and reason in done.stderr, done.stderr
    assert "hint: write it for `transformers`: --format hf" in done.stderr
    assert not (tmp_path / "out").exists()


#: Hard texts for a tokenizer.
TEXTS = json.loads((TOKENIZERS / "expected.json").read_text(encoding="utf-8"))["byte_level"]["cases"]
TEXTS = [case["text"] for case in TEXTS] + ["<|im_start|>user\nHi<|im_end|> there", "12345678 9 ½ ²", "I'LL we'll 'S"]

QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level(kind: str):
    """A byte-level tokenizer that cuts texts as a known model does."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(ignore_merges=kind == "llama-bpe"))
    bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    regex = {"qwen2": QWEN2, "llama-bpe": QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|"), "smaug-bpe": None}.get(kind)
    regex = regex or QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|")
    if kind == "gpt-2":
        tokenizer.pre_tokenizer = gpt2
    elif kind == "smollm":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    else:
        cut = pre_tokenizers.Split(Regex(regex), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, bytes_alone])
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=390,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([(TOKENIZERS / "text.txt").read_text(encoding="utf-8"), *TEXTS], trainer)
    tokenizer.add_tokens(["<think>", "</think>"])
    return tokenizer, {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}


def like_sentence_piece(kind: str):
    """A tokenizer that falls back to bytes, with the merges that a conversion from SentencePiece has: all pairs of
    tokens that are a token together, in the order of those."""
    from tokenizers import Tokenizer, normalizers, pre_tokenizers

    made = json.loads((TOKENIZERS / "llama/tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = made["model"]["vocab"]
    merges = []
    for text in sorted(vocabulary, key=vocabulary.get):
        cuts = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
        merges += [[left, right] for left, right in cuts if left in vocabulary and right in vocabulary]
    made["model"]["merges"] = merges
    if kind == "phi-3":
        first = max(vocabulary.values()) + 1
        made["added_tokens"][-1]["rstrip"] = True
        for number, text in enumerate(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]):
            token = {"id": first + number, "content": text, "special": True, "rstrip": number > 0}
            made["added_tokens"].append(token | {"lstrip": False, "single_word": False, "normalized": False})
    tokenizer = Tokenizer.from_str(json.dumps(made))
    if kind == "gemma":
        tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    if kind == "mistral":
        tokenizer.normalizer = None
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


#: The maker of a tokenizer, its kind, and llama.cpp's names of its model and of the way in which it cuts texts.
KINDS = {
    **{name: (byte_level, name, "gpt2", name) for name in ["gpt-2", "smollm", "qwen2", "llama-bpe", "smaug-bpe"]},
    **{name: (like_sentence_piece, name, "llama", "default") for name in ["llama", "gemma", "mistral", "phi-3"]},
}


@pytest.mark.parametrize("case", KINDS)
def test_llama_cpp_cuts_texts_into_the_same_tokens(case: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    make, kind, model, pre = KINDS[case]
    tokenizer, special = make(kind)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    fast.save_pretrained(tmp_path / "tokenizer")
    size = max(fast.get_vocab().values()) + 1
    # Embeddings are often padded.
    make_model("llama", {"vocab_size": size + 3}, tmp_path / "source", tmp_path / "tokenizer")
    file = exported(tmp_path / "source", tmp_path / "out")

    fields, _ = read(file)
    field = {name.removeprefix("tokenizer.ggml."): value for name, value in fields.items()}
    assert (field["model"], field["pre"]) == (model, pre)
    assert field["tokens"][:size] == fast.convert_ids_to_tokens(range(size))
    assert field["tokens"][size:] == [f"[PAD{number}]" for number in range(size, size + 3)]
    assert field["token_type"][size:] == [5, 5, 5]
    for name in ["bos", "eos"]:
        assert field[f"{name}_token_id"] == getattr(fast, f"{name}_token_id")
        assert field["token_type"][field[f"{name}_token_id"]] == 3
    assert field.get("general.name") == ("Phi-3" if kind == "phi-3" else None)
    assert field["add_bos_token"] == (fast("a").input_ids[0] == fast.bos_token_id)
    assert field["tokenizer.chat_template"] == fast.chat_template

    # llama.cpp puts the space of "first" before a text that has one, too, and after special tokens.
    texts = [text for text in TEXTS if kind != "mistral" or not ("<" in text or text.startswith(" "))]
    requests = [{"text": text, "special": special} for text in texts for special in (False, True)]
    for request, answer in zip(requests, ask_llama_cpp(file, requests)):
        split = not request["special"]
        tokens = fast(request["text"], add_special_tokens=False, split_special_tokens=split).input_ids
        # llama.cpp composes no accents.
        if tokenizer.normalizer is None or "e\u0301" not in request["text"]:
            assert answer == tokens, request


@pytest.mark.parametrize("kind", ["unigram", "word_piece", "llama", "cut", "strip"])
def test_tokenizers_that_llama_cpp_lacks_are_refused(kind: str, tmp_path: Path) -> None:
    reasons = {
        "unigram": "it is a Unigram model, and only BPE can be written",
        "word_piece": "it is a WordPiece model, and only BPE can be written",
        "llama": "in an order or from parts that SentencePiece has not",
        "strip": """its token "<|im_end|>" has `rstrip`""",
        "cut": "its pre_tokenizer cuts texts into words in a way that has no name there",
    }
    changed = {
        "cut": lambda made: made["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(Regex=r"\p{L}+|\s+"),
        "strip": lambda made: made["added_tokens"][2].update(rstrip=True),
    }
    tokenizer = TOKENIZERS / ("byte_level" if kind in changed else kind)
    make_model("llama", {"vocab_size": 640}, tmp_path / "source", tokenizer)
    if kind in changed:
        path = tmp_path / "source/tokenizer.json"
        made = json.loads(path.read_text(encoding="utf-8"))
        changed[kind](made)
        path.write_text(json.dumps(made), encoding="utf-8")
    done = export(tmp_path / "source", tmp_path / "out")
    assert done.returncode == 2 and "llama.cpp cannot cut texts as this tokenizer does" in done.stderr
    assert reasons[kind] in done.stderr
    (tmp_path / "source/tokenizer.json").unlink()
    done = export(tmp_path / "source", tmp_path / "out")
    assert done.returncode == 2 and "the model's tokenizer is unknown" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("tokenizer", ["bytes", "gpt2"])
def test_models_with_our_own_tokenizers(tokenizer: str, tmp_path: Path) -> None:
    size = {"bytes": 256, "gpt2": 50_257}[tokenizer]
    make_model("gpt2", {"vocab_size": size, "bos_token_id": None, "eos_token_id": None}, tmp_path / "source")
    for name in ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]:
        (tmp_path / "source" / name).unlink()
    file = exported(tmp_path / "source", tmp_path / "out")
    fields, _ = read(file)
    end = {"bytes": 255, "gpt2": 50_256}[tokenizer]
    assert (fields["tokenizer.ggml.eos_token_id"], len(fields["tokenizer.ggml.tokens"])) == (end, size)
    answers = ask_llama_cpp(file, [{"text": text, "special": False} for text in ["it's über 2024", "\u65e5"]])
    if tokenizer == "bytes":
        assert answers == [list("it's über 2024".encode()), [0xE6, 0x97, 0xA5]]
    else:
        assert answers == [[270, 338, 6184, 120, 527, 48609], [33768, 98]]


def test_adapters_are_added_to_the_weights(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.torch")
    make_model("qwen2", {"num_key_value_heads": 2}, tmp_path / "source")
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 60)
    job = {"model.path": tmp_path / "source", "data.files": json.dumps([str(text)]), "data.context": 16}
    job |= {"train.steps": 3, "train.batch": 4, "eval.every": 0, "lora.rank": 4, "train.optimizer.lr": 0.05}
    settings = [f"--set={key}={value}" for key, value in job.items()]
    command = ["fusionllm", "train", *settings, "--peers", "2", "--run-dir", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    _, tensors = read(exported(tmp_path / "run", tmp_path / "out"))
    done = subprocess.run(
        ["fusionllm", "export", str(tmp_path / "run"), "--merge", "-o", str(tmp_path / "merged")], check=False
    )
    assert done.returncode == 0
    merged = safetensors.load_file(tmp_path / "merged/model.safetensors")
    source = safetensors.load_file(tmp_path / "source/model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    assert (torch.tensor(tensors["blk.1.ffn_up.weight"].data) == merged[name]).all()
    assert (merged[name] - source[name]).abs().max() > 1e-3
