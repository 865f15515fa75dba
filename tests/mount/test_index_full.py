# SPDX-License-Identifier: Apache-2.0
"""K1: the filesystem under the index is full: eviction and removal still work, and make room for new files."""
import os

import pytest
from data import blob, get, put, sync
from procs import run


@pytest.fixture
def crowded(fresh):
    """A mount whose store, but for its device, is on a small filesystem; and that filesystem."""
    kv = fresh(mount=False, format=False)
    small = kv.home / "small"
    small.mkdir()
    run("mount", "-t", "tmpfs", "-o", "size=32M,mode=700", "kvfs-test", small)
    kv.store = small / "store"
    kv.devices = [kv.home / "device"]
    kv.size = "64M"
    kv.format()
    kv.mount(lease="0s")
    yield kv, small
    kv.umount()
    assert kv.kvfs("check", kv.store, "--data", check=False).returncode == 0
    kv.damaged = True  # it is gone before the last look
    run("umount", small)


def fill(folder):
    """Takes what room there is on the filesystem of FOLDER."""
    with open(folder / "filler", "wb", buffering=0) as f:
        try:
            while f.write(bytes(65536)):
                pass
        except OSError:
            pass


def name(i):
    """Long ones fill an index faster."""
    return f"{i}-" + "x" * 200


@pytest.mark.parametrize("mode", ["daemon"])
def test_k1_full_under_the_index(crowded):
    kv, small = crowded
    os.mkdir(kv.mnt / "old")
    for i in range(3000):
        put(kv.mnt / "old" / name(i), blob(i, 100))
    kv.settle()
    fill(small)
    # Whoever makes files finds room for them, by eviction.
    os.mkdir(kv.mnt / "new")
    for i in range(3000):
        put(kv.mnt / "new" / name(i), blob(i, 100))
    sync(kv.mnt / "new" / name(2999))
    assert get(kv.mnt / "new" / name(2999)) == blob(2999, 100)
    assert kv.counter("evicted_store") > 0
    assert len(os.listdir(kv.mnt / "old")) < 3000
    # And removals reach the disk.
    gone = os.listdir(kv.mnt / "new")[:500]
    for word in gone:
        os.unlink(kv.mnt / "new" / word)
    kv.settle()
    kv.remount()
    left = os.listdir(kv.mnt / "new")
    assert left and not set(left) & set(gone)
    for word in left[:100]:
        assert get(kv.mnt / "new" / word) == blob(int(word.split("-")[0]), 100)
    os.unlink(small / "filler")
    for i in range(500):
        put(kv.mnt / f"more-{i}", b"x")
    kv.settle()
