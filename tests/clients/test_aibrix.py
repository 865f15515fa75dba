# SPDX-License-Identifier: Apache-2.0
"""AIBrix KV cache offloading (aibrix_kvcache), its connector SHFS, unchanged, from its wheel."""
from scenarios import *  # noqa: F403 - every engine's tests

ENGINE = ("aibrix", "aibrix-kvcache==0.8.0", "aibrix_kvcache/")
VARIANTS = {"shfs": ("Shfs", {})}
SHARED_TEMPORARY_NAMES = True
