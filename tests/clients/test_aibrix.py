# SPDX-License-Identifier: Apache-2.0
"""AIBrix KV cache offloading (aibrix_kvcache), its connector SHFS, unchanged, from its wheel."""
import pytest
from engines import Engine
from packages import unpack
from scenarios import *  # noqa: F403 - every engine's tests

VARIANTS = {"shfs": ("Shfs", {})}
SHARED_TEMPORARY_NAMES = True


@pytest.fixture(scope="module")
def engine():
    one = Engine("aibrix", unpack("aibrix-kvcache==0.8.0", "aibrix_kvcache/"))
    yield one
    one.close()
