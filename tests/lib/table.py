# SPDX-License-Identifier: Apache-2.0
"""The rows of the conformance table: one system call each, as an outcome that can be compared.

A row is a function of a Case: what it returns, or the name of the errno it fails with, is its
outcome. Rows run on one file in a folder of their own; times, inode numbers and block counts are
left out where filesystems may differ.
"""
import errno
import fcntl
import mmap
import os
import stat

from data import blob, sync
from syscalls import (FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE, FALLOC_ZERO_RANGE, RENAME_EXCHANGE,
                      RENAME_NOREPLACE, UTIME_OMIT, fallocate, rename2, utimensat)

PAGE = 4096
SIZE = 3 * PAGE + 100
CONTENT = blob(7, SIZE)
OTHER = blob(8, 5000)
ROWS = {}


class Case:
    """FOLDER holds the file NAME in the state under test, OTHER (a whole file) and DIR."""

    def __init__(self, folder):
        self.folder = folder
        self.path = folder / "file"
        self.other = folder / "other"
        self.dir = folder / "dir"
        self.new = folder / "new"

    def prepare(self):
        self.folder.mkdir()
        self.dir.mkdir()
        with open(self.other, "wb") as f:
            f.write(OTHER)

    def opened(self, flags, mode=0o644, path=None):
        return _Descriptor(path or self.path, flags, mode)


class _Descriptor:
    def __init__(self, path, flags, mode):
        self.args = path, flags, mode

    def __enter__(self):
        self.fd = os.open(*self.args)
        return self.fd

    def __exit__(self, *error):
        os.close(self.fd)


def row(func):
    ROWS[func.__name__] = func
    return func


def outcome(func, *args):
    try:
        return func(*args)
    except OSError as e:
        return errno.errorcode[e.errno]
    except ValueError:  # mmap looks at the size itself
        return "EINVAL"


def seen(path):
    """What a user sees of PATH, content left out."""
    info = os.lstat(path)
    size = info.st_size if stat.S_ISREG(info.st_mode) else 0
    links = 0 if stat.S_ISDIR(info.st_mode) else info.st_nlink
    return oct(info.st_mode), info.st_uid, info.st_gid, links, size


def content(path):
    with open(path, "rb", buffering=0) as f:
        return f.readall()


def tree(folder):
    """Everything in FOLDER, by name: what is left when the row has run."""
    found = {}
    for name in sorted(os.listdir(folder)):
        path = folder / name
        found[name] = outcome(seen, path)
        if isinstance(found[name], tuple) and found[name][0].startswith("0o100"):
            found[name] += (outcome(content, path), outcome(os.listxattr, path))
    return found


# ---- attributes ----


@row
def stat_(c):
    return seen(c.path)


@row
def stat_slash(c):
    return seen(f"{c.path}/")


@row
def stat_below(c):
    return seen(c.path / "below")


@row
def access_exists(c):
    return os.access(c.path, os.F_OK)


@row
def access_execute_as_nobody(c):
    return os.access(c.path, os.X_OK)


@row
def chmod(c):
    os.chmod(c.path, 0o640)
    return seen(c.path)


@row
def chmod_set_id(c):
    os.chmod(c.path, 0o6755)
    return seen(c.path)


@row
def chown(c):
    os.chown(c.path, 12, 34)
    return seen(c.path)


@row
def chown_clears_set_id(c):
    os.chmod(c.path, 0o6755)
    os.chown(c.path, 12, 34)
    return seen(c.path)


@row
def utimens(c):
    os.utime(c.path, ns=(10**9, 2 * 10**9 + 5))
    info = os.stat(c.path)
    return info.st_atime_ns, info.st_mtime_ns


@row
def utimens_omit(c):
    os.utime(c.path, ns=(10**9, 2 * 10**9))
    utimensat(c.path, (7, 7), (0, UTIME_OMIT))
    info = os.stat(c.path)
    return info.st_atime_ns, info.st_mtime_ns


@row
def xattr_set_get(c):
    os.setxattr(c.path, "user.one", b"1")
    return os.getxattr(c.path, "user.one"), os.listxattr(c.path)


@row
def xattr_create_twice(c):
    os.setxattr(c.path, "user.one", b"1", os.XATTR_CREATE)
    os.setxattr(c.path, "user.one", b"2", os.XATTR_CREATE)


