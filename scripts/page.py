"""Measures the page of a run in a browser, and what those who watch it cost the run.

    page.py browser FILE     the first paint of a page, and how long each of its parts takes to be replaced; FILE is what
                             `cargo bench -p fusionllm-view --bench page -- --write FILE` wrote
    page.py viewers [STEPS]  the processor time of a run's broker with no viewer and with ten, of the whole run's

FUSIONLLM names the program, by default target/release/fusionllm. `browser` needs `chromedriver` and Chromium. In
`viewers`, runs with and without viewers take turns. A viewer is a program that reads the stream of events.
"""

import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[1]
PROGRAM = os.environ.get("FUSIONLLM", ROOT / "target/release/fusionllm")
VIEWERS, ROUNDS = 10, 3

REPLACE = """
const [name, content] = arguments, part = document.getElementById(name), times = [];
for (let i = 0; i < 10; i++) {
  const began = performance.now();
  part.innerHTML = content;
  part.getBoundingClientRect();
  times.push(performance.now() - began);
}
return times.sort((a, b) => a - b)[5];
"""


class Browser:
    """A headless Chromium, as WebDriver's protocol has it."""

    def __init__(self):
        self.driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True)
        for line in self.driver.stdout:
            if port := re.search(r"successfully on port (\d+)", line):
                break
        self.address = f"http://127.0.0.1:{port[1]}/session"
        options = {"args": ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1280,900"]}
        answer = self.call("", {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options}}})
        self.address += "/" + answer["sessionId"]

    def call(self, path, content):
        request = urllib.request.Request(self.address + path, json.dumps(content).encode())
        return json.load(urllib.request.urlopen(request))["value"]

    def run(self, script, *arguments):
        return self.call("/execute/sync", {"script": script, "args": list(arguments)})

    def close(self):
        urllib.request.urlopen(urllib.request.Request(self.address, method="DELETE"))
        self.driver.terminate()


def browser(file):
    parts = json.loads(pathlib.Path(file + ".json").read_text())
    chromium = Browser()
    paints = []
    for _ in range(ROUNDS):
        chromium.call("/url", {"url": pathlib.Path(file).resolve().as_uri()})
        paints.append(chromium.run("return performance.getEntriesByName('first-contentful-paint')[0].startTime"))
    print(f"first paint: {statistics.median(paints):.0f} ms")
    for name, content in parts:
        print(f"  {name:<10}{chromium.run(REPLACE, name, content):8.1f} ms")
    chromium.close()


def processor_s(pid):
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def watch(address, read):
    try:
        with urllib.request.urlopen(address + "events") as stream:
            while chunk := stream.read1(1 << 16):
                read.append(len(chunk))
    except OSError:
        pass


def trained(steps, viewers):
    """The processor seconds of the broker and of the whole run, and the bytes that the viewers read."""
    with tempfile.TemporaryDirectory() as directory:
        command = [PROGRAM, "train", "--steps", str(steps), "--run-dir", directory + "/run"]
        before = os.times()
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        read, broker, threads = [], 0.0, []
        for line in run.stderr:
            if address := re.search(r"page: (http\S+)", line):
                threads = [threading.Thread(target=watch, args=(address[1], read)) for _ in range(viewers)]
                for thread in threads:
                    thread.start()
            if line.startswith("step "):
                broker = processor_s(run.pid)
        run.wait()
        for thread in threads:
            thread.join()
        after = os.times()
        whole = after.children_user + after.children_system - before.children_user - before.children_system
        return broker, whole, sum(read)


def viewers(steps):
    alone, watched = [], []
    for _ in range(ROUNDS):
        alone.append(trained(steps, 0))
        watched.append(trained(steps, VIEWERS))
    broker, whole = (statistics.median(run[i] for run in alone) for i in (0, 1))
    cost = statistics.median(run[0] for run in watched) - broker
    read = statistics.median(run[2] for run in watched) / VIEWERS / 1e6
    print(f"the broker takes {broker:.2f} s of {whole:.1f} s of processor time; {VIEWERS} viewers add {cost:.2f} s,")
    print(f"{100 * cost / whole:.2f} % of the run, and read {read:.1f} MB each")


def main():
    match sys.argv[1:]:
        case ["browser", file]:
            browser(file)
        case ["viewers", *steps]:
            viewers(int(steps[0]) if steps else 100)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
