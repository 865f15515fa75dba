# SPDX-License-Identifier: Apache-2.0
"""fs/gpu_protocol.h as a GPU helper speaks it: tickets, and the daemon's socket in the store."""
import fcntl
import os
import socket
import struct
from types import SimpleNamespace

TICKET = 3 << 30 | 48 << 16 | 0xBF << 8 | 6
MAGIC, VERSION = 0x4756464b, 1
HELLO, LOCATE, CHUNKS, DROP, UNWATCH, CHANGED, HOT = 1, 2, 3, 4, 5, 64, 65
WANT_HOT, RESIDENT = 1, 1
HOLE, DEVICE, FILE = 0, 1, 2
_REQUEST, _REPLY = "<IHHQ16sQQQIIII", "<IHHQiI16sQQQQQII"
_FIELDS = ("magic version type id status count session device hold ino number size uid "
           "flags").split()


def ticket(fd, reserved=0):
    """(token, ino, version, size) of an open file."""
    buffer = bytearray(40) + struct.pack("<Q", reserved)
    fcntl.ioctl(fd, TICKET, buffer)
    return bytes(buffer[:16]), *struct.unpack_from("<3Q", buffer, 16)


class Link:
    """One connection to the daemon of a mount."""

    def __init__(self, kv, hello=True, flags=0):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(30)
        self.socket.connect(str(kv.store / "gpu.sock"))
        self.notes = []
        if hello:
            self.hello = self.ask(HELLO, flags=flags)

    def send(self, kind, token=bytes(16), ino=0, number=0, hold=0, uid=0, first=0, flags=0, zero=0,
             magic=MAGIC, version=VERSION, request=7):
        self.socket.send(struct.pack(_REQUEST, magic, version, kind, request, token, ino, number, hold,
                                     uid, first, flags, zero))

    def receive(self):
        message, fds, _, _ = socket.recv_fds(self.socket, 1 << 16, 64)
        if not message:
            raise ConnectionResetError("the daemon has ended the connection")
        reply = SimpleNamespace(**dict(zip(_FIELDS, struct.unpack_from(_REPLY, message))))
        reply.fds, reply.payload = fds, message[struct.calcsize(_REPLY):]
        return reply

    def ask(self, kind, **fields):
        """The reply; notes that come before it are kept."""
        self.send(kind, **fields)
        while (reply := self.receive()).id == 0:
            self.notes.append(reply)
        return reply

    def note(self):
        return self.notes.pop(0) if self.notes else self.receive()

    def chunks(self, hold, first=0):
        """[(number, where, sum, [(offset, length, device, block)])] of one reply."""
        reply, at, found = self.ask(CHUNKS, hold=hold, first=first), 0, []
        assert reply.status == 0, os.strerror(-reply.status)
        for _ in range(reply.count):
            number, where, count, total = struct.unpack_from("<IHHQ", reply.payload, at)
            at += 16
            extents = [struct.unpack_from("<QIHH", reply.payload, at + 16 * i) for i in range(count)]
            at += 16 * count
            found.append((number, where, total, extents))
        assert at == len(reply.payload)
        return found

    def close(self):
        self.socket.close()
