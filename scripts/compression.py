#!/usr/bin/env python3
"""Measures placement and codecs on slow links: step times, and what training through the codecs learns.

    cargo build --release
    python3 scripts/compression.py headline [--peers 4] [--steps 12] [--rounds 1] [--rows ROW,ROW] [--out DIR]
    python3 scripts/compression.py convergence [--peers 4] [--steps 900] [--codecs CODEC,CODEC] [--seeds 1,2,3] [--out DIR]
        [--model resnet] [--layers 4] [--width 128]
    python3 scripts/compression.py time [--peers 4] [--steps 900] [--codecs CODEC,CODEC] [--out DIR]
    python3 scripts/compression.py table [--peers 4] [--steps 900] [--out DIR]

Model: a byte-level GPT-2 on Shakespeare's plays, of 10 million parameters for `headline` and of 0.8 million for
`convergence`. --layers and --width choose another size. With --model resnet it is a ResNet-18 of width 16 on 10,000
images of CIFAR-10, which `examples/cifar10.sh` fetches. Every row has the same seed and data.

Testbed: two sites with 1 Gbps inside. Each site has one uplink of 8 Mbps and 20 ms, which all its outgoing traffic
shares. The peers joined alternately: a, b, a, b, and so on. Links are emulated, with one process a peer.

A row of `headline` is SCHEDULER/CODEC, as in op-fence/auto. The ratio of top-k follows an @, as in op-fence/topk@10.
`+all` after the scheduler limits the memory of the devices, so that the plan uses every device: the limit is the largest
that does.

`headline` prints a table of step times, with the rows of earlier calls that are in DIR. It splits the speed-up over
each baseline into placement (op-fence+all/none), devices left out (op-fence/none), and codecs (op-fence/auto). With
several rounds the rows take turns, and a row counts with the median of its rounds.

`convergence` trains once with each codec and seed. All rows have the same plan: each peer has about as many operators,
and the cuts are where the fewest bytes cross. Only the codecs of its links differ, and every link is slow, so that each
has one. Training itself goes over this machine's own links, so that many steps take little time. Each row is compared
with that without a codec of the same seed, at equal steps. Rows that are in DIR are not trained again, and a row is
kept once it is done: the command goes on where it stopped. It plots validation loss against steps and against bytes
(DIR/loss-*.svg).

`time` says how long each codec takes to reach the loss that none reaches after its steps. It trains each as
`convergence` does, but for a quarter more steps, and times some steps over the emulated links. The product is the time
that training over these links would take.

`table` writes the rows of `convergence` that are in DIR to the table by which `auto` knows what codecs cost
(`crates/plan/src/codecs/losses.json`). Rows with another source stay in it.

FUSIONLLM names the program, by default target/release/fusionllm.
"""

import argparse
import json
import math
import os
import pathlib
import shutil
import statistics
import subprocess
import sys

from common import ROOT, add_results, answer, machine, program, summary, write_results

