"""Compares `fusionllm generate` with `transformers` on one model: the text, and the tokens per second.

    generation.py FOLDER TEXT      a Hugging Face folder, and a file whose first tokens are the prompts

FUSIONLLM names the program, by default target/release/fusionllm. Both sides choose the most likely token, use THREADS
processors (by default 2), and take turns. The time of `transformers` is that of its `generate` alone; ours is the
program's own figure. Both include reading the prompt. Ours computes in float32.
"""

import json
import os
import pathlib
import subprocess
import sys
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = pathlib.Path(__file__).resolve().parents[1]
PROGRAM = os.environ.get("FUSIONLLM", ROOT / "target/release/fusionllm")
PROMPTS, TOKENS, ROUNDS = (16, 512), 64, 3


def ours(folder, prompt):
    command = [PROGRAM, "generate", folder, "--prompt", prompt, "--tokens", str(TOKENS), "--temperature", "0", "--json"]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return report["text"], report["tokens_per_s"]


def theirs(model, tokenizer, prompt):
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    began = time.perf_counter()
    tokens = model.generate(**inputs, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False)[0]
    took = time.perf_counter() - began
    return tokenizer.decode(tokens[inputs.input_ids.shape[1] :]), TOKENS / took


def main():
    folder, text = sys.argv[1:]
    torch.set_num_threads(int(os.environ.get("THREADS", "2")))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(pathlib.Path(text).read_text()[:20_000], add_special_tokens=False).input_ids
    types = ("float32", "bfloat16")
    models = {name: AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, name)).eval() for name in types}
    for length in PROMPTS:
        prompt = tokenizer.decode(ids[:length])
        for _ in range(ROUNDS):
            text, rate = ours(folder, prompt)
            row = [f"prompt of {length} tokens: ours {rate:.1f} tokens/s"]
            for name, model in models.items():
                other, rate = theirs(model, tokenizer, prompt)
                same = ", the same text" if text.endswith(other) or other.startswith(text) else ""
                row.append(f"{name} {rate:.1f}{same}")
            print("; ".join(row), flush=True)


if __name__ == "__main__":
    main()
