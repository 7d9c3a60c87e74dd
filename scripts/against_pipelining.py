#!/usr/bin/env python3
"""Times one training step over slow links, here and with PyTorch's torch.distributed.pipelining, in one run.

    pip install torch && cargo build --release
    sudo python3 scripts/against_pipelining.py [--rounds 2] [--steps 6] [--rows ROW,ROW] [--results FILE]

Hosts: eight network namespaces in two sites. The kernel shapes the links (HTB): 1 Gbps inside a site, 8 Mbps between
two hosts of different sites. The hosts joined alternately: a, b, a, b, and so on. All hosts share this machine's cores,
one thread each. A host that a row leaves out therefore costs that row no compute.

Model: a byte-level GPT-2 with 8 layers of width 256, embeddings not tied, no dropout, float32. A batch is 16 x 128
tokens in 8 micro-batches. The optimizer is AdamW without clipping. Both sides draw their windows from the same text.

Rows:

    pytorch/joined      PyTorch on all hosts, in the order in which they joined, as many layers each
    pytorch/sorted      PyTorch on all hosts, sorted by site by hand
    pytorch/one-site    PyTorch on the four hosts of one site

                        Each placement also has rows with other schedules and numbers of micro-batches, because its best
                        setting is what counts.

    fusionllm/limited   FusionLLM; every host offers so little memory (--memory) that seven hosts could train the model
                        only if they offload
    fusionllm/free      FusionLLM; it may leave hosts out

A row of PyTorch may end in /SCHEDULE@MICRO-BATCHES, as in pytorch/one-site/gpipe@4 (1f1b@8 by default). A FusionLLM row
may end in /CODEC, as in fusionllm/free/auto (none by default). PyTorch runs with gloo, AdamW with fused=True, and
gradients set to None. FusionLLM's broker measures hosts and links itself (`broker --peers`, `join`). Its schedule is
1F1B too.

Memory is the largest of any host. PyTorch knows no limit. `resident` is the largest resident set of the process, and
`allocated` is what FusionLLM's peer allocated while it trained, which is what its limit counts.

Rows run in turn, all of them in every round. A step's time runs from the end of the step before it to its own end.

It needs root, iproute2 and sch_htb. FUSIONLLM names the program, by default target/release/fusionllm.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import pathlib
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

from against_pytorch import block
from common import ROOT, add_results, machine, program, refuse, spread, summary, write_results

SITES = "abababab"
WIDTH, HEADS, LAYERS, VOCABULARY, CONTEXT, BATCH, MICRO_BATCH = 256, 4, 8, 256, 128, 16, 2
INSIDE, BETWEEN = 1000, 8  # Mbps
ADAMW = {"lr": 1e-3, "weight_decay": 0.1, "betas": [0.9, 0.99]}
# The hosts of PyTorch's stages, in order.
PLACEMENTS = {
    "joined": list(range(len(SITES))),
    "sorted": sorted(range(len(SITES)), key=SITES.__getitem__),
    "one-site": [host for host, site in enumerate(SITES) if site == SITES[0]],
}
ROWS = ["pytorch/joined",
        "pytorch/sorted", "pytorch/sorted/gpipe@8", "pytorch/sorted/1f1b@16",
        "pytorch/one-site", "pytorch/one-site/gpipe@8", "pytorch/one-site/1f1b@4", "pytorch/one-site/gpipe@4",
        "fusionllm/limited", "fusionllm/limited/auto", "fusionllm/free", "fusionllm/free/auto"]
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
micro_batch = {MICRO_BATCH}
schedule = "1f1b"
[train.optimizer]
name = "adamw"
lr = {ADAMW["lr"]}
weight_decay = {ADAMW["weight_decay"]}
betas = {ADAMW["betas"]}
clip = 0.0
[eval]
every = 0
[checkpoint]
every = 0
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6, help="measured steps of a run")
    parser.add_argument("--warm-up", type=int, default=2, help="steps of a run before the measured ones")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each row")
    parser.add_argument("--rows", default=",".join(ROWS), help="the rows to run, separated by commas")
    parser.add_argument("--memory", type=int, default=45, help="MiB that a host offers in the rows fusionllm/limited")
    add_results(parser)
    parser.add_argument("--stage", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stage is not None:
        return pipeline(json.loads(args.stage))
    for holds, complaint in [
        (os.geteuid() == 0, "network namespaces need root"),
        (shutil.which("ip") and shutil.which("tc"), "there is no ip or tc: install iproute2"),
        (importlib.util.find_spec("torch"), "there is no PyTorch: pip install torch"),
        (args.steps > 0 and args.rounds > 0 and args.warm_up >= 0, "--steps and --rounds are at least 1"),
    ]:
        if not holds:
            refuse(complaint)
    # The namespaces must go however this ends.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    rows = [Row(name, args.memory) for name in args.rows.split(",")]
    with tempfile.TemporaryDirectory() as scratch, network() as hosts:
        compare(args, rows, pathlib.Path(scratch), hosts)


class Row:
    """One line of the table."""

    def __init__(self, name, memory):
        side, placement, detail = (name.split("/") + ["", ""])[:3]
        self.name = name
        self.memory = memory if placement == "limited" else None
        self.runs = []
        if side == "pytorch" and placement in PLACEMENTS:
            schedule, _, count = (detail or f"1f1b@{BATCH // MICRO_BATCH}").partition("@")
            self.stages = PLACEMENTS[placement]
            self.schedule, self.micro_batches = schedule, int(count or BATCH // MICRO_BATCH)
            self.title = f"PyTorch, {placement}, {schedule} of {self.micro_batches}"
        elif side == "fusionllm" and placement in ("limited", "free"):
            self.stages, self.codec = None, detail or "none"
            limit = f"{memory} MiB a host" if self.memory else "free to choose"
            self.title = f"FusionLLM, {limit}, codec {self.codec}"
        else:
            refuse(f"there is no row {name!r}; --help lists the rows")

    def run(self, scratch, hosts, steps):
        runner = run_fusionllm if self.stages is None else run_pytorch
        return runner(self, scratch, hosts, steps)

    def figures(self):
        """The row, as results have it. The loss is that after the last step."""
        last = self.runs[-1]
        return {
            "row": self.name, "title": self.title, "hosts": len(last["hosts"]),
            "sites": len({SITES[host] for host in last["hosts"]}),
            "step_s": summary([run["median_s"] for run in self.runs]),
            "predicted_s": statistics.median([run.get("predicted_s") or 0 for run in self.runs]) or None,
            "allocated_bytes": max(run.get("allocated_bytes") or 0 for run in self.runs) or None,
            "resident_bytes": max(run["resident_bytes"] for run in self.runs),
            "loss_last": last["loss"][-1],
        }


def compare(args, rows, scratch, hosts):
    sources = sorted((ROOT / "crates").glob("*/src/**/*.rs"))
    (scratch / "text").write_bytes(b"".join(path.read_bytes() for path in sources))
    (scratch / "job.toml").write_text(JOB)
    for turn in range(args.rounds):
        for row in rows:
            run = row.run(scratch, hosts, args.warm_up + args.steps)
            run["median_s"] = statistics.median(run["step_s"][args.warm_up:])
            row.runs.append(run)
            print(f"round {turn + 1}, {row.title}: {run['median_s']:.2f} s on {names(run['hosts'])}", file=sys.stderr)
    print(f"{machine()}; {len(SITES)} hosts, {INSIDE} Mbps inside a site, {BETWEEN} Mbps between two sites")
    print(f"{args.rounds} rounds of {args.steps} measured steps after {args.warm_up}; median of the rounds (range)\n")
    print("| row | hosts used | step, s | times as fast | predicted, s | allocated, MiB | resident, MiB | loss |\n"
          "| --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        ratios = [first["median_s"] / run["median_s"] for first, run in zip(rows[0].runs, row.runs)]
        used = " / ".join(dict.fromkeys(names(run["hosts"]) for run in row.runs))
        predicted = [f"{run['predicted_s']:.2f}" for run in row.runs if run.get("predicted_s")]
        resident = max(run["resident_bytes"] for run in row.runs) / 2**20
        allocated = [f"{run['allocated_bytes'] / 2**20:.0f}" for run in row.runs if "allocated_bytes" in run]
        losses = f"{row.runs[-1]['loss'][0]:.3f} to {row.runs[-1]['loss'][-1]:.3f}"
        print(f"| {row.title} | {used} | {spread([run['median_s'] for run in row.runs])} | {spread(ratios, 1)} "
              f"| {', '.join(predicted) or '-'} | {', '.join(allocated) or '-'} | {resident:.0f} | {losses} |")
    write_results(args.results, {
        "rounds": args.rounds, "steps": args.steps, "warm_up": args.warm_up, "memory_mib": args.memory,
        "inside_mbps": INSIDE, "between_mbps": BETWEEN, "rows": [row.figures() for row in rows]})


def names(hosts):
    """Such as `4 of 8 (a1 a2 a3 a4)`: site and number in the site."""
    label = lambda host: f"{SITES[host]}{SITES[:host + 1].count(SITES[host])}"
    return f"{len(hosts)} of {len(SITES)} ({' '.join(label(host) for host in hosts)})"


@contextlib.contextmanager
def network():
    """The namespaces of the hosts, joined by a bridge. They are deleted at the end."""
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
    """Gives each receiving host a class of its own, with a queue of 100 ms."""
    tool(f"tc -n {host} qdisc add dev eth0 root handle 1: htb")
    for to, site in enumerate(SITES):
        if to == index:
            continue
        rate = INSIDE if site == SITES[index] else BETWEEN
        tool(f"tc -n {host} class add dev eth0 parent 1: classid 1:{to + 1} htb rate {rate}mbit quantum 15000")
        tool(f"tc -n {host} qdisc add dev eth0 parent 1:{to + 1} bfifo limit {rate * 12500}")
        tool(f"tc -n {host} filter add dev eth0 parent 1: protocol ip u32 "
             f"match ip dst {address(to)}/32 flowid 1:{to + 1}")


def address(index):
    return f"10.79.0.{index + 1}"


def tool(command):
    done = subprocess.run(command.split(), stderr=subprocess.PIPE, text=True)
    if done.returncode:
        refuse(f"`{command}`: {done.stderr.strip()}\n  hint: network namespaces need root, iproute2 and sch_htb")


class Processes:
    """The processes of one run, on their hosts. They are killed at the end."""

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

    def start(self, host, *command, output=None):
        one = {name: "1" for name in ("RAYON_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        with self.log.open("ab") as log, open(output or os.devnull, "wb") as out:
            # In a session of its own, so that Ctrl-C reaches this script alone.
            self.all.append(subprocess.Popen(
                ["ip", "netns", "exec", host, *map(str, command)], stdin=subprocess.DEVNULL, stdout=out, stderr=log,
                cwd=self.scratch, env=os.environ | one | {"GLOO_SOCKET_IFNAME": "eth0"}, start_new_session=True))

    def run_until(self, done):
        """Waits for `done`. The first process that fails ends the script."""
        while not done():
            for process in self.all:
                if process.poll():
                    refuse(f"{' '.join(process.args[4:7])} ended with status {process.returncode}:\n"
                           f"{self.log.read_text()[-4000:]}")
            time.sleep(0.1)


def run_pytorch(row, scratch, hosts, steps):
    outputs = [scratch / f"stage-{i}.jsonl" for i in range(len(row.stages))]
    with Processes(scratch) as processes:
        for index, host in enumerate(row.stages):
            stage = {"index": index, "count": len(row.stages), "first": address(row.stages[0]), "steps": steps,
                     "schedule": row.schedule, "micro_batches": row.micro_batches}
            script = pathlib.Path(__file__).resolve()
            processes.start(hosts[host], sys.executable, script, "--stage", json.dumps(stage), output=outputs[index])
        processes.run_until(lambda: all(process.poll() == 0 for process in processes.all))
    lines = [json.loads(line) for line in outputs[-1].read_text().splitlines()[:-1]]
    resident = max(json.loads(path.read_text().splitlines()[-1])["resident_bytes"] for path in outputs)
    return figures(lines, row.stages, resident)


def run_fusionllm(row, scratch, hosts, steps):
    run = scratch / "run"
    shutil.rmtree(run, ignore_errors=True)
    ticket = run / "ticket"
    with Processes(scratch) as processes:
        processes.start(hosts[0], program(), "broker", scratch / "job.toml", "--peers", len(hosts), "--run-dir", run,
                        "--steps", steps, "--set", f"compression.name={row.codec}")
        processes.run_until(lambda: ticket.exists() and ticket.read_text().endswith("\n"))
        memory = ["--memory", f"{row.memory} MiB"] if row.memory else []
        for index, host in enumerate(hosts):
            processes.start(host, program(), "join", ticket.read_text().strip(), "--name", f"peer-{index}", *memory)
        processes.run_until(lambda: processes.all[0].poll() == 0)
    summary = json.loads((run / "summary.json").read_text())
    used = [peer for peer in summary["peers"] if peer["operators"]]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    indices = [int(peer["name"].removeprefix("peer-")) for peer in used]
    resident = max(peer["resident_memory_bytes"] or 0 for peer in used)
    allocated = max(peer["peak_memory_bytes"] or 0 for peer in used)
    return figures(lines, indices, resident) | {
        "predicted_s": summary["predicted_step_s"], "allocated_bytes": allocated}


def figures(lines, hosts, resident):
    return {"hosts": hosts, "resident_bytes": resident,
            "step_s": [line["step_s"] for line in lines], "loss": [line["loss"] for line in lines]}


def pipeline(stage):
    """One stage of PyTorch's pipeline.

    The last stage prints a line for each step. Each stage prints its memory at the end.
    """
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed import pipelining
    from torch.nn import functional as F

    index, count = stage["index"], stage["count"]
    first, last = index == 0, index + 1 == count

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
    torch.manual_seed(index)
    dist.init_process_group("gloo", init_method=f"tcp://{stage['first']}:29500", rank=index, world_size=count)
    model = Stage()
    for part in model.modules():
        if isinstance(part, (nn.Linear, nn.Embedding)):
            part.weight.data.normal_(0, 0.02)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    kind = {"1f1b": pipelining.Schedule1F1B, "gpipe": pipelining.ScheduleGPipe}[stage["schedule"]]
    schedule = kind(
        pipelining.PipelineStage(model, index, count, torch.device("cpu")), stage["micro_batches"],
        loss_fn=lambda logits, labels: F.cross_entropy(logits.flatten(0, 1), labels.flatten()))
    text = torch.frombuffer(bytearray(pathlib.Path("text").read_bytes()), dtype=torch.uint8).long()
    draw = torch.Generator().manual_seed(1)  # the same on all hosts, so that no batch crosses a link
    ended = time.perf_counter()
    for _ in range(stage["steps"]):
        starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,), generator=draw).tolist()
        windows = torch.stack([text[s:s + CONTEXT + 1] for s in starts])
        losses = []
        optimizer.zero_grad(set_to_none=True)
        schedule.step(*([windows[:, :-1]] if first else []), target=windows[:, 1:] if last else None,
                      losses=losses if last else None, return_outputs=False)
        optimizer.step()
        took, ended = time.perf_counter() - ended, time.perf_counter()
        if last:
            print(json.dumps({"step_s": took, "loss": torch.stack(losses).mean().item()}), flush=True)
    dist.destroy_process_group()
    print(json.dumps({"resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}), flush=True)


if __name__ == "__main__":
    main()
