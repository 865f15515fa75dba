# SPDX-License-Identifier: Apache-2.0
"""Engines that lose their device, and users who want too much."""
import errno

import pytest
from data import blob
from gpu import Engine
from gpufixtures import (FAKE, SIZE, digest, engine_of, mode,
                         pytest_generate_tests, start, store)  # noqa: F401
from procs import eventually
from syscalls import fails


@FAKE
def test_device__lost_in_an_engine_is_lost_there_alone(start):
    """It is told so in words, can still give back what it has, and the next process starts anew."""
    helper = start()
    one, two = (str(store(helper, n, blob(i, SIZE))) for i, n in enumerate(("one", "two")))
    lost, other = Engine(), engine_of(helper)
    helper.engines.append(lost)
    lost.connect(str(helper.socket), "cuda", {**helper.engine_environment(),
                                              "FAKECU_FAIL": "cuMemImportFromShareableHandle:2:700"})
    lost.map(one)
    with pytest.raises(OSError, match=r"lost to this process \(CUDA error 700\)") as e:
        lost.map(two)
    assert e.value.errno == errno.EIO
    asked = [helper.stats()[n] for n in ("hits", "misses")]
    fails(errno.EIO, lost.map, one)
    assert [helper.stats()[n] for n in ("hits", "misses")] == asked, "the helper is not asked"
    assert other.digest(other.map(two)[0]) == digest(blob(1, SIZE))
    assert eventually(lambda: helper.stats()["maps"] == 2)
    lost.stop(kill=True)
    assert eventually(lambda: helper.stats()["maps"] == 1)
    assert helper.process.poll() is None
