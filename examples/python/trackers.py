"""Shows the curves of a run in Trackio or in Weights & Biases, by one line: both have `init`, `log` and `finish`.

    pip install fusionllm trackio     # or wandb
    python trackers.py                # or: python trackers.py wandb
"""

import importlib
import sys

import fusionllm

tracker = importlib.import_module(sys.argv[1] if len(sys.argv) > 1 else "trackio")
job = {
    "model": {"family": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2},
    "data": {"kind": "text", "context": 32},  # a text that is built in
    "train": {"steps": 20, "batch": 8, "optimizer": {"name": "adamw", "lr": 3e-3}},
    "eval": {"every": 10},
}


def log(step: fusionllm.Step) -> None:
    tracker.log({name: value for name, value in vars(step).items() if value is not None}, step=step.step)


tracker.init(project="fusionllm", config=job)
fusionllm.train(job, peers=2, on_step=log)
tracker.finish()
