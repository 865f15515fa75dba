# SPDX-License-Identifier: Apache-2.0
"""Pins: what is never evicted (K2), who may, how much, and what the tool says."""
import errno
import json
import os

import pytest
from data import MIB, blob, get, put, put_synced, replace
from procs import NOBODY, eventually, in_child, parallel


def usage(kv, path):
    return json.loads(kv.kvfs("quota", path, "--json").stdout)


def pinned(path):
    return os.getxattr(path, "user.kvfs.pin") == b"1"


@pytest.fixture
def small(fresh):
    kv = fresh(size="64M", dram="64M", lease="0s")
    kv.dir = kv.mnt / "dir"
    kv.dir.mkdir()
    return kv


def test_k2_pinned_files_stay(small):
    """Three times the store is written by several processes: what is pinned stays, the rest goes."""
    for i in range(4):
        put(small.dir / f"keep{i}", blob(i, 2 * MIB))
    small.kvfs("pin", *(small.dir / f"keep{i}" for i in range(4)))
    put(small.dir / "other", blob(9, MIB))

    def write(who):
        for i in range(48):
            put(small.mnt / f"w{who}-{i}", blob(100 * who + i, 2 * MIB))

    parallel(write, (1, 2), timeout=240)
    for i in range(4):
        assert pinned(small.dir / f"keep{i}")
        assert get(small.dir / f"keep{i}") == blob(i, 2 * MIB)
    eventually(lambda: not (small.dir / "other").exists(), what="the eviction")


def test_a_directory_stands_for_what_is_and_comes_below(small):
    (small.dir / "sub").mkdir()
    put(small.dir / "a", b"a")
    put(small.dir / "sub" / "b", b"b")
    os.symlink("nowhere", small.dir / "link")
    put(small.mnt / "outside", b"x")
    os.symlink(small.mnt / "outside", small.dir / "sub" / "outside")
    small.kvfs("pin", small.dir)
    put(small.dir / "sub" / "c", b"c")
    replace(small.dir / "a", b"again")
    (small.dir / "new").mkdir()
    put(small.dir / "new" / "d", b"d")
    for name in ("", "a", "sub", "sub/b", "sub/c", "new", "new/d"):
        assert pinned(small.dir / name), name
    assert not pinned(small.mnt / "outside")
    small.remount()
    assert pinned(small.dir / "sub/c")
    small.kvfs("unpin", small.dir)
    put(small.dir / "later", b"x")
    for name in ("", "a", "sub/b", "sub/c", "new/d", "later"):
        assert not pinned(small.dir / name), name


def test_by_attribute(small):
    path = small.dir / "f"
    put(path, b"x")
    assert os.getxattr(path, "user.kvfs.pin") == b"0"
    os.setxattr(path, "user.kvfs.pin", b"1")
    assert pinned(path)
    os.setxattr(path, "user.kvfs.pin", b"0")
    assert not pinned(path)
    os.setxattr(path, "user.kvfs.pin", b"1")
    os.removexattr(path, "user.kvfs.pin")
    assert not pinned(path)
    for value in (b"", b"2", b"yes", b"1" * 100):
        with pytest.raises(OSError) as e:
            os.setxattr(path, "user.kvfs.pin", value)
        assert e.value.errno == errno.EINVAL


def test_who_may(small):
    """The owner and root; who may only write to the file may not."""
    path = small.dir / "f"
    put(path, b"x")
    os.chmod(path, 0o666)
    with pytest.raises(PermissionError):
        in_child(os.setxattr, path, "user.kvfs.pin", b"1", uid=NOBODY)
    os.chown(path, NOBODY, NOBODY)
    in_child(os.setxattr, path, "user.kvfs.pin", b"1", uid=NOBODY)
    assert pinned(path)
    os.removexattr(path, "user.kvfs.pin")


def refused(done, *words):
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1, done
    for word in words:
        assert str(word) in done.stderr, (word, done.stderr)


