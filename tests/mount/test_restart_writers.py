# SPDX-License-Identifier: Apache-2.0
"""-o restart: readers and writers at work while the daemon is killed again and again."""
import collections
import errno
import os
import random
import time

import pytest
from data import blob, get, put_synced
from procs import LONG, Child
from restarts import ask, kill, restartable

READ_SIZE = 200_000


class Calls:
    """Counts failed calls, by name and errno, and goes on."""

    def __init__(self):
        self.made, self.failed = 0, collections.Counter()

    def call(self, name, func, *args, **kwargs):
        self.made += 1
        try:
            return func(*args, **kwargs)
        except OSError as e:
            self.failed[name, errno.errorcode[e.errno]] += 1
            return None

    def expect(self, name, is_right):
        if not is_right:
            self.failed[name, "wrong"] += 1


def read_on(mnt, stop, names):
    """Opens, reads, lists and stats durable files."""
    calls = Calls()
    while not os.path.exists(stop):
        for name, seed in names:
            fd = calls.call("open", os.open, f"{mnt}/{name}", os.O_RDONLY)
            if fd is None:
                continue
            data = calls.call("read", os.pread, fd, READ_SIZE, 0)
            calls.expect("read", data in (None, blob(seed, READ_SIZE)))
            calls.call("fstat", os.fstat, fd)
            calls.call("close", os.close, fd)
        listed = calls.call("listdir", os.listdir, mnt)
        calls.expect("listdir", listed is None or {name for name, _ in names} <= set(listed))
    return calls.made, calls.failed


def size_of(seed):
    return random.Random(seed).randrange(1, 300_000)


def store(calls, path, seed):
    """A file by a temporary name, several writes, sometimes fsync, rename, and a look at it."""
    rng = random.Random(-seed)
    data = blob(seed, size_of(seed))
    fd = calls.call("create", os.open, f"{path}.tmp", os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o644)
    if fd is None:
        return False
    step = -(-len(data) // 5)
    for at in range(0, len(data), step):
        calls.call("write", os.pwrite, fd, data[at:at + step], at)
    if rng.random() < 0.3:
        calls.call("fsync", os.fsync, fd)
    calls.call("close", os.close, fd)
    calls.call("rename", os.rename, f"{path}.tmp", path)
    st = calls.call("stat", os.stat, path)
    calls.expect("stat", st is None or st.st_size == len(data))
    fd = calls.call("open", os.open, path, os.O_RDONLY)
    if fd is None:
        return False
    back = calls.call("read", os.pread, fd, len(data) + 1, 0)
    calls.expect("read", back in (None, data))
    calls.call("close", os.close, fd)
    return True


def write_on(mnt, stop, number):
    """Makes directories with files in them, and takes the older ones away again."""
    calls, there, i = Calls(), {}, 0
    while not os.path.exists(stop):
        i += 1
        place = f"{mnt}/w{number}-{i % 20}"
        if i > 20:
            for name in [name for name in there if name.startswith(f"{place}/")]:
                calls.call("unlink", os.unlink, name)
                del there[name]
            calls.call("rmdir", os.rmdir, place)
        calls.call("mkdir", os.mkdir, place)
        for turn in range(3):
            name, seed = f"{place}/f{turn}", number * 1_000_000 + i * 10 + turn
            if store(calls, name, seed):
                there[name] = seed
    return calls.made, calls.failed, there


def restarts_at_work(kv, restarts, stop):
    """16 readers and 4 writers, and RESTARTS meanwhile: all calls that failed."""
    names = [(f"r{i}", i) for i in range(8)]
    for name, seed in names:
        put_synced(kv.mnt / name, blob(seed, READ_SIZE))
    kv.settle()
    readers = [Child(read_on, kv.mnt, stop, names) for _ in range(16)]
    writers = [Child(write_on, kv.mnt, stop, n) for n in range(4)]
    restarts()
    stop.touch()
    failed, made = collections.Counter(), collections.Counter()
    for child in readers + writers:
        some, failures, *there = child.result(timeout=300)
        made["writer" if there else "reader"] += some
        failed.update({("writer" if there else "reader", *key): n for key, n in failures.items()})
        for name, seed in (there[0] if there else {}).items():
            calls = Calls()
            back = calls.call("end", get, name)
            calls.expect("end", back in (None, blob(seed, size_of(seed))))
            failed.update({("file", *key): n for key, n in calls.failed.items()})
    print("calls", dict(made), "failed", dict(failed))
    return failed


@pytest.mark.parametrize("end", (kill, ask))
def test_nobody_at_work_notices_a_restart(fresh, end, tmp_path):
    kv = restartable(fresh, size="512M")
    rng = random.Random(1)

    def restarts():
        for _ in range(20 if LONG else 5):
            time.sleep(rng.random() * 0.5)
            end(kv)
            time.sleep(0.9)  # a daemon that dies young again and again ends the mount

    assert not restarts_at_work(kv, restarts, tmp_path / "stop")


def test_nobody_at_work_notices_kills_in_a_row(fresh, tmp_path):
    """What a daemon has not answered yet may not be answered by the next one either."""
    kv = restartable(fresh, size="512M")

    def restarts():
        for _ in range(12 if LONG else 2):
            for _ in range(4):  # at five the mount ends
                kill(kv)
                time.sleep(0.2)
            time.sleep(1.2)

    assert not restarts_at_work(kv, restarts, tmp_path / "stop")
