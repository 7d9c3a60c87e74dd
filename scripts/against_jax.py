#!/usr/bin/env python3
"""Times the same training step with JAX's worker and as one jitted function of plain JAX, and prints the ratio.

    pip install jax
    python3 scripts/against_jax.py [MODEL] [--steps 10]

Models, float32, trained with AdamW: `gpt2` and `gpt2-narrow` of scripts/against_pytorch.py. Plain JAX has the whole
step in one `jax.jit`, with parameters and optimizer state donated, and JAX's own `dot_product_attention`.

Each side runs in a process of its own, on the same cores. They take turns step by step.
"""

import argparse
import json
import os
import pathlib
import sys
import time

from against_pytorch import Side, memory
from common import ROOT, add_results, benchmark, machine, spread, write_results

# Width, heads, layers, vocabulary, positions, batch.
MODELS = {"gpt2": (768, 12, 4, 50257, 1024, (4, 256)), "gpt2-narrow": (256, 4, 8, 256, 128, (2, 128))}


def serve(model):
    """Runs a step for every line on standard input, as the benchmark `step` does with --serve."""
    import jax
    import jax.numpy as jnp

    before = memory("VmRSS")
    jax.config.update("jax_default_matmul_precision", "highest")
    width, heads, layers, vocabulary, positions, batch = MODELS[model]
    keys = iter(jax.random.split(jax.random.key(1), 100))
    normal = lambda *shape: 0.02 * jax.random.normal(next(keys), shape)
    linear = lambda i, o: {"w": normal(i, o), "b": jnp.zeros(o)}
    norm = lambda: {"w": jnp.ones(width), "b": jnp.zeros(width)}
    block = lambda: {
        "ln_1": norm(), "attn": linear(width, 3 * width), "proj": linear(width, width),
        "ln_2": norm(), "up": linear(width, 4 * width), "down": linear(4 * width, width),
    }
    params = {
        "wte": normal(vocabulary, width), "wpe": normal(positions, width), "ln_f": norm(),
        "h": [block() for _ in range(layers)],
    }
    tokens, labels = (jax.random.randint(next(keys), batch, 0, vocabulary) for _ in range(2))

    def apply(p, x):
        return x @ p["w"] + p["b"]

    def layer_norm(p, x):
        x = x - x.mean(-1, keepdims=True)
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * p["w"] + p["b"]

    def loss(params):
        x = params["wte"][tokens] + params["wpe"][: tokens.shape[1]]
        for p in params["h"]:
            q, k, v = jnp.split(apply(p["attn"], layer_norm(p["ln_1"], x)), 3, axis=2)
            q, k, v = (h.reshape(*batch, heads, -1) for h in (q, k, v))
            y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
            x = x + apply(p["proj"], y.reshape(*batch, width))
            x = x + apply(p["down"], jax.nn.gelu(apply(p["up"], layer_norm(p["ln_2"], x)), approximate=True))
        logits = layer_norm(params["ln_f"], x) @ params["wte"].T
        chosen = jnp.take_along_axis(logits, labels[..., None], axis=2)[..., 0]
        return (jax.nn.logsumexp(logits, axis=2) - chosen).mean()

    def adamw(t, p, g, m, v):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        root = jnp.sqrt(v / (1 - 0.999**t)) + 1e-8
        return p * (1 - 1e-4 * 0.01) - 1e-4 * (m / (1 - 0.9**t)) / root, m, v

    def step(t, *state):
        value, grads = jax.value_and_grad(loss)(state[0])
        leaves = zip(*(jax.tree.leaves(tree) for tree in (state[0], grads, *state[1:])))
        updated = zip(*(adamw(t, *leaf) for leaf in leaves))
        return value, *(jax.tree.unflatten(jax.tree.structure(grads), leaves) for leaves in updated)

    compiled = jax.jit(step, donate_argnums=(1, 2, 3))
    zeros = lambda: jax.tree.map(jnp.zeros_like, params)
    state = params, zeros(), zeros()
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    print(json.dumps({"parameters": count, "before_bytes": before}), flush=True)
    for t, _ in enumerate(sys.stdin, 1):
        started = time.perf_counter()
        value, *state = compiled(float(t), *state)
        jax.block_until_ready(state)
        took = time.perf_counter() - started
        print(json.dumps({"step_s": took, "loss": float(value), "peak_bytes": memory("VmHWM")}), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", choices=MODELS, default="gpt2")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    add_results(parser)
    args = parser.parse_args()
    if args.serve:
        return serve(args.model)
    environment = os.environ | {"PYTHONPATH": str(ROOT / "python")}
    worker = ["--worker", f"{sys.executable} -m fusionllm_jax"]
    ours = Side("JAX's worker", [*benchmark("fusionllm-exec", "step"), args.model, "--serve", *worker],
                environment, "cpu")
    script = [sys.executable, pathlib.Path(__file__).resolve(), args.model, "--serve"]
    theirs = Side("plain JAX, one jit", script, environment, "cpu")
    if ours.hello["parameters"] != theirs.hello["parameters"]:
        sys.exit(f"not the same model: {ours.hello['parameters']} and {theirs.hello['parameters']} parameters")
    for side in (ours, theirs):
        side.step()  # compiles
        side.steps.clear()
    for _ in range(args.steps):
        for side in (ours, theirs):
            side.step()
    print(f"{machine()}\n{args.model}, {ours.hello['parameters'] / 1e6:.1f} M parameters, {args.steps} steps in turn\n")
    print("| row | step, s | worker / row: medians of the turns' ratios (range) |")
    print("| --- | --- | --- |")
    rows = [side.figures(ours, worker=True) for side in (ours, theirs)]
    for side, row in zip((ours, theirs), rows):
        ratios = [a["step_s"] / b["step_s"] for a, b in zip(ours.steps, side.steps)]
        print(f"| {row['row']} | {row['step_s']:.4f} | {spread(ratios)} |")
        side.close()
    write_results(args.results, {
        "model": args.model, "precision": "float32", "parameters": ours.hello["parameters"], "steps": args.steps,
        "worker": True, "device": "cpu", "rows": rows})


if __name__ == "__main__":
    main()
