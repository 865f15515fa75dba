# SPDX-License-Identifier: Apache-2.0
"""P1, P2: content that lacks bytes because a write failed is not published: close says why."""
import errno
import mmap
import os

import pytest
from data import MIB, blob, check_big, get, put, write_big
from procs import run
from syscalls import fails

OLD = blob(1, 100_000)
STORE = 64  # MiB


@pytest.fixture
def small(fresh):
    return fresh(size=f"{STORE}M", dram="256M")


def write_until_full(fd):
    """Writes pieces of 1 MiB until one fails; where that was."""
    for i in range(2 * STORE):
        try:
            assert os.pwrite(fd, blob(2, MIB, i), i * MIB) == MIB
        except OSError as e:
            assert e.errno == errno.ENOSPC
            return i * MIB
    raise AssertionError("the store never filled up")


def fill(path):
    fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_TRUNC, 0o644)
    write_until_full(fd)
    return fd


def test_failed_write_of_a_new_file(small):
    path = small.mnt / "f"
    fd = fill(path)
    fails(errno.ENOSPC, os.close, fd)
    assert os.listdir(small.mnt) == []
    assert small.counter("unfinished") == 1
    write_big(path, 40 * MIB, 3)
    check_big(path, 40 * MIB, 3)


def test_failed_write_of_a_published_file(small, agent):
    path = small.mnt / "f"
    put(path, OLD)
    fd = fill(path)
    assert agent().read_file(path) == OLD
    fails(errno.ENOSPC, os.close, fd)
    assert get(path) == OLD


def test_fsync_and_rename_say_it_too(small):
    path = small.mnt / "f"
    fd = fill(path)
    fails(errno.ENOSPC, os.fsync, fd)
    fails(errno.ENOSPC, os.rename, path, small.mnt / "g")
    assert os.listdir(small.mnt) == ["f"]
    fails(errno.ENOSPC, os.close, fd)
    assert os.listdir(small.mnt) == []


def test_second_descriptor_cannot_go_on_after_the_last_close(small):
    """A copy of the descriptor is left: what it writes would not follow what was lost."""
    fd = fill(small.mnt / "f")
    copy = os.dup(fd)
    fails(errno.ENOSPC, os.close, fd)
    assert os.listdir(small.mnt) == []
    fails(errno.ENOSPC, os.write, copy, b"x")
    fails(errno.ENOSPC, os.fsync, copy)
    fails(errno.ENOSPC, os.close, copy)


def test_two_opens_keep_it_until_the_last_one_is_closed(small):
    path = small.mnt / "f"
    first = fill(path)
    second = os.open(path, os.O_RDWR)
    fails(errno.ENOSPC, os.close, first)
    assert os.listdir(small.mnt) == ["f"]
    os.ftruncate(second, MIB)
    os.close(second)
    assert get(path) == blob(2, MIB, 0)


def test_written_after_all(small):
    """Room is made, and the write repeated: nothing is missing."""
    put(small.mnt / "other", blob(9, 20 * MIB))
    held = os.open(small.mnt / "other", os.O_RDONLY)  # not to be evicted
    path = small.mnt / "f"
    fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    offset = write_until_full(fd)
    fails(errno.ENOSPC, os.fsync, fd)
    os.close(held)
    os.unlink(small.mnt / "other")
    for i in (offset // MIB, offset // MIB + 1):
        assert os.pwrite(fd, blob(2, MIB, i), i * MIB) == MIB
    os.fsync(fd)
    os.close(fd)
    content = get(path)
    assert len(content) == offset + 2 * MIB
    for i in range(len(content) // MIB):
        assert content[i * MIB:i * MIB + MIB] == blob(2, MIB, i)


def test_cut_off_before_what_is_missing(small):
    path = small.mnt / "f"
    fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    offset = write_until_full(fd)
    os.ftruncate(fd, offset)
    os.close(fd)
    assert os.stat(path).st_size == offset


def test_opened_with_o_trunc_again(small):
    path = small.mnt / "f"
    fd = fill(path)
    again = os.open(path, os.O_WRONLY | os.O_TRUNC)
    os.write(again, OLD)
    os.close(again)
    os.close(fd)
    assert get(path) == OLD


def test_a_wrong_call_spoils_nothing(small):
    path = small.mnt / "f"
    fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    os.write(fd, OLD)
    fails(errno.EFBIG, os.pwrite, fd, b"x", (1 << 62))
    fails(errno.EFBIG, os.ftruncate, fd, 1 << 62)
    fails(errno.ENOSPC, os.posix_fallocate, fd, 0, 4 * STORE * MIB)
    os.fsync(fd)
    os.close(fd)
    assert get(path) == OLD


def test_pages_of_a_mapping(small):
    path = small.mnt / "f"
    put(path, OLD)
    fd = os.open(path, os.O_RDWR)
    os.ftruncate(fd, 2 * STORE * MIB)
    mapping = mmap.mmap(fd, 2 * STORE * MIB)
    for i in range(2 * STORE):
        mapping[i * MIB:(i + 1) * MIB] = blob(2, MIB, i)
    with pytest.raises(OSError):
        mapping.flush()
    with pytest.raises(OSError):
        os.close(fd)
    mapping.close()
    assert get(path) == OLD


def test_cp_leaves_nothing(small, elsewhere):
    write_big(elsewhere / "big", 2 * STORE * MIB, 4)
    done = run("cp", elsewhere / "big", small.mnt / "f", check=False)
    assert done.returncode != 0
    assert "No space left" in done.stderr
    assert os.listdir(small.mnt) == []
