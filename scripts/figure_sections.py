"""What can be measured: each section of `scripts/figures.py`, with its commands and what they need.

A section has measurements, and each is one command, whose result is one JSON object. `figure_tables.py` makes the
documents from these results.
"""

import dataclasses
import importlib.util
import json
import os
import shlex
import shutil
import statistics
import sys

from common import ROOT, benchmark, program


@dataclasses.dataclass
class Measurement:
    """One command. `whole` and `quick` are its options, and minutes are those on two cores."""

    name: str
    tool: tuple  # ("script", file), ("benchmark", package, name) or ("program",)
    whole: str
    quick: str
    minutes: float
    quick_minutes: float
    needs: tuple = ()
    read: object = None  # from the text of the command's results to the figures that are kept; JSON by default

    def shown(self, quick):
        """The command as a person types it."""
        kind, *rest = self.tool
        options = self.quick if quick else self.whole
        if kind == "script":
            return f"python3 scripts/{rest[0]} {options}".strip()
        if kind == "benchmark":
            return f"cargo bench -p {rest[0]} --bench {rest[1]} -- {options}".removesuffix(" -- ")
        return f"fusionllm {options}"

    def command(self, quick, scratch):
        """The command to run in an empty folder, and the file in which its results will be."""
        kind, *rest = self.tool
        # Workers run on the Python that runs this.
        worker = lambda option: option.replace("python3 -m", f"{sys.executable} -m")
        options = [worker(option) for option in shlex.split(self.quick if quick else self.whole)]
        results = scratch / "results.json"
        if kind == "script":
            if rest[0] in ("against_pytorch.py", "against_jax.py"):
                benchmark("fusionllm-exec", "step")  # built now, not while the script is measured
            return [sys.executable, ROOT / "scripts" / rest[0], *options, "--results", results], results
        if kind == "benchmark":
            return [*benchmark(*rest), *options, "--results", results], results
        return [program(), *options, "--run-dir", scratch / "run"], scratch / "run/metrics.jsonl"

    def figures(self, text):
        return (self.read or json.loads)(text)


# Why a need is not met, by the need.
NEEDS = {
    "root": lambda: None if os.geteuid() == 0 else "needs root",
    "ip": lambda: None if shutil.which("ip") and shutil.which("tc") else "needs iproute2",
    "taskset": lambda: None if shutil.which("taskset") else "needs taskset",
    **{name: lambda name=name: None if importlib.util.find_spec(name) else f"needs `pip install {name}`"
       for name in ("torch", "jax", "torchvision", "transformers", "safetensors")},
    "cifar": lambda: None if (ROOT / "examples/data/cifar-10-batches-bin").is_dir() else "needs examples/cifar10.sh",
}


def learned(text):
    """What a run of the program learned, from its `metrics.jsonl`."""
    lines = [json.loads(line) for line in text.splitlines()]
    validated = [line for line in lines if line.get("val_loss") is not None][-1]
    return {"steps": lines[-1]["step"], "steps_s": sum(line["step_s"] for line in lines),
            "val_loss": validated["val_loss"], "val_accuracy": validated.get("val_accuracy")}


def predictions(text):
    """The runs of the benchmark `prediction`, summarised for each testbed: medians, least and largest errors."""
    runs = [json.loads(line) for line in text.splitlines()]
    error = lambda run, key: 100 * (run[key]["predicted"] / run[key]["measured"] - 1)
    spread = lambda figures: [statistics.median(figures), min(figures), max(figures)]

    def row(testbed):
        of = [run for run in runs if testbed in (None, run["testbed"])]
        middle = lambda side: statistics.median(run["step_s"][side] for run in of)
        errors = {key: spread([error(run, f"{key}_{unit}") for run in of])
                  for key, unit in (("step", "s"), ("compute", "s"), ("memory", "bytes"))}
        sizes = {key: statistics.median(abs(error(run, f"{key}_{unit}")) for run in of)
                 for key, unit in (("step", "s"), ("compute", "s"), ("memory", "bytes"))}
        within = sum(abs(error(run, "step_s")) <= 10 for run in of)
        return {"testbed": testbed, "runs": len(of), "predicted_s": middle("predicted"),
                "measured_s": middle("measured"), "within_10_percent": within, "median_sizes": sizes, **errors}

    testbeds = dict.fromkeys(run["testbed"] for run in runs)
    return {"rows": [row(testbed) for testbed in testbeds], "all": row(None)}


def pytorch(name, options, quick, minutes, needs=("torch",)):
    return Measurement(name, ("script", "against_pytorch.py"), options, f"{options.split(' --steps')[0]} {quick}",
                       minutes, 1.5, needs)


TORCH_WORKER = '--worker "python3 -m fusionllm_torch"'
FEW = "--steps 1 --variants default,fused"
TWO_LAYERS = "--embd 64 --layers 2"

