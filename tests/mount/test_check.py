# SPDX-License-Identifier: Apache-2.0
"""kvfs check: what is wrong with a store is found, named and, on request, repaired; else nothing changes."""
import errno
import hashlib
import json
import os
import shutil
import struct
import subprocess

import pytest
from data import MIB, blob, get, put, sync
from faults import Faults
from kvmount import MountFailed, build_folder
from procs import eventually, run
from syscalls import fails
from test_checksums import flip

SIZE = 2 * MIB + 4096 * 3
CLEAN, REPAIRED, LEFT, FAILED, USAGE = 0, 1, 4, 8, 16
MODE_ANY = pytest.mark.parametrize("mode", ["daemon"])


def check(kv, *args, status=CLEAN):
    """Runs the check, and returns what it printed."""
    return checked(kv, *args, status=status).stdout


def checked(kv, *args, status):
    done = kv.kvfs("check", kv.store, *args, check=False)
    assert done.returncode == status, done
    return done


def report(kv, *args, status=CLEAN):
    return json.loads(check(kv, "--json", *args, status=status))


def sums(folder):
    """All that is in FOLDER: names, kinds, sizes, times and bytes."""
    found = {}
    for path in sorted(folder.rglob("*")):
        st = path.lstat()
        found[path.relative_to(folder)] = (st.st_mode, st.st_size, st.st_mtime_ns,
                                           hashlib.sha256(path.read_bytes()).hexdigest()
                                           if path.is_file() else "")
    return found


def populate(kv):
    """Names of every kind; returns the extents of the plain files."""
    os.makedirs(kv.mnt / "a/b/c")
    for i in range(4):
        put(kv.mnt / f"a/f{i}", blob(i, SIZE))
        sync(kv.mnt / f"a/f{i}")
    os.link(kv.mnt / "a/f0", kv.mnt / "a/b/link")
    os.symlink("f0", kv.mnt / "a/symlink")
    os.setxattr(kv.mnt / "a/f1", "user.note", b"x" * 100)
    run("cp", "--reflink=auto", kv.mnt / "a/f2", kv.mnt / "a/copy")
    os.mkdir(kv.mnt / "quota")
    kv.kvfs("quota", kv.mnt / kv.mnt / "quota", "16M")
    put(kv.mnt / "quota/q", blob(9, SIZE))
    kv.kvfs("pin", kv.mnt / "quota/q")
    sync(kv.mnt / "quota/q")
    kv.settle()
    return {i: kv.extents(kv.mnt / f"a/f{i}") for i in range(4)}


def damage_index(kv):
    """Breaks every third page of the index that holds names or inodes; returns how many."""
    page, leaf, tables = 4096, 2, (10, 13)
    broken = 0
    with open(kv.store / "index/data.mdb", "r+b") as f:
        data = f.read()
        for at in range(2 * page, len(data), page):
            flags, node = struct.unpack_from("<H4xH", data, at + 10)
            if flags != leaf or node + 8 > page or data[at + node + 8] not in tables:
                continue
            broken += 1
            if broken % 3 == 0:
                f.seek(at + 14)
                f.write(b"\xff\xff")
    return broken // 3


@MODE_ANY
def test_sound(fresh):
    kv = fresh(size="64M")
    populate(kv)
    kv.umount()
    before = sums(kv.store)
    assert "is sound" in check(kv)
    assert "is sound" in check(kv, "--data")
    assert check(kv, "--quiet") == ""
    got = report(kv, "--data")
    assert got["violations"] == [] and got["dropped"] == [] and got["result"] == "sound"
    # Five files of their own, and a copy that shares its blocks.
    assert got["files_read"] == 6 and got["bytes_read"] == 6 * SIZE
    assert sums(kv.store) == before


@MODE_ANY
def test_repair_of_a_sound_store_changes_nothing(fresh):
    kv = fresh(size="64M")
    populate(kv)
    kv.umount()
    before = {k: v for k, v in sums(kv.store).items() if k.name != "lock"}
    check(kv, "--repair", "--data")
    assert {k: v for k, v in sums(kv.store).items() if k.name != "lock"} == before


@MODE_ANY
def test_mounted_is_refused(fresh):
    kv = fresh(size="64M")
    put(kv.mnt / "f", b"x")
    done = kv.kvfs("check", kv.store, check=False)
    assert done.returncode == FAILED
    assert "already mounted" in done.stderr and str(kv.pid) in done.stderr
    assert done.stdout == ""


