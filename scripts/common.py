"""What the measuring scripts share: finding and running the program, naming the machine, printing spreads."""

import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def program():
    """The `fusionllm` to measure: the one that FUSIONLLM names, or the release build."""
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    path = pathlib.Path(os.environ.get("FUSIONLLM", target / "release/fusionllm")).absolute()
    if not path.is_file():
        refuse(f"there is no {path}\n  hint: run `cargo build --release`, or name the program in FUSIONLLM")
    return path


def refuse(complaint):
    print(f"error: {complaint}", file=sys.stderr)
    sys.exit(2)


def answer(*command):
    """The JSON that a command of the program prints."""
    done = subprocess.run([*map(str, command), "--json"], capture_output=True, text=True)
    if done.returncode:
        refuse(f"{' '.join(map(str, command))}:\n{done.stderr.strip()}")
    return json.loads(done.stdout)


def machine():
    """The processor, its cores and its widest vectors, in one line."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}"
    facts = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    facts = {key.strip(): value.strip() for key, value in facts.items()}
    vectors = "with AVX-512" if "avx512f" in facts.get("flags", "").split() else "without AVX-512"
    return f"{len(os.sched_getaffinity(0))} cores of {facts.get('model name', platform.machine())}, {vectors}"


def spread(figures, digits=2):
    """Median and range."""
    middle, low, high = statistics.median(figures), min(figures), max(figures)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"