SECTIONS = {
    "pytorch": [
        pytorch("gpt2", "gpt2 --steps 8", FEW, 6),
        pytorch("gpt2-narrow", "gpt2-narrow --steps 30", FEW, 3),
        pytorch("resnet50", "resnet50 --steps 8", FEW, 6),
    ],
    "pipeline": [
        Measurement("cpu", ("script", "pipeline_cpu.py"), "--rounds 2", "--rounds 1", 4, 2),
        Measurement("outside", ("benchmark", "fusionllm-exec", "step"), "gpt2 --steps 8", "gpt2-narrow --steps 2",
                    1, 1),
    ],
    "planning": [
        Measurement("speed", ("benchmark", "fusionllm-plan", "planning_speed"), "", "48", 1, 1),
        Measurement("quality", ("benchmark", "fusionllm-plan", "search_quality"), "", "10", 5, 1),
    ],
    "headline": [
        Measurement("rows", ("script", "compression.py"), "headline --peers 4 --steps 10 --baseline-steps 2",
                    "headline --peers 4 --steps 1 --rows op-fence/none,op-fence/auto", 6, 2),
    ],
    "pipelining": [
        Measurement("rows", ("script", "against_pipelining.py"), "--rounds 2 --steps 4 --warm-up 2",
                    "--rounds 1 --steps 1 --warm-up 1 --rows pytorch/one-site,fusionllm/free,fusionllm/free/auto",
                    20, 3, ("root", "ip", "torch")),
    ],
    "convergence": [
        Measurement("gpt2", ("script", "compression.py"), "convergence --seeds 1,2,3 --codecs none,topk@7,topk@10,auto",
                    "convergence --steps 2 --codecs none,int8,auto", 40, 4),
        Measurement("time", ("script", "compression.py"), "time --codecs none,auto,adatopk@10,adatopk-published@30",
                    "time --steps 2 --codecs none,auto", 20, 4),
        Measurement("resnet", ("script", "compression.py"),
                    "convergence --model resnet --steps 600 --codecs none,int8,topk@7,topk@10,auto",
                    "convergence --model resnet --steps 2 --codecs none,int8", 25, 4, ("cifar",)),
    ],
    "prediction": [
        Measurement("testbeds", ("benchmark", "fusionllm-cli", "prediction"), "--repeats 2 --steps 10",
                    "--repeats 1 --steps 2 --only uneven", 28, 3, ("root", "ip"), predictions),
    ],
    "memory": [
        Measurement("runs", ("script", "little_memory.py"), "--steps 6", "--steps 2 --small", 9, 1),
    ],
    "recovery": [
        Measurement("deaths", ("script", "recovery.py"), "deaths", "deaths --deaths 1 --every 4", 2, 1),
        Measurement("overhead", ("script", "recovery.py"), "deaths --deaths 1 --every 600",
                    "deaths --deaths 1 --every 6", 11, 1),
        Measurement("copies", ("script", "recovery.py"), "copies --rounds 1 --steps 1000",
                    "copies --rounds 1 --steps 6", 10, 1, ("root", "ip")),
        Measurement("slow", ("script", "recovery.py"), "slow --every 20", "slow --every 8", 2, 1),
    ],
    "workers": [
        pytorch("torch-gpt2", f"gpt2 {TORCH_WORKER} --steps 12", FEW, 8),
        pytorch("torch-narrow", f"gpt2-narrow {TORCH_WORKER} --steps 30", FEW, 3),
        pytorch("bf16-gpt2", f"gpt2 {TORCH_WORKER} --bf16 --steps 12", FEW, 8),
        pytorch("bf16-narrow", f"gpt2-narrow {TORCH_WORKER} --bf16 --steps 30", FEW, 3),
        Measurement("jax-gpt2", ("script", "against_jax.py"), "gpt2 --steps 10", "gpt2 --steps 1", 5, 3, ("jax",)),
        Measurement("jax-narrow", ("script", "against_jax.py"), "gpt2-narrow --steps 30", "gpt2-narrow --steps 1", 3, 2,
                    ("jax",)),
    ],
    "faults": [
        Measurement("storm", ("benchmark", "fusionllm-cli", "faults"), "--seed 3 --steps 11000",
                    "--seed 3 --steps 200 --faults 1", 16, 2, ("root", "ip")),
    ],
    "attack": [
        Measurement("turns", ("benchmark", "fusionllm-cli", "attack"), "--connections 250 --seconds 40 --steps 8000",
                    "--connections 50 --seconds 1 --steps 100", 14, 1, ("taskset",)),
    ],
    "transport": [
        Measurement("quic", ("benchmark", "fusionllm-transport", "throughput"), "", "", 1, 1),
    ],
    "codecs": [
        Measurement("speed", ("benchmark", "fusionllm-compress", "codecs"), "", "", 2, 2),
    ],
    "slow-lines": [
        Measurement("start", ("script", "slow_start.py"), "--embd 1280 --layers 12", f"{TWO_LAYERS} --mbps 100", 35, 1,
                    ("root", "ip")),
    ],
    "crowd": [
        Measurement("hundred", ("script", "crowd.py"), "--peers 100", "--peers 4 --steps 6 --deaths 1", 3, 1),
        Measurement("long", ("script", "crowd.py"), "--peers 2 --steps 10000 --deaths 0",
                    "--peers 2 --steps 20 --deaths 0", 10, 1),
    ],
    "import": [
        Measurement("stock", ("script", "stock_models.py"), "", "--only squeezenet", 10, 1,
                    ("torch", "torchvision", "transformers", "safetensors")),
        Measurement("cost", ("script", "import_cost.py"), "", "resnet101 --repeats 1", 3, 2,
                    ("torch", "torchvision", "transformers")),
    ],
    "learning": [
        Measurement("shakespeare", ("program",), "train examples/tinyshakespeare.toml",
                    "train examples/tinyshakespeare.toml --steps 2 --set eval.every=2", 13, 1, (), learned),
        Measurement("cifar10", ("program",), "train examples/cifar10.toml",
                    "train examples/cifar10.toml --steps 2 --set eval.every=2", 6, 2, ("cifar",), learned),
    ],
}
