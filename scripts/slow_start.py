"""A start from weights over slow lines, and a resume: how long each takes, beside what the lines allow.

    python3 scripts/slow_start.py --embd 1280 --layers 12 --mbps 8

Broker and joiners stand in network namespaces, each joiner behind a line of its own that the kernel limits in both
directions. It takes root, iproute2 and a binary from `cargo build --release`. `--embd 1280 --layers 12` is 1 GB.
"""

import argparse
import json
import os
import re
import subprocess
import tempfile
import time
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--embd", type=int, default=256)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--mbps", type=float, default=8.0, help="rate of each joiner's line")
parser.add_argument("--peers", type=int, default=3)
parser.add_argument("--binary", default="target/release/fusionllm")
options = parser.parse_args()
TAG = f"ss{os.getpid() % 10000}"
BINARY = str(Path(options.binary).resolve())


def ip(arguments):
    subprocess.run(["ip", *arguments.split()], check=True)


def make_hosts():
    ip(f"netns add {TAG}s")
    ip(f"-n {TAG}s link add br0 type bridge")
    ip(f"-n {TAG}s link set br0 up")
    for i in range(options.peers + 1):
        host = f"{TAG}h{i}"
        ip(f"netns add {host}")
        ip(f"-n {host} link set lo up")
        ip(f"-n {host} link add eth0 type veth peer name p{i} netns {TAG}s")
        ip(f"-n {host} addr add 10.78.0.{i + 1}/24 dev eth0")
        ip(f"-n {host} link set eth0 up")
        ip(f"-n {TAG}s link set p{i} master br0")
        ip(f"-n {TAG}s link set p{i} up")
        if i:
            for namespace, device in ((host, "eth0"), (f"{TAG}s", f"p{i}")):
                bucket = f"rate {options.mbps}mbit burst 16kb latency 100ms"
                command = f"tc -n {namespace} qdisc add dev {device} root tbf {bucket}"
                subprocess.run(command.split(), check=True)


def remove_hosts():
    for name in ["s"] + [f"h{i}" for i in range(options.peers + 1)]:
        subprocess.run(["ip", "netns", "del", TAG + name], stderr=subprocess.DEVNULL)


def start(host, arguments, **kwargs):
    return subprocess.Popen(["ip", "netns", "exec", f"{TAG}h{host}", BINARY, *arguments], **kwargs)


def train(run, arguments, what):
    """Runs a broker and its joiners. Prints the seconds to the first step, to the last one and to the end."""
    log = run.with_suffix(".log")
    with open(log, "a") as out:
        out.write(f"--- {what}\n")
    before = log.read_text().count("\n")
    steps = lambda: (run / "metrics.jsonl").read_bytes().count(b"\n") if (run / "metrics.jsonl").exists() else 0
    done = steps()
    if (run / "ticket").exists():
        (run / "ticket").unlink()
    with open(log, "a") as out:
        broker = start(0, ["broker", "--peers", str(options.peers), *arguments], stdout=out, stderr=out)
    while not ((run / "ticket").exists() and (run / "ticket").read_text().endswith("\n")):
        if broker.poll() is not None:
            raise SystemExit(log.read_text())
        time.sleep(0.05)
    ticket = (run / "ticket").read_text().strip()
    begun = time.monotonic()
    joiners = [
        start(i, ["join", ticket, "--name", f"p{i}"], stderr=subprocess.DEVNULL) for i in range(1, options.peers + 1)
    ]
    first = None
    while broker.poll() is None:
        if first is None and steps() > done:
            first = time.monotonic() - begun
        time.sleep(0.1)
    took = time.monotonic() - begun
    for joiner in joiners:
        joiner.wait()
    if broker.returncode or first is None:
        raise SystemExit(log.read_text())
    lines = log.read_text().splitlines()[before:]
    progress = [line for line in lines if re.match(r"loading: ", line)]
    print(f"{what}: first step after {first:.0f} s, over after {took:.0f} s, {len(progress)} lines of progress")
    if progress:
        print(f"  {progress[0]}  ...  {progress[-1]}")


def size(directory):
    newest = max((directory / "checkpoints").iterdir(), key=lambda path: path.stat().st_mtime)
    return newest, sum(file.stat().st_size for file in newest.iterdir())


with tempfile.TemporaryDirectory() as directory:
    directory = Path(directory)
    settings = {
        "model.n_layer": options.layers,
        "model.n_embd": options.embd,
        "model.n_head": 4,
        "data.context": 16,
        "train.batch": 2,
        "train.micro_batch": 1,
        "train.optimizer.name": "sgd",
        "eval.every": 0,
        "checkpoint.every": 0,
        "plan.scheduler": "equal-compute",
    }
    settings = [f"--set={key}={value}" for key, value in settings.items()]
    weights = directory / "weights"
    quiet = {"check": True, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run([BINARY, "train", "--peers", "1", "--steps", "1", "--run-dir", str(weights), *settings], **quiet)
    checkpoint, total = size(weights)
    file = checkpoint / "model.safetensors"
    least = file.stat().st_size * 8 / (options.mbps * 1e6) / options.peers
    print(f"weights of {file.stat().st_size / 1e6:.0f} MB; {options.peers} lines of {options.mbps} Mbps need {least:.0f} s")
    make_hosts()
    try:
        run = directory / "run"
        train(run, ["--steps", "3", "--run-dir", str(run), f"--set=model.weights={file}", *settings], "start")
        train(run, ["--steps", "6", "--resume", str(run)], "resume")
        losses = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        print("losses:", " ".join(f"{loss:.4f}" for loss in losses))
    finally:
        remove_hosts()
