# SPDX-License-Identifier: Apache-2.0
"""P6: a writer that dies by a signal publishes nothing, whichever way it was writing."""
import ctypes
import mmap
import os
import resource
import signal
import subprocess
import sys
import threading

import pytest
from data import MIB, blob, get, put
from procs import NOBODY, Child, as_nobody, eventually

OLD, NEW = blob(1, 100_000), blob(2, 2 * MIB + 77)
SIGNALS = ("SIGKILL", "SIGTERM", "SIGSEGV", "SIGABRT")
NEW_FILE = os.O_CREAT | os.O_RDWR | os.O_TRUNC
LIBC = ctypes.CDLL(None, use_errno=True)


def ends_by(number, func, *args, **who):
    """FUNC(*ARGS) in a child that then waits for signal NUMBER, gets it, and is reaped."""
    ready_out, ready_in = os.pipe()

    def act():
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        func(*args)
        os.write(ready_in, b"x")
        threading.Event().wait()

    child = Child(act, **who)
    os.close(ready_in)
    begun = os.read(ready_out, 1)
    os.close(ready_out)
    if not begun:
        child.result()
    os.kill(child.pid, number)
    status = child.collect()
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == number


def half(path):
    """Writes half of a file and leaves it open."""
    fd = os.open(path, NEW_FILE, 0o644)
    os.write(fd, NEW[:MIB])
    return fd


def check_unpublished(kv, path, rewritten):
    """Nothing but what was there before."""
    if rewritten:
        assert get(path) == OLD
        assert kv.stat(path)["tier"] != "writing"
    else:
        assert path.name not in os.listdir(path.parent)
        with pytest.raises(FileNotFoundError):
            os.open(path, os.O_RDONLY)


@pytest.fixture(params=("new", "rewritten"))
def target(kv, request):
    """(path, whether it was there before)."""
    path = kv.dir / "f"
    if request.param == "rewritten":
        put(path, OLD)
    return path, request.param == "rewritten"


@pytest.mark.parametrize("name", SIGNALS)
def test_p6_killed_writer(kv, target, name):
    path, rewritten = target
    before = kv.counter("unfinished")
    ends_by(getattr(signal, name), half, path)
    check_unpublished(kv, path, rewritten)
    assert kv.counter("unfinished") == before + 1
    put(path, NEW)
    assert get(path) == NEW


def test_p6_abort(kv, target):
    path, rewritten = target

    def die():
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        half(path)
        os.abort()

    child = Child(die)
    assert os.WTERMSIG(child.collect()) == signal.SIGABRT
    check_unpublished(kv, path, rewritten)


@pytest.mark.parametrize("way", ["O_RDWR", "O_WRONLY", "O_APPEND", "ftruncate", "fallocate", "copy"])
def test_p6_other_ways_to_change_a_file(kv, way):
    path, other = kv.dir / "f", kv.dir / "other"
    put(path, OLD)
    put(other, NEW)

    def change():
        flags = {"O_WRONLY": os.O_WRONLY, "O_APPEND": os.O_WRONLY | os.O_APPEND}
        fd = os.open(path, flags.get(way, os.O_RDWR))
        if way == "ftruncate":
            os.ftruncate(fd, 10)
        elif way == "fallocate":
            os.posix_fallocate(fd, 0, 4 * MIB)
        elif way == "copy":
            source = os.open(other, os.O_RDONLY)
            assert os.copy_file_range(source, fd, len(NEW)) == len(NEW)
        else:
            os.write(fd, NEW)

    ends_by(signal.SIGKILL, change)
    check_unpublished(kv, path, True)


def test_p6_created_and_not_written(kv):
    path = kv.dir / "f"
    ends_by(signal.SIGKILL, os.open, path, NEW_FILE, 0o644)
    eventually(lambda: not os.listdir(kv.dir), what="the end of a file without content")


def test_p6_thread_that_is_not_the_opener(kv, target):
    """Eight threads write; the first one, which opened the file, has ended before the kill."""
    path, rewritten = target

    def act():
        fd = os.open(path, NEW_FILE, 0o644)
        done = threading.Barrier(9)

        def write(number):
            os.pwrite(fd, NEW[number * 4096:number * 4096 + 4096], number * 4096)
            done.wait()
            threading.Event().wait()

        for i in range(8):
            threading.Thread(target=write, args=(i,), daemon=True).start()
        done.wait()

    ends_by(signal.SIGKILL, act)
    check_unpublished(kv, path, rewritten)


def test_p6_opened_by_a_thread(kv, target):
    path, rewritten = target

    def act():
        thread = threading.Thread(target=half, args=(path,))
        thread.start()
        thread.join()

    ends_by(signal.SIGTERM, act)
    check_unpublished(kv, path, rewritten)


