# SPDX-License-Identifier: Apache-2.0
"""vLLM's offloading, unchanged, from its wheel: see engines/vllm_engine.py.

The tiering manager runs whole: the CPU tier, promotion and cascade, the asynchronous look-up, the
file tier with its thread pool and its C code. test_vllm.py has the file tier's I/O on its own.
"""
import os

import pytest
from data import MIB
from engines import VLLM
from scenarios import *  # noqa: F403 - every engine's tests

ENGINE = ("vllm", *VLLM)
VARIANTS = {"tiering-in-c": ("Tiering", {}), "tiering-in-python": ("Tiering", {"in_c": False})}


def test_the_tier_uses_o_direct(kv, instances):
    assert instances.start("Tiering", kv.dir, size=MIB).uses_o_direct() is True


def test_a_lookup_of_3600_keys(kv, instances):
    """A long prompt's keys in one step, of which a few are there."""
    one = instances.start("Tiering", kv.dir, size=64 * 1024)
    one.store(list(range(100)))
    another = instances.start("Tiering", kv.dir, size=64 * 1024)
    assert another.present(list(range(3600))) == [True] * 100 + [False] * 3500


@pytest.mark.parametrize("page_cache", (False, True))
def test_disk_backend(fresh, instances, page_cache):
    """A sparse file of slots, pwritev and preadv of whole blocks; goes on after an unlink."""
    kv = fresh(size="512M", dram="64M")
    one = instances.start("Disk", kv.mnt, size=2 * MIB, slots=100_000, page_cache=page_cache)
    path = kv.mnt / "disk-cache"
    info = os.stat(path)
    assert (info.st_size, info.st_mode & 0o777) == (100_000 * 2 * MIB, 0o600)
    numbers = [*range(40), *range(50_000, 50_040)]
    one.store(numbers)
    assert all(one.load(numbers[::-1]))
    one.unlink()
    assert all(one.load(numbers))
    one.store(list(range(20, 60)))
    assert all(one.load(list(range(60))))
    one.stop()
    assert os.listdir(kv.mnt) == []


def test_example_connector(kv, instances):
    """A folder is the hit; a file for each layer, by safetensors."""
    one = instances.start("Example", kv.dir, size=2 * MIB)
    numbers = list(range(6))
    assert not any(one.present(numbers))
    one.store(numbers)
    assert all(one.load(numbers))
    another = instances.start("Example", kv.dir, size=2 * MIB)
    assert another.load([*numbers, 77]) == [True] * 6 + [False]
    assert {len(os.listdir(kv.dir / d)) for d in os.listdir(kv.dir)} == {4}


def test_hf3fs_client_of_the_package(kv, instances):
    """The client that stands in for 3FS with a plain file: opened anew for every batch."""
    one = instances.start("Hf3fs", kv.dir, size=MIB, pages=10_000)
    numbers = [*range(30), 9_999]
    one.store(numbers)
    assert all(one.load(numbers))
    another = instances.start("Hf3fs", kv.dir, size=MIB, pages=10_000)
    assert all(another.load(numbers))
    assert os.stat(kv.dir / "hf3fs").st_size == 10_000 * MIB
