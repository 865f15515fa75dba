# SPDX-License-Identifier: Apache-2.0
"""K4 and the namespace: rename, links, symlinks, long and odd names, directories, special files."""
import errno
import os
import socket
import stat

import pytest
from data import blob, get, put
from syscalls import RENAME_EXCHANGE, RENAME_NOREPLACE, fails, rename2

KINDS = ("file", "empty", "full", "link", "none")


def make(path, kind):
    if kind == "file":
        put(path, os.fsencode(path))
    elif kind in ("empty", "full"):
        path.mkdir()
        if kind == "full":
            put(path / "inside", b"x")
    elif kind == "link":
        os.symlink("nowhere", path)


def identity(path):
    try:
        info = os.lstat(path)
    except FileNotFoundError:
        return None
    return info.st_ino, stat.S_IFMT(info.st_mode)


def rename_result(old, new):
    """errno of renaming kind OLD onto kind NEW, by POSIX; 0 if it works."""
    if old == "none":
        return {errno.ENOENT}
    directory = old in ("empty", "full")
    if directory and new in ("file", "link"):
        return {errno.ENOTDIR}
    if directory and new == "full":
        return {errno.ENOTEMPTY, errno.EEXIST}
    if not directory and new in ("empty", "full"):
        return {errno.EISDIR}
    return {0}


@pytest.mark.parametrize("across", (False, True), ids=("same-dir", "across"))
@pytest.mark.parametrize("new", KINDS)
@pytest.mark.parametrize("old", KINDS)
def test_rename_matrix(place, old, new, across):
    target = place / "sub" / "b" if across else place / "b"
    target.parent.mkdir(exist_ok=True)
    make(place / "a", old)
    make(target, new)
    moved, there = identity(place / "a"), identity(target)
    try:
        os.rename(place / "a", target)
        result = 0
    except OSError as e:
        result = e.errno
    assert result in rename_result(old, new), errno.errorcode.get(result)
    if result == 0:
        assert identity(target) == moved and identity(place / "a") is None
    else:
        assert identity(place / "a") == moved and identity(target) == there


@pytest.mark.parametrize("new", ("file", "empty", "none"))
def test_rename_noreplace(place, new):
    make(place / "a", "file")
    make(place / "b", new)
    if new == "none":
        rename2(place / "a", place / "b", RENAME_NOREPLACE)
        assert get(place / "b").endswith(b"/a")
    else:
        fails(errno.EEXIST, rename2, place / "a", place / "b", RENAME_NOREPLACE)
        assert get(place / "a").endswith(b"/a")


@pytest.mark.parametrize("new", KINDS)
@pytest.mark.parametrize("old", ("file", "full", "link"))
def test_rename_exchange(place, old, new):
    make(place / "a", old)
    (place / "sub").mkdir()
    make(place / "sub" / "b", new)
    before = identity(place / "a"), identity(place / "sub" / "b")
    if new == "none":
        fails(errno.ENOENT, rename2, place / "a", place / "sub" / "b", RENAME_EXCHANGE)
        return
    rename2(place / "a", place / "sub" / "b", RENAME_EXCHANGE)
    assert (identity(place / "sub" / "b"), identity(place / "a")) == before
    links = 2 + (stat.S_ISDIR(os.lstat(place / "a").st_mode))
    links += stat.S_ISDIR(os.lstat(place / "sub").st_mode)
    if os.stat(place).st_nlink > 1:
        assert os.stat(place).st_nlink == links


def test_rename_into_its_own_subtree_is_refused(place):
    (place / "a" / "b").mkdir(parents=True)
    fails(errno.EINVAL, os.rename, place / "a", place / "a" / "b" / "c")
    fails(errno.ENOTEMPTY, os.rename, place / "a" / "b", place / "a")
    assert (place / "a" / "b").is_dir()


