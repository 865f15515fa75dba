# SPDX-License-Identifier: Apache-2.0
"""S1 and R4: modes, owners, times, extended attributes."""
import errno
import os
import stat
import time

import pytest
from data import MIB, get, put
from procs import NOBODY, as_nobody, eventually, in_child
from syscalls import UTIME_NOW, UTIME_OMIT, fails, utimensat

OTHER_GROUP = 4321


def mode_of(path):
    return stat.S_IMODE(os.stat(path).st_mode)


# ---- modes and owners ----


@pytest.mark.parametrize("umask,expected", ((0, 0o666), (0o022, 0o644), (0o077, 0o600)))
def test_new_files_obey_the_umask(place, umask, expected):
    def make():
        os.close(os.open(place / "f", os.O_CREAT | os.O_WRONLY, 0o666))
        os.mkdir(place / "d", 0o777)
    in_child(make, umask=umask)
    assert mode_of(place / "f") == expected
    assert mode_of(place / "d") == 0o777 & ~umask


def test_s1_new_files_belong_to_the_caller(place):
    os.chmod(place, 0o777)

    def make():
        put(place / "f", b"x")
        os.mkdir(place / "d")
        os.symlink("f", place / "l")
        os.mknod(place / "n", stat.S_IFREG | 0o600)
    in_child(make, uid=NOBODY, gid=OTHER_GROUP)
    for name in "fdln":
        info = os.lstat(place / name)
        assert (info.st_uid, info.st_gid) == (NOBODY, OTHER_GROUP), name


@pytest.mark.parametrize("mode", (0o000, 0o400, 0o200, 0o600, 0o644, 0o640, 0o666, 0o604))
@pytest.mark.parametrize("owner", ("user", "group", "other"))
def test_s1_access_matrix(place, mode, owner):
    put(place / "f", b"secret")
    os.chown(place / "f", NOBODY if owner == "user" else 0, NOBODY if owner == "group" else 0)
    os.chmod(place / "f", mode)
    bits = mode >> {"user": 6, "group": 3, "other": 0}[owner] & 7

    def attempt(flags):
        try:
            os.close(os.open(place / "f", flags))
            return 0
        except OSError as e:
            return e.errno

    for flags, need in ((os.O_RDONLY, 4), (os.O_WRONLY, 2), (os.O_RDWR, 6),
                        (os.O_WRONLY | os.O_TRUNC, 2)):
        expected = 0 if bits & need == need else errno.EACCES
        assert as_nobody(attempt, flags) == expected, (flags, oct(mode))
    os.chown(place / "f", 0, 0)
    os.chmod(place / "f", 0o600)
    assert as_nobody(attempt, os.O_RDONLY) == errno.EACCES, "a warm entry must not help"
    assert as_nobody(os.access, place / "f", os.R_OK) is False


def test_s1_directory_permissions(place):
    def attempt(func, *args):
        try:
            return func(*args) or 0
        except OSError as e:
            return -e.errno

    os.mkdir(place / "d")
    put(place / "d" / "f", b"x")
    os.chmod(place / "d" / "f", 0o666)
    for mode, listed, read, made in ((0o700, False, False, False), (0o711, False, True, False),
                                     (0o744, True, False, False), (0o755, True, True, False),
                                     (0o777, True, True, True)):
        os.chmod(place / "d", mode)
        assert as_nobody(attempt, os.listdir, place / "d") == (["f"] if listed else -errno.EACCES)
        assert as_nobody(attempt, get, place / "d" / "f") == (b"x" if read else -errno.EACCES)
        for func in (os.unlink, os.mkdir):
            path = place / "d" / ("f" if func is os.unlink else "new")
            if not made:
                assert as_nobody(attempt, func, path) == -errno.EACCES
    as_nobody(os.rename, place / "d" / "f", place / "d" / "g")
    as_nobody(os.unlink, place / "d" / "g")


def test_s1_only_the_owner_changes_attributes(place):
    put(place / "f", b"x")
    os.chmod(place, 0o777)
    os.chmod(place / "f", 0o666)
    as_nobody(fails, errno.EPERM, os.chmod, place / "f", 0o777)
    as_nobody(fails, errno.EPERM, os.chown, place / "f", NOBODY, NOBODY)
    as_nobody(fails, errno.EPERM, os.utime, place / "f", (1, 1))
    as_nobody(os.utime, place / "f")
    os.chown(place / "f", NOBODY, NOBODY)
    as_nobody(os.chmod, place / "f", 0o600)
    as_nobody(fails, errno.EPERM, os.chown, place / "f", 0, -1)
    as_nobody(fails, errno.EPERM, os.chown, place / "f", -1, 0)


