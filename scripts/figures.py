#!/usr/bin/env python3
"""Measures the figures of README.md and docs/performance.md, and writes them into both documents.

    cargo build --release && sudo python3 scripts/figures.py [SECTION[/MEASUREMENT] ...] [--again] [--quick]
    python3 scripts/figures.py --list         # sections, minutes, what each needs
    python3 scripts/figures.py --documents    # only writes the documents
    python3 scripts/figures.py --check        # fails where a document differs from what the file gives

All results go into docs/figures.json, each with the processor, the date, the commit, and how busy other processes kept
the machine meanwhile. The documents have marked places, from `<!-- figures: NAME -->` to `<!-- end -->`, which this
script fills from that file.

Without names it measures every section. A measurement that the file has from this commit and processor is left out, so
an interrupted call can be started again; --again measures it anew. What cannot be measured here is named and left out,
and the file keeps its earlier result. Nothing else should run meanwhile.

--quick takes few steps, to try the whole in minutes. Its results are no measurement and say so. They and the documents
with them go to target/figures, unless --into names another folder.

FUSIONLLM names the program, by default target/release/fusionllm. FUSIONLLM_PROFILE is Cargo's profile of benchmarks.
"""

import argparse
import datetime
import difflib
import importlib.metadata
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys

import figure_tables
from common import ROOT, program, refuse
from figure_sections import NEEDS, SECTIONS
from machine import Watch, machine, processor

DOCUMENTS = ["README.md", "docs/performance.md"]
RESULTS = "docs/figures.json"
PLACE = re.compile(r"(<!-- figures: (?P<name>[\w./-]+) -->)(?P<text>.*?)(<!-- end -->)", re.DOTALL)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="SECTION", help="such as pytorch or pytorch/gpt2; all by default")
    parser.add_argument("--list", action="store_true", help="print what there is, and how long it takes")
    parser.add_argument("--documents", action="store_true", help="write the documents, and measure nothing")
    parser.add_argument("--check", action="store_true", help="fail where the documents differ from the file")
    parser.add_argument("--quick", action="store_true", help="few steps of everything")
    parser.add_argument("--again", action="store_true", help="measure also what this commit was measured for already")
    parser.add_argument("--into", type=pathlib.Path, metavar="DIR", help="folder of the results and the documents")
    args = parser.parse_args()
    into = args.into or (ROOT / "target/figures" if args.quick else ROOT)
    chosen = choose(args.names)
    if args.list:
        return print_list(chosen)
    if args.check:
        return check(read_results(into))
    # Children of a call that is stopped end with it.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    failed = [] if args.documents else measure(args, into, chosen)
    write_documents(into)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


def choose(names):
    """The measurements that are named, or all, by their full names."""
    every = {f"{section}/{one.name}": one for section, of in SECTIONS.items() for one in of}
    for name in names:
        if name not in every and name not in SECTIONS:
            refuse(f"there is no section {name!r}\n  hint: --list prints them all")
    wanted = lambda full: full in names or full.partition("/")[0] in names
    return {full: one for full, one in every.items() if not names or wanted(full)}


def unmet(measurement):
    """What this machine lacks for a measurement."""
    return [reason for need in measurement.needs if (reason := NEEDS[need]())]


def print_list(chosen):
    for full, one in chosen.items():
        needs = f"  ({', '.join(unmet(one))})" if unmet(one) else ""
        print(f"{full:24} {one.minutes:4g} min, quick {one.quick_minutes:g} min: {one.shown(False)}{needs}")
    print(f"{sum(one.minutes for one in chosen.values()):g} min in all on two cores, "
          f"quick {sum(one.quick_minutes for one in chosen.values()):g} min")


