# SPDX-License-Identifier: Apache-2.0
"""kvfs warm, cool and evict, and the ioctls behind them: what is where before and after, and who may."""
import errno
import mmap
import os
import pty
import re
import struct
import subprocess

import ioctls
import pytest
from data import MIB, blob, check_big, get, put, put_synced, replace, sync, write_big
from procs import NOBODY, Child, as_nobody, eventually, run
from syscalls import fails


def refused(done, *words):
    assert done.returncode == 1, done
    assert done.stderr.count("\n") == 1, done.stderr
    for word in words:
        assert str(word) in done.stderr, (word, done.stderr)


@pytest.fixture
def cold(fresh):
    """A mount with files of 1 to 5 MiB in two directories, none of them in DRAM."""
    kv = fresh()
    (kv.mnt / "d" / "e").mkdir(parents=True)
    for i in range(1, 6):
        put(kv.mnt / "d" / ("e" if i > 3 else ".") / f"f{i}", blob(i, i * MIB + i))
    return kv.remount()


def files_of(kv):
    return [kv.mnt / "d" / ("e" if i > 3 else ".") / f"f{i}" for i in range(1, 6)]


# ---- warm ----


def test_warm__a_file_is_in_dram_afterwards(cold):
    path = cold.mnt / "d" / "f3"
    assert cold.tier(path) == "nvme"
    done = cold.kvfs("warm", path)
    assert done.stdout == "1 files in DRAM, 3.0M\n" and done.stderr == ""
    assert cold.tier(path) == "dram+nvme"
    before = cold.status()["counters"]
    assert get(path) == blob(3, 3 * MIB + 3)
    after = cold.status()["counters"]
    assert after["fill_bytes"] == before["fill_bytes"]
    if cold.mode == "passthrough":
        assert after["fuse_read"] == before["fuse_read"]
        assert after["open_passthrough"] == before["open_passthrough"] + 1
    assert cold.tier(cold.mnt / "d" / "f1") == "nvme", "only what was named"


def test_warm__a_directory_with_all_below_it(cold):
    assert cold.kvfs("warm", cold.mnt / "d").stdout == "5 files in DRAM, 15.0M\n"
    assert {cold.tier(path) for path in files_of(cold)} == {"dram+nvme"}
    filled = cold.counter("fill_bytes")
    assert cold.kvfs("warm", cold.mnt).stdout == "5 files in DRAM, 15.0M\n"
    assert cold.counter("fill_bytes") == filled, "what is there is not read again"
    for i, path in enumerate(files_of(cold), 1):
        assert get(path) == blob(i, i * MIB + i)


def test_warm__a_file_above_stream_above(fresh):
    """In pieces; then it is hot like any other, also for readers that have it open."""
    kv = fresh(size="1G", dram="400M", stream_above="16M")
    write_big(kv.mnt / "big", 200 * MIB + 77, 1)
    kv.remount()
    fd = os.open(kv.mnt / "big", os.O_RDONLY)
    assert os.pread(fd, 100, 150 * MIB) == blob(1, 200 * MIB)[150 * MIB:150 * MIB + 100]
    kv.kvfs("warm", kv.mnt / "big")
    assert kv.stat(kv.mnt / "big")["chunks_resident"] == 201
    before = kv.status()["counters"]
    check_big(kv.mnt / "big", 200 * MIB + 77, 1)
    with open(kv.mnt / "big", "rb") as f, mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as m:
        assert m[199 * MIB:200 * MIB] == blob(1, 200 * MIB)[199 * MIB:]
    after = kv.status()["counters"]
    assert after["fill_bytes"] == before["fill_bytes"]
    if kv.mode == "passthrough":
        assert after["fuse_read"] == before["fuse_read"]
    assert os.pread(fd, 100, 150 * MIB) == blob(1, 200 * MIB)[150 * MIB:150 * MIB + 100]
    os.close(fd)


