# SPDX-License-Identifier: Apache-2.0
"""LMCache: LocalDiskBackend, FSConnector, and the L2 adapters fs (Python) and fs_native (C++)."""
import asyncio
import hashlib
import os
import select
import sys
import threading
import types

os.environ["LMCACHE_LOG_LEVEL"] = "ERROR"

import stubs  # noqa: E402
import torch  # noqa: E402
from blocks import check  # noqa: E402
from data import blob  # noqa: E402


class _Quiet:
    """Statistics nobody looks at."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


stubs.newer_torch()
stubs.torch_libraries()
stubs.packages("lmcache", "lmcache.v1.storage_backend", "lmcache.v1.storage_backend.connector",
               "lmcache.v1.distributed.l2_adapters", "lmcache.integration.vllm")
vars(sys.modules["lmcache"]).update(
    device_ops=types.SimpleNamespace(), torch_device_type="cpu",
    torch_dev=types.SimpleNamespace(is_available=lambda: False))
stubs.stub("lmcache.usage_telemetry", "lmcache.v1.storage_backend.local_cpu_backend",
           "lmcache.v1.cache_controller.message", "lmcache.v1.pin_monitor",
           "lmcache.v1.storage_backend.batched_message_sender", "lmcache.v1.system_detection")
stubs.stub("lmcache.observability").LMCStatsMonitor.GetOrCreate = staticmethod(_Quiet)
stubs.provide("lmcache.integration.vllm.utils", get_size_bytes=lambda shapes, dtypes: sum(
    shape.numel() * dtype.itemsize for shape, dtype in zip(shapes, dtypes)))

from lmcache.utils import CacheEngineKey  # noqa: E402
from lmcache.v1.config import LMCacheEngineConfig  # noqa: E402
from lmcache.v1.distributed.api import ObjectKey  # noqa: E402
from lmcache.v1.distributed.l2_adapters import (  # noqa: E402
    fs_l2_adapter,
    fs_native_l2_adapter,
)
from lmcache.v1.memory_management import (  # noqa: E402
    MemoryFormat,
    MemoryObjMetadata,
    TensorMemoryObj,
)
from lmcache.v1.metadata import LMCacheMetadata  # noqa: E402
from lmcache.v1.storage_backend.connector.fs_connector import FSConnector  # noqa: E402
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend  # noqa: E402

MODEL = "meta-llama/Llama-3.1-8B-Instruct"
TOKENS = 256


def _memory(size, content=None):
    """A chunk of memory as an allocator gives it out: 4096-aligned, which O_DIRECT asks for."""
    raw = torch.zeros(size + 4096, dtype=torch.uint8)
    raw = raw[-raw.data_ptr() % 4096:][:size]
    if content is not None:
        raw.numpy()[:] = memoryview(content)
    shape = torch.Size((2, 1, TOKENS, size // TOKENS // 4))
    meta = MemoryObjMetadata(shape, torch.bfloat16, 0, size, 1, fmt=MemoryFormat.KV_2LTD,
                             shapes=[shape], dtypes=[torch.bfloat16])
    return TensorMemoryObj(raw, meta, None)


def _digest(number):
    return hashlib.sha256(str(number).encode()).digest()


def _key(number):
    return CacheEngineKey(MODEL, 1, 0, int.from_bytes(_digest(number)[:8], "big"), torch.bfloat16)


class _Allocator:
    """Stands in for LocalCPUBackend, which wants pinned memory."""

    def __init__(self, size, config):
        self.size = size
        self.config = config
        self.metadata = LMCacheMetadata(MODEL, 1, 1, 0, 0, torch.bfloat16,
                                        (1, 2, TOKENS, 1, size // TOKENS // 4))

    def allocate(self, *args, **kwargs):
        return _memory(self.size)


class _Loop:
    """The event loop that an engine runs in a thread of its own."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(80)


def _check(number, size, memory):
    return check(number, size, memory.byte_array)


class Disk(_Loop):
    """local_disk: in place, with an index in memory; MAX_GIB is its max_local_disk_size."""

    def __init__(self, folder, size, direct=False, max_gib=64.0):
        super().__init__()
        self.size = size
        config = LMCacheEngineConfig.from_defaults(
            local_disk=folder, max_local_disk_size=max_gib, extra_config={"use_odirect": direct})
        self.backend = LocalDiskBackend(config, self.loop, _Allocator(size, config), "cpu")

    def store(self, numbers):
        done = threading.Semaphore(0)
        numbers = [n for n in numbers if not self.backend.contains(_key(n))]
        for n in numbers:
            self.backend.submit_put_task(_key(n), _memory(self.size, blob(n, self.size)),
                                         on_complete_callback=lambda key: done.release())
        for _ in numbers:
            assert done.acquire(timeout=180), "a put was not completed"

    def adopt(self, numbers):
        """What LMCache lacks: blocks of an earlier engine, taken into the index in memory."""
        memory = _memory(self.size)
        for n in numbers:
            self.backend.insert_key(_key(n), self.size, memory.meta.shape, torch.bfloat16,
                                    MemoryFormat.KV_2LTD)

    def present(self, numbers):
        return [self.backend.contains(_key(n)) for n in numbers]

    def load(self, numbers):
        # For more than one key: get_blocking, for one alone, raises KeyError if its file is gone.
        assert len(numbers) > 1
        found = self.backend.batched_get_blocking([_key(n) for n in numbers])
        return [memory is not None and _check(n, self.size, memory)
                for n, memory in zip(numbers, found)]

    def remove(self, numbers):
        return [self.backend.remove(_key(n)) for n in numbers]

    def close(self):
        self.backend.close()


