# SPDX-License-Identifier: Apache-2.0
"""The Nth allocation, open, mapping, thread, submission or sync of the daemon fails, for every N of
every operation: whoever asked gets an errno or the right answer, never a hung call, and the daemon
lives on.
"""
import contextlib
import errno
import itertools
import os

import pytest
from data import MIB, blob, get, put
from faults import Faults
from kvmount import MountFailed, build_folder
from procs import LONG, eventually, in_child

CALLS_MAX = 400 if LONG else 40
# Of a mount there are some hundred.
MOUNT_STRIDE = 1 if LONG else 13
ALLOWED = {errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EIO, errno.EAGAIN, errno.ENOENT,
           errno.ENOSPC}


@pytest.fixture
def faulty(fresh, monkeypatch):
    library = build_folder() / "tests" / "crash" / "libkvfault.so"
    if not library.exists():
        pytest.skip("the library that fails calls is not built")
    kv = fresh(mount=False)
    faults = Faults(kv.home / "faults")
    monkeypatch.setenv("KV_FAULT_FILE", os.fspath(kv.home / "faults"))
    kv.prefix = ["env", f"LD_PRELOAD={library}"]
    kv.expect_errors(".")
    return kv, faults


def create(root, number):
    put(root / f"new{number}", blob(number, 70_000))


def synced(root, number):
    path = root / f"synced{number}"
    put(path, blob(number, 70_000))
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def rewrite(root, number):
    fd = os.open(root / "rewritten", os.O_WRONLY)
    try:
        os.pwrite(fd, blob(number, 5_000), 0)
    finally:
        os.close(fd)


def make_old(root):
    """What the operations need."""
    for number in range(1, CALLS_MAX + 1):
        put(root / f"old{number}", blob(number, 300_000))
        put(root / f"unlinked{number}", blob(number, 1_000))
    put(root / "rewritten", blob(1, 5_000))


def read(root, number):
    assert get(root / f"old{number}") == blob(number, 300_000)


def rename(root, number):
    os.rename(root / f"old{number}", root / f"renamed{number}")


def unlink(root, number):
    # One of its own: whether a call came to rename another depends on which of its requests failed.
    os.unlink(root / f"unlinked{number}")


def names(root, number):
    path = root / f"dir{number}"
    os.mkdir(path)
    os.symlink("x", path / "l")
    os.setxattr(path, "user.a", b"1")
    os.listdir(path)
    os.statvfs(path)


def attempt(kv, func, number):
    """What came of FUNC: None or an errno. A call that hangs fails the test."""
    try:
        in_child(func, kv.mnt, number)
    except OSError as e:
        assert not isinstance(e, (TimeoutError, ChildProcessError)), f"{func.__name__}: {e}"
        return e.errno
    return None


def try_all(kv, faults, kind, func, allowed=frozenset(ALLOWED)):
    """Returns how many calls have failed."""
    struck = quiet = 0
    for number in range(1, CALLS_MAX + 1):
        faults.arm(kind, number)
        error = attempt(kv, func, number)
        hit = faults.disarm()
        assert error is None or error in allowed, f"{func.__name__}, {kind} {number}: {os.strerror(error)}"
        assert kv.daemon.poll() is None, f"{func.__name__}, {kind} {number}: {kv.log_tail()}"
        struck += hit
        # Who works in the background makes calls, too: one without a hit is not the end.
        quiet = 0 if hit else quiet + 1
        if quiet == 3:
            break
    return struck


@pytest.mark.timeout(3600 if LONG else 300)
@pytest.mark.parametrize("kind", ["malloc", "open", "mmap", "submit", "sync"])
def test_every_call_of_an_operation_fails_once(faulty, kind):
    kv, faults = faulty
    kv.mount()
    make_old(kv.mnt)
    kv.remount()  # so that reads go to the device
    struck = sum(try_all(kv, faults, kind, func)
                 for func in (read, create, synced, rewrite, rename, unlink, names))
    assert struck > 0, "no call failed: this proves nothing"
    # It is as good as ever, once a commit that failed was tried again.
    eventually(lambda: attempt(kv, create, CALLS_MAX + 1) is None, what="work without faults")
    put(kv.mnt / "last", blob(7, 100_000))
    kv.settle()
    kv.remount()
    assert get(kv.mnt / "last") == blob(7, 100_000)


def test_no_end_of_an_open_file_is_lost(faulty):
    """Its RELEASE comes once: it is handled again when there was no memory for it."""
    kv, faults = faulty
    kv.mount()
    path = kv.mnt / "f"
    put(path, blob(1, 5_000))
    kv.settle()

    def close_without_memory(turn):
        fds = [os.open(path, os.O_RDONLY) for _ in range(4)]
        # Of the closes' own requests, FLUSH and RELEASE, one or the other is met.
        faults.arm("malloc", 1 + turn % 8)
        for fd in fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        # Nobody waits for a RELEASE: this one comes behind them, and most often is answered so.
        with contextlib.suppress(OSError):
            os.statvfs(kv.mnt)
        faults.disarm()

    for turn in range(CALLS_MAX * 10):
        close_without_memory(turn)
    more = itertools.count()
    eventually(lambda: close_without_memory(next(more)) or kv.counter("ends_retried") > 0,
               what="a RELEASE without memory")
    eventually(lambda: kv.status()["open_handles"] == 0, what="the end of all open files")
    # An open version of it would keep its blocks.
    used = kv.status()["store_used"]
    os.unlink(path)
    eventually(lambda: kv.status()["store_used"] < used, what="its space")


