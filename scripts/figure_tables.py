"""The tables of README.md and docs/performance.md, from the results in docs/figures.json.

Each function makes what stands between `<!-- figures: NAME -->` and `<!-- end -->`. A comparison is with the rival's
best setting, and shows the losses where codecs take part.
"""

import statistics
import textwrap

MIB = 2**20
MISSING = "not measured"


class NotMeasured(Exception):
    """A table's result is not in the file. The exception's text is the name of the measurement."""


class Results:
    """The results by the names of their measurements."""

    def __init__(self, records):
        self.records = records

    def __contains__(self, name):
        return name in self.records

    def __getitem__(self, name):
        if name not in self.records:
            raise NotMeasured(name)
        return self.records[name]["result"]

    def there(self, *names):
        return [name for name in names if name in self]

    def caution(self, name):
        """What README must say beside an old result that does not keep to the rules of today's."""
        said = self.records[name].get("caution")
        return f" ({said})" if said else ""

    def source(self, *names):
        """Where the figures are from: the commands, and the conditions under which they were measured."""
        wanted, names = names, self.there(*names)
        commands = dict.fromkeys(self.records[name]["command"] for name in names)
        if not commands:
            raise NotMeasured(wanted[0])
        parts = ["\n".join(["```console", *(f"$ {command}" for command in commands), "```"])]
        groups = {}
        for name in names:
            groups.setdefault(conditions(self.records[name]), []).append(self.records[name])
        for words, records in groups.items():
            shares = [record["others_share"] for record in records if record.get("others_share") is not None]
            busy = f"Other processes took {percents(shares)} of the processor time." if shares else \
                "It was not recorded how busy the machine was."
            parts.append(wrapped(f"{words} {busy}"))
        return "\n\n".join(parts)


def conditions(record):
    """When and on what a result was measured, in a sentence or two."""
    text = processor_of(record["machine"])
    names = {"torch": "PyTorch", "jax": "JAX"}
    text += "".join(f", {names.get(name, name)} {version}" for name, version in record.get("versions", {}).items())
    commit = f", commit {record['commit']}" if record.get("commit") else ""
    program = record.get("program")
    build = f", a {program} build" if program not in (None, "release") else ""
    words = f"Measured on {record['date']}: {text}{commit}{build}."
    words += f" {record['note']}" if record.get("note") else ""
    return f"**A quick trial of a few steps, which measures nothing.** {words}" if record["quick"] else words


def processor_of(facts):
    details = [*filter(None, [facts.get("level"), *facts.get("extras", [])])]
    text = f"{facts['cores']} cores of {facts['processor']}" + (f" ({', '.join(details)})" if details else "")
    return text + (f", {facts['memory_gib']} GiB" if facts.get("memory_gib") else "")


def percents(shares):
    low, high = (f"{100 * share:.0f}" for share in (min(shares), max(shares)))
    return f"{low} %" if low == high else f"{low} to {high} %"


def wrapped(text):
    return textwrap.fill(text, 118, break_long_words=False, break_on_hyphens=False)


def table(headings, rows):
    line = lambda cells: "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|"
    return "\n".join(line(cells) for cells in [headings, ["---"] * len(headings), *rows])


def spread(figures, digits=2, sign=""):
    """Such as `0.96 (0.77 to 1.09)`; the middle alone where that is all there is."""
    middle, *ends = (f"{figure:{sign}.{digits}f}" for figure in figures)
    return f"{middle} ({ends[0]} to {ends[1]})" if ends and len(set(ends)) > 1 else middle


def seconds(value):
    if value is None:
        return ""
    return f"{value:.3f} s" if value < 0.3 else f"{value:.2f} s"


def mib(count):
    return f"{count / MIB:.0f} MiB" if count else ""


def best_rival(result):
    """The rival's fastest row. Some old results have ratios alone."""
    return min(result["rows"][1:], key=lambda row: (row["step_s"] or 0, -row["ratio"][0]))


