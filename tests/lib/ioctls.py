# SPDX-License-Identifier: Apache-2.0
"""The ioctls of fs/kvfs_ioctl.h, as a program without the header would make them."""
import contextlib
import fcntl
import os
import struct

_MAGIC = 0xBF
LOOKUP_SIZE, WARM_SIZE, DROP_SIZE, SCRUB_SIZE, TICKET_SIZE = 16376, 48, 1040, 1080, 48
LOOKUP_BYTES = LOOKUP_SIZE - 24
LOOKUP_STOP, WARM_ASK, DROP_LEASED = 1, 1, 1
WARM_BYTES = 32 << 20


def command(number, size, direction=3):
    return direction << 30 | size << 16 | _MAGIC << 8 | number


LOOKUP = command(1, LOOKUP_SIZE)
WARM = command(2, WARM_SIZE)
COOL = command(3, DROP_SIZE)
EVICT = command(4, DROP_SIZE)
SCRUB = command(5, SCRUB_SIZE)
TICKET = command(6, TICKET_SIZE)


@contextlib.contextmanager
def opened(path, flags=os.O_RDONLY):
    fd = os.open(path, flags)
    try:
        yield fd
    finally:
        os.close(fd)


def lookup_raw(fd, count, length, names, flags=0, reserved=0):
    """One call with a request of any shape: (leading, present, the bitmap's bytes)."""
    buffer = bytearray(struct.pack("<6I", count, length, flags, reserved, 0, 0) + names)
    buffer += bytes(LOOKUP_SIZE - len(buffer))
    fcntl.ioctl(fd, LOOKUP, buffer)
    _, _, _, _, leading, present = struct.unpack_from("<6I", buffer)
    return leading, present, bytes(buffer[24:24 + (count + 7) // 8])


def lookup(fd, names, flags=0):
    """(how many from the first on are present, [present or not]) of any number of names."""
    found, leading, at = [], 0, 0
    while at < len(names):
        packed, count = b"", 0
        for name in names[at:]:
            word = os.fsencode(name) + b"\0"
            if len(packed) + len(word) > LOOKUP_BYTES:
                break
            packed += word
            count += 1
        first, present, bitmap = lookup_raw(fd, count, len(packed), packed, flags)
        bits = [bool(bitmap[i // 8] >> i % 8 & 1) for i in range(count)]
        assert sum(bits) == present
        assert first == (bits.index(False) if False in bits else count)
        if leading == at:
            leading += first
        found += bits
        at += count
        if flags & LOOKUP_STOP and leading < at:
            break
    return leading, found


def warm(fd, offset=0, length=WARM_BYTES, flags=0, reserved=0):
    """(bytes looked at, bytes of them in DRAM, bytes in holes)"""
    buffer = bytearray(struct.pack("<QQIIQQQ", offset, length, flags, reserved, 0, 0, 0))
    fcntl.ioctl(fd, WARM, buffer)
    return struct.unpack_from("<QQQ", buffer, 24)


def drop(fd, number, name, flags=0, reserved=0):
    """COOL or EVICT: the bytes freed."""
    buffer = bytearray(struct.pack("<IIQ1024s", flags, reserved, 0, os.fsencode(name)))
    fcntl.ioctl(fd, number, buffer)
    return struct.unpack_from("<Q", buffer, 8)[0]
