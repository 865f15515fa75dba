# SPDX-License-Identifier: Apache-2.0
"""S1, S2: other users, hostile requests, old bytes, secrets, privileges, tenants."""
import errno
import fcntl
import mmap
import os
import random
import re
import shutil
import socket
import stat
import struct

import pytest
from data import MIB, blob, get, put, put_synced, sync
from ioctls import (COOL, DROP_SIZE, EVICT, LOOKUP, LOOKUP_SIZE, SCRUB, SCRUB_SIZE, TICKET,
                    TICKET_SIZE, WARM, WARM_SIZE, command, lookup)
from procs import LONG, NOBODY, as_nobody, eventually, in_child, open_files, run
from syscalls import FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE, fails, fallocate

OWNER, GROUP, STRANGER = 1001, 2002, 3003
MARKER = b"kvfs-secret-marker-" * 13


def outcome(func, *args):
    """What FUNC returned, or the name of its errno."""
    try:
        return func(*args)
    except OSError as e:
        return errno.errorcode[e.errno]


# ---- another user ----


def attempts(path):
    """What a process can do to a file, by every kind of request."""
    def write():
        os.close(os.open(path, os.O_WRONLY))
        return "ok"

    return {
        "read": outcome(get, path),
        "write": outcome(write),
        "tier": outcome(os.getxattr, path, "user.kvfs.tier"),
        "pin": outcome(os.setxattr, path, "user.kvfs.pin", b"1"),
        "chmod": outcome(os.chmod, path, 0o777),
        "unlink": outcome(os.unlink, path),
        "size": os.stat(path).st_size,
    }


@pytest.mark.parametrize("cache", ("cold", "warm"))
@pytest.mark.parametrize("mode_bits", (0o600, 0o640, 0o644))
def test_s1_uid_matrix(kv, mode_bits, cache):
    path = kv.dir / "f"
    data = blob(1, 100_000)
    put_synced(path, data)
    os.chown(path, OWNER, GROUP)
    os.chmod(path, mode_bits)
    kv.dir.chmod(0o755)
    if cache == "cold":
        kv.kvfs("cool", path)
    else:
        # In DRAM, and with names and attributes in the kernel, by one who may.
        assert in_child(get, path, uid=OWNER) == data
    for who, may_read in (({"uid": STRANGER}, mode_bits & 0o004),
                          ({"uid": STRANGER, "gid": GROUP}, mode_bits & 0o040),
                          ({"uid": NOBODY, "groups": (GROUP,)}, mode_bits & 0o040)):
        done = in_child(attempts, path, **who)
        tier = "nvme" if cache == "cold" else "dram+nvme"
        assert done["read"] == (data if may_read else "EACCES")
        assert done["write"] == "EACCES"
        assert done["tier"] in ((tier.encode(), b"dram+nvme") if may_read else ("EACCES",))
        assert done["pin"] in ("EACCES", "EPERM")
        assert done["chmod"] == "EPERM"
        assert done["unlink"] == "EACCES"
        assert done["size"] == len(data)
    # Taken away from a warm cache: at once.
    os.chmod(path, 0o600)
    assert in_child(attempts, path, uid=STRANGER)["read"] == "EACCES"
    assert in_child(get, path, uid=OWNER) == data


def test_s1_figures_about_everybody_are_not_for_everybody(kv):
    fails(errno.EACCES, as_nobody, os.getxattr, kv.mnt, "user.kvfs.status")
    shutil.copy(kv.programs["kvfs"], copy := kv.home / "kvfs-copy")
    copy.chmod(0o755)
    kv.home.parent.chmod(0o755)
    kv.home.chmod(0o755)
    shown = as_nobody(lambda: run(copy, "status", kv.mnt, check=False))
    assert shown.returncode == 1
    assert "only root" in shown.stderr


# ---- tenants ----


