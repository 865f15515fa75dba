# SPDX-License-Identifier: Apache-2.0
"""Virtual attributes, touches as hints, and honest figures: what tools see of a file."""
import errno
import os
import re
import shutil
import stat
import time

import pytest
from data import MIB, blob, get, put, put_synced, snapshot, sync
from kvmount import ROOT
from procs import eventually, run
from syscalls import FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE, UTIME_NOW, UTIME_OMIT, fails, fallocate, utimensat

# Those of a file, from the table in fs/attributes.c.
FIXED = {f"user.kvfs.{key}" for key in re.findall(
    r'^\t\{"(\w+)", S_IFREG, ', (ROOT / "fs/attributes.c").read_text(), re.MULTILINE)}


def needs(program):
    if not shutil.which(program):
        pytest.skip(f"{program} is not installed")


def attributes(path):
    """What getfattr -d -m 'user.kvfs' prints: {key: value}."""
    needs("getfattr")
    shown = run("getfattr", "--absolute-names", "-d", "-m", "user.kvfs", path).stdout
    return dict(re.findall(r'^user\.kvfs\.(\w+)="(.*)"$', shown, re.MULTILINE))


# ---- virtual attributes ----


def test_getfattr_shows_them(kv):
    path = kv.dir / "f"
    put_synced(path, blob(1, 3 * MIB))
    get(path)
    found = attributes(path)
    assert found["tier"] == "dram+nvme"
    assert found["hits"] == "2"
    assert found["checksum"] == "stored"
    assert found["version"] == str(kv.stat(path)["version"])
    runs = [tuple(map(int, re.fullmatch(r"(\d+):(\d+)\+(\d+)", word).groups()))
            for word in found["extents"].split()]
    assert runs == [(device, offset, length) for _, device, offset, length in kv.extents(path)]
    kv.kvfs("cool", path)
    assert attributes(path)["tier"] == "nvme"
    put_synced(path, b"new")
    assert int(attributes(path)["version"]) > int(found["version"])


def test_attributes_of_files_in_other_states(kv, agent):
    put(kv.dir / "empty", b"")
    sync(kv.dir / "empty")
    found = attributes(kv.dir / "empty")
    assert (found["tier"], found["checksum"], found["extents"]) == ("none", "none", "")
    writer = agent()
    fd = writer.open(kv.dir / "new", os.O_CREAT | os.O_WRONLY)
    writer.write(fd, b"x" * 10000)
    found = attributes(kv.dir / "new")
    assert (found["tier"], found["checksum"], found["hits"]) == ("writing", "pending", "0")
    writer.close(fd)
    with open(kv.dir / "spread", "wb") as f:
        for chunk in range(0, 60, 2):
            f.seek(chunk * MIB)
            f.write(b"x" * 4096)
            f.flush()
            put_synced(kv.dir / f"between{chunk}", b"y" * 4096)
            os.fsync(f.fileno())
    extents = attributes(kv.dir / "spread")["extents"]
    assert extents.endswith(" ...") and len(extents.split()) == 9
    assert len(extents) < 400


def listed(path, *options):
    """The names that getfattr lists."""
    needs("getfattr")
    shown = run("getfattr", "--absolute-names", "-m", "-", *options, path).stdout
    return [line for line in shown.splitlines() if line and not line.startswith("#")]


def test_attributes_are_listed_to_who_shows_them(kv):
    """getfattr finds them behind the stored ones; everybody gets them by name."""
    put(kv.dir / "f", b"x")
    os.setxattr(kv.dir / "f", "user.a", b"1")
    os.setxattr(kv.dir / "f", "user.kvfsx", b"2")
    assert set(listed(kv.dir / "f")) == {"user.a", "user.kvfsx"} | FIXED
    assert sorted(os.listxattr(kv.dir / "f")) == ["user.a", "user.kvfsx"]
    assert {"tier", "hits", "version", "checksum", "extents"} <= set(attributes(kv.dir / "f"))
    for name in FIXED:
        os.getxattr(kv.dir / "f", name)
    os.symlink("f", kv.dir / "link")
    assert listed(kv.dir / "link", "-h") == []
    assert FIXED & set(listed(kv.dir)) == {"user.kvfs.pin"}
    kv.kvfs("pin", kv.dir)
    assert attributes(kv.dir) == {"pin": "1"}
    kv.kvfs("quota", kv.dir, "64M")
    assert attributes(kv.dir) == {"pin": "1", "quota": str(64 << 20)}
    kv.kvfs("quota", kv.dir, "none")
    kv.kvfs("unpin", kv.dir)
    assert attributes(kv.dir) == {"pin": "0"}
    fails(errno.ENODATA, os.getxattr, kv.dir, "user.kvfs.tier")


