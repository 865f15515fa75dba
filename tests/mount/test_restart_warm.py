# SPDX-License-Identifier: Apache-2.0
"""-o restart: what was in DRAM is there for the next daemon, as far as it is still true.

What is not taken over, and why, is in the unit tests (test_core_adopt); here it is met at random.
"""
import errno
import functools
import mmap
import os
import random
import re
import time

import pytest
from data import MIB, blob, get, put_synced, replace
from procs import LONG, Child, eventually
from restarts import ask, kill, restartable

SIZES = (1, 4096, 100_000, MIB, 3 * MIB + 5, 9 * MIB)


@pytest.fixture(name="make")
def _make(fresh):
    return functools.partial(restartable, fresh)


def in_dram(kv):
    status = kv.status()
    return status["dram_objects"], status["dram_charged"]


@pytest.mark.parametrize("end", (kill, ask))
def test_what_was_in_dram_is_there(make, end):
    """As it was stored, or read in: no device is asked, and all is passed through again."""
    kv = make(stream_above="8M")
    files = {kv.mnt / f"f{i}": blob(i, size) for i, size in enumerate(SIZES)}
    for path, data in files.items():
        put_synced(path, data)
    with open(kv.mnt / "holes", "wb") as file:
        os.pwrite(file.fileno(), b"x", 3 * MIB)
        os.truncate(file.fileno(), 5 * MIB)
    kv.settle()
    for _ in range(2):
        before = in_dram(kv)
        assert before[0] >= len(files)
        end(kv)
        eventually(lambda: kv.counter("adopted") == len(files) + 1, what="what is in DRAM")
        eventually(lambda: in_dram(kv) == before, what="all of it")
        counters = kv.status()["counters"]
        for path, data in files.items():
            assert kv.tier(path) == "dram+nvme"
            assert get(path) == data
        after = kv.status()["counters"]
        assert after["fill_bytes"] == 0
        assert after["open_hot"] - counters["open_hot"] == len(files)
        if kv.mode == "passthrough":
            assert after["fuse_read"] == counters["fuse_read"]
    assert get(kv.mnt / "holes") == bytes(3 * MIB) + b"x" + bytes(2 * MIB - 1)
    assert kv.counter("fill_bytes") == 0


def test_what_was_read_in_is_there(make):
    kv = make(stream_above="1M")
    sizes = (3 * MIB, 3 * MIB, 40 * MIB)
    for i, size in enumerate(sizes):
        put_synced(kv.mnt / f"f{i}", blob(i, size))
    kv.remount()
    assert get(kv.mnt / "f0") == blob(0, 3 * MIB)
    kv.kvfs("warm", kv.mnt / "f1")
    with open(kv.mnt / "f2", "rb") as part:
        os.pread(part.fileno(), 4096, 0)
    kill(kv)
    eventually(lambda: kv.counter("adopted") == 3, what="what is in DRAM")
    for i, size in enumerate(sizes):
        assert get(kv.mnt / f"f{i}") == blob(i, size)
        assert (kv.counter("fill_bytes") > 0) == (i == 2)
    assert kv.counter("fill_bytes") < 40 * MIB, "of what was there in part only the rest is read"


def test_open_and_mapped_files_share_what_was_taken_over(make):
    """An old mapping, a new one, and eviction between them."""
    kv = make()
    data = blob(1, 3 * MIB)
    put_synced(kv.mnt / "f", data)
    kv.settle()
    fd = os.open(kv.mnt / "f", os.O_RDONLY)
    old = mmap.mmap(fd, len(data), prot=mmap.PROT_READ)
    kill(kv)
    with open(kv.mnt / "f", "rb") as file:
        new = mmap.mmap(file.fileno(), len(data), prot=mmap.PROT_READ)
        assert new[:] == data
    assert kv.counter("fill_bytes") == 0
    new.close()
    eventually(lambda: kv.kvfs("cool", kv.mnt / "f", check=False).returncode == 0, what="cooling")
    assert in_dram(kv) == (0, 0)
    assert old[:] == data
    assert os.pread(fd, len(data), 0) == data
    assert get(kv.mnt / "f") == data
    old.close()
    os.close(fd)


def test_what_was_replaced_or_removed_is_not(make):
    """The kill comes at once: the index may be behind, and a number is given out again."""
    kv = make()
    for i in range(4):
        put_synced(kv.mnt / f"f{i}", blob(i, MIB))
    for turn in range(1, 4):
        replace(kv.mnt / "f0", blob(10 * turn, MIB))
        os.unlink(kv.mnt / "f1")
        with open(kv.mnt / "f2", "r+b") as file:
            file.write(blob(20 * turn, MIB))
        kill(kv)
        assert get(kv.mnt / "f0") in [blob(10 * n, MIB) for n in range(turn + 1)]
        assert get(kv.mnt / "f2") in [blob(20 * n or 2, MIB) for n in range(turn + 1)]
        assert get(kv.mnt / "f3") == blob(3, MIB)
        put_synced(kv.mnt / "f1", blob(30 * turn, MIB))
        assert get(kv.mnt / "f1") == blob(30 * turn, MIB)


def stamped(seed, length):
    """Content that says what it is."""
    return seed.to_bytes(8, "little") + blob(seed, length - 8)


def read_at_random(mnt, stop, count, seed):
    choice = random.Random(seed)
    turns = 0
    while turns == 0 or not os.path.exists(stop):
        try:
            data = get(mnt / f"f{choice.randrange(count)}")
        except OSError as e:  # it was replaced, and the daemon killed, since it was opened
            assert e.errno == errno.EIO
            continue
        assert data == stamped(int.from_bytes(data[:8], "little"), len(data))
        turns += 1
    return turns


def write_at_random(mnt, stop, count, seed):
    """Replaces files, in place or by another one: a kill may end that."""
    choice = random.Random(seed)
    turns = 0
    while turns == 0 or not os.path.exists(stop):
        number = choice.randrange(count)
        data = stamped(choice.randrange(1 << 40), choice.randrange(8, 2 * MIB))
        path = mnt / f"f{number}"
        try:
            if choice.randrange(2):
                replace(path, data)
            else:
                with open(path, "wb") as file:
                    file.write(data)
            turns += 1
        except OSError:
            pass
    return turns


def test_kills_at_random(make, tmp_path):
    """A tier that is smaller than what is read: filled, evicted and rewritten when the kill comes."""
    kv = make(size="512M", dram="32M")
    count = 40
    for i in range(count):
        put_synced(kv.mnt / f"f{i}", stamped(i, 2 * MIB))
    stop = tmp_path / "stop"
    children = [Child(read_at_random, kv.mnt, stop, count, i) for i in range(3)]
    children += [Child(write_at_random, kv.mnt, stop, count, i) for i in range(2)]
    for _ in range(40 if LONG else 5):
        time.sleep(0.5)
        kill(kv)
        time.sleep(0.6)  # a daemon that dies young again and again ends the mount
    stop.touch()
    assert all(child.result(timeout=120) > 0 for child in children)
    assert any(int(n) > 0 for n in re.findall(r"found in DRAM .*taken=(\d+)", kv.log()))
    for i in range(count):
        data = get(kv.mnt / f"f{i}")
        assert data == stamped(int.from_bytes(data[:8], "little"), len(data))
