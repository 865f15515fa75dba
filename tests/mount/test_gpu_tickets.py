# SPDX-License-Identifier: Apache-2.0
"""What the daemon tells GPU helpers: tickets, where bytes are, changes; and that it never waits for them."""
import errno
import os
import resource
import socket
import time

import gpulink
import pytest
from data import MIB, blob, get, put
from gpulink import Link
from procs import NOBODY, as_nobody, eventually, spare_descriptors
from syscalls import fails


@pytest.fixture
def link(fresh):
    """A mount with one resident file of 3 MiB and 5 bytes, and a helper's connection."""
    kv = fresh()
    kv.file = kv.mnt / "f"
    put(kv.file, blob(1, 3 * MIB + 5))
    kv.settle()
    made = Link(kv, flags=gpulink.WANT_HOT)
    made.kv = kv
    yield made
    made.close()


@pytest.fixture
def reader(link):
    fd = os.open(link.kv.file, os.O_RDONLY)
    yield fd
    os.close(fd)


# ---- Tickets ----


def test_ticket__names_the_file_its_version_and_size(link, reader):
    token, ino, version, size = gpulink.ticket(reader)
    assert token != bytes(16) and size == 3 * MIB + 5
    assert (ino, version) == (os.fstat(reader).st_ino, link.kv.stat(link.kv.file)["version"])
    assert gpulink.ticket(reader)[0] == token, "the same one as long as it is open"
    with open(link.kv.file, "rb") as other:
        assert gpulink.ticket(other.fileno())[0] != token


def test_ticket__a_look_makes_none_and_ends_none(link, reader):
    """Whoever has the descriptor may see what it is of."""
    token, *rest = gpulink.ticket(reader)
    assert gpulink.ticket(reader, 1) == (bytes(16), *rest)
    assert as_nobody(lambda: gpulink.ticket(reader, 1)) == (bytes(16), *rest)
    assert link.ask(gpulink.LOCATE, token=token).status == 0
    put(link.kv.file, b"new")
    assert gpulink.ticket(reader, 1)[1:] == tuple(rest), "what was opened, not what is there now"
    with open(link.kv.mnt / "new", "w+b") as f:
        fails(errno.EBUSY, gpulink.ticket, f.fileno(), 1)


def test_ticket__refuses_what_is_being_written(link):
    with open(link.kv.mnt / "new", "wb") as f:
        f.write(b"x")
        f.flush()
        fails(errno.EBUSY, gpulink.ticket, f.fileno())


def test_ticket__refuses_a_reserved_field_and_a_directory(link, reader):
    fails(errno.EINVAL, gpulink.ticket, reader, 2)
    fd = os.open(link.kv.mnt, os.O_RDONLY)
    fails(errno.EISDIR, gpulink.ticket, fd)
    os.close(fd)


def test_ticket__is_for_the_user_who_asked_last(link, reader):
    """A process with another user's descriptor gets a ticket of its own, and the first one is void."""
    mine = gpulink.ticket(reader)[0]
    theirs = as_nobody(lambda: gpulink.ticket(reader)[0])
    assert mine != theirs
    assert link.ask(gpulink.LOCATE, token=mine).status == -errno.ESTALE
    assert link.ask(gpulink.LOCATE, token=theirs).uid == NOBODY


def test_ticket__ends_with_the_open_file(link):
    fd = os.open(link.kv.file, os.O_RDONLY)
    token = gpulink.ticket(fd)[0]
    os.close(fd)
    eventually(lambda: link.ask(gpulink.LOCATE, token=token).status == -errno.ESTALE)
    assert link.ask(gpulink.LOCATE, token=b"\1" * 16).status == -errno.ESTALE


# ---- Where the bytes are ----


def test_locate__a_resident_file_is_an_object_that_can_only_be_read(link, reader):
    token, ino, version, size = gpulink.ticket(reader)
    found = link.ask(gpulink.LOCATE, token=token)
    assert (found.ino, found.number, found.size, found.uid) == (ino, version, size, 0)
    assert found.flags == gpulink.RESIDENT
    assert os.pread(found.fds[0], size + 9, 0) == blob(1, size)
    fails(errno.EBADF, os.pwrite, found.fds[0], b"x", 0)
    os.close(found.fds[0])


