"""A start from weights over slow lines, and a resume: how long each takes, beside what the lines allow.

    python3 scripts/slow_start.py --embd 1280 --layers 12 --mbps 8

Broker and joiners stand in network namespaces, each joiner behind a line of its own that the kernel limits in both
directions. It takes root, iproute2 and a binary from `cargo build --release`, or one that FUSIONLLM names.
`--embd 1280 --layers 12` is 1 GB.
"""

import argparse
import subprocess
import tempfile
import time
from pathlib import Path

from common import Hosts, add_results, metrics, program, settings, ticket, write_results

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--embd", type=int, default=256)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--mbps", type=float, default=8.0, help="rate of each joiner's line")
parser.add_argument("--peers", type=int, default=3)
add_results(parser)
options = parser.parse_args()
BINARY = str(program())


def train(hosts, run, arguments, what):
    """Runs a broker and its joiners. Prints and returns the seconds to the first step and to the end."""
    log = run.with_suffix(".log")
    with open(log, "a") as out:
        out.write(f"--- {what}\n")
    before = log.read_text().count("\n")
    done = len(metrics(run))
    (run / "ticket").unlink(missing_ok=True)
    with open(log, "a") as out:
        broker = hosts.start(0, [BINARY, "broker", "--peers", options.peers, *arguments], stdout=out, stderr=out)
    joined = ticket(run, broker)
    begun = time.monotonic()
    joiners = [
        hosts.start(i, [BINARY, "join", joined, "--name", f"p{i}"], stderr=subprocess.DEVNULL)
        for i in range(1, options.peers + 1)
    ]
    first = None
    while broker.poll() is None:
        if first is None and len(metrics(run)) > done:
            first = time.monotonic() - begun
        time.sleep(0.1)
    took = time.monotonic() - begun
    for joiner in joiners:
        joiner.wait()
    if broker.returncode or first is None:
        raise SystemExit(log.read_text())
    lines = log.read_text().splitlines()[before:]
    progress = [line for line in lines if line.startswith("loading: ")]
    print(f"{what}: first step after {first:.0f} s, over after {took:.0f} s, {len(progress)} lines of progress")
    if progress:
        print(f"  {progress[0]}  ...  {progress[-1]}")
    return {"first_step_s": first, "over_s": took, "progress_lines": len(progress)}


def size(directory):
    newest = max((directory / "checkpoints").iterdir(), key=lambda path: path.stat().st_mtime)
    return newest, sum(file.stat().st_size for file in newest.iterdir())


with tempfile.TemporaryDirectory() as directory:
    directory = Path(directory)
    given = {
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
    given = settings(given)
    weights = directory / "weights"
    quiet = {"check": True, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run([BINARY, "train", "--peers", "1", "--steps", "1", "--run-dir", str(weights), *given], **quiet)
    checkpoint, total = size(weights)
    file = checkpoint / "model.safetensors"
    least = file.stat().st_size * 8 / (options.mbps * 1e6) / options.peers
    print(f"weights of {file.stat().st_size / 1e6:.0f} MB; "
          f"{options.peers} lines of {options.mbps} Mbps need {least:.0f} s")
    with Hosts(options.peers + 1, options.mbps) as hosts:
        run = directory / "run"
        started = train(hosts, run, [
            "--steps", "3", "--run-dir", str(run), f"--set=model.weights={file}", *given], "start")
        resumed = train(hosts, run, ["--steps", "6", "--resume", str(run)], "resume")
        print("losses:", " ".join(f"{line['loss']:.4f}" for line in metrics(run)))
    write_results(options.results, {
        "weights_bytes": file.stat().st_size, "mbps": options.mbps, "lines_need_s": least, "start": started,
        "resume": resumed})