def test_warm__what_does_not_fit_is_told(fresh):
    """As much as the budget holds stays in DRAM, the rest is named by its size."""
    kv = fresh(size="512M", dram="64M")
    for i in range(10):
        put(kv.mnt / f"f{i}", blob(i, 10 * MIB))
    kv.remount()
    done = kv.kvfs("warm", kv.mnt, check=False)
    refused(done, "do not fit", "dram=")
    held = [kv.stat(kv.mnt / f"f{i}")["chunks_resident"] for i in range(10)]
    assert 50 <= sum(held) <= 64
    assert held.count(10) >= 4, "whole files, not a bit of each"
    assert f"{held.count(10)} files in DRAM" in done.stdout
    assert kv.status()["dram_charged"] <= 64 * MIB
    done = kv.kvfs("warm", *(kv.mnt / f"f{i}" for i in range(10) if held[i] == 10))
    assert done.returncode == 0


def test_warm__a_file_larger_than_dram(fresh):
    kv = fresh(size="512M", dram="64M")
    write_big(kv.mnt / "big", 100 * MIB, 1)
    kv.remount()
    refused(kv.kvfs("warm", kv.mnt / "big", check=False), "1 files do not fit", "42.")
    assert 50 <= kv.stat(kv.mnt / "big")["chunks_resident"] <= 60
    check_big(kv.mnt / "big", 100 * MIB, 1)


def test_warm__makes_room_by_what_was_used_longest_ago(fresh):
    kv = fresh(size="512M", dram="64M")
    for i in range(8):
        put(kv.mnt / f"f{i}", blob(i, 10 * MIB))
    kv.remount()
    for some in (range(1), range(1, 5), range(5, 8)):
        kv.kvfs("warm", *(kv.mnt / f"f{i}" for i in some))
    assert [kv.tier(kv.mnt / f"f{i}") for i in (5, 6, 7)] == ["dram+nvme"] * 3
    assert kv.tier(kv.mnt / "f0") == "nvme"


def test_warm__sparse_files_and_empty_ones(fresh):
    """Holes take no DRAM; nothing is missing of a file without content."""
    kv = fresh(size="256M", dram="64M")
    put(kv.mnt / "empty", b"")
    fd = os.open(kv.mnt / "sparse", os.O_CREAT | os.O_WRONLY)
    os.ftruncate(fd, 1 << 30)
    os.pwrite(fd, b"data", 500 * MIB)
    os.close(fd)
    kv.remount()
    assert kv.kvfs("warm", kv.mnt).stdout == "2 files in DRAM, 1.0M\n"
    assert kv.stat(kv.mnt / "sparse")["chunks_resident"] == 1
    assert kv.status()["dram_charged"] <= 4 * MIB
    fd = os.open(kv.mnt / "few", os.O_CREAT | os.O_WRONLY)
    os.pwrite(fd, blob(1, 5 * MIB), 0)
    os.pwrite(fd, b"end", 5 * MIB + 8192)
    os.close(fd)
    kv.remount()
    kv.kvfs("warm", kv.mnt / "few")
    before = kv.counter("fuse_read")
    assert get(kv.mnt / "few") == blob(1, 5 * MIB) + bytes(8192) + b"end"
    assert kv.mode != "passthrough" or kv.counter("fuse_read") == before


def test_warm__unpublished_and_rewritten_files(kv, agent):
    writer = agent()
    fd = writer.open(kv.dir / "f", os.O_CREAT | os.O_WRONLY)
    writer.write(fd, b"x" * 5000)
    os.chmod(kv.dir / "f", 0o644)
    writer.close(fd)
    kv.kvfs("warm", kv.dir / "f")
    fd = writer.open(kv.dir / "f", os.O_RDWR)
    writer.pwrite(fd, b"y")
    kv.kvfs("warm", kv.dir / "f")
    own = os.open(kv.dir / "own", os.O_CREAT | os.O_RDWR)
    fails(errno.EBUSY, ioctls.warm, own)
    os.close(own)


