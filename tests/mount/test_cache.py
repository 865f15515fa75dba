# SPDX-License-Identifier: Apache-2.0
"""The DRAM tier: hot reads stay in the kernel, data may be larger than DRAM, writers wait."""
import mmap
import os
import random

import pytest
from data import (
    GIB,
    MIB,
    PIECE,
    blob,
    check_big,
    check_range,
    get,
    put,
    sync,
    write_big,
)
from procs import eventually, parallel

BIG = 600 * MIB


@pytest.fixture
def tight(fresh):
    """A mount whose DRAM holds a fifth of a big file, which is served while it streams in."""
    kv = fresh(size="2G", dram="128M", stream_above="32M")
    write_big(kv.mnt / "big", BIG, 1)
    sync(kv.mnt / "big")
    return kv


def test_hot_reads_never_reach_the_daemon(fresh):
    kv = fresh(size="2G", dram="1400M", stream_above="2G")
    write_big(kv.mnt / "f", GIB, 1)
    sync(kv.mnt / "f")
    check_big(kv.mnt / "f", GIB, 1)
    before = kv.status()["counters"]
    check_big(kv.mnt / "f", GIB, 1)
    fd = os.open(kv.mnt / "f", os.O_RDONLY)
    with mmap.mmap(fd, GIB, prot=mmap.PROT_READ) as m:
        for number in range(0, GIB // PIECE, 7):
            from_map = m[number * PIECE + 5000:number * PIECE + 5010]
            assert from_map == os.pread(fd, 10, number * PIECE + 5000)
    os.close(fd)
    after = kv.status()["counters"]
    assert after["fill_bytes"] == before["fill_bytes"], "a hot file was read from the device"
    reads = after["fuse_read"] - before["fuse_read"]
    if kv.mode == "passthrough":
        assert reads == 0, f"{reads} READ requests for a hot file"
        assert after["open_passthrough"] >= before["open_passthrough"] + 2
    else:
        assert after["open_hot"] > before["open_hot"]


def test_cold_reads_become_hot(fresh):
    kv = fresh()
    put(kv.mnt / "f", blob(1, 20 * MIB))
    kv.remount()
    assert kv.tier(kv.mnt / "f") == "nvme"
    assert get(kv.mnt / "f") == blob(1, 20 * MIB)
    first = kv.status()["counters"]
    assert first["open_cold"] == 1 and first["fill_bytes"] >= 20 * MIB
    assert get(kv.mnt / "f") == blob(1, 20 * MIB)
    second = kv.status()["counters"]
    assert second["fill_bytes"] == first["fill_bytes"]
    assert second["open_hot"] == first["open_hot"] + 1
    assert kv.tier(kv.mnt / "f") == "dram+nvme"


def test_file_larger_than_dram_single_pass(tight):
    check_big(tight.mnt / "big", BIG, 1)
    tight.remount()
    check_big(tight.mnt / "big", BIG, 1)
    assert tight.status()["dram_charged"] <= 128 * MIB
    assert tight.counter("open_streamed") >= 1


def test_file_larger_than_dram_at_random(tight):
    tight.remount()
    choice = random.Random(1)
    fd = os.open(tight.mnt / "big", os.O_RDONLY)
    for _ in range(200):
        number = choice.randrange(BIG // PIECE)
        length = choice.choice((1, 4096, 100_000, MIB))
        check_range(fd, number * PIECE + choice.randrange(PIECE - length), length, 1)
    os.close(fd)


def test_file_larger_than_dram_mapped(tight):
    tight.remount()
    fd = os.open(tight.mnt / "big", os.O_RDONLY)
    choice = random.Random(2)
    with mmap.mmap(fd, BIG, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ) as m:
        for _ in range(60):
            place = choice.randrange(BIG - 5000)
            assert m[place:place + 5000] == os.pread(fd, 5000, place)
        for number in range(0, BIG // PIECE, 5):
            fd_data = m[number * PIECE:number * PIECE + MIB]
            assert fd_data == os.pread(fd, MIB, number * PIECE)
    check_range(fd, 0, MIB, 1)
    os.close(fd)


def test_file_larger_than_dram_direct(tight):
    """Pieces of chunks come in alone, and cost what they are: no half of a huge page is nobody's."""
    tight.remount()
    check_big(tight.mnt / "big", BIG, 1, os.O_RDONLY | os.O_DIRECT)
    assert tight.status()["dram_zombie"] < 8 * MIB


def test_file_larger_than_dram_by_many_readers(tight):
    tight.remount()

    def read(number):
        choice = random.Random(number)
        fd = os.open(tight.mnt / "big", os.O_RDONLY)
        for turn in range(25):
            at = number * 9 + turn if number % 2 else choice.randrange(10_000)
            check_range(fd, at % (BIG // PIECE) * PIECE, MIB, 1)
        os.close(fd)

    parallel(read, range(8))


def test_file_larger_than_dram_is_changed_in_place(tight):
    fd = os.open(tight.mnt / "big", os.O_RDWR)
    places = range(12_345, BIG, 50 * MIB)
    for place in places:
        assert os.pwrite(fd, b"changed", place) == 7
    os.close(fd)
    tight.remount()
    fd = os.open(tight.mnt / "big", os.O_RDONLY)
    for place in places:
        assert os.pread(fd, 7, place) == b"changed"
    check_range(fd, 20 * MIB, MIB, 1)
    assert os.fstat(fd).st_size == BIG
    os.close(fd)


def test_many_files_larger_than_dram_together(fresh):
    kv = fresh(size="1G", dram="64M")
    for i in range(60):
        put(kv.mnt / f"f{i}", blob(i, 5 * MIB))
    choice = random.Random(3)
    for i in [choice.randrange(60) for _ in range(80)]:
        assert get(kv.mnt / f"f{i}") == blob(i, 5 * MIB)
    status = kv.status()
    assert status["counters"]["evicted_dram"] > 0
    assert status["dram_charged"] <= status["dram_budget"]


def test_many_readers_of_a_cold_file_fill_it_once(fresh):
    kv = fresh()
    data = blob(1, 60 * MIB)
    put(kv.mnt / "f", data)
    kv.remount()

    def read(_):
        return get(kv.mnt / "f") == data

    assert parallel(read, range(8)) == [True] * 8
    assert kv.counter("fill_bytes") <= 62 * MIB


def test_open_files_larger_than_dram_together(fresh):
    """More is open than DRAM holds: reads wait or stream, none fails."""
    kv = fresh(size="1G", dram="64M")
    fds = []
    for i in range(12):
        put(kv.mnt / f"f{i}", blob(i, 8 * MIB))
    kv.remount()
    for i in range(12):
        fds.append(os.open(kv.mnt / f"f{i}", os.O_RDONLY))
    for i, fd in enumerate(fds):
        assert os.pread(fd, 9 * MIB, 0) == blob(i, 8 * MIB)
        os.close(fd)


def test_one_writer_beyond_the_dram_budget(fresh):
    """A file larger than half the budget spills while it is written."""
    kv = fresh(size="2G", dram="64M")
    write_big(kv.mnt / "f", 400 * MIB, 1)
    assert kv.status()["dram_charged"] <= kv.status()["dram_budget"] * 3 // 2
    check_big(kv.mnt / "f", 400 * MIB, 1)
    fd = os.open(kv.mnt / "g", os.O_CREAT | os.O_RDWR, 0o644)
    for place in (200 * MIB, 0, 100 * MIB):
        for step in range(6):
            os.pwrite(fd, blob(step, 8 * MIB), place + step * 8 * MIB)
    for place in (0, 100 * MIB, 200 * MIB):
        for step in range(6):
            assert os.pread(fd, 8 * MIB, place + step * 8 * MIB) == blob(step, 8 * MIB)
    os.close(fd)
    fd = os.open(kv.mnt / "g", os.O_RDONLY)
    assert os.pread(fd, MIB, 60 * MIB) == bytes(MIB)
    os.close(fd)


def test_several_writers_beyond_the_dram_budget(drive, fresh):
    """They are held back while the device is behind, here: while it does nothing."""
    kv = fresh(dram="32M", devices=(drive.data,), io_timeout="600s")
    drive.hang()

    def work(n):
        if n < 4:
            write_big(kv.mnt / f"f{n}", 50 * MIB, n)
        else:
            eventually(lambda: kv.counter("throttled") > 0, what="a writer that is held back")
            drive.answer()

    parallel(work, range(5))
    for n in range(4):
        check_big(kv.mnt / f"f{n}", 50 * MIB, n)
    assert kv.counter("writeback_errors") == 0


def test_mapped_readers_do_not_stop_eviction(fresh, agent):
    """What a mapping keeps alive is counted, and given back when it goes."""
    kv = fresh(size="1G", dram="64M")
    reader = agent()
    put(kv.mnt / "f", blob(1, 16 * MIB))
    fd = reader.open(kv.mnt / "f")
    m = reader.map(fd, 16 * MIB)
    reader.close(fd)
    for i in range(20):
        put(kv.mnt / f"o{i}", blob(i, 8 * MIB))
    assert reader.map_read(m, 0, 16 * MIB) == blob(1, 16 * MIB)
    os.unlink(kv.mnt / "f")
    assert reader.map_read(m, 5, 100) == blob(1, 16 * MIB)[5:105]
    reader.unmap(m)
    eventually(lambda: kv.status()["dram_zombie"] == 0, what="the unmapped bytes' return")


def test_the_daemons_memory_does_not_grow_with_files_seen(fresh, monkeypatch):
    # What is free in one arena another's threads do not use; that is not what is looked for.
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    kv = fresh()

    def resident():
        with open(f"/proc/{kv.pid}/status", encoding="ascii") as f:
            return next(int(line.split()[1]) for line in f if line.startswith("RssAnon")) * 1024

    def see(folder):
        os.mkdir(kv.mnt / folder)
        for i in range(10_000):
            os.close(os.open(kv.mnt / folder / f"{i}", os.O_CREAT | os.O_WRONLY, 0o644))
        for entry in os.scandir(kv.mnt / folder):
            entry.stat()
            os.unlink(entry.path)
        os.rmdir(kv.mnt / folder)
        eventually(lambda: kv.status()["nodes"] < 5_000, what="the forgotten nodes' end")
        assert kv.status()["open_handles"] == 0

    # What it once needed at a time it keeps; that comes with the first ones.
    for folder in ("a", "b"):
        see(folder)
    before = resident()
    for folder in ("c", "d", "e", "f"):
        see(folder)
    # A file, its version and its node are some 600 bytes.
    assert resident() <= before + 12 * MIB
