# SPDX-License-Identifier: Apache-2.0
"""P3: who opens a file that is being written for the first time waits, and holds nobody up."""
import ctypes
import errno
import os
import resource
import signal

import pytest
from data import blob, get, put
from procs import Child, eventually

CONTENT = blob(5, 300_000)
LONG = "600s"  # longer than any test may last: who gets an answer was not answered by the clock
NEW_FILE = os.O_CREAT | os.O_WRONLY
LIBC = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def slow(fresh):
    return fresh(read_wait=LONG)


def begin(path):
    fd = os.open(path, NEW_FILE, 0o644)
    os.write(fd, CONTENT)
    return fd


def wait_until_parked(kv, count):
    eventually(lambda: kv.status()["parked"] == count, what=f"{count} waiting readers")


def raw_open(path):
    """open(2) without Python's second try after EINTR: the descriptor, or minus errno."""
    fd = LIBC.open(os.fsencode(path), os.O_RDONLY)
    return fd if fd >= 0 else -ctypes.get_errno()


def many_openers(path, count):
    """
    COUNT processes that open PATH, cheap ones; a function that collects them: their errno, or 0
    for who found the right content.
    """
    pids = []
    for _ in range(count):
        pid = os.fork()
        if pid == 0:
            status = 99
            try:
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                # Not what the tests were started with: a script's jobs in the background ignore both.
                signal.signal(signal.SIGINT, signal.default_int_handler)
                signal.signal(signal.SIGQUIT, signal.SIG_DFL)
                fd = raw_open(path)
                if fd < 0:
                    status = -fd
                elif os.pread(fd, len(CONTENT) + 1, 0) == CONTENT:
                    status = 0
            finally:
                os._exit(status)
        pids.append(pid)
    return pids, lambda: [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def publish_by_close(fd, _):
    os.close(fd)


def publish_by_fsync(fd, _):
    os.fsync(fd)
    os.close(fd)


def publish_by_rename(fd, path):
    os.rename(path, f"{path}.new")
    os.close(fd)


@pytest.mark.parametrize("publish", [publish_by_close, publish_by_fsync, publish_by_rename])
def test_p3_readers_get_what_is_published(slow, publish):
    path = slow.mnt / "f"
    fd = begin(path)
    readers = [Child(get, path) for _ in range(3)]
    wait_until_parked(slow, 3)
    publish(fd, path)
    if publish is publish_by_rename:
        # The file is there, but not under that name any more.
        for reader in readers:
            with pytest.raises(FileNotFoundError):
                reader.result()
        assert get(f"{path}.new") == CONTENT
    else:
        assert [reader.result() for reader in readers] == [CONTENT] * 3
    assert slow.status()["parked"] == 0


def test_p3_empty_file(slow):
    """Published by RELEASE: nothing may have a copy of the descriptor."""
    fd = os.open(slow.mnt / "f", NEW_FILE, 0o644)
    reader = Child(lambda: (os.close(fd), get(slow.mnt / "f"))[1])
    wait_until_parked(slow, 1)
    os.close(fd)
    assert reader.result() == b""


def test_p3_600_waiting_readers_hold_nobody_up(slow):
    """More than there are workers, and everything else goes on."""
    path = slow.mnt / "f"
    put(slow.mnt / "other", CONTENT)
    fd = begin(path)
    _, collect = many_openers(path, 600)
    wait_until_parked(slow, 600)
    for i in range(20):
        put(slow.mnt / f"g{i}", CONTENT)
        assert Child(get, slow.mnt / f"g{i}").result() == CONTENT
    assert get(slow.mnt / "other") == CONTENT
    assert len(os.listdir(slow.mnt)) == 22
    with open(f"/proc/{slow.pid}/status", encoding="ascii") as f:
        threads = int(f.read().split("Threads:")[1].split()[0])
    assert threads < 200
    os.close(fd)
    assert collect() == [0] * 600
    assert slow.status()["parked"] == 0


def test_p3_600_readers_of_a_writer_that_dies(slow):
    path = slow.mnt / "f"
    writer = Child(lambda: (begin(path), signal.pause()))
    eventually(lambda: os.path.exists(path), what="the file")
    _, collect = many_openers(path, 600)
    wait_until_parked(slow, 600)
    writer.kill()
    writer.collect()
    assert collect() == [errno.ENOENT] * 600
    assert os.listdir(slow.mnt) == []


def test_p3_killed_reader_goes_at_once(slow):
    fd = begin(slow.mnt / "f")
    pids, collect = many_openers(slow.mnt / "f", 20)
    wait_until_parked(slow, 20)
    for i, pid in enumerate(pids):
        os.kill(pid, (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)[i % 4])
    # That of SIGINT is a handler: it waits on, and takes note when it has its answer.
    wait_until_parked(slow, 5)
    os.close(fd)
    assert sorted(collect()) == sorted(
        [-signal.SIGKILL] * 5 + [-signal.SIGTERM] * 5 + [-signal.SIGQUIT] * 5 + [99] * 5)


def test_p3_signals_with_a_handler_do_not_end_the_wait(slow):
    """R3: an engine would take EINTR for an error of the file. Killed after such a signal, it goes."""
    path = slow.mnt / "f"
    seen_out, seen_in = os.pipe()

    def read():
        handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda _: None)
        LIBC.signal(signal.SIGUSR1, handler)
        os.write(seen_in, b"x")
        fd = raw_open(path)
        return fd if fd < 0 else os.pread(fd, len(CONTENT) + 1, 0)

    fd = begin(path)
    patient, doomed = Child(read), Child(read)
    for child in (patient, doomed):
        os.read(seen_out, 1)
    wait_until_parked(slow, 2)
    for child in (patient, doomed):
        child.kill(signal.SIGUSR1)
    assert slow.status()["parked"] == 2
    doomed.kill()
    assert os.WTERMSIG(doomed.collect()) == signal.SIGKILL
    wait_until_parked(slow, 1)
    os.close(fd)
    assert patient.result() == CONTENT
    os.close(seen_out)
    os.close(seen_in)