def test_sticky_directory(place):
    os.chmod(place, 0o1777)
    put(place / "f", b"x")
    as_nobody(put, place / "mine", b"y")
    as_nobody(fails, errno.EPERM, os.unlink, place / "f")
    as_nobody(fails, errno.EPERM, os.rename, place / "f", place / "g")
    as_nobody(os.unlink, place / "mine")


def test_setgid_directory_hands_its_group_on(place):
    os.chown(place, 0, OTHER_GROUP)
    os.chmod(place, 0o2777)
    as_nobody(put, place / "f", b"x")
    as_nobody(os.mkdir, place / "d")
    assert (os.stat(place / "f").st_uid, os.stat(place / "f").st_gid) == (NOBODY, OTHER_GROUP)
    assert os.stat(place / "d").st_gid == OTHER_GROUP
    assert mode_of(place / "d") & stat.S_ISGID


def test_write_and_chown_clear_setuid(place):
    put(place / "f", b"x")
    os.chown(place / "f", NOBODY, NOBODY)
    os.chmod(place / "f", 0o6777)

    def append():
        with open(place / "f", "ab") as f:
            f.write(b"more")
    in_child(append, uid=1234)
    assert mode_of(place / "f") & 0o6000 == 0
    os.chmod(place / "f", 0o4755)
    as_nobody(os.chown, place / "f", NOBODY, NOBODY)
    assert mode_of(place / "f") & 0o4000 == 0


def test_chown_one_of_the_two(place):
    put(place / "f", b"x")
    os.chown(place / "f", 11, 22)
    os.chown(place / "f", -1, 33)
    os.chown(place / "f", 44, -1)
    assert (os.stat(place / "f").st_uid, os.stat(place / "f").st_gid) == (44, 33)
    os.symlink("nowhere", place / "l")
    os.lchown(place / "l", 55, 66)
    assert os.lstat(place / "l").st_uid == 55


def test_mode_of_an_open_file_does_not_matter_to_it(place):
    put(place / "f", b"x")
    fd = os.open(place / "f", os.O_RDWR)
    os.fchmod(fd, 0)
    os.pwrite(fd, b"y", 0)
    assert os.pread(fd, 1, 0) == b"y"
    os.close(fd)


# ---- times ----


def test_utimens_sets_nanoseconds(place):
    put(place / "f", b"x")
    os.utime(place / "f", ns=(1_234_567_890_123_456_789, 987_654_321_987_654_321))
    info = os.stat(place / "f")
    assert (info.st_atime_ns, info.st_mtime_ns) == (1_234_567_890_123_456_789,
                                                    987_654_321_987_654_321)
    os.utime(place / "f", ns=(-1_500_000_000, 4_000_000_000_000_000_000))
    info = os.stat(place / "f")
    assert (info.st_atime_ns, info.st_mtime_ns) == (-1_500_000_000, 4_000_000_000_000_000_000)


def test_utimens_now_and_omit(place):
    put(place / "f", b"x")
    os.utime(place / "f", (100, 200))
    before = time.time()
    utimensat(place / "f", (0, UTIME_NOW), (0, UTIME_OMIT))
    assert os.stat(place / "f").st_mtime == 200
    assert before - 1 <= os.stat(place / "f").st_atime <= time.time() + 1
    utimensat(place / "f", (300, 0), (0, UTIME_OMIT))
    assert (os.stat(place / "f").st_atime, os.stat(place / "f").st_mtime) == (300, 200)
    utimensat(place / "f", (0, UTIME_OMIT), (0, UTIME_OMIT))
    assert (os.stat(place / "f").st_atime, os.stat(place / "f").st_mtime) == (300, 200)


def test_utimens_of_a_symlink(place):
    put(place / "f", b"x")
    os.utime(place / "f", (5, 5))
    os.symlink("f", place / "l")
    os.utime(place / "l", (100, 200), follow_symlinks=False)
    assert os.lstat(place / "l").st_mtime == 200
    assert os.stat(place / "l").st_mtime == 5


def test_write_truncate_and_chmod_move_the_right_times(place):
    put(place / "f", b"x")
    os.utime(place / "f", (1, 1))
    ctime = os.stat(place / "f").st_ctime_ns
    time.sleep(0.02)
    os.chmod(place / "f", 0o600)
    info = os.stat(place / "f")
    assert info.st_mtime == 1 and info.st_ctime_ns > ctime
    with open(place / "f", "ab") as f:
        f.write(b"y")
    assert os.stat(place / "f").st_mtime > 1
    os.utime(place / "f", (1, 1))
    os.truncate(place / "f", 0)
    assert os.stat(place / "f").st_mtime > 1
    ctime = os.stat(place / "f").st_ctime_ns
    time.sleep(0.02)
    os.rename(place / "f", place / "g")
    os.link(place / "g", place / "h")
    assert os.stat(place / "g").st_ctime_ns > ctime


