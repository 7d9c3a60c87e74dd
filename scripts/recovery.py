"""What the loss of a peer costs, and what it costs to be ready for one.

    python3 scripts/recovery.py deaths [--deaths 5] [--every SECONDS]
    python3 scripts/recovery.py copies [--rounds 3] [--mbps 100] [--steps 60]
    python3 scripts/recovery.py slow [--every SECONDS]

Model: a GPT-2 of 10.8 million parameters with AdamW, so 130 MB of parameters and optimizer state, over three joiners.

`deaths` kills joiners of one run over loopback with SIGKILL, and starts a new one each time. The first dies after half
of the period, and the run ends half a period after the last. It prints the seconds from each kill to the broker's
decision, to the moment when all peers are ready, and to the next completed step. Then it prints the training overhead
ratio: what the steps take at their median, over the time of the whole run. So it counts copies, too.

`copies` runs the same steps with the copies that peers keep of each other's share, and without them, in turns. It also
prints what copies cost by the steps beside them. Each joiner stands behind a line of its own, in a network namespace.
It takes root and iproute2.

`slow` makes one of the joiners four times slower for a while: it is stopped for three quarters of the time. The script
prints what the broker says of it, and the median step before, at the begin and at the end.

It takes a binary from `cargo build --release`, or one that FUSIONLLM names.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from common import (
    Hosts, add_results, machine, metrics, program, settings, spread, summary as spread_of, ticket, wait, write_results)

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("what", choices=["deaths", "copies", "slow"])
parser.add_argument("--deaths", type=int, default=5)
parser.add_argument("--every", type=float, default=15.0, help="seconds of training from one death to the next")
parser.add_argument("--rounds", type=int, default=3)
parser.add_argument("--mbps", type=float, default=100.0, help="rate of each joiner's line")
parser.add_argument("--steps", type=int, default=60)
add_results(parser)
options = parser.parse_args()
BINARY = str(program())
PEERS = 3
SETTINGS = {
    "model.n_layer": 6,
    "model.n_embd": 384,
    "model.n_head": 6,
    "data.context": 64,
    "train.batch": 4,
    "train.micro_batch": 1,
    "eval.every": 0,
    "checkpoint.every": 0,
    # The same stages in every row.
    "plan.scheduler": "equal-compute",
}


def peers(run):
    """The names of the peers that the plan uses."""
    named = json.loads((run / "plan.json").read_text())["peers"]
    # Where machines are measured, the plan also says what they do.
    return [peer if isinstance(peer, str) else peer["name"] for peer in named]


def deaths(directory):
    run, log = directory / "run", directory / "broker.log"
    command = [BINARY, "broker", "--listen", "127.0.0.1:0", "--peers", str(PEERS), "--run-dir", str(run)]
    # It is interrupted long before.
    command += ["--steps", "1000000", *settings(SETTINGS)]
    with open(log, "w") as out:
        broker = subprocess.Popen(command, stdout=out, stderr=out)
    environment = {**os.environ, "FUSIONLLM_TICKET": ticket(run, broker)}
    join = lambda name: subprocess.Popen(
        [BINARY, "join", "--name", name], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    joiners = {f"p{i}": join(f"p{i}") for i in range(PEERS)}
    said = lambda what: log.read_text().count(what)
    last = lambda: (metrics(run) or [{"step": 0}])[-1]["step"]
    seen = {"decision": [], "ready": [], "next step": []}
    try:
        wait(last, broker)
        for death in range(options.deaths):
            time.sleep(options.every if death else options.every / 2)
            # One that has a part. A newcomer may be a spare.
            used = peers(run)
            name = next(name for name in joiners if name in used)
            lost, ready = said("lost "), said("training goes on")
            joiners[name].send_signal(signal.SIGKILL)
            killed = time.monotonic()
            since = lambda: time.monotonic() - killed
            joiners.pop(name).wait()
            wait(lambda: said("lost ") > lost, broker)
            seen["decision"].append(since())
            wait(lambda: said("training goes on") > ready, broker)
            seen["ready"].append(since())
            before = last()
            wait(lambda: last() > before, broker)
            seen["next step"].append(since())
            joiners[f"n{death}"] = join(f"n{death}")
        time.sleep(options.every / 2)
        broker.send_signal(signal.SIGINT)
        broker.wait()
        for what, figures in seen.items():
            print(f"from the kill to the {what}: {spread(figures)} s")
        summary = json.loads((run / "summary.json").read_text())
        for i in summary["incidents"]:
            parts = ", ".join(f"{part[:-2].replace('_', ' ')} {i[part]:.2f} s" for part in i if part.endswith("_s"))
            moved = i["restored_bytes"] / 1e6
            print(f"  {i['peer']} at step {i['step']}, back to {i['restarted_at']}: {parts}, {moved:.1f} MB moved")
        cost = sum(i[part] for i in summary["incidents"] for part in i if part.endswith("_s"))
        steps = [line["step_s"] for line in metrics(run)]
        print(f"{len(steps)} steps, {sum(steps):.0f} s in steps that count, {cost:.1f} s in interruptions")
        least = len(steps) * statistics.median(steps)
        print(f"copies slowed the steps down by {summary['overhead_s']['copies']:.1f} s in all")
        ratio = least / (sum(steps) + cost)
        print(f"training overhead ratio with a death every {options.every:.0f} s: {ratio:.3f}")
        write_results(options.results, {
            "deaths": options.deaths, "every_s": options.every, "steps": len(steps), "overhead_ratio": ratio,
            "interruptions_s": cost, "copies_s": summary["overhead_s"]["copies"],
            **{f"{what.replace(' ', '_')}_s": spread_of(figures) for what, figures in seen.items()},
            "lost_work_s": spread_of([i["lost_work_s"] for i in summary["incidents"]])})
    finally:
        for process in [broker, *joiners.values()]:
            process.kill()
            process.wait()


def slow(directory):
    run, log = directory / "run", directory / "broker.log"
    command = [BINARY, "broker", "--listen", "127.0.0.1:0", "--peers", str(PEERS), "--run-dir", str(run)]
    # Joiners are measured, and the planner may leave one out.
    command += ["--steps", "1000000", *settings(SETTINGS | {"plan.scheduler": "op-fence", "compression.name": "auto"})]
    with open(log, "w") as out:
        broker = subprocess.Popen(command, stdout=out, stderr=out)
    environment = {**os.environ, "FUSIONLLM_TICKET": ticket(run, broker)}
    joiners = [
        subprocess.Popen([BINARY, "join", "--name", f"p{i}"], env=environment, stdout=subprocess.DEVNULL,
                         stderr=subprocess.DEVNULL)
        for i in range(PEERS)
    ]
    # The medians of all steps from one number of them to another one.
    median = lambda begin, end: statistics.median([line["step_s"] for line in metrics(run)[begin:end]])
    try:
        wait(lambda: metrics(run), broker)
        time.sleep(options.every)
        begin = len(metrics(run))
        used = peers(run)
        quiet_s, before = median(3, begin), len(used)
        print(f"the plan uses {', '.join(used)}; median step {quiet_s:.3f} s")
        name = used[-1]
        hogged = joiners[int(name[1:])]
        until, quarter = time.monotonic() + 4 * options.every, time.monotonic() + options.every / 4
        early = begin
        while time.monotonic() < until:
            hogged.send_signal(signal.SIGSTOP)
            time.sleep(0.03)
            hogged.send_signal(signal.SIGCONT)
            time.sleep(0.01)
            if time.monotonic() < quarter:
                early = len(metrics(run))
        end = len(metrics(run))
        used = peers(run)
        early_s, end_s = median(begin + 1, early), median((early + end) // 2, end)
        print(f"{name} four times slower: median step {early_s:.3f} s at the begin")
        print(f"the plan uses {', '.join(used)}; median step {end_s:.3f} s at the end")
        predicted_s = json.loads((run / "plan.json").read_text())["predicted_step_s"]
        print(f"predicted for that plan: {predicted_s:.3f} s")
        write_results(options.results, {
            "every_s": options.every, "peers_before": before, "peers_at_the_end": len(used), "before_s": quiet_s,
            "slowed_s": early_s, "end_s": end_s, "predicted_s": predicted_s})
        print("the broker: ", *log.read_text().splitlines()[-5:], sep="\n  ")
    finally:
        for process in [broker, *joiners]:
            process.kill()
            process.wait()


def copies(directory):
    took, shares = {"true": [], "false": []}, []
    for number in range(2 * options.rounds):
        kept = ["true", "false"][(number + number // 2) % 2]
        run = directory / f"run{number}"
        with Hosts(PEERS + 1, options.mbps) as hosts, open(directory / "log", "a") as log:
            command = [BINARY, "broker", "--peers", PEERS, "--run-dir", run, "--steps", options.steps]
            command += [*settings(SETTINGS), f"--set=checkpoint.copies={kept}"]
            # Without it, joiners are not measured, and copies do not keep to a part of a link's rate.
            command += ["--set=compression.name=auto"]
            broker = hosts.start(0, command, stdout=log, stderr=log)
            joined = ticket(run, broker)
            joiners = [
                hosts.start(i, [BINARY, "join", joined, "--name", f"p{i}"], stdout=log, stderr=log)
                for i in range(1, PEERS + 1)
            ]
            broker.wait()
            took[kept].append(sum(line["step_s"] for line in metrics(run)[2:]))
            cost = json.loads((run / "summary.json").read_text())["overhead_s"]["copies"]
            for process in [broker, *joiners]:
                process.kill()
                process.wait()
        took_s, share = took[kept][-1], 100 * cost / took[kept][-1]
        shares += [share] if kept == "true" else []
        print(f"copies {kept:5}: {took_s:.2f} s for {options.steps - 2} steps; copies cost {share:.2f} %", flush=True)
    ratios = [with_copies / without for with_copies, without in zip(took["true"], took["false"])]
    print(f"time with copies over time without them: {spread(ratios, 3)}")
    print(f"medians: {statistics.median(took['true']):.2f} s, {statistics.median(took['false']):.2f} s")
    write_results(options.results, {
        "mbps": options.mbps, "steps": options.steps, "share_percent": spread_of(shares), "ratio": spread_of(ratios),
        "with_copies_s": spread_of(took["true"]), "without_s": spread_of(took["false"])})


print(machine())
with tempfile.TemporaryDirectory() as directory:
    {"deaths": deaths, "copies": copies, "slow": slow}[options.what](Path(directory))