def against(results, names, memory):
    """A row for each side of each comparison; the rival's best is in bold."""
    rows = []
    for name in results.there(*names):
        result = results[name]
        best = best_rival(result)
        first = f"`{result['model']}`, {result['parameters'] / 1e6:.1f} M parameters"
        first += ", bf16" if result["precision"] == "bf16" else ""
        for row in result["rows"]:
            ratio = "" if row is result["rows"][0] else spread(row["ratio"])
            title = row["row"].replace("PyTorch, ", "").replace("+", " + ")
            title = f"{first}: {title}" if row is result["rows"][0] else f"PyTorch, {title}"
            bold = (lambda text: f"**{text}**") if row is best else (lambda text: text)
            cells = [bold(title), seconds(row["step_s"]), bold(ratio) if ratio else ""]
            rows.append(cells + [mib(row.get(key)) for key in ("peak_bytes", "model_bytes")] * memory)
    headings = ["row", "step", "ours / theirs"] + ["peak resident", "of these by the model"] * memory
    return table(headings, rows) + "\n\n" + results.source(*names)


def pytorch(results):
    return against(results, ["pytorch/gpt2", "pytorch/gpt2-narrow", "pytorch/resnet50"], memory=True)


def workers(results):
    names = ["torch-gpt2", "torch-narrow", "bf16-gpt2", "bf16-narrow"]
    return against(results, [f"workers/{name}" for name in names], memory=False)


def jax(results):
    rows = []
    names = ["workers/jax-gpt2", "workers/jax-narrow"]
    for name in results.there(*names):
        ours, theirs = results[name]["rows"]
        rows.append([f"`{results[name]['model']}`", seconds(ours["step_s"]), seconds(theirs["step_s"]),
                     spread(theirs["ratio"])])
    return table(["model", "worker", "plain JAX, one jit", "worker / plain JAX"], rows) + "\n\n" + \
        results.source(*names)


def pipeline(results):
    rows = []
    if "pipeline/cpu" in results:
        r = results["pipeline/cpu"]
        rows.append(["processor time of a step on four peers over QUIC, over that on one peer",
                     f"{r['four_s'] / r['one_s']:.2f} ({r['four_s']:.2f} s over {r['one_s']:.2f} s)"])
    if "pipeline/outside" in results:
        r = results["pipeline/outside"]
        rows.append([f"share of a `{r['model']}` step outside `Backend::run`", f"{100 * r['outside_share']:.2f} %"])
    return table(["what", "measured"], rows) + "\n\n" + results.source("pipeline/cpu", "pipeline/outside")


def planning(results):
    parts = []
    if "planning/speed" in results:
        rows = [[str(plan["devices"]), seconds(plan["planned_s"]), seconds(plan["simulated_in_s"])]
                for plan in results["planning/speed"]["plans"] if plan["scheduler"] == "op-fence"]
        parts.append(table(["devices", "`op-fence` plans in", "a simulated step of one peer a device takes"], rows))
    if "planning/quality" in results:
        r = results["planning/quality"]
        parts.append(wrapped(
            f"Over {r['problems']} random problems that can be solved exactly, a plan took {r['median']:.3f} times the "
            f"exact optimum in the median, and {r['worst']:.3f} times at worst. A baseline's plan was faster "
            f"{r['beaten_by_baseline']} times. The lower bound is {r['bound_median']:.2f} of the exact optimum in the "
            "median."))
    return "\n\n".join([*parts, results.source("planning/speed", "planning/quality")])


