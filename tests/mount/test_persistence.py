# SPDX-License-Identifier: Apache-2.0
"""What a remount finds again, and which stores are refused."""
import os

import pytest
from data import MIB, blob, check_big, copy, get, put, snapshot, sync, write_big
from kvmount import MountFailed


def refused(kv, *words, **options):
    """Mounting fails with status 1 and one line that has WORDS in it."""
    with pytest.raises(MountFailed) as e:
        kv.mount(**options)
    assert e.value.status == 1
    lines = e.value.text.strip().splitlines()
    assert len(lines) == 1, e.value.text
    for word in words:
        assert word in lines[0], lines[0]


def test_everything_is_there_again(fresh):
    kv = fresh()
    root = kv.mnt
    (root / "d" / "e").mkdir(parents=True)
    for i, size in enumerate((0, 1, 4096, MIB, 3 * MIB + 5)):
        put(root / "d" / f"f{i}", blob(i, size))
    os.link(root / "d" / "f3", root / "d" / "e" / "hard")
    os.symlink("../f1", root / "d" / "e" / "soft")
    put(root / ("n" * 1023), b"long")
    put(os.fsencode(root) + b"/\xff\x01", b"odd")
    os.truncate(root / "d" / "f2", 1 << 30)
    os.chown(root / "d" / "f1", 12, 34)
    os.chmod(root / "d" / "f1", 0o4711)
    os.chmod(root / "d" / "e", 0o1770)
    os.setxattr(root / "d" / "f1", "user.one", b"1" * 5000)
    os.setxattr(root / "d", "user.dir", b"")
    os.chmod(root, 0o711)
    os.chown(root, 0, 99)
    os.utime(root / "d" / "f0", ns=(111, 222))
    os.unlink(root / "d" / "f2")
    before = snapshot(root, times=True)
    inos = {n: os.lstat(root / n).st_ino for n in before}
    info = os.stat(root)
    kv.remount()
    assert snapshot(root, times=True) == before
    assert {n: os.lstat(root / n).st_ino for n in inos} == inos
    assert (os.stat(root).st_mode, os.stat(root).st_gid) == (info.st_mode, info.st_gid)
    assert os.stat(root / "d" / "f0").st_mtime_ns == 222
    assert os.listdir(os.fsencode(root)).count(b"\xff\x01") == 1


def test_holes_and_shared_extents_are_there_again(fresh):
    kv = fresh()
    fd = os.open(kv.mnt / "sparse", os.O_CREAT | os.O_RDWR, 0o644)
    os.pwrite(fd, b"tail", 700 * MIB)
    os.pwrite(fd, b"middle", 300 * MIB + 5)
    os.close(fd)
    write_big(kv.mnt / "a", 20 * MIB, 1)
    copy(kv.mnt / "a", kv.mnt / "b", 20 * MIB)
    blocks = {n: os.stat(kv.mnt / n).st_blocks for n in os.listdir(kv.mnt)}
    kv.remount()
    check_big(kv.mnt / "b", 20 * MIB, 1)
    assert {n: os.stat(kv.mnt / n).st_blocks for n in os.listdir(kv.mnt)} == blocks
    assert os.stat(kv.mnt / "sparse").st_blocks * 512 <= 4 * MIB
    fd = os.open(kv.mnt / "sparse", os.O_RDONLY)
    assert os.pread(fd, 10, 300 * MIB) == bytes(5) + b"middl"
    assert os.pread(fd, 10, 700 * MIB) == b"tail"
    os.close(fd)
    os.unlink(kv.mnt / "a")
    kv.remount()
    check_big(kv.mnt / "b", 20 * MIB, 1)


def test_inode_numbers_are_never_reused_over_a_remount(fresh):
    """S1."""
    kv = fresh()
    put(kv.mnt / "f", b"x")
    ino = os.stat(kv.mnt / "f").st_ino
    os.unlink(kv.mnt / "f")
    kv.remount()
    put(kv.mnt / "g", b"x")
    assert os.stat(kv.mnt / "g").st_ino > ino


def test_many_remounts(fresh):
    kv = fresh()
    for i in range(6):
        put(kv.mnt / f"{i}", blob(i, 200_000))
        os.rename(kv.mnt / f"{i}", kv.mnt / f"r{i}")
        kv.remount()
        assert sorted(os.listdir(kv.mnt)) == [f"r{j}" for j in range(i + 1)]
    for i in range(6):
        assert get(kv.mnt / f"r{i}") == blob(i, 200_000)