def test_attributes_give_way_to_the_limit_of_a_list(kv):
    """The kernel takes 64 KiB of names; when the stored ones need that, they are what counts."""
    put(kv.dir / "f", b"x")
    names = ["user." + f"{i:03}" + "n" * 240 for i in range(263)]
    for name in names[:-1]:
        os.setxattr(kv.dir / "f", name, b"")
    assert set(listed(kv.dir / "f")) == set(names[:-1]) | FIXED
    os.setxattr(kv.dir / "f", names[-1], b"")
    assert set(listed(kv.dir / "f")) == set(names)


def test_attributes_are_read_only(kv):
    put_synced(kv.dir / "f", b"x")
    before = attributes(kv.dir / "f")
    del before["lease"]  # which runs
    for name in (*FIXED - {"user.kvfs.pin"}, "user.kvfs.status", "user.kvfs.map.0", "user.kvfs.nonsense", "user.kvfs."):
        fails(errno.EPERM, os.setxattr, kv.dir / "f", name, b"x")
        fails(errno.EPERM, os.removexattr, kv.dir / "f", name)
    after = attributes(kv.dir / "f")
    del after["lease"]
    assert after == before


@pytest.fixture
def tree(kv):
    root = kv.dir / "tree"
    (root / "d").mkdir(parents=True)
    for i in range(3):
        put_synced(root / "d" / f"f{i}", blob(i, 5000 * (i + 1)))
        os.setxattr(root / "d" / f"f{i}", "user.mine", b"%d" % i)
    return root


COPIERS = {
    "cp -a": lambda a, b: run("cp", "-a", a, b),
    "cp --preserve=xattr": lambda a, b: run("cp", "-r", "--preserve=all", a, b),
    "rsync": lambda a, b: run("rsync", "-aX", f"{a}/", f"{b}/"),
    "tar": lambda a, b: (os.mkdir(b), run("sh", "-c", f"tar -C {a} --xattrs -cf - . |"
                                          f" tar -C {b} --xattrs --xattrs-include='*' -xf -"))[1],
    "mv": lambda a, b: (run("cp", "-a", a, f"{b}-"), run("mv", f"{b}-", b))[1],
}


@pytest.mark.parametrize("how", COPIERS)
def test_copies_with_attributes_work(kv, tree, elsewhere, how):
    """Within the mount, out of it, and back: no error, own attributes kept, virtual ones left behind."""
    needs(how.split()[0])
    copier = COPIERS[how]
    done = [copier(tree, kv.dir / "inside"), copier(tree, elsewhere / "out"),
            copier(elsewhere / "out", kv.dir / "back")]
    assert [d.stderr for d in done] == ["", "", ""]
    wanted = snapshot(tree)
    assert snapshot(kv.dir / "inside") == wanted
    assert snapshot(elsewhere / "out") == wanted
    assert snapshot(kv.dir / "back") == wanted
    for root in (kv.dir / "inside", elsewhere / "out", kv.dir / "back"):
        assert os.listxattr(root / "d" / "f1") == ["user.mine"]


def test_rsync_again_has_nothing_to_send(kv, tree):
    needs("rsync")
    run("rsync", "-aX", f"{tree}/", kv.dir / "copy")
    done = run("rsync", "-aX", "--itemize-changes", f"{tree}/", kv.dir / "copy")
    assert done.stdout == ""


# ---- touches ----


def touch(path, atime, mtime=(0, UTIME_OMIT)):
    utimensat(path, atime, mtime)


TOUCHES = {
    "atime now": lambda path: touch(path, (0, UTIME_NOW)),
    "both now": os.utime,
    "touch -a": lambda path: run("touch", "-a", path),
    "an explicit atime": lambda path: touch(path, (int(time.time()), 0)),
    "the future": lambda path: touch(path, (4_000_000_000, 0)),
}


