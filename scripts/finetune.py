"""Fine-tunes a Hugging Face folder on 200 chats over three processes, kills one of them, and compares with PEFT.

    cargo build --release
    python3 scripts/finetune.py FOLDER [--steps 50] [--program target/release/fusionllm]

It needs torch, transformers and peft. FOLDER is an instruction-tuned model with a template for chats, such as
SmolLM2-135M-Instruct. Both sides start from the same adapters and draw the same batches: 4 conversations of up to 128
tokens. It prints one JSON object: the largest difference of two losses, seconds a step on both sides, the memory of each
peer, what happened to the one that was killed, and answers before and after, here and by PEFT with the exported
adapter.
"""

import argparse
import json
import os
import pathlib
import signal
import subprocess
import tempfile
import time

import peft
import torch
import transformers

CONTEXT, BATCH, RATE = 128, 4, 2e-4
QUESTIONS = ["What is a {}?", "Tell me about the {}.", "Do you like the {}?", "Describe a {}.", "What does a {} do?"]
ANIMALS = "cat dog horse cow sheep goat hen duck goose pig lion tiger bear wolf fox deer hare owl hawk crow".split()
ASKED = "What is a zebra?"


def chats():
    """200 conversations in which a pirate answers."""
    for number in range(200):
        animal, question = ANIMALS[number % 20], QUESTIONS[number // 20 % 5]
        answer = f"Arr, matey! The {animal} be a fine beast, says the old pirate."
        yield [
            {"role": "user", "content": question.format(animal)},
            {"role": "assistant", "content": answer},
        ]


def row(tokenizer, messages):
    """Tokens and labels of a conversation, by the difference of prefixes."""
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    lead = len(tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True))
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    tokens = encoded["input_ids"]
    labels = [t if end > lead else -100 for t, (_, end) in zip(tokens[1:], encoded["offset_mapping"][1:])]
    padding = CONTEXT - len(labels)
    return tokens[:-1] + [0] * padding, labels + [-100] * padding


def train_with_peft(folder, directory, steps):
    """Losses and seconds a step. The first adapters stand in `directory`/adapters."""
    torch.manual_seed(1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = peft.get_peft_model(base, peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    model.save_pretrained(directory / "adapters")
    rows = [row(tokenizer, messages) for messages in chats()]
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    losses, start = [], time.monotonic()
    for step in range(steps):
        batch = [rows[(step * BATCH + i) % len(rows)] for i in range(BATCH)]
        tokens, labels = (torch.tensor(side) for side in zip(*batch))
        logits = model.train()(tokens).logits.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, (time.monotonic() - start) / steps


def recorded(run):
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def train_here(program, folder, directory, steps):
    """Starts the same training over three processes, and kills the second of them halfway."""
    run = directory / "run"
    job = {"data.context": CONTEXT, "data.shuffle": "false", "data.validation": 0, "train.batch": BATCH}
    job |= {"train.optimizer.lr": RATE, "train.optimizer.warmup": 0, "train.optimizer.decay": "none"}
    job |= {"lora.weights": directory / "adapters", "eval.every": 0, "checkpoint.every": 0}
    command = [program, "finetune", folder, directory / "chats.jsonl", "--steps", steps, "--peers", 3]
    command += ["--dashboard", "off", "--run-dir", run, *(f"--set={key}={value}" for key, value in job.items())]
    with subprocess.Popen([str(word) for word in command], cwd=directory, stdout=subprocess.DEVNULL) as process:
        while len(recorded(run)) < steps // 2 and process.poll() is None:
            time.sleep(0.5)
        children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
        tasks = pathlib.Path(f"/proc/{process.pid}/task").glob("*/children") if children.exists() else []
        peers = sorted(int(pid) for task in tasks for pid in task.read_text().split())
        os.kill(peers[1], signal.SIGKILL)
    return run


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--program", type=pathlib.Path, default=pathlib.Path("target/release/fusionllm"))
    options = parser.parse_args()
    folder, program = options.folder.resolve(), options.program.resolve()
    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        lines = (json.dumps({"messages": messages}) for messages in chats())
        (directory / "chats.jsonl").write_text("\n".join(lines) + "\n")
        losses, peft_step_s = train_with_peft(folder, directory, options.steps)
        run = train_here(program, folder, directory, options.steps)
        ours = [metrics["loss"] for metrics in recorded(run)]
        summary = json.loads((run / "summary.json").read_text())

        def chat(model):
            command = [program, "chat", model, "-m", ASKED, "--temperature", "0", "--tokens", "40", "--json"]
            return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["answer"]

        subprocess.run([program, "export", run, "-o", directory / "out"], check=True, capture_output=True)
        base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        model = peft.PeftModel.from_pretrained(base, directory / "out").eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        asked = [{"role": "user", "content": ASKED}]
        ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        written = model.generate(**ids, max_new_tokens=40, do_sample=False)[0, ids["input_ids"].shape[1] :]
        figures = {
            "steps": len(ours),
            "loss_first_and_last": [ours[0], ours[-1]],
            "largest_difference": max(abs(a - b) for a, b in zip(ours, losses, strict=True)),
            "step_s": summary["median_step_s"],
            "peft_step_s": peft_step_s,
            "peak_memory_bytes": {peer["name"]: peer["peak_memory_bytes"] for peer in summary["peers"]},
            "incidents": summary["incidents"],
            "before": chat(folder),
            "after": chat(run),
            "peft_after": tokenizer.decode(written, skip_special_tokens=True),
        }
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
