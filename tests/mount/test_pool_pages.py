# SPDX-License-Identifier: Apache-2.0
"""R4, K1, K2: blocks written here and there in a pool cost DRAM, space and quota by the block."""
import contextlib
import json
import mmap
import os
import random

import pytest
from data import MIB, blob
from procs import eventually
from syscalls import FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE, fallocate

PAGE = 4096
TIB = 1 << 40
COUNT = 600


class Scattered:
    """Blocks of a pool, each in a chunk of its own, and what they must hold."""

    def __init__(self, fd, size, seed=1, count=COUNT):
        choice = random.Random(seed)
        self.fd = fd
        self.places = [n * MIB + choice.randrange(255) * PAGE
                       for n in choice.sample(range(size // MIB), count)]
        self.memory = mmap.mmap(-1, PAGE)

    def write(self, seed):
        for place in self.places:
            self.memory[:] = blob(seed + place, PAGE)
            assert os.pwritev(self.fd, [self.memory], place) == PAGE

    def check(self, seed):
        for place in self.places:
            assert os.preadv(self.fd, [self.memory], place) == PAGE
            assert self.memory[:] == blob(seed + place, PAGE), f"wrong block at {place}"
            assert os.preadv(self.fd, [self.memory], place + PAGE) == PAGE
            assert not any(self.memory[:]), f"bytes that nobody wrote behind {place}"


def new_pool(path, flags=0):
    return os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | flags, 0o600)


def blocks(fd):
    return os.fstat(fd).st_blocks * 512


def taken(kv):
    status = kv.status()
    return status["store_used"] + status["store_busy"] + status["store_reserved"]


@pytest.fixture
def huge(sparse):
    return sparse(dram="64M")


@pytest.mark.parametrize("unlinked", (False, True))
@pytest.mark.parametrize("allocated", (False, True))
@pytest.mark.parametrize("flags", (0, os.O_DIRECT), ids=("buffered", "direct"))
def test_r4_blocks_take_their_pages(huge, flags, allocated, unlinked):
    fd = new_pool(huge.mnt / "pool", flags)
    if allocated:
        fallocate(fd, 0, 0, TIB)
    else:
        os.ftruncate(fd, TIB)
    if unlinked:
        os.unlink(huge.mnt / "pool")
    pool = Scattered(fd, TIB)
    before = huge.status()["dram_charged"]
    pool.write(1)
    assert huge.status()["dram_charged"] - before == COUNT * PAGE
    assert huge.status()["dram_zombie"] < MIB
    assert blocks(fd) == (TIB if allocated else COUNT * PAGE)
    pool.check(1)
    pool.write(2)  # the same ones again: nothing more
    assert huge.status()["dram_charged"] - before == COUNT * PAGE
    os.fsync(fd)
    assert huge.status()["dram_charged"] - before == COUNT * PAGE
    assert blocks(fd) == (TIB if allocated else COUNT * PAGE)
    if not unlinked:
        assert huge.counter("writeback_bytes") == COUNT * PAGE
    pool.check(2)
    pool.write(3)
    pool.check(3)
    punched = [place - place % MIB for place in pool.places[:100]]
    for place in punched:
        fallocate(fd, FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE, place, MIB)
    assert huge.status()["dram_charged"] - before == (COUNT - 100) * PAGE
    os.ftruncate(fd, TIB // 2)
    left = sum(place < TIB // 2 for place in pool.places[100:]) * PAGE
    assert huge.status()["dram_charged"] - before == left
    gone = sum(place < TIB // 2 for place in punched) * MIB
    assert blocks(fd) == (TIB // 2 - gone if allocated else left)
    os.close(fd)
    if not unlinked:
        os.unlink(huge.mnt / "pool")
    eventually(lambda: taken(huge) == 0, what="space of the pool")
    eventually(lambda: huge.status()["dram_charged"] == 0, what="DRAM of the pool")


@pytest.mark.parametrize("flags", (0, os.O_DIRECT), ids=("buffered", "direct"))
def test_r4_blocks_that_went_out_come_back_alone(huge, flags):
    """A pool that was closed, read and written cold: its blocks are read, and no others."""
    fd = new_pool(huge.mnt / "pool", flags)
    os.ftruncate(fd, TIB)
    pool = Scattered(fd, TIB)
    pool.write(1)
    os.close(fd)
    huge.remount()
    fd = os.open(huge.mnt / "pool", os.O_RDWR | flags)
    assert blocks(fd) == COUNT * PAGE
    places = pool.places
    pool.fd, pool.places = fd, places[:COUNT // 2]
    pool.check(1)
    assert huge.counter("fill_bytes") == COUNT // 2 * PAGE
    assert huge.status()["dram_charged"] == COUNT // 2 * PAGE
    pool.places = places[COUNT // 2:]
    pool.write(5)  # whole blocks, but a checksum is over the chunk
    pool.check(5)
    assert huge.counter("fill_bytes") <= COUNT * PAGE
    assert huge.status()["dram_charged"] <= COUNT * PAGE
    assert huge.counter("checksum_errors") == 0
    os.close(fd)


def test_k1_the_quota_pays_for_blocks(fresh):
    kv = fresh(size="256M", dram="64M", lease="0s")
    kv.dir = kv.mnt / "tenant"
    kv.dir.mkdir()
    kv.kvfs("quota", kv.dir, "16M")
    fd = new_pool(kv.dir / "pool")
    os.ftruncate(fd, TIB)
    pool = Scattered(fd, TIB)
    pool.write(1)
    os.fsync(fd)

    def used():
        return json.loads(kv.kvfs("quota", kv.dir, "--json").stdout)["used"]

    assert used() == COUNT * PAGE
    # Up to the limit, and no block further.
    more = Scattered(fd, TIB, seed=2, count=4096)
    written = 0
    with contextlib.suppress(OSError):
        for place in more.places:
            assert os.pwrite(fd, b"x" * PAGE, place + 2 * PAGE) == PAGE
            written += 1
    assert (4096 - COUNT) * 0.95 <= written <= 4096 - COUNT
    with contextlib.suppress(OSError):
        os.close(fd)


def test_k2_blocks_of_an_open_pool_stay_when_all_else_goes(fresh):
    """More blocks than DRAM has pages, more files than the store has room for."""
    kv = fresh(size="256M", dram="16M")
    fd = new_pool(kv.mnt / "pool")
    os.ftruncate(fd, TIB)
    pool = Scattered(fd, TIB, count=5000)
    pool.write(1)
    assert kv.status()["dram_charged"] <= 16 * MIB
    assert kv.counter("writeback_bytes") <= 5000 * PAGE
    for i in range(40):
        (kv.mnt / f"f{i}").write_bytes(blob(i, 8 * MIB))
    assert kv.counter("evicted_store") > 10
    pool.check(1)
    pool.write(2)
    os.fsync(fd)
    assert blocks(fd) == 5000 * PAGE
    pool.check(2)
    os.close(fd)


def test_r4_chunks_that_are_used_alone_take_their_pages(huge):
    """A chunk is half a huge page: written or read here and there, none brings the other half along."""
    fd = new_pool(huge.mnt / "pool")
    os.ftruncate(fd, TIB)
    places = [n * 3 * MIB for n in random.Random(1).sample(range(1000), 120)]
    for place in places[:40]:
        assert os.pwrite(fd, blob(place, MIB), place) == MIB
    assert huge.status()["dram_charged"] == 40 * MIB
    for place in places[40:]:
        assert os.pwrite(fd, blob(place, MIB), place) == MIB
    for _ in range(2):
        assert huge.status()["dram_zombie"] < 8 * MIB
        for place in places:
            assert os.pread(fd, MIB, place) == blob(place, MIB)
    assert os.pread(fd, MIB, places[7] + MIB) == bytes(MIB)
    assert blocks(fd) == 120 * MIB
    os.close(fd)


def test_mapped_blocks_take_their_pages(huge):
    """Pages that a shared mapping makes dirty cost what they are."""
    fd = new_pool(huge.mnt / "pool")
    os.ftruncate(fd, 1 << 33)
    with mmap.mmap(fd, 1 << 30, offset=1 << 32) as memory:
        for n in range(100):
            memory[n * 10 * MIB + 8192:n * 10 * MIB + 8197] = b"hello"
        memory.flush()
        assert blocks(fd) == 100 * PAGE
        assert huge.status()["dram_charged"] == 100 * PAGE
    os.close(fd)
    fd = os.open(huge.mnt / "pool", os.O_RDONLY)
    for n in range(100):
        assert os.pread(fd, 7, (1 << 32) + n * 10 * MIB + 8191) == b"\0hello\0"
    os.close(fd)
