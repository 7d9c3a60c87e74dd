#!/usr/bin/env python3
"""Times the same training step here and in PyTorch, and prints the ratios and both memory figures.

    pip install torch
    python3 scripts/against_pytorch.py [MODEL] [--steps 10] [--threads 2] [--variants LIST] [--worker CMD]
        [--device cuda] [--bf16] [--results FILE]

Models, in float32 without TF32, trained with AdamW:

    gpt2         GPT-2 small's width, heads and vocabulary at 4 layers, batch 4 x 256, no dropout, tied embeddings
    gpt2-small   all 12 layers of it, batch 4 x 1024, for a GPU
    gpt2-narrow  8 layers of width 256 with 4 heads and a byte vocabulary, batch 2 x 128, no dropout, tied embeddings
    resnet50     ResNet-50 on 4 images of 224 x 224

With --bf16, both sides compute products in bf16: PyTorch's by its autocast, this side's as in a run with
`precision = "bf16"`. Parameters and the optimizer's state remain float32.

With --worker, this side computes with a worker, such as --worker "python -m fusionllm_torch". --device is where
PyTorch's side computes.

PyTorch has a row for each of its flags: AdamW with fused=True, torch.compile, and for the CNN channels_last. The last
line compares with its fastest row. --variants takes some of the rows, separated by commas. PyTorch's gradients are set
to None before the forward pass, which is its fastest way to clear them.

Each row runs in a process of its own, with the same number of threads. The rows take turns step by step, so that a
change of the machine's speed affects all of them. Peak memory is the process's largest resident set. The second
memory figure leaves out what was resident before the model existed: the interpreter and libtorch on PyTorch's side.
With --worker, the processes differ too much for that. On CUDA, the column then has the device's memory that the row's
first two steps took: what the allocator holds, and about half a gigabyte for CUDA itself.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

from common import ROOT, add_results, benchmark, machine, spread, summary, write_results

# Variants of PyTorch's step for each model: flags joined by a plus.
VARIANTS = {
    "gpt2": ["default", "fused", "fused+compile"],
    "gpt2-small": ["default", "fused", "fused+compile"],
    "gpt2-narrow": ["default", "fused", "fused+compile"],
    "resnet50": ["default", "fused", "channels_last", "channels_last+fused", "channels_last+fused+compile"],
}


def block(torch, width, heads):
    """A layer of GPT-2, with tanh GELU."""
    from torch import nn
    from torch.nn import functional as F

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.attn, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            b, t, _ = x.shape
            q, k, v = (h.view(b, t, heads, -1).transpose(1, 2) for h in self.attn(self.ln_1(x)).split(width, dim=2))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.proj(y.transpose(1, 2).reshape(b, t, width))
            return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))

    return Block()


def gpt2(torch, width=768, heads=12, layers=4, vocabulary=50257, positions=1024, batch=(4, 256)):
    from torch import nn
    from torch.nn import functional as F

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
            self.h = nn.Sequential(*[block(torch, width, heads) for _ in range(layers)])
            self.ln_f, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
            self.wte.weight.data.normal_(0, 0.02)
            self.head.weight = self.wte.weight

        def forward(self, tokens, labels):
            x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
            return F.cross_entropy(self.head(self.ln_f(self.h(x))).flatten(0, 1), labels.flatten())

    draw = lambda: torch.randint(0, vocabulary, batch)
    return Model(), (draw(), draw())


def gpt2_small(torch):
    return gpt2(torch, layers=12, batch=(4, 1024))


def gpt2_narrow(torch):
    return gpt2(torch, width=256, heads=4, layers=8, vocabulary=256, positions=128, batch=(2, 128))


def resnet50(torch):
    from torch import nn
    from torch.nn import functional as F

    class Bottleneck(nn.Module):
        def __init__(self, inside, width, stride):
            super().__init__()
            conv = lambda i, o, k, s: [nn.Conv2d(i, o, k, s, k // 2, bias=False), nn.BatchNorm2d(o)]
            relu = lambda: nn.ReLU(inplace=True)
            first, second = conv(inside, width, 1, 1), conv(width, width, 3, stride)
            self.main = nn.Sequential(*first, relu(), *second, relu(), *conv(width, 4 * width, 1, 1))
            changes = stride > 1 or inside != 4 * width
            self.short = nn.Sequential(*conv(inside, 4 * width, 1, stride)) if changes else None

        def forward(self, x):
            return F.relu(self.main(x) + (x if self.short is None else self.short(x)))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
            layers.append(nn.MaxPool2d(3, 2, 1))
            inside = 64
            for width, blocks in zip((64, 128, 256, 512), (3, 4, 6, 3)):
                for i in range(blocks):
                    layers.append(Bottleneck(inside, width, 2 if i == 0 and width > 64 else 1))
                    inside = 4 * width
            self.body, self.fc = nn.Sequential(*layers), nn.Linear(inside, 1000)

        def forward(self, images, labels):
            return F.cross_entropy(self.fc(self.body(images).mean((2, 3))), labels)

    return Model(), (torch.randn(4, 3, 224, 224), torch.randint(0, 1000, (4,)))


def memory(key):
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024


def serve(model, variant, threads, device, bf16):
    """Runs a step for every line on standard input, as the benchmark `step` does with --serve."""
    import torch

    torch.set_num_threads(threads)
    torch.manual_seed(1)
    before = memory("VmRSS")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    models = {"gpt2": gpt2, "gpt2-small": gpt2_small, "gpt2-narrow": gpt2_narrow, "resnet50": resnet50}
    model, batch = models[model](torch)
    model, batch = model.to(device), tuple(x.to(device) for x in batch)
    if "channels_last" in variant:
        model = model.to(memory_format=torch.channels_last)
        batch = tuple(x.to(memory_format=torch.channels_last) if x.dim() == 4 else x for x in batch)
    forward = torch.compile(model) if "compile" in variant else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused="fused" in variant)
    print(json.dumps({"parameters": sum(p.numel() for p in model.parameters()), "before_bytes": before}), flush=True)
    for _ in sys.stdin:
        started = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=bf16):
            loss = forward(*batch)
        loss.backward()
        optimizer.step()
        if device != "cpu":
            torch.cuda.synchronize()
        took = time.perf_counter() - started
        print(json.dumps({"step_s": took, "loss": loss.item(), "peak_bytes": memory("VmHWM")}), flush=True)


def free_memory(device):
    """What is free of a CUDA device's memory, in bytes; 0 for another device."""
    if not device.startswith("cuda"):
        return 0
    import torch

    return torch.cuda.mem_get_info(device)[0]


