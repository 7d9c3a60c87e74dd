#!/usr/bin/env python3
"""Compares the processor time of one training step on one peer and on a pipeline of four, a thread a peer, over QUIC on this machine.

    python3 scripts/pipeline_cpu.py [JOB.toml] [--set section.key=value ...]

Without a job, GPT-2 small's width and heads at 4 layers with a byte vocabulary, batch 4 x 256 in micro-batches of 1. Each figure is
the difference between a longer and a shorter run, so that what starting takes falls out.
"""

import argparse
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
MODEL = ["n_layer=4", "n_embd=768", "n_head=12", "n_positions=256", "resid_pdrop=0", "embd_pdrop=0", "attn_pdrop=0"]
SHORT, LONG = 3, 9


def processor_seconds(binary, args, peers, steps, directory):
    """User and system time of a run and of all its peers."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [binary, "train", *args, f"--peers={peers}", f"--steps={steps}", "--set=eval.every=0", f"--run-dir={directory}"]
    # With one core to itself, the single peer computes on one thread, as each of the four does.
    pin = (lambda: os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])) if peers == 1 else None
    ran = subprocess.run(command, cwd=ROOT, preexec_fn=pin, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if ran.returncode:
        sys.exit(ran.stderr)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", nargs="?")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--binary", help="instead of building one")
    options = parser.parse_args()
    args = [options.job] if options.job else [
        *(f"--set=model.{m}" for m in MODEL), "--set=data.context=256", "--set=train.batch=4", "--set=train.micro_batch=1",
    ]
    args += [f"--set={s}" for s in options.set]
    binary = options.binary
    if not binary:
        subprocess.run(["cargo", "build", "-q", "--release"], cwd=ROOT, check=True)
        binary = os.path.join(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"), "release", "fusionllm")
    seconds = {1: [], 4: []}
    with tempfile.TemporaryDirectory() as scratch:
        for round in range(options.rounds):
            for peers in seconds:
                run = lambda steps: processor_seconds(binary, args, peers, steps, f"{scratch}/{round}-{peers}-{steps}")
                short = run(SHORT)
                seconds[peers].append((run(LONG) - short) / (LONG - SHORT))
    one, four = (statistics.median(s) for s in seconds.values())
    print(f"processor time of a step, median of {options.rounds}: one peer {one:.3f} s, four {four:.3f} s, ratio {four / one:.2f}")


if __name__ == "__main__":
    main()
