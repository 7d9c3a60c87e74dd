"""Many peers in one run: they join, ten of them die, and the run goes on. And the broker's memory over a long run.

    python3 scripts/crowd.py --peers 100
    python3 scripts/crowd.py --peers 2 --steps 10000 --deaths 0

All processes are on this machine, over loopback. It takes a binary from `cargo build --release`, or one that
FUSIONLLM names.
"""

import argparse
import json
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from common import add_results, program, settings, ticket, wait, write_results

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--peers", type=int, default=100)
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--deaths", type=int, default=10, help="peers that are killed half-way")
add_results(parser)
options = parser.parse_args()
BINARY = str(program())

SETTINGS = {
    "model.n_layer": 12,
    "model.n_embd": 16,
    "model.n_head": 2,
    "data.context": 16,
    "train.batch": 4,
    "train.micro_batch": 1,
    "eval.every": 0,
    "checkpoint.every": 0,
    "plan.scheduler": "equal-number",
}


def memory(process, field):
    """Resident memory of a process, in MiB."""
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    return float("nan")


def steps(run):
    metrics = run / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


with tempfile.TemporaryDirectory() as directory:
    run = Path(directory) / "run"
    command = [BINARY, "broker", "--listen", "127.0.0.1:0", "--run-dir", str(run)]
    command += ["--peers", str(options.peers), "--steps", str(options.steps)]
    command += settings(SETTINGS)
    log = open(Path(directory) / "broker.log", "w")
    broker = subprocess.Popen(command, stdout=log, stderr=log)
    environment = {**os.environ, "FUSIONLLM_TICKET": ticket(run, broker)}
    begun = time.monotonic()
    joiners = [
        subprocess.Popen([BINARY, "join", "--name", f"p{i}"], env=environment, stdout=log, stderr=log)
        for i in range(options.peers)
    ]
    try:
        wait(lambda: steps(run) > 0, broker)
        first_s, early = time.monotonic() - begun, memory(broker, "VmRSS:")
        found = {"peers": options.peers, "deaths": options.deaths, "first_step_s": first_s, "after_one_step_mib": early}
        print(f"{options.peers} peers: the first step was done {first_s:.1f} s after the first joiner")
        print(f"broker: {early:.0f} MiB after the first step")
        wait(lambda: steps(run) >= options.steps // 2, broker, 7200)
        found |= {"half_way_steps": steps(run), "half_way_mib": memory(broker, "VmRSS:"), "goes_on_s": None}
        print(f"broker: {found['half_way_mib']:.0f} MiB after {found['half_way_steps']} steps")
        if options.deaths:
            for joiner in joiners[1 :: max(1, options.peers // options.deaths)][: options.deaths]:
                joiner.send_signal(signal.SIGKILL)
            killed, before = time.monotonic(), steps(run)
            goes_on = lambda: (Path(directory) / "broker.log").read_text().count("training goes on")
            earlier = goes_on()
            wait(lambda: goes_on() > earlier, broker)
            found["goes_on_s"] = time.monotonic() - killed
            print(f"{options.deaths} peers killed at step {before}; training went on {found['goes_on_s']:.1f} s later")
        peak = 0.0
        while broker.poll() is None:
            try:
                peak = max(peak, memory(broker, "VmHWM:"))
            except FileNotFoundError:
                break
            time.sleep(0.1)
        if broker.wait() != 0:
            raise SystemExit((Path(directory) / "broker.log").read_text()[-2000:])
        print(f"broker: at most {peak:.0f} MiB over {steps(run)} steps")
        write_results(options.results, found | {"steps": steps(run), "peak_mib": peak})
        incidents = json.loads((run / "summary.json").read_text())["incidents"]
        kinds = [incident["kind"] for incident in incidents]
        print("incidents:", ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds))) or "none")
        for line in (run / "metrics.jsonl").read_text().splitlines()[-1:]:
            print(f"last step: {json.loads(line)['step']}, loss {json.loads(line)['loss']:.4f}")
    finally:
        for process in [broker, *joiners]:
            process.kill()
            process.wait()