def test_p6_first_thread_is_gone(kv, target):
    """The process goes on without its first thread, whose own end says nothing."""
    path, rewritten = target
    ready_out, ready_in = os.pipe()
    child = subprocess.Popen(
        [sys.executable, "-c", f"""
import ctypes, os, threading, time
def write():
    time.sleep(0.1)
    fd = os.open({os.fspath(path)!r}, os.O_CREAT | os.O_RDWR | os.O_TRUNC, 0o644)
    os.write(fd, b"half")
    os.write({ready_in}, b"x")
    time.sleep(1000)
threading.Thread(target=write).start()
ctypes.CDLL(None).syscall(60, 0)
"""], pass_fds=[ready_in])
    os.close(ready_in)
    assert os.read(ready_out, 1) == b"x"
    os.close(ready_out)
    child.kill()
    assert child.wait(30) == -signal.SIGKILL
    check_unpublished(kv, path, rewritten)


def test_p6_several_files_and_descriptors(kv):
    names = [kv.dir / f"f{i}" for i in range(20)]
    for path in names[10:]:
        put(path, OLD)

    def act():
        for path in names:
            fd = half(path)
            os.dup(fd)
            os.write(os.open(path, os.O_RDWR), b"by another descriptor")

    ends_by(signal.SIGKILL, act)
    for path in names:
        check_unpublished(kv, path, path in names[10:])


def test_p6_after_a_publish(kv):
    """What was published by fsync or by closing a copy stays; what came later goes."""
    path = kv.dir / "f"

    for publish in (os.fsync, lambda fd: os.close(os.dup(fd))):
        def act(publish=publish):
            fd = os.open(path, NEW_FILE, 0o644)
            os.write(fd, OLD)
            publish(fd)
            os.pwrite(fd, b"half of the next", 0)

        ends_by(signal.SIGKILL, act)
        check_unpublished(kv, path, True)
        os.unlink(path)


def test_p6_execed_writer(kv, target):
    """The descriptor goes on into another program of the same process."""
    path, rewritten = target

    def act():
        os.set_inheritable(half(path), True)
        os.execvp("sh", ["sh", "-c", "kill -9 $$"])

    assert os.WTERMSIG(Child(act).collect()) == signal.SIGKILL
    check_unpublished(kv, path, rewritten)


def test_p6_killed_script_whose_commands_had_written(kv, target):
    """Each command ended well, but whoever opened the file for them did not."""
    path, rewritten = target
    done = subprocess.run(["sh", "-c", f"{{ /bin/echo one; kill -9 $$; /bin/echo two; }} > {path}"],
                          check=False)
    assert done.returncode == -signal.SIGKILL
    eventually(lambda: kv.status()["open_handles"] == 0, what="RELEASE")
    check_unpublished(kv, path, rewritten)


@pytest.mark.parametrize("ending", ["_exit", "exit status", "return", "threads"])
def test_p6_normal_exit_without_close_publishes(kv, target, ending):
    path, _ = target

    def act():
        fd = os.open(path, NEW_FILE, 0o644)
        os.write(fd, NEW)
        if ending == "threads":
            threading.Thread(target=threading.Event().wait, daemon=True).start()
        if ending != "return":
            os._exit(9 if ending == "exit status" else 0)

    child = Child(act)
    assert os.WIFEXITED(child.collect())
    assert get(path) == NEW


# ---- Several processes on one open file ----

def test_p6_child_goes_on_where_its_killed_parent_only_opened(kv, agent):
    """Who was killed had not written: what the survivor writes and closes is whole."""
    path = kv.dir / "f"
    go_out, go_in = os.pipe()
    done_out, done_in = os.pipe()

    def launch():
        fd = os.open(path, NEW_FILE, 0o644)
        if os.fork() == 0:
            os.read(go_out, 1)
            os.write(fd, NEW)
            os.close(fd)
            os.write(done_in, b"x")
            os._exit(0)

    ends_by(signal.SIGKILL, launch)
    assert path.name in os.listdir(kv.dir)
    os.write(go_in, b"x")
    assert os.read(done_out, 1) == b"x"
    assert agent().read_file(path) == NEW
    for fd in (go_out, go_in, done_out, done_in):
        os.close(fd)


def test_p6_child_that_survives_cannot_finish_what_its_killed_parent_wrote(kv, target):
    path, rewritten = target
    go_out, go_in = os.pipe()
    result_out, result_in = os.pipe()

    def launch():
        fd = half(path)
        if os.fork() == 0:
            os.read(go_out, 1)
            text = b""
            for call in (lambda: os.write(fd, b"more"), lambda: os.fsync(fd)):
                try:
                    call()
                    text += b"-"
                except OSError as e:
                    text += b"E" if e.errno == 5 else b"?"
            os.close(fd)
            os.write(result_in, text)
            os._exit(0)

    ends_by(signal.SIGKILL, launch)
    check_unpublished(kv, path, rewritten)
    os.write(go_in, b"x")
    assert os.read(result_out, 9) == b"EE"
    check_unpublished(kv, path, rewritten)
    for fd in (go_out, go_in, result_out, result_in):
        os.close(fd)