@pytest.mark.parametrize("how", TOUCHES)
def test_k1_a_touch_counts_as_a_use(fresh, how):
    """What is touched again and again outlives what is not, though it is never read."""
    kv = fresh(size="128M", dram="64M")
    for i, name in enumerate(("loved", "other"), 1):
        with open(kv.mnt / name, "xb", buffering=0) as f:  # who opens it for reading leases it
            f.write(blob(i, 2 * MIB))
            os.fsync(f.fileno())
    before = kv.stat(kv.mnt / "loved")
    mtime = os.stat(kv.mnt / "loved").st_mtime_ns
    for i in range(80):
        put(kv.mnt / f"f{i}", blob(i, 4 * MIB))
        TOUCHES[how](kv.mnt / "loved")
    assert get(kv.mnt / "loved") == blob(1, 2 * MIB)
    assert not os.path.exists(kv.mnt / "other")
    assert not os.path.exists(kv.mnt / "f0")
    after = kv.stat(kv.mnt / "loved")
    assert (after["version"], after["extents"]) == (before["version"], before["extents"])
    assert after["hits"] == before["hits"] + 1, "a touch is no hit; the read just now is"
    if how != "both now":
        assert os.stat(kv.mnt / "loved").st_mtime_ns == mtime


def test_a_touch_moves_the_last_use_and_nothing_else(kv):
    path = kv.dir / "f"
    put_synced(path, b"x" * 5000)
    before, info = kv.stat(path), os.stat(path)
    time.sleep(0.01)
    touch(path, (0, UTIME_NOW))
    after = kv.stat(path)
    assert after["last_use_ns"] > before["last_use_ns"]
    assert after["version"] == before["version"] and after["hits"] == before["hits"]
    assert os.stat(path).st_atime_ns > info.st_atime_ns
    assert os.stat(path).st_mtime_ns == info.st_mtime_ns
    assert get(path) == b"x" * 5000


def test_an_atime_in_the_past_takes_no_use_away(kv):
    """It is kept as the atime; what restores old times must not make a file the next victim."""
    path = kv.dir / "f"
    put_synced(path, b"x")
    before = kv.stat(path)["last_use_ns"]
    touch(path, (1_000_000_000, 5))
    assert os.stat(path).st_atime_ns == 1_000_000_000 * 10**9 + 5
    assert kv.stat(path)["last_use_ns"] == before
    touch(path, (4_000_000_000, 0))
    assert os.stat(path).st_atime == 4_000_000_000
    assert before < kv.stat(path)["last_use_ns"] <= time.time_ns()
    use = kv.stat(path)["last_use_ns"]
    touch(path, (0, UTIME_OMIT), (1_500_000_000, 0))
    os.chmod(path, 0o600)
    assert kv.stat(path)["last_use_ns"] == use, "an mtime is no use, nor is a mode"


def test_touches_of_new_files_directories_and_links(kv, agent):
    writer = agent()
    fd = writer.open(kv.dir / "new", os.O_CREAT | os.O_WRONLY)
    writer.write(fd, b"data")
    touch(kv.dir / "new", (0, UTIME_NOW))
    touch(kv.dir, (0, UTIME_NOW))
    os.symlink("new", kv.dir / "link")
    os.utime(kv.dir / "link", follow_symlinks=False)
    writer.close(fd)
    assert get(kv.dir / "new") == b"data"


def test_k1_a_touch_keeps_a_file_in_dram(fresh):
    kv = fresh(size="512M", dram="64M")
    put_synced(kv.mnt / "loved", blob(1, 4 * MIB))
    put_synced(kv.mnt / "other", blob(2, 4 * MIB))
    for i in range(20):
        put_synced(kv.mnt / f"f{i}", blob(i, 8 * MIB))
        touch(kv.mnt / "loved", (0, UTIME_NOW))
    assert kv.tier(kv.mnt / "loved") == "dram+nvme"
    assert kv.tier(kv.mnt / "other") == "nvme"


# ---- honest figures, whole reads and writes ----


def blocks(path):
    return os.stat(path).st_blocks * 512


