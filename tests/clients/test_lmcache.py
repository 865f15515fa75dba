# SPDX-License-Identifier: Apache-2.0
"""LMCache's stores of files, unchanged, from its wheel: see engines/lmcache_engine.py."""
import os

from data import MIB
from scenarios import *  # noqa: F403 - every engine's tests

ENGINE = ("lmcache", "lmcache==0.5.6", "lmcache/")
VARIANTS = {
    "local_disk": ("Disk", {}),
    "local_disk-direct": ("Disk", {"direct": True}),
    "fs": ("Remote", {}),
    "fs-direct": ("Remote", {"header": False, "direct": True}),
    "l2_fs": ("Files", {"relative_tmp_dir": "partial"}),
    "l2_fs-direct": ("Files", {"use_odirect": True}),
    "l2_fs_native": ("Native", {}),
    "l2_fs_native-direct": ("Native", {"use_odirect": True}),
}
SHARED_TEMPORARY_NAMES = True


def test_local_disk_keeps_to_its_own_limit(kv, engine):
    """max_local_disk_size: the backend evicts by removing files that it just read."""
    one = engine.start("Disk", kv.dir, size=2 * MIB, max_gib=16 / 1024)
    for start in range(0, 40, 4):
        numbers = list(range(start, start + 4))
        one.store(numbers)
        assert all(one.load(numbers))
        assert len(os.listdir(kv.dir)) <= 8
    assert one.present(list(range(40))) == [False] * 32 + [True] * 8
    engine.end_instances()


def test_local_disk_takes_a_vanished_file_for_a_miss(kv, engine):
    """What was evicted under its index in memory: ENOENT, and the key is dropped."""
    one = engine.start("Disk", kv.dir, size=2 * MIB)
    one.store([1, 2])
    for name in os.listdir(kv.dir):
        os.remove(kv.dir / name)
    assert one.present([1, 2]) == [True, True]
    assert one.load([1, 2]) == [False, False]
    assert one.present([1, 2]) == [False, False]
    engine.end_instances()


def test_fs_lists_its_blocks(kv, engine):
    one = engine.start("Remote", kv.dir, size=2 * MIB, temporary="partial")
    one.store(list(range(20)))
    assert one.listed() == 20
    assert os.listdir(kv.dir / "partial") == []
    engine.end_instances()