def headline(results):
    r = results["headline/rows"]
    rows = []
    for row in r["rows"]:
        predicted = row["predicted_s"]
        error = f"{off(predicted, row['step_s'][0]):+.0f} %" if predicted else ""
        loss = f"{row['loss_last']:.3f} after {row['steps']}" if row.get("loss_last") else MISSING
        rows.append([f"`{row['row']}`", f"{row['used']} of {r['peers']}", spread(row["step_s"]) + " s",
                     seconds(predicted) if predicted else "", error, f"{row['bytes_per_step'] / 1e6:.1f} MB", loss])
    text = table(["row", "devices used", "step", "predicted", "off by", "sent in a step", "training loss"], rows)
    if r["factors"]:
        causes = list(next(iter(r["factors"].values())))
        rows = []
        for baseline, of in r["factors"].items():
            total = 1
            for factor in of.values():
                total *= factor
            rows.append([f"`{baseline}`", f"{total:.1f}", *(f"x {of[cause]:.1f}" for cause in causes)])
        text += "\n\n" + table(["over", "times as fast", *causes], rows)
    return text + "\n\n" + results.source("headline/rows")


def off(predicted, measured):
    """The error of a prediction in percent; negative where it is too short."""
    return 100 * (predicted / measured - 1)


def fastest(rows, prefix, hosts=None):
    rows = [row for row in rows if row["row"].startswith(prefix) and hosts in (None, row["hosts"])]
    return min(rows, key=lambda row: row["step_s"][0], default=None)


def rivals(rows):
    """PyTorch's best setting on all hosts, and on one site."""
    everywhere = max((row["hosts"] for row in rows), default=0)
    here = [row for row in rows if row["row"].startswith("pytorch/")]
    return [fastest([row for row in here if test(row["hosts"])], "pytorch/")
            for test in (lambda count: count == everywhere, lambda count: count < everywhere)]


def pipelining(results):
    r = results["pipelining/rows"]
    best = rivals(r["rows"])
    rows = []
    for row in r["rows"]:
        title = f"**{row['title']}**" if row in best else row["title"]
        predicted = row["predicted_s"]
        rows.append([title, f"{row['hosts']}" + (", one site" if row["sites"] == 1 else ""),
                     spread(row["step_s"]) + " s", seconds(predicted) if predicted else "",
                     f"{off(predicted, row['step_s'][0]):+.0f} %" if predicted else "",
                     f"{row['loss_last']:.2f}" if row.get("loss_last") else MISSING,
                     mib(row.get("allocated_bytes")), mib(row["resident_bytes"])])
    headings = ["row", "hosts used", "step", "predicted", "off by", f"loss after {r['warm_up'] + r['steps']} steps",
                "allocated, a process", "resident, a process"]
    return table(headings, rows) + "\n\n" + results.source("pipelining/rows")


def convergence(results):
    parts = []
    for name, model in (("convergence/gpt2", "GPT-2"), ("convergence/resnet", "ResNet-18")):
        if name in results:
            r = results[name]
            rows = [[f"`{row['codec']}`", ", ".join(f"{loss:.3f}" for loss in by_seed(row["val_loss"])),
                     "" if row["codec"] == "none" else ", ".join(map(change, by_seed(row["change_percent"]))),
                     f"{row['bytes'] / 1e6:.0f} MB" if row.get("bytes") else ""] for row in r["rows"]]
            headings = ["codec", f"{model}: validation loss after {r['steps']} steps", "against none", "sent"]
            parts.append(table(headings, rows))
    if "convergence/time" in results:
        r = results["convergence/time"]
        first = r["rows"][0]["time_s"]
        rows = [[f"`{row['codec']}`", seconds(row["step_s"]), seconds(row["predicted_s"]), str(row["steps"] or "never"),
                 f"{row['time_s'] / 60:.0f} min" if row["time_s"] else "", f"{first / row['time_s']:.1f}" if row["time_s"]
                 else ""] for row in r["rows"]]
        headings = [f"codec, {r['peers']} homes with {r['uplink']}", "step", "predicted",
                    f"steps to the loss of none after {r['steps']}", "time", "times as fast"]
        parts.append(table(headings, rows))
    return "\n\n".join([*parts, results.source("convergence/gpt2", "convergence/resnet", "convergence/time")])