def test_a_private_directory_hides_what_there_is(kv):
    """Who cannot enter a tenant's directory learns nothing of its names: no request tells them apart."""
    tenant = kv.dir / "tenant"
    tenant.mkdir(mode=0o700)
    os.chown(tenant, OWNER, OWNER)
    kv.dir.chmod(0o755)

    def fill():
        put(tenant / "there", blob(1, 5000))
        return lookup_in(tenant, ["there", "not"])

    def lookup_in(path, names):
        fd = os.open(path, os.O_RDONLY)
        try:
            return lookup(fd, names)[1]
        finally:
            os.close(fd)

    def probe(name):
        path = tenant / name
        return [outcome(f, *a) for f, *a in (
            (os.stat, path), (os.open, path, os.O_RDONLY), (os.access, path, os.F_OK),
            (os.getxattr, path, "user.kvfs.tier"), (os.rename, path, kv.dir / "x"),
            (os.link, path, kv.dir / "x"), (os.unlink, path), (os.mkdir, path),
            (os.listdir, tenant), (lookup_in, tenant, [name]))]

    # The same tenant does hit: else a cache that never hits would pass.
    assert in_child(fill, uid=OWNER) == [True, False]
    for name in ("there", "not"):
        put_in = in_child(probe, name, uid=STRANGER)
        assert put_in[2] is False or put_in[2] == "EACCES"
        assert {w for i, w in enumerate(put_in) if i != 2} == {"EACCES"}
    assert in_child(probe, "there", uid=STRANGER) == in_child(probe, "not", uid=STRANGER)
    # To search, not to list: names that are known are found, the list ioctl is not open.
    tenant.chmod(0o711)
    assert in_child(outcome, lookup_in, tenant, ["there"], uid=STRANGER) == "EACCES"


# ---- hostile requests ----


KNOWN_IOCTLS = ((LOOKUP, LOOKUP_SIZE), (WARM, WARM_SIZE), (COOL, DROP_SIZE), (EVICT, DROP_SIZE),
                (SCRUB, SCRUB_SIZE), (TICKET, TICKET_SIZE))
# As many seeds in the short run, the same ones; in the long run others each time.
SEEDS = range(4) if not LONG else [random.randrange(1 << 32) for _ in range(200)]


def draw_payload(draw, size):
    """Random bytes, or zeros, with some numbers and names strewn over them."""
    payload = bytearray(draw.randbytes(size) if draw.random() < 0.6 else size)
    for _ in range(draw.randrange(4)):
        at = draw.randrange(size)
        word = draw.choice((b"public", b"secret", b"own", b"../x", struct.pack(
            "<Q", draw.choice((0, 1, 2, 2**20, 2**31, 2**32 - 1, 2**63, 2**64 - 1)))))
        payload[at:at + len(word)] = word[:len(payload[at:at + len(word)])]
    return payload


def fuzz_ioctls(fds, seed, count):
    """Random numbers, sizes and payloads: which errnos came back, and nothing else may."""
    draw = random.Random(seed)
    seen = set()
    for _ in range(count):
        number, size = draw.choice(KNOWN_IOCTLS)
        if draw.random() < 0.3:
            size = draw.choice((1, 8, 24, 47, 49, 1039, 4096, 16383, draw.randrange(1, 16384)))
            number = command(draw.randrange(256), size, draw.choice((0, 1, 2, 3)))
        payload = draw_payload(draw, size)
        done = outcome(fcntl.ioctl, draw.choice(fds), number, payload)
        seen.add(done if isinstance(done, str) else "ok")
        assert MARKER[:19] not in payload
    return seen


def fuzz_attributes(paths, seed, count):
    """The same for attributes that are control messages."""
    draw = random.Random(seed)
    names = ("status", "stat", "map.0", "map.4294967296", "tier", "extents", "pin", "quota",
             "quota.usage", "lease", "retire", "fingerprint", "none", "map.", "")
    seen = set()
    for _ in range(count):
        path, name = draw.choice(paths), "user.kvfs." + draw.choice(names)
        value = draw.choice((b"", b"1", b"0", b"none", b"16M", b"1" * 65, draw.randbytes(
            draw.randrange(1, 300)), bytes(65536)))
        done = draw.choice((lambda: os.getxattr(path, name), lambda: os.listxattr(path),
                            lambda: os.setxattr(path, name, value, draw.choice((0, 1, 2))),
                            lambda: os.removexattr(path, name)))
        done = outcome(done)
        seen.add(done if isinstance(done, str) else "ok")
        assert not isinstance(done, bytes) or MARKER[:19] not in done
    return seen


