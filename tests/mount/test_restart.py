# SPDX-License-Identifier: Apache-2.0
"""-o restart: a daemon that is killed, or makes way, is followed by another on the same connection.

Callers wait meanwhile. A kill takes along no names, and content that is being written, or not durable,
only where DRAM has not all of it. A planned restart (SIGHUP to the supervisor) takes nothing.
"""
import errno
import fcntl
import functools
import mmap
import os
import signal
import subprocess
import time

import pytest
from data import MIB, blob, get, put, put_synced
from ioctls import command
from kvmount import MountFailed, mount_device
from procs import LONG, Child, eventually, run
from restarts import ask, daemon_of, kill, restartable
from syscalls import fails


@pytest.fixture(name="make")
def _make(fresh):
    return functools.partial(restartable, fresh)


@pytest.mark.parametrize("end", (kill, ask))
def test_what_is_open_goes_on(make, end):
    kv = make()
    data = blob(1, 3 * MIB)
    (kv.mnt / "d" / "e").mkdir(parents=True)
    put_synced(kv.mnt / "d" / "e" / "f", data)
    os.symlink("d/e/f", kv.mnt / "link")
    kv.settle()
    hot = os.open(kv.mnt / "d" / "e" / "f", os.O_RDONLY)
    view = mmap.mmap(hot, len(data), prot=mmap.PROT_READ)
    cold = os.open(kv.mnt / "d" / "e" / "f", os.O_RDONLY | os.O_DIRECT)
    place = os.open(kv.mnt / "d", os.O_RDONLY | os.O_DIRECTORY)
    before = os.fstat(hot)
    for _ in range(3):
        end(kv)
        assert os.pread(hot, len(data), 0) == data
        assert view[:] == data
        assert os.pread(cold, MIB, MIB) == data[MIB:2 * MIB]
        after = os.fstat(hot)
        assert (after.st_ino, after.st_size, after.st_mtime_ns) == \
            (before.st_ino, before.st_size, before.st_mtime_ns)
        assert os.listdir(place) == ["e"]
        assert os.stat("e/f", dir_fd=place).st_ino == before.st_ino
        assert get(kv.mnt / "link") == data
        assert os.getxattr(hot, "user.kvfs.version") == b"1"
        put(kv.mnt / "d" / "new", b"x")
        assert get(kv.mnt / "d" / "new") == b"x"
        os.unlink(kv.mnt / "d" / "new")
        kv.settle()
    view.close()
    for fd in (hot, cold, place):
        os.close(fd)