def test_st_blocks__dd_sparse_and_du(kv, elsewhere):
    """A file with holes takes what was written; du, ls -s and find agree, before and after the commit."""
    with open(elsewhere / "source", "wb") as f:
        f.write(blob(1, MIB))
        f.seek(50 * MIB)
        f.write(blob(2, MIB))
    for path in (kv.dir / "dd", kv.dir / "cp"):
        if path.name == "dd":
            run("dd", f"if={elsewhere / 'source'}", f"of={path}", "bs=1M", "conv=sparse")
        else:
            run("cp", "--sparse=always", elsewhere / "source", path)
        for _ in range(2):
            assert os.stat(path).st_size == 51 * MIB
            assert blocks(path) == 2 * MIB
            assert run("du", "-B1", path).stdout.split()[0] == str(2 * MIB)
            assert run("du", "-b", path).stdout.split()[0] == str(51 * MIB)
            sync(path)
        run("cmp", elsewhere / "source", path)
    assert run("du", "-s", "-B1", kv.dir).stdout.split()[0] == str(4 * MIB)


def test_st_blocks__fallocate_and_punch(kv):
    fd = os.open(kv.dir / "f", os.O_CREAT | os.O_RDWR)
    os.posix_fallocate(fd, 0, 8 * MIB)
    assert (os.fstat(fd).st_size, os.fstat(fd).st_blocks * 512) == (8 * MIB, 8 * MIB)
    fallocate(fd, FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE, 2 * MIB, 4 * MIB)
    assert os.fstat(fd).st_blocks * 512 == 4 * MIB
    os.ftruncate(fd, 1 << 40)
    assert os.fstat(fd).st_blocks * 512 == 4 * MIB
    os.close(fd)
    sync(kv.dir / "f")
    assert blocks(kv.dir / "f") == 0  # a promise ends with the last close, and nothing was written
    put(kv.dir / "tiny", b"x")
    assert blocks(kv.dir / "tiny") == 4096


def test_statvfs__moves_with_writing_evicting_and_fallocate(fresh):
    kv = fresh(size="256M")

    def free():
        info = os.statvfs(kv.mnt)
        assert info.f_bavail == info.f_bfree
        return info.f_bfree * info.f_frsize

    start = free()
    put_synced(kv.mnt / "a", blob(1, 32 * MIB))
    assert abs(start - free() - 32 * MIB) <= MIB
    fd = os.open(kv.mnt / "b", os.O_CREAT | os.O_WRONLY)
    os.posix_fallocate(fd, 0, 32 * MIB)
    assert abs(start - free() - 64 * MIB) <= MIB, "reserved is not free"
    os.close(fd)
    kv.kvfs("evict", "--force", kv.mnt)
    eventually(lambda: start - free() <= MIB, what="the space of evicted files")


def test_r2_reads_and_writes_of_a_published_file_are_whole(kv):
    """One call, any size and place: short at the end of the file and nowhere else."""
    size = 40 * MIB + 12_345
    data = blob(3, size)
    fd = os.open(kv.dir / "f", os.O_CREAT | os.O_WRONLY)
    assert os.write(fd, data) == size
    os.close(fd)
    for turn in ("hot", "cold"):
        if turn == "cold":
            kv.kvfs("cool", kv.dir / "f")
        for flags in (os.O_RDONLY, os.O_RDONLY | os.O_DIRECT):
            fd = os.open(kv.dir / "f", flags)
            for offset in (0, 1, 4095, MIB - 1, 7 * MIB + 5):
                assert os.pread(fd, size, offset) == data[offset:], (turn, offset)
            assert len(os.pread(fd, 100, size - 7)) == 7
            assert os.pread(fd, 100, size) == b""
            os.close(fd)


def test_modes_of_what_is_listed_are_right(kv):
    """A scan by d_type and by stat agree, for engines that trust either."""
    put(kv.dir / "f", b"x")
    (kv.dir / "d").mkdir()
    os.symlink("f", kv.dir / "l")
    for entry in os.scandir(kv.dir):
        mode = os.lstat(entry.path).st_mode
        assert (entry.is_file(follow_symlinks=False), entry.is_dir(follow_symlinks=False),
                entry.is_symlink()) == (stat.S_ISREG(mode), stat.S_ISDIR(mode),
                                        stat.S_ISLNK(mode))