class Side:
    """One row: a process that runs a step whenever it is asked to. It has run two when this returns."""

    def __init__(self, name, command, environment, device):
        free = free_memory(device)
        self.name = name
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT)
        self.hello = self.answer()
        self.steps = []
        for _ in range(2):  # they fill caches and pools
            self.step()
        self.steps.clear()
        self.device_bytes = free - free_memory(device)

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{self.process.args[0]} ended with status {self.process.wait()}")
        return json.loads(line)

    def step(self):
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        self.steps.append(self.answer())

    def median_s(self):
        return statistics.median(step["step_s"] for step in self.steps)

    def figures(self, ours, worker):
        """The row, as results have it. With a worker, the resident sets of the processes cannot be compared."""
        peak, before = self.steps[-1]["peak_bytes"], self.hello["before_bytes"]
        ratios = [mine["step_s"] / theirs["step_s"] for mine, theirs in zip(ours.steps, self.steps)]
        memory = {"device_bytes": self.device_bytes or None} if worker else {
            "peak_bytes": peak, "model_bytes": peak - before}
        return {"row": self.name, "step_s": self.median_s(), "ratio": summary(ratios), **memory}

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", choices=VARIANTS, default="gpt2")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--worker", metavar="CMD")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--step-binary", metavar="FILE", help="the benchmark `step`, already built")
    parser.add_argument("--variants", metavar="LIST", help="rows of PyTorch, separated by commas; by default all")
    add_results(parser)
    parser.add_argument("--serve", metavar="VARIANT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args.model, args.serve.split("+"), args.threads, args.device, args.bf16)

    step = [args.step_binary] if args.step_binary else benchmark("fusionllm-exec", "step")
    threads = str(args.threads)
    environment = os.environ | {"RAYON_NUM_THREADS": threads, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    precision = ["--bf16"] if args.bf16 else []
    worker = ["--worker", args.worker] if args.worker else []
    environment["PYTHONPATH"] = str(ROOT / "python")
    ours = Side("FusionLLM", [*step, args.model, "--serve", *worker, *precision], environment, args.device)
    script = [sys.executable, pathlib.Path(__file__).resolve(), args.model, "--threads", threads,
              "--device", args.device, *precision, "--serve"]
    theirs = [Side(f"PyTorch, {variant}", [*script, variant], environment, args.device)
              for variant in (args.variants.split(",") if args.variants else VARIANTS[args.model])]
    for side in theirs:
        if ours.hello["parameters"] != side.hello["parameters"]:
            sys.exit(f"not the same model: {ours.hello['parameters']} and {side.hello['parameters']} parameters")
    sides = [ours, *theirs]
    for _ in range(args.steps):
        for side in sides:
            side.step()
    report(args, sides)
    for side in sides:
        side.close()


def report(args, sides):
    """Prints the table, and writes it where --results says."""
    ours, *theirs = sides
    precision, parameters = "bf16" if args.bf16 else "float32", ours.hello["parameters"]
    print(f"{machine()}; {args.threads} threads")
    print(f"{args.model}, {precision}, {parameters / 1e6:.1f} M parameters, "
          f"{args.steps} steps of each row in turn; ours / theirs: medians of the turns' ratios (range)\n")
    rows = [side.figures(ours, args.worker) for side in sides]
    columns = {"peak_bytes": "peak resident", "model_bytes": "of these by the model",
               "device_bytes": "peak of the device's memory"}
    columns = {key: title for key, title in columns.items() if key in rows[0]}
    print("| row | step, s | ours / theirs |" + "".join(f" {title}, MiB |" for title in columns.values()))
    print("| --- | --- | --- |" + " --- |" * len(columns))
    for side, row in zip(sides, rows):
        ratios = [mine["step_s"] / step["step_s"] for mine, step in zip(ours.steps, side.steps)]
        memory = "".join(f" {row[key] / 2**20:.0f} |" if row[key] else " |" for key in columns)
        print(f"| {row['row']} | {row['step_s']:.4f} | {spread(ratios)} |{memory}")
    best = min(rows[1:], key=lambda row: row["step_s"])
    print(f"\nagainst its fastest row, {best['row']}: {best['ratio'][0]:.2f}")
    write_results(args.results, {
        "model": args.model, "precision": precision, "parameters": parameters, "steps": args.steps,
        "threads": args.threads, "worker": bool(args.worker), "device": args.device, "rows": rows})


if __name__ == "__main__":
    main()
