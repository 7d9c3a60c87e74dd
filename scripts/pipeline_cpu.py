#!/usr/bin/env python3
"""Compares the processor time of one training step on one peer and on a pipeline of four peers over QUIC.

    cargo build --release
    python3 scripts/pipeline_cpu.py [JOB.toml] [--set section.key=value ...]

All peers run on this machine, with one thread each. The default job has GPT-2 small's width and heads at 4 layers, a
byte vocabulary, and batch 4 x 256 in micro-batches of 1. Each figure is the difference between a longer and a shorter
run, which removes the cost of starting.

FUSIONLLM names the program, by default target/release/fusionllm.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile

from common import ROOT, add_results, machine, program, summary, write_results

MODEL = ["n_layer=4", "n_embd=768", "n_head=12", "n_positions=256", "resid_pdrop=0", "embd_pdrop=0", "attn_pdrop=0"]
SHORT, LONG = 3, 9


def processor_seconds(binary, args, peers, steps, directory):
    """User and system time of a run with all its peers."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [binary, "train", *args, f"--peers={peers}", f"--steps={steps}", f"--run-dir={directory}"]
    # With one core to itself, the single peer computes on one thread, as each of the four does.
    pin = (lambda: os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])) if peers == 1 else None
    ran = subprocess.run(
        command, cwd=ROOT, preexec_fn=pin, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if ran.returncode:
        sys.exit(ran.stderr)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", nargs="?")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--rounds", type=int, default=3)
    add_results(parser)
    options = parser.parse_args()
    args = [options.job] if options.job else [
        *(f"--set=model.{m}" for m in MODEL), "--set=data.context=256", "--set=train.batch=4",
        "--set=train.micro_batch=1",
    ]
    args += ["--set=eval.every=0"]
    args += [f"--set={s}" for s in options.set]
    binary = program()
    seconds = {1: [], 4: []}
    with tempfile.TemporaryDirectory() as scratch:
        for round in range(options.rounds):
            for peers in seconds:
                run = lambda steps: processor_seconds(binary, args, peers, steps, f"{scratch}/{round}-{peers}-{steps}")
                short = run(SHORT)
                seconds[peers].append((run(LONG) - short) / (LONG - SHORT))
    one, four = (statistics.median(s) for s in seconds.values())
    print(machine())
    print(f"processor time of a step, median of {options.rounds}: "
          f"one peer {one:.3f} s, four {four:.3f} s, ratio {four / one:.2f}")
    ratios = [more / alone for alone, more in zip(*seconds.values())]
    write_results(options.results, {"rounds": options.rounds, "one_s": one, "four_s": four, "ratio": summary(ratios)})


if __name__ == "__main__":
    main()