BASELINES = ["equal-number/none", "equal-compute/none"]
SPLIT = [("placement", "op-fence+all/none"), ("devices left out", "op-fence/none"), ("codecs", "op-fence/auto")]
ROWS = BASELINES + [row for _, row in SPLIT]
CUT = "equal-number"
CODECS = ["none", "topk@7", "topk@10", "int8", "topk@5", "topk@15", "int4-hadamard", "adatopk-published@30", "auto"]
RATIOS = {"topk": 10, "auto": 30}
TABLE = ROOT / "crates/plan/src/codecs/losses.json"
RESNET = """
[model]
family = "resnet"
depth = 18
stem = "cifar"
num_classes = 10
width = 16
[data]
kind = "cifar10"
train = ["{data}/cifar-10-batches-bin/data_batch_1.bin"]
test = ["{data}/cifar-10-batches-bin/test_batch.bin"]
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
n_layer = {layers}
n_embd = {width}
n_head = {heads}
resid_pdrop = 0.0
embd_pdrop = 0.0
attn_pdrop = 0.0
[data]
kind = "text"
files = ["{data}/tinyshakespeare.txt"]
tokenizer = "bytes"
context = 128
[train]
steps = 2000
batch = 16
micro_batch = {micro_batch}
seed = 1
optimizer = {{ name = "adamw", lr = {lr}, weight_decay = 0.1, betas = [0.9, 0.99], clip = 1.0, warmup = 100 }}
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["headline", "convergence", "time", "table"])
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--steps", type=int, help="12 by default, 900 for convergence")
    parser.add_argument("--baseline-steps", type=int, default=3, help="steps of the slow baselines, for headline")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each row, for headline")
    parser.add_argument("--rows", default=",".join(ROWS), help="of headline, separated by commas")
    parser.add_argument("--codecs", default=",".join(CODECS), help="of convergence, separated by commas")
    parser.add_argument("--seeds", default="1", help="of convergence, separated by commas")
    parser.add_argument("--uplink", default="8 Mbps")
    parser.add_argument("--model", choices=["gpt2", "resnet"], default="gpt2")
    parser.add_argument("--layers", type=int, help="of GPT-2: 8 by default, 4 for convergence")
    parser.add_argument("--width", type=int, help="of GPT-2: 320 by default, 128 for convergence")
    parser.add_argument("--data", type=pathlib.Path, default=ROOT / "examples/data", help="folder of the data")
    parser.add_argument("--out", type=pathlib.Path, default="compression-results")
    add_results(parser)
    a = parser.parse_args()
    small = a.what != "headline"
    a.layers = a.layers or (4 if small else 8)
    a.width = a.width or (128 if small else 320)
    a.steps = a.steps or (900 if small else 12)
    a.out = a.out.resolve()
    if a.what == "table":
        return table(a)
    a.out = a.out / (f"gpt2-{a.layers}-{a.width}" if a.model == "gpt2" else a.model)
    a.out.mkdir(parents=True, exist_ok=True)
    # A head has 32 numbers in the small model, and 64 in larger ones.
    gpt2 = {"layers": a.layers, "width": a.width, "heads": a.width // (64 if a.width >= 320 else 32),
            "micro_batch": 4 if small else 2, "lr": 2e-3 if small else 1e-3}
    job = {"gpt2": GPT2, "resnet": RESNET}[a.model].format(data=a.data.resolve(), **gpt2)
    (a.out / "job.toml").write_text(job)
    {"headline": headline, "convergence": convergence, "time": time_to_loss}[a.what](a)


def profiles(a, slowdown):
    """The profile of each peer. All are measured at once, as they train, and kept in DIR."""
    paths = [a.out / f"device-{a.peers}-{i}.toml" for i in range(a.peers)]
    if not all(path.exists() for path in paths):
        command = [program(), "profile", a.out / "job.toml", "--backend", "cpu", "--threads", "1"]
        command += ["--slowdown", str(slowdown), "-o"]
        print(f"measuring {a.peers} devices", file=sys.stderr)
        running = [subprocess.Popen([*command, path], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
                   for path in paths]
        for child in running:
            _, complaint = child.communicate()
            if child.returncode != 0:
                sys.exit(complaint)
    return paths


def testbed(a, shaped=True, memory=4096):
    # The devices ask for half of this machine's cores. The emulated network and the codecs need the other half.
    slowdown = max(1.0, 2 * a.peers / (os.cpu_count() or 1))
    devices = "".join(
        f'[[device]]\nname = "peer-{i}"\nsite = "{"ab"[i % 2]}"\nprofile = "{path}"\nthreads = 1\n'
        f'memory = "{memory} MiB"\nslowdown = {slowdown}\n'
        for i, path in enumerate(profiles(a, slowdown)))
    uplink = f'{{ rate = "{a.uplink}", latency = "20 ms" }}' if shaped else '{ rate = "10 Gbps" }'
    sites = "".join(
        f'[[site]]\nname = "{s}"\nrate = "1 Gbps"\nlatency = "0.1 ms"\nuplink = {uplink}\n' for s in "ab")
    path = a.out / f"testbed-{a.peers}-{memory}-{'shaped' if shaped else 'free'}.toml"
    path.write_text(devices + sites)
    return path


def testbed_of(a, row, shaped=True):
    """The testbed of a row. With +all, devices have the largest memory with which the plan uses every one of them."""
    if "+all" not in row.partition("/")[0]:
        return testbed(a, shaped)
    memory = 4096
    while memory >= 16:
        # A plan that does not fit is an error, which only smaller limits cause.
        plan = answer(program(), "plan", a.out / "job.toml", "--testbed", testbed(a, True, memory), *overrides(row))
        used = sum(peer["operators"] > 0 for peer in plan["peers"])
        if used == a.peers:
            print(f"{row}: {memory} MiB a device", file=sys.stderr)
            return testbed(a, shaped, memory)
        memory = int(min(memory * 0.95, max(peer["predicted_memory_bytes"] for peer in plan["peers"]) / 2**20))
    sys.exit(f"{row}: no limit makes the plan use all {a.peers} devices")


def directory(a, kind, row):
    return a.out / f"{kind}-{a.peers}-{row.replace('/', '-').replace('@', '-')}"


def train(a, run, settings, extra):
    shutil.rmtree(run, ignore_errors=True)
    command = [program(), "train", a.out / "job.toml", "--run-dir", run, "--json", *settings, *extra]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        print(f"{run.name}: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        return None
    return json.loads(done.stdout)


def overrides(row):
    """The settings of a row, as --set options."""
    scheduler, slash, codec = row.partition("/")
    if not slash:
        sys.exit(f"there is no row {row!r}; a row is a scheduler and a codec, as in {ROWS[-1]}")
    name, _, ratio = codec.partition("@")
    ratio = ratio or RATIOS.get(name)
    settings = [f"plan.scheduler={scheduler.removesuffix('+all')}", f"compression.name={name}"]
    settings += [f"compression.ratio={ratio}"] if ratio else []
    return [part for setting in settings for part in ("--set", setting)]


def headline(a):
    kept = a.out / f"headline-{a.peers}.json"
    results = json.loads(kept.read_text()) if kept.exists() else {}
    rows = [(row, True) for row in a.rows.split(",")]
    if ("op-fence/auto", True) in rows:
        rows.append(("op-fence/auto", False))
    rounds = {}
    quiet = ["--set", "eval.every=0", "--set", "checkpoint.every=0"]
    for row, shaped in rows * a.rounds:
        label = row if shaped else f"{row} (links of 10 Gbps)"
        steps = a.baseline_steps if row in BASELINES else a.steps
        run = directory(a, "shaped" if shaped else "free", row)
        bed = testbed_of(a, row, shaped)
        summary = train(a, run, [*overrides(row), *quiet], ["--steps", str(steps), "--testbed", bed])
        if summary is not None:
            runs = rounds.setdefault(label, [])
            runs.append(summary)
            runs.sort(key=lambda s: s["median_step_s"])
            results[label] = runs[len(runs) // 2] | {"rounds_s": [s["median_step_s"] for s in runs]}
            kept.write_text(json.dumps(results, indent=1))
            print(f"{label}: {summary['median_step_s']:.2f} s", file=sys.stderr)
    print(f"{machine()}; {a.peers} peers, medians\n")
    rows = [headline_row(label, results[label]) for label in results]
    print("| row | devices used | step, s | range of the rounds, s | predicted, s | MB a step | codecs' share "
          "| loss |\n| --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        middle, low, high = row["step_s"]
        predicted = "-" if row["predicted_s"] is None else f"{row['predicted_s']:.2f}"
        print(f"| {row['row']} | {row['used']} of {a.peers} | {middle:.2f} | {low:.2f} to {high:.2f} | {predicted} "
              f"| {row['bytes_per_step'] / 1e6:.2f} | {100 * row['codec_share']:.1f} % "
              f"| {row['loss_last']:.3f} after {row['steps']} |")
    factors = split(results)
    for baseline, causes in factors.items():
        print(f"{baseline}: " + ", ".join(f"{cause} x {factor:.2f}" for cause, factor in causes.items()))
    write_results(a.results, {"peers": a.peers, "uplink": a.uplink, "rounds": a.rounds, "rows": rows,
                              "factors": factors})


def headline_row(label, run):
    """A row as results have it, from a run's summary."""
    return {
        "row": label,
        "used": sum(peer["operators"] > 0 for peer in run["peers"]),
        "steps": run["steps"],
        "step_s": summary(run.get("rounds_s") or [run["median_step_s"]]),
        "predicted_s": run["predicted_step_s"],
        "bytes_per_step": run["bytes_sent_per_step"],
        "codec_share": max(peer.get("codec_s") or 0 for peer in run["peers"]) / run["median_step_s"],
        "loss_last": run["loss_last"],
    }


