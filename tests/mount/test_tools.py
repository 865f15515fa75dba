# SPDX-License-Identifier: Apache-2.0
"""What people type: help, refusals, and the reports of a mount."""
import ctypes
import json
import os
import re
import struct

import pytest
from kvmount import ROOT, MountFailed, build_folder
from procs import eventually, run

COMMANDS = ("format", "mount", "status", "stat", "quota", "pin", "unpin", "retire", "warm",
            "cool", "evict", "check", "scrub")
MODE_ANY = pytest.mark.parametrize("mode", ["daemon"])
BLOCK = 4096


def kvfs(*args, check=True):
    return run(build_folder() / "tools" / "kvfs", *args, check=check)


def assert_refused(done, *words, status=1):
    """Exit STATUS and one line on stderr that has all of WORDS; nothing on stdout."""
    assert done.returncode == status, done
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1 and done.stderr.endswith("\n"), done.stderr
    for word in words:
        assert str(word) in done.stderr, (word, done.stderr)


def tree(path):
    """All names under PATH with size and, of small files, the content."""
    return {p.relative_to(path): (p.stat().st_size, p.read_bytes()[:2 * BLOCK])
            for p in sorted(path.rglob("*")) if p.is_file()}


# ---- help and usage ----


@pytest.mark.parametrize("args", [("--help",), ("-h",), ("help",)] +
                         [(c, "--help") for c in COMMANDS] + [(c, "-h") for c in COMMANDS])
def test_help__on_stdout_within_80_columns(args):
    done = kvfs(*args)
    assert done.stdout.startswith("usage: kvfs ")
    assert done.stderr == ""
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_help__names_every_command():
    shown = kvfs("--help").stdout
    for command in COMMANDS:
        assert f"kvfs {command} " in shown


def test_help__manual_names_every_option():
    manual = (ROOT / "tools/man/kvfsd.8").read_text()
    for option in re.findall(r"^  ([a-z_]+)", kvfs("mount", "--help").stdout, re.MULTILINE):
        if option not in ("f", "o"):
            assert f".It Cm {option}" in manual, option


def test_help__manual_has_every_command():
    """A line in the synopsis, and a section."""
    manual = (ROOT / "tools/man/kvfs.1").read_text()
    description = manual[manual.index(".Sh DESCRIPTION"):manual.index(".Sh ENVIRONMENT")]
    for command in (*COMMANDS, "gpu"):
        assert f".Nm\n.Cm {command}\n" in manual, command
        assert f".Ss kvfs {'pin' if command == 'unpin' else command}\n" in description, command


def test_help__manual_has_the_units_of_the_status(kv):
    """Each member that the JSON has, or what the members of its group have in common."""
    manual = (ROOT / "tools/man/kvfs.1").read_text()
    section = manual[manual.index(".Ss kvfs status"):manual.index(".Ss kvfs stat\n")]
    status = kv.status()
    sizes = [name for name in status if re.match("store_|(dram|index|user)_(?!kind|huge|object|comm|files|writ)",
                                                 name)]
    assert len(sizes) >= 13
    for name in (*sizes, "uptime_s", "files", "parked", "nodes", "devices", "users", "counters"):
        group, _, part = name.partition("_")
        # Those of the tiers follow the first of each by their second word.
        short = group in ("store", "dram", "index") and re.search(rf" _{part}\b", section)
        assert name in section or short, name


def test_version__is_the_build_files():
    wanted = re.search(r"version: '([^']+)'", (ROOT / "meson.build").read_text())[1]
    assert kvfs("--version").stdout == f"kvfs {wanted}\n"


def test_usage__without_a_command():
    done = run(build_folder() / "tools" / "kvfs", check=False)
    assert done.returncode == 1 and done.stdout == "" and "usage: kvfs" in done.stderr


def test_usage__unknown_command():
    assert_refused(kvfs("mkfs", check=False), "mkfs", "kvfs --help")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("option", ["--bogus", "--bogus=1", "-x"])
def test_usage__unknown_option(command, option):
    done = kvfs(command, option, check=False)
    assert_refused(done, f"kvfs {command}: unknown option {option}", f"kvfs {command} --help",
                   status=16 if command in ("check", "scrub") else 1)