def test_warm__damaged_files(fresh):
    kv = fresh()
    put_synced(kv.mnt / "bad", blob(1, 3 * MIB))
    put_synced(kv.mnt / "good", blob(2, 3 * MIB))
    (extent,) = kv.extents(kv.mnt / "bad")
    kv.umount()
    with open(kv.device_path(extent[1]), "r+b") as f:
        f.seek(extent[2] + 2 * MIB)
        f.write(b"damage")
    kv.mount()
    kv.expect_errors("checksum mismatch")
    done = kv.kvfs("warm", kv.mnt, check=False)
    refused(done, kv.mnt / "bad", "damaged")
    assert "1 files in DRAM" in done.stdout
    # The kernel is told by a message of its own.
    eventually(lambda: not os.path.exists(kv.mnt / "bad"), what="the quarantine")
    assert kv.tier(kv.mnt / "good") == "dram+nvme"


def test_warm__needs_read_permission(cold):
    os.chmod(cold.mnt / "d" / "f1", 0o600)
    as_nobody(fails, errno.EACCES, os.open, cold.mnt / "d" / "f1", os.O_RDONLY)

    def warm():
        with ioctls.opened(cold.mnt / "d" / "f2") as fd:
            return ioctls.warm(fd)

    assert as_nobody(warm) == (2 * MIB + 2, 2 * MIB + 2, 0)


def test_warm__asks_without_bringing_in(cold):
    path = cold.mnt / "d" / "f3"
    with ioctls.opened(path, os.O_RDONLY | os.O_DIRECT) as fd:
        assert ioctls.warm(fd, flags=ioctls.WARM_ASK) == (3 * MIB + 3, 0, 0)
        assert ioctls.warm(fd, MIB, 10, ioctls.WARM_ASK) == (10, 0, 0)
        assert cold.counter("fill_bytes") == 0
        assert ioctls.warm(fd, MIB + 5, 10) == (10, 10, 0)
        assert ioctls.warm(fd, flags=ioctls.WARM_ASK) == (3 * MIB + 3, MIB, 0)
        assert ioctls.warm(fd, 3 * MIB + 3) == (0, 0, 0)
        assert ioctls.warm(fd, 1 << 63) == (0, 0, 0)
        assert ioctls.warm(fd, (1 << 64) - 1, (1 << 64) - 1) == (0, 0, 0)
        assert ioctls.warm(fd, 3, (1 << 64) - 1) == (3 * MIB, 3 * MIB, 0)
        fails(errno.EINVAL, lambda: ioctls.warm(fd, flags=2))
        fails(errno.EINVAL, lambda: ioctls.warm(fd, reserved=1))


def on_terminal(*command):
    """What COMMAND prints on a terminal, and its exit status."""
    master, slave = pty.openpty()
    with subprocess.Popen([os.fspath(c) for c in command], stdin=slave, stdout=slave,
                          stderr=slave) as process:
        os.close(slave)
        shown = b""
        while True:
            try:
                piece = os.read(master, 4096)
            except OSError:  # the other end is closed
                break
            if not piece:
                break
            shown += piece
    os.close(master)
    return shown.decode(), process.returncode


def test_warm__progress_on_a_terminal(cold):
    """A bar that is redrawn in its line, and gone at the end; none with --quiet, none in a file."""
    program = cold.programs["kvfs"]
    shown, status = on_terminal(program, "warm", cold.mnt / "d")
    assert status == 0
    assert re.search(r"\r\[#*\.*\] .* of 15\.0M, \d of 5 files", shown)
    assert shown.endswith("\r\x1b[K5 files in DRAM, 15.0M\r\n")
    shown, status = on_terminal(program, "warm", "--quiet", cold.mnt / "d")
    assert (shown, status) == ("", 0)
    assert "[" not in cold.kvfs("warm", cold.mnt / "d").stdout


# ---- cool ----