def split(results):
    """The speed-up over each baseline, as a product of what caused it."""
    if any(row not in results for _, row in SPLIT):
        return {}
    factors = {}
    for baseline in (row for row in BASELINES if row in results):
        before, causes = results[baseline]["median_step_s"], {}
        for cause, row in SPLIT:
            causes[cause] = before / results[row]["median_step_s"]
            before = results[row]["median_step_s"]
        factors[baseline] = causes
    return factors


def slow_testbed(a):
    """Devices that are all alike on every machine, and no two of them in one site."""
    path = a.out / f"slow-{a.peers}.toml"
    slowdown = max(1.0, 2 * a.peers / (os.cpu_count() or 1))
    path.write_text("".join(
        f'[[device]]\nname = "peer-{i}"\nsite = "{i}"\ntflops = 0.05\nmemory_bandwidth = "10 GB/s"\nmemory = "4 GiB"\n'
        f'slowdown = {slowdown}\n[[site]]\nname = "{i}"\nrate = "1 Gbps"\nuplink = {{ rate = "{a.uplink}", latency = "20 ms" }}\n'
        for i in range(a.peers)))
    return path


def fixed_plan(a):
    """The plan that all rows of `convergence` share. Its cuts are moved to where the fewest bytes cross."""
    path = a.out / f"cut-{a.peers}.json"
    if not path.exists():
        answer(program(), "plan", a.out / "job.toml", "--testbed", slow_testbed(a), "-o", path, *overrides(f"{CUT}/none"))
        plan = json.loads(path.read_text())
        nodes, values = plan["model"]["nodes"], plan["model"]["values"]
        size = {"f32": 4, "bf16": 2, "i64": 8, "bool": 1}
        last = {v: n for n, node in enumerate(nodes) for v in node["inputs"]}
        maker = {v: n for n, node in enumerate(nodes) for v in node["outputs"]}

        def crossing(at):
            types = (values[v]["type"] for v, n in maker.items() if n < at <= last.get(v, -1))
            return sum(math.prod(ty["shape"]) * size.get(ty["dtype"], 4) for ty in types)
        cuts, reach = [0], len(nodes) // (2 * a.peers)
        for i in range(1, a.peers):
            middle = i * len(nodes) // a.peers
            near = range(max(cuts[-1] + 1, middle - reach), min(len(nodes), middle + reach))
            cuts.append(min(near, key=lambda at: (crossing(at), abs(at - middle))))
        for stage, begin, end in zip(plan["stages"], cuts, [*cuts[1:], len(nodes)]):
            stage["nodes"] = list(range(begin, end))
        path.write_text(json.dumps(plan))
    return path


