# SPDX-License-Identifier: Apache-2.0
"""flock and fcntl locks: between processes, whichever nodes of a file they have open."""
import errno
import fcntl
import os
import signal
import struct
import threading

import pytest
from conftest import scratch, shared_mount
from data import get, put
from kvmount import MODES
from procs import Child, eventually
from syscalls import fails

SHARED, EXCLUSIVE, UNLOCK, NOW = fcntl.LOCK_SH, fcntl.LOCK_EX, fcntl.LOCK_UN, fcntl.LOCK_NB
FLOCK = "hhqqi4x"  # struct flock on 64-bit Linux


@pytest.fixture(name="place", params=("plain", *MODES))
def _place(request):
    """A mount where nobody waits long for the first publish of a lock file, which never comes."""
    if request.param == "plain":
        yield request.getfixturevalue("elsewhere")
    else:
        with scratch(shared_mount(request.param, read_wait="20ms")) as path:
            yield path


@pytest.fixture(params=("new", "published"))
def path(place, request):
    """A lock file: there already, or to be made by its first user."""
    if request.param == "published":
        put(place / "lock", b"content")
    return place / "lock"


def open_both(agent, path, flags=os.O_RDWR | os.O_CREAT):
    one, other = agent(), agent()
    return one, one.open(path, flags), other, other.open(path, flags)


def test_flock_excludes_another_process(path, agent):
    one, a, other, b = open_both(agent, path)
    one.flock(a, EXCLUSIVE | NOW)
    fails(errno.EWOULDBLOCK, other.flock, b, EXCLUSIVE | NOW)
    fails(errno.EWOULDBLOCK, other.flock, b, SHARED | NOW)
    one.flock(a, SHARED | NOW)
    other.flock(b, SHARED | NOW)
    fails(errno.EWOULDBLOCK, other.flock, b, EXCLUSIVE | NOW)
    one.flock(a, UNLOCK)
    other.flock(b, EXCLUSIVE | NOW)
    other.close(b)
    one.flock(a, EXCLUSIVE | NOW)


def test_ranges_exclude_another_process(path, agent):
    one, a, other, b = open_both(agent, path)
    one.lockf(a, EXCLUSIVE | NOW, 100, 0)
    fails(errno.EAGAIN, other.lockf, b, EXCLUSIVE | NOW, 1, 99)
    other.lockf(b, EXCLUSIVE | NOW, 0, 100)
    fails(errno.EAGAIN, one.lockf, a, SHARED | NOW, 1, 1 << 40)
    one.lockf(a, UNLOCK, 50, 25)
    other.lockf(b, SHARED | NOW, 50, 25)
    fails(errno.EAGAIN, other.lockf, b, SHARED | NOW, 1, 24)
    one.lockf(a, SHARED | NOW, 25, 0)
    other.lockf(b, SHARED | NOW, 25, 0)


def test_readers_and_writers_of_a_published_file_exclude_each_other(place, agent):
    put(place / "lock", b"content")
    reader, writer = agent(), agent()
    a = reader.open(place / "lock")
    b = writer.open(place / "lock", os.O_RDWR)
    writer.flock(b, EXCLUSIVE)
    fails(errno.EWOULDBLOCK, reader.flock, a, SHARED | NOW)
    writer.flock(b, UNLOCK)
    reader.flock(a, SHARED)
    fails(errno.EWOULDBLOCK, writer.flock, b, EXCLUSIVE | NOW)
    reader.lockf(a, SHARED | NOW)
    fails(errno.EAGAIN, writer.lockf, b, EXCLUSIVE | NOW)
    reader.close(a)
    writer.flock(b, EXCLUSIVE | NOW)
    writer.lockf(b, EXCLUSIVE | NOW)


def test_any_close_ends_the_ranges_of_a_process(path, agent):
    one, a, other, b = open_both(agent, path)
    second = one.open(path, os.O_RDWR)
    one.lockf(a, EXCLUSIVE | NOW)
    fails(errno.EAGAIN, other.lockf, b, EXCLUSIVE | NOW)
    one.close(second)
    other.lockf(b, EXCLUSIVE | NOW)


def test_flock_ends_with_the_last_copy_of_its_descriptor(path, agent):
    one, a, other, b = open_both(agent, path)
    copy = one.dup(a)
    one.flock(a, EXCLUSIVE)
    one.close(a)
    fails(errno.EWOULDBLOCK, other.flock, b, EXCLUSIVE | NOW)
    one.close(copy)
    other.flock(b, EXCLUSIVE | NOW)


@pytest.mark.parametrize("flags", [os.O_RDWR, os.O_RDONLY], ids=["rdwr", "rdonly"])
def test_closed_is_unlocked_at_once(place, flags):
    """RELEASE is not waited for by close: nobody may notice."""
    put(place / "lock", b"")
    for _ in range(1000):
        first, second = os.open(place / "lock", flags), os.open(place / "lock", flags)
        fcntl.flock(first, EXCLUSIVE | NOW)
        os.close(first)
        fcntl.flock(second, EXCLUSIVE | NOW)
        os.close(second)


@pytest.mark.parametrize("how", ["flock", "lockf"])
def test_killed_holder_lets_go(path, agent, how):
    one, a, other, b = open_both(agent, path)
    getattr(one, how)(a, EXCLUSIVE)
    other.send(how, b, EXCLUSIVE)
    one.child.kill()
    other.receive()
    one.stop(kill=True)


