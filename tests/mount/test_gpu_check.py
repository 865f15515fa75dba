# SPDX-License-Identifier: Apache-2.0
"""kvgpud --check sampled: device memory that does not hold what was loaded is given up."""
import errno
import mmap
import os
import signal

import gpu
import pytest
from data import MIB, blob
from gpu import Raw
from gpufixtures import (EVERYWHERE, FAKE, HOST, SIZE, SMALL, cold, digest, engine_of, mode,
                         packed_ticket, pytest_generate_tests, start, store)  # noqa: F401
from procs import eventually
from syscalls import fails

CHECK = ("--check", "sampled")


def die_after(helper, path, act):
    """A process maps PATH, does ACT with its segments' descriptors, and is killed."""
    child = os.fork()
    if child == 0:
        try:
            raw = Raw(helper)
            with open(path, "rb") as f:
                _, flags, status, _, fds = raw.ask(gpu.MAP, packed_ticket(f.fileno()), [f.fileno()])
            while status == 0 and not flags & 4 and raw.receive()[0] != gpu.READY:
                pass
            act(fds[1:])
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


def scribble(segments):
    """As a kernel that writes where it should not: the descriptors carry no rights."""
    for fd in segments:
        size = os.fstat(fd).st_size
        with mmap.mmap(fd, size) as memory:
            memory[:] = b"\xa5" * size


@EVERYWHERE
def test_check__what_is_right_is_left_alone(start):
    helper = start(*CHECK, *SMALL)
    path = store(helper, "f", data := blob(1, SIZE))
    engine = engine_of(helper)
    assert engine.digest(engine.map(str(path))[0]) == digest(data)
    eventually(lambda: helper.stats()["checked"] == 11)
    die_after(helper, path, lambda segments: None)
    eventually(lambda: helper.stats()["checked"] == 22)
    cold(helper, path)
    engine.unmap(1)
    eventually(lambda: helper.stats()["maps"] == 0)
    engine.evict(str(path))
    key = engine.map(str(path), 0, 0, 0, os.O_DIRECT)[0]
    assert engine.digest(key) == digest(data)
    stats = helper.stats()
    assert (stats["checked"], stats["check_errors"], stats["resident"]) == (33, 0, 1)


@FAKE
def test_check__who_wrote_to_it_and_died_is_found_out(start):
    """The entry goes, who has it mapped is told, and the next map stages it anew."""
    helper = start(*CHECK)
    path, other = store(helper, "f", data := blob(1, SIZE)), store(helper, "g", more := blob(2, SIZE))
    engine = engine_of(helper)
    key, kept = engine.map(str(path))[0], engine.map(str(other))[0]
    die_after(helper, path, scribble)
    assert [e[:2] for e in engine.events(60)] == [(key, 2)]
    engine.unmap(key)
    eventually(lambda: helper.stats()["used"] == 22 * MIB)
    stats = helper.stats()
    assert (stats["check_errors"], stats["resident"], stats["staged"]) == (1, 1, 2)
    assert "does not hold what was loaded" in helper.log()
    assert engine.digest(kept) == digest(more)
    assert engine.digest(engine.map(str(path))[0]) == digest(data)
    assert helper.stats()["staged"] == 3


@FAKE
def test_check__off_is_the_default(start):
    helper = start()
    path = store(helper, "f", blob(1, SIZE))
    engine = engine_of(helper)
    engine.map(str(path))
    die_after(helper, path, scribble)
    eventually(lambda: helper.stats()["maps"] == 1)
    stats = helper.stats()
    assert (stats["checked"], stats["check_errors"], stats["resident"]) == (0, 0, 1)


@FAKE
def test_check__one_that_fails_lets_nobody_have_the_file(start):
    """Before READY: an error, and the next try works."""
    helper = start(*CHECK)
    path = str(store(helper, "f", data := blob(1, SIZE)))
    engine = engine_of(helper)
    helper.tell("fail cuMemcpyBatchAsync:1:999")
    fails(errno.EIO, engine.map, path)
    helper.tell()
    eventually(lambda: helper.stats()["used"] == 0)
    assert helper.stats()["failed"] == 1

    def again():
        try:
            return engine.map(path)[0]
        except OSError:
            return None

    assert engine.digest(eventually(again)) == digest(data)


@FAKE
def test_check__many_deaths_at_once(start):
    """Each leaves what it had; what is right is still there afterwards."""
    helper = start(*CHECK, *SMALL)
    path = store(helper, "f", data := blob(1, SIZE))
    engine = engine_of(helper)
    key = engine.map(str(path))[0]
    for _ in range(20):
        die_after(helper, path, lambda segments: None)
    eventually(lambda: helper.stats()["maps"] == 1)
    assert helper.stats()["check_errors"] == 0
    assert engine.digest(key) == digest(data)


@HOST
@pytest.mark.parametrize("value", ["", "all", "on"])
def test_check__bad_values(start, value):
    with pytest.raises(AssertionError, match="bad value"):
        start("--check", value)
