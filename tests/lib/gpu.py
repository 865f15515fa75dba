# SPDX-License-Identifier: Apache-2.0
"""The GPU helper and engines that use it, on the host backend or on the fake driver."""
import ctypes
import hashlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys

import pytest
from kvmount import ROOT, build_folder
from procs import Agent, eventually

MAGIC, VERSION = 0x3167766B, 3
HELLO, MAP, READY, UNMAP, PREFETCH, STAT, EVICT, REVOKE, INVALID = range(1, 10)
EARLY, NOSTAGE, REVOCABLE = 1, 2, 4


def load_kvg():
    """The Python module, on the library under test. (Python cannot load one with sanitizers.)"""
    library = build_folder() / "gpu" / "libkvg.so.0"
    if "KVG_LIBRARY" not in os.environ and b"libasan" in library.read_bytes():
        pytest.skip("a library with sanitizers: name another in KVG_LIBRARY")
    os.environ.setdefault("KVG_LIBRARY", str(library))
    if str(ROOT / "gpu") not in sys.path:
        sys.path.insert(0, str(ROOT / "gpu"))
    import kvg
    return kvg


class _Tools:
    """What an engine's process can do."""

    def __init__(self):
        self.ctx, self.buffers, self.seen, self.memory = None, {}, [], None

    def connect(self, path, kind, environment=None):
        os.environ.update(environment or {})
        if kind == "cuda":
            # As in an engine: the driver is there before the library.
            ctypes.CDLL(str(build_folder() / "tests" / "gpu" / "fake" / "libcuda.so.1"),
                        ctypes.RTLD_GLOBAL)
        self.kvg = load_kvg()
        self.ctx = self.kvg.Context(path, backend=kind, on_event=self._event)

    def reconnect(self, path, kind):
        self.old = self.ctx
        self.ctx = self.kvg.Context(path, backend=kind, on_event=self._event)

    def _event(self, buffer, event, ms):
        key = next((k for k, b in self.buffers.items() if b is buffer), None)
        self.seen.append((key, event, ms))

    def map(self, path, off=0, length=0, flags=0, how=0):
        """(key, bytes, version); HOW: O_DIRECT leaves a file that is not in DRAM where it is."""
        fd = os.open(path, os.O_RDONLY | how)
        try:
            buffer = self.ctx.map(fd, off, length, flags)
        finally:
            os.close(fd)
        key = len(self.buffers) + 1
        self.buffers[key] = buffer
        return key, buffer.length, buffer.version

    def read(self, key, off=0, length=None):
        buffer = self.buffers[key]
        return ctypes.string_at(buffer.ptr + off, buffer.length - off if length is None else length)

    def digest(self, key):
        return hashlib.sha256(self.read(key)).hexdigest()

    def poke(self, key):
        ctypes.memset(self.buffers[key].ptr, 1, 1)

    def wait(self, key, upto=None, timeout=None):
        self.buffers[key].wait(upto, timeout)

    def unmap(self, key):
        self.buffers.pop(key).close()

    def forget(self, key):
        """Keeps the memory, and says nothing to the helper."""
        self.lost = self.buffers.pop(key)

    def events(self, timeout=0):
        """[(key, event, ms)] so far; waits for the first one."""
        if not self.seen and select.select([self.ctx], [], [], timeout)[0]:
            self.ctx.dispatch()
        found, self.seen = self.seen, []
        return found

    def dispatch(self):
        self.ctx.dispatch()

    def stats(self, path=None):
        if path is None:
            return self.ctx.stats()
        with open(path, "rb") as f:
            return self.ctx.stats(f)

    def prefetch(self, path, off=0, length=0, prio=0, ttl=0):
        with open(path, "rb") as f:
            self.ctx.prefetch(f, off, length, prio, ttl)

    def evict(self, path):
        with open(path, "rb") as f:
            return self.ctx.evict(f)

    def helper(self):
        return self.ctx.helper()

    def hang_up(self):
        """Closes the connection behind the library's back: the process lives on with its maps."""
        os.close(self.ctx.fileno())


