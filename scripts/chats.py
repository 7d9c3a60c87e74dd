"""How long a large file of chats takes to open and to train on, and how much memory it needs.

    cargo build --release
    python3 scripts/chats.py [--megabytes 1000]

It writes conversations of a few hundred to a few thousand bytes to a temporary directory. `fusionllm data show` prints
one sample of them. A broker then trains a small model on them with one peer, once to the end, and once killed on the way
and started again. It prints one JSON object: the time and the largest resident memory of `data show`, those of the broker
until its first step, and whether both runs had the same losses. It needs the program as `scripts/common.py` finds it, and
Linux, which says what a process has in memory.
"""

import argparse
import json
import pathlib
import random
import resource
import subprocess
import tempfile
import time

from common import metrics, program, ticket, wait

STEPS, KILLED_AT = 8, 3
JOB = """
[model]
n_layer = 2
n_embd = 64
n_head = 2
[data]
kind = "chats"
files = ["chats.jsonl"]
tokenizer = "gpt2"
template = "chat.jinja"
context = 256
[train]
steps = 8
batch = 4
"""

TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{% generation %}{{ m.content }}<|im_end|>
{% endgeneration %}{% endfor %}"""


def write(path, megabytes):
    """Writes conversations, and returns their number."""
    rng = random.Random(1)
    words = ["the", "model", "answers", "größer", "as", "it", "was", "asked,", "\n", "and", '"quotes"', "2 + 2"]
    text = " ".join(rng.choice(words) for _ in range(1 << 16))
    number = written = 0
    with path.open("w", encoding="utf-8") as file:
        while written < megabytes * 1_000_000:
            messages = []
            for turn in range(2 * rng.randint(1, 3)):
                start = rng.randrange(len(text) - 800)
                content = text[start : start + rng.randint(20, 800)]
                messages.append({"role": ["user", "assistant"][turn % 2], "content": content})
            line = json.dumps({"id": number, "messages": messages}, ensure_ascii=False) + "\n"
            written += len(line.encode())
            number += 1
            file.write(line)
    return number


def resident_mb(process):
    """The most that a process has had in memory."""
    status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e6


def train(directory, run, killed):
    """Losses of a run, with the seconds and megabytes of its broker until the first step."""
    broker = [program(), "broker", "--peers", "1"]
    with (directory / f"{run}.log").open("w") as log:
        started = time.monotonic()
        process = subprocess.Popen([*broker, "job.toml", "--run-dir", run], cwd=directory, stderr=log, stdout=log)
        peer = subprocess.Popen(
            [program(), "join", ticket(directory / run, process)], cwd=directory, stderr=log, stdout=subprocess.DEVNULL
        )
        wait(lambda: metrics(directory / run), process)
        first_step_s, mb = time.monotonic() - started, resident_mb(process)
        resumed_s = None
        if killed:
            wait(lambda: len(metrics(directory / run)) >= KILLED_AT, process)
            process.kill()
            process.wait()
            done, started = len(metrics(directory / run)), time.monotonic()
            process = subprocess.Popen([*broker, "--resume", run], cwd=directory, stderr=log, stdout=log)
            wait(lambda: len(metrics(directory / run)) > done, process)
            resumed_s = time.monotonic() - started
        if process.wait() != 0 or peer.wait() != 0:
            raise SystemExit((directory / f"{run}.log").read_text())
    losses = [step["loss"] for step in metrics(directory / run)]
    return {"first_step_s": first_step_s, "broker_mb": mb, "resumed_s": resumed_s, "losses": losses}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        directory = pathlib.Path(directory)
        (directory / "chat.jinja").write_text(TEMPLATE)
        (directory / "job.toml").write_text(JOB)
        conversations = write(directory / "chats.jsonl", options.megabytes)
        command = [program(), "data", "show", directory / "job.toml", "--samples", "1", "--json"]
        started = time.monotonic()
        shown = subprocess.run(command, check=True, capture_output=True, text=True)
        took = time.monotonic() - started
        resident = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e6
        whole, cut = train(directory, "whole", False), train(directory, "cut", True)
    result = {
        "conversations": conversations,
        "megabytes": options.megabytes,
        "seconds": round(took, 2),
        "resident_mb": round(resident, 1),
        "first_step_s": round(whole["first_step_s"], 1),
        "broker_mb": round(whole["broker_mb"], 1),
        "resumed_s": round(cut["resumed_s"], 1),
        "same_losses": whole["losses"] == cut["losses"] and len(whole["losses"]) == STEPS,
        "data": json.loads(shown.stdout)["data"],
    }
    print(json.dumps(result, indent=2))


main()