def test_a_working_directory_stays(make):
    kv = make()
    (kv.mnt / "d").mkdir()
    put_synced(kv.mnt / "d" / "f", b"data")
    kv.settle()
    shell = subprocess.Popen(["sh", "-c", "read x; pwd -P; cat f"], cwd=kv.mnt / "d",
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    kill(kv)
    assert shell.communicate("go\n", timeout=30)[0] == f"{kv.mnt}/d\ndata"


@pytest.mark.parametrize("end", (kill, ask))
def test_open_files_without_a_name_go_on(make, end):
    """They are kept as long as they are open, over restarts, and freed then."""
    kv = make()
    for name in ("removed", "replaced", "new"):
        put_synced(kv.mnt / name, blob(hash(name) % 100, 3 * MIB))
    kv.settle()
    removed = os.open(kv.mnt / "removed", os.O_RDONLY)
    replaced = os.open(kv.mnt / "replaced", os.O_RDONLY)
    before = [os.pread(fd, 4 * MIB, 0) for fd in (removed, replaced)]
    free = os.statvfs(kv.mnt).f_bfree
    os.unlink(kv.mnt / "removed")
    os.rename(kv.mnt / "new", kv.mnt / "replaced")
    place = os.open(kv.mnt, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(place)
    os.close(place)
    for _ in range(2):
        end(kv)
        for fd, data in zip((removed, replaced), before):
            assert os.pread(fd, 4 * MIB, 0) == data
            assert (os.fstat(fd).st_size, os.fstat(fd).st_nlink) == (3 * MIB, 0)
        assert os.statvfs(kv.mnt).f_bfree == free
        assert os.listdir(kv.mnt) == ["replaced"]
    for fd in (removed, replaced):
        os.close(fd)
    eventually(lambda: os.statvfs(kv.mnt).f_bfree == free + 2 * 768, what="their space")


@pytest.mark.parametrize("end", (kill, ask))
def test_open_files_with_a_newer_version_go_on(make, end):
    """What they show is the old version, of which DRAM has all."""
    kv = make()
    data = [blob(seed, 3 * MIB + 5) for seed in range(3)]
    put_synced(kv.mnt / "f", data[0])
    olds = []
    for new in data[1:]:
        kv.settle()
        fd = os.open(kv.mnt / "f", os.O_RDONLY)
        olds.append((fd, os.fstat(fd), mmap.mmap(fd, MIB, prot=mmap.PROT_READ)))
        assert os.pread(fd, 100, 0) == get(kv.mnt / "f")[:100]
        put_synced(kv.mnt / "f", new)
    for turn in range(2):
        end(kv)
        for (fd, before, view), old in zip(olds, data):
            assert os.pread(fd, 4 * MIB, 0) == old
            assert view[:] == old[:MIB]
            after = os.fstat(fd)
            assert (after.st_ino, after.st_size, after.st_mtime_ns) == \
                (before.st_ino, before.st_size, before.st_mtime_ns)
            os.fsync(fd)
            fails(errno.ESTALE, fcntl.ioctl, fd, command(6, 48), bytearray(48))
            with open(kv.mnt / f"copy{turn}", "wb") as copy:
                assert os.copy_file_range(fd, copy.fileno(), MIB, 7, 0) == MIB
            assert get(kv.mnt / f"copy{turn}") == old[7:MIB + 7]
        assert get(kv.mnt / "f") == data[2]
    for fd, _, view in olds:
        view.close()
        os.close(fd)


def test_old_versions_do_not_keep_writers_waiting(make):
    """They go to the devices early, and are given up with the last descriptor."""
    kv = make(dram="64M", size="512M")
    olds = []
    for i in range(3):
        put_synced(kv.mnt / f"f{i}", blob(i, 14 * MIB))
        kv.settle()
        olds.append(os.open(kv.mnt / f"f{i}", os.O_RDONLY))
        assert os.pread(olds[i], 9, 0) == blob(i, 14 * MIB)[:9]
        put_synced(kv.mnt / f"f{i}", b"new")
    kill(kv)
    put_synced(kv.mnt / "large", blob(7, 100 * MIB))
    assert get(kv.mnt / "large") == blob(7, 100 * MIB)
    kept = [i for i in range(3) if kept_is(olds[i], blob(i, 14 * MIB))]
    assert kept  # what was not in DRAM any more is lost
    for fd in olds:
        os.close(fd)
    eventually(lambda: kv.status()["dram_dirty"] == 0, what="their end")


def kept_is(fd, data):
    try:
        assert os.pread(fd, len(data), 0) == data
        return True
    except OSError as e:
        assert e.errno == errno.EIO
        return False


def test_names_stay_as_they_were_at_a_kill(make):
    """Nothing of it was committed: the daemon is killed right behind the last call."""
    kv = make()
    for name in ("moved", "linked", "removed", "mode"):
        put_synced(kv.mnt / name, name.encode())
    for turn in range(10):
        (kv.mnt / f"d{turn}").mkdir()
        os.symlink(f"d{turn}", kv.mnt / f"d{turn}" / "link")
        os.link(kv.mnt / "linked", kv.mnt / f"d{turn}" / "linked")
        os.rename(kv.mnt / "moved", kv.mnt / f"d{turn}" / "moved")
        os.chmod(kv.mnt / "mode", 0o600 + turn)
        os.setxattr(kv.mnt / "mode", "user.x", str(turn).encode())
        if turn == 0:
            os.unlink(kv.mnt / "removed")
        kill(kv)
        assert sorted(os.listdir(kv.mnt)) == sorted(["linked", "mode", *(f"d{i}" for i in range(turn + 1))])
        assert sorted(os.listdir(kv.mnt / f"d{turn}")) == ["link", "linked", "moved"]
        assert os.readlink(kv.mnt / f"d{turn}" / "link") == f"d{turn}"
        assert os.stat(kv.mnt / "linked").st_nlink == turn + 2
        assert get(kv.mnt / f"d{turn}" / "moved") == b"moved"
        assert os.stat(kv.mnt / "mode").st_mode & 0o777 == 0o600 + turn
        assert os.getxattr(kv.mnt / "mode", "user.x") == str(turn).encode()
        os.rename(kv.mnt / f"d{turn}" / "moved", kv.mnt / "moved")
        time.sleep(1)  # a daemon that dies young again and again ends the mount


def test_writers_of_what_is_there_get_eio_from_a_kill(make):
    """A part of what they write is in the version that they change."""
    kv = make()
    put_synced(kv.mnt / "old", b"old")
    changed = os.open(kv.mnt / "old", os.O_RDWR)
    os.write(changed, b"half")
    kill(kv)
    fails(errno.EIO, os.pwrite, changed, b"more", 4)
    fails(errno.EIO, os.pread, changed, 4, 0)
    fails(errno.EIO, os.fsync, changed)
    fails(errno.EIO, os.ftruncate, changed, 0)
    fails(errno.EIO, os.close, changed)
    assert get(kv.mnt / "old") == b"old"


def test_writers_of_new_files_go_on_after_a_kill(make):
    """Two kills, and changes of every kind in between."""
    kv = make()
    data = bytearray(blob(1, 5 * MIB))
    fd = os.open(kv.mnt / "new", os.O_CREAT | os.O_RDWR)
    empty = os.open(kv.mnt / "empty", os.O_CREAT | os.O_WRONLY)
    assert os.pwrite(fd, data[:3 * MIB], 0) == 3 * MIB
    other = os.open(kv.mnt / "new", os.O_RDONLY)
    kill(kv)
    assert os.pread(fd, 5 * MIB, 0) == os.pread(other, 5 * MIB, 0) == data[:3 * MIB]
    assert os.fstat(fd).st_size == 3 * MIB
    with open(kv.mnt / "new", "rb") as mine:
        assert mine.read() == data[:3 * MIB]
    assert os.pwrite(fd, data[3 * MIB:], 3 * MIB) == 2 * MIB
    assert os.pwrite(fd, b"changed", 1000) == 7
    os.ftruncate(fd, 4 * MIB + 1)
    os.ftruncate(fd, 8 * MIB)
    assert os.pwrite(fd, b"end", 8 * MIB) == 3
    data[1000:1007] = b"changed"
    data[4 * MIB + 1:] = bytes(4 * MIB - 1) + b"end"
    kill(kv)
    assert os.pread(other, 9 * MIB, 0) == data
    os.close(other)
    os.fsync(fd)
    os.close(fd)
    os.close(empty)
    kill(kv)
    assert get(kv.mnt / "new") == data
    assert get(kv.mnt / "empty") == b""
    kv.umount()
    kv.mount()
    assert get(kv.mnt / "new") == data
    assert get(kv.mnt / "empty") == b""


def test_what_was_published_outlives_a_kill(make):
    """Nobody has waited until it was durable."""
    kv = make()
    put_synced(kv.mnt / "old", b"old")
    data = [blob(seed, 2 * MIB + seed) for seed in range(6)]
    for i, new in enumerate(data):
        put(kv.mnt / f"f{i}", new)
        os.rename(kv.mnt / f"f{i}", kv.mnt / f"g{i}")
    reader = os.open(kv.mnt / "g0", os.O_RDONLY)
    put(kv.mnt / "old", b"new")
    put(kv.mnt / "old", b"newest")
    kill(kv)
    assert [get(kv.mnt / f"g{i}") for i in range(6)] == data
    assert os.pread(reader, 3 * MIB, 0) == data[0]
    assert get(kv.mnt / "old") == b"newest"
    assert sorted(os.listdir(kv.mnt)) == [*(f"g{i}" for i in range(6)), "old"]
    os.close(reader)


@pytest.mark.parametrize("number", (signal.SIGKILL, signal.SIGTERM))
def test_a_writer_that_is_killed_after_the_daemon_was(make, agent, number):
    """P6: who had written it is known still."""
    kv = make()
    writer = agent()
    fd = writer.open(kv.mnt / "f", os.O_CREAT | os.O_WRONLY)
    writer.write(fd, b"half")
    kill(kv)
    os.kill(writer.child.pid, number)
    eventually(lambda: not (kv.mnt / "f").exists(), what="the end of what it wrote")


def test_a_writer_with_a_failed_write_gets_eio_from_a_kill(make):
    """What is missing of it must not be published as zeros."""
    kv = make(size="64M")
    fd = os.open(kv.mnt / "f", os.O_CREAT | os.O_WRONLY)
    os.write(fd, b"x" * MIB)
    assert os.pwrite(fd, b"x" * 64 * MIB, MIB) < 64 * MIB
    kill(kv)
    fails(errno.EIO, os.pwrite, fd, b"more", 4)
    fails(errno.EIO, os.close, fd)
    assert os.listdir(kv.mnt) == []


def test_locks_and_tickets_are_not_to_be_had_from_before(make):
    """Only the end of a descriptor of before would end them, and nobody hears of that."""
    kv = make()
    put_synced(kv.mnt / "f", b"data")
    kv.settle()
    before = os.open(kv.mnt / "f", os.O_RDONLY)
    ask(kv)
    fails(errno.ENOLCK, fcntl.flock, before, fcntl.LOCK_SH)
    fails(errno.ENOLCK, fcntl.lockf, before, fcntl.LOCK_SH)
    fails(errno.ESTALE, fcntl.ioctl, before, command(6, 48), bytearray(48))
    with open(kv.mnt / "f", "rb") as now:
        fcntl.flock(now, fcntl.LOCK_SH)
        fcntl.ioctl(now, command(6, 48), bytearray(48))
    assert os.pread(before, 9, 0) == b"data"
    os.close(before)
    with open(kv.mnt / "f", "rb") as now:
        fcntl.flock(now, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_the_end_comes_first(make):
    """An end that is asked for while a planned restart waits for writers is an end."""
    kv = make()
    writer = os.open(kv.mnt / "f", os.O_CREAT | os.O_WRONLY)
    os.write(writer, b"half")
    os.kill(kv.pid, signal.SIGHUP)
    eventually(lambda: "making way" in kv.log(), what="the restart to begin")
    os.kill(kv.pid, signal.SIGTERM)
    assert kv.daemon.wait(15) == 0
    fails(errno.ENOTCONN, os.close, writer)
    kv.destroy()
    kv.mount()
    assert not (kv.mnt / "f").exists()


def test_a_planned_restart_waits_for_writers(make, agent):
    kv = make()
    before = daemon_of(kv)
    writer = agent()
    fd = writer.open(kv.mnt / "f", os.O_CREAT | os.O_WRONLY)
    writer.write(fd, b"first ")
    os.kill(kv.pid, signal.SIGHUP)
    eventually(lambda: "making way" in kv.log(), what="the daemon's word")
    # Others' changes wait for the next daemon; this writer's do not.
    maker = Child(os.mkdir, kv.mnt / "d")
    writer.write(fd, b"second")
    writer.fsync(fd)
    assert daemon_of(kv) == before
    writer.close(fd)
    maker.result()
    assert daemon_of(kv) != before
    assert get(kv.mnt / "f") == b"first second"
    assert sorted(os.listdir(kv.mnt)) == ["d", "f"]


def read_for_ever(mnt, stop, names):
    """Opens, reads, lists and stats durable files until STOP exists, once at least: how often."""
    turns = 0
    while turns == 0 or not os.path.exists(stop):
        for name, seed in names:
            fd = os.open(f"{mnt}/{name}", os.O_RDONLY)
            assert os.pread(fd, 200_000, 0) == blob(seed, 200_000)
            assert os.fstat(fd).st_size == 200_000
            os.close(fd)
        assert {name for name, _ in names} <= set(os.listdir(mnt))
        turns += 1
    return turns


def write_for_ever(mnt, stop, number):
    """Stores files by a temporary name and rename until STOP exists, one at least; returns those."""
    durable, i = [], 0
    while not durable or not os.path.exists(stop):
        i += 1
        name = f"w{number}-{i % 50}"
        fd = os.open(f"{mnt}/{name}.tmp", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
        os.write(fd, blob(i, 50_000))
        os.fsync(fd)
        os.close(fd)
        os.rename(f"{mnt}/{name}.tmp", f"{mnt}/{name}")
        durable.append((name, i))
    return durable


@pytest.mark.parametrize("end", (kill, ask))
def test_restarts_under_load(make, end, tmp_path):
    """16 readers and 4 writers, who write the same names again and again, never notice."""
    kv = make(size="512M")
    names = [(f"f{i}", i) for i in range(8)]
    for name, seed in names:
        put_synced(kv.mnt / name, blob(seed, 200_000))
    kv.settle()
    stop = tmp_path / "stop"
    readers = [Child(read_for_ever, kv.mnt, stop, names) for _ in range(16)]
    writers = [Child(write_for_ever, kv.mnt, stop, n) for n in range(4)]
    for _ in range(20 if LONG else 3):
        time.sleep(0.3)
        end(kv)
        time.sleep(0.8)  # a daemon that dies young again and again ends the mount
    stop.touch()
    assert all(reader.result(timeout=120) > 0 for reader in readers)
    for writer in writers:
        durable = writer.result(timeout=120)
        assert durable
        for name, i in dict(durable).items():
            assert get(kv.mnt / name) == blob(i, 50_000)
    kv.umount()
    kv.mount()
    for name, seed in names:
        assert get(kv.mnt / name) == blob(seed, 200_000)


def make_names_for_ever(mnt, stop, number):
    """Makes and removes a directory, over and over: its parent is locked nearly all the time.

    A kill may come between doing it and saying so.
    """
    while not os.path.exists(stop):
        os.mkdir(f"{mnt}/d{number}")
        os.rename(f"{mnt}/d{number}", f"{mnt}/e{number}")
        os.symlink("x", f"{mnt}/e{number}/s")
        os.link(f"{mnt}/e{number}/s", f"{mnt}/e{number}/l")
        os.unlink(f"{mnt}/e{number}/s")
        os.unlink(f"{mnt}/e{number}/l")
        os.setxattr(f"{mnt}/e{number}", "user.x", b"1", os.XATTR_CREATE)
        os.removexattr(f"{mnt}/e{number}", "user.x")
        os.rmdir(f"{mnt}/e{number}")


def replace_for_ever(mnt, stop):
    """Rewrites files that the kernel knows: it has to be told to forget each of their names."""
    while not os.path.exists(stop):
        for i in range(20):
            try:
                put(f"{mnt}/r{i}", b"x")
                os.stat(f"{mnt}/r{i}")
            except OSError as e:
                # Who opens to rewrite may have been sent to a node of his own when the kill came.
                assert e.errno == errno.ESTALE


def test_a_daemon_that_cannot_end_before_the_next_one_answers(make, tmp_path):
    """Killed while it waits, in the kernel, for a lock that a client holds who waits for an answer."""
    kv = make()
    stop = tmp_path / "stop"
    children = [Child(make_names_for_ever, kv.mnt, stop, i) for i in range(8)]
    children.append(Child(replace_for_ever, kv.mnt, stop))
    for _ in range(4):
        time.sleep(1.2)  # one that dies young again and again ends the mount
        kill(kv)
    stop.touch()
    for child in children:
        child.result(timeout=120)


def test_umount_and_signals_end_it(make):
    kv = make()
    kill(kv)
    kv.umount()
    kv.mount()
    kv.daemon.terminate()
    assert kv.daemon.wait(60) == 0
    assert mount_device(kv.mnt) is None
    kv.destroy()


def test_without_its_supervisor_the_daemon_unmounts(make):
    kv = make()
    put(kv.mnt / "f", b"data")
    daemon = daemon_of(kv)
    kv.daemon.kill()
    assert kv.daemon.wait(30) == -signal.SIGKILL
    eventually(lambda: not os.path.exists(f"/proc/{daemon}"), what="the daemon's end")
    assert mount_device(kv.mnt) is None
    kv.destroy()
    kv.mount()
    assert get(kv.mnt / "f") == b"data"


def test_in_the_background(make):
    """kvfs mount returns, with its output closed, when the mount is there."""
    kv = make()
    kv.umount()
    options = ",".join(k if v is None else f"{k}={v}" for k, v in kv.options.items() if v is not False)
    run(kv.programs["kvfs"], "mount", "store", kv.mnt, "-o", options, cwd=kv.home)
    try:
        put_synced(kv.mnt / "f", b"data")
        with open(kv.store / "lock", encoding="ascii") as file:
            before = int(file.read().split()[0])
        assert os.path.samefile(f"/proc/{before}/exe", kv.programs["kvfsd"])
        os.kill(before, signal.SIGKILL)
        assert get(kv.mnt / "f") == b"data"
    finally:
        run("umount", kv.mnt)
    kv.mount()


def test_a_mount_that_fails_leaves_nothing(make):
    kv = make()
    kv.umount()
    (kv.store / "devices").rename(kv.store / "away")
    with pytest.raises(MountFailed) as e:
        kv.mount()
    assert "list of devices" in str(e.value)
    assert mount_device(kv.mnt) is None
    (kv.store / "away").rename(kv.store / "devices")
    kv.mount()


def test_daemons_that_die_young_end_the_mount(make):
    kv = make()
    kv.expect_errors("dies again and again")
    seen = set()
    while kv.daemon.poll() is None and len(seen) < 20:
        if (pid := daemon_of(kv)) and pid not in seen:
            seen.add(pid)
            os.kill(pid, signal.SIGKILL)
    assert kv.daemon.wait(30) == 1
    assert mount_device(kv.mnt) is None
    kv.check_log()
    kv.destroy()