def test_more_than_the_quota_is_refused(small):
    """7/8 of it can be pinned; pinned files that would grow beyond are refused as well."""
    small.kvfs("quota", small.dir, "16M")
    put_synced(small.dir / "a", blob(1, 12 * MIB))
    small.kvfs("pin", small.dir / "a")
    put_synced(small.dir / "b", blob(2, 3 * MIB))
    refused(small.kvfs("pin", small.dir / "b", check=False), small.dir / "b", "quota", "14", "12",
            "unpin")
    with pytest.raises(OSError) as e:
        os.setxattr(small.dir / "b", "user.kvfs.pin", b"1")
    assert e.value.errno == errno.EDQUOT
    assert usage(small, small.dir)["pinned"] == 12 * MIB
    with pytest.raises(OSError) as e:
        put(small.dir / "a", blob(1, 15 * MIB))
    assert e.value.errno == errno.EDQUOT
    assert get(small.dir / "a") == blob(1, 12 * MIB)
    done = small.kvfs("quota", small.dir, "13M", check=False)
    refused(done, "pinned", "kvfs unpin")
    assert usage(small, small.dir)["limit"] == 16 * MIB
    small.kvfs("unpin", small.dir / "a")
    small.kvfs("quota", small.dir, "13M")


def test_more_than_the_store_is_refused(small):
    """Root has 7/8 of the store, others together 1/4 of it, where no quota holds."""
    for i in range(5):
        put_synced(small.dir / f"f{i}", blob(i, 6 * MIB))
        os.chown(small.dir / f"f{i}", NOBODY, NOBODY)
    for i in range(2):
        in_child(os.setxattr, small.dir / f"f{i}", "user.kvfs.pin", b"1", uid=NOBODY)
    with pytest.raises(OSError) as e:
        in_child(os.setxattr, small.dir / "f2", "user.kvfs.pin", b"1", uid=NOBODY)
    assert e.value.errno == errno.ENOSPC
    small.kvfs("pin", *(small.dir / f"f{i}" for i in range(5)))
    with open(small.dir / "large", "wb", buffering=0) as large:
        large.write(blob(9, 26 * MIB))
        os.fsync(large.fileno())
        # So little is free now that eviction looks for more: all but what is open or pinned goes.
        put_synced(small.dir / "other", b"x")
        refused(small.kvfs("pin", small.dir / "large", check=False), small.dir / "large", "store",
                "unpin")
    small.kvfs("unpin", small.dir)
    assert small.status()["store_pinned"] == 0


def test_a_full_directory_of_pinned_files(small):
    """Nothing in it can go: EDQUOT, and the pinned stay; unpinned, they go."""
    small.kvfs("quota", small.dir, "16M")
    put_synced(small.dir / "a", blob(1, 13 * MIB))
    small.kvfs("pin", small.dir / "a")
    with pytest.raises(OSError) as e:
        put(small.dir / "b", blob(2, 4 * MIB))
    assert e.value.errno == errno.EDQUOT
    assert get(small.dir / "a") == blob(1, 13 * MIB)
    small.kvfs("unpin", small.dir / "a")
    put(small.dir / "b", blob(2, 4 * MIB))
    # The kernel is told by a message of its own, which the writer did not wait for.
    eventually(lambda: not (small.dir / "a").exists(), what="the eviction")


def test_a_pin_ends_with_the_file(small):
    put_synced(small.dir / "a", blob(1, MIB))
    small.kvfs("pin", small.dir / "a")
    assert small.status()["store_pinned"] == MIB
    (small.dir / "a").unlink()
    assert small.status()["store_pinned"] == 0


def test_the_tools_messages(small, tmp_path):
    for command in ("pin", "unpin"):
        refused(small.kvfs(command, check=False), "PATH is missing", f"kvfs {command} --help")
        refused(small.kvfs(command, tmp_path, check=False), tmp_path, "not on a kvfs mount")
        refused(small.kvfs(command, small.dir / "none", check=False), "No such file")
    put(small.dir / "a", b"x")
    os.chmod(small.dir / "a", 0o666)
    done = in_child(lambda: small.kvfs("pin", small.dir / "a", check=False), uid=NOBODY)
    refused(done, small.dir / "a", "owner")
    assert not os.listxattr(tmp_path)
