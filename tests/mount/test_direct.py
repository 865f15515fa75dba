# SPDX-License-Identifier: Apache-2.0
"""R2, R4: O_DIRECT in all its forms, and calls that move a whole object at once."""
import fcntl
import mmap
import os

import pytest
from data import GIB, MIB, blob, get, put, same

SIZE = 4 * MIB + 2048  # a DeepSeek-like block: no multiple of 4096


def aligned(length):
    """A page-aligned buffer."""
    return mmap.mmap(-1, length)


def direct_write(path, data):
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_TRUNC | os.O_DIRECT, 0o644)
    try:
        with aligned(len(data)) as buffer:
            buffer[:] = data
            return os.write(fd, buffer)
    finally:
        os.close(fd)


def direct_read(path, length, offset=0):
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        with aligned(max(1, length)) as buffer:
            count = os.preadv(fd, [buffer], offset)
            return buffer[:count]
    finally:
        os.close(fd)


@pytest.mark.parametrize("size", (1, 4095, 4096, 65536, MIB, SIZE, 33 * MIB))
def test_r4_direct_write_and_read(kv, size):
    data = blob(size, size)
    assert direct_write(kv.dir / "f", data) == size
    assert get(kv.dir / "f") == data
    assert direct_read(kv.dir / "f", size) == data


def test_r4_direct_at_any_alignment(kv):
    data = blob(1, SIZE)
    fd = os.open(kv.dir / "f", os.O_CREAT | os.O_RDWR | os.O_DIRECT, 0o644)
    with aligned(SIZE + 4096) as buffer:
        view = memoryview(buffer)
        place = 0
        for step, length in enumerate((1, 511, 4096, 10_000, 999_999, SIZE)):
            length = min(length, SIZE - place)
            shift = (0, 1, 513, 8)[step % 4]  # the address is odd, too
            view[shift:shift + length] = data[place:place + length]
            assert os.pwrite(fd, view[shift:shift + length], place) == length
            place += length
        assert place == SIZE
        for offset, length, shift in ((0, SIZE, 0), (1, 1, 0), (4095, 2, 3), (12_345, 2 * MIB, 7),
                                      (MIB, 4096, 512)):
            assert os.preadv(fd, [view[shift:shift + length]], offset) == length
            assert view[shift:shift + length] == data[offset:offset + length]
        del view
    os.close(fd)
    assert get(kv.dir / "f") == data


def test_r4_direct_switched_on_and_off_by_fcntl(kv):
    data = blob(2, SIZE)
    fd = os.open(kv.dir / "f", os.O_CREAT | os.O_RDWR, 0o644)
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    os.pwrite(fd, data[:1000], 0)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
    assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
    os.pwrite(fd, data[1000:3 * MIB], 1000)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags)
    os.pwrite(fd, data[3 * MIB:], 3 * MIB)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
    assert os.pread(fd, SIZE, 0) == data
    os.close(fd)
    reader = os.open(kv.dir / "f", os.O_RDONLY)
    fcntl.fcntl(reader, fcntl.F_SETFL, os.O_DIRECT)
    assert os.pread(reader, SIZE + 1, 0) == data
    os.close(reader)


def test_r4_direct_and_buffered_readers_together(kv):
    data = blob(3, SIZE)
    put(kv.dir / "f", data)
    plain = os.open(kv.dir / "f", os.O_RDONLY)
    assert os.pread(plain, 100, 0) == data[:100]
    assert direct_read(kv.dir / "f", SIZE) == data
    assert direct_read(kv.dir / "f", 5000, SIZE - 3) == data[-3:]
    with mmap.mmap(plain, SIZE, prot=mmap.PROT_READ) as m:
        assert direct_read(kv.dir / "f", SIZE) == data
        assert m[:] == data
    os.close(plain)


def test_r4_direct_appends_and_truncates(kv):
    data = blob(4, SIZE)
    direct_write(kv.dir / "f", data[:MIB])
    fd = os.open(kv.dir / "f", os.O_WRONLY | os.O_APPEND | os.O_DIRECT)
    os.write(fd, data[MIB:2 * MIB + 5])
    os.write(fd, data[2 * MIB + 5:])
    os.close(fd)
    assert get(kv.dir / "f") == data
    fd = os.open(kv.dir / "f", os.O_RDWR | os.O_DIRECT)
    os.ftruncate(fd, 1001)
    os.pwrite(fd, b"end", 2000)
    os.close(fd)
    assert get(kv.dir / "f") == data[:1001] + bytes(999) + b"end"


