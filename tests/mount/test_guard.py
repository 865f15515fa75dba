# SPDX-License-Identifier: Apache-2.0
"""The guard process: a dead daemon leaves no client hanging."""
import ctypes
import errno
import os
import signal

from data import put
from procs import Child, eventually, open_files

PIDFD_GETFD = 438


def fuse_device_of(pid):
    """A copy of the descriptor that the daemon serves the mount through."""
    libc = ctypes.CDLL(None, use_errno=True)
    for number, link in open_files(pid).items():
        if link == "/dev/fuse":
            pidfd = os.pidfd_open(pid)
            fd = libc.syscall(PIDFD_GETFD, pidfd, number, 0)
            os.close(pidfd)
            assert fd >= 0, os.strerror(ctypes.get_errno())
            return fd
    raise AssertionError("the daemon has no /dev/fuse open")


def guard_of(pid):
    """The daemon does not wait for it to have begun; it guards when it has the abort file open."""
    return eventually(lambda: next(filter(guards, children_of(pid)), None), what="the guard")


def children_of(pid):
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as f:
        return [int(word) for word in f.read().split()]


def guards(pid):
    return comm(pid) == "kvfsd-guard" and any(
        link.endswith("/abort") for link in open_files(pid).values())


def comm(pid):
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8") as f:
            return f.read().strip()
    except OSError:
        return None


def error_of(func, *args):
    try:
        func(*args)
    except OSError as error:
        return error.errno
    return 0


def test_connection_ends_with_the_daemon_even_if_something_holds_it(fresh):
    """As a thread of the daemon does that is stuck in the kernel."""
    kv = fresh(size="256M", dram="64M")
    put(kv.mnt / "f", b"x")
    kv.check()
    guard = guard_of(kv.pid)
    held = fuse_device_of(kv.pid)
    try:
        kv.daemon.send_signal(signal.SIGSTOP)
        waiting = Child(error_of, os.stat, kv.mnt / "not looked up yet")
        kv.daemon.kill()
        kv.daemon.wait(30)
        assert waiting.result() in (errno.ENOTCONN, errno.ECONNABORTED)
        assert Child(error_of, os.listdir, kv.mnt).result() == errno.ENOTCONN
        eventually(lambda: comm(guard) != "kvfsd-guard", what="the end of the guard")
    finally:
        os.close(held)
        kv.destroy()


def test_guard_that_is_late_leaves_the_next_mount_alone(fresh):
    """The number of a connection is used again as soon as its mount has gone."""
    first = fresh(size="256M", dram="64M")
    number = os.stat(first.mnt).st_dev
    guard = guard_of(first.pid)
    os.kill(guard, signal.SIGSTOP)
    others = []
    try:
        first.daemon.kill()
        first.daemon.wait(30)
        first.destroy()
        # Somebody else's mount may have taken the number: then there is nothing to be seen.
        while not others or os.stat(others[-1].mnt).st_dev != number and len(others) < 5:
            others.append(fresh(size="256M", dram="64M"))
    finally:
        os.kill(guard, signal.SIGCONT)
    eventually(lambda: comm(guard) != "kvfsd-guard", what="the end of the guard")
    put(others[-1].mnt / "f", b"x")
    others[-1].check()


def test_guard_goes_with_an_orderly_end(fresh):
    kv = fresh(size="256M", dram="64M")
    guard = guard_of(kv.pid)
    kv.umount()
    eventually(lambda: comm(guard) != "kvfsd-guard", what="the end of the guard")
