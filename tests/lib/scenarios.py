# SPDX-License-Identifier: Apache-2.0
"""
What every engine must be able to do on a mount, as tests that the files of tests/clients import.

Such a file has ENGINE (see the fixture engine) and VARIANTS: {id: (class of the program, its options)}.
"""
import os
import random
import time

import pytest
from data import MIB
from procs import eventually

# Of one block: Llama-3.1-8B in 16 and in 256 tokens, DeepSeek-V3 (no multiple of 4096).
SIZES = {2 * MIB: 24, 32 * MIB: 3, 1_124_352: 10}


@pytest.fixture
def start(engine, variant):
    """Starts an instance of the variant under test in a folder."""
    kind, options = variant

    def begin(folder, size=2 * MIB, **more):
        return engine.start(kind, folder, size=size, **options, **more)

    yield begin
    engine.end_instances()


def adopt(instance, numbers):
    """Engines whose index is in memory alone are told of the blocks that another one has stored."""
    if "adopt" in instance.offers():
        instance.adopt(numbers)


def files(folder):
    return [name for _, _, names in os.walk(folder) for name in names]


def blocks(folder):
    """The files that hold blocks; a temporary name must be gone when its block is stored."""
    names = files(folder)
    assert not [n for n in names if ".tmp" in n], "a temporary file is left"
    return [n for n in names if n != "config.json"]


@pytest.mark.parametrize("size", SIZES)
def test_store_find_and_load(kv, start, size):
    numbers = list(range(SIZES[size]))
    one = start(kv.dir, size)
    assert not any(one.present(numbers))
    one.store(numbers)
    assert all(one.present(numbers))
    assert len(blocks(kv.dir)) == len(numbers)
    assert all(one.load(numbers))
    one.store(numbers)
    another = start(kv.dir, size)
    adopt(another, numbers)
    absent = [n + 1000 for n in numbers]
    assert another.present([*numbers, *absent]) == [True] * len(numbers) + [False] * len(absent)
    assert all(another.load(numbers))
    one.stop()
    another.stop()


def test_load_after_a_remount(fresh, start):
    kv = fresh()
    numbers = list(range(30))
    one = start(kv.mnt)
    one.store(numbers)
    one.stop()
    kv.remount()
    another = start(kv.mnt)
    adopt(another, numbers)
    assert all(another.present(numbers))
    assert all(another.load(numbers))
    another.stop()
    assert kv.counter("fill_bytes") >= len(numbers) * 2 * MIB or kv.counter("fuse_read") > 0


def test_removed_blocks_are_misses(kv, start):
    numbers = list(range(12))
    one = start(kv.dir)
    if "remove" not in one.offers():
        one.stop()
        return
    one.store(numbers)
    one.remove(numbers[::2])
    assert one.present(numbers) == [False, True] * 6
    assert len(blocks(kv.dir)) == 6
    another = start(kv.dir)
    adopt(another, numbers[1::2])
    assert another.load(numbers) == [False, True] * 6
    one.store(numbers)
    adopt(another, numbers)
    assert all(another.load(numbers))
    one.stop()
    another.stop()


def test_p6_an_engine_killed_in_a_store_leaves_whole_blocks_or_none(kv, start):
    """
    Killed at any point of a store; another engine finds what was stored before and, of the rest,
    whole blocks or none, and stores what is missing.
    """
    chance = random.Random(8)
    numbers = list(range(16))
    partial = 0
    for turn in range(40):
        if turn >= 6 and partial:
            break
        folder = kv.dir / f"{turn}"
        folder.mkdir()
        one = start(folder)
        one.store(numbers[:3])
        already = len(files(folder))
        one.send("store", numbers[3:])
        # Its end may be near by then: some create all their files first, others one by one.
        eventually(lambda: len(files(folder)) > already, what="a block")
        time.sleep(chance.uniform(0, 0.01) * (turn % 2))
        one.kill()
        another = start(folder)
        adopt(another, numbers)
        found = another.load(numbers)
        assert all(found[:3]), found
        partial += not all(found)
        another.store(numbers)
        adopt(another, numbers)
        assert all(another.load(numbers))
        another.kill()
    assert partial, "no kill came before the end of the store"


def test_p5_engines_store_the_same_blocks_at_once(kv, start, request):
    """
    Whatever the order of their steps, the blocks are whole afterwards.

    Engines that share a block's temporary name rename each other's files: one then finds its own
    gone, or what it renamed still being written, and says so. On no filesystem can it do better.
    """
    numbers = list(range(12))
    instances = [start(kv.dir) for _ in range(3)]
    for one in instances:
        one.send("store", numbers)
    for one in instances:
        try:
            one.receive()
        except AssertionError as e:
            assert getattr(request.module, "SHARED_TEMPORARY_NAMES", False), e
            lost = ("No such file or directory", "size mismatch after write: 0 ", "the store task")
            assert any(text in str(e) for text in lost), e
    for one in instances:
        adopt(one, numbers)
        assert all(one.load(numbers))
        one.stop()
    assert len(blocks(kv.dir)) == len(numbers)


def test_k1_three_times_what_the_store_holds(fresh, start):
    """No store fails; a block that was found is loaded, right, or has been evicted."""
    kv = fresh(size="256M", dram="64M")
    one = start(kv.mnt)
    batches = [list(range(i, i + 16)) for i in range(0, 384, 16)]
    for batch in batches:
        one.store(batch)
    another = start(kv.mnt)
    hits = 0
    for batch in reversed(batches):
        adopt(another, batch)
        found = another.load(batch)
        hits += sum(found)
        if batch is batches[-1]:
            assert all(found), "what was stored last is gone"
    assert 60 <= hits <= 128
    one.stop()
    another.stop()


SCENARIOS = [name for name in dir() if name.startswith("test_")]
__all__ = [*SCENARIOS, "start"]