def test_r4_direct_io_by_a_reader_of_a_cold_file(fresh):
    kv = fresh()
    data = blob(5, SIZE)
    put(kv.dir / "f", data)
    kv.remount()
    before = kv.counter("fill_bytes")
    assert direct_read(kv.dir / "f", SIZE) == data
    assert direct_read(kv.dir / "f", 999, 77) == data[77:77 + 999]
    assert kv.counter("fill_bytes") >= before
    assert get(kv.dir / "f") == data
    assert direct_read(kv.dir / "f", SIZE) == data


def test_r4_statvfs_block_size(kv):
    assert os.statvfs(kv.dir).f_bsize == 4096
    assert os.statvfs(kv.dir).f_frsize == 4096


@pytest.mark.parametrize("flags", (0, os.O_DIRECT))
def test_r2_one_call_moves_128_mib(kv, flags):
    size = 128 * MIB
    with aligned(size) as buffer:
        pattern = blob(6, MIB)
        for start in range(0, size, MIB):
            buffer[start:start + MIB] = pattern
            buffer[start:start + 8] = start.to_bytes(8, "little")
        fd = os.open(kv.dir / "f", os.O_CREAT | os.O_WRONLY | flags, 0o644)
        assert os.write(fd, buffer) == size
        os.close(fd)
        with aligned(size) as back:
            fd = os.open(kv.dir / "f", os.O_RDONLY | flags)
            assert os.readv(fd, [back]) == size
            os.close(fd)
            assert back[:] == buffer[:]


def request_limit():
    """Bytes of a request that the kernel allows; a mount raises that for those after it."""
    try:
        with open("/proc/sys/fs/fuse/max_pages_limit", encoding="ascii") as file:
            return int(file.read()) * 4096
    except FileNotFoundError:  # before Linux 6.13
        return MIB


def test_r2_a_large_write_comes_in_few_requests(fresh):
    kv = fresh()
    size = 16 * MIB
    if request_limit() < 2 * MIB:
        pytest.skip("needs Linux 6.13, and the right to raise fs.fuse.max_pages_limit")
    data = blob(8, size)
    for shift in (0, 24):  # memory of tensors is aligned to pages, that of Python is not
        before = kv.status()["counters"]
        with aligned(size + 4096) as buffer:
            buffer[shift:shift + size] = data
            with memoryview(buffer) as view, view[shift:shift + size] as part:
                fd = os.open(kv.dir / f"f{shift}", os.O_CREAT | os.O_WRONLY, 0o644)
                assert os.write(fd, part) == size
                os.close(fd)
        after = kv.status()["counters"]
        assert after["fuse_write_bytes"] - before["fuse_write_bytes"] == size
        requests = after["fuse_write"] - before["fuse_write"]
        assert requests == size // (2 * MIB) + (shift > 0)
        assert get(kv.dir / f"f{shift}") == data
    kv.remount()
    for shift in (0, 24):
        assert get(kv.dir / f"f{shift}") == data


def test_r2_one_call_moves_1_gib(fresh):
    """Larger than the DRAM budget: reserved before it is accepted, so never short."""
    kv = fresh(size="3G", dram="512M")
    with aligned(GIB) as buffer:
        pattern = blob(7, MIB)
        for start in range(0, GIB, MIB):
            buffer[start:start + MIB] = pattern
            buffer[start:start + 8] = start.to_bytes(8, "little")
        fd = os.open(kv.dir / "f", os.O_CREAT | os.O_WRONLY, 0o644)
        assert os.write(fd, buffer) == GIB
        os.close(fd)
        with aligned(GIB) as back:
            fd = os.open(kv.dir / "f", os.O_RDONLY)
            assert os.preadv(fd, [back], 0) == GIB
            assert same(back, buffer)
            back[:4096] = bytes(4096)
            half = GIB // 2
            parts = [memoryview(back)[:half - 3], memoryview(back)[half - 3:]]
            assert os.preadv(fd, parts, 0) == GIB
            assert same(back, buffer)
            del parts
            os.close(fd)