def test_cool__files_leave_dram_and_stay_in_the_store(cold):
    cold.kvfs("warm", cold.mnt / "d")
    charged = cold.status()["dram_charged"]
    done = cold.kvfs("cool", cold.mnt / "d")
    assert done.stdout == "5 files out of DRAM, 15.0M freed\n"
    assert {cold.tier(path) for path in files_of(cold)} == {"nvme"}
    assert cold.status()["dram_charged"] <= charged - 15 * MIB
    before = cold.counter("fill_bytes")
    for i, path in enumerate(files_of(cold), 1):
        assert get(path) == blob(i, i * MIB + i)
    assert cold.counter("fill_bytes") >= before + 15 * MIB
    assert cold.kvfs("cool", cold.mnt / "d" / "e").stdout == "2 files out of DRAM, 9.0M freed\n"
    assert [cold.tier(path) for path in files_of(cold)] == ["dram+nvme"] * 3 + ["nvme"] * 2


def test_cool__dirty_files_are_written_first(kv):
    for i in range(20):
        put(kv.dir / f"f{i}", blob(i, 2 * MIB))
    assert kv.kvfs("cool", kv.dir).stdout == "20 files out of DRAM, 40.0M freed\n"
    for i in range(20):
        found = kv.stat(kv.dir / f"f{i}")
        assert (found["tier"], found["chunks_dirty"], found["checksum"]) == ("nvme", 0, "stored")
        assert get(kv.dir / f"f{i}") == blob(i, 2 * MIB)


def test_cool__the_kernels_pages_go_too(kv):
    """Without passthrough the kernel has a copy of its own, which is DRAM as well."""
    put_synced(kv.dir / "f", blob(1, 2 * MIB))
    for _ in range(2):
        assert get(kv.dir / "f") == blob(1, 2 * MIB)
    kv.kvfs("cool", kv.dir / "f")
    before = kv.status()["counters"]
    assert get(kv.dir / "f") == blob(1, 2 * MIB)
    after = kv.status()["counters"]
    assert after["fill_bytes"] == before["fill_bytes"] + 2 * MIB
    if kv.mode == "daemon":
        assert after["fuse_read_bytes"] >= before["fuse_read_bytes"] + 2 * MIB


def test_cool__open_files_and_files_being_written_are_named(kv, agent):
    other = agent()
    put_synced(kv.dir / "open", blob(1, MIB))
    put_synced(kv.dir / "written", blob(2, MIB))
    put_synced(kv.dir / "idle", blob(3, MIB))
    reader = other.open(kv.dir / "open")
    writer = other.open(kv.dir / "written", os.O_RDWR)
    other.pwrite(writer, b"x")
    done = kv.kvfs("cool", kv.dir, check=False)
    assert done.returncode == 1
    assert sorted(line.split(": ")[1:] for line in done.stderr.splitlines()) == [
        [str(kv.dir / name), "is open or being written; close it first"]
        for name in ("open", "written")]
    assert done.stdout == "1 files out of DRAM, 1.0M freed\n"
    assert kv.tier(kv.dir / "idle") == "nvme"
    assert other.pread(reader, MIB) == blob(1, MIB)
    other.close(reader)
    other.close(writer)
    assert kv.kvfs("cool", kv.dir).returncode == 0
    assert get(kv.dir / "written") == b"x" + blob(2, MIB)[1:]


def test_cool__a_mapping_keeps_its_bytes(kv):
    put_synced(kv.dir / "f", blob(1, 2 * MIB))
    fd = os.open(kv.dir / "f", os.O_RDONLY)
    m = mmap.mmap(fd, 2 * MIB, prot=mmap.PROT_READ)
    assert m[:100] == blob(1, 100)
    os.close(fd)
    run(kv.programs["kvfs"], "cool", kv.dir / "f", check=False)
    assert m[:] == blob(1, 2 * MIB)
    m.close()
    assert get(kv.dir / "f") == blob(1, 2 * MIB)


# ---- evict ----


