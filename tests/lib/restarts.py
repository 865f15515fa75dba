# SPDX-License-Identifier: Apache-2.0
"""Mounts with -o restart: the daemon behind the supervisor, and ways to have another follow it."""
import os
import signal

from procs import eventually


def daemon_of(kv):
    """The pid of the daemon that serves now: the supervisor's only child. 0: there is none."""
    with open(f"/proc/{kv.pid}/task/{kv.pid}/children", encoding="ascii") as file:
        words = file.read().split()
    return int(words[0]) if words else 0


def follow(kv, before):
    """Waits until another daemon than BEFORE serves."""
    eventually(lambda: daemon_of(kv) not in (0, before), what="the next daemon")
    os.statvfs(kv.mnt)


def kill(kv):
    before = eventually(lambda: daemon_of(kv), what="a daemon")
    os.kill(before, signal.SIGKILL)
    follow(kv, before)


def ask(kv):
    """A planned restart."""
    before = daemon_of(kv)
    os.kill(kv.pid, signal.SIGHUP)
    follow(kv, before)


def restartable(fresh, **options):
    kv = fresh(restart=None, **options)
    kv.expect_errors("the daemon died, starting another")
    return kv
