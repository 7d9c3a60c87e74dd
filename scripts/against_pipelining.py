#!/usr/bin/env python3
"""Times the same pipeline here and in PyTorch's torch.distributed.pipelining over the same slow links, in turn, and prints the ratios.

    pip install torch && cargo build --release
    python3 scripts/against_pipelining.py [--steps 12] [--rounds 3] [--rows op-fence/none,op-fence/auto] [--out RESULT.json]

Four hosts, each a network namespace, in two sites: 1 Gbps between hosts of one site, 8 Mbps between each two hosts of different sites, which
the kernel shapes (HTB) where a host sends. They are listed as they happened to join, alternating between the sites. A byte-level GPT-2 of
8 layers of width 256, embeddings not tied, no dropout, float32; batch 16 x 128 in 8 micro-batches; AdamW without clipping; one thread a host.

PyTorch: Schedule1F1B over gloo, two layers a host in the order of the list, and as somebody would list the hosts who knows the sites.
FusionLLM: broker on the first host, a joiner on each that the plan uses, the plan made beforehand from a testbed file with those rates, by the scheduler and
the codec that the row names; equal-layers stands for PyTorch's cut in the order of the list. Both draw windows from the same text. A step's
time is that from its predecessor's end to its own.

It takes root, iproute2 and sch_htb. FUSIONLLM names the program, by default target/release/fusionllm.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import pathlib
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

from against_pytorch import ROOT, block

SITES = "abab"
WIDTH, HEADS, LAYERS, VOCABULARY, CONTEXT, BATCH, MICRO_BATCHES = 256, 4, 8, 256, 128, 16, 8
INSIDE, BETWEEN = 1000, 8  # Mbps
ADAMW = {"lr": 1e-3, "weight_decay": 0.1, "betas": [0.9, 0.99]}
# In which order hosts hold PyTorch's stages. The first row is what ratios are to.
PYTORCH = {"PyTorch 1F1B": range(len(SITES)), "PyTorch 1F1B, hosts sorted": sorted(range(len(SITES)), key=SITES.__getitem__)}
ROWS = ["equal-layers/none", "op-fence/none", "op-fence/int8", "op-fence/auto"]
JOB = f"""
[model]
family = "gpt2"
n_layer = {LAYERS}
n_embd = {WIDTH}
n_head = {HEADS}
tie_word_embeddings = false
resid_pdrop = 0.0
embd_pdrop = 0.0
attn_pdrop = 0.0
[data]
kind = "text"
files = ["text"]
tokenizer = "bytes"
context = {CONTEXT}
[train]
batch = {BATCH}
micro_batch = {BATCH // MICRO_BATCHES}
schedule = "1f1b"
optimizer = {{ name = "adamw", lr = {ADAMW["lr"]}, weight_decay = {ADAMW["weight_decay"]}, betas = {ADAMW["betas"]}, clip = 0.0 }}
[eval]
every = 0
[checkpoint]
every = 0
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="steps of a run that count")
    parser.add_argument("--warm-up", type=int, default=3, help="steps of a run before these")
    parser.add_argument("--rounds", type=int, default=3, help="how often each row has its turn")
    parser.add_argument("--rows", default=",".join(ROWS), help="SCHEDULER/CODEC of FusionLLM, separated by commas")
    parser.add_argument("--tflops", type=float, default=0.05, help="what the planner takes a core to compute")
    parser.add_argument("--out", type=pathlib.Path, default="against-pipelining.json")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        return pipeline(args.rank, args.steps)
    program = pathlib.Path(os.environ.get("FUSIONLLM", ROOT / "target/release/fusionllm")).absolute()
    for there, complaint in [
        (os.geteuid() == 0, "network namespaces take root"),
        (shutil.which("ip") and shutil.which("tc"), "there is no ip or tc: install iproute2"),
        (importlib.util.find_spec("torch"), "there is no PyTorch: pip install torch"),
        (program.is_file(), f"there is no {program}: cargo build --release, or name the program in FUSIONLLM"),
        (args.steps > 0 and args.rounds > 0 and args.warm_up >= 0, "--steps and --rounds are at least 1, --warm-up at least 0"),
    ]:
        if not there:
            refuse(complaint)
    # So that namespaces go whichever way this ends.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory() as scratch, network() as hosts:
        compare(args, program, pathlib.Path(scratch), hosts)


