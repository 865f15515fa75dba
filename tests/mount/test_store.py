# SPDX-License-Identifier: Apache-2.0
"""K1, K3: the store that never fills up, quotas, honest figures, full devices, shared extents."""
import contextlib
import errno
import os

import pytest
from data import GIB, MIB, blob, check_big, copy, get, put, sync, write_big
from procs import eventually, parallel, run
from syscalls import fails


def used(path):
    info = os.statvfs(path)
    assert 0 <= info.f_bavail <= info.f_bfree <= info.f_blocks
    return (info.f_blocks - info.f_bfree) * info.f_frsize


def names_used(path):
    return os.statvfs(path).f_files - os.statvfs(path).f_ffree


def total(path):
    return os.statvfs(path).f_blocks * os.statvfs(path).f_frsize


def write_whole(fd, data):
    """
    All of DATA, or ENOSPC.

    The kernel cuts a large write into requests and ends it short where one is refused; the next
    one must say why.
    """
    done = 0
    while done < len(data):
        done += os.write(fd, data[done:])


def stress(kv, size, bytes_in_all):
    """Writes files one after the other, far more than fits; the store must never refuse."""
    count = bytes_in_all // size
    for i in range(count):
        put(kv.mnt / f"f{i:04}", blob(i, size))
        if i % 8 == 0:
            assert used(kv.mnt) <= total(kv.mnt)
    return count


def test_k1_three_times_the_stores_size_without_an_error(fresh):
    kv = fresh(size="512M", dram="128M")
    size = 8 * MIB
    capacity = total(kv.mnt)
    assert 400 * MIB < capacity <= 512 * MIB
    count = stress(kv, size, 3 * 512 * MIB)
    kv.settle_eviction()
    left = sorted(os.listdir(kv.mnt))
    assert left, "everything was evicted"
    assert left[-1] == f"f{count - 1:04}"
    assert len(left) * size >= capacity // 2, f"only {len(left)} files are left of {capacity} bytes"
    recent = [f"f{i:04}" for i in range(count - 10, count)]
    assert set(recent) <= set(left), "the most recent files were evicted"
    for name in left:
        assert get(kv.mnt / name) == blob(int(name[1:]), size)
    assert kv.counter("evicted_store") >= count - len(left) > 0
    assert kv.counter("evicted_store_bytes") > 0
    kv.remount()
    kv.settle_eviction()
    assert len(os.listdir(kv.mnt)) > 0
    for name in os.listdir(kv.mnt):
        assert get(kv.mnt / name) == blob(int(name[1:]), size)


def test_k1_several_writers_fill_the_store_at_once(fresh):
    kv = fresh(size="256M", dram="64M")

    def write(number):
        for i in range(50):
            put(kv.mnt / f"{number}-{i}", blob(number * 1000 + i, 3 * MIB))

    parallel(write, range(4), timeout=180)
    kv.settle_eviction()
    names = os.listdir(kv.mnt)
    assert names
    for name in names:
        number, i = map(int, name.split("-"))
        assert get(kv.mnt / name) == blob(number * 1000 + i, 3 * MIB)


def test_k1_what_is_used_is_kept(fresh):
    """Least recently used goes first: a file read again and again stays."""
    kv = fresh(size="256M", dram="64M")
    put(kv.mnt / "loved", blob(1, 4 * MIB))
    for i in range(150):
        put(kv.mnt / f"f{i}", blob(i, 4 * MIB))
        if i % 5 == 0:
            assert get(kv.mnt / "loved") == blob(1, 4 * MIB)
    assert get(kv.mnt / "loved") == blob(1, 4 * MIB)
    assert not os.path.exists(kv.mnt / "f0")


def test_k1_max_size_is_a_quota(fresh):
    kv = fresh(size="1G", dram="64M", max_size="200M")
    assert total(kv.mnt) <= 200 * MIB
    for i in range(100):
        put(kv.mnt / f"f{i:03}", blob(i, 4 * MIB))
        assert used(kv.mnt) <= total(kv.mnt)
        assert kv.status()["store_used"] <= 200 * MIB if i % 20 == 0 else True
    kv.settle_eviction()
    names = os.listdir(kv.mnt)
    assert 20 <= len(names) <= 50
    for name in names:
        assert get(kv.mnt / name) == blob(int(name[1:]), 4 * MIB)
    kv.remount(max_size=False)
    assert total(kv.mnt) > 900 * MIB


def test_k1_full_of_open_files_is_a_clean_enospc(fresh):
    """Open files are not evictable: the write that does not fit fails whole, the mount lives on."""
    kv = fresh(size="64M", dram="64M")
    fds, refused = [], None
    for i in range(30):
        fd = os.open(kv.mnt / f"f{i}", os.O_CREAT | os.O_RDWR, 0o644)
        fds.append(fd)
        try:
            write_whole(fd, blob(i, 4 * MIB))
            os.fsync(fd)
        except OSError as e:
            refused = e
            break
    assert refused is not None and refused.errno == errno.ENOSPC
    for i, fd in enumerate(fds[:-1]):
        assert os.pread(fd, 4 * MIB + 1, 0) == blob(i, 4 * MIB)
    for fd in fds:
        try:
            os.close(fd)
        except OSError as e:
            assert e.errno == errno.ENOSPC
    put(kv.mnt / "new", blob(99, 4 * MIB))
    assert get(kv.mnt / "new") == blob(99, 4 * MIB)