@row
def xattr_replace_absent(c):
    os.setxattr(c.path, "user.one", b"1", os.XATTR_REPLACE)


@row
def xattr_get_absent(c):
    return os.getxattr(c.path, "user.none")


@row
def xattr_remove(c):
    os.setxattr(c.path, "user.one", b"1")
    os.removexattr(c.path, "user.one")
    return os.listxattr(c.path)


@row
def xattr_remove_absent(c):
    os.removexattr(c.path, "user.none")


# ---- opening ----


@row
def open_read(c):
    return content(c.path)


@row
def open_read_twice(c):
    with c.opened(os.O_RDONLY) as one, c.opened(os.O_RDONLY) as two:
        return os.read(one, 10), os.read(two, 10), os.pread(one, 10, PAGE)


@row
def open_read_write_and_read(c):
    with c.opened(os.O_RDWR) as fd:
        return os.read(fd, SIZE + 1)


@row
def open_write_and_close(c):
    with c.opened(os.O_WRONLY):
        pass


@row
def open_create(c):
    with c.opened(os.O_CREAT | os.O_WRONLY) as fd:
        return os.fstat(fd).st_size


@row
def open_create_exclusive(c):
    with c.opened(os.O_CREAT | os.O_EXCL | os.O_WRONLY) as fd:
        return os.write(fd, OTHER)


@row
def open_truncate(c):
    with c.opened(os.O_WRONLY | os.O_TRUNC) as fd:
        return os.fstat(fd).st_size


@row
def open_truncate_and_write(c):
    with c.opened(os.O_CREAT | os.O_WRONLY | os.O_TRUNC) as fd:
        return os.write(fd, OTHER)


@row
def open_append(c):
    with c.opened(os.O_WRONLY | os.O_APPEND) as fd:
        os.write(fd, OTHER)
        return os.lseek(fd, 0, os.SEEK_CUR)


@row
def open_directory(c):
    with c.opened(os.O_RDONLY | os.O_DIRECTORY):
        pass


@row
def open_nofollow(c):
    with c.opened(os.O_RDONLY | os.O_NOFOLLOW) as fd:
        return os.read(fd, 5)


@row
def open_nofollow_symlink(c):
    os.symlink("file", c.new)
    with c.opened(os.O_RDONLY | os.O_NOFOLLOW, path=c.new):
        pass


@row
def open_through_symlink(c):
    os.symlink("file", c.new)
    return content(c.new)


@row
def open_path(c):
    with c.opened(os.O_PATH) as fd:
        return stat.S_ISREG(os.fstat(fd).st_mode), outcome(os.read, fd, 1)


@row
def open_direct(c):
    with c.opened(os.O_RDONLY | os.O_DIRECT) as fd, mmap.mmap(-1, 4 * PAGE) as buffer:
        count = os.preadv(fd, [buffer], 0)
        return buffer[:count]


@row
def open_sync_and_write(c):
    with c.opened(os.O_WRONLY | os.O_SYNC) as fd:
        return os.pwrite(fd, b"abc", 10)


# ---- reading ----


@row
def read_behind_the_end(c):
    with c.opened(os.O_RDONLY) as fd:
        return os.pread(fd, 10, SIZE), os.pread(fd, 10, 1 << 40), os.pread(fd, 100, SIZE - 7)


@row
def read_negative_offset(c):
    with c.opened(os.O_RDONLY) as fd:
        return os.pread(fd, 1, -1)


@row
def read_vectors(c):
    with c.opened(os.O_RDONLY) as fd:
        parts = [bytearray(100), bytearray(PAGE), bytearray(SIZE)]
        return os.preadv(fd, parts, 50), b"".join(parts)


@row
def read_of_a_writer_fails(c):
    with c.opened(os.O_WRONLY) as fd:
        return os.read(fd, 1)


@row
def seek(c):
    with c.opened(os.O_RDONLY) as fd:
        return [outcome(os.lseek, fd, at, how) for at, how in (
            (5, os.SEEK_SET), (5, os.SEEK_CUR), (-5, os.SEEK_END), (-1, os.SEEK_SET),
            (0, os.SEEK_DATA), (SIZE, os.SEEK_DATA), (SIZE, os.SEEK_HOLE), (1 << 40, os.SEEK_HOLE))]


