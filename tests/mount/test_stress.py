# SPDX-License-Identifier: Apache-2.0
"""Everything at once, on a store that is too small: no error, no byte that is not its file's, and
what is used is given back. The long run's soak shows memory, descriptors and threads flat.

The sanitizers' builds run this too: what they find ends the daemon with a status of its own.
KVFS_LONG=1: half an hour; KVFS_SOAK=SECONDS: as many.
"""
import contextlib
import errno
import mmap
import os
import random
import time

import ioctls
import pytest
from data import MIB, get
from procs import LONG, Child, eventually, open_files

SECONDS = 6
SOAK_SECONDS = int(os.environ.get("KVFS_SOAK", 1800 if LONG else 0))
SAMPLE_SECONDS = 2
NAMES = 40
SIZES = (1, 5000, 70_000, MIB + 17, 3 * MIB)
# Files go when room is needed, or another worker takes the name.
GONE = (errno.ENOENT, errno.EEXIST, errno.EBUSY, errno.EAGAIN)


def content(draw):
    return bytes([draw.randrange(1, 256)]) * draw.choice(SIZES)


def write_new(root, draw):
    path = root / f"tmp-{os.getpid()}"
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
    try:
        data = content(draw)
        assert os.write(fd, data) == len(data)
        if draw.random() < 0.2:
            os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(path, root / f"f{draw.randrange(NAMES)}")


def rewrite(root, draw):
    fd = os.open(root / f"f{draw.randrange(NAMES)}", os.O_RDWR | draw.choice((0, os.O_TRUNC)))
    try:
        data = content(draw)
        os.pwrite(fd, data, 0)
        os.ftruncate(fd, len(data))
    finally:
        os.close(fd)


def read(root, draw):
    assert len(set(get(root / f"f{draw.randrange(NAMES)}"))) == 1, "bytes of several files, or none"


def read_mapped(root, draw):
    fd = os.open(root / f"f{draw.randrange(NAMES)}", os.O_RDONLY)
    try:
        with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as view:
            seen = view[:]
    finally:
        os.close(fd)
    assert len(set(seen)) == 1, "bytes of several files, or none"


def use_pool(root, draw):
    path = root / f"pool-{os.getpid()}"
    fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        os.posix_fallocate(fd, 0, 4 * MIB)
        slots = {}
        for _ in range(20):
            at = draw.randrange(64) * 65536
            slots[at] = bytes([draw.randrange(256)]) * 65536
            os.pwrite(fd, slots[at], at)
            if draw.random() < 0.1:
                os.fsync(fd)
        for at, data in slots.items():
            assert os.pread(fd, 65536, at) == data
    finally:
        os.close(fd)
        os.unlink(path)


def names(root, draw):
    path = root / f"dir-{os.getpid()}"
    os.mkdir(path)
    os.symlink("x", path / "l")
    os.setxattr(path, "user.a", b"1")
    os.listdir(root)
    os.unlink(path / "l")
    os.rmdir(path)


def control(root, draw):
    wanted = [f"f{i}" for i in range(NAMES)]
    with ioctls.opened(root) as directory:
        ioctls.lookup(directory, wanted)
        with contextlib.suppress(OSError):
            ioctls.drop(directory, draw.choice((ioctls.COOL, ioctls.EVICT)), draw.choice(wanted),
                        0)
    with ioctls.opened(root / draw.choice(wanted)) as fd:
        ioctls.warm(fd)


def copy(root, draw):
    path = root / f"copy-{os.getpid()}"
    with ioctls.opened(root / f"f{draw.randrange(NAMES)}") as source:
        size = os.fstat(source).st_size
        fd = os.open(path, os.O_CREAT | os.O_WRONLY, 0o644)
        try:
            while size > 0 and (n := os.copy_file_range(source, fd, size)) > 0:
                size -= n
        finally:
            os.close(fd)
    assert len(set(get(path))) == 1
    os.unlink(path)


ACTS = (write_new, write_new, rewrite, read, read, read_mapped, use_pool, names, control, copy)


def work(root, seed, until):
    draw, done = random.Random(seed), 0
    while time.monotonic() < until:
        act = draw.choice(ACTS)
        try:
            act(root, draw)
            done += 1
        except OSError as e:
            if e.errno not in GONE:
                e.add_note(f"seed {seed}, {act.__name__}")
                raise
    return done


def begin(kv, seconds, workers=6):
    seed = random.randrange(1 << 32) if LONG or SOAK_SECONDS else 1
    until = time.monotonic() + seconds
    return [Child(work, kv.mnt, seed + i, until) for i in range(workers)]


def end(kv, children):
    assert sum(child.result(120) for child in children) > 10 * len(children)
    for path in kv.mnt.iterdir():
        path.unlink(missing_ok=True)
    eventually(lambda: not any(kv.status()[key] for key in (
        "store_used", "store_busy", "store_reserved", "open_handles")),
        what="giving back of all space")


def figures(pid):
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        status = dict(line.split(":", 1) for line in file)
    return (int(status["RssAnon"].split()[0]) / 1024, len(open_files(pid)), int(status["Threads"]))


def test_stress(fresh):
    kv = fresh(size="64M", dram="32M", lease="0s")
    end(kv, begin(kv, SECONDS))
    assert kv.counter("evicted_store") + kv.counter("evicted_dram") > 0, "the store was large enough"


if SOAK_SECONDS:  # the long run

    @pytest.mark.timeout(SOAK_SECONDS + 300)
    def test_soak(fresh):
        kv = fresh(size="64M", dram="32M", lease="0s")
        children = begin(kv, SOAK_SECONDS)
        samples = []
        while any(os.path.exists(f"/proc/{child.pid}/exe") for child in children):
            time.sleep(SAMPLE_SECONDS)
            samples.append(figures(kv.pid))
            kv.check()
            if len(samples) * SAMPLE_SECONDS > SOAK_SECONDS:
                break
        # After a warm-up, the middle of what was seen first against the middle of the last.
        quarter = len(samples) // 4
        early, late = (sorted(part)[len(part) // 2]
                       for part in (samples[quarter:2 * quarter], samples[-quarter:]))
        minutes = 2 * quarter * SAMPLE_SECONDS / 60
        end(kv, children)
        print(f"MiB, descriptors, threads: {early} -> {late} in {minutes:.0f} minutes")
        assert late[0] - early[0] < max(minutes, 4), "memory grows by more than a MiB a minute"
        assert max(s[1] for s in samples[-quarter:]) <= max(s[1] for s in samples[quarter:2 * quarter]) + 32
        assert max(s[2] for s in samples[-quarter:]) <= max(s[2] for s in samples[quarter:2 * quarter]) + 16