def by_seed(figures):
    """Old results have one seed, and may lack a loss."""
    return figures if isinstance(figures, list) else [figures] * (figures is not None)


def change(percent):
    return f"{percent:+.2f} %" if abs(percent) < 10 else f"{percent:+.0f} %"


def codecs(results):
    ratio = lambda figures: figures if isinstance(figures, str) else spread(figures)  # old results are sentences
    rows = [[f"`{row['codec']}`", ratio(row["encode"]), ratio(row["decode"])]
            for row in results["codecs/speed"]["rows"]]
    return table(["codec", "encode", "decode"], rows) + "\n\n" + results.source("codecs/speed")


def prediction(results):
    r = results["prediction/testbeds"]

    def error(figures):
        text = spread(figures, 1, "+")
        return text.replace(" (", " % (") if "(" in text else text + " %"

    rows = [[row["testbed"], seconds(row["predicted_s"]), seconds(row["measured_s"]), error(row["step"]),
             error(row["compute"]), error(row["memory"])] for row in r["rows"]]
    every, sizes = r["all"], r["all"]["median_sizes"]
    words = (f"Of the {every['runs']} runs, {every['within_10_percent']} are within 10 % of the prediction. Their "
             f"errors are {every['step'][1]:+.1f} to {every['step'][2]:+.1f} %. The median size of the errors is "
             f"{sizes['step']:.1f} % for the step, {sizes['compute']:.1f} % for computing and "
             f"{sizes['memory']:.1f} % for memory.")
    headings = ["testbed", "predicted", "measured", "step off by", "computing off by", "memory off by"]
    return "\n\n".join([table(headings, rows), wrapped(words), results.source("prediction/testbeds")])


def errors(results):
    """The errors of all predicted steps by the table in which they are: least and largest, in percent."""
    found = {}
    if "prediction/testbeds" in results:
        found["the testbeds made for it"] = results["prediction/testbeds"]["all"]["step"][1:]
    for name, title in (("headline/rows", "two slow uplinks"), ("pipelining/rows", "two sites of hosts")):
        if name in results:
            of = [off(row["predicted_s"], row["step_s"][0]) for row in results[name]["rows"] if row["predicted_s"]]
            found[title] = of and [min(of), max(of)]
    if "memory/runs" in results:
        of = [off(row["predicted_s"], row["measured_s"]) for row in results["memory/runs"]["rows"]]
        found["little memory"] = [min(of), max(of)]
    return {title: ends for title, ends in found.items() if ends}


def all_errors(results):
    rows = [[title, f"{low:+.0f} to {high:+.0f} %"] for title, (low, high) in errors(results).items()]
    return table(["table", "errors of the predicted step"], rows)


def memory(results):
    rows = []
    for row in results["memory/runs"]["rows"]:
        rows.append([row["model"], row["memory"], seconds(row["predicted_s"]), seconds(row["measured_s"]),
                     f"{off(row['predicted_s'], row['measured_s']):+.0f} %", f"{row['peak_bytes'] / 1e6:.0f} MB",
                     row["loss"]])
    headings = ["model", "memory", "predicted step", "measured step", "off by", "measured memory", "last loss"]
    return table(headings, rows) + "\n\n" + results.source("memory/runs")


