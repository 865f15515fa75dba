# SPDX-License-Identifier: Apache-2.0
"""R2, R4: open, read, write, truncate, append, seek and fallocate, as POSIX and Linux say."""
import errno
import os

import pytest
from data import MIB, blob, get, put
from procs import parallel
from syscalls import (
    FALLOC_KEEP_SIZE,
    FALLOC_PUNCH_HOLE,
    FALLOC_ZERO_RANGE,
    fails,
    fallocate,
)

SIZES = (0, 1, 4095, 4096, 4097, 65536, MIB - 1, MIB, MIB + 1, 5 * MIB + 123)


@pytest.fixture
def fd(place):
    fd = os.open(place / "file", os.O_CREAT | os.O_RDWR, 0o644)
    yield fd
    os.close(fd)


@pytest.mark.parametrize("size", SIZES)
def test_whole_file_round_trip(place, size):
    data = blob(size, size)
    put(place / "f", data)
    assert get(place / "f") == data
    assert os.stat(place / "f").st_size == size


def test_many_small_writes(place):
    data = blob(1, 300_000)
    with open(place / "f", "wb", buffering=0) as f:
        for start in range(0, len(data), 1237):
            f.write(data[start:start + 1237])
    assert get(place / "f") == data


def test_write_at_offsets_in_any_order(place, fd):
    data = blob(2, 3 * MIB)
    starts = list(range(0, len(data), 50_000))
    for start in starts[1::2] + starts[::2]:
        os.pwrite(fd, data[start:start + 50_000], start)
    assert os.pread(fd, len(data) + 1, 0) == data


def test_read_at_and_behind_the_end(place, fd):
    os.write(fd, b"12345")
    assert os.pread(fd, 10, 3) == b"45"
    assert os.pread(fd, 10, 5) == b""
    assert os.pread(fd, 10, 5 * MIB) == b""


def test_write_behind_the_end_leaves_zeros(place, fd):
    os.pwrite(fd, b"start", 0)
    os.pwrite(fd, b"end", 2 * MIB + 7)
    assert os.pread(fd, 3 * MIB, 0) == b"start" + bytes(2 * MIB + 2) + b"end"


@pytest.mark.parametrize("published", (False, True))
def test_truncate_up_and_down(place, published):
    data = blob(3, 3 * MIB + 500)
    fd = os.open(place / "f", os.O_CREAT | os.O_RDWR, 0o644)
    os.write(fd, data)
    if published:
        os.close(fd)
        fd = os.open(place / "f", os.O_RDWR)
    os.ftruncate(fd, MIB + 10)
    assert os.pread(fd, 4 * MIB, 0) == data[:MIB + 10]
    os.ftruncate(fd, 2 * MIB)
    assert os.pread(fd, 4 * MIB, 0) == data[:MIB + 10] + bytes(MIB - 10), "cut bytes came back"
    assert os.fstat(fd).st_size == 2 * MIB
    os.ftruncate(fd, 0)
    os.close(fd)
    assert get(place / "f") == b""


def test_truncate_by_path(place):
    put(place / "f", b"0123456789")
    os.truncate(place / "f", 4)
    assert get(place / "f") == b"0123"
    os.truncate(place / "f", 6)
    assert get(place / "f") == b"0123\0\0"


def test_truncate_of_a_huge_sparse_file(place):
    put(place / "f", b"x")
    os.truncate(place / "f", 1 << 40)
    info = os.stat(place / "f")
    assert info.st_size == 1 << 40
    assert info.st_blocks * 512 <= MIB
    fd = os.open(place / "f", os.O_RDONLY)
    assert os.pread(fd, 4096, (1 << 40) - 4096) == bytes(4096)
    os.close(fd)


def test_append_goes_to_the_end_whatever_the_offset(place):
    put(place / "f", b"first,")
    fd = os.open(place / "f", os.O_WRONLY | os.O_APPEND)
    os.write(fd, b"second,")
    os.lseek(fd, 0, os.SEEK_SET)
    os.write(fd, b"third")
    os.close(fd)
    assert get(place / "f") == b"first,second,third"


def test_open_trunc_empties_a_file(place):
    put(place / "f", blob(4, 2 * MIB))
    os.close(os.open(place / "f", os.O_WRONLY | os.O_TRUNC))
    assert os.stat(place / "f").st_size == 0
    assert get(place / "f") == b""