@pytest.mark.parametrize("how", ["flock", "lockf"])
def test_waiters_get_it_one_after_the_other(place, how):
    """Each adds one to a number in another file, which must not be lost."""
    put(place / "lock", b"")
    put(place / "number", b"0")

    def add():
        fd = os.open(place / "lock", os.O_RDWR)
        for _ in range(20):
            getattr(fcntl, how)(fd, EXCLUSIVE)
            put(place / "number", str(int(get(place / "number")) + 1).encode())
            getattr(fcntl, how)(fd, UNLOCK)

    children = [Child(add) for _ in range(8)]
    for child in children:
        child.result()
    assert get(place / "number") == b"160"


@pytest.mark.parametrize("how", ["flock", "lockf"])
def test_waiting_ends_with_a_signal(path, agent, how):
    """An alarm around a lock is how programs give it a time limit."""
    holder = agent()
    getattr(holder, how)(holder.open(path, os.O_RDWR | os.O_CREAT), EXCLUSIVE)

    class Late(Exception):
        pass

    def wait():
        def late(*_):
            raise Late
        fd = os.open(path, os.O_RDWR)
        signal.signal(signal.SIGALRM, late)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            getattr(fcntl, how)(fd, EXCLUSIVE)
        except Late:
            return "late"
        return "locked"

    assert Child(wait).result() == "late"
    doomed = Child(lambda: getattr(fcntl, how)(os.open(path, os.O_RDWR), EXCLUSIVE))
    doomed.kill(signal.SIGTERM)
    assert os.WTERMSIG(doomed.collect()) == signal.SIGTERM


def get_lock(fd, kind, start=0, length=0):
    """F_GETLK: (type, start, length, pid) of what is in the way of a lock."""
    text = struct.pack(FLOCK, kind, os.SEEK_SET, start, length, 0)
    kind, _, start, length, pid = struct.unpack(FLOCK, fcntl.fcntl(fd, fcntl.F_GETLK, text))
    return kind, start, length, pid


def test_getlk_tells_who_has_it(path, agent):
    one = agent()
    a = one.open(path, os.O_RDWR | os.O_CREAT)
    fd = os.open(path, os.O_RDWR)
    assert get_lock(fd, fcntl.F_WRLCK)[0] == fcntl.F_UNLCK
    one.lockf(a, EXCLUSIVE, 10, 100)
    assert get_lock(fd, fcntl.F_WRLCK) == (fcntl.F_WRLCK, 100, 10, one.child.pid)
    assert get_lock(fd, fcntl.F_RDLCK, 105, 1) == (fcntl.F_WRLCK, 100, 10, one.child.pid)
    assert get_lock(fd, fcntl.F_WRLCK, 0, 100)[0] == fcntl.F_UNLCK
    one.lockf(a, SHARED, 0, 50)
    assert get_lock(fd, fcntl.F_RDLCK, 200, 1)[0] == fcntl.F_UNLCK
    assert get_lock(fd, fcntl.F_WRLCK, 200, 1) == (fcntl.F_RDLCK, 50, 0, one.child.pid)
    os.close(fd)


def test_locks_of_open_files(place):
    """F_OFD_SETLK: between two opens of one process, ended by the close of the one."""
    put(place / "lock", b"")
    a, b = os.open(place / "lock", os.O_RDWR), os.open(place / "lock", os.O_RDWR)
    lock = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    set_lock = 37  # F_OFD_SETLK
    fcntl.fcntl(a, set_lock, lock)
    fails(errno.EAGAIN, fcntl.fcntl, b, set_lock, lock)
    os.close(a)
    fcntl.fcntl(b, set_lock, lock)
    os.close(b)


def test_locks_end_with_the_file_not_with_the_name(place, agent):
    one, a, other, b = open_both(agent, place / "lock")
    one.flock(a, EXCLUSIVE)
    os.unlink(place / "lock")
    fails(errno.EWOULDBLOCK, other.flock, b, EXCLUSIVE | NOW)
    third = agent()
    third.flock(third.open(place / "lock", os.O_RDWR | os.O_CREAT), EXCLUSIVE | NOW)


def test_threads_of_a_process_share_its_ranges(path, agent):
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.lockf(fd, EXCLUSIVE | NOW)
    done = []
    thread = threading.Thread(target=lambda: done.append(fcntl.lockf(fd, SHARED | NOW)))
    thread.start()
    thread.join()
    assert done == [None]
    os.close(fd)


def test_300_waiters_hold_nobody_up(kv, agent):
    put(kv.dir / "lock", b"")
    holder = agent()
    a = holder.open(kv.dir / "lock", os.O_RDWR)
    holder.flock(a, EXCLUSIVE)
    pids = []
    for _ in range(300):
        pid = os.fork()
        if pid == 0:
            fd = os.open(kv.dir / "lock", os.O_RDONLY)
            fcntl.flock(fd, EXCLUSIVE)
            os._exit(0)
        pids.append(pid)
    eventually(lambda: kv.status()["parked"] == 300, what="300 waiters")
    put(kv.dir / "other", b"content")
    assert get(kv.dir / "other") == b"content"
    holder.close(a)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 300
    assert kv.status()["parked"] == 0
