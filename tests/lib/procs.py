# SPDX-License-Identifier: Apache-2.0
"""Other processes: functions run in forked children (as any user), and agents that keep files open.

Every wait has an end: a child that is late is killed and reported. The ends are for what hangs, and
far behind what a slow machine under load needs.
"""
import contextlib
import ctypes
import faulthandler
import fcntl
import mmap
import os
import pickle
import resource
import select
import signal
import struct
import subprocess
import time
import traceback

NOBODY = 65534
# The long run of tools/check: more rounds of the same.
LONG = bool(os.environ.get("KVFS_LONG"))
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def run(*command, timeout=120, check=True, **kwargs):
    """Runs a command and returns it; a failure shows what it printed."""
    done = subprocess.run([os.fspath(c) for c in command], capture_output=True, text=True,
                          timeout=timeout, check=False, errors="surrogateescape", **kwargs)
    if check and done.returncode:
        raise AssertionError(f"{command} exited {done.returncode}:\n{done.stdout}{done.stderr}")
    return done


def become(uid, gid, groups=()):
    os.setgroups(groups)
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


class Child:
    """FUNC(*ARGS) in a forked child; result() returns what it returned or raises what it raised."""

    living = set()

    @classmethod
    def end_all(cls):
        """Children whose test did not wait for them."""
        for child in list(cls.living):
            child.kill()
            child.collect()

    def __init__(self, func, *args, uid=None, gid=None, groups=(), umask=None):
        self.fd, out = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(out)
            self.living.add(self)
            return
        status = 1
        try:
            os.close(self.fd)
            faulthandler.disable()  # a child may be meant to die
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if umask is not None:
                os.umask(umask)
            if uid is not None:
                become(uid, uid if gid is None else gid, groups)
            # After the change of user, which clears it: no child outlives the tests.
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            try:
                reply = (True, func(*args))
            except BaseException as e:  # the parent raises it again
                e.add_note(f"in a child process:\n{traceback.format_exc()}")
                reply = (False, e)
            data = pickle.dumps(reply)
            while data:
                data = data[os.write(out, data):]
            status = 0
        finally:
            os._exit(status)

    def kill(self, number=signal.SIGKILL):
        if self.pid:
            os.kill(self.pid, number)

    def collect(self):
        os.close(self.fd)
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        self.living.discard(self)
        return status

    def result(self, timeout=120):
        data = bytearray()
        end = time.monotonic() + timeout
        try:
            while select.select([self.fd], [], [], max(0, end - time.monotonic()))[0]:
                piece = os.read(self.fd, 1 << 20)
                if not piece:
                    break
                data += piece
            else:
                self.kill()
                raise TimeoutError(f"a child process did not end within {timeout} s")
        finally:
            status = self.collect()
        if not data:
            raise ChildProcessError(f"a child process died: wait status {status:#x}")
        ok, value = pickle.loads(data)
        if ok:
            return value
        raise value


def in_child(func, *args, timeout=120, **who):
    return Child(func, *args, **who).result(timeout)


def as_nobody(func, *args, **kwargs):
    return in_child(func, *args, uid=NOBODY, **kwargs)


def parallel(func, arguments, timeout=200, **who):
    """FUNC(ARGUMENT) for each argument, each in a process of its own, all at once."""
    children = [Child(func, argument, **who) for argument in arguments]
    results, error = [], None
    for child in children:
        try:
            results.append(child.result(timeout))
        except BaseException as e:  # all children are collected before it is raised
            error = error or e
    if error:
        raise error
    return results


def race(*jobs, seconds=3):
    """
    JOB(GOING) for each (JOB, LEAST) at once, each in a process of its own; returns what they return.

    Each goes on while GOING(how far it has got) says so: for SECONDS, and on a slow machine until all
    have got as far as LEAST.
    """
    progress = memoryview(mmap.mmap(-1, 8 * len(jobs))).cast("Q")
    begun = time.monotonic()

    def late():
        return [who for who, (_, least) in enumerate(jobs) if progress[who] < least]

    def run_job(who):
        def going(got):
            progress[who] = got
            passed = time.monotonic() - begun
            return passed < seconds or (passed < 90 and bool(late()))

        return jobs[who][0](going)

    results = parallel(run_job, range(len(jobs)))
    assert not late(), f"jobs {late()} got no further than {list(progress)}"
    return results


