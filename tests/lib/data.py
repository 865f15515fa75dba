# SPDX-License-Identifier: Apache-2.0
"""Contents: seeded, checkable, and of any size without holding it in memory; and trees compared."""
import functools
import os
import random
import stat

PIECE = 8 << 20
KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


@functools.cache
def _twice():
    return random.Random("kvfs").randbytes(PIECE) * 2


def blob(seed, length, number=0):
    """
    LENGTH bytes that only SEED gives: a turn of one random sequence, another for each piece.

    No 4 KiB block equals that of another seed (or another one of this seed) at the same place.
    """
    if length > PIECE:
        return b"".join(blob(seed, min(PIECE, length - start), start // PIECE)
                        for start in range(0, length, PIECE))
    turn = (seed * 15_485_863 + number * 104_729 + 1) % PIECE
    return _twice()[turn:turn + length]


def piece(seed, number):
    """Piece NUMBER of blob(SEED, ...), PIECE bytes."""
    return blob(seed, PIECE, number)


def same(one, other):
    """Whether two large buffers are equal, compared fast."""
    return len(one) == len(other) and all(
        one[i:i + PIECE] == other[i:i + PIECE] for i in range(0, len(one), PIECE))


def write_big(path, size, seed, flags=os.O_CREAT | os.O_WRONLY | os.O_TRUNC):
    fd = os.open(path, flags, 0o644)
    try:
        for offset in range(0, size, PIECE):
            data = memoryview(piece(seed, offset // PIECE))[:size - offset]
            written = os.write(fd, data)
            assert written == len(data), f"short write at {offset}: {written} of {len(data)}"
    finally:
        os.close(fd)


def check_range(fd, offset, length, seed):
    """The bytes OFFSET.. of a file made by write_big; the range must lie within one piece."""
    start = offset % PIECE
    data = os.pread(fd, length, offset)
    assert len(data) == length, f"short read at {offset}: {len(data)} of {length}"
    assert data == piece(seed, offset // PIECE)[start:start + length], f"wrong bytes near {offset}"


def check_big(path, size, seed, flags=os.O_RDONLY):
    fd = os.open(path, flags)
    try:
        assert os.fstat(fd).st_size == size
        for offset in range(0, size, PIECE):
            check_range(fd, offset, min(PIECE, size - offset), seed)
        assert os.pread(fd, 1, size) == b""
    finally:
        os.close(fd)


def put(path, data):
    """Writes a file with one write() and closes it."""
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
    try:
        assert os.write(fd, data) == len(data)
    finally:
        os.close(fd)


def get(path):
    with open(path, "rb", buffering=0) as f:
        return f.read()


def put_synced(path, data):
    put(path, data)
    sync(path)


def sync(path):
    """Waits until the published file is durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace(path, data):
    """The way most engines store: a temporary file, renamed."""
    temporary = f"{os.fspath(path)}.{os.getpid()}.tmp"
    put(temporary, data)
    os.replace(temporary, path)


def copy(source, target, size):
    """Copies SIZE bytes by copy_file_range alone."""
    a = os.open(source, os.O_RDONLY)
    b = os.open(target, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
    done = 0
    while done < size:
        count = os.copy_file_range(a, b, size - done)
        assert count > 0
        done += count
    os.close(a)
    os.close(b)


def snapshot(root, times=False):
    """All that a user sees under ROOT: {name: (mode, owner, links, content, xattrs, mtime)}."""
    seen = {}
    for folder, folders, files in os.walk(root):
        for name in sorted(folders + files):
            path = os.path.join(folder, name)
            info = os.lstat(path)
            content = None
            if stat.S_ISREG(info.st_mode):
                content = get(path)
            elif stat.S_ISLNK(info.st_mode):
                content = os.readlink(path)
            xattrs = {} if stat.S_ISLNK(info.st_mode) else {
                x: os.getxattr(path, x) for x in os.listxattr(path)}
            seen[os.path.relpath(path, root)] = (
                info.st_mode, info.st_uid, info.st_gid,
                0 if stat.S_ISDIR(info.st_mode) else info.st_nlink, content, xattrs,
                info.st_mtime_ns if times and not stat.S_ISLNK(info.st_mode) else 0)
    return seen