def refuse(complaint):
    print(complaint, file=sys.stderr)
    sys.exit(2)


def compare(args, program, scratch, hosts):
    prepare(scratch, args.tflops)
    rows = {name: {"runs": []} for name in PYTORCH}
    for name in args.rows.split(","):
        rows[name] = {"runs": [], "predicted_step_s": plan(program, scratch, name)}
    result = {"steps": args.steps, "warm_up": args.warm_up, "sites": SITES, "mbps": [INSIDE, BETWEEN], "rows": rows}
    for turn in range(args.rounds):
        for name, row in rows.items():
            count = args.warm_up + args.steps
            if name in PYTORCH:
                steps = run_pytorch(scratch, [hosts[i] for i in PYTORCH[name]], count)
            else:
                steps = run_fusionllm(program, scratch, hosts, plan_file(scratch, name), count)
            row["runs"].append(steps)
            args.out.write_text(json.dumps(result, indent=1))
            print(f"round {turn + 1}, {name}: {median(steps[args.warm_up:]):.2f} s", file=sys.stderr)
    print(f"{args.rounds} runs of each in turn, the median of {args.steps} steps after {args.warm_up}; ratio: PyTorch's of the same round over the row's\n")
    print("| row | step, s | ratio | predicted, s | loss |\n| --- | --- | --- | --- | --- |")
    medians = {name: [median(run[args.warm_up:]) for run in row["runs"]] for name, row in rows.items()}
    theirs = next(iter(medians.values()))
    for (name, row), ours in zip(rows.items(), medians.values()):
        ratio = spread([a / b for a, b in zip(theirs, ours)])
        predicted = f"{row['predicted_step_s']:.2f}" if "predicted_step_s" in row else "-"
        print(f"| {name} | {spread(ours)} | {ratio} | {predicted} | {row['runs'][-1][0]['loss']:.2f} to {row['runs'][-1][-1]['loss']:.2f} |")


def median(steps):
    return statistics.median(s["step_s"] for s in steps)


def spread(figures):
    return f"{statistics.median(figures):.2f} ({min(figures):.2f} to {max(figures):.2f})"


def prepare(scratch, tflops):
    """The text, the job and the testbed, in which hosts share this machine's cores."""
    sources = sorted((ROOT / "crates").glob("*/src/*.rs"))
    (scratch / "text").write_bytes(b"".join(path.read_bytes() for path in sources))
    (scratch / "job.toml").write_text(JOB)
    slowdown = max(1.0, len(SITES) / len(os.sched_getaffinity(0)))
    devices = "".join(
        f'[[device]]\nname = "peer-{i}"\nsite = "{site}"\ntflops = {tflops}\nmemory_bandwidth = "5 GB/s"\nmemory = "4 GiB"\nslowdown = {slowdown}\n'
        for i, site in enumerate(SITES))
    sites = "".join(f'[[site]]\nname = "{site}"\nrate = "{INSIDE} Mbps"\n' for site in sorted(set(SITES)))
    (scratch / "testbed.toml").write_text(f'{devices}{sites}[[link]]\nbetween = ["a", "b"]\nrate = "{BETWEEN} Mbps"\n')