class Engine(Agent):
    """A process with libkvg: engine.map(path), engine.read(key)..."""

    tools = _Tools

    def __init__(self, helper=None, **who):
        super().__init__(**who)
        if helper is not None:
            self.connect(str(helper.socket), helper.kind, helper.engine_environment())


def _die_with_parent():
    """No helper outlives the tests, however they end."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Helper:
    """A kvgpud for one mount."""

    def __init__(self, kv, kind="host", *arguments, **environment):
        self.kv, self.backend = kv, kind
        # What an engine uses: drives are the helper's alone.
        self.kind = "cuda" if kind == "cufile" else kind
        # Files that come by themselves are in the way of most tests.
        self.arguments = [a for a in arguments if a != "--hints"]
        if "--hints" not in arguments:
            self.arguments.append("--no-hints")
        self.folder = kv.sandbox.folder("gpu")
        self.folder.chmod(0o777)
        self.socket = self.folder / "s"
        self.log_path = self.folder / "log"
        self.report = self.folder / "report"
        self.control = self.folder / "control"
        self.environment = environment
        self.process = None
        self.start()

    def _variables(self):
        if self.kind != "cuda":
            return {}
        # Containers have their files on it; the real cuFile refuses it.
        return {"FAKECU_CPU": "1", "FAKECU_CONTROL": str(self.control), "FAKECUFILE_OVERLAY": "1"}

    def engine_environment(self):
        """For engines: the faults are the helper's."""
        return {k: v for k, v in self._variables().items() if k != "FAKECU_CONTROL"}

    def start(self):
        load_kvg()
        fake = build_folder() / "tests" / "gpu" / "fake"
        environment = {**os.environ, "LD_LIBRARY_PATH": str(fake), **self._variables(),
                       "FAKECU_REPORT": str(self.report), **self.environment}
        if self.kind == "host":
            environment.pop("LD_LIBRARY_PATH")
        self.control.touch()
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(
                [build_folder() / "gpu" / "kvgpud", self.kv.store, "--socket", self.socket,
                 "--backend", self.backend, "--hbm", "256M", *self.arguments],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, cwd="/",
                preexec_fn=_die_with_parent)
        eventually(lambda: self.socket.exists() and "ready" in self.log() or
                   self.process.poll() is not None, timeout=120, what="a helper that listens")
        assert self.process.poll() is None, self.log()
        return self

    def log(self):
        return self.log_path.read_text(errors="replace")

    def tell(self, *lines):
        """What the fake driver is to do from now on, in the helper."""
        # In one piece: it looks all the time, and what it saw half would be taken for the whole.
        new = self.control.with_suffix(".new")
        new.write_text("".join(line + "\n" for line in lines))
        new.rename(self.control)

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)
        self.log_path.write_text("")

    def stop(self):
        if self.process.poll() is None:
            self.process.terminate()
        status = self.process.wait(30)
        assert "Sanitizer" not in self.log() and "runtime error" not in self.log(), self.log()
        return status

    def stats(self):
        """Without an engine."""
        kvg = load_kvg()
        with kvg.Context(str(self.socket), control=True) as ctx:
            return ctx.stats()


class Raw:
    """A connection that can send anything."""

    def __init__(self, helper):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(30)
        self.socket.connect(str(helper.socket))

    def send(self, kind, payload=b"", fds=(), flags=0, request=1, map_id=0, off=0, length=0,
             version=VERSION):
        header = struct.pack("<IHHIIQQQQiIQ", MAGIC, version, kind, flags, 0, request, map_id, off,
                             length, 0, len(payload), 0)
        socket.send_fds(self.socket, [header + payload], list(fds))

    def receive(self):
        """(kind, flags, status, length, descriptors)"""
        data, fds, _, _ = socket.recv_fds(self.socket, 1 << 16, 253)
        if not data:
            raise ConnectionResetError("the helper has ended the connection")
        h = struct.unpack_from("<IHHIIQQQQiIQ", data)
        return h[2], h[3], h[9], h[8], fds

    def ask(self, *args, **kwargs):
        self.send(*args, **kwargs)
        return self.receive()

    def close(self):
        self.socket.close()
