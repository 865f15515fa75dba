# SPDX-License-Identifier: Apache-2.0
"""SGLang's HiCacheFile as it was until it learnt to rename: the final name, written in place."""
import hashlib

import stubs
import torch
from blocks import check
from data import blob

stubs.packages("sglang", "sglang.srt", "sglang.srt.mem_cache")
stubs.stub("sglang.srt.mem_cache.memory_pool_host")

from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig  # noqa: E402


class InPlace:
    """--hicache-storage-backend file."""

    def __init__(self, folder, size):
        self.size = size
        self.storage = HiCacheFile(HiCacheStorageConfig(
            tp_rank=0, tp_size=1, is_mla_model=False, is_page_first_layout=True,
            model_name="meta-llama/Llama-3.1-8B-Instruct"), folder)

    @staticmethod
    def _key(number):
        return hashlib.sha256(str(number).encode()).hexdigest()

    def store(self, numbers):
        pages = [torch.frombuffer(bytearray(blob(n, self.size)), dtype=torch.bfloat16)
                 for n in numbers]
        assert self.storage.batch_set([self._key(n) for n in numbers], pages)

    def present(self, numbers):
        return [self.storage.exists(self._key(n)) for n in numbers]

    def load(self, numbers):
        pages = [torch.zeros(self.size // 2, dtype=torch.bfloat16) for _ in numbers]
        found = self.storage.batch_get([self._key(n) for n in numbers], pages)
        return [page is not None and check(n, self.size, page.view(torch.uint8).numpy())
                for n, page in zip(numbers, found)]

    def close(self):
        pass