@MODE_ANY
def test_copy_of_a_mounted_store(fresh):
    """A snapshot of a store can be checked while the store is in use."""
    kv = fresh(size="64M")
    populate(kv)
    kv.settle()  # cp does not copy at one moment: nothing is to be committed meanwhile
    snapshot = kv.home / "snapshot"
    run("cp", "-a", "--reflink=auto", kv.store, snapshot)
    done = kv.kvfs("check", snapshot, "--data", check=False)
    assert done.returncode == CLEAN, done
    shutil.rmtree(snapshot)


@MODE_ANY
def test_usage(fresh):
    kv = fresh(mount=False, size="64M")
    for args in ((), ("--bad",), (kv.store, kv.store)):
        done = kv.kvfs("check", *args, check=False)
        assert done.returncode == USAGE
        assert done.stderr.startswith("kvfs check: ") and "--help" in done.stderr
    for path in (kv.home / "nothing", kv.home):
        done = kv.kvfs("check", path, check=False)
        assert done.returncode == FAILED
        assert str(path) in done.stderr


@MODE_ANY
def test_flipped_data(fresh):
    """--data names the file and the blocks; a repair drops that file, and no other."""
    kv = fresh(size="64M")
    extents = populate(kv)
    kv.umount()
    flip(kv, extents[1], MIB + 5)
    assert "is sound" in check(kv)
    before = sums(kv.store)
    got = report(kv, "--data", status=LEFT)
    assert sums(kv.store) == before
    (bad,) = got["violations"]
    assert bad["path"] == "/a/f1" and bad["device"] == 0 and "chunk 1" in bad["text"]
    (place,) = [at + MIB - offset for offset, _, at, length in extents[1]
                if offset <= MIB < offset + length]
    assert bad["block"] * 4096 + MIB == place and bad["blocks"] == 256
    text = check(kv, "--data", "--repair", status=REPAIRED)
    assert "dropped: inode" in text and "path /a/f1: its data is damaged" in text
    assert "1 files and directories were dropped" in text
    check(kv, "--data")
    kv.mount()
    fails(errno.ENOENT, os.stat, kv.mnt / "a/f1")
    for i in (0, 2, 3):
        assert get(kv.mnt / f"a/f{i}") == blob(i, SIZE)
    assert get(kv.mnt / "a/copy") == blob(2, SIZE)
    assert get(kv.mnt / "a/b/link") == blob(0, SIZE)
    put(kv.mnt / "a/f1", b"again")
    assert get(kv.mnt / "a/f1") == b"again"
    assert os.getxattr(kv.mnt / "quota/q", "user.kvfs.pin") == b"1"


@MODE_ANY
def test_a_name_gives_no_commands_to_the_terminal(fresh):
    kv = fresh(size="64M")
    put(kv.mnt / "\x1b[2J", blob(0, SIZE))
    kv.settle()
    extents = kv.extents(kv.mnt / "\x1b[2J")
    kv.umount()
    flip(kv, extents, 5)
    assert report(kv, "--data", status=LEFT)["violations"][0]["path"] == "/\x1b[2J"
    text = check(kv, "--data", "--repair", status=REPAIRED)
    assert text.count("path /\\x1b[2J") == 2 and "\x1b" not in text


@MODE_ANY
def test_superblocks(fresh):
    """A damaged copy is written anew, two damaged ones too; a device of another store is not touched."""
    kv = fresh(size="64M")
    populate(kv)
    kv.umount()
    path = kv.device_path(0)
    with open(path, "rb") as f:
        whole = f.read(8192)
    for places in ((20,), (4096 + 33,), (20, 4096 + 20)):
        with open(path, "r+b") as f:
            for at in places:
                f.seek(at)
                f.write(bytes([whole[at] ^ 1]))
        got = report(kv, status=LEFT)
        assert len(got["violations"]) == len(places)
        assert all("superblock copy" in v["text"] for v in got["violations"])
        check(kv, "--repair", status=REPAIRED)
        check(kv)
        with open(path, "rb") as f:
            assert f.read(8192) == whole
    # Nothing of ours is left there: whose device that is now, nobody knows.
    with open(path, "r+b") as f:
        f.write(bytes(8192))
    text = check(kv, "--repair", status=LEFT)
    assert "not there" in text and "devices" in text
    with open(path, "r+b") as f:
        assert f.read(8192) == bytes(8192)
        f.seek(0)
        f.write(whole)
    check(kv, "--data")


@MODE_ANY
def test_device_that_is_missing(fresh):
    """Files are not dropped because their device cannot be read just now."""
    kv = fresh(size="64M")
    populate(kv)
    kv.umount()
    os.rename(kv.device_path(0), kv.home / "away")
    text = check(kv, "--data", "--repair", status=LEFT)
    assert "cannot be opened" in text and "dropped" not in text
    os.rename(kv.home / "away", kv.device_path(0))
    check(kv, "--data")