def plan_with(a, codec):
    """The fixed plan, with this codec on its links. One step over the emulated links makes it, because rules that go by
    need must know them."""
    plan = fixed_plan(a)
    if codec == "none":
        return plan
    run = directory(a, "coded", codec)
    quiet = ["--set", "eval.every=0", "--set", "checkpoint.every=0"]
    settings = [*overrides(f"{CUT}/{codec}"), *quiet]
    if train(a, run, settings, ["--steps", "1", "--plan", plan, "--testbed", slow_testbed(a)]) is None:
        return None
    cut, same_cut = (json.loads(path.read_text())["stages"] for path in (plan, run / "plan.json"))
    if cut != same_cut:
        sys.exit(f"{codec}: its plan has another cut than that without codecs")
    return run / "plan.json"


def learn(a, codec, seed, steps, every):
    """Trains with a codec. Returns steps, bytes sent so far and validation losses."""
    plan = plan_with(a, codec)
    settings = {"eval.every": every, "eval.batches": 24, "checkpoint.every": 0, "train.seed": seed}
    settings = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    run = directory(a, "learned", f"{codec}-{seed}")
    if plan is None or train(a, run, settings, ["--steps", str(steps), "--plan", plan]) is None:
        return None
    bytes_sent, points = 0, []
    for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        bytes_sent += line["bytes_sent"]
        if "val_loss" in line:
            points.append((line["step"], bytes_sent, line["val_loss"]))
    return points


