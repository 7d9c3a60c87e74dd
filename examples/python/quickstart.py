"""Trains a small GPT-2 over two peers: one computes with the program's own kernels, the other with NumPy.

    pip install fusionllm
    python quickstart.py
"""

import fusionllm

job = {
    "model": {"family": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2},
    "data": {"kind": "text", "context": 32},  # a text that is built in
    "train": {"steps": 20, "batch": 8, "optimizer": {"name": "adamw", "lr": 3e-3}},
}


def show(step: fusionllm.Step) -> None:
    if step.step % 5 == 0:
        print(f"step {step.step}: loss {step.loss:.3f}")


run = fusionllm.train(job, peers=2, backends=["cpu"], workers=[fusionllm.worker("numpy")], on_step=show)
print(f"{run.summary['bytes_sent_per_step'] / 1024:.0f} KiB sent in each step")

weights = run.weights()
print(f"{len(weights)} tensors, transformer.wte.weight {list(weights['transformer.wte.weight'].shape)}")