def test_both_modes_read_each_others_stores(fresh):
    kv = fresh()
    put(kv.mnt / "f", blob(1, 3 * MIB))
    kv.remount(passthrough="off" if kv.mode == "passthrough" else "auto")
    assert get(kv.mnt / "f") == blob(1, 3 * MIB)
    put(kv.mnt / "f", blob(2, MIB))
    kv.remount(passthrough="auto" if kv.mode == "passthrough" else "off")
    assert get(kv.mnt / "f") == blob(2, MIB)


def test_a_mounted_store_is_locked(fresh):
    kv = fresh()
    put(kv.mnt / "f", b"x")
    other = fresh(mount=False)
    store, other.store = other.store, kv.store
    refused(other, os.fspath(kv.store))
    for option, word in ((), "--force"), (("--force",), "already mounted"):
        done = kv.kvfs("format", kv.store, *option, check=False)
        assert done.returncode == 1 and done.stderr.count("\n") == 1
        assert word in done.stderr
    assert get(kv.mnt / "f") == b"x"
    other.store = store
    other.mount()


def test_a_store_whose_daemon_was_killed_can_be_formatted(fresh):
    """What the daemon has left in it, the socket of GPU helpers, is not somebody else's."""
    kv = fresh()
    put(kv.mnt / "f", b"x")
    kv.kill()
    assert (kv.store / "gpu.sock").exists()
    assert "--force" in kv.kvfs("format", kv.store, check=False).stderr
    kv.kvfs("format", kv.store, "--force")
    kv.mount()
    assert os.listdir(kv.mnt) == []


def test_several_devices_share_the_load(loop_device, fresh):
    kv = fresh(mount=False, format=False, size="128M")
    kv.devices = [kv.home / "one", kv.home / "two", *loop_device(kv, 128 * MIB)]
    kv.format().mount()
    assert len(kv.status()["devices"]) == len(kv.devices)
    write_big(kv.mnt / "f", 60 * MIB, 1)
    sync(kv.mnt / "f")
    shares = {number: 0 for number in range(len(kv.devices))}
    for _, device, _, length in kv.extents(kv.mnt / "f"):
        shares[device] += length
    assert min(shares.values()) * len(shares) >= 30 * MIB, f"unequal shares {shares}"
    kv.remount()
    check_big(kv.mnt / "f", 60 * MIB, 1)
    total = os.statvfs(kv.mnt).f_blocks * 4096
    assert total >= len(kv.devices) * 120 * MIB


def test_missing_and_foreign_devices_are_refused(fresh):
    kv, other = (fresh(mount=False, format=False, size="64M") for _ in range(2))
    for one in (kv, other):
        one.devices = [one.home / "one", one.home / "two"]
        one.format()
    kv.mount()
    put(kv.mnt / "f", blob(1, 10 * MIB))
    kv.umount()
    os.rename(kv.devices[1], kv.home / "away")
    refused(kv, os.fspath(kv.devices[1]))
    os.rename(other.devices[1], kv.devices[1])
    refused(kv, os.fspath(kv.devices[1]))
    os.rename(kv.devices[1], other.devices[1])
    os.rename(kv.devices[0], kv.home / "first")
    os.rename(kv.home / "away", kv.devices[0])
    os.rename(kv.home / "first", kv.devices[1])
    refused(kv)
    os.rename(kv.devices[0], kv.home / "away")
    os.rename(kv.devices[1], kv.devices[0])
    os.rename(kv.home / "away", kv.devices[1])
    kv.mount()
    assert get(kv.mnt / "f") == blob(1, 10 * MIB)
    other.mount()


def test_mount_does_not_read_the_files(fresh):
    """A clean mount is O(1) in files: beyond the pages of a small index, 64 MiB at most, which are
    looked over once, the daemon's own reads do not grow with their number."""
    kv = fresh()

    def read_at_mount():
        kv.remount()
        os.stat(kv.mnt)
        with open(f"/proc/{kv.pid}/io", encoding="ascii") as f:
            counts = dict(line.split(": ") for line in f.read().splitlines())
        with open(f"/proc/{kv.pid}/stat", encoding="ascii") as f:
            fields = f.read().rsplit(")", 1)[1].split()
        return int(counts["rchar"]), int(fields[7]) + int(fields[9])

    few, faults_few = read_at_mount()
    for i in range(5000):
        os.close(os.open(kv.mnt / f"{i}", os.O_CREAT | os.O_WRONLY, 0o644))
    many, faults_many = read_at_mount()
    index = os.stat(kv.store / "index" / "data.mdb").st_size
    assert many <= few + index + 256 * 1024
    assert faults_many <= faults_few + 2000
