# SPDX-License-Identifier: Apache-2.0
"""The cases and their bars: one table, built for the size of the machine and of the run.

A group is a set of places (a kvfs, a plain directory, ...) with the same data in them; its cases
run on these one after the other. A system is what a case compares: a place, with "-direct" for
O_DIRECT, or "-access" for access() in place of the case's load; "raw" is one big file of the plain
directory, read and written O_DIRECT by a deep queue.
"""
import dataclasses
from dataclasses import dataclass

import special

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True)
class Bar:
    """KVFS must be LIMIT times the best of REFERENCES, or better; without any: LIMIT itself."""
    limit: float
    references: tuple = ()


@dataclass(frozen=True)
class Data:
    """COUNT files of SIZE bytes; with `made`, made before the group's cases, else by them."""
    name: str
    count: int
    size: int
    fan: int = 0
    made: bool = True
    places: tuple = ()  # where; empty: in all places

    def options(self):
        return (f"--count={self.count}", f"--size={self.size}", f"--fan={self.fan}")

    @property
    def bytes(self):
        return self.count * self.size


@dataclass(frozen=True)
class Kvfs:
    """A kvfs mount on a store of its own; dram=0: the default of 25 % of the memory."""
    size: int
    dram: int = 0
    devices: int = 1


@dataclass(frozen=True)
class Group:
    name: str
    places: dict  # name to Kvfs; or to None: plain, tmpfs and libfuse need no description
    data: tuple
    custom: object = None  # a function that runs the group instead of the common loop
    heavy: bool = False    # left out of a quick run unless one of its cases is asked for
    disk: int = 0          # bytes; 0: follows from places and data


@dataclass(frozen=True)
class Case:
    name: str
    question: str
    group: Group
    unit: str
    systems: tuple
    bars: tuple = ()
    metric: str = "rate"        # of kvbench's output, or one that report.py derives from it
    better: str = "higher"
    state: str = "hot"          # before each run: hot, cold, or fresh (a new empty directory)
    kernel: str = ""            # of kvbench
    data: Data = None
    options: tuple = ()
    raw: tuple = ()             # kernel, data and options where the system is raw
    measure: object = None      # a function that runs it instead of kvbench alone
    source: str = ""            # the name of a case whose runs this one looks at


def at_least(limit, *references):
    return Bar(limit, references)


at_most = at_least