@contextlib.contextmanager
def network():
    """Hosts on one bridge, by their namespaces' names; gone at the end."""
    made = []

    def ip(arguments):
        tool(f"ip {arguments}")

    def namespace(name):
        name = f"pipeline{os.getpid()}-{name}"
        ip(f"netns add {name}")
        made.append(name)
        return name

    try:
        switch = namespace("switch")
        ip(f"-n {switch} link add br0 type bridge")
        ip(f"-n {switch} link set br0 up")
        hosts = [namespace(i) for i in range(len(SITES))]
        for i, host in enumerate(hosts):
            ip(f"-n {host} link set lo up")
            ip(f"-n {host} link add eth0 type veth peer name p{i} netns {switch}")
            ip(f"-n {host} addr add {address(i)}/24 dev eth0")
            ip(f"-n {host} link set eth0 up")
            ip(f"-n {switch} link set p{i} master br0 up")
            shape(host, i)
        yield hosts
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)


def shape(host, index):
    """A class of its own for what goes to each other host, with a queue of 100 ms."""
    tool(f"tc -n {host} qdisc add dev eth0 root handle 1: htb")
    for to, site in enumerate(SITES):
        if to == index:
            continue
        rate = INSIDE if site == SITES[index] else BETWEEN
        tool(f"tc -n {host} class add dev eth0 parent 1: classid 1:{to + 1} htb rate {rate}mbit quantum 15000")
        tool(f"tc -n {host} qdisc add dev eth0 parent 1:{to + 1} bfifo limit {rate * 12500}")
        tool(f"tc -n {host} filter add dev eth0 parent 1: protocol ip u32 match ip dst {address(to)}/32 flowid 1:{to + 1}")


def address(index):
    return f"10.79.0.{index + 1}"


def tool(command):
    done = subprocess.run(command.split(), stderr=subprocess.PIPE, text=True)
    if done.returncode:
        refuse(f"`{command}`: {done.stderr.strip()}\n  hint: network namespaces take root, iproute2 and sch_htb")