def test_evict__the_file_and_its_space_go(fresh):
    kv = fresh(size="256M")
    empty = kv.status()["store_used"]
    (kv.mnt / "d").mkdir()
    for i in range(5):
        put(kv.mnt / "d" / f"f{i}", blob(i, 8 * MIB))
    before = kv.counter("evicted_store")
    assert kv.kvfs("evict", kv.mnt / "d" / "f0").stdout == "1 files evicted, 8.0M freed\n"
    assert sorted(os.listdir(kv.mnt / "d")) == ["f1", "f2", "f3", "f4"]
    assert not os.path.exists(kv.mnt / "d" / "f0")
    assert kv.kvfs("evict", kv.mnt / "d").stdout == "4 files evicted, 32.0M freed\n"
    assert os.listdir(kv.mnt) == ["d"] and os.listdir(kv.mnt / "d") == []
    assert kv.counter("evicted_store") == before + 5
    eventually(lambda: kv.status()["store_used"] <= empty + MIB, what="the space")
    kv.remount()
    assert os.listdir(kv.mnt / "d") == []
    os.rmdir(kv.mnt / "d")


def test_evict__all_names_of_a_file_go(kv):
    put(kv.dir / "a", blob(1, MIB))
    (kv.dir / "d").mkdir()
    os.link(kv.dir / "a", kv.dir / "d" / "b")
    kv.kvfs("evict", kv.dir / "a")
    assert os.listdir(kv.dir) == ["d"] and os.listdir(kv.dir / "d") == []
    assert not os.path.exists(kv.dir / "d" / "b")


def test_evict__through_a_symlink(kv):
    put(kv.dir / "a", b"x")
    os.symlink("a", kv.dir / "link")
    kv.kvfs("evict", kv.dir / "link")
    assert os.listdir(kv.dir) == ["link"], "below a directory links are left alone"
    refused(kv.kvfs("evict", kv.dir / "link", check=False), "No such file")
    put(kv.dir / "a", b"x")
    assert kv.kvfs("cool", kv.dir).stdout.startswith("1 files")


def test_k2_evict__open_files_are_kept(kv, agent):
    other = agent()
    put_synced(kv.dir / "f", blob(1, MIB))
    fd = other.open(kv.dir / "f")
    refused(kv.kvfs("evict", "--force", kv.dir / "f", check=False), kv.dir / "f", "open")
    assert other.pread(fd, MIB) == blob(1, MIB)
    other.close(fd)
    fd = other.open(kv.dir / "new", os.O_CREAT | os.O_WRONLY)
    other.write(fd, b"unpublished")
    refused(kv.kvfs("evict", "--force", kv.dir / "new", check=False), "being written")
    other.close(fd)
    kv.kvfs("evict", "--force", kv.dir)
    assert os.listdir(kv.dir) == []


def test_k2_evict__leased_files_only_with_force(kv):
    """A file that somebody has just read is about to be used again."""
    put_synced(kv.dir / "f", blob(1, MIB))
    assert get(kv.dir / "f") == blob(1, MIB)
    refused(kv.kvfs("evict", kv.dir / "f", check=False), "leased", "--force")
    assert get(kv.dir / "f") == blob(1, MIB)
    kv.kvfs("evict", "--force", kv.dir / "f")
    assert os.listdir(kv.dir) == []


def test_evict__looks_are_no_lease(kv):
    """Who names a file has looked at it, and so has ls."""
    put(kv.dir / "f", blob(1, MIB))  # and never opened for reading
    os.stat(kv.dir / "f")
    assert int(os.getxattr(kv.dir / "f", "user.kvfs.lease")) > 0
    kv.kvfs("evict", kv.dir / "f")
    assert os.listdir(kv.dir) == []


def test_evict__pinned_files_stay(kv):
    put_synced(kv.dir / "f", blob(1, MIB))
    kv.kvfs("pin", kv.dir / "f")
    refused(kv.kvfs("evict", "--force", kv.dir / "f", check=False), "pinned")
    assert get(kv.dir / "f") == blob(1, MIB)
    kv.kvfs("unpin", kv.dir / "f")
    kv.kvfs("evict", "--force", kv.dir / "f")
    assert os.listdir(kv.dir) == []