def damage_meta(kv):
    """Breaks the older of the index's two heads: all is there still, but only for a repair."""
    page, txn = 4096, 144
    with open(kv.store / "index/data.mdb", "r+b") as f:
        data = f.read(2 * page)
        ages = [struct.unpack_from("<Q", data, at + txn)[0] for at in (0, page)]
        f.seek(page * ages.index(min(ages)))
        f.write(bytes(page))


def in_its_place(kv, kind):
    """What may be found where the store's own device was."""
    path = kv.device_path(0)
    if kind == "foreign":
        other = kv.home / "other"
        kv.kvfs("format", other, "--size", "64M")
        os.rename(other / "data0", path)
        shutil.rmtree(other)
        return
    with open(path, "wb") as f:
        f.truncate(64 * MIB)
    if kind == "short":
        with open(kv.home / "away", "rb") as f, open(path, "r+b") as g:
            g.write(f.read(8192))
            g.truncate(MIB)


@MODE_ANY
@pytest.mark.parametrize("kind", ["blank", "foreign", "short"])
@pytest.mark.parametrize("index", ["sound", "damaged"])
def test_another_drive_in_its_place(fresh, kind, index):
    """No file is dropped for what a drive says that is not the store's, and nothing is written on it."""
    kv = fresh(size="64M")
    populate(kv)
    kv.umount()
    if index == "damaged":
        damage_meta(kv)
    os.rename(kv.device_path(0), kv.home / "away")
    in_its_place(kv, kind)
    with open(kv.device_path(0), "rb") as f:
        before = f.read(8192)
    text = check(kv, "--data", "--repair", status=LEFT)
    assert "dropped:" not in text and "fails its checksum" not in text
    assert "put the store's own devices in place" in text
    with open(kv.device_path(0), "rb") as f:
        assert f.read(8192) == before
    os.rename(kv.home / "away", kv.device_path(0))
    assert report(kv, "--data")["files_read"] == 6


@pytest.fixture
def faulty(fresh, monkeypatch):
    """A store, not mounted, and what makes calls of a check of it fail."""
    library = build_folder() / "tests" / "crash" / "libkvfault.so"
    if not library.exists():
        pytest.skip("the library that fails calls is not built")
    kv = fresh(size="64M")
    for i in range(3):
        put(kv.mnt / f"f{i}", blob(i, 200_000))
    kv.settle()
    kv.umount()
    faults = Faults(kv.home / "faults")

    def preloaded(status):
        with monkeypatch.context() as patch:
            patch.setenv("KV_FAULT_FILE", os.fspath(kv.home / "faults"))
            patch.setenv("LD_PRELOAD", os.fspath(library))
            done = checked(kv, "--data", "--repair", status=status)
        assert faults.disarm(), "no call failed: this proves nothing"
        return done

    return kv, faults, preloaded


@MODE_ANY
@pytest.mark.parametrize("number, text", [(1, "cannot be repaired"), (2, "cannot be put in place")])
def test_new_index_that_cannot_be_made_durable(faulty, number, text):
    """First its directory, then the store's: the old index is back in its place, and no byte of it changed."""
    kv, faults, preloaded = faulty
    damage_meta(kv)
    before = sums(kv.store / "index")
    faults.arm("fsync", number)
    done = preloaded(LEFT)
    assert text in done.stderr and "Input/output error" in done.stderr
    assert sums(kv.store / "index") == before and not (kv.store / "index.new").exists()
    check(kv, "--repair", status=REPAIRED)
    assert report(kv, "--data")["files_read"] == 3


@MODE_ANY
def test_old_index_that_cannot_be_put_back(faulty):
    """Then nothing is removed, and the message says where it is."""
    kv, faults, preloaded = faulty
    damage_meta(kv)
    before = sums(kv.store / "index")
    faults.arm("swap", 2)
    assert "index.new" in preloaded(LEFT).stderr
    assert sums(kv.store / "index.new") == before
    assert report(kv, "--data")["files_read"] == 3


@MODE_ANY
def test_reads_that_fail(faulty):
    """A file goes if its drive answers but cannot read it; not for an error that passes, or a drive that left."""
    kv, faults, preloaded = faulty
    faults.arm("read", 2)
    text = preloaded(REPAIRED).stdout
    assert text.count("cannot be read") == 1 and "dropped:" not in text
    faults.arm("drive", 2)
    text = preloaded(LEFT).stdout
    assert "does not answer any more" in text and "dropped:" not in text
    assert "put the store's own devices in place" in text
    assert report(kv, "--data")["files_read"] == 3
    faults.arm("sector", 1)
    assert preloaded(REPAIRED).stdout.count("dropped:") == 3
    assert report(kv, "--data")["files_read"] == 0


