# SPDX-License-Identifier: Apache-2.0
"""Imports one engine's program and makes instances of it: see tests/lib/engines.py."""
import ctypes
import errno
import importlib
import logging
import os
import pickle
import signal
import socket
import sys
import traceback

from data import blob
from procs import receive_message, send_message

_PR_SET_PDEATHSIG = 1


def die_with_parent():
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class ErrorLog(logging.Handler):
    """What the engine logs as an error fails the call that it happened in, or the next one."""

    def __init__(self):
        super().__init__(logging.ERROR)
        self.lines = []
        for logger in (logging.root, *logging.root.manager.loggerDict.values()):
            if isinstance(logger, logging.RootLogger) or not getattr(logger, "propagate", True):
                logger.addHandler(self)

    def emit(self, record):
        line = record.getMessage()
        # To some engines a miss is an error.
        is_miss = record.exc_info and record.exc_info[0] is FileNotFoundError
        if not is_miss and os.strerror(errno.ENOENT) not in line:
            self.lines.append(line)


def call(engine, name, *args):
    if name == "exit":
        return engine.close()
    if name == "offers":
        return [n for n in dir(engine) if not n.startswith("_")]
    return getattr(engine, name)(*args)


def serve(connection, module, kind, folder, options):
    log = ErrorLog()
    engine = None
    name = None
    while name != "exit":
        try:
            if engine is None:
                engine = getattr(module, kind)(folder, **options)
                value = None
            else:
                name, args = receive_message(connection)
                value = call(engine, name, *args)
            ok = True
            if log.lines:
                lines, log.lines = log.lines, []
                raise AssertionError(f"the engine logged errors: {lines}")
        except EOFError:
            return
        except BaseException:  # the caller raises it again
            ok, value = False, traceback.format_exc()
        send_message(connection, (ok, value))
        if engine is None:
            return


def main():
    requests = socket.socket(fileno=int(sys.argv[2]))
    die_with_parent()
    module = importlib.import_module(f"{sys.argv[1]}_engine")
    blob(0, 1)  # what all of them are cut from is made before the forks
    requests.send(b"ready")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        data, descriptors, _, _ = socket.recv_fds(requests, 1 << 16, 1)
        if not data:
            return
        pid = os.fork()
        if pid == 0:
            die_with_parent()
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            serve(descriptors[0], module, *pickle.loads(data))
            # Threads of an engine must not keep its process.
            os._exit(0)
        os.close(descriptors[0])
        requests.send(str(pid).encode())


main()
