#!/usr/bin/env python3
"""Compression on slow links: step times over shaped links, and what training through the same Plans and codecs learns.

    python3 scripts/compression.py headline [--peers 4] [--steps 20] [--rounds 1] [--rows op-fence/adatopk,op-fence/topk@10] [--out DIR]
    python3 scripts/compression.py convergence [--peers 4] [--steps 400] [--rows ...] [--out DIR] [--model resnet]

A byte-level GPT-2 of 10 million parameters on Shakespeare's plays, or with --model resnet a ResNet-18 of width 16 on 10,000 images of CIFAR-10; two sites with 1 Gbps inside, each with one uplink of 8 Mbps
and 20 ms that all its outgoing traffic shares; peers alternate between the sites, as they happened to join. Every row has the same
seed and the same text.

`headline` emulates the links, a process a peer, and prints a table of step times, with the rows that earlier calls left in DIR: the slow baselines,
at 40 s a step and more, can so be given fewer steps. With more rounds the rows run in turn, so that a machine that grows slower does so under all of them; the median of a row's rounds counts.
`convergence` takes the plans that headline left in
DIR (or makes them) and runs them on this machine's own links, so that many steps take little time; it prints losses at equal steps, again with the rows
of earlier calls, and plots validation loss against steps, against the time that the steps would take over the shaped links, and against bytes (DIR/loss-*.svg).

FUSIONLLM names the program, by default target/release/fusionllm.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
ROWS = ["equal-number/none", "equal-compute/none", "op-fence/none", "op-fence/topk", "op-fence/adatopk", "op-fence/bf16", "op-fence/int8",
        "op-fence/int4", "op-fence/int4-hadamard", "op-fence/nvfp4", "op-fence/auto"]
RATIOS = {"topk": 30, "adatopk": 30, "auto": 30}
RESNET = """
[model]
family = "resnet"
depth = 18
stem = "cifar"
num_classes = 10
width = 16
[data]
kind = "cifar10"
train = ["{data}/cifar10-train-10k.bin"]
test = ["{data}/cifar10-test-2k.bin"]
[train]
steps = 1000
batch = 64
micro_batch = 8
seed = 1
optimizer = {{ name = "sgd", lr = 0.1, momentum = 0.9, weight_decay = 5e-4, warmup = 50 }}
"""
GPT2 = """
[model]
family = "gpt2"
n_layer = 8
n_embd = 320
n_head = 5
resid_pdrop = 0.0
embd_pdrop = 0.0
attn_pdrop = 0.0
[data]
kind = "text"
files = ["{data}/tinyshakespeare.txt"]
tokenizer = "bytes"
context = 128
[train]
steps = 1000
batch = 16
micro_batch = 2
seed = 1
optimizer = {{ name = "adamw", lr = 1e-3, weight_decay = 0.1, betas = [0.9, 0.99], clip = 1.0, warmup = 50 }}
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["headline", "convergence"])
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--rounds", type=int, default=1, help="of headline: how often each row runs")
    parser.add_argument("--rows", default=",".join(ROWS), help="of these, with commas; top-k's ratio after an @, and + shared masks, as in op-fence/topk@10+shared")
    parser.add_argument("--uplink", default="8 Mbps")
    parser.add_argument("--model", choices=["gpt2", "resnet"], default="gpt2")
    parser.add_argument("--data", default=str(ROOT / "../shared/data"), help="where the text and the images are")
    parser.add_argument("--out", default="compression-results")
    a = parser.parse_args()
    a.out = pathlib.Path(a.out).resolve() / a.model
    a.out.mkdir(parents=True, exist_ok=True)
    job = {"gpt2": GPT2, "resnet": RESNET}[a.model].format(data=pathlib.Path(a.data).resolve())
    (a.out / "job.toml").write_text(job)
    (headline if a.what == "headline" else convergence)(a)


def program():
    return os.environ.get("FUSIONLLM", str(ROOT / "target/release/fusionllm"))