class Processes:
    """What runs on the hosts for one row; killed at the end."""

    def __init__(self, scratch):
        self.scratch = scratch
        self.log = scratch / "log"
        self.log.write_bytes(b"")
        self.all = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.all:
            process.kill()
            process.wait()

    def start(self, host, *command, stdout=subprocess.DEVNULL):
        one = {name: "1" for name in ("RAYON_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        with self.log.open("ab") as log:
            # In a session of its own, so that Ctrl-C comes here alone.
            self.all.append(subprocess.Popen(
                ["ip", "netns", "exec", host, *map(str, command)], stdin=subprocess.DEVNULL, stdout=stdout, stderr=log,
                cwd=self.scratch, env=os.environ | one | {"GLOO_SOCKET_IFNAME": "eth0"}, start_new_session=True))

    def run_until(self, done):
        """Waits for `done`; the first process that fails ends it all."""
        while not done():
            for process in self.all:
                if process.poll():
                    sys.exit(f"{' '.join(process.args[4:7])} ended with status {process.returncode}:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.1)

    def finish(self):
        self.run_until(lambda: all(process.poll() == 0 for process in self.all))


def run_pytorch(scratch, hosts, steps):
    lines = scratch / "pytorch.jsonl"
    with Processes(scratch) as processes, lines.open("wb") as output:
        for rank, host in enumerate(hosts):
            stdout = output if rank + 1 == len(hosts) else subprocess.DEVNULL
            processes.start(host, sys.executable, pathlib.Path(__file__).resolve(), "--rank", rank, "--steps", steps, stdout=stdout)
        processes.finish()
    return read(lines)


def plan_file(scratch, name):
    return scratch / f"{name.replace('/', '-')}.json"


def plan(program, scratch, name):
    """Makes the row's plan: the seconds that a step is predicted to take."""
    scheduler, codec = name.split("/")
    by_layers = scheduler == "equal-layers"
    path = plan_file(scratch, name)
    predicted = answer(program, "plan", scratch / "job.toml", "--testbed", scratch / "testbed.toml", "-o", path,
                       "--scheduler", "equal-number" if by_layers else scheduler, "--compression", codec)
    if by_layers:
        cut_by_layers(path)
        predicted = answer(program, "simulate", path)
    return predicted["predicted_step_s"]


def cut_by_layers(path):
    """Gives each stage of a plan as many whole layers, the first what stands before them and the last what follows."""
    plan = json.loads(path.read_text())
    stages = [[] for _ in plan["stages"]]
    layer = 0
    for index, node in enumerate(plan["model"]["nodes"]):
        if named := re.search(r"\.h\.(\d+)\.", node["name"]):
            layer = int(named[1])
        stages[layer * len(stages) // LAYERS].append(index)
    for stage, nodes in zip(plan["stages"], stages):
        stage["nodes"] = nodes
    path.write_text(json.dumps(plan))


def answer(*command):
    done = subprocess.run([*command, "--json"], capture_output=True, text=True)
    if done.returncode:
        refuse(f"{' '.join(map(str, command))}:\n{done.stderr.strip()}")
    return json.loads(done.stdout)


def run_fusionllm(program, scratch, hosts, plan, steps):
    run = scratch / "run"
    shutil.rmtree(run, ignore_errors=True)
    ticket = run / "ticket"
    with Processes(scratch) as processes:
        processes.start(hosts[0], program, "broker", scratch / "job.toml", "--plan", plan, "--run-dir", run, "--steps", steps)
        processes.run_until(lambda: ticket.exists() and ticket.read_text().endswith("\n"))
        # Hosts that the plan leaves out are turned away.
        for name in (peer["name"] for peer in json.loads(plan.read_text())["peers"]):
            host = hosts[int(name.removeprefix("peer-"))]
            processes.start(host, program, "join", ticket.read_text().strip(), "--name", name)
        processes.finish()
    return read(run / "metrics.jsonl")


def read(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{"step_s": line["step_s"], "loss": line["loss"]} for line in lines]


def pipeline(rank, steps):
    """PyTorch's side of one host. The last prints a line for each step."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch.nn import functional as F

    count = len(SITES)
    first, last = rank == 0, rank + 1 == count

    class Stage(nn.Module):
        def __init__(self):
            super().__init__()
            if first:
                self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
            self.h = nn.Sequential(*[block(torch, WIDTH, HEADS) for _ in range(LAYERS // count)])
            if last:
                self.ln_f, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

        def forward(self, x):
            if first:
                x = self.wte(x) + self.wpe(torch.arange(CONTEXT))
            x = self.h(x)
            return self.head(self.ln_f(x)) if last else x

    torch.set_num_threads(1)
    torch.manual_seed(rank)
    dist.init_process_group("gloo", init_method=f"tcp://{address(0)}:29500", rank=rank, world_size=count)
    model = Stage()
    for part in model.modules():
        if isinstance(part, (nn.Linear, nn.Embedding)):
            part.weight.data.normal_(0, 0.02)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    schedule = Schedule1F1B(
        PipelineStage(model, rank, count, torch.device("cpu")), MICRO_BATCHES,
        loss_fn=lambda logits, labels: F.cross_entropy(logits.flatten(0, 1), labels.flatten()))
    text = torch.frombuffer(bytearray(pathlib.Path("text").read_bytes()), dtype=torch.uint8).long()
    draw = torch.Generator().manual_seed(1)  # the same on all hosts, so that no batch crosses a link
    ended = time.perf_counter()
    for _ in range(steps):
        starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,), generator=draw).tolist()
        windows = torch.stack([text[s:s + CONTEXT + 1] for s in starts])
        losses = []
        optimizer.zero_grad()
        schedule.step(
            *([windows[:, :-1]] if first else []), target=windows[:, 1:] if last else None, losses=losses if last else None, return_outputs=False)
        optimizer.step()
        took, ended = time.perf_counter() - ended, time.perf_counter()
        if last:
            print(json.dumps({"step_s": took, "loss": torch.stack(losses).mean().item()}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
