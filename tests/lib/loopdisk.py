# SPDX-License-Identifier: Apache-2.0
"""Power cuts without a reboot: a filesystem on a loop disk whose image is cloned while it is in use.

The image lies on XFS, which clones a file at one moment and whole (cp --reflink): a clone is what
had reached the disk then, as after a power cut.
"""
import contextlib
import os
import shutil
import subprocess

from procs import eventually, run


def missing():
    """What this machine lacks for that, or None."""
    for program in ("mkfs.xfs", "mkfs.ext4", "losetup"):
        if not shutil.which(program):
            return f"{program} is not there"
    with open("/proc/filesystems", encoding="ascii") as f:
        known = f.read().split()
    return None if "xfs" in known and "ext4" in known else "the kernel has no xfs or no ext4"


def umount(path):
    # Whoever looks at all mounts can hold one for a moment.
    eventually(lambda: run("umount", path, check=False).returncode == 0, what="umount")


class LoopDisk:
    """.disk: where the filesystem is mounted; .survivor: where a cut's copy of it is, within cut()."""

    def __init__(self, home, size="700M"):
        self.home = home / "loop"
        self.outer, self.disk, self.survivor = (self.home / n for n in ("outer", "disk", "survivor"))
        for path in (self.home, self.outer, self.disk, self.survivor):
            path.mkdir()
        self.stack = contextlib.ExitStack()
        try:
            self.prepare(size)
        except BaseException:
            self.close()
            raise

    def prepare(self, size):
        run("truncate", "-s", "2G", self.home / "outer.img")
        run("mkfs.xfs", "-q", "-m", "reflink=1", self.home / "outer.img")
        run("mount", "-o", "loop", self.home / "outer.img", self.outer)
        self.stack.callback(umount, self.outer)
        run("truncate", "-s", size, self.outer / "disk.img")
        run("mkfs.ext4", "-q", self.outer / "disk.img")
        self.attach(self.stack, "disk.img", self.disk)

    def attach(self, stack, image, path):
        device = run("losetup", "--direct-io=on", "-f", "--show", self.outer / image).stdout.strip()
        stack.callback(run, "losetup", "-d", device)
        run("mount", device, path)
        stack.callback(umount, path)

    @contextlib.contextmanager
    def cut(self):
        subprocess.run(["cp", "--reflink=always", self.outer / "disk.img",
                        self.outer / "cut.img"], check=True)
        with contextlib.ExitStack() as stack:
            stack.callback(os.unlink, self.outer / "cut.img")
            self.attach(stack, "cut.img", self.survivor)
            yield

    def close(self):
        self.stack.close()
        shutil.rmtree(self.home, ignore_errors=True)