def test_locate__a_cold_file_is_chunks_on_the_devices(fresh):
    kv = fresh()
    with open(kv.mnt / "f", "wb") as f:
        f.write(blob(1, MIB))
        f.seek(3 * MIB)
        f.write(blob(2, MIB // 2))
    kv.remount()
    link = Link(kv)
    assert link.hello.count == 1 and link.hello.device == os.stat(kv.mnt).st_dev
    fd = os.open(kv.mnt / "f", os.O_RDONLY | os.O_DIRECT)
    found = link.ask(gpulink.LOCATE, token=gpulink.ticket(fd)[0])
    assert found.flags == 0 and not found.fds
    chunks = link.chunks(found.hold)
    assert [c[:2] for c in chunks] == [(0, gpulink.DEVICE), (1, gpulink.HOLE), (2, gpulink.HOLE),
                                       (3, gpulink.DEVICE)]
    assert [c[0] for c in link.chunks(found.hold, 2)] == [2, 3]
    for number, seed, size in (0, 1, MIB), (3, 2, MIB // 2):
        device = open(f"/proc/self/fd/{link.hello.fds[0]}", "rb")
        data = b"".join(os.pread(device.fileno(), e[1], e[0]) for e in chunks[number][3])
        device.close()
        assert data == blob(seed, size)
    fails(errno.EBADF, os.pwrite, link.hello.fds[0], bytes(4096), 0)
    os.close(fd)
    for fd in link.hello.fds:
        os.close(fd)
    link.close()


def test_hold__keeps_what_it_names_until_it_is_dropped(link, reader):
    """Rewritten and closed everywhere, and the old bytes are still there for the helper."""
    found = link.ask(gpulink.LOCATE, token=gpulink.ticket(reader)[0])
    put(link.kv.file, blob(9, MIB))
    link.kv.settle()
    assert get(link.kv.file) == blob(9, MIB)
    assert os.pread(found.fds[0], 100, 0) == blob(1, 100)
    assert link.ask(gpulink.DROP, hold=found.hold).status == 0
    assert link.ask(gpulink.DROP, hold=found.hold).status == -errno.ENOENT
    assert link.ask(gpulink.CHUNKS, hold=found.hold).status == -errno.ENOENT
    os.close(found.fds[0])


def test_hold__ends_with_the_connection(link):
    """What a helper that died was reading can be evicted."""
    fd = os.open(link.kv.file, os.O_RDONLY)
    found = link.ask(gpulink.LOCATE, token=gpulink.ticket(fd)[0])
    os.close(found.fds[0])
    os.close(fd)
    assert link.kv.kvfs("evict", "--force", link.kv.file, check=False).returncode == 1
    link.close()
    eventually(lambda: link.kv.kvfs("evict", "--force", link.kv.file, check=False).returncode == 0)


def test_locate__by_number_is_for_the_current_content_only(link, reader):
    _, ino, version, _ = gpulink.ticket(reader)
    found = link.ask(gpulink.LOCATE, ino=ino, number=version, uid=NOBODY)
    assert (found.status, found.uid) == (0, NOBODY)
    os.close(found.fds[0])
    for wrong in (ino, version + 1), (ino + 99, version):
        assert link.ask(gpulink.LOCATE, ino=wrong[0], number=wrong[1]).status == -errno.ESTALE


# ---- Notes ----


def watched(link):
    with open(link.kv.file, "rb") as f:
        found = link.ask(gpulink.LOCATE, token=gpulink.ticket(f.fileno())[0])
    os.close(found.fds[0])
    assert link.ask(gpulink.DROP, hold=found.hold).status == 0
    link.notes.clear()
    return found.ino


def next_note(link, kind):
    while (note := link.note()).type != kind:
        continue
    return note


@pytest.mark.parametrize("change", ["rewrite", "unlink", "replace", "evict", "retire"])
def test_changed__is_told_when_the_content_goes(link, change):
    kv = link.kv
    (kv.mnt / "d").mkdir()
    os.rename(kv.file, kv.mnt / "d" / "f")
    kv.file = kv.mnt / "d" / "f"
    ino = watched(link)
    if change == "rewrite":
        put(kv.file, b"new")
    elif change == "unlink":
        kv.file.unlink()
    elif change == "replace":
        put(kv.mnt / "other", b"new")
        os.rename(kv.mnt / "other", kv.file)
    elif change == "evict":
        kv.kvfs("evict", "--force", kv.file)
    else:
        kv.kvfs("retire", kv.mnt / "d")
    assert next_note(link, gpulink.CHANGED).ino == ino


def test_changed__is_not_told_of_what_is_not_watched(link):
    ino = watched(link)
    assert link.ask(gpulink.UNWATCH, ino=ino).status == 0
    put(link.kv.file, b"new")
    put(link.kv.mnt / "g", b"another")
    assert link.ask(gpulink.UNWATCH, ino=ino).status == 0
    assert not [n for n in link.notes if n.type == gpulink.CHANGED]


def test_changed__is_told_until_every_locate_is_taken_back(link):
    ino = watched(link)
    assert watched(link) == ino
    assert link.ask(gpulink.UNWATCH, ino=ino).status == 0
    put(link.kv.file, b"new")
    assert next_note(link, gpulink.CHANGED).ino == ino
    assert link.ask(gpulink.UNWATCH, ino=ino).status == 0
    link.notes.clear()
    put(link.kv.file, b"newer")
    assert link.ask(gpulink.UNWATCH, ino=ino).status == 0
    assert not [n for n in link.notes if n.type == gpulink.CHANGED]


def test_hot__is_told_at_an_open_for_reading_if_it_was_asked_for(link):
    quiet = Link(link.kv)
    as_nobody(get, link.kv.file)
    note = next_note(link, gpulink.HOT)
    assert (note.ino, note.uid, note.size) == (os.stat(link.kv.file).st_ino, NOBODY, 3 * MIB + 5)
    quiet.ask(gpulink.UNWATCH, ino=note.ino)
    assert not quiet.notes
    quiet.close()


def test_changed__is_told_to_who_is_behind_with_hints(link):
    ino = watched(link)
    for _ in range(3000):
        get(link.kv.mnt / "f")
    put(link.kv.file, b"new")
    assert next_note(link, gpulink.CHANGED).ino == ino
    assert link.ask(gpulink.UNWATCH, ino=ino).status == 0


def test_daemon__does_not_wait_for_a_helper_that_does_not_read(link):
    """It is let go, so that it knows that it missed something; the mount goes on."""
    ino = watched(link)
    for i in range(3000):
        put(link.kv.file, b"%d" % i)
    assert get(link.kv.file) == b"2999"
    with pytest.raises(OSError):
        while link.receive():
            continue
    assert ino == os.stat(link.kv.file).st_ino


def test_daemon__answers_no_faster_than_a_helper_reads(link):
    """Questions wait, when the answers to those before are not read; each is answered in the end."""
    link.socket.settimeout(1)
    sent = 0
    with pytest.raises(TimeoutError):
        while sent < 1_000_000:
            link.send(gpulink.UNWATCH, ino=1, request=sent + 1)
            sent += 1
    link.socket.settimeout(30)
    for i in range(sent):
        assert link.receive().id == i + 1
    ino = watched(link)
    put(link.kv.file, b"new")
    assert next_note(link, gpulink.CHANGED).ino == ino


# ---- Who may, and nonsense ----


def test_socket__is_for_the_daemons_user_alone(link):
    mode = os.stat(link.kv.store / "gpu.sock").st_mode
    assert mode & 0o777 == 0o600

    def connect():
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as s:
            s.connect(f"/proc/self/fd/{folder}/gpu.sock")

    folder = os.open(link.kv.store, os.O_PATH)
    fails(errno.EACCES, as_nobody, connect)
    os.close(folder)


@pytest.mark.parametrize("fields", [{"magic": 1}, {"kind": 0}, {"kind": 6}, {"request": 0}, {"zero": 1}])
def test_socket__ends_a_connection_that_makes_no_sense(link, fields):
    bad = Link(link.kv)
    with pytest.raises(OSError):
        bad.ask(**{"kind": gpulink.UNWATCH, **fields})
    bad.close()
    for fd in bad.hello.fds:
        os.close(fd)
    assert link.ask(gpulink.UNWATCH, ino=1).status == 0, "others go on"


def test_socket__hello_comes_first_and_in_a_version_that_is_known(link):
    early = Link(link.kv, hello=False)
    with pytest.raises(OSError):
        early.ask(gpulink.UNWATCH)
    early.close()
    late = Link(link.kv, hello=False)
    assert late.ask(gpulink.HELLO, version=9).status == -errno.EPROTONOSUPPORT
    late.close()


def ticks(pid):
    """Of processor time, a hundred a second."""
    with open(f"/proc/{pid}/stat") as f:
        return sum(map(int, f.read().rsplit(")", 1)[1].split()[11:13]))


def test_socket__helpers_wait_when_there_are_no_descriptors(link):
    """The daemon says so and tries again now and then, but not without end."""
    pid = link.kv.pid
    limits = spare_descriptors(pid, 0)
    others = [Link(link.kv, hello=False) for _ in range(3)]
    eventually(lambda: "no descriptors left" in link.kv.log())
    before = ticks(pid)
    time.sleep(1)
    spent = ticks(pid) - before
    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    assert spent < 25
    for other in others:
        reply = other.ask(gpulink.HELLO)
        assert reply.status == 0
        for fd in reply.fds:
            os.close(fd)
        other.close()


def test_socket__short_messages_end_the_connection(link):
    short = Link(link.kv, hello=False)
    short.socket.send(b"hello")
    with pytest.raises(OSError):
        short.receive()
    short.close()
