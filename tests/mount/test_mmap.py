# SPDX-License-Identifier: Apache-2.0
"""R4, P2, P4: mappings, private and shared, read and written, outliving descriptor and name."""
import ctypes
import errno
import mmap
import os
import signal

import pytest
from data import MIB, blob, get, put
from procs import eventually, in_child, parallel
from syscalls import fails

SIZE = 3 * MIB + 777
READ, WRITE = mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE
POPULATE = 0x8000  # MAP_POPULATE


def mapped(path, flags, prot=READ, length=SIZE, open_flags=os.O_RDONLY):
    fd = os.open(path, open_flags)
    try:
        return mmap.mmap(fd, length, flags=flags, prot=prot)
    finally:
        os.close(fd)


@pytest.mark.parametrize("flags", (mmap.MAP_SHARED, mmap.MAP_PRIVATE, mmap.MAP_PRIVATE | POPULATE,
                                   mmap.MAP_SHARED | POPULATE))
def test_r4_read_mapping_after_close(place, flags):
    data = blob(1, SIZE)
    put(place / "f", data)
    with mapped(place / "f", flags) as m:
        assert m[:] == data
        assert m[MIB - 1:MIB + 1] == data[MIB - 1:MIB + 1]


def test_r4_private_mapping_is_written_for_oneself_only(place):
    data = blob(2, SIZE)
    put(place / "f", data)
    with mapped(place / "f", mmap.MAP_PRIVATE, WRITE) as m:
        m[:100] = b"x" * 100
        assert m[:101] == b"x" * 100 + data[100:101]
        assert get(place / "f") == data
    assert get(place / "f") == data


@pytest.mark.parametrize("order", ("unmap then close", "close then unmap", "sync then close"))
def test_p2_shared_writes_are_published(place, order):
    old, new = blob(3, SIZE), blob(4, MIB)
    put(place / "f", old)
    fd = os.open(place / "f", os.O_RDWR)
    m = mmap.mmap(fd, SIZE, flags=mmap.MAP_SHARED)
    m[1000:1000 + MIB] = new
    if order == "sync then close":
        m.flush()
    if order == "close then unmap":
        os.close(fd)
        m.close()
    else:
        m.close()
        os.close(fd)
    expected = old[:1000] + new + old[1000 + MIB:]
    # RELEASE, which publishes what a mapping wrote after the close, is not waited for by anyone.
    eventually(lambda: get(place / "f") == expected, what="the mapping's bytes")


def test_p2_file_filled_by_a_mapping_then_renamed(place):
    """LMCache's GDS fall-back: header, ftruncate, shared mapping, rename."""
    data = blob(5, SIZE)
    put(place / "tmp", b"header")
    fd = os.open(place / "tmp", os.O_RDWR)
    os.ftruncate(fd, SIZE)
    with mmap.mmap(fd, SIZE, flags=mmap.MAP_SHARED) as m:
        m[:] = data
    os.close(fd)
    os.rename(place / "tmp", place / "final")
    assert get(place / "final") == data


def test_new_file_written_by_mapping_and_write_together(place):
    fd = os.open(place / "f", os.O_CREAT | os.O_RDWR, 0o644)
    os.ftruncate(fd, SIZE)
    with mmap.mmap(fd, SIZE, flags=mmap.MAP_SHARED) as m:
        m[5000:5010] = b"by mapping"
        assert os.pread(fd, 10, 5000) == b"by mapping"
        os.pwrite(fd, b"by write", 5010)
        assert m[5000:5018] == b"by mappingby write"
        os.ftruncate(fd, MIB)
        assert m[5000:5018] == b"by mappingby write"
    os.close(fd)
    assert get(place / "f") == (bytes(5000) + b"by mappingby write").ljust(MIB, b"\0")