@pytest.mark.parametrize("args, words", [
    (("format",), ["STORE is missing"]),
    (("format", "a", "b"), ["more than one STORE"]),
    (("format", "a", "--size"), ["--size needs a value"]),
    (("format", "a", "--device"), ["--device needs a value"]),
    (("format", "a", "--force=yes"), ["--force=yes takes no value"]),
    (("mount",), ["STORE and DIR are missing"]),
    (("mount", "a"), ["DIR is missing"]),
    (("mount", "a", "b", "c"), ["too many"]),
    (("mount", "a", "b", "-o"), ["-o needs a value"]),
    (("status", "a", "b"), ["more than one DIR"]),
    (("status", "--json=1"), ["--json=1 takes no value"]),
    (("stat",), ["FILE is missing"]),
])
def test_usage__wrong_arguments(args, words):
    assert_refused(kvfs(*args, check=False), *words, f"kvfs {args[0]} --help")


@pytest.mark.parametrize("option, words", [
    ("drum=8G", ["unknown option 'drum'"]),
    ("dram", ["dram", "missing", "8G"]),
    ("dram=lots", ["dram=lots", "16.0M"]),
    ("dram=1M", ["dram=1M", "16.0M"]),
    ("read_wait=11m", ["read_wait=11m", "600s"]),
    ("allow_other=1", ["allow_other=1", "no value"]),
    ("allow_other,passthrough=maybe", ["passthrough=maybe", "auto, on or off"]),
    ("log=loud", ["log=loud", "warning"]),
    ("max_size=" + "9" * 400, ["too long"]),
])
def test_mount__bad_option(tmp_path, option, words):
    """Refused before anything is looked at, by both programs."""
    assert_refused(kvfs("mount", tmp_path / "none", tmp_path, "-o", option, check=False),
                   *words, "kvfs mount --help")
    done = run(build_folder() / "fs" / "kvfsd", tmp_path / "none", tmp_path, "-o", option, "-f",
               check=False)
    assert done.returncode == 1
    for word in [*words, "kvfs mount --help"]:
        assert word in done.stderr


# ---- format ----


@pytest.mark.parametrize("size", ["", "0", "big", "-1", "8 G", "1e9", "99999999999P"])
def test_format__bad_size(tmp_path, size):
    done = kvfs("format", tmp_path / "s", "--size", size, check=False)
    assert_refused(done, f"--size {size}:", "8G", "kvfs format --help")
    assert list(tmp_path.iterdir()) == []


def test_format__too_small(tmp_path):
    assert_refused(kvfs("format", tmp_path / "s", "--size", "1M", check=False), "64M")
    assert list(tmp_path.iterdir()) == []


def test_format__makes_a_private_store(tmp_path):
    kvfs("format", tmp_path / "s", "--size", "64M")
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "s" / "data0").stat().st_size == 64 << 20
    assert (tmp_path / "s" / "devices").read_text() == "data0\n"


def test_format__an_empty_directory_may_be_there(tmp_path):
    kvfs("format", tmp_path, "--size", "64M")
    assert (tmp_path / "data0").exists()


