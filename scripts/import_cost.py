#!/usr/bin/env python3
"""Measures the time and the memory of `fusionllm graph import` on stock models of full size.

    pip install torch torchvision transformers && cargo build --release
    python3 scripts/import_cost.py [gpt2|resnet101] [--repeats 3] [--archives DIR]

The models are GPT-2 small of transformers (124 M parameters, 1 x 1,024 tokens) and ResNet-101 of torchvision (45 M, 8
images of 64 x 64), with random weights. The figures are the median time of the command, and its largest resident set.
With --archives the exported models stay in DIR, and later calls read them from there.

FUSIONLLM names the program, by default target/release/fusionllm.
"""

import argparse
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from common import add_results, machine, program, write_results

MODELS = ["gpt2", "resnet101"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="model", help="gpt2 or resnet101, both by default")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--archives", type=pathlib.Path)
    add_results(parser)
    args = parser.parse_args()
    rows = []
    if unknown := set(args.models) - set(MODELS):
        parser.error(f"there is no model {', '.join(unknown)}: give gpt2 or resnet101")
    binary = program()
    print(f"{machine()}; median of {args.repeats}\n")
    print("| model | archive, MiB | import, s | peak resident, MiB |\n| --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.archives or pathlib.Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for name in args.models or MODELS:
            archive = folder / f"{name}.pt2"
            if not archive.exists():
                export(name, archive)
            runs = [measure(binary, archive, f"{scratch}/{name}-{i}") for i in range(args.repeats)]
            seconds, resident = statistics.median(r[0] for r in runs), max(r[1] for r in runs)
            size = archive.stat().st_size
            print(f"| {name} | {size / 2**20:.0f} | {seconds:.2f} | {resident / 2**20:.0f} |", flush=True)
            rows.append({"model": name, "archive_bytes": size, "import_s": seconds, "resident_bytes": resident})
    write_results(args.results, {"repeats": args.repeats, "rows": rows})


def measure(binary, archive, output):
    """Seconds and peak resident bytes of one import."""
    started = time.perf_counter()
    process = subprocess.Popen([binary, "graph", "import", archive, "-o", output], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"the import of {archive} failed")
    return time.perf_counter() - started, usage.ru_maxrss * 1024


def export(name, archive):
    """Writes the archive in a process of its own, so that its memory is free again when the import is measured."""
    code = f"import import_cost; import_cost.write({name!r}, {str(archive.resolve())!r})"
    subprocess.run([sys.executable, "-c", code], cwd=pathlib.Path(__file__).resolve().parent, check=True)


def write(name, archive):
    import torch

    class Trained(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, x, y):
            out = self.model(x)
            logits = getattr(out, "logits", out)
            return torch.nn.functional.cross_entropy(logits.flatten(0, -2), y.flatten())

    if name == "gpt2":
        from transformers import GPT2Config, GPT2LMHeadModel

        model = GPT2LMHeadModel(GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False))
        sample = torch.randint(0, 50257, (1, 1024)), torch.randint(0, 50257, (1, 1024))
    else:
        import torchvision

        model = torchvision.models.resnet101(num_classes=1000)
        sample = torch.randn(8, 3, 64, 64), torch.randint(0, 1000, (8,))
    torch.export.save(torch.export.export(Trained(model).train(), sample), archive)


if __name__ == "__main__":
    main()
