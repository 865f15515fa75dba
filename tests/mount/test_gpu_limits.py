# SPDX-License-Identifier: Apache-2.0
"""Engines that lose their device, and users who want too much."""
import errno
import os

import gpu
import pytest
from data import MIB, blob
from gpu import Engine, Raw
from gpufixtures import (FAKE, HOST, SIZE, damage, digest, engine_of, mode, packed_ticket,
                         pytest_generate_tests, start, store)  # noqa: F401
from procs import NOBODY, eventually
from syscalls import fails


@HOST
@pytest.mark.parametrize("what", ["another file", "another version", "a writer's"])
def test_map__a_descriptor_of_something_else_gives_nothing(start, what):
    """What is not on the drives as it should be is read through it; the ticket was of the file."""
    helper = start()
    path, other = store(helper, "f", blob(1, SIZE)), store(helper, "g", blob(2, SIZE))
    damage(helper, path)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    ticket = packed_ticket(fd)
    if what == "another version":
        os.rename(other, path)
        wrong = os.open(path, os.O_RDONLY)
    else:
        wrong = os.open(other, os.O_RDONLY if what == "another file" else os.O_RDWR)
    raw = Raw(helper)
    kind, _, status, _, fds = raw.ask(gpu.MAP, ticket, [wrong])
    assert (kind, status) == (gpu.MAP, 0)
    while kind != gpu.READY:
        kind, _, status, _, _ = raw.receive()
    assert status == -errno.ESTALE
    raw.send(gpu.UNMAP, map_id=1)
    for each in (*fds, fd, wrong):
        os.close(each)
    raw.close()
    assert helper.stats()["from_file_bytes"] == 0


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


def test_share__of_device_memory(start):
    """A user's files make way for his others; what he has mapped does not take what is left to others."""
    helper = start("--group", "nogroup")
    paths = [str(store(helper, f"f{i}", blob(i, 60 * MIB))) for i in range(3)]
    root, nobody = engine_of(helper), engine_of(helper, uid=NOBODY, gid=NOBODY)
    assert helper.stats()["share"] == 256 * MIB - 256 * MIB // 100 * 50
    theirs = nobody.map(paths[0])[0]
    for path in paths:
        root.unmap(root.map(path)[0])
    assert root.stats(paths[0])["asked_resident"] == 60 * MIB, "that of the other user"
    stats = helper.stats()
    assert (stats["evicted"], stats["used"]) == (1, 180 * MIB)
    mine = [root.map(path)[0] for path in paths[1:]]
    fails(errno.ENOBUFS, root.map, paths[0])
    nobody.map(paths[1])
    with pytest.raises(OSError, match="share of device memory"):
        nobody.map(paths[2])
    root.unmap(mine[0])
    assert root.read(root.map(paths[0])[0], 0, 9) == blob(0, 9)
    assert nobody.read(theirs, 0, 9) == blob(0, 9)


@HOST
def test_share__of_connections(start):
    """Ten are one percent. Some more are told so, the rest is ended, and all of it is over with the first ten."""
    helper = start("--share", "1%")
    some = [Raw(helper) for _ in range(10)]
    for raw in some:
        assert raw.ask(gpu.HELLO)[2] == 0
    kvg = gpu.load_kvg()
    with pytest.raises(OSError, match="as many connections as it allows") as e:
        kvg.Context(str(helper.socket), control=True)
    assert e.value.errno == errno.EUSERS
    told = [Raw(helper) for _ in range(8)]
    for raw in told:
        assert raw.ask(gpu.HELLO)[2] == -errno.EUSERS
        assert raw.ask(gpu.STAT)[2] == -errno.EUSERS
    with pytest.raises(OSError, match="has ended the connection") as e:
        kvg.Context(str(helper.socket), control=True)
    assert e.value.errno == errno.EPROTONOSUPPORT
    assert some[0].ask(gpu.STAT)[2] == 0
    for raw in some + told:
        raw.close()
    assert start().stats()["share"] == 256 * MIB, "all of it, to the byte, without --group"
    assert eventually(lambda: helper.stats()["clients"] == 1)