def open_files(pid):
    """{number: what it leads to} of PID's descriptors; those that end meanwhile are not there."""
    links = {}
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            links[int(number)] = os.readlink(f"/proc/{pid}/fd/{number}")
    return links


def spare_descriptors(pid, count):
    """Leaves PID numbers for COUNT more descriptors. Returns its limits from before."""
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    used = {int(number) for number in os.listdir(f"/proc/{pid}/fd")}
    limit = [n for n in range(len(used) + count + 1) if n not in used][count]
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, limits[1]))
    return limits


def eventually(condition, timeout=90, what="the condition"):
    """Waits until CONDITION() is true, and returns it."""
    end = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"{what} did not become true within {timeout} s")
        time.sleep(0.02)


class _Files:
    """What an agent can do; handles are small numbers."""

    def __init__(self):
        self.maps = {}

    def open(self, path, flags=os.O_RDONLY, mode=0o644):
        return os.open(path, flags, mode)

    def close(self, fd):
        os.close(fd)

    def dup(self, fd):
        return os.dup(fd)

    def read(self, fd, length):
        return os.read(fd, length)

    def pread(self, fd, length, offset=0):
        return os.pread(fd, length, offset)

    def write(self, fd, data):
        return os.write(fd, data)

    def pwrite(self, fd, data, offset=0):
        return os.pwrite(fd, data, offset)

    def fsync(self, fd):
        os.fsync(fd)

    def ftruncate(self, fd, size):
        os.ftruncate(fd, size)

    def allocate(self, fd, length):
        os.posix_fallocate(fd, 0, length)

    def size(self, fd):
        return os.fstat(fd).st_size

    def flock(self, fd, operation):
        fcntl.flock(fd, operation)

    def lockf(self, fd, operation, length=0, start=0):
        fcntl.lockf(fd, operation, length, start)

    def read_file(self, path):
        with open(path, "rb") as f:
            return f.read()

    def map(self, fd, length, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ):
        key = len(self.maps) + 1
        self.maps[key] = mmap.mmap(fd, length, flags=flags, prot=prot)
        return key

    def map_read(self, key, offset, length):
        return self.maps[key][offset:offset + length]

    def map_write(self, key, offset, data):
        self.maps[key][offset:offset + len(data)] = data

    def msync(self, key):
        self.maps[key].flush()

    def unmap(self, key):
        self.maps.pop(key).close()


def send_message(fd, value):
    data = pickle.dumps(value)
    for part in (struct.pack("<Q", len(data)), data):
        with memoryview(part) as view:
            at = 0
            while at < len(view):
                at += os.write(fd, view[at:])


def receive_message(fd):
    def exactly(length):
        data, at = bytearray(length), 0
        with memoryview(data) as view:
            while at < length:
                count = os.readv(fd, [view[at:]])
                if count == 0:
                    raise EOFError("the other process is gone")
                at += count
        return data
    return pickle.loads(exactly(*struct.unpack("<Q", exactly(8))))


class Agent:
    """A process that does what it is told, call by call: agent.open(...), agent.pread(...)."""

    tools = _Files

    def __init__(self, **who):
        requests_in, self.requests = os.pipe()
        self.replies, replies_in = os.pipe()
        self.child = Child(self._serve, requests_in, replies_in, **who)
        os.close(requests_in)
        os.close(replies_in)

    def _serve(self, requests, replies):
        files = self.tools()
        while True:
            name, args = receive_message(requests)
            if name == "exit":
                return
            try:
                reply = (True, getattr(files, name)(*args))
            except Exception as e:  # the caller raises it again
                reply = (False, e)
            send_message(replies, reply)

    def __getattr__(self, name):
        def call(*args, timeout=90):
            self.send(name, *args)
            return self.receive(timeout)
        return call

    def send(self, name, *args):
        """Starts a call; its answer comes from receive()."""
        send_message(self.requests, (name, args))

    def receive(self, timeout=90):
        if not select.select([self.replies], [], [], timeout)[0]:
            raise TimeoutError(f"an agent's call did not return within {timeout} s")
        ok, value = receive_message(self.replies)
        if ok:
            return value
        raise value

    def stop(self, kill=False):
        """Ends the process; its descriptors and mappings go as at any exit."""
        if self.child.pid == 0:
            return
        if kill:
            self.child.kill()
        else:
            self.send("exit")
        try:
            self.child.result()
        except ChildProcessError:
            if not kill:
                raise
        finally:
            os.close(self.requests)
            os.close(self.replies)
