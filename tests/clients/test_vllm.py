# SPDX-License-Identifier: Apache-2.0
"""vLLM's file tier (vllm/v1/kv_offload/tiering/fs/io.py), unchanged, out of the published wheel."""
import mmap
import os
import threading

import pytest
from data import MIB, blob, get, put
from engines import VLLM
from packages import module_of_wheel, unpack
from procs import parallel

# Sizes of one stored block: Llama-3.1-8B, DeepSeek-V3 (no multiple of 4096), a 70B model's file.
BLOCKS = (2 * MIB, 1_124_352, 5 * MIB)


@pytest.fixture(scope="module")
def io():
    unpack(*VLLM)
    module = module_of_wheel(VLLM[0], "vllm/v1/kv_offload/tiering/fs/io.py")
    assert not module._HAS_FSIO_C, "the Python path is what this test is about"
    return module


def paths(folder, count, prefix=""):
    """The layout of vLLM's FileMapper: model_digest_rank/hhh/hh_group/hash.bin."""
    hashes = [f"{prefix}{i:03x}".ljust(64, "0") for i in range(count)]
    return [os.fspath(folder / "model_0123456789ab_r0" / h[:3] / f"{h[3:5]}_g0" / f"{h}.bin")
            for h in hashes]


def buffer_of(block, seeds):
    """One shared buffer with a block for each seed, as the CPU tier has, aligned for O_DIRECT."""
    size = -(-block // 4096) * 4096
    memory = mmap.mmap(-1, size * len(seeds))
    offsets = [i * size for i in range(len(seeds))]
    for offset, seed in zip(offsets, seeds, strict=True):
        memory[offset:offset + block] = blob(seed, block)
    return memoryview(memory), offsets


def test_probe_finds_o_direct(kv, io):
    assert io.probe_o_direct(os.fspath(kv.dir)) is True
    assert os.listdir(kv.dir) == []


@pytest.mark.parametrize("direct", (True, False))
@pytest.mark.parametrize("block", BLOCKS)
def test_store_and_load(kv, io, block, direct):
    count = 12
    names = paths(kv.dir, count)
    view, offsets = buffer_of(block, range(count))
    io.batch_store_block(names, view, offsets, block, direct)
    for i, name in enumerate(names):
        assert get(name) == blob(i, block)
        assert os.listdir(os.path.dirname(name)) == [os.path.basename(name)], "a temporary is left"
    back, offsets = buffer_of(block, [99] * count)
    io.batch_load_block(names, back, offsets, block, direct)
    for i, offset in enumerate(offsets):
        assert back[offset:offset + block] == blob(i, block)


def test_load_after_a_remount(fresh, io):
    kv = fresh()
    block, count = BLOCKS[1], 30
    names = paths(kv.mnt, count)
    view, offsets = buffer_of(block, range(count))
    io.batch_store_block(names, view, offsets, block)
    kv.remount()
    back, offsets = buffer_of(block, [99] * count)
    io.batch_load_block(names, back, offsets, block)
    assert bytes(back) == bytes(view)
    assert kv.counter("fill_bytes") >= count * block or kv.counter("fuse_read") > 0


def test_storing_a_stored_block_does_nothing(kv, io):
    (name,) = paths(kv.dir, 1)
    for seed in (1, 2):
        view, offsets = buffer_of(MIB, [seed])
        io.batch_store_block([name], view, offsets, MIB)
    assert get(name) == blob(1, MIB)


def test_missing_and_short_blocks(kv, io):
    """A missing block is a miss; a short file is removed by the client, and only a short one."""
    names = paths(kv.dir, 3)
    view, offsets = buffer_of(MIB, range(3))
    io.batch_store_block(names[:1], view, offsets[:1], MIB)
    with pytest.raises(FileNotFoundError) as e:
        io.batch_load_block(names, view, offsets, MIB)
    assert e.value.num_succeeded == 1
    put(names[0], b"short")
    with pytest.raises(OSError, match="Short read"):
        io.batch_load_block(names[:1], view, offsets[:1], MIB)
    assert not os.path.exists(names[0])


def test_many_threads_store_and_load(kv, io):
    """The thread pool's pattern: sixteen threads, each with its own temporary names."""
    block, count, threads = 256 * 1024, 20, 16
    errors = []

    def work(number):
        try:
            names = paths(kv.dir, count, prefix=f"{number:x}")
            view, offsets = buffer_of(block, [number * 100 + i for i in range(count)])
            io.batch_store_block(names, view, offsets, block)
            back, offsets = buffer_of(block, [0] * count)
            io.batch_load_block(names, back, offsets, block)
            assert bytes(back) == bytes(view)
        except BaseException as e:  # the main thread raises it
            errors.append(e)

    workers = [threading.Thread(target=work, args=(n,)) for n in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]


def test_ranks_store_the_same_blocks_at_once(kv, io):
    block, count = BLOCKS[1], 10
    names = paths(kv.dir, count)

    def rank(_):
        io._thread_local.__dict__.clear()  # a rank is no fork: its temporary names are its own
        view, offsets = buffer_of(block, range(count))
        io.batch_store_block(names, view, offsets, block)
        back, offsets = buffer_of(block, [99] * count)
        io.batch_load_block(names, back, offsets, block)
        return bytes(back) == bytes(view)

    assert parallel(rank, range(4)) == [True] * 4


def test_k1_a_tier_larger_than_the_store(fresh, io):
    """Stores for ever without an error; a load gives the block or says that it is gone."""
    kv = fresh(size="256M", dram="64M")
    block, count = 2 * MIB, 300
    names = paths(kv.mnt, count)
    hits = 0
    for i, name in enumerate(names):
        view, offsets = buffer_of(block, [i])
        io.batch_store_block([name], view, offsets, block)
    for i, name in enumerate(names):
        back, offsets = buffer_of(block, [999])
        try:
            io.batch_load_block([name], back, offsets, block)
        except FileNotFoundError:
            continue
        assert back[:block] == blob(i, block)
        hits += 1
    assert 40 <= hits <= 128
