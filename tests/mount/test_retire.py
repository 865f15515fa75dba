# SPDX-License-Identifier: Apache-2.0
"""Retiring a model's directory: hidden at once, freed behind the scenes, safe at engines' start."""
import errno
import json
import os
import stat

import pytest
from data import MIB, blob, get, put, put_synced
from procs import NOBODY, eventually, in_child, parallel

FINGERPRINT = "user.kvfs.fingerprint"


def used(kv):
    status = kv.status()
    return status["store_used"] + status["store_reserved"]


def grow(top, width=40, depth=3):
    """Files in nested directories; returns how many names there are."""
    for level in range(depth):
        for i in range(width):
            put(top / f"f{i}", blob(i + level, 8192))
        top = top / "sub"
        top.mkdir()
    return depth * (width + 1)


@pytest.fixture
def model(fresh):
    kv = fresh(size="256M", dram="64M")
    kv.dir = kv.mnt / "model"
    kv.dir.mkdir()
    return kv


def test_hides_and_frees_everything(model):
    """The directory is another one with the same attributes; the old one's space comes back."""
    os.chmod(model.dir, 0o2751)
    os.chown(model.dir, 1234, 2345)
    os.setxattr(model.dir, "user.note", b"kept")
    model.kvfs("quota", model.dir, "128M")
    grow(model.dir)
    put_synced(model.dir / "large", blob(1, 20 * MIB))
    model.kvfs("pin", model.dir / "sub")
    before = os.stat(model.dir)
    model.kvfs("retire", model.dir)
    after = os.stat(model.dir)
    assert os.listdir(model.dir) == []
    assert not (model.dir / "large").exists()
    assert after.st_ino != before.st_ino and after.st_nlink == 2
    for field in ("st_mode", "st_uid", "st_gid", "st_mtime_ns"):
        assert getattr(after, field) == getattr(before, field), field
    assert os.getxattr(model.dir, "user.note") == b"kept"
    put_synced(model.dir / "large", blob(2, MIB))
    eventually(lambda: used(model) == MIB, what="the space to come back")
    usage = json.loads(model.kvfs("quota", model.dir, "--json").stdout)
    assert (usage["limit"], usage["used"], usage["inodes"], usage["own"]) == (128 * MIB, MIB, 2, True)
    assert get(model.dir / "large") == blob(2, MIB)


def test_nothing_else_goes(model):
    other = model.mnt / "other"
    other.mkdir()
    grow(model.dir)
    names = grow(other)
    os.link(model.dir / "f1", other / "link")
    model.kvfs("retire", model.dir)
    eventually(lambda: model.status()["files"] == names + 4,
               what="the others alone to be left")
    assert get(other / "f1") == blob(1, 8192)
    assert get(other / "link") == blob(1, 8192)
    assert os.stat(other / "link").st_nlink == 1


def test_open_files_live_until_they_are_closed(model, agent):
    """Readers keep what they read, writers publish into nothing; then the space comes back."""
    put_synced(model.dir / "read", blob(1, 2 * MIB))
    reader, writer = agent(), agent()
    read = reader.open(str(model.dir / "read"))
    write = writer.open(str(model.dir / "written"), os.O_CREAT | os.O_WRONLY)
    writer.write(write, blob(2, MIB))
    rewrite = writer.open(str(model.dir / "read"), os.O_WRONLY)
    writer.pwrite(rewrite, blob(3, MIB))
    model.kvfs("retire", model.dir)
    assert os.listdir(model.dir) == []
    assert reader.pread(read, 2 * MIB) == blob(1, 2 * MIB)
    writer.write(write, blob(4, MIB))
    writer.fsync(write)
    writer.close(write)
    writer.close(rewrite)
    assert reader.pread(read, 2 * MIB) == blob(1, 2 * MIB)
    assert os.listdir(model.dir) == []
    reader.close(read)
    eventually(lambda: used(model) == 0, what="the space to come back")


def test_who_is_inside_finds_nothing_left(model):
    """A process whose current directory it was: names are gone, new ones are refused."""
    grow(model.dir)

    def inside():
        os.chdir(model.dir / "sub")
        model.kvfs("retire", model.dir)
        eventually(lambda: not os.listdir("."), what="the old directory to empty")
        with pytest.raises(FileNotFoundError):
            os.open("new", os.O_CREAT | os.O_WRONLY)

    in_child(inside)
    assert os.listdir(model.dir) == []
    eventually(lambda: model.status()["files"] == 2, what="the old directories to go")


def test_again_and_again(model):
    for turn in range(5):
        grow(model.dir, width=10)
        model.kvfs("retire", model.dir)
        put(model.dir / "f0", blob(turn, 4096))
        assert os.listdir(model.dir) == ["f0"]
        assert get(model.dir / "f0") == blob(turn, 4096)
    eventually(lambda: model.status()["files"] == 3, what="the old ones to go")