@row
def sendfile(c):
    with c.opened(os.O_RDONLY) as fd, c.opened(os.O_CREAT | os.O_WRONLY, path=c.new) as to:
        return os.sendfile(to, fd, 100, 5000)


@row
def splice(c):
    reading, writing = os.pipe()
    try:
        with c.opened(os.O_RDONLY) as fd:
            return os.splice(fd, writing, 5000, offset_src=100), os.read(reading, 5000)
    finally:
        os.close(reading)
        os.close(writing)


@row
def map_and_read(c):
    with c.opened(os.O_RDONLY) as fd, mmap.mmap(fd, SIZE, prot=mmap.PROT_READ) as m:
        return m[:]


@row
def map_private_and_write(c):
    with c.opened(os.O_RDONLY) as fd, mmap.mmap(fd, SIZE, flags=mmap.MAP_PRIVATE) as m:
        m[:3] = b"abc"
        return m[:]


@row
def map_shared_of_a_reader_for_writing(c):
    with c.opened(os.O_RDONLY) as fd, mmap.mmap(fd, SIZE, flags=mmap.MAP_SHARED):
        pass


@row
def map_shared_and_write(c):
    with c.opened(os.O_RDWR) as fd, mmap.mmap(fd, SIZE, flags=mmap.MAP_SHARED) as m:
        m[PAGE:PAGE + 3] = b"abc"
        return m[:]


@row
def advise(c):
    with c.opened(os.O_RDONLY) as fd:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return os.read(fd, 10)


# ---- writing ----


@row
def write_inside(c):
    with c.opened(os.O_WRONLY) as fd:
        return os.pwrite(fd, b"abc", PAGE - 1)


@row
def write_far_behind_the_end(c):
    with c.opened(os.O_WRONLY) as fd:
        return os.pwrite(fd, b"abc", (3 << 20) + 5)


@row
def write_nothing(c):
    with c.opened(os.O_WRONLY) as fd:
        return os.pwrite(fd, b"", 1 << 30)


@row
def write_vectors(c):
    with c.opened(os.O_WRONLY) as fd:
        return os.pwritev(fd, [b"abc", OTHER, b"z" * PAGE], 10)


@row
def write_negative_offset(c):
    with c.opened(os.O_WRONLY) as fd:
        return os.pwrite(fd, b"a", -1)


@row
def write_of_a_reader_fails(c):
    with c.opened(os.O_RDONLY) as fd:
        return os.write(fd, b"a")


@row
def write_and_read_back(c):
    with c.opened(os.O_RDWR) as fd:
        os.pwrite(fd, b"abc", PAGE)
        return os.pread(fd, SIZE, 0)


@row
def write_and_sync(c):
    with c.opened(os.O_WRONLY) as fd:
        os.pwrite(fd, b"abc", PAGE)
        os.fsync(fd)
        os.fdatasync(fd)


@row
def sync_of_a_reader(c):
    sync(c.path)


@row
def copy_range_out(c):
    with c.opened(os.O_RDONLY) as fd, c.opened(os.O_CREAT | os.O_WRONLY, path=c.new) as to:
        return os.copy_file_range(fd, to, 2 * PAGE, PAGE, 0)


@row
def copy_range_in(c):
    with c.opened(os.O_RDONLY, path=c.other) as fd, c.opened(os.O_WRONLY) as to:
        return os.copy_file_range(fd, to, 3000, 0, 100)


@row
def copy_range_within_overlapping(c):
    with c.opened(os.O_RDWR) as fd:
        return os.copy_file_range(fd, fd, 2 * PAGE, 0, PAGE)


# ---- size and space ----


@row
def truncate_shorter(c):
    os.truncate(c.path, PAGE + 1)
    return seen(c.path)


@row
def truncate_longer(c):
    os.truncate(c.path, SIZE + 100_000)
    return seen(c.path)


@row
def truncate_to_nothing(c):
    os.truncate(c.path, 0)
    return seen(c.path)


@row
def truncate_negative(c):
    os.truncate(c.path, -1)


@row
def ftruncate_of_a_reader_fails(c):
    with c.opened(os.O_RDONLY) as fd:
        os.ftruncate(fd, 5)