def test_scattered_writes_without_memory(faulty):
    """A chunk that a write cannot be noted in keeps what it has; nothing stays dirty or promised."""
    kv, faults = faulty
    kv.mount()
    path, turns, struck = kv.mnt / "pool", 96, 0
    with open(path, "wb", buffering=0) as f:
        for turn in range(turns):
            os.pwrite(f.fileno(), blob(turn, 4096), turn * MIB + 5 * 4096)
    kv.settle()
    fd = os.open(path, os.O_RDWR)
    for turn in range(turns):
        place = turn * MIB + 20 * 4096
        faults.arm("malloc", 1 + turn % 12)
        try:
            os.pwrite(fd, b"x" * 4096, place)
        except OSError as e:
            assert e.errno in ALLOWED
        struck += faults.disarm()
        os.pwrite(fd, b"x" * 4096, place)
    assert struck > 20, "too few calls failed: this proves nothing"
    os.close(fd)
    for turn in range(turns):
        with open(path, "rb", buffering=0) as f:
            assert os.pread(f.fileno(), 4096, turn * MIB + 5 * 4096) == blob(turn, 4096)
            assert os.pread(f.fileno(), 4096, turn * MIB + 20 * 4096) == b"x" * 4096
    kv.settle()
    eventually(lambda: not kv.status()["dram_dirty"] and not kv.status()["store_reserved"],
               what="an end of all promises")


@pytest.mark.timeout(3600 if LONG else 300)
@pytest.mark.parametrize("kind, allowed", [
    ("reply_short", set()), ("reply_refused", {errno.EIO}), ("reply_gone", {errno.EIO})])
def test_every_reply_of_an_operation_fails_once(faulty, kind, allowed):
    """Tried again, or an error in its place: nobody waits for ever, and what a reply would have
    told the kernel is taken back."""
    kv, faults = faulty
    kv.mount()
    make_old(kv.mnt)
    kv.remount()
    struck = sum(try_all(kv, faults, kind, func, allowed)
                 for func in (read, create, synced, rewrite, rename, unlink, names))
    assert struck > 20, "too few replies failed: this proves nothing"
    assert kv.counter("replies_refused") == (struck if kind == "reply_refused" else 0)
    # No handle is left of an open whose reply was lost, and no write that blocks what comes.
    eventually(lambda: kv.status()["open_handles"] == 0, what="an end of all handles")
    put(kv.mnt / "rewritten", blob(9, 5_000))
    assert get(kv.mnt / "rewritten") == blob(9, 5_000)
    kv.remount()
    assert get(kv.mnt / "rewritten") == blob(9, 5_000)


@pytest.mark.parametrize("kind", ["reply_short", "reply_refused"])
def test_the_reply_that_makes_the_mount_fails(faulty, kind):
    kv, faults = faulty
    faults.arm(kind, 1)
    try:
        kv.mount(timeout=30)
    except MountFailed as e:
        assert kind == "reply_refused", e
        assert e.status == 1 and "handshake failed" in e.text
    assert faults.disarm()
    if kind == "reply_short":
        kv.umount()
    kv.mount()


@pytest.mark.parametrize("func", [read, create, names])
def test_a_mount_that_cannot_reply_ends(faulty, func):
    """Its callers are not left waiting."""
    kv, faults = faulty
    kv.mount()
    put(kv.mnt / "old1", blob(1, 300_000))
    faults.arm("reply_end", 2)
    assert attempt(kv, func, 1) in {errno.ENOTCONN, errno.ECONNABORTED}
    kv.daemon.wait(30)
    assert "no reply can be sent, ending the mount" in kv.log()
    faults.disarm()
    kv.destroy()
    kv.mount()
    assert get(kv.mnt / "old1") == blob(1, 300_000)


@pytest.mark.timeout(3600 if LONG else 300)
@pytest.mark.parametrize("kind", ["malloc", "open", "mmap", "thread"])
def test_every_call_of_a_mount_fails_once(faulty, kind):
    kv, faults = faulty
    kv.mount()
    put(kv.mnt / "f", blob(1, 100_000))
    kv.umount()
    struck = 0
    for number in range(1, 60 * MOUNT_STRIDE, MOUNT_STRIDE if kind == "malloc" else 1):
        faults.arm(kind, number)
        try:
            kv.mount(timeout=30)
        except MountFailed as e:
            assert e.status == 1 and e.text.strip(), f"{kind} {number}: {e}"
        else:
            assert attempt(kv, lambda root, _: os.stat(root / "f"), 0) in {None, *ALLOWED}
        hit = faults.disarm()
        struck += hit
        if kv.daemon:
            kv.umount()
        if not hit:
            break
    assert struck > 0, "no call failed: this proves nothing"
    kv.mount()
    assert get(kv.mnt / "f") == blob(1, 100_000)