def test_rename_to_a_hard_link_of_itself_does_nothing(place):
    put(place / "a", b"x")
    os.link(place / "a", place / "b")
    os.rename(place / "a", place / "b")
    assert sorted(os.listdir(place)) == ["a", "b"]


def test_rename_replaces_an_open_file(place):
    put(place / "a", b"old")
    put(place / "b", b"new")
    fd = os.open(place / "a", os.O_RDONLY)
    os.rename(place / "b", place / "a")
    assert os.pread(fd, 9, 0) == b"old"
    assert get(place / "a") == b"new"
    os.close(fd)


def test_renamed_directory_keeps_its_tree(place):
    (place / "a" / "b" / "c").mkdir(parents=True)
    put(place / "a" / "b" / "c" / "f", b"deep")
    os.rename(place / "a" / "b", place / "moved")
    assert get(place / "moved" / "c" / "f") == b"deep"
    assert os.listdir(place / "a") == []
    assert os.stat(place / "moved" / "..").st_ino == os.stat(place).st_ino


def test_hard_links_share_everything(place):
    put(place / "a", b"one")
    os.link(place / "a", place / "b")
    (place / "sub").mkdir()
    os.link(place / "b", place / "sub" / "c")
    assert {os.stat(place / n).st_ino for n in ("a", "b", "sub/c")} == {os.stat(place / "a").st_ino}
    assert os.stat(place / "a").st_nlink == 3
    with open(place / "b", "ab") as f:
        f.write(b" two")
    assert get(place / "sub" / "c") == b"one two"
    os.chmod(place / "sub" / "c", 0o600)
    assert stat.S_IMODE(os.stat(place / "a").st_mode) == 0o600
    os.unlink(place / "a")
    os.unlink(place / "b")
    assert os.stat(place / "sub" / "c").st_nlink == 1
    assert get(place / "sub" / "c") == b"one two"


def test_hard_link_errors(place):
    put(place / "a", b"x")
    (place / "d").mkdir()
    fails(errno.EPERM, os.link, place / "d", place / "e")
    fails(errno.EEXIST, os.link, place / "a", place / "d")
    fails(errno.ENOENT, os.link, place / "none", place / "e")


@pytest.mark.parametrize("length", (1, 59, 60, 255, 1024, 4095))
def test_symlinks_keep_their_target(place, length):
    target = "t" * length
    os.symlink(target, place / "l")
    assert os.readlink(place / "l") == target
    assert os.lstat(place / "l").st_size == length
    assert stat.S_ISLNK(os.lstat(place / "l").st_mode)


def test_symlinks_are_followed_and_listed(place):
    (place / "d").mkdir()
    put(place / "d" / "f", b"content")
    os.symlink("d", place / "l")
    assert get(place / "l" / "f") == b"content"
    assert {e.name: e.is_symlink() for e in os.scandir(place)} == {"d": False, "l": True}
    os.unlink(place / "l")
    assert get(place / "d" / "f") == b"content"
    os.symlink("loop", place / "loop")
    fails(errno.ELOOP, os.stat, place / "loop")
    fails(errno.EEXIST, os.symlink, "x", place / "d")
    fails(errno.EINVAL, os.readlink, place / "d")


def test_directories_make_and_remove(place):
    os.mkdir(place / "d", 0o750)
    assert stat.S_IMODE(os.stat(place / "d").st_mode) == 0o750
    fails(errno.EEXIST, os.mkdir, place / "d")
    put(place / "d" / "f", b"")
    fails(errno.ENOTEMPTY, os.rmdir, place / "d")
    fails(errno.EISDIR, os.unlink, place / "d")
    fails(errno.ENOTDIR, os.rmdir, place / "d" / "f")
    fails(errno.ENOTDIR, os.mkdir, place / "d" / "f" / "g")
    fails(errno.ENOENT, os.mkdir, place / "none" / "g")
    os.unlink(place / "d" / "f")
    os.rmdir(place / "d")
    fails(errno.ENOENT, os.rmdir, place / "d")