def test_p3_unlink_ends_the_wait(slow):
    fd = begin(slow.mnt / "f")
    reader = Child(raw_open, slow.mnt / "f")
    wait_until_parked(slow, 1)
    os.unlink(slow.mnt / "f")
    assert reader.result() == -errno.ENOENT
    os.close(fd)


def test_p3_the_wait_has_an_end(fresh):
    kv = fresh(read_wait="300ms")
    fd = begin(kv.mnt / "f")
    _, collect = many_openers(kv.mnt / "f", 10)
    assert collect() == [errno.ENOENT] * 10
    os.close(fd)
    assert get(kv.mnt / "f") == CONTENT


def read_write(path, flags=0):
    fd = os.open(path, os.O_RDWR | flags)
    found = os.pread(fd, len(CONTENT) + 1, 0)
    os.pwrite(fd, b"mine", 0)
    os.close(fd)
    return found


@pytest.mark.parametrize("flags", [0, os.O_CREAT])
def test_p3_who_opens_to_read_and_write_waits_too(slow, flags):
    """Engines load by O_RDWR, and would take an empty file for a short one."""
    path = slow.mnt / "f"
    fd = begin(path)
    other = Child(read_write, path, flags)
    wait_until_parked(slow, 1)
    os.close(fd)
    assert other.result() == CONTENT
    assert get(path) == b"mine" + CONTENT[4:]


def test_p3_who_opens_to_read_and_write_a_file_that_vanishes(slow):
    path = slow.mnt / "f"
    for flags in (0, os.O_CREAT):
        writer = Child(lambda: (begin(path), signal.pause()))
        eventually(lambda: os.path.exists(path), what="the file")
        other = Child(read_write, path, flags)
        wait_until_parked(slow, 1)
        writer.kill()
        writer.collect()
        if flags:
            assert other.result() == b""
            assert get(path) == b"mine"
        else:
            with pytest.raises(FileNotFoundError):
                other.result()


def test_p5_who_opens_to_read_and_write_begins_with_nothing_in_the_end(fresh):
    kv = fresh(read_wait="300ms")
    fd = begin(kv.mnt / "f")
    assert Child(read_write, kv.mnt / "f").result() == b""
    os.close(fd)
    assert get(kv.mnt / "f") == CONTENT


@pytest.mark.parametrize("flags", [os.O_RDWR | os.O_TRUNC, os.O_WRONLY])
def test_p5_who_replaces_does_not_wait(slow, flags):
    path = slow.mnt / "f"
    fd = begin(path)

    def replace():
        own = os.open(path, flags)
        os.write(own, b"theirs")
        os.close(own)

    Child(replace).result()
    assert Child(get, path).result() == b"theirs"
    os.close(fd)
    assert get(path) == CONTENT


def test_p3_no_wait_at_all(fresh):
    kv = fresh(read_wait="0")
    fd = begin(kv.mnt / "f")
    assert Child(raw_open, kv.mnt / "f").result() == -errno.ENOENT
    os.close(fd)


def test_p3_files_are_published_one_after_the_other_under_one_name(slow):
    """The file waited for is replaced by another one that is being written."""
    path = slow.mnt / "f"
    first, second = begin(path), begin(slow.mnt / "g")
    readers = [Child(get, path) for _ in range(4)]
    wait_until_parked(slow, 4)
    os.write(second, b"second")
    os.unlink(path)
    os.link(slow.mnt / "g", path)
    for reader in readers:
        with pytest.raises(FileNotFoundError):
            reader.result()
    readers = [Child(get, path) for _ in range(4)]
    wait_until_parked(slow, 4)
    os.close(second)
    assert [reader.result() for reader in readers] == [CONTENT + b"second"] * 4
    os.close(first)


def test_p3_an_o_path_descriptor_waits_too(slow):
    """Opened by /proc/self/fd, where no LOOKUP can lead to another node."""
    path = slow.mnt / "f"
    fd = begin(path)

    def read():
        held = os.open(path, os.O_PATH)
        return get(f"/proc/self/fd/{held}")

    reader = Child(read)
    wait_until_parked(slow, 1)
    os.close(fd)
    assert reader.result() == CONTENT


def test_p3_the_end_of_the_mount_ends_the_wait(fresh):
    kv = fresh(read_wait=LONG)
    fd = begin(kv.mnt / "f")
    reader = Child(raw_open, kv.mnt / "f")
    wait_until_parked(kv, 1)
    kv.daemon.terminate()
    assert reader.result() in (-errno.ENOENT, -errno.ENOTCONN, -errno.ECONNABORTED)
    kv.daemon.wait(30)
    try:
        os.close(fd)
    except OSError:
        pass  # ENOTCONN: the mount is gone
    kv.destroy()
