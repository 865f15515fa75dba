# SPDX-License-Identifier: Apache-2.0
"""NIXL's POSIX plugin, unchanged, out of the published wheels, with libaio and with io_uring.

1.5.1 notices an I/O that is short; 1.4.0 reports it as done, so that nothing but the filesystem keeps
its user from computing with whatever the buffer held. The wheels also want torch, only to ask whether
an argument is a tensor: a stub says that nothing is. Files are used as the engines do it:

    SGLang HiCacheNixl      the final name, O_RDWR | O_CREAT [| O_DIRECT], no rename; hit = a stat
    SGLang, path mode       the plugin opens the file by itself
    LMCache, dynamic files  a temporary file, renamed
    LMCache, static pool    files that stay open, written at page offsets
"""
import contextlib
import ctypes
import itertools
import mmap
import os
import sys
import types
import uuid

import pytest
from data import KIB, MIB, blob, get, put
from packages import unpack
from procs import Child, eventually, in_child, parallel

VERSIONS = ("1.5.1", "1.4.0")
QUEUES = ("use_aio", "use_uring")
BOTH = (os.O_DIRECT, 0)
# A page of SGLang's, one of DeepSeek-V3 (no multiple of 4096), and less than a block.
SIZES = (2 * MIB, 1_124_352, 70_001)

pytestmark = pytest.mark.timeout(600)  # the first test also downloads


@pytest.fixture(scope="module", params=VERSIONS)
def version(request):
    # Without its collective kernels for GPUs, which are most of it.
    unpack(f"nixl-cu12=={request.param}", "nixl_cu12/", "nixl_cu12.libs/", ".nixl_cu12.")
    return request.param


@pytest.fixture(params=QUEUES)
def queue(request):
    return request.param


