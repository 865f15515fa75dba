# SPDX-License-Identifier: Apache-2.0
"""SGLang's HiCache storage, unchanged, from two wheels: see engines/sglang_engine.py."""
import os

from data import MIB
from procs import eventually
from scenarios import *  # noqa: F403 - every engine's tests

ENGINE = ("sglang", "sglang==0.5.23", "sglang/srt/mem_cache/", "sglang/srt/environ.py")
VARIANTS = {"file": ("File", {}), "file-metadata-cache": ("File", {"enable_metadata_cache": True})}


def test_the_leading_pages_of_a_prefix(kv, instances):
    """batch_exists_v2: how many pages from the first on are there, 1000 of them."""
    one = instances.start("File", kv.dir, size=64 * 1024)
    numbers = list(range(1000))
    assert one.leading(numbers) == 0
    one.store(numbers)
    assert instances.start("File", kv.dir, size=64 * 1024).leading(numbers + [5000]) == 1000
    for name in os.listdir(kv.dir):
        if name.startswith(one.key(300)):
            os.remove(kv.dir / name)
    assert one.leading(numbers) == 300


def test_ranks_share_the_folder(kv, instances):
    ranks = [instances.start("File", kv.dir, size=MIB, rank=r, ranks=4) for r in range(4)]
    numbers = list(range(8))
    for one in ranks:
        one.send("store", numbers)
    for one in ranks:
        one.receive()
        assert all(one.load(numbers))
    assert len(os.listdir(kv.dir)) == 32


def test_its_own_eviction_by_size(kv, instances):
    one = instances.start("File", kv.dir, size=2 * MIB, max_size=32 * MIB)
    for start in range(0, 48, 4):
        one.store(list(range(start, start + 4)))
        assert len(os.listdir(kv.dir)) <= 16
    assert one.present([0, 47]) == [False, True]
    # A new engine takes over what is there, and keeps to the limit too.
    another = instances.start("File", kv.dir, size=2 * MIB, max_size=16 * MIB)
    assert len(os.listdir(kv.dir)) <= 8
    assert all(another.load([46, 47]))


def test_its_own_eviction_by_free_space(fresh, instances):
    """
    min_free_space: looks at statvfs, removes pages, and looks again.

    What a removal frees shows when its commit is on the drive. A page that is offered before that
    is refused, as the storage takes what it removed to be gone for nothing; offered again it fits.
    """
    kv = fresh(size="256M", dram="64M")
    one = instances.start("File", kv.mnt, size=2 * MIB, min_free_space=64 * MIB)
    for number in range(160):
        eventually(lambda number=number: all(one.offer([number])), what="room for a page")
    there = one.present(list(range(160)))
    assert there[-1] and not there[0] and sum(there) <= 96
    assert all(one.load([n for n in range(160) if there[n]]))
    eventually(lambda: os.statvfs(kv.mnt).f_bavail * 4096 >= 62 * MIB, what="free space")


def test_clear_removes_every_page(kv, instances):
    one = instances.start("File", kv.dir, size=MIB)
    one.store(list(range(20)))
    assert one.clear() is True
    assert os.listdir(kv.dir) == []
    assert one.present([1]) == [False]


def test_hf3fs_pages_of_a_preallocated_file(fresh, instances):
    """Four clients of one process, each with a descriptor of its own, on one sparse file of 1 TiB."""
    kv = fresh(size="512M", dram="128M")
    one = instances.start("Hf3fs", kv.mnt, size=2 * MIB, file_size=1 << 40)
    path = kv.mnt / "hicache.0.bin"
    assert os.stat(path).st_size == 1 << 40
    numbers = list(range(40))
    assert not any(one.present(numbers))
    one.store(numbers)
    assert all(one.present(numbers))
    assert all(one.load(numbers))
    assert all(one.load([7, 3, 39]))
    one.remove(numbers[:20])
    assert one.present(numbers) == [False] * 20 + [True] * 20
    one.store(list(range(100, 120)))
    assert all(one.load(list(range(20, 40)) + list(range(100, 120))))
    assert os.stat(path).st_blocks * 512 <= 60 * 2 * MIB
    one.stop()
