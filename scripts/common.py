"""What the measuring scripts share: finding and running the program, printing spreads, writing results."""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

from machine import machine  # noqa: F401, scripts take it from here

ROOT = pathlib.Path(__file__).resolve().parent.parent


def program():
    """The `fusionllm` to measure: the one that FUSIONLLM names, or the release build."""
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    path = pathlib.Path(os.environ.get("FUSIONLLM", target / "release/fusionllm")).absolute()
    if not path.is_file():
        refuse(f"there is no {path}\n  hint: run `cargo build --release`, or name the program in FUSIONLLM")
    return path


def benchmark(package, name):
    """The command that starts a benchmark, which Cargo builds first. FUSIONLLM_PROFILE names another profile of Cargo
    than `bench`, such as `dev` to try a script."""
    command = ["cargo", "bench", "-q", "-p", package, "--bench", name, "--no-run", "--message-format=json"]
    command += ["--profile", os.environ.get("FUSIONLLM_PROFILE", "bench")]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    for line in done.stdout.splitlines():
        message = json.loads(line)
        if message.get("executable") and message["target"]["name"] == name:
            return [message["executable"], "--bench"]
    refuse(f"`{' '.join(command)}` built no benchmark")


def refuse(complaint):
    print(f"error: {complaint}", file=sys.stderr)
    sys.exit(2)


def answer(*command):
    """The JSON that a command of the program prints."""
    done = subprocess.run([*map(str, command), "--json"], capture_output=True, text=True)
    if done.returncode:
        refuse(f"{' '.join(map(str, command))}:\n{done.stderr.strip()}")
    return json.loads(done.stdout)


def spread(figures, digits=2):
    """Median and range."""
    middle, low, high = statistics.median(figures), min(figures), max(figures)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def summary(figures):
    """Median, least and largest, as results have them."""
    return [statistics.median(figures), min(figures), max(figures)]


def add_results(parser):
    parser.add_argument("--results", type=pathlib.Path, metavar="FILE", help="also write the figures to FILE, as JSON")


def write_results(path, figures):
    """Writes what `scripts/figures.py` reads, where a path is given."""
    if path:
        path.write_text(json.dumps(figures, indent=1) + "\n")


class Hosts:
    """Hosts on this machine: network namespaces on one bridge, host 0 for the broker. Every other host has a line of
    its own, which the kernel limits to `mbps` in both directions. It takes root and iproute2."""

    def __init__(self, count, mbps=None):
        self.count, self.mbps = count, mbps
        self.tag = f"fl{os.getpid() % 10000}"

    def __enter__(self):
        self._ip(f"netns add {self.tag}s")
        self._ip(f"-n {self.tag}s link add br0 type bridge")
        self._ip(f"-n {self.tag}s link set br0 up")
        for i in range(self.count):
            host = f"{self.tag}h{i}"
            self._ip(f"netns add {host}")
            self._ip(f"-n {host} link set lo up")
            self._ip(f"-n {host} link add eth0 type veth peer name p{i} netns {self.tag}s")
            self._ip(f"-n {host} addr add 10.78.0.{i + 1}/24 dev eth0")
            self._ip(f"-n {host} link set eth0 up")
            self._ip(f"-n {self.tag}s link set p{i} master br0")
            self._ip(f"-n {self.tag}s link set p{i} up")
            if i and self.mbps:
                for namespace, device in ((host, "eth0"), (f"{self.tag}s", f"p{i}")):
                    bucket = f"rate {self.mbps}mbit burst 16kb latency 100ms"
                    command = f"tc -n {namespace} qdisc add dev {device} root tbf {bucket}"
                    subprocess.run(command.split(), check=True)
        return self

    def __exit__(self, *_):
        for name in ["s"] + [f"h{i}" for i in range(self.count)]:
            subprocess.run(["ip", "netns", "del", self.tag + name], stderr=subprocess.DEVNULL)

    def start(self, host, command, **options):
        """Starts a command on a host."""
        return subprocess.Popen(["ip", "netns", "exec", f"{self.tag}h{host}", *map(str, command)], **options)

    def _ip(self, arguments):
        subprocess.run(["ip", *arguments.split()], check=True)


def settings(values):
    """The options of the command line that set these keys of the job file."""
    return [f"--set={key}={value}" for key, value in values.items()]


def metrics(run):
    """The lines of a run's `metrics.jsonl` that are whole."""
    path = run / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def wait(condition, broker, seconds=1200):
    """Waits until a condition holds, and returns what it gave. The broker must not end meanwhile."""
    begun = time.monotonic()
    while not (found := condition()):
        if broker.poll() is not None:
            raise SystemExit(f"the broker ended with status {broker.returncode}")
        if time.monotonic() - begun > seconds:
            raise SystemExit(f"nothing happened for {seconds} s")
        time.sleep(0.02)
    return found


def ticket(run, broker):
    """The ticket of a run, once its broker has written it."""
    path = run / "ticket"
    return wait(lambda: path.exists() and path.read_text().endswith("\n") and path.read_text().strip(), broker)