class Engine:
    """An agent with the POSIX plugin and host memory; to be made in a process of its own."""

    def __init__(self, version, queue, size, count):
        os.environ["NIXL_LOG_LEVEL"] = "ERROR"
        sys.path.insert(0, os.fspath(unpack(f"nixl-cu12=={version}", "nixl_cu12")))
        if version == "1.4.0":
            sys.modules["torch"] = types.SimpleNamespace(Tensor=type("Tensor", (), {}))
        import nixl_cu12 as nixl
        self.error = nixl._api.nixlBind.nixlBackendError
        self.agent = nixl.nixl_agent("engine", nixl.nixl_agent_config(backends=[]))
        self.agent.create_backend("POSIX", {queue: "true"})
        self.size, self.count = size, count
        self.step = -(-size // 4096) * 4096
        self.memory = mmap.mmap(-1, self.step * count)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.agent.register_memory([(self.address, len(self.memory), 0, "")], "DRAM", backends=["POSIX"])

    def fill(self, seeds):
        for i, seed in enumerate(seeds):
            self.memory[i * self.step:i * self.step + self.size] = blob(seed, self.size)

    def wrong(self, seeds):
        """Which blocks of memory are not those of SEEDS."""
        return [i for i, seed in enumerate(seeds)
                if self.memory[i * self.step:i * self.step + self.size] != blob(seed, self.size)]

    def transfer(self, operation, places):
        """Moves block i to or from PLACES[i], (offset, descriptor, text); what the agent said."""
        files = [(offset, self.size, fd, text) for offset, fd, text in places]
        registered = self.agent.register_memory(files, "FILE", backends=["POSIX"])
        memory = [(self.address + i * self.step, self.size, 0) for i in range(len(places))]
        handle = self.agent.initialize_xfer(
            operation, self.agent.get_xfer_descs(memory, "DRAM"), registered.trim(), "engine")
        state = self.agent.transfer(handle)
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
        self.agent.release_xfer_handle(handle)
        self.agent.deregister_memory(registered)
        return state

    def present(self, paths):
        """Which files there are, as the plugin sees it."""
        answers = self.agent.query_memory([(0, 0, 0, os.fspath(p)) for p in paths], "POSIX", "FILE")
        return [answer is not None for answer in answers]

    def move(self, operation, paths, flags):
        fds = [os.open(path, flags, 0o644) for path in paths]
        try:
            return self.transfer(operation, [(0, fd, "") for fd in fds])
        finally:
            for fd in fds:
                os.close(fd)

    def store(self, paths, seeds, direct):
        self.fill(seeds)
        assert self.move("WRITE", paths, os.O_RDWR | os.O_CREAT | direct) == "DONE"

    def load(self, paths, direct):
        self.memory[:] = bytes(len(self.memory))
        assert self.move("READ", paths, os.O_RDWR | direct) == "DONE"


def names(folder, count, first=0):
    made = [folder / f"{i % 256:02x}" / f"{i:064x}_model_0_1" for i in range(first, first + count)]
    for path in made:
        path.parent.mkdir(exist_ok=True)
    return made


def by_path(mode, paths):
    """Places for the plugin to open: each needs a number of its own."""
    return [(0, i, f"{mode}:{path}") for i, path in enumerate(paths)]


def test_store_query_and_load(kv, version, queue):
    """One process stores, looks and loads; then another one loads."""
    shapes = [(size, direct, names(kv.dir, 6, 100 * i))
              for i, (size, direct) in enumerate(itertools.product(SIZES, BOTH))]

    def store():
        for size, direct, paths in shapes:
            engine = Engine(version, queue, size, 6)
            assert engine.present(paths) == [False] * 6
            engine.store(paths, range(6), direct)
            assert engine.present(paths) == [True] * 6
            engine.load(paths, direct)
            assert engine.wrong(range(6)) == [], f"{size} bytes"

    def load():
        for size, direct, paths in shapes:
            engine = Engine(version, queue, size, 6)
            engine.load(paths, direct)
            assert engine.wrong(range(6)) == [], f"{size} bytes"

    in_child(store)
    for size, _, paths in shapes:
        assert [get(path) for path in paths] == [blob(i, size) for i in range(6)]
    in_child(load)


def test_load_from_the_drive(fresh, version, queue):
    kv = fresh()
    paths = names(kv.mnt, 16)
    in_child(lambda: Engine(version, queue, SIZES[1], 16).store(paths, range(16), os.O_DIRECT))
    kv.remount()

    def load():
        engine = Engine(version, queue, SIZES[1], 8)
        for first, direct in ((0, os.O_DIRECT), (8, 0)):
            engine.load(paths[first:first + 8], direct)
            assert engine.wrong(range(first, first + 8)) == []

    in_child(load)


def test_files_opened_by_path_and_renamed(kv, version, queue):
    """SGLang's path mode, where the plugin opens the files; LMCache's temporary files."""
    paths = names(kv.dir, 8)
    size = SIZES[1]

    def work():
        engine = Engine(version, queue, size, 4)
        engine.fill(range(4))
        assert engine.transfer("WRITE", by_path("rw,create,direct", paths[:4])) == "DONE"
        engine.memory[:] = bytes(len(engine.memory))
        assert engine.transfer("READ", by_path("ro,direct", paths[:4])) == "DONE"
        assert engine.wrong(range(4)) == []

        temporary = [f"{path}.tmp.{uuid.uuid4()}" for path in paths[4:]]
        engine.fill(range(4, 8))
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_DIRECT
        assert engine.move("WRITE", temporary, flags) == "DONE"
        for one, path in zip(temporary, paths[4:], strict=True):
            os.rename(one, path)
        engine.load(paths[4:], os.O_DIRECT)
        assert engine.wrong(range(4, 8)) == []

    in_child(work)
    assert [get(path) for path in paths] == [blob(i, size) for i in range(8)]


def test_a_pool_of_open_files(kv, version, queue):
    """Files that are never sized: slot after slot is written, in no order, and read back."""
    size, slots = 64 * KIB, 32

    def work():
        engine = Engine(version, queue, size, slots)
        fds = [os.open(kv.dir / f"obj_{i}.bin", os.O_RDWR | os.O_CREAT | BOTH[i % 2], 0o644)
               for i in range(4)]
        places = [(i * 7 % slots // 4 * size, fds[i * 7 % slots % 4], "") for i in range(slots)]
        for turn in range(3):
            seeds = range(turn, turn + slots)
            engine.fill(seeds)
            assert engine.transfer("WRITE", places) == "DONE"
            engine.memory[:] = bytes(len(engine.memory))
            assert engine.transfer("READ", places) == "DONE"
            assert engine.wrong(seeds) == []

    in_child(work)


def test_a_short_read_is_not_noticed_by_the_old_version(elsewhere, version, queue):
    """Why a file must never be seen shorter than it will be: what the client makes of one."""
    path = elsewhere / "block"
    put(path, blob(1, 1000))

    def work():
        engine = Engine(version, queue, MIB, 1)
        try:
            return engine.move("READ", [path], os.O_RDONLY)
        except engine.error:
            return "ERR"

    assert in_child(work) == ("DONE" if version == "1.4.0" else "ERR")


def test_p3_a_block_that_is_being_stored_is_loaded_whole(fresh, version, queue):
    """A reader that found the name opens it while half of the block is written."""
    kv = fresh(read_wait="600s")
    (path,) = names(kv.dir, 1)
    half = MIB
    begun, seen = os.pipe(), os.pipe()

    def store():
        engine = Engine(version, queue, half, 2)
        engine.memory[:] = blob(1, 2 * half)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o644)
        assert engine.transfer("WRITE", [(0, fd, "")]) == "DONE"
        os.write(begun[1], b".")
        os.read(seen[0], 1)
        eventually(lambda: kv.status()["parked"] == 1, what="a reader that waits")
        assert engine.transfer("WRITE", [(0, fd, ""), (half, fd, "")]) == "DONE"
        os.close(fd)

    def load():
        engine = Engine(version, queue, 2 * half, 1)
        os.read(begun[0], 1)
        assert engine.present([path]) == [True]
        os.write(seen[1], b".")
        assert engine.transfer("READ", by_path("ro,direct", [path])) == "DONE"
        return engine.wrong([1])

    writer = Child(store)
    assert in_child(load) == []
    writer.result()
    for fd in begun + seen:
        os.close(fd)


def test_p5_ranks_store_the_same_blocks_at_once(kv, version, queue):
    paths = names(kv.dir, 8)

    def rank(number):
        engine = Engine(version, queue, SIZES[1], 8)
        for _ in range(3):
            engine.store(paths, range(8), BOTH[number % 2])
            engine.load(paths, os.O_DIRECT)
            assert engine.wrong(range(8)) == []

    parallel(rank, range(3))
    assert [get(path) for path in paths] == [blob(i, SIZES[1]) for i in range(8)]


def test_k1_three_times_what_the_store_holds(fresh, version, queue):
    """No store fails or comes out short; each block is there whole, or gone."""
    kv = fresh(size="128M", dram="64M")
    count, size = 192, 2 * MIB
    paths = names(kv.mnt, count)

    def work():
        engine = Engine(version, queue, size, 4)
        for i in range(0, count, 4):
            engine.store(paths[i:i + 4], range(i, i + 4), BOTH[i // 4 % 2])
        hits = 0
        for i, path in enumerate(paths):
            if engine.present([path])[0]:
                with contextlib.suppress(FileNotFoundError):
                    engine.load([path], BOTH[i % 2])
                    assert engine.wrong([i]) == [], f"block {i}"
                    hits += 1
        return hits

    hits = in_child(work)
    assert 10 <= hits <= 64, f"{hits} of {count} blocks are left"
