# SPDX-License-Identifier: Apache-2.0
"""SGLang's HiCache: HiCacheFile, and HiCacheHF3FS over the client of the package that uses a file."""
import hashlib
import signal
import types

import stubs
import torch
from blocks import check
from data import blob

stubs.newer_torch()
stubs.packages("sglang", "sglang.srt", "sglang.srt.mem_cache", "sglang.srt.mem_cache.storage")
stubs.provide("sglang.srt.utils")
stubs.provide("sglang.srt.utils.common", human_readable_int=int)
stubs.stub("sglang.srt.mem_cache.pool_host", "sglang.srt.observability.metrics_collector",
           # The metadata server's side of HTTP; its local client is a class in the same module.
           "orjson", "requests", "requests.adapters", "fastapi", "fastapi.responses")

from sglang.srt.mem_cache.hicache_storage import (  # noqa: E402
    HiCacheFile,
    HiCacheStorageConfig,
    PoolName,
    PoolTransfer,
)


def _config(rank=0, ranks=1, **extra):
    return HiCacheStorageConfig(
        tp_rank=rank, tp_size=ranks, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1,
        is_mla_model=False, enable_storage_metrics=False, is_page_first_layout=True,
        model_name="meta-llama/Llama-3.1-8B-Instruct", extra_config=extra)


def _key(number):
    return hashlib.sha256(str(number).encode()).hexdigest()


def _page(number, size):
    return torch.frombuffer(bytearray(blob(number, size)), dtype=torch.bfloat16)


def _check(number, page, size):
    return check(number, size, page.view(torch.uint8).numpy())


class _HostPool:
    """The host's pool of pages, as the controller of the cache passes it to the storage."""

    page_size = 1

    def __init__(self, size):
        self.size = size
        self.pages = {}

    def get_dummy_flat_data_page(self):
        return torch.zeros(self.size // 2, dtype=torch.bfloat16)

    def get_data_page(self, index, flat=True):
        return _page(index, self.size)

    def set_from_flat_data_page(self, index, page):
        self.pages[index] = page


class File:
    """--hicache-storage-backend file: pages through the interface of pools (v2)."""

    def __init__(self, folder, size, rank=0, ranks=1, **extra):
        self.size = size
        self.storage = HiCacheFile(_config(rank, ranks, **extra), folder)
        self.pool = _HostPool(size)
        self.storage.register_mem_host_pool_v2(self.pool, PoolName.KV)

    def _transfer(self, numbers):
        return [PoolTransfer(PoolName.KV, host_indices=torch.tensor(numbers),
                             keys=[_key(n) for n in numbers])]

    def store(self, numbers):
        stored = self.storage.batch_set_v2(self._transfer(numbers))[PoolName.KV]
        assert all(stored), f"stored: {stored}"

    def offer(self, numbers):
        """As store(), but a page may be refused: a list of booleans."""
        return self.storage.batch_set_v2(self._transfer(numbers))[PoolName.KV]

    def present(self, numbers):
        return [self.storage.exists(_key(n)) for n in numbers]

    def leading(self, numbers):
        """How many of the first ones are there: the lookup of a prefix."""
        return self.storage.batch_exists_v2([_key(n) for n in numbers]).kv_hit_pages

    def load(self, numbers):
        found = self.storage.batch_get_v2(self._transfer(numbers))[PoolName.KV]
        return [hit and _check(n, self.pool.pages.pop(n), self.size)
                for n, hit in zip(numbers, found)]

    def key(self, number):
        return _key(number)

    def clear(self):
        return self.storage.clear()

    def close(self):
        pass


class Hf3fs:
    """--hicache-storage-backend hf3fs: one preallocated file of FILE_SIZE bytes, pages at offsets."""

    def __init__(self, folder, size, file_size, jobs=4):
        from sglang.srt.mem_cache.storage.hf3fs.mini_3fs_metadata_server import (
            Hf3fsLocalMetadataClient,
        )
        from sglang.srt.mem_cache.storage.hf3fs.storage_hf3fs import HiCacheHF3FS

        self.size = size
        self.storage = HiCacheHF3FS(
            rank=0, file_path=f"{folder}/hicache.0.bin", file_size=file_size, numjobs=jobs,
            bytes_per_page=size, entries=8, client_timeout=180,
            dtype=types.SimpleNamespace(itemsize=2), metadata_client=Hf3fsLocalMetadataClient(),
            use_mock_client=True)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)

    def store(self, numbers):
        stored = self.storage._batch_set([_key(n) for n in numbers],
                                         [_page(n, self.size) for n in numbers])
        assert all(stored), f"stored: {stored}"

    def present(self, numbers):
        return [self.storage.exists(_key(n)) for n in numbers]

    def load(self, numbers):
        pages = [torch.zeros(self.size // 2, dtype=torch.bfloat16) for _ in numbers]
        found = self.storage._batch_get([_key(n) for n in numbers], pages)
        return [hit and _check(n, page, self.size)
                for n, page, hit in zip(numbers, pages, found)]

    def remove(self, numbers):
        for n in numbers:
            self.storage.delete(_key(n))

    def close(self):
        self.storage.close()
