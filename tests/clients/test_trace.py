# SPDX-License-Identifier: Apache-2.0
"""Conversations replayed: two processes look up, load and store the blocks of requests in a full store.

The requests are made here, after the figures of the conversation trace that Mooncake published: sessions
come and go, each request is the last one's prompt and some blocks more, all begin with one of a few system
prompts, and two thirds of the blocks are never asked for again. The store holds a third of the distinct
blocks. With KVFS_TRACE=FILE the requests are those of a trace of that form (a JSON object with "hash_ids"
a line) instead.
"""
import contextlib
import json
import os
import random

import pytest
from data import KIB, MIB, blob, get, put
from procs import LONG, parallel

BLOCK = 16 * KIB
REQUESTS = 12_000 if LONG else 3000


def conversations(count):
    """COUNT requests, each a list of block numbers; the same at each run."""
    dice = random.Random("conversations")
    systems = [list(range(i * 10, i * 10 + dice.randrange(1, 4))) for i in range(4)]
    fresh = 1000
    sessions, requests = [], []
    for _ in range(count):
        if sessions and dice.random() < 0.45:
            # Turns follow one another soon, most often; else the user comes back at some time.
            back = int(dice.expovariate(0.04)) if dice.random() < 0.7 else dice.randrange(len(sessions))
            session = sessions.pop(-1 - min(back, len(sessions) - 1))
        else:
            session = list(dice.choice(systems))
        new = 1 + int(dice.expovariate(1 / 5))
        session += range(fresh, fresh + new)
        fresh += new
        requests.append(list(session))
        sessions.append(session)
    return requests


def recorded(path, count):
    with open(path, encoding="utf-8") as f:
        return [json.loads(line)["hash_ids"] for _, line in zip(range(count), f, strict=False)]


def path_of(folder, number):
    return f"{folder}/{number % 64:02x}/{number:016x}.bin"


def serve(folder, request):
    """What an engine does for a request; how many of its blocks were found, and how many of those read."""
    paths = [path_of(folder, number) for number in request]
    present = [os.access(path, os.F_OK) for path in paths]
    leading = present.index(False) if False in present else len(paths)
    loaded = 0
    for number, path in zip(request[:leading], paths, strict=False):
        with contextlib.suppress(FileNotFoundError):
            assert get(path) == blob(number, BLOCK), f"block {number}"
            loaded += 1
    for number, path, there in zip(request, paths, present, strict=True):
        if not there:
            temporary = f"{path}_{os.getpid()}.tmp"
            put(temporary, blob(number, BLOCK))
            os.rename(temporary, path)
    return leading, loaded


@pytest.mark.timeout(1200 if LONG else 300)
def test_k1_k2_two_processes_in_a_store_of_a_third_of_the_blocks(fresh):
    trace = os.environ.get("KVFS_TRACE")
    requests = recorded(trace, REQUESTS) if trace else conversations(REQUESTS)
    distinct = len({number for request in requests for number in request})
    asked = sum(map(len, requests))
    kv = fresh(size=f"{max(64, distinct * BLOCK // 3 >> 20)}M", dram="32M")
    for i in range(64):
        (kv.mnt / f"{i:02x}").mkdir()
    parts = (requests[::2], requests[1::2])
    done = parallel(lambda part: [serve(kv.mnt, request) for request in part], parts,
                    timeout=1000 if LONG else 200)
    hits, loaded = (sum(column) for column in zip(*done[0], *done[1], strict=True))
    evicted = kv.counter("evicted_store")
    print(f"\n{len(requests)} requests, {asked} blocks, {distinct} distinct, store {kv.size}: "
          f"hit ratio {hits / asked:.3f}, {hits - loaded} lost after the look-up, {evicted} evicted "
          f"({kv.mode})")
    assert hits > 0
    # The whole store is younger than the lease here, so that something leased has to go.
    assert hits - loaded <= hits // 50, "what was just looked up should stay"
    assert evicted > 0, "the store was never full"


def test_k2_what_was_just_written_stays_for_its_rename(fresh):
    """
    Among files in use, one that nobody has looked at yet: a store that is about to be renamed. Its
    lease is as long as theirs, up to a second.
    """
    kv = fresh(size="64M", dram="32M", lease="1s")

    def used(name):
        put(kv.mnt / name, blob(1, MIB))
        get(kv.mnt / name)

    for i in range(48):
        used(f"before-{i}")
    put(kv.mnt / "block.tmp", blob(2, MIB))
    for i in range(24):
        used(f"after-{i}")
    os.rename(kv.mnt / "block.tmp", kv.mnt / "block")
    assert get(kv.mnt / "block") == blob(2, MIB)