def test_two_processes_share_a_writable_mapping(place):
    fd = os.open(place / "f", os.O_CREAT | os.O_RDWR, 0o644)
    os.ftruncate(fd, 4 * MIB)
    m = mmap.mmap(fd, 4 * MIB, flags=mmap.MAP_SHARED)

    def fill(number):
        m[number * MIB:(number + 1) * MIB] = bytes([number + 1]) * MIB

    parallel(fill, range(4))  # forked: they have our descriptor and our mapping
    assert [m[i * MIB] for i in range(4)] == [1, 2, 3, 4]
    m.close()
    os.close(fd)
    assert get(place / "f") == b"".join(bytes([i + 1]) * MIB for i in range(4))


def test_read_only_descriptor_gives_no_writable_mapping(place):
    put(place / "f", blob(6, SIZE))
    fd = os.open(place / "f", os.O_RDONLY)
    fails(errno.EACCES, lambda: mmap.mmap(fd, SIZE, flags=mmap.MAP_SHARED, prot=WRITE))
    os.close(fd)


def test_access_behind_the_end_is_sigbus(place):
    put(place / "f", b"x" * 4096)

    def far():
        fd = os.open(place / "f", os.O_RDONLY)
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int,
                              ctypes.c_int, ctypes.c_long]
        address = libc.mmap(None, 2 * 4096, READ, mmap.MAP_SHARED, fd, 0)
        return ctypes.string_at(address + 4096, 1)

    with pytest.raises(ChildProcessError, match=f"{signal.SIGBUS:#x}"):
        in_child(far)
    assert get(place / "f") == b"x" * 4096


def test_mapping_outlives_unlink_and_replacement(place):
    data = blob(7, SIZE)
    put(place / "f", data)
    with mapped(place / "f", mmap.MAP_SHARED) as m:
        put(place / "g", b"other")
        os.rename(place / "g", place / "f")
        os.unlink(place / "f")
        assert m[:] == data


def test_p4_mapping_keeps_the_old_version(kv, agent):
    old, new = blob(8, SIZE), blob(9, SIZE)
    put(kv.dir / "f", old)
    reader = agent()
    maps = []
    for flags in (mmap.MAP_SHARED, mmap.MAP_PRIVATE):
        fd = reader.open(kv.dir / "f")
        maps.append(reader.map(fd, SIZE, flags))
        reader.close(fd)
    assert reader.map_read(maps[0], 0, 4096) == old[:4096]  # the rest is not faulted in yet
    put(kv.dir / "f", new)
    assert get(kv.dir / "f") == new
    for m in maps:
        assert reader.map_read(m, 0, SIZE) == old
    os.unlink(kv.dir / "f")
    for m in maps:
        assert reader.map_read(m, SIZE - 5000, 5000) == old[-5000:]


def test_p4_late_writes_of_a_mapping_reach_no_reader_of_the_published_version(kv, agent):
    """A published version is immutable: a mapping that writes on makes another version."""
    first = blob(10, SIZE)
    writer = agent()
    fd = writer.open(kv.dir / "f", os.O_CREAT | os.O_RDWR)
    writer.ftruncate(fd, SIZE)
    m = writer.map(fd, SIZE, mmap.MAP_SHARED, WRITE)
    writer.map_write(m, 0, first)
    writer.close(fd)
    assert get(kv.dir / "f") == first
    with mapped(kv.dir / "f", mmap.MAP_SHARED) as seen:
        assert seen[:4096] == first[:4096]
        writer.map_write(m, 0, b"late" * 1024)
        writer.msync(m)
        assert seen[:] == first
    writer.unmap(m)
    eventually(lambda: get(kv.dir / "f") == b"late" * 1024 + first[4096:],
               what="the late bytes' version")


def test_many_mappings_at_once(kv):
    count = 200
    for i in range(count):
        put(kv.dir / f"{i}", blob(i, 10_000))
    maps = [mapped(kv.dir / f"{i}", mmap.MAP_SHARED, length=10_000) for i in range(count)]
    for i in range(count):
        os.unlink(kv.dir / f"{i}")
    for i, m in enumerate(maps):
        assert m[:] == blob(i, 10_000)
        m.close()
