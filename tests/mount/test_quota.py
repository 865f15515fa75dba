# SPDX-License-Identifier: Apache-2.0
"""Quotas of directories: what fits, who goes, what is refused, what users are shown (K1, K2)."""
import errno
import json
import os

import pytest
from data import MIB, blob, copy, get, put, put_synced, replace, sync
from procs import NOBODY, eventually, in_child, parallel

QUOTA = 16 * MIB


def usage(kv, path):
    return json.loads(kv.kvfs("quota", path, "--json").stdout)


def fill(directory, count, size=MIB, first=0):
    """Files that others can tell apart; returns their numbers."""
    for i in range(first, first + count):
        put(directory / f"f{i}", blob(i, size))
    return range(first, first + count)


def present(directory):
    return sorted(int(name[1:]) for name in os.listdir(directory) if name.startswith("f"))


@pytest.fixture
def small(fresh):
    """A mount with a directory that has a quota; leases are too short to matter."""
    kv = fresh(size="256M", dram="128M", lease="0s")
    kv.dir = kv.mnt / "tenant"
    kv.dir.mkdir()
    kv.kvfs("quota", kv.dir, "16M")
    return kv


# ---- eviction within the quota ----


def test_k1_a_full_directory_evicts_its_own_oldest(small):
    """Three times the quota goes in; the newest stay, whole; nothing outside goes."""
    outside = small.mnt / "outside"
    outside.mkdir()
    fill(outside, 20)
    fill(small.dir, 30)
    small.settle()  # what is not durable yet is passed over
    fill(small.dir, 18, first=30)
    left = present(small.dir)
    assert 8 <= len(left) <= 16 and min(left) >= 30
    for i in left:
        assert get(small.dir / f"f{i}") == blob(i, MIB)
    assert present(outside) == list(range(20))
    assert usage(small, small.dir)["used"] <= QUOTA


