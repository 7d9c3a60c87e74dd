"""The machine that measures: its processor, and how busy other processes kept it meanwhile."""

import ctypes
import os
import pathlib
import platform
import time

# What the processor must know for each level of the x86-64 instruction set, as Linux names it.
LEVELS = {
    "x86-64-v2": "cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3",
    "x86-64-v3": "avx avx2 bmi1 bmi2 f16c fma abm movbe",
    "x86-64-v4": "avx512f avx512bw avx512cd avx512dq avx512vl",
}
# Instructions beyond the levels that change the speed of products.
EXTRAS = ["avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8"]


def processor():
    """The processor, the cores that this process may use, the instruction set and the memory."""
    facts = _cpuinfo()
    flags = set(facts.get("flags", "").split())
    level = platform.machine()
    for name, needed in LEVELS.items():
        if not set(needed.split()) <= flags:
            break
        level = name
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": facts.get("model name", "a processor without a name"),
        "cores": len(os.sched_getaffinity(0)),
        "level": level,
        "extras": [extra for extra in EXTRAS if extra in flags],
        "memory_gib": round(memory / 2**30),
    }


def machine():
    """The same in one line."""
    facts = processor()
    vectors = ", ".join([facts["level"], *facts["extras"]])
    return f"{facts['cores']} cores of {facts['processor']} ({vectors}), {facts['memory_gib']} GiB"


def _cpuinfo():
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    facts = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in facts.items()}


def busy_seconds(stat):
    """The seconds in which the machine's cores worked for some process or were withheld by the host, and the number of
    cores. `stat` is the text of /proc/stat. Interrupts do not count: they belong to no process, and much of them is
    our own traffic."""
    lines = [line.split() for line in stat.splitlines() if line.startswith("cpu")]
    user, nice, system, _idle, _waiting, _interrupts, _deferred, stolen = map(int, lines[0][1:9])
    return (user + nice + system + stolen) / os.sysconf("SC_CLK_TCK"), len(lines) - 1


class Watch:
    """Measures how busy other processes keep the machine while the children of this one run."""

    def __init__(self):
        _adopt_orphans()
        self.load = os.getloadavg()[0]
        self.begun = time.monotonic()
        self.busy, self.own = self._now()

    def figures(self):
        """The share of all cores' time that other processes took since the start. Every child must have ended."""
        _reap_orphans()
        busy, own = self._now()
        took = time.monotonic() - self.begun
        return {"took_s": round(took, 1), "others_share": round(self._share(busy, own, took), 3),
                "load_before": round(self.load, 2), "load_after": round(os.getloadavg()[0], 2)}

    def _share(self, busy, own, took):
        others = (busy - self.busy) - (own - self.own)
        return min(1.0, max(0.0, others / (took * self.cores)))

    def _now(self):
        busy, self.cores = busy_seconds(pathlib.Path("/proc/stat").read_text())
        spent = os.times()
        return busy, spent.user + spent.system + spent.children_user + spent.children_system


def _adopt_orphans():
    """Children whose parent ends before them come to this process, so that their time is counted as ours."""
    set_child_subreaper = 36
    ctypes.CDLL(None).prctl(set_child_subreaper, 1, 0, 0, 0)


def _reap_orphans():
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