def time_to_loss(a):
    kept = a.out / f"time-{a.peers}-{a.steps}.json"
    results = json.loads(kept.read_text()) if kept.exists() else {}
    for codec in ["none", *(codec for codec in a.codecs.split(",") if codec != "none")]:
        if codec in results:
            continue
        points = learn(a, codec, 1, a.steps if codec == "none" else a.steps * 5 // 4, min(50, a.steps))
        run, quiet = directory(a, "timed", codec), ["--set", "eval.every=0", "--set", "checkpoint.every=0"]
        timed = train(a, run, quiet, ["--steps", "8", "--plan", plan_with(a, codec), "--testbed", slow_testbed(a)])
        if points is None or timed is None:
            continue
        results[codec] = {"points": points, "step_s": timed["median_step_s"], "predicted_s": timed["predicted_step_s"]}
        kept.write_text(json.dumps(results, indent=1))
        print(f"{codec}: {timed['median_step_s']:.2f} s a step", file=sys.stderr)
    target = results["none"]["points"][-1][2]
    rows = []
    print(f"{machine()}; {a.model}, {a.peers} homes with {a.uplink}; none reaches {target:.4f} after {a.steps} steps\n")
    print("| codec | step, s | predicted, s | steps to that loss | time | speed-up |\n| --- | --- | --- | --- | --- | --- |")
    for codec, result in results.items():
        steps = steps_to(target, result["points"])
        time = steps and steps * result["step_s"]
        rows.append({"codec": codec, "step_s": result["step_s"], "predicted_s": result["predicted_s"], "steps": steps,
                     "time_s": time})
        reached = [f"{steps:.0f}", f"{time / 60:.1f} min", f"{rows[0]['time_s'] / time:.2f}"] if steps else ["never", "", ""]
        print(f"| {codec} | {result['step_s']:.2f} | {result['predicted_s'] or 0:.2f} | {' | '.join(reached)} |")
    write_results(a.results, {"model": a.model, "peers": a.peers, "steps": a.steps, "uplink": a.uplink, "loss": target,
                              "rows": rows})


def steps_to(target, points):
    """The first step at which the loss is as low, between the steps at which it is known."""
    for before, after in zip([(0, 0, math.inf), *points], points):
        if after[2] <= target:
            share = (before[2] - target) / (before[2] - after[2]) if before[2] < math.inf else 1
            return before[0] + share * (after[0] - before[0])
    return None


def convergence(a):
    kept = a.out / f"convergence-{a.peers}-{a.steps}.json"
    curves = json.loads(kept.read_text()) if kept.exists() else {}
    wanted = [(codec, seed) for seed in a.seeds.split(",") for codec in a.codecs.split(",")]
    for codec, seed in wanted:
        if seed in curves.get(codec, {}):
            continue
        points = learn(a, codec, seed, a.steps, min(100, a.steps))
        if points is None:
            continue
        curves.setdefault(codec, {})[seed] = points
        kept.write_text(json.dumps(curves, indent=1))
        print(f"{codec}, seed {seed}: {points[-1][2]:.4f}", file=sys.stderr)
    if "none" not in curves:
        sys.exit("there is no row without codecs to compare with")
    rows = changes(curves)
    print(f"{machine()}; {a.model}, the cut of {CUT}, {a.steps} steps\n")
    print("| codec | validation loss by seed | against none | mean | MB |\n| --- | --- | --- | --- | --- |")
    for row in rows:
        losses, each = (", ".join(f"{x:{form}}" for x in row[key]) for key, form in
                        [("val_loss", ".4f"), ("change_percent", "+.2f")])
        mean = statistics.mean(row["change_percent"])
        print(f"| {row['codec']} | {losses} | {each} % | {mean:+.2f} % | {row['bytes'] / 1e6:.0f} |")
    write_results(a.results, {"model": a.model, "layers": a.layers, "width": a.width, "steps": a.steps, "cut": CUT,
                              "rows": rows})
    for index, name in enumerate(["steps", "bytes"]):
        first = {codec: next(iter(of.values())) for codec, of in curves.items()}
        lines = {codec: [(point[index], point[2]) for point in points] for codec, points in first.items()}
        plot(a.out / f"loss-{a.peers}-{name}.svg", lines, name)


def changes(curves):
    """By codec: the last losses, and their change against the same seed without a codec."""
    rows = []
    for codec, of in curves.items():
        seeds = [seed for seed in of if seed in curves["none"]]
        losses = [of[seed][-1][2] for seed in seeds]
        change = [100 * (loss / curves["none"][seed][-1][2] - 1) for seed, loss in zip(seeds, losses)]
        if seeds:
            rows.append({"codec": codec, "seeds": list(map(int, seeds)), "val_loss": losses, "change_percent": change,
                         "bytes": of[seeds[0]][-1][1]})
    return rows


def table(a):
    """Codecs alone, and those of the small GPT-2: the rows of twice the width and of the ResNet show the trend."""
    width, layers = 128, 4
    results = a.out / f"gpt2-{layers}-{width}" / f"convergence-{a.peers}-{a.steps}.json"
    if not results.exists():
        sys.exit(f"there is no {results}; run `scripts/compression.py convergence` first")
    # What others measured stays.
    rows = {i: row for i, row in enumerate(json.loads(TABLE.read_text())["rows"]) if "source" in row}
    for row in changes(json.loads(results.read_text())):
        name, _, ratio = row["codec"].partition("@")
        if name in ("none", "auto", "adatopk", "adatopk-published"):
            continue
        entry = {"codec": name} | ({"ratio": float(ratio)} if ratio else {})
        entry |= {"seeds": row["seeds"], "change_percent": [round(x, 2) for x in row["change_percent"]]}
        rows[row["codec"]] = entry
    about = {"model": "gpt2", "layers": layers, "width": width, "cuts": a.peers - 1, "steps": a.steps}
    lines = ",\n".join(f"    {json.dumps(row)}" for row in rows.values())
    TABLE.write_text(f'{{\n  "measured": {json.dumps(about)},\n  "rows": [\n{lines}\n  ]\n}}\n')
    print(TABLE)


COLOURS = ["#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e", "#9498a0",
           "#222222"]


def plot(path, lines, unit):
    points = [p for line in lines.values() for p in line]
    if not points:
        return
    right, low, high = max(p[0] for p in points) or 1, min(p[1] for p in points), max(p[1] for p in points)
    x = lambda v: 60 + 520 * v / right
    y = lambda v: 20 + 340 * (high - v) / ((high - low) or 1)
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" width="820" height="410" '
             'font-family="sans-serif" font-size="12">',
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