def test_evict__not_durable_yet(kv):
    """What was only published is written first, so that no half-stored file is left behind."""
    for i in range(10):
        put(kv.dir / f"f{i}", blob(i, 4 * MIB))
    assert kv.kvfs("evict", kv.dir).stdout == "10 files evicted, 40.0M freed\n"
    assert os.listdir(kv.dir) == []


def as_user(kv, *args):
    return run("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups",
               kv.home / "kvfs", *args, check=False)


@pytest.mark.parametrize("command, request_", (("cool", ioctls.COOL), ("evict", ioctls.EVICT)))
def test_s1_cool_and_evict_are_for_the_owner_and_root(fresh, command, request_):
    kv = fresh()
    run("cp", kv.programs["kvfs"], kv.home / "kvfs")
    (kv.mnt / "d").mkdir()
    os.chmod(kv.mnt / "d", 0o777)
    put(kv.mnt / "d" / "roots", blob(1, MIB))
    put(kv.mnt / "d" / "theirs", blob(2, MIB))
    os.chown(kv.mnt / "d" / "theirs", NOBODY, NOBODY)
    done = as_user(kv, command, kv.mnt / "d")
    refused(done, kv.mnt / "d" / "roots", "owner and root")
    assert done.stdout.startswith("1 files")
    assert os.path.exists(kv.mnt / "d" / "roots")
    with ioctls.opened(kv.mnt / "d") as fd:
        as_nobody(fails, errno.EPERM, ioctls.drop, fd, request_, "roots")
    os.chmod(kv.mnt / "d", 0o700)
    refused(as_user(kv, command, kv.mnt / "d" / "roots"), "Permission denied")


def test_drop__bad_requests(kv):
    (kv.dir / "d").mkdir()
    os.symlink("x", kv.dir / "link")
    put_synced(kv.dir / "f", b"x")
    with ioctls.opened(kv.dir) as fd:
        for number in (ioctls.COOL, ioctls.EVICT):
            for name, error in (("", errno.EINVAL), ("a/b", errno.EINVAL), (".", errno.EINVAL),
                                ("..", errno.EINVAL), ("n" * 1024, errno.ENAMETOOLONG),
                                ("none", errno.ENOENT), ("d", errno.EISDIR),
                                ("link", errno.EINVAL)):
                fails(error, ioctls.drop, fd, number, name)
            fails(errno.EINVAL, ioctls.drop, fd, number, "f", 2)
            fails(errno.EINVAL, ioctls.drop, fd, number, "f", 0, 1)
        fails(errno.EINVAL, ioctls.drop, fd, ioctls.COOL, "f", ioctls.DROP_LEASED)
    assert get(kv.dir / "f") == b"x"


# ---- the commands' refusals, and trees of any shape ----


@pytest.mark.parametrize("command", ("warm", "cool", "evict"))
def test_commands__refusals(kv, tmp_path, command):
    refused(kv.kvfs(command, check=False), "PATH is missing", f"kvfs {command} --help")
    refused(kv.kvfs(command, kv.dir / "none", check=False), kv.dir / "none", "No such file")
    (tmp_path / "f").write_text("x")
    refused(kv.kvfs(command, tmp_path / "f", check=False), tmp_path / "f", "not on a kvfs mount")
    refused(kv.kvfs(command, "/dev/null", check=False), "not a regular file or directory")
    os.chmod(kv.dir, 0o755)
    put(kv.dir / "f", b"x")
    done = kv.kvfs(command, kv.dir / "none", kv.dir / "f", check=False)
    refused(done, "No such file")
    assert done.stdout.startswith("1 files"), "the others are worked on"
    assert kv.kvfs(command, "--quiet", kv.dir).stdout == ""