def build(quick, memory):
    """All cases, for a machine with MEMORY bytes."""
    def pick(full, small):
        return small if quick else full

    def fit(size):
        return min(size, memory // 5 // (32 * MIB) * (32 * MIB))

    return (hot(pick, fit) + blocks(pick, fit) + pressure(memory) + cold(pick, fit)
            + first_byte(pick) + store(pick, fit) + sustained(pick) + names(pick)
            + copy(pick, fit) + pool(pick) + many(pick) + devices(pick, fit) + scale(pick))


def hot(pick, fit):
    size = fit(pick(4 * GIB, 512 * MIB))
    big = Data("big", size // (32 * MIB), 32 * MIB)
    group = Group("hot", {"kvfs": Kvfs(size + GIB, dram=size * 5 // 4), "plain": None,
                          "tmpfs": None, "libfuse": None}, (big,))
    case = Case("", "", group, "GB/s", ("kvfs", "plain", "tmpfs", "libfuse"), kernel="read",
                data=big, bars=(at_least(0.97, "plain"), at_least(1.0, "tmpfs")))
    like_plain = (at_least(0.97, "plain"),)
    return [
        vary(case, "hot-pread-2m", "sequential pread of 2 MiB, one thread, hot",
             options=("--block=2M",)),
        vary(case, "hot-pread-1m", "sequential pread of 1 MiB, one thread, hot",
             options=("--block=1M",)),
        vary(case, "hot-mmap", "mapping and reading every word, hot", kernel="mmap",
             bars=like_plain),
        vary(case, "hot-random-4k", "random pread of 4 KiB, one thread, hot", kernel="random",
             options=("--block=4K", f"--ops={pick(1000000, 100000)}"), bars=like_plain,
             metric="op_rate", unit="1/s"),
        vary(case, "cpu-hot", "CPU time a GB of hot-pread-2m, client and daemon", bars=(),
             source="hot-pread-2m", metric="cpu_per_gb", unit="s/GB", better="lower"),
    ]


def blocks(pick, fit):
    size = fit(pick(2 * GIB, 256 * MIB))
    data = Data("blocks", size // (2 * MIB), 2 * MIB)
    group = Group("blocks", {"kvfs": Kvfs(size + GIB, dram=size * 3 // 2), "plain": None,
                             "tmpfs": None, "libfuse": None}, (data,))
    case = Case("", "", group, "GB/s", ("kvfs", "plain", "tmpfs", "libfuse"), kernel="read",
                data=data, bars=(at_least(0.9, "plain"),))
    options = ("--block=2M", "--reopen", "--random")
    return [
        vary(case, "open-read-2m-t1", "open, read 2 MiB, close, hot, 1 thread", options=options),
        vary(case, "open-read-2m-t16", "open, read 2 MiB, close, hot, 16 threads",
             options=options + ("--threads=16",)),
    ]


def pressure(memory):
    hot_bytes = memory // 2 // (32 * MIB) * (32 * MIB)
    data = Data("hot", hot_bytes // (32 * MIB), 32 * MIB)
    group = Group("pressure", {"kvfs": Kvfs(hot_bytes + GIB, dram=hot_bytes * 9 // 8),
                               "plain": None}, (data,), custom=special.pressure, heavy=True,
                  disk=hot_bytes + GIB)
    return [Case("hot-under-streaming", "hot half of the memory, another process streams files of"
                 " twice the memory; -calm: it streams a small one", group, "GB/s",
                 ("kvfs", "kvfs-calm", "plain", "plain-calm"), (at_least(0.95, "kvfs-calm"),),
                 kernel="read", data=data, options=("--block=2M",))]


def cold(pick, fit):
    size = fit(pick(4 * GIB, 512 * MIB))
    one = Data("one", 1, size)
    blocks_ = Data("blocks", size // 2 // (2 * MIB), 2 * MIB)
    raw = Data("raw", 1, size, places=("plain",))
    group = Group("cold", {"kvfs": Kvfs(size * 3 // 2 + GIB), "plain": None}, (one, blocks_, raw))
    case = Case("", "", group, "GB/s", (), state="cold", kernel="read", data=one)
    return [
        vary(case, "cold-seq", "one big file, one thread, cold",
             systems=("kvfs", "plain", "raw"), options=("--block=2M", "--reopen"),
             raw=("raw", raw, ("--block=1M", "--depth=32")),
             bars=(at_least(0.95, "raw", "plain"),)),
        vary(case, "cold-2m-t16", "2 MiB files in random order, 16 threads, cold",
             systems=("kvfs", "plain", "plain-direct", "raw"), data=blocks_,
             options=("--block=2M", "--reopen", "--random", "--threads=16"),
             raw=("raw", dataclasses.replace(raw, size=size // 2),
                  ("--block=2M", "--depth=16", "--random")),
             bars=(at_least(0.95, "raw", "plain", "plain-direct"),)),
        vary(case, "cpu-cold", "CPU time a GB of cold-2m-t16, client and daemon",
             systems=("kvfs", "plain"), source="cold-2m-t16", metric="cpu_per_gb", unit="s/GB",
             better="lower"),
    ]


def first_byte(pick):
    data = Data("blocks", pick(100, 50), 2 * MIB)
    group = Group("first-byte", {"kvfs": Kvfs(GIB, dram=512 * MIB), "plain": None}, (data,))
    case = Case("", "", group, "us", ("kvfs", "plain", "plain-direct"), state="cold",
                kernel="read", data=data, metric="latency_p50", better="lower")
    options = ("--reopen", "--random", "--latency", "--pause_ms=5")
    return [
        vary(case, "cold-first-2m", "open and one read of a whole 2 MiB file, cold, idle",
             options=options + ("--block=2M",), bars=(at_most(1.3, "plain-direct"),)),
        vary(case, "cold-first-4k", "open and read 4 KiB of a 2 MiB file, cold, idle",
             options=options + ("--block=4K", "--size=4K")),
    ]


def store(pick, fit):
    burst = fit(pick(2 * GIB, 256 * MIB))
    small = Data("small", burst // (2 * MIB), 2 * MIB, made=False)
    large = Data("large", burst // (32 * MIB), 32 * MIB, made=False)
    one = Data("one", 1, burst // 2, made=False)
    group = Group("store", {"kvfs": Kvfs(4 * burst), "plain": None, "tmpfs": None,
                            "libfuse": None}, (small, large, one), disk=6 * burst)
    case = Case("", "", group, "GB/s", ("kvfs", "plain", "tmpfs", "libfuse"), state="fresh",
                kernel="store")
    return [
        vary(case, "store-2m-t16", "2 MiB files, 16 threads, rename, within the DRAM budget",
             data=small, options=("--block=2M", "--threads=16", "--rename"),
             bars=(at_least(2.0, "plain"),)),
        vary(case, "store-32m-t4", "32 MiB files, 4 threads, rename, within the DRAM budget",
             data=large, options=("--block=2M", "--threads=4", "--rename"),
             bars=(at_least(2.0, "plain"),)),
        vary(case, "store-one-4k", "one file in writes of 4 KiB", data=one,
             options=("--block=4K",), bars=(at_least(1.0, "plain"),)),
        vary(case, "store-one-64k", "one file in writes of 64 KiB", data=one,
             options=("--block=64K",), bars=(at_least(1.0, "plain"),)),
        vary(case, "cpu-store", "CPU time a GB of store-2m-t16, client and daemon",
             source="store-2m-t16", metric="cpu_per_gb", unit="s/GB", better="lower"),
    ]


def sustained(pick):
    dram = pick(GIB, 256 * MIB)
    data = Data("files", 4 * dram // (32 * MIB), 32 * MIB, made=False)
    raw = Data("raw", 1, 4 * dram, places=("plain",))
    group = Group("sustained", {"kvfs": Kvfs(6 * dram, dram=dram), "plain": None}, (data, raw),
                  disk=14 * dram)
    return [Case("store-sustained", "32 MiB files, 4 threads, four times the DRAM budget, durable",
                 group, "GB/s", ("kvfs", "plain", "raw"),
                 (at_least(0.9, "raw"), at_least(1.0, "plain")), state="fresh", kernel="store",
                 data=data, options=("--block=2M", "--threads=4", "--rename", "--sync"),
                 raw=("raw", raw, ("--block=1M", "--depth=32", "--write")))]


def names(pick):
    some = Data("some", 3600, 4 * KIB)
    new = Data("new", pick(10000, 1000), 4 * KIB, made=False)
    doomed = Data("doomed", pick(20000, 1000), 4 * KIB, made=False)
    tree = Data("tree", pick(100000, 2000), 4 * KIB, fan=pick(100, 10), made=False)
    group = Group("names", {"kvfs": Kvfs(4 * GIB), "plain": None, "tmpfs": None, "libfuse": None},
                  (some, new, doomed, tree), disk=5 * GIB)
    case = Case("", "", group, "1/s", ("kvfs", "plain", "tmpfs", "libfuse"), metric="op_rate",
                data=some, bars=(at_least(1.0, "plain"),))
    warm = vary(case, "", "", kernel="access", bars=(at_least(0.97, "plain"),),
                options=("--random", f"--ops={pick(360000, 72000)}"))
    cold_ = vary(case, "", "", kernel="access", state="cold", bars=(), systems=("kvfs", "plain"),
                 options=("--random",))
    absent = ("--absent",)
    batch = vary(case, "", "", kernel="lookup", state="cold", unit="ms", metric="milliseconds",
                 better="lower", systems=("kvfs", "kvfs-access"),
                 bars=(at_most(10.0), at_most(0.2, "kvfs-access")))
    return [
        vary(case, "create-4k", "create, write 4 KiB, close, one thread", state="fresh",
             kernel="store", data=new, options=("--block=4K",)),
        vary(case, "unlink", f"unlink {doomed.count} files of 4 KiB", state="fresh", data=doomed,
             systems=("kvfs", "plain", "libfuse"), measure=special.unlink),
        vary(case, "rm-r", f"rm -r of {tree.count} files of 4 KiB", state="fresh", data=tree,
             systems=("kvfs", "plain"), measure=special.remove_tree),
        vary(warm, "present-warm", "3,600 names that are there by access(), warm"),
        vary(warm, "absent-warm", "3,600 names that are not there by access(), warm",
             options=warm.options + absent),
        vary(cold_, "present-cold", "3,600 names that are there by access(), cold"),
        vary(cold_, "absent-cold", "3,600 names that are not there by access(), cold",
             options=cold_.options + absent),
        vary(batch, "lookup-cold", "3,600 names that are there, by the batch look-up and one by"
             " one, cold"),
        vary(batch, "lookup-absent-cold", "3,600 names that are not there, the same", options=absent),
    ]


def copy(pick, fit):
    size = fit(pick(4 * GIB, 512 * MIB))
    data = Data("one", 1, size)
    group = Group("copy", {"kvfs": Kvfs(size + GIB), "plain": None}, (data,), disk=3 * size + GIB)
    return [Case("cp", "copy_file_range of a whole big file within the filesystem", group, "s",
                 ("kvfs", "plain"), (at_most(0.05),), metric="seconds", better="lower",
                 data=data, measure=special.copy)]


def pool(pick):
    """A file that is cut to a size far above what is written of it."""
    data = Data("pool", 1, pick(1 << 40, 64 * GIB), made=False)
    group = Group("pool", {"kvfs": Kvfs(2 * GIB, dram=GIB), "plain": None}, (data,), disk=4 * GIB)
    case = Case("", "", group, "1/s", ("kvfs", "plain"), metric="op_rate", data=data,
                options=("--block=4K", f"--ops={pick(100000, 20000)}"), measure=special.pool)
    return [
        vary(case, "pool-write-4k", "4 KiB at random places of a new pool, one thread",
             options=case.options + ("--write",)),
        vary(case, "pool-write-4k-t4", "the same, 4 threads",
             options=case.options + ("--write", "--threads=4")),
        vary(case, "pool-read-4k", "reading them again, by who wrote them, one thread"),
        vary(case, "cpu-pool", "CPU time of pool-write-4k, client and daemon", bars=(),
             source="pool-write-4k", metric="cpu_per_gb", unit="s/GB", better="lower"),
    ]


def many(pick):
    """The same loads, with few and with many other files in the store."""
    count = pick(1000000, 20000)
    others = Data("others", count, 0, places=("kvfs", "plain"))
    few = Data("few", 1000, 0, places=("kvfs-1k",))
    blocks_ = Data("blocks", 256, 2 * MIB, places=("kvfs", "kvfs-1k"))
    new = Data("new", 256, 2 * MIB, made=False)
    description = Kvfs(3 * GIB, dram=2 * GIB)
    group = Group("many", {"kvfs": description, "kvfs-1k": description, "plain": None},
                  (few, others, blocks_, new), disk=8 * GIB)
    listing = Case("", "", group, "1/s", ("kvfs", "plain"), (at_least(0.5, "plain"),),
                   metric="op_rate", data=others)
    growth = Case("", "", group, "GB/s", ("kvfs", "kvfs-1k"), (at_least(0.95, "kvfs-1k"),),
                  kernel="read", data=blocks_,
                  options=("--block=2M", "--reopen", "--random", "--threads=16"))
    return [
        vary(listing, "list", f"listing {count} files as ls -U", kernel="list"),
        vary(listing, "find", f"listing {count} files with sizes as find -size", kernel="walk"),
        vary(listing, "list-cold", "the same listing, cold", kernel="list", bars=(),
             state="cold"),
        vary(growth, "hot-growth", f"open, read 2 MiB, close, hot, beside {count} files and 1,000"),
        vary(growth, "cold-growth", f"the same, cold, beside {count} files and 1,000",
             state="cold"),
        vary(growth, "store-growth", f"store 2 MiB files beside {count} files and 1,000",
             state="fresh", kernel="store", data=new,
             options=("--block=2M", "--threads=16", "--rename")),
    ]


def devices(pick, fit):
    size = fit(pick(2 * GIB, 256 * MIB))
    data = Data("one", 1, size)
    group = Group("devices", {"kvfs": Kvfs(size + GIB, devices=4), "kvfs-1dev": Kvfs(size + GIB)},
                  (data,))
    return [Case("cold-4dev", "one big file, cold, four devices (files on one disk) and one device",
                 group, "GB/s", ("kvfs", "kvfs-1dev"), state="cold", kernel="read", data=data,
                 options=("--block=2M", "--reopen"))]


def scale(pick):
    count = pick(10000000, 20000)
    data = Data("names", count, 0, fan=pick(4096, 64), made=False)
    group = Group("scale", {"kvfs": Kvfs(GIB)}, (data,), custom=special.scale,
                  disk=GIB + count * 400)
    case = Case("", "", group, "", ("kvfs",), better="lower", data=data, metric="")
    return [
        vary(case, "scale-mount", f"mounting a store of {count} files", unit="s",
             bars=(at_most(1.0),)),
        vary(case, "scale-index", f"index a file, {count} empty files with names of 68 bytes",
             unit="B", bars=(at_most(300),)),
        vary(case, "scale-rss", "memory of the daemon after that mount", unit="MB",
             bars=(at_most(100),)),
        vary(case, "scale-lookup-p99", "99th percentile of access() in random order, cold",
             unit="ms", bars=(at_most(1.0),)),
    ]


def vary(case, name, question, **changes):
    return dataclasses.replace(case, name=name, question=question, **changes)
