# SPDX-License-Identifier: Apache-2.0
"""Makes the Nth call of a kind fail in a daemon that has tests/crash/fault.c preloaded."""
import os
import struct

KINDS = ("none", "malloc", "open", "mmap", "thread", "submit", "sync",
         "read", "sector", "drive", "fsync", "swap",
         "reply_short", "reply_refused", "reply_gone", "reply_end")
_FORMAT = "<3q"


class Faults:
    """The file is mapped by the daemon, and never changes its size."""

    def __init__(self, path):
        self.path = path
        path.write_bytes(bytes(4096))

    def write(self, data):
        with open(self.path, "r+b", buffering=0) as f:
            os.pwrite(f.fileno(), data, 0)

    def arm(self, kind, number):
        """The NUMBERth call of KIND from now on fails."""
        self.write(struct.pack(_FORMAT, KINDS.index(kind), number, 0))

    def disarm(self):
        """Returns whether one has failed."""
        self.write(bytes(8))  # first, so that none does behind the look
        _, _, struck = struct.unpack(_FORMAT, self.path.read_bytes()[:24])
        return struck > 0