def test_open_flags_are_enforced(place, fd):
    put(place / "f", b"x")
    fails(errno.EEXIST, os.open, place / "f", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    fails(errno.ENOENT, os.open, place / "none", os.O_RDONLY)
    fails(errno.EISDIR, os.open, place, os.O_WRONLY)
    fails(errno.ENOTDIR, os.open, place / "f" / "below", os.O_RDONLY)
    fails(errno.ENOTDIR, os.open, place / "f", os.O_RDONLY | os.O_DIRECTORY)
    os.symlink("f", place / "link")
    fails(errno.ELOOP, os.open, place / "link", os.O_RDONLY | os.O_NOFOLLOW)
    reader = os.open(place / "f", os.O_RDONLY | os.O_NOATIME | os.O_CLOEXEC)
    fails(errno.EBADF, os.write, reader, b"y")
    os.close(reader)
    writer = os.open(place / "f", os.O_WRONLY)
    fails(errno.EBADF, os.read, writer, 1)
    os.close(writer)


def test_vectored_io_returns_the_full_length(place, fd):
    parts = [blob(i, length) for i, length in enumerate((1, 4095, 4096, 100_001, 2 * MIB, 7))]
    total = sum(map(len, parts))
    assert os.pwritev(fd, parts, 13) == total
    buffers = [bytearray(len(p)) for p in parts]
    assert os.preadv(fd, buffers, 13) == total
    assert [bytes(b) for b in buffers] == parts


def data_and_holes(fd, size):
    """The data ranges of a file by SEEK_DATA and SEEK_HOLE, checked for legality on the way."""
    ranges, place = [], 0
    while place < size:
        try:
            start = os.lseek(fd, place, os.SEEK_DATA)
        except OSError as e:
            assert e.errno == errno.ENXIO
            break
        end = os.lseek(fd, start, os.SEEK_HOLE)
        assert place <= start < end <= size
        ranges.append((start, end))
        place = end
    return ranges


@pytest.mark.parametrize("published", (False, True))
def test_seek_data_and_hole_never_hide_data(place, published):
    size = 9 * MIB
    written = [(0, 4096), (3 * MIB, 3 * MIB + 8192), (6 * MIB + 4096, 7 * MIB)]
    fd = os.open(place / "f", os.O_CREAT | os.O_RDWR, 0o644)
    for start, end in written:
        os.pwrite(fd, blob(start, end - start), start)
    os.ftruncate(fd, size)
    if published:
        os.close(fd)
        fd = os.open(place / "f", os.O_RDONLY)
    ranges = data_and_holes(fd, size)
    for start, end in written:
        assert any(a <= start and end <= b for a, b in ranges), f"{start} is not in {ranges}"
    holes = bytearray(os.pread(fd, size, 0))
    for start, end in ranges:
        holes[start:end] = bytes(end - start)
    assert not any(holes), "a hole by SEEK_HOLE reads as other than zeros"
    fails(errno.ENXIO, os.lseek, fd, size, os.SEEK_DATA)
    fails(errno.ENXIO, os.lseek, fd, size + 1, os.SEEK_HOLE)
    os.close(fd)


def test_sparse_file_counts_its_blocks_honestly(place):
    fd = os.open(place / "f", os.O_CREAT | os.O_RDWR, 0o644)
    os.ftruncate(fd, 512 * MIB)
    os.pwrite(fd, blob(5, 65536), 100 * MIB)
    os.fsync(fd)
    os.close(fd)
    info = os.stat(place / "f")
    assert info.st_size == 512 * MIB
    assert 65536 <= info.st_blocks * 512 <= 2 * MIB
    put(place / "g", blob(6, 4 * MIB))
    assert 4 * MIB <= os.stat(place / "g").st_blocks * 512 <= 5 * MIB


def test_fallocate_grows_and_keeps(place, fd):
    os.write(fd, b"data")
    os.posix_fallocate(fd, 0, MIB)
    assert os.fstat(fd).st_size == MIB
    fallocate(fd, FALLOC_KEEP_SIZE, MIB, MIB)
    assert os.fstat(fd).st_size == MIB
    assert os.pread(fd, 2 * MIB, 0) == b"data" + bytes(MIB - 4)


@pytest.mark.parametrize("how", (FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE, FALLOC_ZERO_RANGE,
                                 FALLOC_ZERO_RANGE | FALLOC_KEEP_SIZE))
@pytest.mark.parametrize("start,length", ((4096, 8192), (100, 5000), (MIB - 1, MIB + 2),
                                          (2 * MIB + 5, 4 * MIB)))
def test_fallocate_zeroes_exactly_the_range(place, fd, how, start, length):
    data = bytearray(blob(7, 3 * MIB))
    os.write(fd, data)
    fallocate(fd, how, start, length)
    if not how & FALLOC_KEEP_SIZE:
        data.extend(bytes(max(0, start + length - len(data))))
    end = min(start + length, len(data))
    data[start:end] = bytes(end - start)
    assert os.fstat(fd).st_size == len(data)
    assert os.pread(fd, 8 * MIB, 0) == data


def test_fallocate_unknown_modes_are_refused(place, fd):
    fails(errno.EOPNOTSUPP, fallocate, fd, 0x80, 0, 4096)
    reader = os.open(place / "file", os.O_RDONLY)
    fails(errno.EBADF, os.posix_fallocate, reader, 0, 4096)
    os.close(reader)


def test_io_after_unlink(place):
    data = blob(8, 2 * MIB)
    put(place / "f", data)
    reader = os.open(place / "f", os.O_RDONLY)
    new = os.open(place / "g", os.O_CREAT | os.O_RDWR, 0o600)
    os.unlink(place / "f")
    os.unlink(place / "g")
    assert os.listdir(place) == []
    assert os.pread(reader, 3 * MIB, 0) == data
    assert os.fstat(reader).st_nlink == 0
    os.pwrite(new, data, 100)
    os.ftruncate(new, MIB)
    assert os.pread(new, 2 * MIB, 0) == bytes(100) + data[:MIB - 100]
    os.fsync(new)
    os.close(new)
    os.close(reader)


def test_io_after_rename(place):
    put(place / "a", b"old")
    fd = os.open(place / "a", os.O_RDWR)
    os.rename(place / "a", place / "b")
    os.pwrite(fd, b"NEW", 0)
    os.close(fd)
    assert get(place / "b") == b"NEW"
    assert not os.path.exists(place / "a")


def test_a_name_made_again_is_a_new_file(place):
    put(place / "f", b"one")
    old = os.open(place / "f", os.O_RDONLY)
    os.unlink(place / "f")
    put(place / "f", b"two")
    assert os.pread(old, 10, 0) == b"one"
    assert get(place / "f") == b"two"
    os.close(old)


def test_dup_shares_the_offset(place, fd):
    other = os.dup(fd)
    os.write(fd, b"ab")
    os.write(other, b"cd")
    os.close(other)
    assert os.pread(fd, 10, 0) == b"abcd"


def test_ftruncate_needs_a_writable_descriptor(place):
    put(place / "f", b"abc")
    reader = os.open(place / "f", os.O_RDONLY)
    fails(errno.EINVAL, os.ftruncate, reader, 1)
    os.close(reader)


def test_appends_of_many_processes_lose_nothing(place):
    def append(number):
        fd = os.open(place / "log", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
        for i in range(50):
            os.write(fd, f"{number}.{i}\n".encode().ljust(100, b"."))
        os.close(fd)

    # One at a time: O_APPEND by several writers at once is a matter of versions (P5).
    for number in range(4):
        parallel(append, [number])
    lines = get(place / "log")
    assert len(lines) == 4 * 50 * 100
    for number in range(4):
        for i in range(50):
            assert f"{number}.{i}\n".encode() in lines


@pytest.mark.parametrize("at, to, length, expected", [
    (0, 0, 5000, "EINVAL"), (0, 4999, 5000, "EINVAL"), (4999, 0, 5000, "EINVAL"),
    (0, 60_000, 70_000, "EINVAL"), (0, 5000, 5000, 5000), (5000, 0, 5000, 5000),
    (69_000, 70_000, 5000, 1000), (70_000, 70_000, 10, 0)])
def test_copy_file_range_within_a_file(place, at, to, length, expected):
    """Ranges of one file, by two descriptors, must not overlap, as far as there is something."""
    path, data = place / "f", blob(1, 70_000)
    put(path, data)
    source, target = os.open(path, os.O_RDONLY), os.open(path, os.O_WRONLY)
    try:
        try:
            done = os.copy_file_range(source, target, length, at, to)
        except OSError as e:
            done = errno.errorcode[e.errno]
        assert done == expected
    finally:
        os.close(source)
        os.close(target)
    after = bytearray(data)
    if expected != "EINVAL":
        after[to:to + expected] = data[at:at + expected]
    assert get(path) == after


def test_copy_file_range_between_offsets(place):
    data = blob(9, 3 * MIB)
    put(place / "a", data)
    source = os.open(place / "a", os.O_RDONLY)
    target = os.open(place / "b", os.O_CREAT | os.O_RDWR, 0o644)

    def copy(length, offset_from, offset_to):
        done = 0
        while done < length:
            n = os.copy_file_range(source, target, length - done, offset_from + done,
                                   offset_to + done)
            if n == 0:
                break
            done += n
        return done

    assert copy(MIB, 100, 7) == MIB
    assert copy(5 * MIB, 2 * MIB, 2 * MIB) == MIB, "the copy ends at the source's end"
    assert copy(10, 4 * MIB, 0) == 0, "nothing behind the end"
    expected = bytearray(3 * MIB)
    expected[7:7 + MIB] = data[100:100 + MIB]
    expected[2 * MIB:] = data[2 * MIB:]
    assert os.pread(target, 4 * MIB, 0) == expected
    os.close(source)
    os.close(target)
    assert get(place / "b") == expected
    assert get(place / "a") == data


def test_seen_by_other_processes_after_close(place, agent):
    other = agent()
    data = blob(10, MIB)
    fd = other.open(place / "f", os.O_CREAT | os.O_WRONLY)
    other.write(fd, data)
    other.close(fd)
    assert get(place / "f") == data
    put(place / "f", data[::-1])
    assert other.read_file(place / "f") == data[::-1]
