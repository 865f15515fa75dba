# SPDX-License-Identifier: Apache-2.0
"""Bounded blocking: a device that does not answer costs its own files an error, and nobody more.

The device is the fixture drive. The core's unit tests (test_core_hang) have the cases; here they are
seen through system calls.
"""
import errno
import os
import subprocess
import time

import pytest
from data import MIB, blob, get, put, put_synced, sync
from kvmount import mount_device
from procs import eventually, run
from syscalls import RENAME_EXCHANGE, fails, rename2

TIMEOUT = "2s"


def hung_mount(fresh, drive, *others):
    kv = fresh(size="256M", dram="64M", io_timeout=TIMEOUT, devices=(drive.data, *others))
    kv.expect_errors("does not answer|answers again|last commit failed")
    return kv


def state(kv, number):
    return kv.status()["devices"][number]["answers"]


def on_device(kv, number, count, first_seed):
    """COUNT small durable files whose bytes are on device NUMBER, and in no DRAM: path to seed."""
    files, seed = {}, first_seed
    while len(files) < count:
        path = kv.mnt / f"f{seed}"
        put(path, blob(seed, 100_000))
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        if kv.extents(path)[0][1] == number:
            files[path] = seed
        seed += 1
    for path in files:
        kv.kvfs("cool", path)
    return files


def test_misses_on_it_and_hits_elsewhere(drive, fresh, agent):
    kv = hung_mount(fresh, drive, drive.home / "healthy")
    (missing, m_seed), (again, a_seed) = on_device(kv, 0, 2, 1).items()
    (other, o_seed), = on_device(kv, 1, 1, 100).items()
    resident = kv.mnt / "resident"
    put(resident, blob(7, MIB))
    get(resident)
    drive.hang()
    fails(errno.ENOENT, open, missing, "rb")
    assert state(kv, 0) == "hung"
    assert state(kv, 1) == "ok"
    assert "HUNG" in kv.kvfs("status", kv.mnt).stdout
    assert kv.counter("io_timeouts") > 0
    # Now that it is known: at once.
    fails(errno.ENOENT, open, again, "rb")
    assert get(other) == blob(o_seed, 100_000)
    assert get(resident) == blob(7, MIB)
    assert agent().read_file(resident) == blob(7, MIB)
    put(kv.mnt / "new", blob(8, MIB))
    with open(kv.mnt / "new", "rb") as file:
        os.fsync(file.fileno())
    drive.answer()
    eventually(lambda: state(kv, 0) == "ok", what="the device's answer")
    assert get(missing) == blob(m_seed, 100_000)
    assert get(again) == blob(a_seed, 100_000)
    assert get(kv.mnt / "new") == blob(8, MIB)


def test_fsync_says_so_and_loses_nothing(drive, fresh):
    kv = hung_mount(fresh, drive)
    path = kv.mnt / "f"
    drive.hang()
    fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    os.write(fd, blob(1, 3 * MIB))
    fails(errno.EIO, os.fsync, fd)
    assert get(path) == blob(1, 3 * MIB)
    fails(errno.EIO, kv.settle)
    drive.answer()
    eventually(lambda: state(kv, 0) == "ok", what="the device's answer")
    os.fsync(fd)
    os.close(fd)
    kv.kill()
    kv.mount()
    assert get(path) == blob(1, 3 * MIB)


def test_umount_ends(drive, fresh):
    """The mount goes; the daemon does when the device lets it: what was not written is lost."""
    kv = hung_mount(fresh, drive)
    put(kv.mnt / "kept", blob(1, MIB))
    kv.settle()
    drive.hang()
    put(kv.mnt / "lost", blob(2, MIB))
    eventually(lambda: run("umount", kv.mnt, check=False).returncode == 0, what="umount")
    assert mount_device(kv.mnt) is None
    eventually(lambda: "what was not written yet is lost" in kv.log(), what="the daemon's word")
    kv.expect_errors("what was not written yet is lost")
    drive.answer()
    assert kv.daemon.wait(30) == 1
    kv.destroy()
    kv.mount()
    assert get(kv.mnt / "kept") == blob(1, MIB)
    assert "lost" not in os.listdir(kv.mnt)


def test_many_callers(drive, fresh):
    """However many wait for the device, everybody gets an answer, and other devices lack nothing."""
    kv = hung_mount(fresh, drive, drive.home / "healthy")
    hung = on_device(kv, 0, 4, 1)
    (other, seed), = on_device(kv, 1, 1, 100).items()
    drive.hang()
    readers = [subprocess.Popen(["cat", path], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
               for path in hung for _ in range(20)]
    time.sleep(0.2)
    assert get(other) == blob(seed, 100_000)
    for reader in readers:
        assert b"No such file" in reader.communicate(timeout=60)[1]
    drive.answer()
    eventually(lambda: state(kv, 0) == "ok", what="the device's answer")
    for path, number in hung.items():
        assert get(path) == blob(number, 100_000)


def rename_or_link(call, one, other):
    """ONE's content comes under the name OTHER."""
    if call == "exchange":
        rename2(other, one, RENAME_EXCHANGE)
    else:
        (os.rename if call == "rename" else os.link)(one, other)


@pytest.mark.parametrize("call", ("rename", "exchange", "link"))
def test_p1_a_rewritten_file_takes_its_new_content_to_another_name(drive, fresh, call):
    """Not what it had before: a synced name would be back at something older, or at another's."""
    kv = hung_mount(fresh, drive)
    one, other = kv.mnt / "one", kv.mnt / "other"
    put_synced(one, b"before")
    if call != "link":
        put_synced(other, b"synced")
    drive.hang()
    put(one, b"after")
    fails(errno.EIO, rename_or_link, call, one, other)
    kv.kill()
    drive.answer()
    kv.mount()
    assert get(one) == b"before"
    assert os.path.exists(other) == (call != "link")
    assert call == "link" or get(other) == b"synced"
    put(one, b"after")
    rename_or_link(call, one, other)
    sync(other)
    kv.kill()
    kv.mount()
    assert get(other) == b"after"
