# SPDX-License-Identifier: Apache-2.0
"""AIBrix KV cache offloading: the SHFS connector of its second level."""
import asyncio
import concurrent.futures
import hashlib
import os

import stubs
import torch
from blocks import check
from data import blob

stubs.newer_torch()
stubs.packages("aibrix_kvcache", "aibrix_kvcache.l2")
# The pool allocator and the hashing of tokens, which SHFS does not use.
stubs.stub("tqdm.auto", "aibrix_kvcache.cache_hashable")

from aibrix_kvcache.l2.connectors.connector import Connector, ConnectorConfig  # noqa: E402
from aibrix_kvcache.memory.external_memory_region import ExternalMemoryRegion  # noqa: E402


class Shfs:
    """The connector as L2Cache makes it, from AIBRIX_KV_CACHE_OL_SHFS_ROOT."""

    def __init__(self, folder, size):
        os.environ["AIBRIX_KV_CACHE_OL_SHFS_ROOT"] = folder
        self.size = size
        self.executor = concurrent.futures.ThreadPoolExecutor(4)
        self.connector = Connector.create(
            ConnectorConfig("SHFS", "tests", "kv_cache", self.executor))
        assert self.connector.open().is_ok()

    def _region(self):
        return ExternalMemoryRegion(torch.zeros(self.size, dtype=torch.uint8), 0, self.size)

    @staticmethod
    def _key(number):
        return hashlib.sha256(str(number).encode()).digest()

    @staticmethod
    def _all(calls):
        async def gather():
            return await asyncio.gather(*calls)
        return asyncio.run(gather())

    @staticmethod
    def _found(status):
        assert status.is_ok() or status.is_not_found(), status
        return status.is_ok()

    def store(self, numbers):
        regions = [self._region() for _ in numbers]
        for n, region in zip(numbers, regions):
            region.fill(blob(n, self.size))
        for status in self._all(self.connector.put(self._key(n), r)
                                for n, r in zip(numbers, regions)):
            assert status.is_ok(), status

    def present(self, numbers):
        return [self._found(s) for s in
                self._all(self.connector.exists(self._key(n)) for n in numbers)]

    def load(self, numbers):
        regions = [self._region() for _ in numbers]
        found = [self._found(s) for s in
                 self._all(self.connector.get(self._key(n), r) for n, r in zip(numbers, regions))]
        return [hit and check(n, self.size, region.tobytes())
                for n, hit, region in zip(numbers, found, regions)]

    def remove(self, numbers):
        for status in self._all(self.connector.delete(self._key(n)) for n in numbers):
            assert status.is_ok(), status

    def close(self):
        assert self.connector.close().is_ok()
        self.executor.shutdown()