def recovery(results):
    rows = []
    if "recovery/deaths" in results:
        r = results["recovery/deaths"]
        for key, what in (("decision_s", "the broker's decision"), ("ready_s", "all peers ready again"),
                          ("next_step_s", "the next completed step")):
            rows.append([f"from a `kill -9` to {what}, {r['deaths']} deaths", spread(r[key]) + " s"])
    if "recovery/overhead" in results:
        r = results["recovery/overhead"]
        rows.append([f"{r['steps']} steps at their median over the time of the run, {r['deaths']} death in "
                     f"{r['every_s']:.0f} s", f"{r['overhead_ratio']:.3f}"])
        rows.append(["interruptions of that run: detection, planning, loading, work done again",
                     f"{r['interruptions_s']:.1f} s"])
    if "recovery/copies" in results:
        r = results["recovery/copies"]
        rows.append([f"copies over lines of {r['mbps']:.0f} Mbps: cost of the steps beside them, in {r['steps']} steps",
                     f"{spread(r['share_percent'])} %"])
    if "recovery/slow" in results:
        r = results["recovery/slow"]
        if r["before_s"]:
            rows.append(["a step before one of three joiners becomes four times slower", seconds(r["before_s"])])
        rows.append(["a step just after one of three joiners became four times slower", seconds(r["slowed_s"])])
        rows.append([f"a step at the end, with {r['peers_at_the_end']} of {r['peers_before']} peers",
                     seconds(r["end_s"])])
    names = [f"recovery/{name}" for name in ("deaths", "overhead", "copies", "slow")]
    return table(["what", "measured"], rows) + "\n\n" + results.source(*names)


def faults(results):
    r = results["faults/storm"]
    waits = r["until_training_goes_on_s"]
    rows = [[f"faults, in a run of {r['storm_s']:.0f} s", str(r["faults"])],
            ["interruptions of training", str(len(waits))],
            ["losses that differ from the undisturbed run's", f"{r['losses_that_differ']} of {r['losses']}"]]
    if waits:
        rows.append(["from the last sign of life until training goes on", f"{min(waits):.1f} to {max(waits):.1f} s"])
    return table(["what", "measured"], rows) + "\n\n" + results.source("faults/storm")


def attack(results):
    r = results["attack/turns"]
    rows = [[f"{row['attack']}, {row['rate']:.0f}", f"{row['ratio']:.2f}", f"{row['attempts']:.0f}"]
            for row in r["rows"]]
    words = f"Of {r['losses']} losses, {r['losses_that_differ']} differ from the undisturbed run's."
    headings = ["attack and its rate", "steps under attack over quiet ones", "attempts"]
    return "\n\n".join([table(headings, rows), words, results.source("attack/turns")])


def transport(results):
    exact = lambda value: f"{1e3 * value:.0f} ms" if value > 0.01 else f"{1e6 * value:.0f} us"
    rows = [[row["what"], exact(row["ours_s"]), exact(row["raw_s"]), spread(row["ratio"])]
            for row in results["transport/quic"]["rows"]]
    return table(["what", "ours", "raw QUIC", "ours / raw"], rows) + "\n\n" + results.source("transport/quic")


def slow_lines(results):
    r = results["slow-lines/start"]
    need, start, resume = r["lines_need_s"], r["start"], r["resume"]
    rows = [
        ["from the first joiner to the first step, from weights", f"{need:.0f} s", f"{start['first_step_s']:.0f} s"],
        ["from the first joiner to the first step of the resumed run", f"{2 * need:.0f} s",
         f"{resume['first_step_s']:.0f} s"],
        ["lines of progress in both", "", f"{start['progress_lines']} and {resume['progress_lines']}"],
    ]
    return table([f"{r['weights_bytes'] / 1e6:.0f} MB of weights", "the lines need", "measured"], rows) + "\n\n" + \
        results.source("slow-lines/start")


def crowd(results):
    rows = []
    names = ["crowd/hundred", "crowd/long"]
    for name in results.there(*names):
        r = results[name]
        who = f"{r['peers']} peers: "
        if r["first_step_s"]:
            rows.append([who + "from the first joiner to the first step", f"{r['first_step_s']:.1f} s"])
        if r["goes_on_s"]:
            rows.append([who + f"{r['deaths']} of them killed, until training goes on", f"{r['goes_on_s']:.1f} s"])
        if r["half_way_mib"]:
            rows.append([who + f"memory of the broker after {r['half_way_steps']} steps",
                         f"{r['half_way_mib']:.0f} MiB"])
        rows.append([who + f"memory of the broker, at most over {r['steps']} steps", f"{r['peak_mib']:.0f} MiB"])
    return table(["what", "measured"], rows) + "\n\n" + results.source(*names)


