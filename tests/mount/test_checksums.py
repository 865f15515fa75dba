# SPDX-License-Identifier: Apache-2.0
"""R1: bytes that changed on the device are a miss, never wrong data."""
import errno
import mmap
import os

import pytest
from data import MIB, blob, copy, get, put, sync
from procs import eventually
from syscalls import fails

SIZE = 3 * MIB + 100
FILES = 6


def flip(kv, extents, where):
    """Changes one byte, WHERE bytes into the file, behind the daemon's back."""
    for offset, device, place, length in extents:
        if offset <= where < offset + length:
            with open(kv.device_path(device), "r+b", buffering=0) as f:
                f.seek(place + where - offset)
                old = f.read(1)
                f.seek(place + where - offset)
                f.write(bytes([old[0] ^ 0x40]))
                os.fsync(f.fileno())
            return
    raise AssertionError(f"byte {where} is in no extent of {extents}")


def fill(kv):
    for i in range(FILES):
        put(kv.mnt / f"f{i}", blob(i, SIZE))
        sync(kv.mnt / f"f{i}")
    return [kv.extents(kv.mnt / f"f{i}") for i in range(FILES)]


def attempt(path, data):
    """Reads PATH: True if it was DATA, False if it was refused as R1 allows; wrong bytes fail."""
    try:
        got = get(path)
    except OSError as e:
        assert e.errno in (errno.ENOENT, errno.EIO), e
        return False
    assert got == data, "wrong bytes reached a reader"
    return True


@pytest.mark.parametrize("where", (0, 4095, MIB + 12_345, SIZE - 1))
def test_r1_a_flipped_byte_is_a_miss(fresh, where):
    kv = fresh()
    kv.expect_errors("checksum|quarantine")
    extents = fill(kv)
    kv.umount()
    flip(kv, extents[2], where)
    kv.mount()
    fails(errno.ENOENT, get, kv.mnt / "f2")
    assert kv.counter("checksum_errors") >= 1
    assert kv.counter("quarantined") == 1
    # The kernel is told by a message of its own.
    eventually(lambda: not os.path.exists(kv.mnt / "f2"), what="the quarantine")
    for i in range(FILES):
        if i != 2:
            assert get(kv.mnt / f"f{i}") == blob(i, SIZE)
    put(kv.mnt / "f2", b"stored again")
    assert get(kv.mnt / "f2") == b"stored again"
    kv.remount()
    assert get(kv.mnt / "f2") == b"stored again"
    assert get(kv.mnt / "f3") == blob(3, SIZE)


@pytest.mark.parametrize("flags", (os.O_RDONLY, os.O_RDONLY | os.O_DIRECT, os.O_RDWR))
def test_r1_every_way_to_read_is_checked(fresh, flags):
    kv = fresh(stream_above="1M")
    kv.expect_errors("checksum|quarantine")
    extents = fill(kv)
    kv.umount()
    flip(kv, extents[0], MIB + 5)
    kv.mount()

    def read():
        fd = os.open(kv.mnt / "f0", flags)
        try:
            data = b""
            while piece := os.pread(fd, MIB, len(data)):
                data += piece
            return data
        finally:
            os.close(fd)

    with pytest.raises(OSError) as e:
        read()
    assert e.value.errno in (errno.ENOENT, errno.EIO)
    assert kv.counter("checksum_errors") >= 1
    eventually(lambda: not os.path.exists(kv.mnt / "f0"), what="the quarantine")
    assert get(kv.mnt / "f1") == blob(1, SIZE)


def test_r1_flipped_while_mounted_and_out_of_dram(fresh):
    kv = fresh(size="1G", dram="64M")
    kv.expect_errors("checksum|quarantine")
    extents = fill(kv)
    for i in range(12):  # pushes the first files out of DRAM
        put(kv.mnt / f"other{i}", blob(100 + i, 8 * MIB))
        sync(kv.mnt / f"other{i}")
    eventually(lambda: kv.tier(kv.mnt / "f1") == "nvme", what="f1's eviction from DRAM")
    flip(kv, extents[1], 2 * MIB)
    fails(errno.ENOENT, get, kv.mnt / "f1")
    assert kv.counter("checksum_errors") >= 1
    assert get(kv.mnt / "f0") == blob(0, SIZE)


def test_r1_a_byte_flipped_under_a_hot_file_is_not_seen(fresh):
    kv = fresh()
    extents = fill(kv)
    flip(kv, extents[1], 77)
    assert get(kv.mnt / "f1") == blob(1, SIZE), "DRAM has the right bytes"


def test_r1_mapping_of_a_damaged_file(fresh):
    kv = fresh()
    kv.expect_errors("checksum|quarantine")
    extents = fill(kv)
    kv.umount()
    flip(kv, extents[4], SIZE - 5)
    kv.mount()
    with pytest.raises(OSError) as e:
        fd = os.open(kv.mnt / "f4", os.O_RDONLY)
        with mmap.mmap(fd, SIZE, prot=mmap.PROT_READ) as m:
            assert m[:] != m[:], "a mapping of a damaged file must not be had"
    assert e.value.errno == errno.ENOENT


def test_r1_rewriting_a_part_does_not_launder_damage(fresh):
    """A new version that keeps a damaged chunk must not give it a fresh, valid checksum."""
    kv = fresh()
    kv.expect_errors("checksum|quarantine|write-back|writeback")
    extents = fill(kv)
    kv.umount()
    flip(kv, extents[0], MIB + 1000)
    kv.mount()
    expected = bytearray(blob(0, SIZE))
    expected[MIB:MIB + 10] = b"0123456789"
    fd = os.open(kv.mnt / "f0", os.O_RDWR)
    for step in (lambda: os.pwrite(fd, b"0123456789", MIB), lambda: os.close(fd)):
        try:
            step()
        except OSError as e:
            assert e.errno in (errno.ENOENT, errno.EIO)
    attempt(kv.mnt / "f0", expected)
    kv.remount()
    attempt(kv.mnt / "f0", expected)


def test_r1_damage_in_a_shared_extent_hits_all_its_files(fresh):
    kv = fresh()
    kv.expect_errors("checksum|quarantine")
    extents = fill(kv)
    copy(kv.mnt / "f0", kv.mnt / "g", SIZE)
    sync(kv.mnt / "g")
    kv.umount()
    flip(kv, extents[0], 5)
    kv.mount()
    for name in ("f0", "g"):
        fails(errno.ENOENT, get, kv.mnt / name)
    for i in range(1, FILES):
        assert get(kv.mnt / f"f{i}") == blob(i, SIZE)


def test_r1_every_block_of_the_device_damaged_in_turn(fresh):
    """Flips a byte in every 61st block of the data area; no flip may ever show."""
    kv = fresh(size="64M")
    kv.expect_errors(".")
    fill(kv)
    kv.umount()
    size = os.path.getsize(kv.device_path(0))
    with open(kv.device_path(0), "r+b", buffering=0) as f:
        for place in range(MIB, min(size, 24 * MIB), 61 * 4096):
            f.seek(place + place // 4096 % 4096)
            old = f.read(1)
            f.seek(-1, os.SEEK_CUR)
            f.write(bytes([old[0] ^ 0xff]))
    kv.mount()
    right = [attempt(kv.mnt / f"f{i}", blob(i, SIZE)) for i in range(FILES)]
    assert not all(right), "no flip hit a file: the test proves nothing"