def test_mtime_set_before_close_stays(place):
    """cp -p and rsync set the times of a file they still hold open."""
    fd = os.open(place / "f", os.O_CREAT | os.O_WRONLY, 0o600)
    os.write(fd, b"content")
    os.utime(fd, (1000, 2000))
    os.fchmod(fd, 0o640)
    os.close(fd)
    assert os.stat(place / "f").st_mtime == 2000
    os.rename(place / "f", place / "g")
    assert (os.stat(place / "g").st_mtime, mode_of(place / "g")) == (2000, 0o640)


def test_reading_moves_an_old_atime(place):
    """As relatime does: an atime older than mtime moves when the file is read."""
    put(place / "f", b"x")
    os.utime(place / "f", (1, 1000))
    get(place / "f")
    eventually(lambda: os.stat(place / "f").st_atime > 1000, what="the new atime")


# ---- extended attributes ----


def test_xattrs_set_get_list_remove(place):
    put(place / "f", b"x")
    values = {"user.a": b"", "user.b": b"\0\xff binary", "user." + "n" * 200: b"v" * 1000}
    for name, value in values.items():
        os.setxattr(place / "f", name, value)
    assert sorted(os.listxattr(place / "f")) == sorted(values)
    for name, value in values.items():
        assert os.getxattr(place / "f", name) == value
    os.setxattr(place / "f", "user.a", b"changed", os.XATTR_REPLACE)
    assert os.getxattr(place / "f", "user.a") == b"changed"
    fails(errno.EEXIST, os.setxattr, place / "f", "user.a", b"", os.XATTR_CREATE)
    fails(errno.ENODATA, os.setxattr, place / "f", "user.z", b"", os.XATTR_REPLACE)
    os.removexattr(place / "f", "user.b")
    fails(errno.ENODATA, os.getxattr, place / "f", "user.b")
    fails(errno.ENODATA, os.removexattr, place / "f", "user.b")
    assert "user.b" not in os.listxattr(place / "f")


def test_xattrs_follow_the_inode(place):
    put(place / "f", b"x")
    os.setxattr(place / "f", "user.k", b"v")
    os.link(place / "f", place / "l")
    os.rename(place / "f", place / "g")
    assert os.getxattr(place / "g", "user.k") == os.getxattr(place / "l", "user.k") == b"v"
    put(place / "g", b"rewritten")
    assert os.getxattr(place / "g", "user.k") == b"v"
    os.mkdir(place / "d")
    os.setxattr(place / "d", "user.k", b"dir")
    assert os.getxattr(place / "d", "user.k") == b"dir"


def test_xattr_on_a_temporary_file_follows_the_rename(place):
    """vLLM's checksum: set on the open, unpublished file, read under the final name."""
    fd = os.open(place / "t", os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600)
    os.write(fd, b"block")
    os.setxattr(fd, "user.vllm.kv_crc32c", b"\x12\x34\x56\x78")
    os.close(fd)
    os.rename(place / "t", place / "final")
    assert os.getxattr(place / "final", "user.vllm.kv_crc32c") == b"\x12\x34\x56\x78"


def test_xattr_permissions(place):
    put(place / "f", b"x")
    os.setxattr(place / "f", "user.k", b"v")
    os.chmod(place / "f", 0o600)
    as_nobody(fails, errno.EACCES, os.getxattr, place / "f", "user.k")
    os.chmod(place / "f", 0o644)
    assert as_nobody(os.getxattr, place / "f", "user.k") == b"v"
    as_nobody(fails, errno.EACCES, os.setxattr, place / "f", "user.k", b"w")


def test_big_xattrs_are_bounded(kv):
    """S2: 64 KiB an inode in all, then a clear errno."""
    put(kv.dir / "f", b"x")
    os.setxattr(kv.dir / "f", "user.big", b"b" * 60_000)
    assert os.getxattr(kv.dir / "f", "user.big") == b"b" * 60_000
    fails(errno.ENOSPC, os.setxattr, kv.dir / "f", "user.more", b"b" * 60_000)
    assert os.listxattr(kv.dir / "f") == ["user.big"]
    with pytest.raises(OSError):
        os.setxattr(kv.dir / "f", "user.huge", b"b" * (MIB // 8))


def test_reports_are_read_only_attributes(kv):
    put(kv.dir / "f", b"x")
    assert os.listxattr(kv.dir / "f") == []
    assert b"version" in os.getxattr(kv.dir / "f", "user.kvfs.status")
    fails(errno.EPERM, os.setxattr, kv.dir / "f", "user.kvfs.status", b"")
    fails(errno.ENODATA, os.getxattr, kv.dir / "f", "user.kvfs.nonsense")