def measure(args, into, chosen):
    """Runs the measurements that are not done, writes each result at once, and returns the names of those that
    failed."""
    here = conditions(args.quick)
    os.environ["FUSIONLLM"] = str(program())  # commands run in folders of their own
    due, failed = {}, []
    version = "quick" if args.quick else here["commit"].replace(" ", "-")
    results = read_results(into)
    same = lambda old: old and all(old.get(key) == here[key] for key in ("commit", "quick", "machine"))
    for full, one in chosen.items():
        if lacks := unmet(one):
            print(f"{full}: left out, {', '.join(lacks)}")
        elif same(results.get(full)) and not args.again:
            print(f"{full}: measured before")
        else:
            due[full] = one
    minutes = lambda of: sum(one.quick_minutes if args.quick else one.minutes for one in of)
    print(f"{machine()}\n{len(due)} measurements, about {minutes(due.values()):g} minutes on two quiet cores",
          flush=True)
    for number, (full, one) in enumerate(due.items()):
        left = minutes(list(due.values())[number:])
        print(f"== {number + 1} of {len(due)}: {full}, about {left:g} min left: {one.shown(args.quick)}", flush=True)
        try:
            found = run(one, args.quick, ROOT / "target/figures/work" / f"{full.replace('/', '-')}-{version}")
        except Failed as failure:
            print(f"{full}: {failure}", file=sys.stderr, flush=True)
            failed.append(full)
            continue
        results = read_results(into) | {full: {"command": one.shown(args.quick), **here, **found}}
        write_results(into, results)
        print(f"{full}: {found['took_s']:.0f} s, other processes took {100 * found['others_share']:.0f} % "
              f"of the processor time", flush=True)
    return failed


class Failed(Exception):
    """A measurement that gave no result."""


def run(one, quick, folder):
    """Runs a measurement in a folder of its own. One that failed leaves the folder, so that the next try goes on where
    the command can."""
    folder.mkdir(parents=True, exist_ok=True)
    # Building a benchmark does not belong to its time.
    command, results = one.command(quick, folder)
    results.unlink(missing_ok=True)
    shutil.rmtree(folder / "run", ignore_errors=True)
    # The program finds its examples from the repository, and scripts keep what they have in the folder.
    at = ROOT if one.tool[0] == "program" else folder
    watch = Watch()
    done = subprocess.run([*map(str, command)], cwd=at, stdin=subprocess.DEVNULL)
    busy = watch.figures()
    if done.returncode:
        raise Failed(f"ended with status {done.returncode}")
    try:
        found = busy | {"result": rounded(one.figures(results.read_text()))}
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise Failed(f"its results cannot be read: {error!r}") from error
    shutil.rmtree(folder)
    return found


def rounded(value):
    """Results with as many digits as anybody reads, so that the file can be read, too."""
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [rounded(inner) for inner in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def conditions(quick):
    """Under what the figures of this call are measured."""
    git = lambda *command: subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    changed = git("status", "--porcelain", "--", "crates", "scripts", "python", "Cargo.toml", "Cargo.lock")
    return {"quick": quick, "date": datetime.date.today().isoformat(),
            "commit": git("rev-parse", "--short=10", "HEAD") + (" with changes" if changed else ""),
            "program": str(program().parent.name), "machine": processor(),
            "versions": {name: version for name in ("torch", "jax", "transformers", "torchvision")
                         if (version := version_of(name))}}


def version_of(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def read_results(into):
    path = into / RESULTS
    return json.loads(path.read_text()) if path.exists() else {}


def write_results(into, results):
    """Writes the file under another name first, so that an interrupted call leaves a whole one."""
    path = into / RESULTS
    path.parent.mkdir(parents=True, exist_ok=True)
    order = [f"{section}/{one.name}" for section, of in SECTIONS.items() for one in of]
    results = {full: results[full] for full in sorted(results, key=lambda f: order.index(f) if f in order else -1)}
    new = path.with_suffix(".new")
    new.write_text(json.dumps(results, indent=1) + "\n")
    os.replace(new, path)


def filled(text, results, document):
    """A document with every marked place filled from the results."""
    def fill(place):
        table = figure_tables.TABLES.get(place["name"])
        if table is None:
            refuse(f"{document} has a place for figures {place['name']!r}, which nothing makes")
        inline = "\n" not in place["text"]
        try:
            made = table(figure_tables.Results(results))
        except figure_tables.NotMeasured as missing:
            made = f"`scripts/figures.py {missing}` was not run yet."
        return place[1] + (made if inline else f"\n\n{made.strip()}\n\n") + place[4]

    return PLACE.sub(fill, text)


def write_documents(into):
    results = read_results(into)
    for document in DOCUMENTS:
        path = into / document
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(filled((ROOT / document).read_text(), results, document))


def check(results):
    wrong = []
    for document in DOCUMENTS:
        text = (ROOT / document).read_text()
        right = filled(text, results, document)
        wrong += difflib.unified_diff(text.splitlines(), right.splitlines(), document, f"from {RESULTS}", lineterm="")
    if wrong:
        print("\n".join(wrong))
        sys.exit("the documents differ from the figures: run `python3 scripts/figures.py --documents`")


if __name__ == "__main__":
    main()
