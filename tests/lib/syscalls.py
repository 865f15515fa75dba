# SPDX-License-Identifier: Apache-2.0
"""System calls that Python's os module lacks, and errno checks."""
import ctypes
import errno
import os

import pytest

_libc = ctypes.CDLL(None, use_errno=True)
_AT_FDCWD = -100

RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2
FALLOC_KEEP_SIZE = 1
FALLOC_PUNCH_HOLE = 2
FALLOC_ZERO_RANGE = 16
UTIME_NOW = (1 << 30) - 1
UTIME_OMIT = (1 << 30) - 2


def _checked(result, what):
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
    return result


def fails(number, func, *args):
    """FUNC(*ARGS) fails with errno NUMBER."""
    with pytest.raises(OSError) as e:
        func(*args)
    got = errno.errorcode.get(e.value.errno, e.value.errno)
    assert e.value.errno == number, f"{got}, not {errno.errorcode[number]}"


def rename2(old, new, flags):
    _checked(_libc.renameat2(_AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new),
                             ctypes.c_uint(flags)), os.fspath(old))


def fallocate(fd, mode, offset, length):
    _checked(_libc.fallocate(fd, mode, ctypes.c_long(offset), ctypes.c_long(length)), None)


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


def utimensat(path, atime, mtime):
    """ATIME and MTIME are (seconds, nanoseconds), or (0, UTIME_NOW or UTIME_OMIT)."""
    times = (_Timespec * 2)(_Timespec(*atime), _Timespec(*mtime))
    _checked(_libc.utimensat(_AT_FDCWD, os.fsencode(path), times, 0), os.fspath(path))


class _Dirent(ctypes.Structure):
    _fields_ = [("ino", ctypes.c_uint64), ("offset", ctypes.c_int64), ("length", ctypes.c_ushort),
                ("type", ctypes.c_ubyte), ("name", ctypes.c_char * 256)]


_libc.opendir.restype = ctypes.c_void_p
_libc.readdir64.restype = ctypes.POINTER(_Dirent)
_libc.telldir.restype = ctypes.c_long
for _name in ("readdir64", "telldir", "closedir", "rewinddir"):
    getattr(_libc, _name).argtypes = [ctypes.c_void_p]
_libc.seekdir.argtypes = [ctypes.c_void_p, ctypes.c_long]


class Directory:
    """opendir(3) and its family."""

    def __init__(self, path):
        self.stream = _libc.opendir(os.fsencode(path))
        if not self.stream:
            _checked(-1, os.fspath(path))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        _libc.closedir(self.stream)

    def read(self):
        """The next name, or None at the end."""
        entry = _libc.readdir64(self.stream)
        if not entry:
            return None
        # Names may be longer than the struct says: take them from memory, up to the NUL.
        address = ctypes.addressof(entry.contents) + _Dirent.name.offset
        return ctypes.string_at(address)

    def tell(self):
        return _libc.telldir(self.stream)

    def seek(self, place):
        _libc.seekdir(self.stream, place)

    def rewind(self):
        _libc.rewinddir(self.stream)
