# SPDX-License-Identifier: Apache-2.0
"""Parts of files in device memory, and what is staged before what."""
import errno

from data import MIB, blob
from gpu import NOSTAGE
from gpufixtures import (EVERYWHERE, SIZE, cold, engine_of, mode,
                         pytest_generate_tests, start, store)  # noqa: F401
from procs import eventually
from syscalls import fails


@EVERYWHERE
def test_map__a_range_brings_only_its_segments(start):
    """Also of a file that is larger than all of the helper's memory."""
    helper = start("--segment", "4M", "--hbm", "18M")
    path = str(store(helper, "f", data := blob(1, SIZE)))
    cold(helper, path)
    engine = engine_of(helper)
    fails(errno.E2BIG, engine.map, path)
    middle = engine.map(path, 9 * MIB, 2 * MIB)[0]
    assert engine.read(middle) == data[9 * MIB:11 * MIB]
    stats = engine.stats(path)
    assert (stats["used"], stats["staged_bytes"], stats["asked_resident"]) == (3 * (4 * MIB,))
    # Less than a segment can be at the end: it comes with the one before.
    end = engine.map(path, SIZE - 10)[0]
    assert engine.read(end) == data[-10:]
    stats = engine.stats(path)
    assert (stats["misses"], stats["hits"], stats["entries"]) == (2, 0, 2)
    assert stats["asked_resident"] == 4 * MIB + SIZE - 16 * MIB
    # Part of what is there needs nothing; what reaches out of it is another stretch.
    part = engine.map(path, 8 * MIB, 4 * MIB, NOSTAGE)[0]
    assert engine.read(part) == data[8 * MIB:12 * MIB]
    fails(errno.ENODATA, engine.map, path, 7 * MIB, 2 * MIB, NOSTAGE)
    over = engine.map(path, 5 * MIB, 5 * MIB)[0]
    assert engine.read(over) == data[5 * MIB:10 * MIB]
    stats = engine.stats(path)
    assert (stats["misses"], stats["hits"]) == (3, 1)
    assert stats["asked_resident"] == 8 * MIB + SIZE - 16 * MIB, "what two have counts once"
    for key in (middle, end, part, over):
        engine.unmap(key)
    assert stats["used"] == 14 * MIB, "and is there once"
    assert engine.evict(path) == 14 * MIB


def test_prefetch__a_range_of_any_priority(start):
    helper = start("--segment", "2M")
    path = str(store(helper, "f", blob(1, SIZE)))
    engine = engine_of(helper)
    for i, prio in enumerate((0, 1, -1, 2**31 - 1, -2**31)):
        engine.prefetch(path, 4 * i * MIB, 2 * MIB + 1, prio)
        eventually(lambda n=i + 1: engine.stats(path)["asked_resident"] == 4 * n * MIB)
    for off, length in ((SIZE, 1), (0, SIZE + 1)):
        fails(errno.EINVAL, engine.prefetch, path, off, length)