def imports(results):
    rows = []
    if "import/stock" in results:
        r = results["import/stock"]
        rows.append(["stock models whose loss and gradients match PyTorch's", f"{r['matches']} of {r['tried']}"])
        rows.append(["of the others: refused, different", f"{r['refused']}, {r['differs']}"])
    for row in results["import/cost"]["rows"] if "import/cost" in results else []:
        rows.append([f"importing {row['model']}, an archive of {mib(row['archive_bytes'])}",
                     f"{seconds(row['import_s'])}, peak resident memory {mib(row['resident_bytes'])}"])
    return table(["what", "result"], rows) + "\n\n" + results.source("import/stock", "import/cost")


def learning(results):
    rows = []
    for name, what in (("learning/shakespeare", "Shakespeare's plays, byte by byte, GPT-2 of 0.8 M parameters"),
                       ("learning/cifar10", "10,000 images of CIFAR-10, ResNet-18 of width 16")):
        if name in results:
            r = results[name]
            reached = [f"validation loss {r.get('val_loss') or 0:.2f}"] * bool(r.get("val_loss"))
            reached += [f"accuracy {100 * (r.get('val_accuracy') or 0):.1f} %"] * bool(r.get("val_accuracy"))
            rows.append([what, ", ".join(reached), f"{r['steps_s'] / 60:.0f} min"])
    return table(["what", "reached", "in"], rows) + "\n\n" + results.source("learning/shakespeare", "learning/cifar10")


def readme(results):
    """README's table: our step over the rival's fastest, codecs with their losses, and the errors of predictions."""
    rows = []
    names = results.there("pytorch/gpt2", "pytorch/gpt2-narrow", "pytorch/resnet50")
    if names:
        models = "; ".join(results[name]["model"] for name in names)
        ratios = "; ".join(f"{best_rival(results[name])['ratio'][0]:.2f}" for name in names)
        rows.append([f"our step over PyTorch's with its fastest flags (below 1 is faster): {models}", ratios,
                     "scripts/against_pytorch.py"])
    if "headline/rows" in results:
        steps = {row["row"]: row for row in results["headline/rows"]["rows"]}
        wanted = [("equal-number/none", "equal split"), ("op-fence/none", "`op-fence`"),
                  ("op-fence/auto", "`op-fence` and lossy codecs (`auto`)")]
        wanted = [(key, title) for key, title in wanted if key in steps]
        rows.append(["step, four peers behind two 8 Mbps uplinks: " + "; ".join(title for _, title in wanted),
                     "; ".join(f"{steps[key]['step_s'][0]:.2f}" for key, _ in wanted) + " s",
                     "scripts/compression.py headline"])
        rows += loss_row("training loss there", steps.get("op-fence/none"), steps.get("op-fence/auto"),
                         steps.get("op-fence/auto", {}).get("steps"), "scripts/compression.py headline")
    if "pipelining/rows" in results:
        rows += readme_pipelining(results["pipelining/rows"], results.caution("pipelining/rows"))
    if "convergence/gpt2" in results:
        r = results["convergence/gpt2"]
        changes = {row["codec"]: statistics.mean(by_seed(row["change_percent"])) for row in r["rows"]}
        wanted = [("auto", "`auto`"), ("topk@7", "`adatopk` at 7x"), ("topk@10", "`adatopk` at 10x"),
                  ("adatopk-published@30", "AdaTopK as published")]
        wanted = [(key, title) for key, title in wanted if key in changes]
        seeds = max(len(by_seed(row["change_percent"])) for row in r["rows"])
        rows.append([f"validation loss after {r['steps']} steps, against no codec, mean of up to {seeds} seeds: "
                     + "; ".join(title for _, title in wanted) + results.caution("convergence/gpt2"),
                     "; ".join(change(changes[key]) for key, _ in wanted), "scripts/compression.py convergence"])
    if (found := errors(results)):
        low, high = min(low for low, _ in found.values()), max(high for _, high in found.values())
        ranges = [f"{low:+.0f} to {high:+.0f} %"]
        title = "error of the predicted step: all tables"
        if made := found.get("the testbeds made for it"):
            title += "; the testbeds made for it"
            ranges.append(f"{made[0]:+.1f} to {made[1]:+.1f} %")
        rows.append([title, "; ".join(ranges), "scripts/figures.py prediction headline pipelining memory"])
    if "learning/shakespeare" in results:
        r = results["learning/shakespeare"]
        rows.append(["validation loss on Shakespeare's plays, 4 peers",
                     f"{r['val_loss']:.2f} in {r['steps_s'] / 60:.0f} min",
                     "fusionllm train examples/tinyshakespeare.toml"])
    used = [name for name in results.records if name in (
        *names, "headline/rows", "pipelining/rows", "convergence/gpt2", "prediction/testbeds", "learning/shakespeare")]
    trial = "**These are quick trials of a few steps, which measure nothing.**\n\n" * any(
        results.records[name]["quick"] for name in used)
    dates = sorted(results.records[name]["date"] for name in used)
    machines = dict.fromkeys(processor_of(results.records[name]["machine"]) for name in used)
    words = wrapped(f"Measured from {dates[0]} to {dates[-1]} on {'; '.join(machines)}.") if used else ""
    made = table(["what", "figure", "command"], [[*cells, f"`{command}`"] for *cells, command in rows])
    return f"{trial}{made}\n\n{words}"


