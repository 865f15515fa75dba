# SPDX-License-Identifier: Apache-2.0
"""Processes that do everything to the same few names at once: whole files, and POSIX's errors only."""
import errno
import os
import random
import time

import ioctls
import pytest
from data import get, put
from procs import Child, as_nobody, eventually, parallel

NAMES = 3
SECONDS = 3
SIZES = (1, 100, 5000, 70_000)
USAGE = ("store_used", "store_busy", "store_reserved", "dram_charged", "open_handles")


def rewrite_in_place(path, data):
    fd = os.open(path, os.O_RDWR)
    os.pwrite(fd, data, 0)
    os.ftruncate(fd, len(data))
    os.close(fd)


def replace(path, data):
    tmp = path.with_name(f"tmp-{os.getpid()}")
    put(tmp, data)
    os.rename(tmp, path)


def create(path, data):
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    os.write(fd, data)
    os.close(fd)


def read(path, _):
    content = get(path)
    assert len(set(content)) == 1, "bytes of several writers, or none"


def reopen_unlinked(path, _):
    held = os.open(path, os.O_PATH)
    os.unlink(path)
    os.close(os.open(f"/proc/self/fd/{held}", os.O_RDONLY))
    os.fstat(held)
    os.close(held)


ACTS = {
    "write": put, "rdwr": rewrite_in_place, "rename": replace, "create": create, "read": read,
    "truncate": lambda path, _: os.truncate(path, 1), "unlink": lambda path, _: os.unlink(path),
    "chmod": lambda path, _: os.chmod(path, 0o644), "reopen": reopen_unlinked,
}


STORMS = (
    (("rdwr", "write", "truncate", "read"), ()),
    (("write", "rename", "read"), ()),
    (("chmod", "rename"), ()),
    (("truncate", "create", "unlink"), (errno.ENOENT, errno.EEXIST)),
    (("write", "unlink", "read", "reopen"), (errno.ENOENT,)),
)


def raise_storm(root, acts, allowed):
    paths = [root / f"f{i}" for i in range(NAMES)]
    for path in paths:
        put(path, b"A")

    def storm(number):
        choice, end = random.Random(number), time.monotonic() + SECONDS
        while time.monotonic() < end:
            data = bytes([65 + number]) * choice.choice(SIZES)
            try:
                ACTS[choice.choice(acts)](choice.choice(paths), data)
            except OSError as error:
                if error.errno not in allowed:
                    error.add_note(f"in the storm of {acts}")
                    raise

    parallel(storm, range(4))
    for path in paths:
        path.unlink(missing_ok=True)


def test_r3_storms(fresh):
    """One after the other; what they took is given back in the end, when all that is prepared expires."""
    kv = fresh(size="1G", dram="256M")
    for acts, allowed in STORMS:
        raise_storm(kv.mnt, acts, allowed)
        kv.check()
    eventually(lambda: not any(kv.status()[key] for key in USAGE),
               what=f"giving back of {USAGE}")


def test_r3_a_file_is_synced_replaced_and_evicted_at_once(kv):
    """fsync holds the file's lock in the kernel, the rename waits for it, the eviction for that."""
    path, other = kv.dir / "f", kv.dir / "other"

    def store_in_place():
        fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
        os.pwrite(fd, b"A" * 5000, 0)
        os.fsync(fd)
        os.close(fd)
        path.unlink(missing_ok=True)

    def evict():
        put(other, b"C")
        with ioctls.opened(kv.dir) as directory:
            try:
                ioctls.drop(directory, ioctls.EVICT, "other", ioctls.DROP_LEASED)
            except OSError as error:
                assert error.errno == errno.EBUSY

    def storm(act):
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            act()

    parallel(storm, (store_in_place, lambda: replace(path, b"B" * 5000), evict))


def test_p5_two_first_writers_of_one_name(kv):
    path = kv.dir / "f"
    fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_TRUNC, 0o644)
    os.write(fd, b"A" * 20)
    other = Child(put, path, b"B" * 10)
    other.result()
    assert Child(get, path).result() == b"B" * 10
    os.write(fd, b"A" * 20)
    os.close(fd)
    assert Child(get, path).result() == b"A" * 40


@pytest.mark.parametrize("change", ["trunc", "fallocate", "copy"])
def test_s1_content_changed_by_others_loses_its_set_id_bits(place, change):
    path, source = place / "f", place / "source"
    put(path, b"x" * 100)
    put(source, b"y" * 100)
    for name in (path, source, place):
        os.chown(name, 65534, 65534)
    os.chmod(path, 0o6755)

    def act():
        fd = os.open(path, os.O_WRONLY | (os.O_TRUNC if change == "trunc" else 0))
        if change == "fallocate":
            os.posix_fallocate(fd, 0, 1000)
        if change == "copy":
            from_fd = os.open(source, os.O_RDONLY)
            assert os.copy_file_range(from_fd, fd, 100) == 100
        os.close(fd)

    as_nobody(act)
    assert os.stat(path).st_mode & 0o7777 == 0o755
