#!/usr/bin/env python3
"""Times the same training step here and in PyTorch eager, step by step in turn, and prints the ratio.

    pip install torch
    python3 scripts/against_pytorch.py [gpt2|resnet50] [--steps 10] [--threads 2]

GPT-2 small's width, heads and vocabulary at 4 layers, batch 4 x 256, no dropout, tanh GELU, tied embeddings, float32, AdamW; or
ResNet-50 on 4 images of 224 x 224. Both sides run in processes of their own with as many threads, and take turns, so that what else
the machine does falls on both. Peak memory is each process's resident high-water mark; the second figure leaves out what was
resident before there was a model (an interpreter and libtorch on PyTorch's side).
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent


def block(torch, width, heads):
    """A layer of GPT-2."""
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


def gpt2(torch):
    from torch import nn
    from torch.nn import functional as F

    width, heads, layers, vocabulary, positions = 768, 12, 4, 50257, 1024

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
            self.h = nn.Sequential(*[block(torch, width, heads) for _ in range(layers)])
            self.ln_f, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
            self.wte.weight.data.normal_(0, 0.02)
            self.head.weight = self.wte.weight

        def forward(self, tokens, labels):
            x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
            return F.cross_entropy(self.head(self.ln_f(self.h(x))).flatten(0, 1), labels.flatten())

    draw = lambda: torch.randint(0, vocabulary, (4, 256))
    return Model(), (draw(), draw())


def resnet50(torch):
    from torch import nn
    from torch.nn import functional as F

    class Bottleneck(nn.Module):
        def __init__(self, inside, width, stride):
            super().__init__()
            conv = lambda i, o, k, s: [nn.Conv2d(i, o, k, s, k // 2, bias=False), nn.BatchNorm2d(o)]
            relu = lambda: nn.ReLU(inplace=True)
            self.main = nn.Sequential(
                *conv(inside, width, 1, 1), relu(), *conv(width, width, 3, stride), relu(), *conv(width, 4 * width, 1, 1)
            )
            self.short = nn.Sequential(*conv(inside, 4 * width, 1, stride)) if stride > 1 or inside != 4 * width else None

        def forward(self, x):
            return F.relu(self.main(x) + (x if self.short is None else self.short(x)))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
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


def serve(model, threads):
    """One step for every line on standard input, as the benchmark's --serve does."""
    import torch

    torch.set_num_threads(threads)
    torch.manual_seed(1)
    before = memory("VmRSS")
    model, batch = {"gpt2": gpt2, "resnet50": resnet50}[model](torch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    print(json.dumps({"parameters": sum(p.numel() for p in model.parameters()), "before_bytes": before}), flush=True)
    for _ in sys.stdin:
        started = time.perf_counter()
        loss = model(*batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        took = time.perf_counter() - started
        print(json.dumps({"step_s": took, "loss": loss.item(), "peak_bytes": memory("VmHWM")}), flush=True)


class Side:
    def __init__(self, command, environment):
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT)
        self.hello = self.answer()
        self.steps = []

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{self.process.args[0]} ended with status {self.process.wait()}")
        return json.loads(line)

    def step(self):
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        self.steps.append(self.answer())

    def median(self):
        return statistics.median(s["step_s"] for s in self.steps)

    def peak(self):
        return self.steps[-1]["peak_bytes"]

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", choices=["gpt2", "resnet50"], default="gpt2")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args.model, args.threads)

    cargo = ["cargo", "bench", "-q", "--workspace", "--features", "candle", "--bench", "step"]
    subprocess.run([*cargo, "--no-run"], cwd=ROOT, check=True)
    threads = str(args.threads)
    environment = os.environ | {"RAYON_NUM_THREADS": threads, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    ours = Side([*cargo, "--", args.model, "--serve"], environment)
    theirs = Side([sys.executable, __file__, args.model, "--threads", threads, "--serve"], environment)
    if ours.hello["parameters"] != theirs.hello["parameters"]:
        sys.exit(f"not the same model: {ours.hello['parameters']} and {theirs.hello['parameters']} parameters")
    for side in (ours, theirs):
        side.step()  # fills caches and pools
        side.steps.clear()
    for _ in range(args.steps):
        ours.step()
        theirs.step()
    ratios = sorted(a["step_s"] / b["step_s"] for a, b in zip(ours.steps, theirs.steps))
    mib = lambda b: f"{b / 2**20:8.0f} MiB"
    print(f"{args.model}, {ours.hello['parameters'] / 1e6:.1f} M parameters, {threads} threads, {args.steps} steps of each in turn")
    print(f"              {'FusionLLM':>12} {'PyTorch':>12}   ratio")
    print(f"median step   {ours.median() * 1e3:9.0f} ms {theirs.median() * 1e3:9.0f} ms   {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    print(f"peak resident {mib(ours.peak())} {mib(theirs.peak())}   {ours.peak() / theirs.peak():.2f}")
    added = [s.peak() - s.hello["before_bytes"] for s in (ours, theirs)]
    print(f"  of the step {mib(added[0])} {mib(added[1])}   {added[0] / added[1]:.2f}")
    ours.close()
    theirs.close()


if __name__ == "__main__":
    main()
