# SPDX-License-Identifier: Apache-2.0
"""What the cases need besides running one load: removals, copies, pressure, scale."""
import os
import shutil
import subprocess
import time

from places import BenchError, drop_caches

STREAM_RATE = 2 << 30
STREAM_SMALL = 1 << 30
LOOKUPS = 20000


# ---- measure(bench, case, place): one run; kvbench's values ----

def make(bench, case, place):
    """A fresh directory with the case's data in it, which is durable."""
    directory = bench.fresh_directory(place)
    bench.sandbox.kvbench("store", directory, *case.data.options(), "--block=4K", "--threads=4")
    place.settle()
    return directory


def unlink(bench, case, place):
    directory = make(bench, case, place)
    values = bench.sandbox.kvbench("unlink", directory, *case.data.options())
    directory.rmdir()
    place.settle()
    return values


def remove_tree(bench, case, place):
    directory = make(bench, case, place)
    start = time.monotonic()
    subprocess.run(["rm", "-r", directory], check=True, stdin=subprocess.DEVNULL)
    seconds = time.monotonic() - start
    place.settle()
    return {"seconds": seconds, "op_rate": case.data.count / seconds}


def copy(bench, case, place):
    directory = place.directory(case.data.name)
    place.settle()
    values = bench.sandbox.kvbench("copy", directory, *case.data.options())
    for entry in list(os.scandir(directory)):
        if entry.name.endswith(".copy"):
            os.unlink(entry.path)
    place.settle()
    return values


def pool(bench, case, place):
    directory = bench.fresh_directory(place)
    values = bench.sandbox.kvbench("pool", directory, *case.data.options(), *case.options)
    bench.sandbox.kvbench("unlink", directory)
    directory.rmdir()
    place.settle()
    return values


# ---- groups of their own: custom(bench, group, cases): {case name: {system: [values]}} ----

class Stream:
    """Another process that reads a file of SIZE bytes of the plain filesystem over and over.

    The file is sparse: it fills the page cache as any other does, at a steady rate, but takes no
    space on the disk.
    """

    def __init__(self, bench, size):
        self.directory = bench.sandbox.base / "stream"
        self.directory.mkdir()
        options = [f"--size={size}", "--block=1M"]
        bench.sandbox.kvbench("store", self.directory, "--size=0")
        (path,) = self.directory.iterdir()
        os.truncate(path, size)
        self.start = time.monotonic()
        self.process = subprocess.Popen(
            [bench.sandbox.build / "tools/bench/kvbench", "stream", self.directory, *options,
             f"--rate={STREAM_RATE}"], stdout=subprocess.DEVNULL)

    def wait(self, size):
        """Until SIZE bytes went through."""
        time.sleep(max(0.0, self.start + size / STREAM_RATE - time.monotonic()))
        if self.process.poll() is not None:
            raise BenchError("the stream has ended")

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self.process.terminate()
        self.process.wait()
        shutil.rmtree(self.directory)


def pressure(bench, group, cases):
    (case,) = cases
    (data,) = group.data
    result = {name: [] for name in case.systems}
    for name, description in group.places.items():
        place = bench.sandbox.open(name, description)
        directory = place.directory(data.name)
        directory.mkdir()
        bench.sandbox.kvbench("store", directory, *data.options(), "--block=2M")
        place.settle()
        for i in range(bench.pairs):
            for system, size in ((name, 2 * bench.memory), (f"{name}-calm", STREAM_SMALL)):
                bench.progress(case, system, i)
                read = ("read", directory, *data.options(), *case.options)
                for _ in range(2):  # what is read twice is what a page cache wants to keep
                    bench.sandbox.kvbench(*read)
                with Stream(bench, size) as stream:
                    stream.wait(size)
                    result[system].append(bench.sandbox.kvbench(*read))
        bench.sandbox.close_places()
    return {case.name: {system: [v["rate"] for v in values] for system, values in result.items()}}


def scale(bench, group, cases):
    """Mount time, memory and lookups of a store with very many files."""
    (data,) = group.data
    place = bench.sandbox.open("kvfs", group.places["kvfs"])
    directory = place.directory(data.name)
    directory.mkdir()
    step = max(data.count // 100, 1)
    for first in range(0, data.count, step):
        bench.note(f"scale: {first} of {data.count} files are made")
        bench.sandbox.kvbench("store", directory, f"--count={min(step, data.count - first)}",
                              f"--first={first}", "--size=0", f"--fan={data.fan}", "--threads=4")
    place.settle()
    result = {case.name: [] for case in cases}
    values = {"scale-index": place.status()["index_bytes"] / data.count}
    for i in range(bench.pairs):
        bench.progress(cases[0], "kvfs", i)
        place.stop()
        drop_caches()
        values["scale-mount"] = place.mount()
        values["scale-rss"] = place.memory() / 1e6
        lookups = bench.sandbox.kvbench(
            "access", directory, f"--count={data.count}", f"--fan={data.fan}",
            f"--ops={min(LOOKUPS, data.count)}", "--random", "--latency", f"--seed={i + 1}")
        values["scale-lookup-p99"] = lookups["latency_p99"] / 1e3
        for name in result:
            result[name].append(values[name])
    return {name: {"kvfs": values} for name, values in result.items()}
