# SPDX-License-Identifier: Apache-2.0
"""SGLang's HiCacheFile of the releases that write a page under its final name, unchanged."""
import pytest
from engines import Engine
from packages import unpack
from scenarios import *  # noqa: F403 - every engine's tests

VARIANTS = {"file": ("InPlace", {})}


@pytest.fixture(scope="module")
def engine():
    one = Engine("sglang_in_place",
                 unpack("sglang==0.5.6", "sglang/srt/mem_cache/hicache_storage.py"))
    yield one
    one.close()
