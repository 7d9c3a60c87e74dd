"""Fine-tunes a Hugging Face folder on 200 chats over three peers, kills one of them, and compares with PEFT.

    cargo build --release
    python3 scripts/finetune.py FOLDER [--steps 50] [--mbps 8] [--full]

It needs torch, transformers and peft, and the program as `scripts/common.py` finds it. FOLDER is an instruction-tuned
model with a template for chats, such as SmolLM2-135M-Instruct. Both sides start from the same adapters and draw the same
batches: 4 conversations of up to 128 tokens. With --mbps, the peers are hosts with a line of that rate each, for which
it takes root, and another host takes the place of the one that is killed. With --full, all weights are trained, and
PEFT is left out. It prints one JSON object: the largest difference of two losses, seconds a step on both sides, the
memory of each peer, predicted and measured, the seconds and bytes that the lost peer cost, and answers before and
after, here and by PEFT with the exported adapter.
"""

import argparse
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

import peft
import torch
import transformers

from common import Hosts, metrics, program, settings, ticket, wait

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


def command(options, directory):
    """The command that trains the same here."""
    job = {"data.context": CONTEXT, "data.shuffle": "false", "data.packing": "false", "data.validation": 0}
    job |= {"train.batch": BATCH, "train.optimizer.lr": RATE, "train.optimizer.warmup": 0}
    job |= {"train.optimizer.decay": "none", "eval.every": 0, "checkpoint.every": 0}
    if not options.full:
        job |= {"lora.weights": directory / "adapters"}
    words = [program(), "finetune", options.folder, directory / "chats.jsonl", "--steps", options.steps, "--peers", 3]
    words += ["--full"] if options.full else []
    return [*map(str, words), "--dashboard", "off", "--run-dir", str(directory / "run"), *settings(job)]


def on_this_machine(options, directory):
    """Trains over three processes, and kills the second of them halfway."""
    with subprocess.Popen(command(options, directory), cwd=directory, stdout=subprocess.DEVNULL) as process:
        wait(lambda: len(metrics(directory / "run")) >= options.steps // 2, process)
        tasks = pathlib.Path(f"/proc/{process.pid}/task").glob("*/children")
        peers = sorted(int(pid) for task in tasks for pid in task.read_text().split())
        os.kill(peers[1], signal.SIGKILL)


def on_hosts(options, directory):
    """Trains over three hosts, kills the peer on the second of them halfway, and has a fourth one join."""
    run, first = directory / "run", None
    with Hosts(5, options.mbps) as hosts, open(directory / "log", "w") as log:
        broker = hosts.start(0, [*command(options, directory), "--broker"], cwd=directory, stdout=log, stderr=log)
        joined = ticket(run, broker)

        def join(host):
            return hosts.start(host, [program(), "join", joined, "--name", f"home{host}"], stdout=log, stderr=log)

        begun = time.monotonic()
        peers = [join(host) for host in (1, 2, 3)]
        wait(lambda: metrics(run), broker)
        first = time.monotonic() - begun
        wait(lambda: len(metrics(run)) >= options.steps // 2, broker)
        # `ip netns exec` becomes the program that it starts.
        peers[1].kill()
        peers.append(join(4))
        if broker.wait():
            sys.exit((directory / "log").read_text())
        whole = time.monotonic() - begun
        for peer in peers:
            peer.wait()
    told = [line for line in (directory / "log").read_text().splitlines() if "memory" in line or "plan:" in line]
    return {"first_step_after_s": first, "wall_s": whole, "told": told}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--mbps", type=float, help="train over hosts with a line of this rate each")
    parser.add_argument("--full", action="store_true", help="train all weights")
    options = parser.parse_args()
    options.folder = options.folder.resolve()
    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        lines = (json.dumps({"messages": messages}) for messages in chats())
        (directory / "chats.jsonl").write_text("\n".join(lines) + "\n")
        peft_side = None if options.full else train_with_peft(options.folder, directory, options.steps)
        figures = (on_hosts if options.mbps else on_this_machine)(options, directory) or {}
        run = directory / "run"
        ours = [line["loss"] for line in metrics(run)]
        summary = json.loads((run / "summary.json").read_text())
        memory = ("peak_memory_bytes", "predicted_memory_bytes")
        figures |= {
            "steps": len(ours),
            "loss_first_and_last": [ours[0], ours[-1]],
            "step_s": {key: summary[key] for key in ("median_step_s", "predicted_step_s")},
            "bytes_sent_per_step": summary["bytes_sent_per_step"],
            "memory": {peer["name"]: {key: peer[key] for key in memory} for peer in summary["peers"]},
            "incidents": summary["incidents"],
        }
        if peft_side:
            figures |= compared(options.folder, directory, ours, *peft_side)
    print(json.dumps(figures, indent=2))


def compared(folder, directory, ours, losses, peft_step_s):
    """Losses beside PEFT's, and answers before and after, here and by PEFT with the exported adapter."""
    run = directory / "run"

    def chat(model):
        words = [program(), "chat", model, "-m", ASKED, "--temperature", "0", "--tokens", "40", "--json"]
        return json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)["answer"]

    subprocess.run([program(), "export", run, "-o", directory / "out"], check=True, capture_output=True)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, directory / "out").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    asked = [{"role": "user", "content": ASKED}]
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    written = model.generate(**ids, max_new_tokens=40, do_sample=False)[0, ids["input_ids"].shape[1] :]
    return {
        "largest_difference": max(abs(a - b) for a, b in zip(ours, losses, strict=True)),
        "peft_step_s": peft_step_s,
        "before": chat(folder),
        "after": chat(run),
        "peft_after": tokenizer.decode(written, skip_special_tokens=True),
    }


if __name__ == "__main__":
    main()
