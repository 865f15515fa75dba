# SPDX-License-Identifier: Apache-2.0
"""Medians, ratios against the bars, the lines of the table, and the facts about the host."""
import os
import platform
import re
import statistics
from pathlib import Path


def metric(name, values):
    """The value NAME of one run, as kvbench printed it or made of what it printed."""
    if name == "milliseconds":
        return values["seconds"] * 1e3
    if name != "cpu_per_gb":
        return values[name]
    return sum(cpu_per_gb(values))


def cpu_per_gb(values):
    """Seconds a GB: (client, daemon)."""
    gigabytes = values["bytes"] / 1e9
    return ((values["cpu_user"] + values["cpu_system"]) / gigabytes,
            values["cpu_daemon"] / gigabytes)


def judge_bar(case, bar, medians):
    """{"reference", "ratio", "bar", "met"}, or None where no reference was measured."""
    best = max if case.better == "higher" else min
    ours = medians["kvfs"]
    if bar.references:
        there = [name for name in bar.references if name in medians]
        if not there:
            return None
        reference = best(there, key=lambda name: medians[name])
        ratio, limit = ours / medians[reference], bar.limit
    else:
        reference, ratio, limit = f"{bar.limit:g} {case.unit}", ours / bar.limit, 1.0
    met = ratio >= limit if case.better == "higher" else ratio <= limit
    return {"reference": reference, "ratio": ratio, "bar": limit, "met": met}


def judge(case, systems, rename):
    """The case's object of the JSON; SYSTEMS: {system: [values of the metric]}."""
    medians = {name: statistics.median(values) for name, values in systems.items() if values}
    bars = [judged for bar in case.bars if "kvfs" in medians
            and (judged := judge_bar(case, bar, medians))]
    sign = 1 if case.better == "higher" else -1
    binding = min(bars, key=lambda b: (b["ratio"] / b["bar"]) ** sign, default=None)
    for judged in bars:
        judged["reference"] = rename(judged["reference"])
    return {
        "name": case.name,
        "question": case.question,
        "unit": case.unit,
        "better": case.better,
        "systems": {rename(name): [min(values), medians[name], max(values)]
                    for name, values in systems.items() if values},
        "reference": binding["reference"] if binding else None,
        "ratio": binding["ratio"] if binding else None,
        "bar": binding["bar"] if binding else None,
        "met": all(b["met"] for b in bars) if bars else None,
        "bars": bars,
    }


def add_cpu(entry, runs, rename):
    """Adds the CPU seconds a GB of client and daemon, where bytes were moved."""
    for name, all_values in runs.items():
        parts = [cpu_per_gb(v) for v in all_values if v.get("bytes") and "cpu_daemon" in v]
        if parts:
            client, daemon = (statistics.median(p) for p in zip(*parts))
            entry.setdefault("cpu_s_per_gb", {})[rename(name)] = {"client": client,
                                                                  "daemon": daemon}


def number(value):
    return f"{value:,.0f}" if abs(value) >= 10000 else f"{value:.4g}"


def table_line(entry):
    """One case, for people."""
    if "error" in entry:
        return f"{entry['name']:<20} failed: {entry['error']}"
    medians = "  ".join(f"{name} {number(values[1])}" for name, values in entry["systems"].items())
    sign = ">=" if entry["better"] == "higher" else "<="
    bars = [f"{b['ratio']:.2f} x {b['reference']} ({sign} {b['bar']:g}): "
            f"{'met' if b['met'] else 'MISSED'}" for b in entry["bars"]]
    return f"{entry['name']:<20} {entry['unit']:<5} {medians}  |  {'; '.join(bars) or 'no bar'}"


# ---- The host ----

def read(path):
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def memory_bytes():
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def disk_of(path):
    """What the kernel knows of the disk that holds PATH."""
    device = os.stat(path).st_dev
    folder = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    if not (folder / "queue").exists():
        folder = folder.parent
    return {"name": folder.name,
            "scheduler": read(folder / "queue/scheduler"),
            "read_ahead_kb": read(folder / "queue/read_ahead_kb")}


def host(sandbox):
    model = re.search(r"model name\s*: (.*)", read("/proc/cpuinfo") or "")
    return {
        "kernel": platform.release(),
        "cpu": model.group(1) if model else platform.machine(),
        "cpus": os.cpu_count(),
        "memory_bytes": memory_bytes(),
        "filesystem": sandbox.fstype,
        "disk": disk_of(sandbox.base),
        "free_bytes": os.statvfs(sandbox.base).f_bavail * os.statvfs(sandbox.base).f_frsize,
        "fuse_max_pages_limit": read("/proc/sys/fs/fuse/max_pages_limit"),
        "libfuse_example": str(sandbox.example() or "not built"),
    }