def test_k1_by_several_processes(small):
    """Four processes write three times the quota at once: no error, never above the limit."""
    def write(who):
        for i in range(24):
            replace(small.dir / f"w{who}-{i}", blob(who * 100 + i, MIB // 2))
            used = usage(small, small.dir)
            assert used["used"] + used["promised"] <= QUOTA

    parallel(write, range(4))
    names = os.listdir(small.dir)
    assert 16 <= len(names) <= 32
    for name in names:
        who, i = map(int, name[1:].split("-"))
        assert get(small.dir / name) == blob(who * 100 + i, MIB // 2)


def test_k1_a_use_keeps_a_file(small):
    fill(small.dir, 10)
    small.settle()  # what is not durable yet is passed over
    assert get(small.dir / "f0") == blob(0, MIB)
    fill(small.dir, 8, first=10)
    left = present(small.dir)
    assert 0 in left and 1 not in left


def test_k1_open_files_are_kept_and_edquot_is_the_last_resort(small):
    """While all are open nothing can go; the write fails whole, and works when one is closed."""
    fill(small.dir, 14)
    held = [os.open(small.dir / f"f{i}", os.O_RDONLY) for i in range(14)]
    with pytest.raises(OSError) as e:
        put(small.dir / "new", blob(99, 4 * MIB))
    assert e.value.errno == errno.EDQUOT
    assert present(small.dir) == list(range(14))
    for fd in held[:4]:
        os.close(fd)
    put(small.dir / "new", blob(99, 4 * MIB))
    assert get(small.dir / "new") == blob(99, 4 * MIB)
    assert set(range(4, 14)) <= set(present(small.dir))
    for fd in held[4:]:
        os.close(fd)


def test_a_file_larger_than_the_quota_is_not_kept(small):
    """EDQUOT, and no half of it; an older version stays."""
    fill(small.dir, 3)
    with pytest.raises(OSError) as e:
        put(small.dir / "huge", blob(1, QUOTA + MIB))
    assert e.value.errno == errno.EDQUOT
    eventually(lambda: not (small.dir / "huge").exists(), what="the half file to vanish")
    with pytest.raises(OSError) as e:
        put(small.dir / "f0", blob(1, QUOTA + MIB))
    assert e.value.errno == errno.EDQUOT
    eventually(lambda: usage(small, small.dir)["promised"] == 0, what="promises to be given back")
    if 0 in present(small.dir):
        assert get(small.dir / "f0") == blob(0, MIB)
    put(small.dir / "fits", blob(2, 8 * MIB))
    assert get(small.dir / "fits") == blob(2, 8 * MIB)
    assert usage(small, small.dir)["used"] <= QUOTA


def test_who_cuts_what_did_not_fit_may_go_on(small):
    fd = os.open(small.dir / "pool", os.O_CREAT | os.O_RDWR)
    with pytest.raises(OSError) as e:
        for i in range(20):
            assert os.pwrite(fd, blob(i, MIB), i * MIB) == MIB
    assert e.value.errno == errno.EDQUOT
    os.ftruncate(fd, 4 * MIB)
    os.close(fd)
    assert get(small.dir / "pool") == b"".join(blob(i, MIB) for i in range(4))


def test_a_rewrite_in_place_needs_no_room(small):
    """Three quarters of the quota, rewritten, by the same and by another name."""
    path = small.dir / "large"
    put_synced(path, blob(1, 12 * MIB))
    for seed in (2, 3):
        put_synced(path, blob(seed, 12 * MIB))
        assert get(path) == blob(seed, 12 * MIB)
    fd = os.open(path, os.O_RDWR)
    for i in range(12):
        assert os.pwrite(fd, blob(50 + i, MIB), i * MIB) == MIB
    os.close(fd)
    sync(path)
    assert get(path) == b"".join(blob(50 + i, MIB) for i in range(12))
    assert usage(small, small.dir)["used"] == 12 * MIB


def test_copies_count(small):
    """copy_file_range shares blocks, but each file counts them, as du does."""
    put_synced(small.dir / "a", blob(1, 10 * MIB))
    put_synced(small.mnt / "b", blob(2, 10 * MIB))
    copy(small.mnt / "b", small.dir / "b", 10 * MIB)
    assert get(small.dir / "b") == blob(2, 10 * MIB)
    sync(small.dir / "b")
    eventually(lambda: not (small.dir / "a").exists(), what="the eviction")
    assert usage(small, small.dir)["used"] == 10 * MIB
    put_synced(small.mnt / "c", blob(3, 17 * MIB))
    with pytest.raises(OSError) as e:
        copy(small.mnt / "c", small.dir / "c", 17 * MIB)
    assert e.value.errno == errno.EDQUOT


def test_sparse_files_count_what_they_hold(small):
    fd = os.open(small.dir / "sparse", os.O_CREAT | os.O_WRONLY)
    os.ftruncate(fd, 1 << 40)
    os.pwrite(fd, blob(1, MIB), 1 << 39)
    os.close(fd)
    sync(small.dir / "sparse")
    assert usage(small, small.dir)["used"] == MIB
    fd = os.open(small.dir / "pool", os.O_CREAT | os.O_RDWR)
    with pytest.raises(OSError) as e:
        os.posix_fallocate(fd, 0, QUOTA + MIB)
    assert e.value.errno == errno.EDQUOT
    os.ftruncate(fd, 0)
    os.close(fd)


# ---- where a file counts ----


def test_renames_move_what_they_hold(small):
    other = small.mnt / "other"
    other.mkdir()
    small.kvfs("quota", other, "8M")
    put_synced(small.dir / "a", blob(1, 5 * MIB))
    os.rename(small.dir / "a", other / "a")
    assert usage(small, small.dir)["used"] == 0
    assert usage(small, other)["used"] == 5 * MIB
    put_synced(small.dir / "b", blob(2, 5 * MIB))
    os.rename(small.dir / "b", other / "b")
    eventually(lambda: usage(small, other)["used"] <= 8 * MIB, what="the older one to go")
    assert os.listdir(other) == ["b"]
    put_synced(small.dir / "c", blob(3, 9 * MIB))
    with pytest.raises(OSError) as e:
        os.rename(small.dir / "c", other / "c")
    assert e.value.errno == errno.EDQUOT
    assert get(small.dir / "c") == blob(3, 9 * MIB)


def test_a_directory_is_copied_into_another_quota(small):
    """rename answers EXDEV, as XFS does between projects, and mv copies."""
    source = small.mnt / "model"
    (source / "sub").mkdir(parents=True)
    put_synced(source / "sub" / "x", blob(1, 3 * MIB))
    with pytest.raises(OSError) as e:
        os.rename(source, small.dir / "model")
    assert e.value.errno == errno.EXDEV
    os.system(f"mv {source} {small.dir}/")
    assert not source.exists()
    assert get(small.dir / "model/sub/x") == blob(1, 3 * MIB)
    sync(small.dir / "model/sub/x")
    assert usage(small, small.dir)["used"] == 3 * MIB
    os.rename(small.dir, small.mnt / "renamed")  # it takes its quota along
    assert usage(small, small.mnt / "renamed")["own"] is True


def test_set_on_what_is_there(small):
    """What is below joins, nested quotas keep their own, and taking it away undoes it."""
    top = small.mnt / "top"
    (top / "a" / "b").mkdir(parents=True)
    (top / "nested").mkdir()
    small.kvfs("quota", top / "nested", "8M")
    for i in range(60):
        put(top / "a" / f"f{i}", blob(i, 4096))
        put(top / "a/b" / f"f{i}", blob(i, 4096))
    put(top / "nested" / "x", blob(1, MIB))
    sync(top / "nested" / "x")
    small.settle()
    small.kvfs("quota", top, "32M")
    assert usage(small, top)["used"] == 120 * 4096
    assert usage(small, top)["inodes"] == 123
    assert usage(small, top / "a/b/f1")["own"] is False
    assert usage(small, top / "nested")["used"] == MIB
    small.remount()
    assert usage(small, top)["used"] == 120 * 4096
    small.kvfs("quota", top, "none")
    assert usage(small, top)["directory_ino"] == 1
    assert usage(small, top / "nested")["limit"] == 8 * MIB


def test_a_lower_quota_evicts(small):
    fill(small.dir, 12)
    small.settle()
    small.kvfs("quota", small.dir, "4M")
    eventually(lambda: usage(small, small.dir)["used"] <= 4 * MIB, what="eviction")
    left = present(small.dir)
    assert left == list(range(12))[-len(left):] and left


def test_a_crash_keeps_it(small):
    fill(small.dir, 5)
    small.settle()
    small.kill()
    small.mount()
    assert usage(small, small.dir)["limit"] == QUOTA
    assert usage(small, small.dir)["used"] == 5 * MIB
    fill(small.dir, 20, first=5)
    assert usage(small, small.dir)["used"] <= QUOTA
    assert 24 in present(small.dir)


# ---- what users see and may ----


def test_statvfs_shows_the_quota(small):
    fill(small.dir, 4)
    small.settle()
    info = os.statvfs(small.dir / "f1")
    assert info.f_blocks * info.f_frsize == QUOTA
    assert info.f_bavail * info.f_frsize == QUOTA - 4 * MIB
    assert os.statvfs(small.mnt).f_blocks * info.f_frsize == small.status()["store_total"]
    small.kvfs("quota", small.dir, "1T")  # more than there is
    assert os.statvfs(small.dir).f_blocks == os.statvfs(small.mnt).f_blocks


def test_by_attribute(small):
    path = small.mnt / "by-attribute"
    path.mkdir()
    with pytest.raises(OSError) as e:
        os.getxattr(path, "user.kvfs.quota")
    assert e.value.errno == errno.ENODATA
    os.setxattr(path, "user.kvfs.quota", b"2G")
    assert os.getxattr(path, "user.kvfs.quota") == str(2 << 30).encode()
    os.setxattr(path, "user.kvfs.quota", b"none")
    with pytest.raises(OSError) as e:
        os.removexattr(path, "user.kvfs.quota")
    assert e.value.errno == errno.ENODATA
    os.setxattr(path, "user.kvfs.quota", b"3M")
    os.removexattr(path, "user.kvfs.quota")
    for value, error in ((b"8X", errno.EINVAL), (b"", errno.EINVAL), (b"9" * 70, errno.EINVAL),
                         (b"4096", errno.ERANGE)):
        with pytest.raises(OSError) as e:
            os.setxattr(path, "user.kvfs.quota", value)
        assert e.value.errno == error, value
    with pytest.raises(OSError) as e:
        os.setxattr(path, "user.kvfs.quota.usage", b"1")
    assert e.value.errno == errno.EPERM


def test_only_root_sets_it(small):
    os.chown(small.dir, NOBODY, NOBODY)
    for name in ("user.kvfs.quota",):
        with pytest.raises(PermissionError):
            in_child(os.setxattr, small.dir, name, b"64M", uid=NOBODY)
        with pytest.raises(PermissionError):
            in_child(os.removexattr, small.dir, name, uid=NOBODY)
    assert in_child(os.getxattr, small.dir, "user.kvfs.quota", uid=NOBODY) == str(QUOTA).encode()


def refused(done, *words):
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1, done
    for word in words:
        assert str(word) in done.stderr, (word, done.stderr)


def test_the_tools_messages(small, tmp_path):
    def quota(*args):
        return small.kvfs("quota", *args, check=False)

    shown = quota(small.dir)
    assert "limit 16" in shown.stdout and "used 0" in shown.stdout
    (small.dir / "sub").mkdir()
    assert str(small.dir) in quota(small.dir / "sub").stdout.splitlines()[1]
    refused(quota(small.dir, "8X"), "8X", "kvfs quota --help")
    refused(quota(small.dir, "8"), "1M at least")
    refused(quota(small.mnt, "8G"), "max_size")
    refused(quota(small.dir / "sub", "none"), "no quota of its own")
    refused(quota(small.dir / "nothing", "8G"), "No such file")
    put(small.dir / "file", b"x")
    refused(quota(small.dir / "file", "8G"), "not a directory")
    refused(quota(tmp_path), "not on a kvfs mount")
    refused(quota(tmp_path, "8G"), "not on a kvfs mount")
    refused(quota(), "DIR is missing")
    refused(quota("a", "b", "c"), "too many")
    assert not os.listxattr(tmp_path)
