# SPDX-License-Identifier: Apache-2.0
"""Random calls by several processes, on two directories: what comes of them must be the same.

A sequence is a list of (process, call, arguments). It is drawn from a seed before anything runs, so it
can be run again, cut down to what still fails (shrink), and printed for a replay. One call runs at a
time, so that results can be compared. What others see of a file while it is open for writing is not
POSIX's business in kvfs, nor are readers of a file that is rewritten under them: such calls are left
out when they come up.
"""
import errno
import os
import random
import stat

from procs import Agent

PROCESSES = 3
NAMES = tuple(f"{folder}{name}" for folder in ("", "d/", "d/e/") for name in "abc")
FOLDERS = ("d", "d/e", "a", "g")
DAY = 86400


class Calls:
    """What a process can do. ROOT is its directory; handles are numbers of the sequence's own."""

    def __init__(self):
        self.root = None
        self.fds = {}

    def enter(self, root):
        self.root = root

    def path(self, name):
        return os.path.join(self.root, name)

    def write_file(self, name, flags, data, offset):
        fd = os.open(self.path(name), flags, 0o644)
        try:
            return os.pwrite(fd, data, offset) if offset is not None else os.write(fd, data)
        finally:
            os.close(fd)

    def read_file(self, name):
        with open(self.path(name), "rb") as f:
            return f.read()

    def stat(self, name):
        st = os.lstat(self.path(name))
        # Sizes and links of directories are the filesystem's own.
        own = () if stat.S_ISDIR(st.st_mode) else (st.st_size, st.st_nlink)
        return (stat.S_IFMT(st.st_mode), stat.S_IMODE(st.st_mode), st.st_uid, *own)

    def times(self, name):
        os.utime(self.path(name), ns=(DAY * 10**9 + 7, 2 * DAY * 10**9 + 9))
        return os.stat(self.path(name)).st_mtime_ns

    def truncate(self, name, size):
        os.truncate(self.path(name), size)

    def unlink(self, name):
        os.unlink(self.path(name))

    def rename(self, name, other):
        os.rename(self.path(name), self.path(other))

    def link(self, name, other):
        os.link(self.path(name), self.path(other), follow_symlinks=False)

    def symlink(self, name, other):
        os.symlink(name, self.path(other))

    def readlink(self, name):
        return os.readlink(self.path(name))

    def mkdir(self, name):
        os.mkdir(self.path(name), 0o755)

    def rmdir(self, name):
        os.rmdir(self.path(name))

    def listdir(self, name):
        return sorted(os.listdir(self.path(name)))

    def chmod(self, name, mode):
        os.chmod(self.path(name), mode)

    def setxattr(self, name, key, value, flags):
        os.setxattr(self.path(name), key, value, flags, follow_symlinks=False)

    def getxattr(self, name, key):
        return os.getxattr(self.path(name), key, follow_symlinks=False)

    def listxattr(self, name):
        return sorted(os.listxattr(self.path(name), follow_symlinks=False))

    def removexattr(self, name, key):
        os.removexattr(self.path(name), key, follow_symlinks=False)

    def copy(self, name, other, length):
        source = os.open(self.path(name), os.O_RDONLY)
        try:
            to = os.open(self.path(other), os.O_CREAT | os.O_WRONLY, 0o644)
            try:
                return os.copy_file_range(source, to, length)
            finally:
                os.close(to)
        finally:
            os.close(source)

    # ---- Files held open ----

    def open(self, handle, name, flags):
        if handle in self.fds:
            os.close(self.fds.pop(handle))
        self.fds[handle] = os.open(self.path(name), flags, 0o644)

    def pread(self, handle, length, offset):
        return os.pread(self.fds[handle], length, offset)

    def pwrite(self, handle, data, offset):
        return os.pwrite(self.fds[handle], data, offset)

    def ftruncate(self, handle, size):
        os.ftruncate(self.fds[handle], size)

    def size(self, handle):
        st = os.fstat(self.fds[handle])
        return None if stat.S_ISDIR(st.st_mode) else st.st_size

    def fsync(self, handle):
        os.fsync(self.fds[handle])

    def close(self, handle):
        os.close(self.fds.pop(handle))


class Process(Agent):
    tools = Calls


# ---- Drawing ----


def draw_data(draw):
    return bytes([draw.randrange(256)]) * draw.choice((0, 1, 100, 4096, 5000, 70_000, 1_100_000))


def draw_call(draw):
    name, other, handle = draw.choice(NAMES), draw.choice(NAMES), draw.randrange(2)
    key = draw.choice(("user.a", "user.b"))
    offset = draw.choice((0, 1, 4096, 10_000, 1_048_576))
    folder = draw.choice(FOLDERS)
    return draw.choice((
        ("write_file", name, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, draw_data(draw), None),
        ("write_file", name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, draw_data(draw), None),
        ("write_file", name, os.O_APPEND | os.O_WRONLY, draw_data(draw), None),
        ("write_file", name, os.O_RDWR, draw_data(draw), offset),
        ("read_file", name), ("read_file", other), ("stat", name), ("stat", other), ("times", name),
        ("truncate", name, draw.choice((0, 5, 4097, 2_000_000))), ("unlink", name),
        ("rename", name, other), ("rename", name, other), ("rename", folder, draw.choice(FOLDERS)),
        ("link", name, other), ("symlink", name, other), ("readlink", name), ("mkdir", folder),
        ("mkdir", folder), ("rmdir", folder), ("listdir", draw.choice(("", *FOLDERS))),
        ("chmod", name, draw.choice((0o600, 0o644, 0o755))),
        ("setxattr", name, key, bytes([draw.randrange(256)]) * 10, draw.choice((0, 1, 2))),
        ("getxattr", name, key), ("listxattr", name), ("removexattr", name, key),
        ("copy", name, other, draw.choice((1, 5000, 3_000_000))),
        ("open", handle, name, os.O_RDONLY), ("open", handle, name, os.O_RDWR),
        ("open", handle, name, os.O_CREAT | os.O_RDWR),
        ("open", handle, name, os.O_CREAT | os.O_TRUNC | os.O_RDWR),
        ("pread", handle, 2_000_000, offset), ("pwrite", handle, draw_data(draw), offset),
        ("pwrite", handle, draw_data(draw), offset), ("ftruncate", handle, offset),
        ("size", handle), ("fsync", handle), ("close", handle), ("close", handle)))