class Remote(_Loop):
    """remote_url fs://: a temporary name, then rename, with a header unless it is O_DIRECT."""

    def __init__(self, folder, size, direct=False, header=True, temporary=None):
        super().__init__()
        self.size = size
        config = LMCacheEngineConfig.from_defaults(extra_config={
            "save_chunk_meta": header, "fs_connector_use_odirect": direct,
            "fs_connector_relative_tmp_dir": temporary})
        self.backend = FSConnector(self.loop, _Allocator(size, config), config,
                                   base_paths_str=folder)

    def store(self, numbers):
        async def put():
            await asyncio.gather(*(self.backend.put(_key(n), _memory(self.size, blob(n, self.size)))
                                   for n in numbers))
        self.run(put())

    def present(self, numbers):
        async def exist():
            return await asyncio.gather(*(self.backend.exists(_key(n)) for n in numbers))
        return list(self.run(exist()))

    def load(self, numbers):
        async def get():
            return await asyncio.gather(*(self.backend.get(_key(n)) for n in numbers))
        return [memory is not None and _check(n, self.size, memory)
                for n, memory in zip(numbers, self.run(get()))]

    def remove(self, numbers):
        return [self.backend.remove_sync(_key(n)) for n in numbers]

    def listed(self):
        return len(self.run(self.backend.list()))

    def close(self):
        self.run(self.backend.close())


class _Adapter:
    """An L2 adapter of the multi-process mode, driven as its storage controllers drive it."""

    def __init__(self, adapter, size):
        self.size = size
        self.adapter = adapter

    @staticmethod
    def _keys(numbers):
        return [ObjectKey(_digest(n), MODEL, 0x01000100) for n in numbers]

    def _wait(self, descriptor, query):
        while True:
            result = query()
            if result is not None:
                return result
            assert select.select([descriptor], [], [], 80)[0], "an L2 task was not completed"
            os.read(descriptor, 8)

    @staticmethod
    def _bits(bitmap, count):
        return [bitmap.test(i) for i in range(count)]

    def store(self, numbers):
        memory = [_memory(self.size, blob(n, self.size)) for n in numbers]
        task = self.adapter.submit_store_task(self._keys(numbers), memory)
        done = {}

        def completed():
            done.update(self.adapter.pop_completed_store_tasks())
            return done.get(task)
        result = self._wait(self.adapter.get_store_event_fd(), completed)
        assert result.is_successful(), "the store task failed"

    def present(self, numbers):
        keys = self._keys(numbers)
        task = self.adapter.submit_lookup_and_lock_task(keys, {})
        bitmap = self._wait(self.adapter.get_lookup_and_lock_event_fd(),
                            lambda: self.adapter.query_lookup_and_lock_result(task))
        self.adapter.submit_unlock(keys)
        return self._bits(bitmap, len(numbers))

    def load(self, numbers):
        memory = [_memory(self.size) for _ in numbers]
        task = self.adapter.submit_load_task(self._keys(numbers), memory)
        bitmap = self._wait(self.adapter.get_load_event_fd(),
                            lambda: self.adapter.query_load_result(task))
        found = self._bits(bitmap, len(numbers))
        return [hit and _check(n, self.size, m) for n, hit, m in zip(numbers, found, memory)]

    def remove(self, numbers):
        self.adapter.delete(self._keys(numbers))

    def close(self):
        self.adapter.close()


class Files(_Adapter):
    """L2 adapter fs."""

    def __init__(self, folder, size, **options):
        config = fs_l2_adapter.FSL2AdapterConfig.from_dict({"base_path": folder, **options})
        super().__init__(fs_l2_adapter._create_fs_adapter(config), size)


class Native(_Adapter):
    """L2 adapter fs_native: its C++ connector, with four threads."""

    def __init__(self, folder, size, **options):
        config = fs_native_l2_adapter.FSNativeL2AdapterConfig.from_dict(
            {"base_path": folder, **options})
        super().__init__(fs_native_l2_adapter._create_fs_native_l2_adapter(config), size)
