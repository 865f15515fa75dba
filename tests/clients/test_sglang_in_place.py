# SPDX-License-Identifier: Apache-2.0
"""SGLang's HiCacheFile of the releases that write a page under its final name, unchanged."""
from scenarios import *  # noqa: F403 - every engine's tests

ENGINE = ("sglang_in_place", "sglang==0.5.6", "sglang/srt/mem_cache/hicache_storage.py")
VARIANTS = {"file": ("InPlace", {})}
