# SPDX-License-Identifier: Apache-2.0
"""R4, K1, K2: pools, that is files of a fixed size that their owner reads and writes by offset."""
import contextlib
import errno
import fcntl
import mmap
import os
import random
import threading

import pytest
from data import GIB, MIB, blob, get, put, put_synced
from procs import eventually, parallel, run
from syscalls import (
    FALLOC_KEEP_SIZE,
    FALLOC_PUNCH_HOLE,
    FALLOC_ZERO_RANGE,
    fails,
    fallocate,
)

TIB = 1 << 40
KIB = 1 << 10


def taken(kv):
    """Bytes of the store that are used, in motion or promised."""
    status = kv.status()
    return status["store_used"] + status["store_busy"] + status["store_reserved"]


def blocks(fd):
    return os.fstat(fd).st_blocks * 512


def available(kv):
    vfs = os.statvfs(kv.mnt)
    return vfs.f_bavail * vfs.f_frsize


def crash(kv, fd):
    """The daemon dies while FD is open."""
    kv.kill()
    with contextlib.suppress(OSError):
        os.close(fd)


def new_pool(path, flags=0):
    return os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | flags, 0o600)


def scratch_pool(kv, size):
    """As Dynamo makes one: a temporary name, O_DIRECT by F_SETFL, allocated, then unlinked."""
    path = kv.mnt / "dynamo-kvbm-disk-cache-XaZ012"
    fd = new_pool(path)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    fallocate(fd, 0, 0, size)
    os.unlink(path)
    return fd


@pytest.fixture
def huge(sparse):
    return sparse()


class Pool:
    """What a pool's slots must contain: the seed of the last write to each; None: zeros."""

    def __init__(self, fd, slot, count, start=0, shift=0):
        self.fd, self.slot, self.count, self.start = fd, slot, count, start
        self.seeds = [None] * count
        # A page-aligned buffer, or one that is off by SHIFT.
        self.memory = memoryview(mmap.mmap(-1, slot + 4096))[shift:shift + slot]

    def offset(self, number):
        return self.start + number * self.slot

    def expected(self, number):
        seed = self.seeds[number]
        return bytes(self.slot) if seed is None else blob(seed, self.slot)

    def write(self, number, seed):
        self.memory[:] = blob(seed, self.slot)
        written = os.pwritev(self.fd, [self.memory], self.offset(number))
        assert written == self.slot, f"slot {number}: {written} of {self.slot} bytes"
        self.seeds[number] = seed

    def check(self, number):
        self.memory[:] = b"?" * self.slot
        count = os.preadv(self.fd, [self.memory], self.offset(number))
        assert count == self.slot, f"slot {number}: {count} of {self.slot} bytes"
        assert self.memory == self.expected(number), f"slot {number} has wrong bytes"

    def exercise(self, seed, steps):
        choice = random.Random(seed)
        for step in range(steps):
            number = choice.randrange(self.count)
            self.check(number)
            self.write(number, seed * 10_000 + step)
        for number in range(self.count):
            self.check(number)


# ---- The promise ----