def profiles(a, slowdown):
    """What each peer computes of the job while all do, as in training; measured once in DIR."""
    paths = [a.out / f"device-{a.peers}-{i}.toml" for i in range(a.peers)]
    if not all(path.exists() for path in paths):
        command = [program(), "profile", str(a.out / "job.toml"), "--backend", "cpu", "--threads", "1", "--slowdown", str(slowdown)]
        print(f"measuring {a.peers} devices", file=sys.stderr)
        running = [subprocess.Popen([*command, "-o", str(path)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for path in paths]
        for child in running:
            _, said = child.communicate()
            if child.returncode != 0:
                sys.exit(said)
    return paths


def testbed(a, shaped):
    # An equal share each of half of this machine's cores: the emulated network and the codecs need the other half.
    slowdown = max(1.0, 2 * a.peers / (os.cpu_count() or 1))
    devices = "".join(
        f'[[device]]\nname = "peer-{i}"\nsite = "{"ab"[i % 2]}"\nprofile = "{path}"\nthreads = 1\nmemory = "4 GiB"\nslowdown = {slowdown}\n'
        for i, path in enumerate(profiles(a, slowdown)))
    uplink = f'{{ rate = "{a.uplink}", latency = "20 ms" }}' if shaped else '{ rate = "10 Gbps" }'
    sites = "".join(f'[[site]]\nname = "{s}"\nrate = "1 Gbps"\nlatency = "0.1 ms"\nuplink = {uplink}\n' for s in "ab")
    path = a.out / f"testbed-{a.peers}-{'shaped' if shaped else 'free'}.toml"
    path.write_text(devices + sites)
    return path


def directory(a, kind, row):
    return a.out / f"{kind}-{a.peers}-{row.replace('/', '-').replace('@', '-')}"


def train(a, run, settings, extra):
    subprocess.run(["rm", "-rf", str(run)], check=True)
    command = [program(), "train", str(a.out / "job.toml"), "--run-dir", str(run), "--json", *extra]
    for setting in settings:
        command += ["--set", setting]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        print(f"{run.name}: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        return None
    return json.loads(done.stdout)


def codec_settings(row):
    """Of scheduler/codec or scheduler/codec@ratio, either with +shared for masks that a gradient has from its activation."""
    scheduler, slash, codec = row.partition("/")
    if not slash:
        sys.exit(f"there is no row {row!r}; rows are a scheduler and a codec, as in {ROWS[4]}")
    codec, _, masks = codec.partition("+")
    if masks not in ("", "shared"):
        sys.exit(f"there is no row {row!r}; after a + can stand shared alone")
    name, _, ratio = codec.partition("@")
    ratio = ratio or RATIOS.get(name)
    settings = [f"plan.scheduler={scheduler}", f"compression.name={name}"] + ([f"compression.ratio={ratio}"] if ratio else [])
    return settings + (["compression.shared_masks=true"] if masks else [])


def headline(a):
    steps = str(a.steps or 20)
    kept = a.out / f"headline-{a.peers}.json"
    results = json.loads(kept.read_text()) if kept.exists() else {}
    rows = [(row, True) for row in a.rows.split(",")]
    if ("op-fence/auto", True) in rows:
        rows.append(("op-fence/auto", False))
    rounds = {}
    for row, shaped in rows * a.rounds:
        label = row if shaped else f"{row} (unshaped links)"
        settings = codec_settings(row) + ["eval.every=0", "checkpoint.every=0"]
        run = directory(a, "shaped" if shaped else "free", row)
        summary = train(a, run, settings, ["--steps", steps, "--testbed", str(testbed(a, shaped))])
        if summary is not None:
            runs = rounds.setdefault(label, [])
            runs.append(summary)
            runs.sort(key=lambda s: s["median_step_s"])
            results[label] = runs[len(runs) // 2] | {"rounds_s": [s["median_step_s"] for s in runs]}
            kept.write_text(json.dumps(results, indent=1))
            print(f"{label}: {summary['median_step_s']:.2f} s", file=sys.stderr)
    worst = max((s["median_step_s"] for s in results.values()), default=1.0)
    print(f"{a.peers} peers, medians\n\n| row | step, s | its rounds | predicted, s | MB a step | codecs of the step | times the worst |\n| --- | --- | --- | --- | --- | --- | --- |")
    for label, s in results.items():
        predicted = "-" if s["predicted_step_s"] is None else f"{s['predicted_step_s']:.2f}"
        codecs = max(p.get("codec_s") or 0 for p in s["peers"]) / s["median_step_s"]
        runs = s.get("rounds_s") or [s["median_step_s"]]
        print(f"| {label} | {s['median_step_s']:.2f} | {runs[0]:.2f} to {runs[-1]:.2f} | {predicted} | {s['bytes_sent_per_step'] / 1e6:.2f} | {100 * codecs:.1f} % "
              f"| {worst / s['median_step_s']:.2f} |")
    bars(a.out / f"headline-{a.peers}.svg", {k: s["median_step_s"] for k, s in results.items()})


def plan_of(a, row):
    path = directory(a, "planned", row).with_suffix(".json")
    command = [program(), "plan", str(a.out / "job.toml"), "--testbed", str(testbed(a, True)), "-o", str(path)]
    for setting in codec_settings(row):
        command += ["--set", setting]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return path


def convergence(a):
    steps = str(a.steps or 400)
    kept = a.out / f"convergence-{a.peers}.json"
    curves = json.loads(kept.read_text()) if kept.exists() else {}
    for row in a.rows.split(","):
        plan = directory(a, "shaped", row) / "plan.json"
        shaped = directory(a, "shaped", row) / "summary.json"
        if not plan.exists():
            plan = plan_of(a, row)
        settings = ["eval.every=50", "eval.batches=10", "checkpoint.every=0"]
        run = directory(a, "learned", row)
        if train(a, run, settings, ["--steps", steps, "--plan", str(plan)]) is None:
            continue
        step_s = json.loads(shaped.read_text())["median_step_s"] if shaped.exists() else None
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        bytes_sent, points = 0, []
        for line in lines:
            bytes_sent += line["bytes_sent"]
            if "val_loss" in line:
                points.append((line["step"], (step_s or 0) * line["step"], bytes_sent, line["val_loss"]))
        curves[row] = points
        kept.write_text(json.dumps(curves, indent=1))
    exact = curves.get("op-fence/none") or next(iter(curves.values()), [])
    print("| row | steps | validation loss | against uncompressed | MB |\n| --- | --- | --- | --- | --- |")
    for row, points in curves.items():
        # At the last step that both have come to.
        at = min(points[-1][0], exact[-1][0])
        mine, uncompressed = (next(p for p in line if p[0] == at) for line in (points, exact))
        print(f"| {row} | {at} | {mine[3]:.4f} | {100 * (mine[3] / uncompressed[3] - 1):+.2f} % | {mine[2] / 1e6:.0f} |")
    for index, (name, unit) in enumerate([("steps", "steps"), ("time", "seconds over shaped links"), ("bytes", "bytes")]):
        lines = {row: [(p[index], p[3]) for p in points] for row, points in curves.items()}
        plot(a.out / f"loss-{a.peers}-{name}.svg", lines, unit)


COLOURS = ["#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e", "#9498a0", "#222222"]


def bars(path, values):
    if not values:
        return
    top = max(values.values())
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="720" height="{26 * len(values) + 20}" font-family="sans-serif" font-size="13">']
    for i, (label, value) in enumerate(values.items()):
        y = 10 + 26 * i
        parts.append(f'<text x="235" y="{y + 15}" text-anchor="end">{label}</text>')
        parts.append(f'<rect x="245" y="{y}" width="{380 * value / top:.1f}" height="20" fill="{COLOURS[0]}"/>')
        parts.append(f'<text x="{255 + 380 * value / top:.1f}" y="{y + 15}">{value:.2f} s</text>')
    path.write_text("\n".join(parts + ["</svg>\n"]))


def plot(path, lines, unit):
    points = [p for line in lines.values() for p in line]
    if not points:
        return
    right, low, high = max(p[0] for p in points) or 1, min(p[1] for p in points), max(p[1] for p in points)
    x = lambda v: 60 + 520 * v / right
    y = lambda v: 20 + 340 * (high - v) / ((high - low) or 1)
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" width="820" height="410" font-family="sans-serif" font-size="12">',
             '<path d="M60 20V360H580" fill="none" stroke="#888"/>',
             f'<text x="320" y="395" text-anchor="middle">{unit}</text>']
    for i in range(5):
        value, at = low + (high - low) * i / 4, right * i / 4
        parts.append(f'<text x="52" y="{y(value) + 4:.0f}" text-anchor="end">{value:.2f}</text>')
        parts.append(f'<text x="{x(at):.0f}" y="376" text-anchor="middle">{at:.3g}</text>')
    for i, (row, line) in enumerate(lines.items()):
        colour = COLOURS[i % len(COLOURS)]
        dashes = "" if i < len(COLOURS) else ' stroke-dasharray="6 4"'
        path_data = " ".join(f"{'L' if j else 'M'}{x(p[0]):.1f} {y(p[1]):.1f}" for j, p in enumerate(line))
        parts.append(f'<path d="{path_data}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>')
        parts.append(f'<text x="595" y="{34 + 18 * i}" fill="{colour}">{row}</text>')
    path.write_text("\n".join(parts + ["</svg>\n"]))


if __name__ == "__main__":
    main()