def fuzz_requests(root, seed, count):
    """All of a user's files and directories, his own and others': open in every way he may."""
    own = root / "his"
    fds = [os.open(root, os.O_RDONLY), os.open(root / "public", os.O_RDONLY),
           os.open(own, os.O_RDONLY), os.open(own / "own", os.O_CREAT | os.O_RDWR, 0o644),
           os.open(own / "new", os.O_CREAT | os.O_WRONLY, 0o644)]
    os.write(fds[-1], b"x")
    try:
        return fuzz_ioctls(fds, seed, count), fuzz_attributes(
            [root, root / "public", root / "secret", own, own / "own", own / "gone"], seed, count // 4)
    finally:
        for fd in fds:
            os.close(fd)


def test_s2_control_messages_of_another_user_fuzzed(kv):
    """Whatever he sends by ioctls and attributes, he gets an errno or what is his."""
    secret, public = kv.dir / "secret", kv.dir / "public"
    for path in (secret, public):
        put(path, MARKER * 1000)
    secret.chmod(0o600)
    kv.dir.chmod(0o755)
    (kv.dir / "his").mkdir()
    os.chown(kv.dir / "his", NOBODY, NOBODY)
    # His own may be retired or evicted meanwhile: the others' may not.
    allowed = {"ok", "ENOTTY", "EINVAL", "ENOTDIR", "EISDIR", "ENOENT", "ENAMETOOLONG", "EPERM",
               "EACCES", "EBUSY", "EAGAIN", "EOPNOTSUPP"}
    for_attributes = {"ok", "ENODATA", "EACCES", "EPERM", "EINVAL", "ENOENT", "ENOTDIR", "ERANGE",
                      "EEXIST", "EOPNOTSUPP", "E2BIG", "ENOSPC"}
    ioctls, attributes = set(), set()
    for seed in SEEDS:
        try:
            one, other = in_child(fuzz_requests, kv.dir, seed, 3000, uid=NOBODY)
        except BaseException as e:
            e.add_note(f"seed {seed}")
            raise
        assert one <= allowed, f"seed {seed}"
        assert other <= for_attributes, f"seed {seed}"
        ioctls |= one
        attributes |= other
        kv.check()
    assert {"ok", "ENOTTY", "EINVAL", "EPERM"} <= ioctls
    assert {"ok", "ENODATA", "EACCES", "EPERM", "EINVAL"} <= attributes
    assert get(secret) == MARKER * 1000
    assert get(public) == MARKER * 1000
    assert os.getxattr(public, "user.kvfs.pin") == b"0"


def test_s2_one_socket_for_gpu_helpers(kv):
    """Else all control is by calls on files, whose modes decide; and that one is the owner's."""
    inodes = set(re.findall(r"socket:\[(\d+)\]", " ".join(open_files(kv.pid).values())))
    with open("/proc/net/unix", encoding="ascii", errors="replace") as table:
        bound = {line.split()[6]: line.split()[7] for line in list(table)[1:] if len(line.split()) > 7}
    assert {os.path.basename(bound[i]) for i in inodes & set(bound)} == {"gpu.sock"}
    assert os.stat(kv.store).st_mode & 0o777 == 0o700
    assert os.stat(kv.store / "gpu.sock").st_mode & 0o777 == 0o600

    def connect():
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as one:
            one.connect(os.fspath(kv.store / "gpu.sock"))

    fails(errno.EACCES, as_nobody, connect)


def exhaust(path, count):
    """COUNT files at once, and as many descriptors as there may be."""
    fds = []
    try:
        for i in range(count):
            fds.append(os.open(path / f"f{i}", os.O_CREAT | os.O_WRONLY, 0o644))
        return "ok"
    except OSError as e:
        return errno.errorcode[e.errno]
    finally:
        for fd in fds:
            os.close(fd)


def test_s2_many_open_files_of_one_user(kv):
    """A user's own limit ends it, not the daemon's; what others have goes on."""
    put(kv.dir / "mine", blob(1, MIB))
    place = kv.dir / "his"
    place.mkdir()
    os.chown(place, NOBODY, NOBODY)
    kv.dir.chmod(0o755)
    before = len(os.listdir(f"/proc/{kv.pid}/fd"))
    assert as_nobody(exhaust, place, 1_000_000) == "EMFILE"
    kv.check()
    eventually(lambda: len(os.listdir(f"/proc/{kv.pid}/fd")) <= before + 64, what="its descriptors")
    assert get(kv.dir / "mine") == blob(1, MIB)


# ---- limits of users ----


def limited_mount(fresh, **options):
    """A mount of small limits, with a directory for each of two users."""
    kv = fresh(size="64M", dram="64M", user_files=20, user_writers=8, user_space="50%",
               user_dirty="25%", **options)
    for uid in (OWNER, STRANGER):
        place = kv.mnt / str(uid)
        place.mkdir()
        os.chown(place, uid, uid)
    return kv


@pytest.fixture
def limited(fresh):
    return limited_mount(fresh)


def figures(kv, uid):
    found = [user for user in kv.status()["users"] if user["uid"] == uid]
    return (found[0]["files"], found[0]["writers"], found[0]["space"]) if found else (0, 0, 0)


def place(kv, uid):
    return kv.mnt / str(uid)


def takes_all(agent, paths, flags):
    """Opens one after the other until it may not: (descriptors, the errno)."""
    fds = []
    for path in paths:
        fd = outcome(agent.open, path, flags)
        if isinstance(fd, str):
            return fds, fd
        fds.append(fd)
    return fds, "ok"


def the_other_works(kv):
    path = place(kv, STRANGER) / "mine"

    def work():
        put(path, blob(3, 5 * MIB))
        return get(path) == blob(3, 5 * MIB)

    assert in_child(work, uid=STRANGER)


def test_s2_limit_of_files_open_for_writing(limited, agent):
    """EMFILE for who has as many as he may; nothing is made by then, and others go on."""
    kv, him = limited, agent(uid=OWNER)
    paths = [place(kv, OWNER) / f"f{i}" for i in range(9)]
    fds, error = takes_all(him, paths, os.O_CREAT | os.O_WRONLY)
    assert (len(fds), error) == (8, "EMFILE")
    assert sorted(os.listdir(place(kv, OWNER))) == [f"f{i}" for i in range(8)]
    assert figures(kv, OWNER) == (8, 8, 0)
    the_other_works(kv)
    put(kv.mnt / "root's", b"x")
    him.close(fds.pop())
    # One more, of a published file, by another way: and no more.
    fds.append(him.open(paths[7], os.O_WRONLY | os.O_TRUNC))
    fails(errno.EMFILE, him.open, paths[7], os.O_RDWR)
    put(kv.mnt / "theirs", b"x")
    os.chown(kv.mnt / "theirs", OWNER, OWNER)
    fails(errno.EMFILE, him.open, kv.mnt / "theirs", os.O_WRONLY)
    assert him.read_file(kv.mnt / "theirs") == b"x"
    for fd in fds:
        him.close(fd)
    eventually(lambda: figures(kv, OWNER) == (0, 0, 0), what="an end of his files")
    him.close(him.open(paths[8], os.O_CREAT | os.O_WRONLY))
    assert kv.counter("limited") >= 3


def test_s2_limit_of_open_files(limited, agent):
    kv, him = limited, agent(uid=OWNER)
    path = kv.mnt / "public"
    put(path, b"x")
    fds, error = takes_all(him, [path] * 21, os.O_RDONLY)
    assert (len(fds), error) == (20, "EMFILE")
    assert figures(kv, OWNER) == (20, 0, 0)
    fails(errno.EMFILE, him.open, place(kv, OWNER) / "f", os.O_CREAT | os.O_WRONLY)
    assert os.listdir(place(kv, OWNER)) == []
    the_other_works(kv)
    shown = kv.kvfs("status", kv.mnt).stdout
    assert f"user     {OWNER}: 20 files open, 0 of them for writing" in shown
    for fd in fds:
        him.close(fd)
    eventually(lambda: figures(kv, OWNER) == (0, 0, 0), what="an end of his files")
    assert him.read_file(path) == b"x"


def test_s2_limit_of_unpublished_bytes(limited, agent):
    """EDQUOT for who has half the store unpublished, also by mere promises; others have the rest."""
    kv, him = limited, agent(uid=OWNER)
    limit = kv.status()["user_space"]
    assert limit == pytest.approx(kv.status()["store_total"] / 2, rel=0.02)
    first, second = (him.open(place(kv, OWNER) / name, os.O_CREAT | os.O_RDWR) for name in "ab")
    him.allocate(first, 10 * MIB)
    written = 0
    while him.pwrite(second, blob(5, MIB), written) == MIB:
        written += MIB
        if limit - written - 10 * MIB < MIB:
            break
    fails(errno.EDQUOT, him.pwrite, second, blob(6, MIB), written)
    fails(errno.EDQUOT, him.allocate, first, 16 * MIB)
    assert figures(kv, OWNER) == (2, 2, written + 10 * MIB)
    the_other_works(kv)
    # What was given up, or published, does not count.
    him.ftruncate(first, 0)
    him.pwrite(second, blob(6, MIB), written)
    him.fsync(second)
    assert figures(kv, OWNER)[2] == 0
    him.close(first)
    him.close(second)
    assert him.read_file(place(kv, OWNER) / "b") == blob(5, MIB) * (written // MIB) + blob(6, MIB)


def test_s2_limit_of_bytes_to_be_written_back(drive, fresh, agent):
    """Who has more in DRAM alone than his share is held back until it is written: nobody gets an error."""
    kv, him = limited_mount(fresh, devices=(drive.data,), io_timeout="600s"), agent(uid=OWNER)
    data = b"".join(blob(i, MIB) for i in range(20))
    assert kv.status()["user_dirty"] == 8 * MIB
    kv.settle()
    fd = him.open(place(kv, OWNER) / "large", os.O_CREAT | os.O_RDWR)
    drive.hang()  # else a device might keep up with him
    him.send("pwrite", fd, data, 0)
    eventually(lambda: kv.counter("throttled") > 0, what="a writer held back")
    the_other_works(kv)
    shown = [user for user in kv.status()["users"] if user["uid"] == OWNER]
    assert 0 < shown[0]["dirty"] < len(data)
    drive.answer()
    assert him.receive() == len(data)
    him.fsync(fd)
    assert [user["dirty"] for user in kv.status()["users"] if user["uid"] == OWNER] == [0]
    him.close(fd)
    assert him.read_file(place(kv, OWNER) / "large") == data


def test_s2_a_file_that_did_not_fit_is_not_published(limited, agent):
    kv, him = limited, agent(uid=OWNER)
    path = place(kv, OWNER) / "large"
    fd = him.open(path, os.O_CREAT | os.O_WRONLY)
    him.pwrite(fd, b"x", 0)
    limit = kv.status()["user_space"]
    done = outcome(him.write, fd, bytes(limit + MIB))
    assert done == "EDQUOT" or done <= limit
    fails(errno.EDQUOT, him.write, fd, bytes(limit + MIB))
    fails(errno.EDQUOT, him.close, fd)
    eventually(lambda: figures(kv, OWNER) == (0, 0, 0), what="an end of his files")
    assert not path.exists()
    the_other_works(kv)


def test_s2_quota_holds_who_fills(kv):
    """Bytes of one tenant end at its quota, and push out nobody else's."""
    put_synced(kv.dir / "mine", blob(1, MIB))
    place = kv.dir / "tenant"
    place.mkdir()
    os.chown(place, NOBODY, NOBODY)
    kv.dir.chmod(0o755)
    kv.kvfs("quota", place, "16M")
    evicted = kv.counter("evicted_store")

    def flood():
        fd = os.open(place / "f", os.O_CREAT | os.O_WRONLY, 0o644)
        try:
            for i in range(64):
                os.pwrite(fd, blob(2, MIB), i * MIB)
            return "ok"
        finally:
            outcome(os.close, fd)

    fails(errno.EDQUOT, as_nobody, flood)
    assert kv.counter("evicted_store") == evicted
    assert get(kv.dir / "mine") == blob(1, MIB)


# ---- old bytes ----


def mapped(fd, length):
    with mmap.mmap(fd, length, prot=mmap.PROT_READ) as view:
        return view[:]


def test_s1_no_old_bytes(fresh):
    """Freed blocks, recycled buffers and DRAM never show: in tails, holes, promised blocks, mappings."""
    kv = fresh(size="64M", dram="32M", allow_other=None)
    secret = MARKER * (4 * MIB // len(MARKER))
    for round_ in range(4):
        for i in range(8):
            put(kv.mnt / f"secret{i}", secret)
        kv.settle()
        for i in range(8):
            os.unlink(kv.mnt / f"secret{i}")
        path = kv.mnt / f"new{round_}"
        fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
        os.pwrite(fd, b"x" * 100, 0)                        # the tail of a block
        os.pwrite(fd, b"y" * 5001, 3 * MIB + 7)             # holes around it
        fallocate(fd, 0, 6 * MIB, MIB)                      # promised
        os.pwrite(fd, b"z" * (2 * MIB), 8 * MIB)
        fallocate(fd, FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE, 8 * MIB + 100, MIB)
        os.ftruncate(fd, 9 * MIB + 11)
        os.ftruncate(fd, 12 * MIB)
        os.pwrite(fd, b"e", 12 * MIB + 4000)                # a last block that is used in part
        expected = bytearray(12 * MIB + 4001)
        expected[:100] = b"x" * 100
        expected[3 * MIB + 7:3 * MIB + 5008] = b"y" * 5001
        expected[8 * MIB:9 * MIB + 11] = b"z" * (MIB + 11)
        expected[8 * MIB + 100:9 * MIB + 100] = bytes(MIB)
        expected[9 * MIB + 11:12 * MIB] = bytes(3 * MIB - 11)
        expected[-1:] = b"e"
        assert os.pread(fd, len(expected), 0) == expected
        os.close(fd)
        for cold in (False, True):
            if cold:
                sync(path)
                kv.kvfs("cool", path)
            fd = os.open(path, os.O_RDONLY)
            # To the end of the page, which lies behind the end of the file.
            view = mapped(fd, len(expected))
            with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as whole:
                assert len(whole) == len(expected)
            assert view == expected
            os.close(fd)
            assert b"secret-marker" not in get(path)
        os.unlink(path)


def test_s1_the_page_behind_the_end_is_zero(kv, tmp_path):
    """Through a mapping one sees the rest of the last page."""
    path = kv.dir / "f"
    put(kv.dir / "old", MARKER * 1000)
    os.unlink(kv.dir / "old")
    put_synced(path, b"short")
    program = tmp_path / "tail.py"
    program.write_text(
        "import ctypes, mmap, os, sys\n"
        "fd = os.open(sys.argv[1], os.O_RDONLY)\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.mmap.restype = ctypes.c_void_p\n"
        "at = libc.mmap(None, ctypes.c_size_t(4096), 1, 1, fd, ctypes.c_long(0))\n"
        "assert ctypes.string_at(at, 4096) == b'short' + bytes(4091)\n")
    for cold in (False, True):
        if cold:
            kv.kvfs("cool", path)
        run("python3", program, path)


# ---- secrets and privileges ----


def status_of(pid):
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        return dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)


def test_privileges_are_dropped(kv):
    kept = {"sys_admin": 21, "dac_override": 1, "sys_ptrace": 19, "sys_resource": 24, "ipc_lock": 14}
    most = sum(1 << number for number in kept.values())
    status = status_of(kv.pid)
    for name in ("CapPrm", "CapEff", "CapBnd", "CapInh", "CapAmb"):
        assert int(status[name], 16) & ~most == 0, name
    assert int(status["CapEff"], 16) >> 21 & 1
    assert status["NoNewPrivs"].strip() == "1"


def test_no_core_files(fresh):
    """Not dumpable: /proc belongs to root, although the process does not; content would be left out."""
    if not shutil.which("fusermount3"):
        pytest.skip("fusermount3 (package fuse3) is not installed")
    kv = fresh(mount=False, user=NOBODY, allow_other=False)
    if not as_nobody(os.access, "/dev/fuse", os.R_OK | os.W_OK):
        kv.open_fuse_device()
    kv.mount()
    assert status_of(kv.pid)["Uid"].split()[0] == str(NOBODY)
    assert os.stat(f"/proc/{kv.pid}/environ").st_uid == 0
    fails(errno.EACCES, as_nobody, open, f"/proc/{kv.pid}/mem", "rb")


def test_buffers_are_left_out_of_dumps(kv):
    """Memory that content passes through is marked DONTDUMP ("dd"), should a debugger write one."""
    put_synced(kv.dir / "f", blob(1, 300_000))
    with open(f"/proc/{kv.pid}/smaps", encoding="ascii") as file:
        text = file.read()
    areas = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) .*?VmFlags: ([^\n]*)$", text, re.M | re.S)
    marked = sum(int(end, 16) - int(start, 16) for start, end, flags in areas if "dd" in flags.split())
    assert marked >= 4 * MIB


def test_content_and_names_stay_out_of_the_log(fresh):
    kv = fresh(log="debug")
    put_synced(kv.mnt / "prefix-hash-of-a-prompt", MARKER * 100)
    get(kv.mnt / "prefix-hash-of-a-prompt")
    kv.remount()
    get(kv.mnt / "prefix-hash-of-a-prompt")
    kv.umount()
    assert "secret-marker" not in kv.log()
    assert "prefix-hash-of-a-prompt" not in kv.log()


def test_the_store_is_private(kv):
    assert stat.S_IMODE(os.stat(kv.store).st_mode) == 0o700
    fails(errno.EACCES, as_nobody, os.listdir, kv.store)
    fails(errno.EACCES, as_nobody, open, kv.store / "data0", "rb")