def test_format__directory_not_empty(tmp_path):
    (tmp_path / "letters").write_text("keep")
    assert_refused(kvfs("format", tmp_path, "--size", "64M", check=False), tmp_path, "empty")
    assert_refused(kvfs("format", tmp_path, "--size", "64M", "--force", check=False), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["letters"]


def test_format__existing_store_only_with_force(tmp_path):
    store = tmp_path / "s"
    kvfs("format", store, "--size", "64M")
    before = tree(store)
    assert_refused(kvfs("format", store, "--size", "64M", check=False), store, "--force")
    assert tree(store) == before
    kvfs("format", store, "--size", "128M", "--force")
    assert (store / "data0").stat().st_size == 128 << 20


def test_format__device_that_is_not_there(tmp_path):
    """Without --size a file is not invented for a device whose name is mistyped."""
    done = kvfs("format", tmp_path / "s", "--device", tmp_path / "nvme", check=False)
    assert_refused(done, tmp_path / "nvme", "--size")
    assert list(tmp_path.iterdir()) == []


def test_format__device_that_holds_something(tmp_path):
    device = tmp_path / "dev"
    device.write_bytes(b"precious" * (1 << 20))
    os.truncate(device, 128 << 20)
    done = kvfs("format", tmp_path / "s", "--device", device, check=False)
    assert_refused(done, device, "--force")
    assert device.read_bytes()[:8] == b"precious"
    kvfs("format", tmp_path / "s", "--device", device, "--force")


# ---- mount ----


def assert_mount_refused(kv, *words):
    """One error line, exit 1, in the foreground as in the background, and nothing is mounted."""
    with pytest.raises(MountFailed) as caught:
        kv.mount()
    assert caught.value.status == 1
    done = kv.kvfs("mount", kv.store, kv.mnt, check=False)
    assert done.returncode == 1
    for text in (caught.value.text, done.stderr):
        lines = [line for line in text.splitlines() if " warning " not in line]
        assert len(lines) == 1, text
        for word in words:
            assert str(word) in lines[0], (word, lines)
    assert not os.path.ismount(kv.mnt)


@MODE_ANY
def test_mount__no_store(fresh):
    kv = fresh(mount=False)
    store, kv.store = kv.store, kv.home / "none"
    assert_mount_refused(kv, kv.store, "kvfs format")
    kv.store.mkdir()
    assert_mount_refused(kv, kv.store, "kvfs format")
    assert list(kv.store.iterdir()) == []
    kv.store.rmdir()
    kv.store.write_text("a file")
    assert_mount_refused(kv, kv.store)
    kv.store = store


@MODE_ANY
def test_mount__directory_is_no_place(fresh):
    kv = fresh(mount=False)
    assert_refused(kv.kvfs("mount", kv.store, kv.home / "none", check=False), kv.home / "none")
    assert_refused(kv.kvfs("mount", kv.store, kv.store / "data0", check=False), "not a directory")


@MODE_ANY
def test_mount__already_mounted(fresh):
    kv = fresh(size="64M")
    other = kv.home / "other"
    other.mkdir()
    done = kv.kvfs("mount", kv.store, kv.mnt, check=False)
    assert_refused(done, kv.mnt, "umount")
    done = kv.kvfs("mount", kv.store, other, check=False)
    assert done.returncode == 1 and "already mounted" in done.stderr
    assert not os.path.ismount(other)
    assert_refused(kv.kvfs("format", kv.store, "--force", "--size", "64M", check=False), kv.store)
    (kv.mnt / "f").write_text("still there")


@MODE_ANY
def test_mount__in_the_background_until_umount(fresh):
    """`kvfs mount` returns when the mount is there; umount ends the daemon, which has flushed."""
    kv = fresh(mount=False, size="64M")
    for i in range(2):
        kv.kvfs("mount", kv.store, kv.mnt, "-o", "dram=64M,passthrough=off")
        try:
            assert os.path.ismount(kv.mnt)
            assert kv.status()["store"] == str(kv.store)
            if i == 0:
                (kv.mnt / "f").write_bytes(b"x" * 100000)
            assert (kv.mnt / "f").read_bytes() == b"x" * 100000
        finally:
            eventually(lambda: run("umount", kv.mnt, check=False).returncode == 0,
                       what="umount")
        eventually(lambda: run("flock", "-n", kv.store / "lock", "true", check=False)
                   .returncode == 0, what="the daemon to end")


@MODE_ANY
def test_mount__damaged_superblocks(fresh):
    """One bad copy is repaired from the other; two are refused, and nothing is written then."""
    kv = fresh(mount=False, size="64M")
    device = kv.device_path(0)
    intact = device.read_bytes()[:2 * BLOCK]

    def damage(*offsets):
        data = bytearray(intact)
        for offset in offsets:
            data[offset] ^= 0x40
        with open(device, "r+b") as f:
            f.write(data)
        return bytes(data)

    for offset in (0, 9, 20, 33, 56, 70):
        damage(offset)
        kv.mount()
        kv.umount()
        assert device.read_bytes()[:2 * BLOCK] == intact
        written = damage(offset, BLOCK + offset)
        assert_mount_refused(kv, device)
        assert device.read_bytes()[:2 * BLOCK] == written
    damage()


def resealed(block, **fields):
    """The superblock with other fields and a right sum: see the drawing in fs/device.h."""
    block = bytearray(block)
    if "version" in fields:
        struct.pack_into("<I", block, 8, fields["version"])
    if "uuid" in fields:
        block[16:32] = fields["uuid"]
    xxh3 = ctypes.CDLL("libxxhash.so.0").XXH3_64bits
    xxh3.restype = ctypes.c_uint64
    struct.pack_into("<Q", block, 56, xxh3(bytes(block[:56]), ctypes.c_size_t(56)))
    return bytes(block)


@MODE_ANY
@pytest.mark.parametrize("fields, word", [({"version": 2}, "another kvfs"), ({"uuid": b"u" * 16}, "another")])
def test_mount__device_of_another_kind(fresh, fields, word):
    """A device of a newer format, or of another store, is refused and stays as it is."""
    kv = fresh(mount=False, size="64M")
    device = kv.device_path(0)
    intact = device.read_bytes()[:BLOCK]
    assert resealed(intact) == intact
    with open(device, "r+b") as f:
        f.write(resealed(intact, **fields) * 2)
    assert_mount_refused(kv, device, word)
    assert device.read_bytes()[:2 * BLOCK] == resealed(intact, **fields) * 2


@MODE_ANY
def test_mount__device_cut_short(fresh):
    kv = fresh(mount=False, size="64M")
    os.truncate(kv.device_path(0), 32 << 20)
    assert_mount_refused(kv, kv.device_path(0))


@MODE_ANY
def test_mount__device_missing(fresh):
    kv = fresh(mount=False, size="64M")
    kv.device_path(0).unlink()
    assert_mount_refused(kv, kv.device_path(0))


# ---- status and stat ----


def test_status__not_a_kvfs_mount(tmp_path):
    assert_refused(kvfs("status", tmp_path, check=False), tmp_path, "not on a kvfs mount")
    assert_refused(kvfs("status", "/proc", check=False), "/proc", "not on a kvfs mount")
    assert_refused(kvfs("status", tmp_path / "none", check=False), "No such file")
    if not os.path.exists("/kv"):
        assert_refused(kvfs("status", check=False), "/kv", "No such file", "name a directory")


def test_status__json(kv):
    status = kv.status()
    assert status["mode"] == kv.mode
    assert (status["mode_reason"] is None) == (kv.mode == "passthrough")
    assert status["store"] == str(kv.store)
    assert [d["path"] for d in status["devices"]] == [str(kv.device_path(0))]
    assert status["devices"][0]["size"] == 2 << 30
    assert status["devices"][0]["failed"] is False
    assert 0 < status["store_used"] + status["store_busy"] + 1 <= status["store_total"] <= 2 << 30
    assert status["dram_budget"] == 256 << 20
    assert isinstance(status["dram_huge"], bool)
    listed = re.findall(r"^\tX\((\w+),", (ROOT / "fs/stats.h").read_text(), re.MULTILINE)
    assert list(status["counters"]) == listed
    assert all(isinstance(v, int) for v in status["counters"].values())


def test_status__counts(fresh):
    kv = fresh()
    before = kv.status()
    (kv.mnt / "f").write_bytes(bytes(5 << 20))
    run("sync", kv.mnt / "f")
    after = kv.status()
    assert after["files"] == before["files"] + 1
    assert after["counters"]["published"] == before["counters"]["published"] + 1
    assert after["counters"]["writeback_bytes"] >= before["counters"]["writeback_bytes"] + (5 << 20)


def test_status__text_says_the_same(kv):
    shown = kv.kvfs("status", kv.dir).stdout
    status = kv.status()
    assert f"kvfs {status['version']} on {kv.dir}, up " in shown
    assert re.search(rf"^  mode +{kv.mode}\b", shown, re.MULTILINE)
    assert f" {kv.store}: " in shown
    for name in status["counters"]:
        assert re.search(rf"^  {name} +\d+  \w", shown, re.MULTILINE)


def test_stat__json(kv):
    """A whole file of 2.5 chunks: every byte of it is in an extent, every chunk has a checksum."""
    path = kv.dir / "f"
    path.write_bytes(os.urandom(5 << 19))
    run("sync", path)
    path.read_bytes()
    found = kv.stat(path)
    assert found["path"] == str(path)
    assert found["ino"] == path.stat().st_ino
    assert found["size"] == 5 << 19 and found["blocks"] == 5 << 7
    assert found["tier"] == "dram+nvme"
    assert found["checksum"] == "stored"
    assert found["quarantined"] is False
    assert found["chunk_count"] == 3 and found["chunks_dirty"] == 0
    assert [c["number"] for c in found["chunks"]] == [0, 1, 2]
    for chunk in found["chunks"]:
        assert chunk["state"] == "hot" and re.fullmatch("[0-9a-f]{16}", chunk["checksum"])
    end = 0
    for extent in found["extents"]:
        assert extent["file_offset"] == end and extent["length"] == extent["count"] * BLOCK
        end += extent["length"]
        with open(kv.device_path(extent["device"]), "rb") as f:
            f.seek(extent["offset"])
            on_device = f.read(extent["length"])
        assert path.read_bytes()[extent["file_offset"]:end] == on_device
    assert end == 5 << 19


def test_stat__many_chunks(kv):
    """More chunks than one report holds; a sparse file's holes have no extents."""
    path = kv.dir / "f"
    with open(path, "wb") as f:
        f.truncate(6000 << 20)
        for chunk in (1, 3000, 5999):
            f.seek(chunk << 20)
            f.write(b"x" * BLOCK)
    run("sync", path)
    found = kv.stat(path)
    assert found["chunk_count"] == 6000
    assert [c["number"] for c in found["chunks"] if c["state"] != "hole"] == [1, 3000, 5999]
    assert [(e["file_offset"] >> 20, e["length"]) for e in found["extents"]] == [
        (1, BLOCK), (3000, BLOCK), (5999, BLOCK)]


def test_stat__version_grows(kv):
    path = kv.dir / "f"
    versions = []
    for text in ("one", "two"):
        path.write_text(text)
        run("sync", path)
        versions.append(kv.stat(path)["version"])
    assert versions[1] > versions[0] > 0


def test_stat__text(kv):
    path = kv.dir / "f"
    path.write_bytes(bytes(range(256)) * 4096)
    run("sync", path)
    shown = kv.kvfs("stat", path, path).stdout
    assert shown.count(f"{path}\n") == 2
    assert "1.0M (1048576 bytes)" in shown and "stored" in shown
    assert re.search(r"^ +0 +1\.0M +0 +\d+$", shown, re.MULTILINE)


def test_stat__names_of_any_bytes(kv):
    """Bytes that are no UTF-8, quotes and newlines come through JSON whole."""
    name = os.fsencode(kv.dir) + b'/a"\\\n\xff\xc3\xa9\xed\xa0\x80\x01\xc2\x9b'
    with open(name, "wb") as f:
        f.write(b"x")
    text = kv.kvfs("stat", os.fsdecode(name), "--json").stdout
    assert os.fsencode(json.loads(text)[0]["path"]) == name
    assert "\x9b" not in text


def test_names_give_no_commands_to_a_terminal(kv):
    """What a name could tell the terminal is printed as \\xNN; what people write is as they wrote it."""
    name = os.fsencode(kv.dir) + b"/\x1b[2J\xc2\x9b\xffgr\xc3\xbc\xc3\x9fe"
    shown = os.fsdecode(kv.dir) + "/\\x1b[2J\\xc2\\x9b\\xffgr\u00fc\u00dfe"
    with open(name, "wb") as f:
        f.write(b"x")
    assert f"{shown}\n" in kv.kvfs("stat", os.fsdecode(name)).stdout
    os.unlink(name)
    os.mkdir(name)
    assert kv.kvfs("quota", os.fsdecode(name)).stdout.startswith(f"{shown}: limit ")
    os.rmdir(name)
    done = kv.kvfs("stat", os.fsdecode(name), check=False)
    assert f"kvfs stat: {shown}: No such file" in done.stderr


def test_stat__refusals(kv, tmp_path):
    assert_refused(kv.kvfs("stat", kv.dir, check=False), kv.dir, "not a regular file")
    assert_refused(kv.kvfs("stat", kv.dir / "none", check=False), "No such file")
    (tmp_path / "f").write_text("")
    assert_refused(kv.kvfs("stat", tmp_path / "f", check=False), "not on a kvfs mount")


def test_stat__the_good_ones_are_shown(kv):
    """One file that is not there does not keep the others from being shown."""
    (kv.dir / "f").write_text("x")
    done = kv.kvfs("stat", kv.dir / "none", kv.dir / "f", "--json", check=False)
    assert done.returncode == 1 and "No such file" in done.stderr
    assert [s["path"] for s in json.loads(done.stdout)] == [str(kv.dir / "f")]