@pytest.mark.parametrize("command", ("warm", "cool", "evict", "scrub"))
def test_commands__nothing_but_the_mount_that_was_named(kv, tmp_path, command):
    """A directory elsewhere is refused at once, whatever is in it; so is what is mounted below one."""
    for name in "abc":
        (tmp_path / name).write_text("x")
    (tmp_path / "mnt").mkdir()
    put_synced(kv.dir / "inside", b"x" * 5000)
    (kv.dir / "elsewhere").mkdir()
    run("mount", "--bind", kv.dir, tmp_path / "mnt")
    run("mount", "--bind", tmp_path, kv.dir / "elsewhere")
    try:
        done = kv.kvfs(command, tmp_path, check=False)
        assert done.returncode == (8 if command == "scrub" else 1)
        assert done.stderr == f"kvfs {command}: {tmp_path}: not on a kvfs mount\n"
        assert (kv.dir / "inside").exists()
        done = kv.kvfs(command, *(["--force"] if command == "evict" else []), kv.dir)
        assert "1 files" in done.stdout and done.stderr == ""
        assert (kv.dir / "inside").exists() == (command != "evict")
    finally:
        run("umount", tmp_path / "mnt")
        run("umount", kv.dir / "elsewhere")


def test_commands__deep_trees_and_long_names(fresh):
    """Paths longer than the kernel takes in one piece, names of 1023 bytes, any bytes."""
    kv = fresh()
    here = os.open(kv.mnt, os.O_RDONLY)
    for _ in range(20):
        os.mkdir("n" * 1000, dir_fd=here)
        below = os.open("n" * 1000, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    for name in (b"l" * 1023, b"\xff\n\x01 '", b"plain"):
        fd = os.open(name, os.O_CREAT | os.O_WRONLY, dir_fd=here)
        os.write(fd, b"x" * 5000)
        os.close(fd)
    assert kv.kvfs("cool", kv.mnt).stdout == "3 files out of DRAM, 24.0K freed\n"
    assert kv.kvfs("warm", kv.mnt).stdout == "3 files in DRAM, 14.6K\n"
    assert kv.kvfs("evict", "--force", kv.mnt).stdout == "3 files evicted, 24.0K freed\n"
    assert os.listdir(here) == []
    os.close(here)


def test_commands__many_files(fresh):
    kv = fresh()
    (kv.mnt / "d").mkdir()
    for i in range(2000):
        put(kv.mnt / "d" / f"{i:064x}", struct.pack("<Q", i) * 16)
    sync(kv.mnt / "d" / f"{1999:064x}")
    kv.remount()
    assert kv.kvfs("warm", kv.mnt).stdout.splitlines()[-1].startswith("2000 files in DRAM")
    assert kv.kvfs("cool", kv.mnt).stdout.startswith("2000 files out of DRAM")
    assert kv.kvfs("evict", "--force", kv.mnt).stdout.startswith("2000 files evicted")


def test_commands__all_at_once(fresh):
    """Readers and writers while files are warmed, cooled and evicted: right bytes, or no such file."""
    kv = fresh(size="512M", dram="64M", stream_above="4M")
    paths = [kv.mnt / f"f{i}" for i in range(10)]
    sizes = [(i % 5 + 1) * 2 * MIB + i for i in range(10)]

    def write(number):
        for turn in range(25):
            i = (number + turn * 3) % 10
            replace(paths[i], blob(i, sizes[i]))

    def read(number):
        for turn in range(80):
            i = (number * 7 + turn) % 10
            try:
                assert get(paths[i]) == blob(i, sizes[i])
            except FileNotFoundError:
                pass

    def look_after(command):
        for turn in range(25):
            done = kv.kvfs(command, *(["--force"] if command == "evict" else []),
                           paths[turn % 10], check=False)
            assert done.returncode == 0 or any(word in done.stderr for word in (
                "No such file", "open or being written", "being written", "do not fit")), done

    for path, (i, size) in zip(paths, enumerate(sizes)):
        put(path, blob(i, size))
    children = [Child(write, n) for n in range(2)] + [Child(read, n) for n in range(3)]
    children += [Child(look_after, command) for command in ("warm", "warm", "cool", "evict")]
    for child in children:
        child.result(150)
    for i, path in enumerate(paths):
        if path.exists():
            assert get(path) == blob(i, sizes[i])
