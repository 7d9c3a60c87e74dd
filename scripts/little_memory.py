#!/usr/bin/env python3
"""Trains the same steps with enough memory and with little, where the plan offloads or recomputes what does not fit.

    cargo build --release && python3 scripts/little_memory.py [--steps 6] [--rounds 1] [--small] [--results FILE]

One broker and one joiner over loopback for each row. The joiner offers the row's memory (`join --memory`). A row has
the predicted and the measured step, the largest memory that training allocated, and the loss of the last step, which
must not depend on the memory. With several rounds, all rows are run in turns, and a row has the medians. A joiner
measures its machine anew in each run, so predictions differ, too.

The models are GPT-2s: 12 layers of width 512 at 64 tokens, where optimizer state and parameters fill the memory, and 12
layers of width 256 at 512 tokens, where activations do. --small takes a tiny one, to try the script.

FUSIONLLM names the program, by default target/release/fusionllm.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import tempfile

from common import add_results, machine, program, settings, ticket, write_results

WIDE = {"model.n_layer": 12, "model.n_embd": 512, "model.n_head": 8, "data.context": 64, "train.batch": 4,
        "train.micro_batch": 2}
LONG = {"model.n_layer": 12, "model.n_embd": 256, "model.n_head": 8, "model.n_positions": 512, "data.context": 512,
        "train.batch": 8, "train.micro_batch": 4}
SMALL = {"model.n_layer": 2, "model.n_embd": 64, "model.n_head": 2, "data.context": 16, "train.batch": 2,
         "train.micro_batch": 1}
ROWS = [
    ("width 512, 64 tokens", WIDE, ["8 GiB", "500 MiB", "300 MiB", "160 MiB"]),
    ("width 256, 512 tokens", LONG, ["8 GiB", "500 MiB", "380 MiB", "300 MiB"]),
]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--small", action="store_true", help="a tiny model with enough memory alone")
    add_results(parser)
    args = parser.parse_args()
    print(f"{machine()}\n")
    print("| model | memory | predicted, s | measured, s | allocated, MB | last loss |\n"
          "| --- | --- | --- | --- | --- | --- |")
    models = [("width 64, 16 tokens", SMALL, ["8 GiB"])] if args.small else ROWS
    jobs = [(model, job, limit) for model, job, limits in models for limit in limits]
    runs = {(model, limit): [] for model, _, limit in jobs}
    rows = []
    for turn in range(args.rounds):
        for model, job, limit in jobs:
            runs[model, limit].append(train(job, limit, args.steps))
            if turn + 1 < args.rounds:
                continue
            of = {key: statistics.median(run[key] for run in runs[model, limit])
                  for key in ("predicted_s", "measured_s", "peak_bytes")}
            rows.append(row := {"model": model, "memory": limit} | of | {"loss": runs[model, limit][-1]["loss"]})
            print(f"| {model} | {limit} | {row['predicted_s']:.3f} | {row['measured_s']:.3f} "
                  f"| {row['peak_bytes'] / 1e6:.0f} | {row['loss']} |", flush=True)
    write_results(args.results, {"steps": args.steps, "rows": rows})


def train(job, memory, steps):
    """One run of one peer with so much memory."""
    with tempfile.TemporaryDirectory() as directory:
        run, log = pathlib.Path(directory) / "run", open(pathlib.Path(directory) / "log", "w")
        given = settings(job | {"plan.scheduler": "op-fence", "eval.every": 0, "checkpoint.every": 0})
        command = [program(), "broker", "--listen", "127.0.0.1:0", "--peers", "1", "--steps", str(steps)]
        broker = subprocess.Popen([*command, "--run-dir", run, *given], stdout=log, stderr=log)
        joiner = None
        try:
            environment = {**os.environ, "FUSIONLLM_TICKET": ticket(run, broker)}
            joiner = subprocess.Popen([program(), "join", "--memory", memory], env=environment, stdout=log, stderr=log)
            if broker.wait(1200):
                raise SystemExit(pathlib.Path(log.name).read_text()[-3000:])
        finally:
            for process in filter(None, (broker, joiner)):
                process.kill()
                process.wait()
        summary = json.loads((run / "summary.json").read_text())
        return {"predicted_s": summary["predicted_step_s"], "measured_s": summary["median_step_s"],
                "peak_bytes": summary["peers"][0]["peak_memory_bytes"],
                # As text, because every digit counts.
                "loss": repr(summary["loss_last"])}


if __name__ == "__main__":
    main()