def test_file_larger_than_the_store_is_a_clean_enospc(fresh):
    kv = fresh(size="64M", dram="32M")
    put(kv.mnt / "small", b"x" * 1000)
    fd = os.open(kv.mnt / "f", os.O_CREAT | os.O_WRONLY, 0o644)
    fails(errno.ENOSPC, write_whole, fd, blob(1, 200 * MIB))
    with contextlib.suppress(OSError):
        os.close(fd)
    fd = os.open(kv.mnt / "g", os.O_CREAT | os.O_WRONLY, 0o644)
    fails(errno.ENOSPC, os.posix_fallocate, fd, 0, GIB)
    os.close(fd)
    put(kv.mnt / "after", blob(2, MIB))
    assert get(kv.mnt / "after") == blob(2, MIB)


def test_space_comes_back_when_files_go(fresh):
    kv = fresh(size="512M")
    empty = used(kv.mnt)
    for i in range(20):
        put(kv.mnt / f"f{i}", blob(i, 8 * MIB))
    for i in range(20):
        sync(kv.mnt / f"f{i}")
    assert used(kv.mnt) >= empty + 160 * MIB
    for i in range(20):
        os.truncate(kv.mnt / f"f{i}", MIB)
        sync(kv.mnt / f"f{i}")
    eventually(lambda: used(kv.mnt) <= empty + 30 * MIB, what="truncated space")
    run("rm", "-r", *(kv.mnt / f"f{i}" for i in range(20)))
    eventually(lambda: used(kv.mnt) <= empty + 2 * MIB, what="removed space")


def test_rewriting_does_not_leak_space(fresh):
    kv = fresh(size="128M", dram="64M")
    empty = used(kv.mnt)
    for i in range(40):
        put(kv.mnt / "f", blob(i, 10 * MIB))
        if i % 4 == 0:
            sync(kv.mnt / "f")
    sync(kv.mnt / "f")
    eventually(lambda: used(kv.mnt) <= empty + 13 * MIB, what="the old versions' space")
    fd = os.open(kv.mnt / "f", os.O_RDWR)
    for i in range(200):
        os.pwrite(fd, bytes([i]) * 100, (i * 7919) % (10 * MIB - 100))
        if i % 10 == 0:
            os.fsync(fd)
    os.close(fd)
    sync(kv.mnt / "f")
    eventually(lambda: used(kv.mnt) <= empty + 13 * MIB, what="the old chunks' space")


def test_k3_rm_of_many_files_touches_no_data(fresh):
    kv = fresh()
    for d in range(10):
        os.mkdir(kv.mnt / f"d{d}")
        for i in range(200):
            put(kv.mnt / f"d{d}" / f"{i}", blob(i, 5000))
    kv.remount()
    run("rm", "-r", *(kv.mnt / f"d{d}" for d in range(10)))
    assert os.listdir(kv.mnt) == []
    assert kv.counter("fill_bytes") == 0
    assert kv.counter("fuse_read") == 0


def test_r4_copy_of_1_gib_shares_its_extents(fresh):
    kv = fresh(size="2G", dram="256M")
    write_big(kv.mnt / "a", GIB, 1)
    sync(kv.mnt / "a")
    before = kv.status()
    copy(kv.mnt / "a", kv.mnt / "b", GIB)
    sync(kv.mnt / "b")
    after = kv.status()
    assert after["store_used"] <= before["store_used"] + 8 * MIB
    assert after["counters"]["fill_bytes"] <= before["counters"]["fill_bytes"] + 8 * MIB
    assert kv.extents(kv.mnt / "b") == kv.extents(kv.mnt / "a")
    check_big(kv.mnt / "b", GIB, 1)
    assert os.stat(kv.mnt / "b").st_blocks * 512 >= GIB
    fd = os.open(kv.mnt / "b", os.O_RDWR)
    os.pwrite(fd, b"changed", 500 * MIB)
    os.close(fd)
    check_big(kv.mnt / "a", GIB, 1)
    os.unlink(kv.mnt / "a")
    kv.remount()
    fd = os.open(kv.mnt / "b", os.O_RDONLY)
    assert os.pread(fd, 7, 500 * MIB) == b"changed"
    os.close(fd)


def test_r4_many_copies_of_one_file(fresh):
    kv = fresh(size="256M", dram="64M")
    data = blob(1, 20 * MIB + 77)
    put(kv.mnt / "a", data)
    sync(kv.mnt / "a")
    for i in range(50):
        copy(kv.mnt / ("a" if i == 0 else f"c{i - 1}"), kv.mnt / f"c{i}", len(data))
    assert used(kv.mnt) <= 50 * MIB
    os.unlink(kv.mnt / "a")
    put(kv.mnt / "c7", b"other")
    kv.remount()
    for i in range(50):
        assert get(kv.mnt / f"c{i}") == (b"other" if i == 7 else data)
        os.unlink(kv.mnt / f"c{i}")
    eventually(lambda: used(kv.mnt) <= 2 * MIB, what="the last reference's space")


def test_statvfs_tells_the_truth(fresh):
    kv = fresh(size="512M")
    info = os.statvfs(kv.mnt)
    assert (info.f_bsize, info.f_frsize, info.f_namemax) == (4096, 4096, 1023)
    assert 480 * MIB <= total(kv.mnt) <= 512 * MIB
    assert used(kv.mnt) <= 2 * MIB
    put(kv.mnt / "f", blob(1, 50 * MIB))
    sync(kv.mnt / "f")
    assert 50 * MIB <= used(kv.mnt) <= 54 * MIB
    files = names_used(kv.mnt)
    for i in range(100):
        put(kv.mnt / f"{i}", b"")
    assert names_used(kv.mnt) == files + 100


def test_names_take_no_data_space(fresh):
    """Empty files cost index space only."""
    kv = fresh(size="64M")
    before = used(kv.mnt)
    for i in range(2000):
        os.close(os.open(kv.mnt / f"{i}", os.O_CREAT | os.O_WRONLY, 0o644))
    assert used(kv.mnt) <= before + MIB
    assert len(os.listdir(kv.mnt)) == 2000