@MODE_ANY
def test_damaged_index(fresh):
    """The mount says what to do; the repair keeps what can be read, and never wrong bytes."""
    kv = fresh(size="64M")
    populate(kv)
    os.makedirs(kv.mnt / "many")
    for i in range(3000):
        os.mkdir(kv.mnt / f"many/{i}")
    kv.umount()
    assert damage_index(kv) > 10
    before = sums(kv.store)
    text = check(kv, status=LEFT)
    assert "index page" in text
    assert sums(kv.store) == before
    check(kv, "--repair", "--data", status=REPAIRED)
    check(kv, "--data")
    kv.mount()
    for root, _, files in os.walk(kv.mnt):
        for name in files:
            path = os.path.join(root, name)
            if os.path.islink(path):
                continue
            number = {"link": 0, "copy": 2, "q": 9}.get(name, int(name[1:]) if name[0] == "f" else 0)
            assert get(path) == blob(number, SIZE), path
    put(kv.mnt / "new", b"works")
    sync(kv.mnt / "new")
    kv.umount()
    check(kv, "--data")


@MODE_ANY
def test_index_without_a_root(fresh):
    """Neither mount nor repair can do anything; both name what can, and that works."""
    kv = fresh(size="64M")
    populate(kv)
    kv.umount()
    with open(kv.store / "index/data.mdb", "r+b") as f:
        f.write(bytes(8192))
    done = kv.kvfs("mount", kv.store, kv.mnt, check=False)
    assert done.returncode == 1
    assert "kvfs check" in done.stderr and "kvfs format --force" in done.stderr
    done = kv.kvfs("check", kv.store, "--repair", check=False)
    assert done.returncode == LEFT
    assert "kvfs format --force" in done.stderr
    done = kv.kvfs("format", kv.store, check=False)
    assert done.returncode == 1 and "--force" in done.stderr
    kv.kvfs("format", kv.store, "--force")
    check(kv)
    kv.mount()
    assert os.listdir(kv.mnt) == []


@MODE_ANY
def test_after_a_crash(fresh):
    """A killed daemon leaves a store that is sound as it is."""
    kv = fresh(size="64M")
    populate(kv)
    fd = os.open(kv.mnt / "open", os.O_CREAT | os.O_WRONLY)
    os.write(fd, b"y" * MIB)
    os.unlink(kv.mnt / "a/f3")
    kv.kill()
    fails(errno.ENOTCONN, os.close, fd)
    check(kv, "--data")
    kv.mount()
    assert get(kv.mnt / "a/f2") == blob(2, SIZE)


@MODE_ANY
def test_interrupted(fresh):
    """A check that is killed leaves the store as it was, and in nobody's hands."""
    kv = fresh(size="64M")
    extents = populate(kv)
    kv.umount()
    flip(kv, extents[1], 5)
    before = sums(kv.store)
    process = subprocess.Popen([kv.programs["kvfs"], "check", kv.store, "--data", "--json"],
                               stdout=subprocess.PIPE)
    process.kill()
    process.wait()
    process.stdout.close()
    assert sums(kv.store) == before
    eventually(lambda: kv.kvfs("check", kv.store, check=False).returncode == CLEAN, what="the lock")


@MODE_ANY
def test_r1_flips_anywhere(fresh):
    """A byte that is flipped in any structure: the mount refuses, or each file is whole or a miss."""
    kv = fresh(size="64M")
    kv.expect_errors("checksum|quarantine|damaged|superblock")
    extents = populate(kv)
    kv.umount()
    kv.damaged = True
    pristine = kv.home / "pristine"
    shutil.copytree(kv.store, pristine)
    index = (kv.store / "index/data.mdb").stat().st_size
    places = [("data0", at) for at in (3, 18, 40, 4096 + 57)]
    places += [("data0", at + length - 1 - i * 997) for i in range(2) for _, _, at, length in extents[i]]
    places += [("index/data.mdb", at) for at in range(997, index, index // 10)]
    refused = missed = 0
    for name, at in places:
        shutil.rmtree(kv.store)
        shutil.copytree(pristine, kv.store)
        with open(kv.store / name, "r+b") as f:
            f.seek(at)
            old = f.read(1)
            f.seek(at)
            f.write(bytes([old[0] ^ 0x10]))
        try:
            kv.mount()
        except MountFailed as e:
            assert "kvfs check" in e.text or "kvfs format" in e.text
            refused += 1
            continue
        for i in range(4):
            try:
                assert get(kv.mnt / f"a/f{i}") == blob(i, SIZE), (name, at)
            except OSError as e:
                assert e.errno in (errno.ENOENT, errno.EIO, errno.EUCLEAN), e
                missed += 1
        kv.umount()
    assert missed >= 2, (refused, missed)