def readme_pipelining(r, caution):
    """The rows without codecs first, each beside PyTorch's best for the same hosts; then codecs, with the losses."""
    ours = {row["row"]: row for row in r["rows"] if row["row"].startswith("fusionllm/")}
    everywhere, one_site = rivals(r["rows"])
    script = "scripts/against_pipelining.py"
    step = lambda row: f"{row['step_s'][0]:.2f}"
    rows = []
    if one_site and "fusionllm/free" in ours:
        rows.append(["step, 8 hosts in two sites, free to leave hosts out: PyTorch at its best"
                     f"{caution}; ours, no codec",
                     f"{step(one_site)}; {step(ours['fusionllm/free'])} s", script])
    plain, coded = ours.get("fusionllm/limited"), ours.get("fusionllm/limited/auto")
    if everywhere and plain and coded:
        rows.append(["step where the model needs all 8 hosts: PyTorch at its best"
                     f"{caution}; ours, no codec; ours, lossy codecs",
                     f"{step(everywhere)}; {step(plain)}; {step(coded)} s", script])
        rows += loss_row("training loss there", plain, coded, r["warm_up"] + r["steps"], script)
    return rows


def loss_row(title, plain, coded, steps, script):
    """What lossy codecs do to the loss, beside a row that they make faster."""
    if not plain or not coded:
        return []
    figure = MISSING
    if plain.get("loss_last") and coded.get("loss_last"):
        figure = f"{plain['loss_last']:.2f}; {coded['loss_last']:.2f} " \
            f"({change(100 * (coded['loss_last'] / plain['loss_last'] - 1))})"
    return [[f"{title} after {steps} steps: no codec; lossy codecs", figure, script]]


TABLES = {
    "readme": readme, "pytorch": pytorch, "pipeline": pipeline, "planning": planning, "headline": headline,
    "pipelining": pipelining, "convergence": convergence, "codecs": codecs, "prediction": prediction,
    "all-errors": all_errors, "memory": memory, "recovery": recovery, "workers": workers, "jax": jax,
    "faults": faults, "attack": attack, "transport": transport, "slow-lines": slow_lines,
    "crowd": crowd, "import": imports, "learning": learning,
}
