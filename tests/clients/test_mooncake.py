# SPDX-License-Identifier: Apache-2.0
"""Mooncake's store with SSD offload, unchanged, out of its wheel without CUDA; over TCP, in one host.

A master, and a client in a process of its own with so little memory that most objects live in its file
storage on the mount, from where they are read back. Its three backends, with POSIX calls or io_uring:

    bucket   <id>.bucket and <id>.meta: O_TRUNC, pwritev, fdatasync; reads O_DIRECT
    keys     a file for each key, two levels of directories
    offset   one preallocated kv_cache.data, written and read at 4 KiB offsets; cleared at a restart

It stores nothing while statvfs shows less than 256 MiB free, which is more than a small full store keeps
free; filling a large one takes too long here. So eviction is shown by taking files from under it.
"""
import os
import socket
import subprocess
import sys
import time

import pytest
from data import MIB, blob
from packages import unpack
from procs import eventually, in_child, parallel

PACKAGE = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
BACKENDS = {"bucket": "bucket_storage_backend", "keys": "file_per_key_storage_backend",
            "offset": "offset_allocator_storage_backend"}
COMBINATIONS = (("bucket", "false"), ("bucket", "true"), ("keys", "true"), ("offset", "false"),
                ("offset", "true"))

pytestmark = pytest.mark.timeout(600)  # the first test also downloads


@pytest.fixture(scope="module")
def wheel():
    return unpack(PACKAGE, "mooncake/mooncake_master", "mooncake/store.", "mooncake/libasio.",
                  "mooncake/libetcd_wrapper.", "mooncake_transfer_engine_non_cuda.libs/")


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Master:
    """mooncake_master on a port of its own, as long as the context lasts."""

    def __init__(self, wheel):
        self.port = free_port()
        self.command = [
            wheel / "mooncake" / "mooncake_master", f"--rpc_port={self.port}",
            "--rpc_address=127.0.0.1", f"--metrics_port={free_port()}", "--metrics_host=127.0.0.1",
            "--enable_offload=true", "--enable_metric_reporting=false", "--default_kv_lease_ttl=2000"]

    def answers(self):
        assert self.process.poll() is None, "mooncake_master ended"
        with socket.socket() as s:
            return s.connect_ex(("127.0.0.1", self.port)) == 0

    def __enter__(self):
        self.process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL,
                                        stderr=subprocess.DEVNULL)
        eventually(self.answers, what="a master that answers")
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()


class Client:
    """A client whose memory holds MEMORY bytes; to be made in a process of its own."""

    def __init__(self, wheel, master, folder, backend, uring, memory):
        os.environ.update({
            "MC_STORE_MEMCPY": "1", "MC_TCP_BIND_ADDRESS": "127.0.0.1",
            "MOONCAKE_OFFLOAD_STORAGE_BACKEND_DESCRIPTOR": BACKENDS[backend],
            "MOONCAKE_OFFLOAD_USE_URING": uring,
            "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1",
            "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES": str(64 * MIB),
            "MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES": str(512 * MIB),
            "MOONCAKE_OFFLOAD_BUCKET_SIZE_LIMIT_BYTES": str(16 * MIB),
            "MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT": "4"})
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # it tells every step
        sys.path.insert(0, os.fspath(wheel))
        from mooncake.store import MooncakeDistributedStore
        self.store = MooncakeDistributedStore()
        os.makedirs(folder, exist_ok=True)
        assert self.store.setup(
            f"127.0.0.1:{free_port()}", "P2PHANDSHAKE", memory, 16 * MIB, "tcp", "",
            f"127.0.0.1:{master.port}", None, True, os.fspath(folder)) == 0

    def put(self, i):
        """Waits while the memory is full of what is not offloaded yet."""
        eventually(lambda: self.store.put(f"key{i}", blob(i, MIB + i)) == 0, what=f"put {i}")

    def on_disk(self, count):
        return [i for i in range(count) if any(
            place.is_local_disk_replica() for place in self.store.get_replica_desc(f"key{i}"))]

    def check(self, i):
        """Whether object I is there; if so, its bytes are right."""
        data = self.store.get(f"key{i}")
        assert data in (b"", blob(i, MIB + i)), f"wrong bytes of key {i}"
        return data != b""

    def must_have(self, i):
        """A get that takes longer than Mooncake's lease of the object fails: then once more."""
        eventually(lambda: self.check(i), what=f"key {i}")


def store(wheel, master, folder, backend, uring):
    """Stores 60 objects in a memory of 24 MiB; which are on disk, all of which were read back."""
    client = Client(wheel, master, folder, backend, uring, 24 * MIB)
    for i in range(60):
        client.put(i)
    eventually(lambda: len(client.on_disk(60)) >= 40, what="forty objects on disk")
    time.sleep(1.5)  # what was being written is told to the master with the next heartbeat
    there = client.on_disk(60)
    for i in there:
        client.must_have(i)
    assert client.store.get_offload_rpc_read_count() >= 20, "hardly any was read from disk"
    return there


def load(wheel, master, folder, backend, uring, there):
    """What another process finds on disk after both had ended; then, when half the files are gone."""
    client = Client(wheel, master, folder, backend, uring, 24 * MIB)
    eventually(lambda: set(there) <= set(client.on_disk(60)), what="all that was stored")
    for i in there:
        client.must_have(i)
    assert client.store.get_offload_rpc_read_count() >= len(there)
    for path in list(folder.rglob("*.bucket" if backend == "bucket" else "*key*"))[::2]:
        if path.is_file():
            path.unlink()
    hits = sum(any(client.check(i) for _ in range(3)) for i in there)
    assert hits >= len(there) // 4, "files that are there are not read"
    for i in range(60, 64):
        client.put(i)
        client.must_have(i)


def test_offload_and_read_back(fresh, wheel):
    """All backends at once, each with a master; then, after a remount, other processes."""
    kv = fresh()

    def first(combination):
        with Master(wheel) as master:
            return in_child(store, wheel, master, kv.mnt / "-".join(combination), *combination)

    def second(work):
        combination, there = work
        with Master(wheel) as master:
            in_child(load, wheel, master, kv.mnt / "-".join(combination), *combination, there)

    stored = list(zip(COMBINATIONS, parallel(first, COMBINATIONS), strict=True))
    kv.remount()
    parallel(second, [work for work in stored if work[0][0] != "offset"])