def test_directory_times_and_links_follow_their_entries(place):
    os.utime(place, (1, 1))
    put(place / "f", b"")
    assert os.stat(place).st_mtime > 1
    os.utime(place, (1, 1))
    os.unlink(place / "f")
    assert os.stat(place).st_mtime > 1
    before = os.stat(place).st_nlink
    os.mkdir(place / "d")
    assert os.stat(place).st_nlink in (before + 1, 1)


def test_removed_directory_that_is_open_takes_no_names(place):
    os.mkdir(place / "d")
    fd = os.open(place / "d", os.O_RDONLY | os.O_DIRECTORY)
    os.rmdir(place / "d")
    with pytest.raises(FileNotFoundError):
        os.open("f", os.O_CREAT | os.O_WRONLY, dir_fd=fd)
    assert os.listdir(fd) == []
    os.close(fd)


def test_any_byte_may_stand_in_a_name(place):
    root = os.fsencode(place)
    names = [bytes([b]) for b in range(1, 256) if b not in b"/."] + [
        b"\xff\xfe broken utf-8", b"-rf", b"new\nline", "größe-名".encode(), b"...", b"..x", b"a" * 255]
    for name in names:
        put(os.path.join(root, name), name)
    assert sorted(os.listdir(root)) == sorted(names)
    for name in names:
        assert get(os.path.join(root, name)) == name


def test_deep_paths(place):
    path = place
    for depth in range(60):
        path = path / f"{depth}-{'x' * 40}"
        path.mkdir()
    put(path / "f", b"deep")
    assert get(path / "f") == b"deep"


def test_k4_names_of_1023_bytes(kv):
    names = [f"n{length}-".ljust(length, "x") for length in (256, 512, 1000, 1022, 1023)]
    for name in names:
        put(kv.dir / name, name.encode())
    assert sorted(os.listdir(kv.dir)) == sorted(names)
    for name in names:
        assert get(kv.dir / name) == name.encode()
    os.rename(kv.dir / names[-1], kv.dir / ("r" * 1023))
    os.link(kv.dir / ("r" * 1023), kv.dir / ("l" * 1023))
    os.mkdir(kv.dir / ("d" * 1023))
    os.symlink("x", kv.dir / ("s" * 1023))
    assert get(kv.dir / ("l" * 1023)) == names[-1].encode()
    for func, *more in ((os.stat,), (os.mkdir,), (os.open, os.O_CREAT | os.O_WRONLY)):
        fails(errno.ENAMETOOLONG, func, kv.dir / ("y" * 1024), *more)
    fails(errno.ENAMETOOLONG, os.rename, kv.dir / names[0], kv.dir / ("y" * 1024))
    assert os.statvfs(kv.dir).f_namemax == 1023


def test_special_files_are_refused(kv):
    fails(errno.EPERM, os.mkfifo, kv.dir / "fifo")
    fails(errno.EPERM, os.mknod, kv.dir / "device", stat.S_IFCHR | 0o600, os.makedev(1, 3))
    fails(errno.EPERM, os.mknod, kv.dir / "block", stat.S_IFBLK | 0o600, os.makedev(7, 0))
    with socket.socket(socket.AF_UNIX) as s, pytest.raises(PermissionError):
        s.bind(os.fspath(kv.dir / "socket"))
    assert os.listdir(kv.dir) == []


def test_mknod_makes_regular_files(place):
    os.mknod(place / "f", stat.S_IFREG | 0o640)
    assert os.stat(place / "f").st_size == 0
    assert get(place / "f") == b""
    fails(errno.EEXIST, os.mknod, place / "f", stat.S_IFREG | 0o640)


def test_inode_numbers_are_never_reused(kv):
    """S1."""
    seen = set()
    for _ in range(200):
        put(kv.dir / "f", blob(1, 100))
        ino = os.stat(kv.dir / "f").st_ino
        assert ino not in seen
        seen.add(ino)
        os.unlink(kv.dir / "f")