def test_r4_a_terabyte_is_allocated_without_dram_or_io(huge):
    before, free = huge.status(), available(huge)
    fd = new_pool(huge.mnt / "pool")
    fallocate(fd, 0, 0, TIB)
    assert os.fstat(fd).st_size == TIB
    assert blocks(fd) == TIB
    assert available(huge) == free - TIB
    after = huge.status()
    assert after["dram_charged"] == before["dram_charged"]
    assert after["counters"]["writeback_bytes"] == 0
    assert os.pread(fd, 4096, TIB - 4096) == bytes(4096)
    fails(errno.ENXIO, os.lseek, fd, 0, os.SEEK_DATA)
    assert os.lseek(fd, 12_345, os.SEEK_HOLE) == 12_345
    pool = Pool(fd, 2 * MIB, 8, start=TIB // 3)
    pool.exercise(1, 20)
    assert os.lseek(fd, 0, os.SEEK_DATA) == TIB // 3 // 4096 * 4096
    assert blocks(fd) == TIB and available(huge) == free - TIB
    other = new_pool(huge.mnt / "other")
    fails(errno.ENOSPC, fallocate, other, 0, 0, TIB)
    assert os.fstat(other).st_size == 0 and blocks(other) == 0
    os.close(other)
    os.unlink(huge.mnt / "pool")
    pool.exercise(2, 20)
    os.close(fd)
    eventually(lambda: available(huge) >= free - MIB, what="the pool's space")


def test_r4_truncated_up_it_costs_what_is_written(huge):
    free = available(huge)
    fd = new_pool(huge.mnt / "pool")
    os.ftruncate(fd, TIB)
    assert blocks(fd) == 0 and available(huge) == free
    os.pwrite(fd, blob(1, 3 * MIB), TIB // 2)
    assert blocks(fd) == 3 * MIB
    os.fsync(fd)
    assert blocks(fd) == 3 * MIB and available(huge) >= free - 4 * MIB
    os.close(fd)
    fd = os.open(huge.mnt / "pool", os.O_RDONLY)
    assert os.pread(fd, 4 * MIB, TIB // 2) == blob(1, 3 * MIB) + bytes(MIB)
    os.close(fd)


def test_r4_the_promise_ends_with_the_last_close(fresh):
    kv = fresh()
    fd = new_pool(kv.mnt / "pool")
    fallocate(fd, 0, 0, 64 * MIB)
    os.pwrite(fd, blob(1, MIB), 8 * MIB)
    os.fsync(fd)
    assert blocks(fd) == 64 * MIB
    second = os.dup(fd)
    os.close(fd)
    assert blocks(second) == 64 * MIB
    os.pwrite(second, blob(2, MIB), 16 * MIB)
    os.close(second)
    eventually(lambda: taken(kv) == 2 * MIB, what="the end of the promise")
    assert os.stat(kv.mnt / "pool").st_blocks * 512 == 2 * MIB
    data = get(kv.mnt / "pool")
    assert len(data) == 64 * MIB
    assert data[8 * MIB:9 * MIB] == blob(1, MIB) and data[16 * MIB:17 * MIB] == blob(2, MIB)
    assert data.count(0) >= 62 * MIB


def test_k1_an_allocated_pool_takes_every_write_in_a_full_store(fresh):
    kv = fresh(size="192M", dram="32M")
    fd = new_pool(kv.mnt / "pool", os.O_DIRECT)
    fallocate(fd, 0, 0, 96 * MIB)
    others, refused = [], None
    while refused is None:
        others.append(os.open(kv.mnt / f"f{len(others)}", os.O_CREAT | os.O_RDWR, 0o600))
        try:
            os.pwrite(others[-1], blob(len(others), MIB), 0)
            os.fsync(others[-1])
        except OSError as e:
            refused = e.errno
    assert refused == errno.ENOSPC and len(others) > 50
    pool = Pool(fd, 2 * MIB, 48)
    for turn in range(3):
        for number in random.Random(turn).sample(range(48), 48):
            pool.write(number, turn * 100 + number)
        for number in range(48):
            pool.check(number)
    # Pieces of chunks that are on the device by now.
    for number in range(0, 48, 5):
        os.pwrite(fd, blob(number, 4096), number * 2 * MIB + 4096 * number)
        assert os.pread(fd, 4096, number * 2 * MIB + 4096 * number) == blob(number, 4096)
    for other in others[:-1]:
        os.close(other)
    with pytest.raises(OSError) as e:
        os.close(others[-1])  # its write had no room, so it is not published
    assert e.value.errno == errno.ENOSPC
    os.close(fd)


def test_accounts_return_to_zero(fresh):
    kv = fresh(size="1G", dram="32M")
    fds = {}

    def pool(name, size=64 * MIB):
        fds[name] = new_pool(kv.mnt / name)
        fallocate(fds[name], 0, 0, size)
        return fds[name]

    pool("untouched")
    os.pwrite(pool("dirty"), blob(1, 4 * MIB), 12_345)
    fd = pool("cold")
    for offset in range(0, 64 * MIB, 4 * MIB):
        os.pwrite(fd, blob(2, 4 * MIB), offset)
    fd = pool("synced")
    os.pwrite(fd, blob(3, 10 * MIB), 0)
    os.fsync(fd)
    fd = pool("synced-and-written")
    os.pwrite(fd, blob(4, 10 * MIB), 0)
    os.fsync(fd)
    os.pwrite(fd, blob(5, 10 * MIB), 5 * MIB + 5)
    fd = pool("punched")
    os.pwrite(fd, blob(6, 10 * MIB), MIB)
    fallocate(fd, FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE, 4 * MIB + 1, 20 * MIB)
    assert blocks(fd) == 64 * MIB - 20 * MIB + 4096
    fallocate(fd, FALLOC_ZERO_RANGE, MIB, 40 * MIB)
    assert blocks(fd) == 64 * MIB
    assert os.pread(fd, 10 * MIB, MIB) == bytes(10 * MIB)
    fd = pool("cut")
    os.pwrite(fd, blob(7, 10 * MIB), MIB)
    fallocate(fd, FALLOC_KEEP_SIZE, 64 * MIB, MIB)
    assert blocks(fd) == 65 * MIB
    os.ftruncate(fd, 2 * MIB + 1)
    assert blocks(fd) == 2 * MIB + 4096
    os.ftruncate(fd, 32 * MIB)
    assert blocks(fd) == 2 * MIB + 4096
    os.unlink(kv.mnt / "dirty")
    os.fsync(fds["dirty"])
    for name, fd in fds.items():
        if name != "dirty":
            os.unlink(kv.mnt / name)
        os.close(fd)
    eventually(lambda: taken(kv) == 0, what=f"space of pools: {kv.status()}")
    eventually(lambda: kv.status()["dram_charged"] == 0, what="DRAM of pools")


# ---- Larger than DRAM ----

@pytest.mark.parametrize("how", ("buffered", "direct", "unaligned"))
def test_a_pool_larger_than_dram(fresh, how):
    """Slots of several sizes, by several processes and threads, against a model."""
    kv = fresh(size="1G", dram="32M")
    fd = new_pool(kv.mnt / "pool", 0 if how == "buffered" else os.O_DIRECT)
    fallocate(fd, 0, 0, 192 * MIB)
    shift = 513 if how == "unaligned" else 0
    jobs = [(0, 4 * KIB, 400), (48 * MIB + shift, 64 * KIB, 300), (96 * MIB + shift, 2 * MIB, 23),
            (144 * MIB + shift, 1_124_352, 43)]

    def process(number):
        start, slot, count = jobs[number]
        if slot == 4 * KIB:  # far apart
            pools = [Pool(fd, slot, 1, start=start + i * 11 * slot, shift=shift)
                     for i in range(count)]
            for i, pool in enumerate(pools):
                pool.exercise(i, 1)
            for pool in pools:
                pool.check(0)
        else:
            Pool(fd, slot, count, start=start, shift=shift).exercise(number, 120)
        return True

    assert parallel(process, range(len(jobs)), timeout=200) == [True] * 4
    pools = [Pool(fd, 512 * KIB, 60, start=number * 48 * MIB, shift=shift) for number in range(4)]
    for pool in pools:  # what the processes left is not the model's
        for number in range(pool.count):
            pool.write(number, number)
    threads = [threading.Thread(target=pool.exercise, args=(i, 60)) for i, pool in
               enumerate(pools)]
    errors = []
    threading.excepthook, hook = lambda info: errors.append(info.exc_value), threading.excepthook
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    threading.excepthook = hook
    assert not errors, errors
    status = kv.status()
    assert status["dram_charged"] <= status["dram_budget"]
    assert status["counters"]["writeback_bytes"] >= 100 * MIB
    assert status["counters"]["checksum_errors"] == 0
    # Several descriptions of one pool, too: this process is the writer.
    other = os.open(kv.mnt / "pool", os.O_RDWR)
    assert os.pread(other, 512 * KIB, 0) == pools[0].expected(0)
    os.close(other)
    os.unlink(kv.mnt / "pool")
    os.close(fd)
    eventually(lambda: taken(kv) == 0, what="space of the pool")


def test_a_cold_pool_is_read_chunk_by_chunk(fresh):
    kv = fresh(size="1G", dram="32M")
    fd = new_pool(kv.mnt / "pool")
    for offset in range(0, 256 * MIB, 8 * MIB):
        os.pwrite(fd, blob(offset, 8 * MIB), offset)
    choice = random.Random(1)
    before = kv.counter("fill_bytes")
    for _ in range(100):
        number, at = choice.randrange(32), choice.randrange(8 * MIB - 4096) // 4096 * 4096
        assert os.pread(fd, 4096, number * 8 * MIB + at) == blob(number * 8 * MIB, 8 * MIB)[
            at:at + 4096]
    read = kv.counter("fill_bytes") - before
    assert 0 < read <= 100 * MIB, f"{read} bytes for 100 blocks"
    # Whole chunks by O_DIRECT: read, checked, and not admitted.
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    before = kv.status()
    with mmap.mmap(-1, 8 * MIB) as buffer:
        for number in range(32):
            assert os.preadv(fd, [buffer], number * 8 * MIB) == 8 * MIB
            assert buffer[:] == blob(number * 8 * MIB, 8 * MIB)
    after = kv.status()
    assert after["counters"]["fill_bytes"] - before["counters"]["fill_bytes"] >= 200 * MIB
    assert after["dram_charged"] <= before["dram_charged"]
    os.close(fd)


def test_writes_of_whole_chunks_read_nothing(fresh):
    kv = fresh(size="1G", dram="32M")
    fd = new_pool(kv.mnt / "pool", os.O_DIRECT)
    fallocate(fd, 0, 0, 256 * MIB)
    pool = Pool(fd, 2 * MIB, 128)
    before = kv.counter("fill_bytes")
    for turn in range(2):
        for number in random.Random(turn).sample(range(128), 128):
            pool.write(number, turn * 1000 + number)
    assert kv.counter("fill_bytes") == before
    # A block of a cold chunk has to read the chunk, whose checksum is over all of it, and no more.
    for number in range(50):
        os.pwrite(fd, blob(7, 4096), pool.offset(number) + 8192)
    assert kv.counter("fill_bytes") - before <= 50 * MIB
    assert os.pread(fd, 4096, pool.offset(3) + 8192) == blob(7, 4096)
    os.close(fd)


# ---- Eviction, unlink, crash ----

def test_k2_an_open_pool_is_never_evicted(fresh):
    kv = fresh(size="256M", dram="64M")
    fds = [new_pool(kv.mnt / f"pool{i}") for i in range(3)]
    pools = [Pool(fd, MIB, 20) for fd in fds]
    for i, pool in enumerate(pools):
        fallocate(pool.fd, 0, 0, 20 * MIB)
        for number in range(0, 20, 2):
            pool.write(number, i * 100 + number)
    os.fsync(fds[1])  # published, and written on
    pools[1].write(1, 5)
    os.fsync(fds[2])  # published only
    os.unlink(kv.mnt / "pool0")
    for i in range(60):
        put(kv.mnt / f"f{i}", blob(i, 8 * MIB))
    assert kv.counter("evicted_store") > 20
    for pool in pools:
        for number in range(20):
            pool.check(number)
        pool.exercise(3, 10)
    assert sorted(n for n in os.listdir(kv.mnt) if "pool" in n) == ["pool1", "pool2"]
    for fd in fds:
        os.close(fd)


def test_k2_a_closed_pool_goes_whole_or_stays(fresh):
    kv = fresh(size="256M", dram="64M")
    for i in range(4):
        fd = new_pool(kv.mnt / f"pool{i}")
        os.ftruncate(fd, 20 * MIB)
        Pool(fd, MIB, 20).exercise(i, 40)
        os.close(fd)
        put(kv.mnt / f"copy{i}", get(kv.mnt / f"pool{i}"))
    copies = [get(kv.mnt / f"copy{i}") for i in range(4)]
    for i in range(30):
        put(kv.mnt / f"f{i}", blob(i, 8 * MIB))
        for number in range(4):
            if os.path.exists(kv.mnt / f"pool{number}"):
                assert get(kv.mnt / f"pool{number}") == copies[number]


@pytest.mark.parametrize("synced", (False, True))
def test_p1_an_unlinked_pool_works_and_leaves_no_trace(fresh, synced):
    kv = fresh(size="1G", dram="32M")
    put_synced(kv.mnt / "other", blob(1, MIB))
    before = taken(kv)
    fd = scratch_pool(kv, 128 * MIB)
    assert os.fstat(fd).st_nlink == 0 and blocks(fd) == 128 * MIB
    pool = Pool(fd, 2 * MIB, 64)
    pool.exercise(1, 100)
    if synced:
        os.fsync(fd)
        pool.exercise(2, 30)
    crash(kv, fd)
    kv.mount()
    assert os.listdir(kv.mnt) == ["other"]
    eventually(lambda: taken(kv) == before, what="the space of what the crash left")
    assert get(kv.mnt / "other") == blob(1, MIB)
    fd = scratch_pool(kv, 512 * MIB)
    Pool(fd, 2 * MIB, 16).exercise(3, 30)
    os.close(fd)
    eventually(lambda: taken(kv) == before, what="space of the closed pool")


def test_p1_a_pool_that_was_never_synced_is_absent_after_a_crash(fresh):
    kv = fresh()
    fd = new_pool(kv.mnt / "pool")
    fallocate(fd, 0, 0, 200 * MIB)
    Pool(fd, 2 * MIB, 100).exercise(1, 50)
    crash(kv, fd)
    kv.mount()
    assert os.listdir(kv.mnt) == []
    eventually(lambda: taken(kv) == 0, what="the space of what the crash left")


# ---- fsync ----

def test_p2_fsync_of_a_pool_in_use_costs_what_changed(fresh, agent):
    kv = fresh(size="2G", dram="64M")
    fd = new_pool(kv.mnt / "pool")
    fallocate(fd, 0, 0, GIB // 2)
    pool = Pool(fd, MIB, 256)
    for number in range(256):
        pool.write(number, number)
    os.fsync(fd)
    reader = agent()
    old = reader.open(kv.mnt / "pool")
    assert reader.pread(old, MIB, 77 * MIB) == blob(77, MIB)
    before = kv.counter("writeback_bytes")
    for number in range(0, 250, 25):
        os.pwrite(fd, blob(9000 + number, 4096), number * MIB + 8192)
        os.fsync(fd)
        # Who opens it now sees the last sync; who had it open sees what he had.
        new = reader.open(kv.mnt / "pool")
        assert reader.pread(new, 4096, number * MIB + 8192) == blob(9000 + number, 4096)
        assert reader.pread(old, MIB, number * MIB) == blob(number, MIB)
        reader.close(new)
    assert kv.counter("writeback_bytes") - before == 10 * MIB
    assert blocks(fd) == GIB // 2
    os.pwrite(fd, blob(1, MIB), 255 * MIB)
    assert reader.pread(old, MIB, 255 * MIB) == blob(255, MIB)
    for number in range(1, 256, 7):
        if number % 25:
            assert reader.pread(old, MIB, number * MIB) == blob(number, MIB)
            pool.check(number)
    crash(kv, fd)
    reader.stop(kill=True)
    kv.mount()
    data = get(kv.mnt / "pool")
    assert len(data) == GIB // 2
    assert data[255 * MIB:256 * MIB] == blob(255, MIB), "what was not synced was committed"
    for number in range(0, 250, 25):
        place = number * MIB + 8192
        assert data[place:place + 4096] == blob(9000 + number, 4096)


def test_writers_go_on_during_fsync(fresh):
    """fsync by one process, writes by others through the same description: nothing is lost."""
    kv = fresh(size="1G", dram="64M")
    fd = new_pool(kv.mnt / "pool", os.O_DIRECT)
    fallocate(fd, 0, 0, 96 * MIB)

    def process(number):
        if number == 0:
            for _ in range(12):
                os.fsync(fd)
        else:
            Pool(fd, 64 * KIB + 4096, 100, start=number * 24 * MIB).exercise(number, 250)
        return True

    assert parallel(process, range(4)) == [True] * 4
    os.fsync(fd)
    crash(kv, fd)
    kv.mount()
    assert os.stat(kv.mnt / "pool").st_size == 96 * MIB
    assert kv.counter("checksum_errors") == 0


# ---- Trouble ----

@pytest.fixture
def small_disk():
    """Makes a folder in a filesystem of its own that holds SIZE bytes."""
    made = []

    def make(path, size):
        path.mkdir()
        run("mount", "-t", "tmpfs", "-o", f"size={size}", "kvfs-test", path)
        made.append(path)
        return path

    yield make
    for path in made:
        run("umount", "-l", path)


def test_a_pool_whose_device_fails(small_disk, fresh):
    """What could not be written is lost, and said so, call by call; the mount goes on."""
    kv = fresh(mount=False, format=False, dram="32M")
    device = small_disk(kv.home / "disk", 48 * MIB) / "device"
    with open(device, "wb") as f:
        f.truncate(512 * MIB)
    kv.devices = [device]
    kv.format()
    kv.mount()
    kv.expect_errors("write failed|version lost|device gets no more")
    put_synced(kv.mnt / "before", blob(1, MIB))
    fd = new_pool(kv.mnt / "pool")
    fallocate(fd, 0, 0, 128 * MIB)
    failed = 0
    for number in range(64):
        try:
            os.pwrite(fd, blob(number, 2 * MIB), number * 2 * MIB)
        except OSError as e:
            assert e.errno == errno.EIO
            failed += 1
    assert failed > 0
    fails(errno.EIO, os.fsync, fd)
    fails(errno.EIO, os.pwrite, fd, b"x", 0)
    fails(errno.EIO, os.fsync, fd)
    fails(errno.EIO, os.pwrite, fd, b"x", 0)
    with contextlib.suppress(OSError):
        os.close(fd)
    assert get(kv.mnt / "before") == blob(1, MIB)
    assert os.listdir(kv.mnt) == ["before"]
    eventually(lambda: kv.status()["store_reserved"] == 0, what="the end of the promise")
