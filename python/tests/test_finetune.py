"""`finetune` from a folder and chats to a job, a run, answers in a chat, and an adapter that PEFT opens."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from requirements import needs, needs_torch

pytestmark = [needs("wheel", shutil.which("fusionllm") is not None, "needs the program on the PATH"), needs_torch]

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

COLOURS = {"sky": "blue", "grass": "green", "snow": "white", "coal": "black"}


def run(*arguments: object, directory: Path) -> str:
    command = ["fusionllm", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=directory)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small Llama that knows nothing, with a tokenizer of single bytes and a template."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    fast.chat_template = TEMPLATE
    config = transformers.LlamaConfig(
        vocab_size=258,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        bos_token_id=256,
        eos_token_id=257,
    )
    torch.manual_seed(1)
    path = tmp_path / "folder"
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    fast.save_pretrained(path)
    with open(tmp_path / "chats.jsonl", "w", encoding="utf-8") as file:
        for number in range(40):
            thing, colour = list(COLOURS.items())[number % len(COLOURS)]
            question = {"role": "user", "content": f"What colour is {thing}?"}
            answer = {"role": "assistant", "content": f"It is {colour}."}
            file.write(json.dumps({"messages": [question, answer]}) + "\n")
    return path


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_model_learns_to_answer(folder: Path, tmp_path: Path) -> None:
    ask = ["--temperature", 0, "--tokens", 16, "--json"]
    said = run(
        *("finetune", folder, "chats.jsonl", "--full", "--steps", 150, "--peers", 2, "--dashboard", "off"),
        *("--set", "train.optimizer.lr=0.003"),
        directory=tmp_path,
    )
    assert "36 conversations to train on, 4 held out" in said
    assert "each of 2 peers needs up to" in said
    answers = {
        thing: json.loads(run("chat", "runs/0001", "-m", f"What colour is {thing}?", *ask, directory=tmp_path))["answer"]
        for thing in COLOURS
    }
    assert answers == {thing: f"It is {colour}." for thing, colour in COLOURS.items()}

    # The job that was written trains the same again.
    run("train", "finetune.toml", "--peers", 1, "--set", "train.optimizer.lr=0.003", directory=tmp_path)
    first, second = losses(tmp_path / "runs/0001"), losses(tmp_path / "runs/0002")
    assert len(first) == len(second) == 150
    assert max(abs(a - b) for a, b in zip(first[:20], second[:20])) < 1e-4


def test_peft_answers_as_chat_does(folder: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    said = run(
        *("finetune", folder, "chats.jsonl", "--epochs", 5, "--dashboard", "off", "--set", "train.optimizer.lr=0.02"),
        directory=tmp_path,
    )
    assert "adapters train" in said and "a step takes" in said
    run("export", "runs/0001", "-o", "adapter", directory=tmp_path)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    question = [{"role": "user", "content": "What colour is snow?"}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        written = model.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids["input_ids"].shape[1] :]
    theirs = tokenizer.decode(written, skip_special_tokens=True)
    asked = ["chat", "runs/0001", "-m", question[0]["content"], "--temperature", 0, "--tokens", 12, "--json"]
    assert json.loads(run(*asked, directory=tmp_path))["answer"] == theirs