def draw_sequence(seed, count):
    draw = random.Random(seed)
    return [(draw.randrange(PROCESSES), *draw_call(draw)) for _ in range(count)]


# ---- Running ----


class Side:
    """One of the two directories, and its processes."""

    def __init__(self, root, make=Process):
        os.makedirs(os.path.join(root, "d", "e"))
        self.root = root
        self.processes = [make() for _ in range(PROCESSES)]
        for process in self.processes:
            process.enter(os.fspath(root))

    def call(self, process, name, *args):
        try:
            return getattr(self.processes[process], name)(*args)
        except OSError as e:
            return errno.errorcode[e.errno]
        except KeyError:
            return "no such handle"

    def inode(self, name):
        """What NAME leads to, for the rules below; None: nothing."""
        try:
            return os.stat(os.path.join(self.root, name)).st_ino
        except OSError:
            return None

    def tree(self):
        found = []
        for folder, _, files in sorted(os.walk(self.root)):
            for name in sorted(files):
                path = os.path.relpath(os.path.join(folder, name), self.root)
                content = self.call(0, "readlink" if os.path.islink(os.path.join(folder, name))
                                    else "read_file", path)
                found.append((path, self.call(0, "stat", path), self.call(0, "listxattr", path), content))
            found.append((os.path.relpath(folder, self.root), sorted(files)))
        return found

    def stop(self):
        for process in self.processes:
            process.stop()


class Rules:
    """Which calls are left out, by what is open on the plain side: {(process, handle): (inode, writes)}."""

    CHANGES = {"write_file", "truncate", "copy"}

    def __init__(self, plain):
        self.plain = plain
        self.open = {}

    def refuses(self, process, name, args):
        if name in ("open", "close", "pread", "pwrite", "ftruncate", "size", "fsync"):
            return name == "open" and self.refuses_open(process, args)
        inodes = {self.plain.inode(arg) for arg in args[:2] if isinstance(arg, str)} - {None}
        busy = {inode for inode, writes in self.open.values() if writes}
        held = {inode for inode, _ in self.open.values()}
        # Of directories too, for what is open is below them.
        if name in ("rename", "rmdir") and args[0] in FOLDERS and busy:
            return True
        return bool(inodes & (held if name in self.CHANGES else busy))

    def refuses_open(self, process, args):
        handle, path, flags = args
        inode, writes = self.plain.inode(path), flags & os.O_ACCMODE != os.O_RDONLY
        others = {i: w for key, (i, w) in self.open.items() if key != (process, handle)}
        return inode in others and (writes or others[inode])

    def note(self, process, name, args, result):
        if name == "open":
            # It closes what the handle was, whatever comes of it.
            self.open.pop((process, args[0]), None)
            if result is None:
                self.open[process, args[0]] = (
                    self.plain.inode(args[1]), args[2] & os.O_ACCMODE != os.O_RDONLY)
        elif name == "close":
            self.open.pop((process, args[0]), None)


def shown(value):
    text = repr(value)
    return text if len(text) < 120 else f"{text[:100]}... ({len(text)} characters)"


def run_both(sequence, plain, other):
    """None, or what differed."""
    rules = Rules(plain)
    for step, (process, name, *args) in enumerate(sequence):
        if rules.refuses(process, name, args):
            continue
        expected, got = plain.call(process, name, *args), other.call(process, name, *args)
        if expected != got:
            return f"step {step}, {name}: {shown(got)} instead of {shown(expected)}"
        rules.note(process, name, args, expected)
    for process, handle in list(rules.open):
        expected, got = (side.call(process, "close", handle) for side in (plain, other))
        if expected != got:
            return f"close at the end: {shown(got)} instead of {shown(expected)}"
    expected, got = plain.tree(), other.tree()
    for one, two in zip(expected, got):
        if one != two:
            return f"at the end: {shown(two)} instead of {shown(one)}"
    return None if len(expected) == len(got) else f"at the end: {shown(got)} instead of {shown(expected)}"


def shrink(sequence, fails, runs_max=200):
    """A shorter sequence that FAILS as well: pieces are taken out, ever smaller ones."""
    size, runs = max(1, len(sequence) // 2), 0
    while size >= 1:
        at = 0
        while at < len(sequence) and runs < runs_max:
            shorter = sequence[:at] + sequence[at + size:]
            runs += 1
            if fails(shorter):
                sequence = shorter
            else:
                at += size
        size //= 2
    return sequence


def script(sequence):
    """The sequence as a file that KVFS_REPLAY takes; long data by its length."""
    def word(value):
        if isinstance(value, bytes) and len(value) > 8:
            return f"{value[:1]!r} * {len(value)}"
        return repr(value)

    return "[\n" + "".join(f"    ({', '.join(word(w) for w in call)}),\n" for call in sequence) + "]\n"
