# SPDX-License-Identifier: Apache-2.0
"""kvfs scrub: damage on the devices is found before it is read, and nothing else changes by the looking."""
import errno
import fcntl
import os
import signal
import struct
import subprocess
import time

import ioctls
import pytest
from data import MIB, blob, get, put, sync
from procs import NOBODY, as_nobody, eventually
from syscalls import fails
from test_checksums import flip

SIZE = 3 * MIB + 100
FILES = 6
CLEAN, DAMAGED, FAILED, USAGE = 0, 4, 8, 16
SCRUB = ioctls.command(5, 1080)


@pytest.fixture
def full(fresh):
    """A mount with files that are on the device and, of f0, in DRAM; and where their bytes are."""
    kv = fresh(size="64M", lease="1s")
    kv.expect_errors("checksum|quarantine")
    (kv.mnt / "d").mkdir()
    for i in range(FILES):
        put(kv.mnt / f"d/f{i}", blob(i, SIZE))
        sync(kv.mnt / f"d/f{i}")
    extents = [kv.extents(kv.mnt / f"d/f{i}") for i in range(FILES)]
    kv.remount()
    assert get(kv.mnt / "d/f0") == blob(0, SIZE)
    return kv, extents


def scrub(kv, *args, status=CLEAN):
    done = kv.kvfs("scrub", *args, check=False)
    assert done.returncode == status, done
    return done.stdout


def test_sound(full):
    kv, _ = full
    before = {i: kv.stat(kv.mnt / f"d/f{i}") for i in range(FILES)}
    text = scrub(kv, kv.mnt, "--rate", "0")
    assert "6 files read, 0 files damaged" in text
    # It was read, all of it, from the device, also what is in DRAM; and nothing came into DRAM or was used.
    assert kv.counter("scrub_bytes") == FILES * SIZE
    after = {i: kv.stat(kv.mnt / f"d/f{i}") for i in range(FILES)}
    for i in range(FILES):
        for key in ("tier", "hits", "last_use_ns", "version"):
            assert before[i].get(key) == after[i].get(key), key
    assert kv.tier(kv.mnt / "d/f0") == "dram+nvme" and kv.tier(kv.mnt / "d/f1") == "nvme"
    assert scrub(kv, kv.mnt / "d", "--quiet", "--rate", "0") == ""


def test_a_name_gives_no_commands_to_the_terminal(full):
    kv, extents = full
    os.rename(kv.mnt / "d/f3", kv.mnt / "d/\x1b[2J")
    flip(kv, extents[3], 7)
    text = scrub(kv, kv.mnt, "--rate", "0", status=DAMAGED)
    assert f"damaged, quarantined: {kv.mnt}/d/\\x1b[2J\n" in text


@pytest.mark.parametrize("which", (0, 3))
def test_damage_is_found_and_quarantined(full, which):
    """One that is only on the device, and one that DRAM hides."""
    kv, extents = full
    flip(kv, extents[which], 2 * MIB + 7)
    text = scrub(kv, kv.mnt, "--rate", "0", status=DAMAGED)
    assert f"damaged, quarantined: {kv.mnt}/d/f{which}" in text and "1 files damaged" in text
    assert kv.counter("quarantined") == 1 and kv.counter("scrub_damaged") == 1
    fails(errno.ENOENT, os.stat, kv.mnt / f"d/f{which}")
    for i in range(FILES):
        if i != which:
            assert get(kv.mnt / f"d/f{i}") == blob(i, SIZE)
    scrub(kv, kv.mnt, "--rate", "0")
    put(kv.mnt / f"d/f{which}", b"again")
    assert get(kv.mnt / f"d/f{which}") == b"again"


def test_rate_and_interrupt(full):
    """A slow scrub shows how far it is, and can be ended."""
    kv, _ = full
    process = subprocess.Popen([kv.programs["kvfs"], "scrub", kv.mnt, "--rate", "32K"],
                               stdout=subprocess.PIPE, text=True)
    eventually(lambda: kv.counter("scrub_bytes") > 0, what="the first bytes")
    time.sleep(0.3)
    # A file of three chunks takes a minute and a half at that rate: it cannot have come far.
    assert kv.counter("scrub_bytes") <= 2 * SIZE
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == FAILED
    assert "interrupted" in out.splitlines()[-1]


def test_refusals(full):
    kv, _ = full
    for args in (("--rate", "x"), ("--bad",), (kv.mnt, kv.mnt)):
        done = kv.kvfs("scrub", *args, check=False)
        assert done.returncode == USAGE and "--help" in done.stderr
    done = kv.kvfs("scrub", kv.home, check=False)
    assert done.returncode == FAILED and "not on a kvfs mount" in done.stderr


def test_whose_files(full):
    """Others than root can scrub their own files alone."""
    kv, _ = full
    os.chown(kv.mnt / "d/f1", NOBODY, NOBODY)

    def attempt(name):
        with ioctls.opened(kv.mnt / "d") as fd:
            piece(fd, name)

    as_nobody(attempt, "f1")
    fails(errno.EPERM, as_nobody, attempt, "f2")


def piece(fd, name, offset=0, flags=0, reserved=0):
    """(size, done, checked, unreadable, damaged)"""
    buffer = bytearray(struct.pack("<QII5Q1024s", offset, flags, reserved, 0, 0, 0, 0, 0, os.fsencode(name)))
    fcntl.ioctl(fd, SCRUB, buffer)
    return struct.unpack_from("<5Q", buffer, 16)


def test_ioctl(full):
    kv, _ = full
    put(kv.mnt / "d/big", blob(50, 10 * MIB))
    sync(kv.mnt / "d/big")
    with open(kv.mnt / "d/hole", "wb") as f:
        f.truncate(3 * MIB)
        f.seek(5 * MIB)
        f.write(b"x" * 4096)
    sync(kv.mnt / "d/hole")
    with ioctls.opened(kv.mnt / "d") as fd:
        assert piece(fd, "big") == (10 * MIB, 8 * MIB, 8 * MIB, 0, 0)
        assert piece(fd, "big", 8 * MIB) == (10 * MIB, 2 * MIB, 2 * MIB, 0, 0)
        assert piece(fd, "big", 10 * MIB) == (10 * MIB, 0, 0, 0, 0)
        assert piece(fd, "big", flags=1) == (10 * MIB, 0, 0, 0, 0)
        assert piece(fd, "hole") == (5 * MIB + 4096, 5 * MIB + 4096, 4096, 0, 0)
        fails(errno.EINVAL, piece, fd, "big", 4096)
        fails(errno.EINVAL, piece, fd, "big", 0, 2)
        fails(errno.EINVAL, piece, fd, "big", 0, 0, 1)
        fails(errno.ENOENT, piece, fd, "none")
    with ioctls.opened(kv.mnt) as fd:
        fails(errno.EISDIR, piece, fd, "d")
    with ioctls.opened(kv.mnt / "d/big") as fd:
        fails(errno.ENOTDIR, piece, fd, "big")


def test_being_written(full):
    """What is not published is left alone; a rewrite does not keep the published version from being read."""
    kv, _ = full
    fd = os.open(kv.mnt / "d/new", os.O_CREAT | os.O_WRONLY)
    os.write(fd, b"y" * MIB)
    again = os.open(kv.mnt / "d/f2", os.O_RDWR)
    os.pwrite(again, b"z" * 5000, MIB - 100)
    text = scrub(kv, kv.mnt, "--rate", "0")
    assert "0 files damaged" in text
    os.close(fd)
    os.close(again)
    assert get(kv.mnt / "d/new") == b"y" * MIB
    scrub(kv, kv.mnt, "--rate", "0")
