# SPDX-License-Identifier: Apache-2.0
"""A device that stops answering on command: the one file of tests/mount/hangfs.c."""
import signal
import subprocess

from data import GIB, MIB
from kvmount import build_folder, mount_device
from procs import eventually, run


class Drive:
    """A file that can hang, and room for another that does not: in memory, so never slow by itself."""

    def __init__(self, sandbox):
        self.sandbox = sandbox
        self.home = sandbox.folder("drive")
        run("mount", "-t", "tmpfs", "-o", f"size={GIB}", "kvfs-test", self.home)
        self.file, self.flag, self.mnt = (self.home / n for n in ("file", "file.hang", "mnt"))
        self.mnt.mkdir()
        with open(self.file, "wb") as file:
            file.truncate(256 * MIB)
        self.server = subprocess.Popen(
            [build_folder() / "tests" / "mount" / "hangfs", self.file, self.mnt])
        eventually(lambda: mount_device(self.mnt) is not None, what="hangfs")
        self.connection = mount_device(self.mnt)
        sandbox.tell("add", self.connection, self.server.pid, self.mnt)
        self.data = self.mnt / "data"

    def hang(self):
        self.flag.touch()

    def answer(self):
        self.flag.unlink(missing_ok=True)

    def close(self):
        self.answer()
        run("umount", "-l", self.mnt, check=False)
        self.server.send_signal(signal.SIGTERM)
        self.server.wait(30)
        self.sandbox.tell("del", self.connection)
        run("umount", "-l", self.home)