@row
def ftruncate_and_write(c):
    with c.opened(os.O_WRONLY) as fd:
        os.ftruncate(fd, 10)
        os.pwrite(fd, b"abc", 20)


@row
def allocate(c):
    with c.opened(os.O_WRONLY) as fd:
        fallocate(fd, 0, 0, SIZE + 10_000)
        return os.fstat(fd).st_size


@row
def allocate_keep_size(c):
    with c.opened(os.O_WRONLY) as fd:
        fallocate(fd, FALLOC_KEEP_SIZE, 0, SIZE + 10_000)
        return os.fstat(fd).st_size


@row
def allocate_nothing(c):
    with c.opened(os.O_WRONLY) as fd:
        fallocate(fd, 0, 0, 0)


@row
def allocate_of_a_reader_fails(c):
    with c.opened(os.O_RDONLY) as fd:
        fallocate(fd, 0, 0, 100)


@row
def punch(c):
    with c.opened(os.O_RDWR) as fd:
        fallocate(fd, FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE, PAGE, PAGE)
        return os.pread(fd, SIZE, 0)


@row
def punch_without_keep_size(c):
    with c.opened(os.O_RDWR) as fd:
        fallocate(fd, FALLOC_PUNCH_HOLE, PAGE, PAGE)


@row
def zero(c):
    with c.opened(os.O_RDWR) as fd:
        fallocate(fd, FALLOC_ZERO_RANGE, 100, SIZE)
        return os.fstat(fd).st_size, os.pread(fd, 2 * SIZE, 0)


# ---- names ----


@row
def listed(c):
    return sorted((e.name, e.is_file(follow_symlinks=False)) for e in os.scandir(c.folder))


@row
def unlink(c):
    os.unlink(c.path)


@row
def unlink_while_open(c):
    with c.opened(os.O_RDONLY) as fd:
        os.unlink(c.path)
        return os.fstat(fd).st_nlink, os.pread(fd, SIZE, 0)


@row
def rmdir_of_a_file(c):
    os.rmdir(c.path)


@row
def mkdir_in_its_place(c):
    os.mkdir(c.path)


@row
def mknod_in_its_place(c):
    os.mknod(c.path, stat.S_IFREG | 0o644)


@row
def symlink_in_its_place(c):
    os.symlink("other", c.path)


@row
def readlink(c):
    return os.readlink(c.path)


@row
def link(c):
    os.link(c.path, c.new)
    return seen(c.new)


@row
def link_in_its_place(c):
    os.link(c.other, c.path)


@row
def rename_to_a_new_name(c):
    os.rename(c.path, c.new)
    return content(c.new)


@row
def rename_over_another(c):
    os.rename(c.path, c.other)
    return content(c.other)


@row
def rename_another_over_it(c):
    os.rename(c.other, c.path)
    return content(c.path)


@row
def rename_to_itself(c):
    os.rename(c.path, c.path)


@row
def rename_to_its_other_link(c):
    os.link(c.path, c.new)
    os.rename(c.path, c.new)
    return sorted(os.listdir(c.folder))


@row
def rename_over_a_directory(c):
    os.rename(c.path, c.dir)


@row
def rename_a_directory_over_it(c):
    os.rename(c.dir, c.path)


@row
def rename_into_a_directory(c):
    os.rename(c.path, c.dir / "file")
    return content(c.dir / "file")


@row
def rename_no_replace(c):
    rename2(c.path, c.other, RENAME_NOREPLACE)


@row
def rename_another_no_replace(c):
    rename2(c.other, c.path, RENAME_NOREPLACE)


@row
def rename_exchange(c):
    rename2(c.path, c.other, RENAME_EXCHANGE)
    return seen(c.path)[4], seen(c.other)[4]


@row
def rename_while_open(c):
    with c.opened(os.O_RDONLY) as fd:
        os.rename(c.path, c.new)
        return os.pread(fd, SIZE, 0)


# ---- locks ----


@row
def flock(c):
    with c.opened(os.O_RDONLY) as one, c.opened(os.O_RDONLY) as two:
        fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return outcome(fcntl.flock, two, fcntl.LOCK_SH | fcntl.LOCK_NB)


@row
def lock_range(c):
    with c.opened(os.O_RDWR) as fd:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 10, 5)
        fcntl.lockf(fd, fcntl.LOCK_UN)
