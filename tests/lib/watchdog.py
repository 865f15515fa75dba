# SPDX-License-Identifier: Apache-2.0
"""The process that keeps a hung mount from hanging the test run.

A file operation on a FUSE mount whose daemon does not answer cannot be killed; only aborting the
connection ends it. The test process may be the one that hangs, so this runs outside of it.

It reads lines from stdin:
    base DIR                      remove DIR when the test process is gone
    add CONNECTION PID MOUNTPOINT a mount to look after
    del CONNECTION                the mount is gone
    arm SECONDS REPORT            abort all mounts then, and write REPORT, unless disarmed before
    disarm
    quit
The end of input means that the test process ended without quit. Either way, whatever mount
is left is removed.
"""
import os
import select
import shutil
import signal
import subprocess
import sys
import time

CONNECTIONS = sys.argv[1]


def abort(connection):
    try:
        with open(f"{CONNECTIONS}/{connection}/abort", "w") as f:
            f.write("1")
    except OSError:
        pass


def is_daemon_of(pid, mountpoint):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as f:
            return os.fsencode(mountpoint) in f.read().split(b"\0")
    except OSError:
        return False


def remove(connection, pid, mountpoint):
    abort(connection)
    subprocess.run(["umount", "-l", mountpoint], stderr=subprocess.DEVNULL, check=False)
    if is_daemon_of(pid, mountpoint):
        os.kill(pid, signal.SIGKILL)


def watch(mounts, bases):
    """Until the end: keeps MOUNTS (connection: (pid, mountpoint)) and BASES up to date."""
    deadline = report = None
    buffer = b""
    while True:
        wait = None if deadline is None else max(0, deadline - time.monotonic())
        ready, _, _ = select.select([0], [], [], wait)
        if not ready:
            for connection in mounts:
                abort(connection)
            with open(report, "w") as f:
                f.write("a file operation did not end in time; the mounts were aborted\n")
            deadline = None
            continue
        data = os.read(0, 65536)
        if not data:
            return
        buffer += data
        *lines, buffer = buffer.split(b"\n")
        for line in lines:
            verb, *words = os.fsdecode(line).split(" ")
            if verb == "base":
                bases.append(words[0])
            elif verb == "add":
                mounts[words[0]] = (int(words[1]), words[2])
            elif verb == "del":
                mounts.pop(words[0], None)
            elif verb == "arm":
                deadline, report = time.monotonic() + float(words[0]), words[1]
            elif verb == "disarm":
                deadline = None
            elif verb == "quit":
                return


def main():
    mounts, bases = {}, []
    watch(mounts, bases)
    for connection, (pid, mountpoint) in mounts.items():
        remove(connection, pid, mountpoint)
    subprocess.run(["umount", CONNECTIONS], stderr=subprocess.DEVNULL, check=False)
    for base in bases:
        shutil.rmtree(base, ignore_errors=True)


if __name__ == "__main__":
    main()