def test_p6_killed_child_spoils_what_it_wrote_through_its_parents_descriptor(kv, target):
    path, rewritten = target
    fd = os.open(path, NEW_FILE, 0o644)
    os.write(fd, b"parent")
    ends_by(signal.SIGKILL, os.write, fd, b"half of the child")
    for call in (lambda: os.write(fd, b"more"), lambda: os.fsync(fd), lambda: os.close(fd)):
        with pytest.raises(OSError) as e:
            call()
        assert e.value.errno == 5
    check_unpublished(kv, path, rewritten)


def test_p6_killed_child_that_only_held_the_descriptor_does_not_matter(kv, agent):
    path = kv.dir / "f"
    fd = half(path)
    ends_by(signal.SIGKILL, os.fstat, fd)
    os.write(fd, NEW[MIB:])
    os.close(fd)
    assert agent().read_file(path) == NEW


def test_p6_and_p5_another_writer_of_the_name_goes_on(kv, agent):
    """The name stays for whoever else is writing the file."""
    path = kv.dir / "f"
    other = agent()
    ready_out, ready_in = os.pipe()

    def act():
        half(path)
        os.write(ready_in, b"x")
        threading.Event().wait()

    child = Child(act)
    os.read(ready_out, 1)
    fd = other.open(path, os.O_WRONLY | os.O_CREAT)  # who reads, too, waits for the first one's publish
    other.write(fd, OLD)
    child.kill()
    child.collect()
    assert path.name in os.listdir(kv.dir)
    other.close(fd)
    assert get(path) == OLD
    os.close(ready_out)
    os.close(ready_in)


# ---- Mappings: their pages come without a caller ----

@pytest.mark.parametrize("late", ["at exit", "before"])
@pytest.mark.parametrize("closed", [False, True], ids=["open", "closed"])
def test_p6_killed_with_a_shared_mapping(kv, closed, late):
    path = kv.dir / "f"
    before = b"\0" * MIB

    def act():
        fd = os.open(path, NEW_FILE, 0o644)
        os.ftruncate(fd, MIB)
        mapping = mmap.mmap(fd, MIB)
        if closed:
            LIBC.close(fd)  # mmap has a copy of its own, which dup made
            for name in os.listdir("/proc/self/fd"):
                if os.path.realpath(f"/proc/self/fd/{name}") == os.fspath(path):
                    LIBC.close(int(name))
        mapping[:] = NEW[:MIB]
        if late == "before":  # written back, but not by fsync, which publishes
            directory = os.open(kv.dir, os.O_RDONLY)
            assert LIBC.syncfs(directory) == 0
            os.close(directory)
        globals()["kept"] = mapping

    ends_by(signal.SIGKILL, act)
    if closed:
        # RELEASE, which decides, comes after the process's end.
        eventually(lambda: kv.status()["open_handles"] == 0, what="RELEASE")
        assert get(path) == before
    else:
        check_unpublished(kv, path, False)


def test_p6_mapping_of_a_process_that_ends_well_is_published(kv):
    path = kv.dir / "f"

    def act():
        fd = os.open(path, NEW_FILE, 0o644)
        os.ftruncate(fd, MIB)
        mapping = mmap.mmap(fd, MIB)
        os.close(fd)
        mapping[:] = NEW[:MIB]
        os._exit(0)

    Child(act).collect()
    eventually(lambda: get(path) == NEW[:MIB], what="the publish by RELEASE")


# ---- A daemon that cannot see how writers end ----

def test_p6_daemon_in_another_pid_namespace_publishes_and_says_so(fresh):
    kv = fresh(mount=False)
    kv.prefix = ["unshare", "--pid", "--fork", "--kill-child"]
    kv.mount()
    for i in range(3):
        ends_by(signal.SIGKILL, half, kv.mnt / f"f{i}")
        assert get(kv.mnt / f"f{i}") == NEW[:MIB]
    assert kv.log().count("another PID namespace") == 1


def test_p6_daemon_without_cap_sys_ptrace_publishes_what_others_wrote_and_says_so(fresh):
    kv = fresh(mount=False)
    kv.prefix = ["setpriv", "--bounding-set", "-sys_ptrace"]
    kv.mount()
    os.chmod(kv.mnt, 0o777)
    for i in range(3):
        ends_by(signal.SIGKILL, half, kv.mnt / f"f{i}", uid=NOBODY)
        assert get(kv.mnt / f"f{i}") == NEW[:MIB]
    assert kv.log().count("may not look") == 1


def test_p6_other_users_are_seen_by_root(kv):
    os.chmod(kv.dir, 0o777)
    ends_by(signal.SIGKILL, half, kv.dir / "f", uid=NOBODY)
    check_unpublished(kv, kv.dir / "f", False)
    assert as_nobody(os.listdir, kv.dir) == []