# ---- fingerprints ----


def test_unless(model):
    """The first call empties it and leaves the fingerprint; the same again does nothing."""
    put(model.dir / "old", b"old")
    model.kvfs("retire", "--unless", "model-1", model.dir)
    assert os.listdir(model.dir) == []
    assert os.getxattr(model.dir, FINGERPRINT) == b"model-1"
    put(model.dir / "new", b"new")
    ino = os.stat(model.dir).st_ino
    model.kvfs("retire", "--unless", "model-1", model.dir)
    assert os.stat(model.dir).st_ino == ino
    assert get(model.dir / "new") == b"new"
    model.kvfs("retire", "--unless", "model-2", model.dir)
    assert os.listdir(model.dir) == []
    assert os.getxattr(model.dir, FINGERPRINT) == b"model-2"


def test_unless_makes_what_is_missing(model):
    path = model.mnt / "fresh"
    model.kvfs("retire", "--unless", "m", path)
    assert os.getxattr(path, FINGERPRINT) == b"m"
    assert stat.S_ISDIR(os.stat(path).st_mode)


def test_several_engines_start_at_once(model):
    """Each makes sure of the fingerprint and writes: nobody's files are lost."""
    put(model.dir / "stale", b"stale")

    def start(who):
        model.kvfs("retire", "--unless", "new-model", model.dir)
        assert not (model.dir / "stale").exists()
        put(model.dir / f"engine{who}", blob(who, 65536))

    parallel(start, range(6))
    assert sorted(os.listdir(model.dir)) == [f"engine{i}" for i in range(6)]
    for who in range(6):
        assert get(model.dir / f"engine{who}") == blob(who, 65536)


def test_the_fingerprint_is_a_plain_attribute(model):
    os.setxattr(model.dir, FINGERPRINT, b"by hand")
    assert FINGERPRINT in os.listxattr(model.dir)
    put(model.dir / "kept", b"x")
    model.kvfs("retire", "--unless", "by hand", model.dir)
    assert os.listdir(model.dir) == ["kept"]
    os.removexattr(model.dir, FINGERPRINT)
    model.kvfs("retire", "--unless", "by hand", model.dir)
    assert os.listdir(model.dir) == []


# ---- crashes, permissions, messages ----


def test_a_crash_goes_on_with_it(model):
    """Killed at once: the directory is empty or as before; if empty, the rest is freed."""
    grow(model.dir, width=300)
    model.settle()
    model.kvfs("retire", model.dir)
    put_synced(model.dir / "new", blob(7, 4096))
    model.kill()
    model.mount()
    assert os.listdir(model.dir) == ["new"]
    eventually(lambda: used(model) == 4096 and model.status()["files"] == 3,
               what="the rest to be freed")


def test_who_may(model):
    """The owner who may write to the directory above, and root."""
    def retire(path=model.dir):
        return os.setxattr(path, "user.kvfs.retire", b"")

    grow(model.dir, width=3)
    os.chmod(model.dir, 0o777)
    with pytest.raises(PermissionError):
        in_child(retire, uid=NOBODY)
    os.chown(model.dir, NOBODY, NOBODY)
    with pytest.raises(PermissionError):
        in_child(retire, uid=NOBODY)
    os.chmod(model.mnt, 0o1777)
    old = os.stat(model.dir).st_ino
    in_child(retire, uid=NOBODY)
    eventually(lambda: os.stat(model.dir).st_ino != old, what="the new directory")
    assert os.listdir(model.dir) == []
    os.chown(model.dir, 1234, 1234)
    os.chmod(model.dir, 0o777)
    with pytest.raises(PermissionError):
        in_child(retire, uid=NOBODY)


def refused(done, *words):
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1, done
    for word in words:
        assert str(word) in done.stderr, (word, done.stderr)


def test_the_tools_messages(model, tmp_path):
    def retire(*args):
        return model.kvfs("retire", *args, check=False)

    refused(retire(), "DIR is missing", "kvfs retire --help")
    refused(retire("a", "b"), "more than one DIR")
    refused(retire("--unless", "", model.dir), "FINGERPRINT")
    refused(retire("--unless", "x" * 256, model.dir), "FINGERPRINT", "255")
    refused(retire(model.mnt), "the mount itself")
    refused(retire(model.mnt / "none"), "No such file")
    refused(retire(tmp_path), "not on a kvfs mount")
    put(model.dir / "file", b"x")
    refused(retire(model.dir / "file"), "Not a directory")
    os.chmod(model.dir, 0o777)
    refused(in_child(lambda: retire(model.dir), uid=NOBODY), "owner", "root")
    with pytest.raises(OSError) as e:
        os.getxattr(model.dir, "user.kvfs.retire")
    assert e.value.errno == errno.ENODATA
    assert not os.listxattr(tmp_path)
