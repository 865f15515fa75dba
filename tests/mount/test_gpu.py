# SPDX-License-Identifier: Apache-2.0
"""The GPU helper with real processes: on the host backend, and on a fake driver that checks every call."""
import errno
import os
import random
import resource
import signal

import gpu
import pytest
from data import MIB, blob, get, put
from gpu import EARLY, NOSTAGE, REVOCABLE, Engine, Raw
from gpufixtures import (EVERYWHERE, FAKE, HOST, SIZE, SMALL, cold, damage, digest, engine_of,
                         helper, mode, packed_ticket, pytest_generate_tests, start, store)  # noqa: F401
from procs import NOBODY, as_nobody, eventually, in_child, open_files, spare_descriptors
from syscalls import fails


# ---- Bytes ----


@EVERYWHERE
def test_map__three_engines_share_one_copy(helper):
    path = store(helper, "f", data := blob(1, SIZE))
    engines = [engine_of(helper) for _ in range(3)]
    for engine in engines:
        engine.send("map", str(path))
    for engine in engines:
        key, size, version = engine.receive()
        assert (size, version) == (SIZE, helper.kv.stat(path)["version"])
        assert engine.digest(key) == digest(data)
    stats = helper.stats()
    assert (stats["staged"], stats["misses"], stats["hits"]) == (1, 1, 2)
    assert stats["staged_bytes"] == stats["from_dram_bytes"] == SIZE
    assert stats["used"] == 22 * MIB and stats["maps"] == 3
    for engine in engines:
        engine.unmap(1)
    assert eventually(lambda: helper.stats()["maps"] == 0)
    assert helper.stats()["resident"] == 1, "it stays for the next one"


@EVERYWHERE
def test_map__a_cold_file_comes_from_the_drives(helper):
    """With a hole; nothing of it goes through DRAM."""
    path = helper.kv.mnt / "f"
    with open(path, "wb") as f:
        f.write(blob(1, 5 * MIB + 17))
        f.seek(9 * MIB)
        f.write(blob(2, 3 * MIB + 1))
    cold(helper, path)
    filled = helper.kv.counter("fill_bytes")
    helper.kv.kvfs("gpu", "warm", path, "--socket", helper.socket)
    stats = helper.stats()
    assert stats["from_device_bytes"] >= 8 * MIB and stats["from_dram_bytes"] == 0
    assert helper.kv.counter("fill_bytes") == filled
    engine = engine_of(helper)
    assert engine.read(engine.map(str(path))[0]) == get(path)
    assert helper.stats()["staged"] == 1


def test_map__a_range_of_a_file(start):
    helper = start("--segment", "4M")
    path = store(helper, "f", data := blob(1, SIZE))
    engine = engine_of(helper)
    for off, length in ((0, 1), (SIZE - 1, 1), (4 * MIB - 1, 2), (5 * MIB + 3, 9 * MIB), (7, 0)):
        key, size, _ = engine.map(str(path), off, length)
        assert size == (length or SIZE - off)
        assert engine.read(key) == data[off:off + size]
        engine.unmap(key)
    for off, length in ((SIZE, 1), (SIZE, 0), (0, SIZE + 1), (2**64 - 1, 9)):
        fails(errno.EINVAL, engine.map, str(path), off, length)


def test_map__memory_cannot_be_written_to(helper):
    """A store through the mapping ends that engine, and no other sees it."""
    path = store(helper, "f", data := blob(1, SIZE))
    bad, good = Engine(helper), engine_of(helper)
    bad.map(str(path))
    key = good.map(str(path))[0]
    bad.send("poke", 1)
    status = bad.child.collect()
    assert os.WTERMSIG(status) == signal.SIGSEGV
    os.close(bad.requests)
    os.close(bad.replies)
    assert good.digest(key) == digest(data)
    assert eventually(lambda: helper.stats()["maps"] == 1)


@HOST
def test_map__more_segments_than_a_packet_holds(start, fresh):
    if os.sysconf("SC_AVPHYS_PAGES") * 4096 < 3 << 30:
        pytest.skip("needs 3 GiB of free memory")
    helper = start("--segment", "2M", "--hbm", "600M")
    path, size = helper.kv.mnt / "f", 520 * MIB
    with open(path, "wb") as f:
        f.truncate(size)
        f.seek(510 * MIB)
        f.write(b"end")
    engine = engine_of(helper)
    key, length, _ = engine.map(str(path))
    assert length == size
    assert engine.read(key, 510 * MIB, 4) == b"end\0" and engine.read(key, 300 * MIB, 9) == bytes(9)


@FAKE
def test_map__early_shows_what_is_there(start):
    helper = start(*SMALL)
    path = store(helper, "f", data := blob(1, SIZE))
    engine = engine_of(helper)
    helper.tell("hold")
    key = engine.map(str(path), 0, 0, EARLY)[0]
    fails(errno.ETIMEDOUT, engine.wait, key, 1, 0.2)
    helper.tell()
    engine.wait(key, SIZE, 30)
    assert engine.digest(key) == digest(data)
    late = engine.map(str(path), 0, 0, EARLY)[0]
    engine.wait(late, SIZE, 0)


@EVERYWHERE
def test_map__damaged_bytes_are_never_given(helper):
    """The daemon, asked for what does not match, takes the file away; the engine gets an error."""
    path = store(helper, "f", blob(1, SIZE))
    damage(helper, path)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    raw = Raw(helper)
    ticket = packed_ticket(fd)
    kind, _, status, _, fds = raw.ask(gpu.MAP, ticket, [fd])
    assert (kind, status) == (gpu.MAP, 0)
    # The daemon may have taken the file away before the staging has ended.
    while kind != gpu.READY:
        kind, _, status, _, _ = raw.receive()
        assert kind in (gpu.READY, gpu.INVALID)
    assert status == -errno.EIO
    raw.send(gpu.UNMAP, map_id=1)
    for other in (*fds, fd):
        os.close(other)
    raw.close()
    stats = helper.stats()
    # Past the CPU it is read once more than else.
    assert stats["checksum_errors"] == 1 + (helper.backend == "cufile") and stats["failed"] == 1
    eventually(lambda: helper.stats()["used"] == 0)
    eventually(lambda: not path.exists(), what="the quarantine")


# ---- Refusals ----


def test_map__refuses_with_a_reason(helper):
    engine = engine_of(helper)
    small = store(helper, "small", b"x" * 100)
    large = helper.kv.mnt / "large"
    with open(large, "wb") as f:
        f.truncate(300 * MIB)
    fails(errno.ERANGE, engine.map, str(small))
    fails(errno.E2BIG, engine.map, str(large))
    path = store(helper, "f", blob(1, SIZE))
    fails(errno.ENODATA, engine.map, str(path), 0, 0, NOSTAGE)
    engine.map(str(path))
    engine.map(str(path), 0, 0, NOSTAGE)
    fails(errno.EXDEV, engine.map, __file__)
    assert helper.stats()["refused"] >= 3


def test_map__refuses_bad_descriptors(helper, fresh):
    """Whatever is passed, in any number: an error each, and the helper goes on."""
    path = store(helper, "f", blob(1, SIZE))
    put(helper.kv.mnt / "g", b"g")
    other = fresh()
    put(other.mnt / "f", blob(1, SIZE))
    raw, ends = Raw(helper), os.pipe()
    good = os.open(path, os.O_RDONLY)
    wrong = {os.open(path, os.O_PATH): errno.EBADF,
             os.open(helper.kv.mnt / "g", os.O_WRONLY): errno.EACCES,
             os.open(other.mnt / "f", os.O_RDONLY): errno.EXDEV,
             os.open(__file__, os.O_RDONLY): errno.EXDEV,
             os.open(other.mnt, os.O_RDONLY): errno.EXDEV,
             os.open("/dev/null", os.O_RDONLY): errno.EXDEV,
             ends[0]: errno.EXDEV, ends[1]: errno.EACCES,
             os.open(helper.kv.mnt, os.O_RDONLY): errno.ESTALE,
             good: errno.ESTALE}
    dice = random.Random(1)
    for i in range(1000):
        fd = dice.choice(list(wrong))
        kind = dice.choice([gpu.MAP, gpu.PREFETCH, gpu.EVICT, gpu.STAT])
        _, _, status, _, _ = raw.ask(kind, dice.randbytes(40), [fd], request=i)
        assert status == -wrong[fd], (os.readlink(f"/proc/self/fd/{fd}"), kind)
    assert raw.ask(gpu.MAP, bytes(40))[2] == -errno.EBADF, "no descriptor at all"
    for fd in wrong:
        os.close(fd)
    raw.close()
    # What holds a descriptor of the mount would keep it from ending.
    links = open_files(helper.process.pid).values()
    assert not [link for link in links if str(helper.kv.mnt) in link], links
    assert helper.stats()["malformed"] == 0


@pytest.mark.parametrize("bad", ["short", "magic", "type", "reply", "unmap", "descriptors"])
def test_client__nonsense_ends_it_alone(helper, bad):
    path = store(helper, "f", data := blob(1, SIZE))
    engine, raw = engine_of(helper), Raw(helper)
    key = engine.map(str(path))[0]
    if bad == "short":
        raw.socket.send(b"kvg1")
    elif bad == "magic":
        raw.socket.send(bytes(64))
    elif bad == "type":
        raw.send(99)
    elif bad == "reply":
        raw.send(gpu.HELLO, flags=1)
    elif bad == "unmap":
        raw.send(gpu.UNMAP, map_id=7)
    else:
        raw.send(gpu.HELLO, fds=[0] * 20)
    with pytest.raises(OSError):
        raw.receive()
    raw.close()
    assert engine.digest(key) == digest(data)
    assert helper.stats()["malformed"] == 1


def test_map__a_ticket_is_its_users_alone(start):
    helper = start("--group", "nogroup")
    path = store(helper, "f", blob(1, SIZE))
    with open(path, "rb") as f:
        ticket = packed_ticket(f.fileno())

        def steal():
            raw = Raw(helper)
            return raw.ask(gpu.MAP, ticket, [f.fileno()])[2]

        assert in_child(steal, uid=NOBODY, gid=NOBODY) == -errno.EACCES


def test_map__users_have_copies_of_their_own(start):
    helper = start("--group", "nogroup")
    path = store(helper, "f", data := blob(1, SIZE))
    root, nobody = engine_of(helper), engine_of(helper, uid=NOBODY, gid=NOBODY)
    for engine in (root, nobody):
        assert engine.digest(engine.map(str(path))[0]) == digest(data)
    stats = helper.stats()
    assert stats["entries"] == 2 and stats["used"] == 2 * 22 * MIB


@HOST
def test_socket__is_for_the_same_user_without_a_group(helper):
    assert os.stat(helper.socket).st_mode & 0o777 == 0o600
    fails(errno.EACCES, as_nobody, lambda: Raw(helper).close())


# ---- Room ----


def fill(helper, count, size=60 * MIB):
    return [str(store(helper, f"f{i}", blob(i, size))) for i in range(count)]


def test_room__what_was_used_longest_ago_goes(helper):
    paths = fill(helper, 5)
    engine = engine_of(helper)
    for path in paths[:4]:
        engine.unmap(engine.map(path)[0])
    engine.unmap(engine.map(paths[0])[0])
    key = engine.map(paths[4])[0]
    assert engine.read(key, 0, 100) == blob(4, 100)
    assert engine.stats(paths[1])["asked_resident"] == 0
    assert engine.stats(paths[0])["asked_resident"] == 60 * MIB
    assert engine.stats()["evicted"] == 1


def test_room__mapped_files_stay_and_the_engine_pulls(helper):
    paths = fill(helper, 5)
    engine = engine_of(helper)
    for path in paths[:4]:
        engine.map(path)
    fails(errno.ENOSPC, engine.map, paths[4])
    engine.unmap(2)
    engine.map(paths[4])
    assert engine.read(1, 0, 9) == blob(0, 9)


def test_revoke__makes_room_when_engines_agree(helper):
    paths = fill(helper, 5)
    polite, other = engine_of(helper), engine_of(helper)
    for path in paths[:4]:
        polite.map(path, 0, 0, REVOCABLE)
    fails(errno.ENOSPC, other.map, paths[4])
    (key, event, ms), = polite.events(10)
    assert (key, event) == (1, 1) and 0 < ms <= 2000
    polite.unmap(1)
    eventually(lambda: helper.stats()["maps"] == 3)
    assert other.read(other.map(paths[4])[0], 0, 9) == blob(4, 9)


def test_revoke__who_ignores_it_pays(helper):
    """After two seconds the bytes are on its account, also when it hangs up; they are free when it dies."""
    paths = fill(helper, 5)
    bad, good = Engine(helper), engine_of(helper)
    for path in paths[:4]:
        bad.map(path, 0, 0, REVOCABLE)
    fails(errno.ENOSPC, good.map, paths[4])
    eventually(lambda: helper.stats()["orphaned"] == 60 * MIB)
    fails(errno.EDQUOT, bad.map, paths[1])
    bad.hang_up()
    eventually(lambda: helper.stats()["clients"] == 2)  # the other one, and this call's
    assert helper.stats()["orphaned"] == 60 * MIB
    bad.reconnect(str(helper.socket), helper.kind)
    fails(errno.EDQUOT, bad.map, paths[1])
    assert bad.read(1, 0, 9) == blob(0, 9), "nothing was taken from it"
    bad.stop(kill=True)
    eventually(lambda: helper.stats()["orphaned"] == 0)
    assert good.read(good.map(paths[4])[0], 0, 9) == blob(4, 9)


@FAKE
def test_room__no_device_memory_at_any_point(start):
    """Every allocation fails once: the engine gets ENOSPC, and the next try works."""
    helper = start("--segment", "4M")
    path = str(store(helper, "f", data := blob(1, SIZE)))
    engine = engine_of(helper)
    for nth in range(1, 5):
        for call in ("cuMemCreate", "cuMemMap"):
            helper.tell(f"fail {call}:{nth}:2")
            try:
                engine.unmap(engine.map(path)[0])
            except OSError as e:
                assert e.errno == errno.ENOSPC
            helper.tell()
            key = engine.map(path)[0]
            assert engine.digest(key) == digest(data)
            engine.unmap(key)
            eventually(lambda: helper.stats()["maps"] == 0)
            engine.evict(path)


@FAKE
def test_map__that_cannot_be_shared_leaves_nothing(helper):
    path = str(store(helper, "f", data := blob(1, SIZE)))
    engine = engine_of(helper)
    helper.tell("fail cuMemExportToShareableHandle:1:2")
    fails(errno.ENOMEM, engine.map, path)
    assert helper.stats()["maps"] == 0 and helper.stats()["refused"] == 1
    helper.tell()
    assert engine.digest(engine.map(path)[0]) == digest(data)


@HOST
def test_room__one_client_cannot_have_all_mappings(helper):
    path = store(helper, "f", blob(1, SIZE))
    raw = Raw(helper)
    with open(path, "rb") as f:
        ticket = packed_ticket(f.fileno())
        for i in range(4097):
            kind, _, status, _, fds = raw.ask(gpu.MAP, ticket, [f.fileno()], request=i)
            while kind == gpu.READY:
                kind, _, status, _, fds = raw.receive()
            for fd in fds:
                os.close(fd)
            assert status == (0 if i < 4096 else -errno.EMFILE)
        other = engine_of(helper)
        other.map(str(path))
        assert helper.stats()["maps"] == 4097
        for i in range(4096):
            raw.send(gpu.UNMAP, map_id=i + 1)
    raw.close()


# ---- Who reads slowly ----


def map_raw(raw, ticket, f, request):
    """One mapping, by hand. The reply, behind what notes come."""
    raw.send(gpu.MAP, ticket, [f.fileno()], request=request)
    return reply_of(raw)[0]


def reply_of(raw):
    """((kind, flags, status, length), notes that came before it); descriptors are closed."""
    notes = []
    while True:
        *reply, fds = raw.receive()
        for fd in fds:
            os.close(fd)
        if reply[1] & 1:
            return tuple(reply), notes
        notes.append(reply[0])


@FAKE
def test_slow__replies_wait_for_room_behind_notes(start):
    """A file that arrives fills the socket with notes: what is asked then is answered all the same."""
    helper, count = start(*SMALL), 1000
    path = store(helper, "f", blob(1, SIZE))
    helper.tell("hold")
    raw = Raw(helper)
    with open(path, "rb") as f:
        ticket = packed_ticket(f.fileno())
        for i in range(count):
            kind, flags, status, _ = map_raw(raw, ticket, f, i)
            assert (kind, status, flags & 4) == (gpu.MAP, 0, 0)
        helper.tell()
        eventually(lambda: helper.stats()["resident"] == 1)
        raw.send(gpu.MAP, ticket, [f.fileno()], request=count)
        eventually(lambda: helper.stats()["maps"] == count + 1)
        raw.send(gpu.HELLO)
        (kind, flags, status, _), notes = reply_of(raw)
        assert (kind, status, flags & 4) == (gpu.MAP, 0, 4)
        (kind, _, status, _), more = reply_of(raw)
        assert (kind, status) == (gpu.HELLO, 0)
    notes += more
    while len(notes) < count:
        notes.append(raw.receive()[0])
    assert set(notes) == {gpu.READY}
    assert raw.ask(gpu.HELLO)[2] == 0
    raw.close()
    assert "client ended" not in helper.log()


@HOST
def test_slow__requests_wait_when_no_answer_is_read(helper):
    """The helper stops to read, keeps no more than a few answers, and each is there in the end."""
    path = store(helper, "f", blob(1, SIZE))
    engine_of(helper).map(str(path))
    raw = Raw(helper)
    with open(path, "rb") as f:
        ticket = packed_ticket(f.fileno())
        raw.socket.settimeout(1)
        sent = 0
        with pytest.raises(TimeoutError):
            while sent < 100000:
                raw.send(gpu.MAP, ticket, [f.fileno()], request=sent)
                sent += 1
        raw.socket.settimeout(30)
    mapped = 0
    for _ in range(sent):
        (kind, _, status, _), _ = reply_of(raw)
        assert kind == gpu.MAP and status in (0, -errno.EAGAIN)
        mapped += status == 0
    assert mapped > 64 and helper.stats()["maps"] == mapped + 1
    raw.close()


@HOST
def test_slow__who_goes_with_answers_unread_leaves_nothing(helper):
    path = store(helper, "f", blob(1, SIZE))
    with open(path, "rb") as f:
        in_child(lambda: ask_and_go(helper, f))
    eventually(lambda: helper.stats()["maps"] == 0 and helper.stats()["clients"] == 1)
    assert engine_of(helper).map(str(path))[1] == SIZE


def ask_and_go(helper, f):
    raw, ticket = Raw(helper), packed_ticket(f.fileno())
    raw.socket.settimeout(1)
    with pytest.raises(TimeoutError):
        while True:
            raw.send(gpu.MAP, ticket, [f.fileno()])


# ---- Changes ----


@EVERYWHERE
@pytest.mark.parametrize("change", ["rewrite", "unlink", "replace", "evict", "retire"])
def test_invalid__is_told_and_old_bytes_stay(helper, change):
    kv = helper.kv
    (kv.mnt / "d").mkdir()
    path = store(helper, "d/f", data := blob(1, SIZE))
    kv.settle()
    engine = engine_of(helper)
    key = engine.map(str(path))[0]
    if change == "rewrite":
        put(path, blob(2, SIZE))
    elif change == "unlink":
        path.unlink()
    elif change == "replace":
        put(kv.mnt / "d" / "other", blob(2, SIZE))
        os.rename(kv.mnt / "d" / "other", path)
    elif change == "evict":
        eventually(lambda: kv.kvfs("evict", "--force", path, check=False).returncode == 0)
    else:
        kv.kvfs("retire", kv.mnt / "d")
    assert [e[:2] for e in engine.events(20)] == [(key, 2)]
    assert engine.digest(key) == digest(data)
    if change in ("rewrite", "replace"):
        new = engine.map(str(path))[0]
        assert engine.digest(new) == digest(blob(2, SIZE))
    engine.unmap(key)
    expected = 22 * MIB if change in ("rewrite", "replace") else 0
    eventually(lambda: helper.stats()["used"] == expected)
    assert helper.stats()["invalidated"] == 1


@HOST
def test_invalid__is_told_to_who_reads_slowly(helper):
    """More notes than its socket holds: they wait, and nothing of it is ended."""
    path, count = store(helper, "f", blob(1, SIZE)), 1000
    engine_of(helper).map(str(path))
    raw = Raw(helper)
    with open(path, "rb") as f:
        ticket = packed_ticket(f.fileno())
        for i in range(count):
            kind, flags, status, _, fds = raw.ask(gpu.MAP, ticket, [f.fileno()], request=i)
            assert (kind, status, flags & 4) == (gpu.MAP, 0, 4)
            for fd in fds:
                os.close(fd)
    put(path, blob(2, SIZE))
    eventually(lambda: helper.stats()["invalidated"] == 1)
    for _ in range(count):
        assert raw.receive()[0] == gpu.INVALID
    assert raw.ask(gpu.HELLO)[2] == 0
    raw.close()


@HOST
def test_invalid__of_new_content_is_told_when_the_old_is_given_back(helper):
    path = store(helper, "f", blob(1, SIZE))
    old, new = engine_of(helper), engine_of(helper)
    old_key = old.map(str(path))[0]
    put(path, blob(2, SIZE))
    assert [e[:2] for e in old.events(20)] == [(old_key, 2)]
    new_key = new.map(str(path))[0]
    old.unmap(old_key)
    eventually(lambda: helper.stats()["used"] == 22 * MIB)
    put(path, blob(3, SIZE))
    assert [e[:2] for e in new.events(20)] == [(new_key, 2)]


@HOST
def test_invalid__of_new_content_after_the_daemon_came_back(helper):
    """What is left of the first connection takes nothing away from the second one."""
    path = store(helper, "f", blob(1, SIZE))
    helper.kv.settle()
    old, new = engine_of(helper), engine_of(helper)
    old_key = old.map(str(path))[0]
    helper.kv.kill()
    helper.kv.mount()
    assert [e[:2] for e in old.events(20)] == [(old_key, 2)]
    new_key = new.map(str(path))[0]
    old.unmap(old_key)
    eventually(lambda: helper.stats()["used"] == 22 * MIB)
    put(path, blob(2, SIZE))
    assert [e[:2] for e in new.events(20)] == [(new_key, 2)]


@FAKE
def test_change__while_it_is_being_staged(start):
    """Who asked for the old version gets it whole; who asks now gets the new one."""
    helper = start(*SMALL)
    path = store(helper, "f", blob(1, SIZE))
    old, new = engine_of(helper), engine_of(helper)
    helper.tell("hold")
    key = old.map(str(path), 0, 0, EARLY)[0]
    put(path, blob(2, SIZE))
    new_key = new.map(str(path), 0, 0, EARLY)[0]
    helper.tell()
    for engine, k, seed in ((old, key, 1), (new, new_key, 2)):
        engine.wait(k, SIZE, 30)
        assert engine.digest(k) == digest(blob(seed, SIZE))


# ---- Deaths ----


@HOST
def test_helper__without_descriptors_lets_clients_wait(helper):
    """They are not refused, and the helper says why, once."""
    pid = helper.process.pid
    limits = spare_descriptors(pid, 0)
    clients = [Raw(helper) for _ in range(20)]
    eventually(lambda: "no descriptors left" in helper.log())
    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    for client in clients:
        assert client.ask(gpu.HELLO)[2] == 0
        client.close()
    assert helper.log().count("no descriptors left") == 1


@HOST
def test_helper__without_descriptors_refuses_and_goes_on(helper):
    """However few there are: the request fails, or not; nobody's connection ends."""
    pid = helper.process.pid
    engine, raw = engine_of(helper), Raw(helper)
    refused = 0
    for count in range(20):
        path = store(helper, f"f{count}", data := blob(count, 3 * MIB))
        with open(path, "rb") as f:
            ticket = packed_ticket(f.fileno())
            limits = spare_descriptors(pid, count)
            status = map_raw(raw, ticket, f, count)[2]
            raw.send(gpu.HELLO)
            hello = reply_of(raw)[0]
            resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        assert status in (0, -errno.EMFILE) and hello[2] == 0
        refused += status < 0
        assert helper.stats()["daemon"] == 1
    assert 0 < refused < 20
    assert "no descriptors left" in helper.log() and "has gone" not in helper.log()
    raw.close()
    assert engine.digest(engine.map(str(path))[0]) == digest(data)


@HOST
def test_engine__without_descriptors_has_no_mapping_and_goes_on(start):
    helper = start(*SMALL)
    path = store(helper, "f", data := blob(1, SIZE))
    engine = engine_of(helper)
    assert engine.stats()["maps"] == 0
    limits = spare_descriptors(engine.child.pid, 5)  # the file, and some of what comes
    fails(errno.EMFILE, engine.map, str(path))
    resource.prlimit(engine.child.pid, resource.RLIMIT_NOFILE, limits)
    eventually(lambda: helper.stats()["maps"] == 0)
    assert engine.digest(engine.map(str(path))[0]) == digest(data)


def test_engine__killed_gives_everything_back(helper):
    path = store(helper, "f", blob(1, SIZE))
    engine = Engine(helper)
    engine.map(str(path))
    engine.map(str(path))
    engine.stop(kill=True)
    eventually(lambda: helper.stats()["maps"] == 0)
    assert helper.stats()["resident"] == 1


@FAKE
def test_engine__killed_while_it_waits(start):
    helper = start(*SMALL)
    path = store(helper, "f", data := blob(1, SIZE))
    helper.tell("hold")
    engine = Engine(helper)
    engine.send("map", str(path))
    eventually(lambda: helper.stats()["maps"] == 1)
    engine.stop(kill=True)
    eventually(lambda: helper.stats()["maps"] == 0)
    helper.tell()
    eventually(lambda: helper.stats()["resident"] == 1)
    other = engine_of(helper)
    assert other.digest(other.map(str(path))[0]) == digest(data)


def test_helper__killed_leaves_engines_what_they_have(helper):
    path = store(helper, "f", data := blob(1, SIZE))
    engine = engine_of(helper)
    key = engine.map(str(path))[0]
    helper.kill()
    fails(errno.EPIPE, engine.dispatch)
    fails(errno.EPIPE, engine.map, str(path))
    assert engine.digest(key) == digest(data)
    helper.start()
    engine.reconnect(str(helper.socket), helper.kind)
    new = engine.map(str(path))[0]
    assert engine.digest(new) == engine.digest(key) == digest(data)
    assert helper.kv.status(), "the daemon did not mind"


@FAKE
def test_helper__killed_while_engines_wait(start):
    helper = start(*SMALL)
    path = store(helper, "f", blob(1, SIZE))
    early, waiting = engine_of(helper), engine_of(helper)
    helper.tell("hold")
    key = early.map(str(path), 0, 0, EARLY)[0]
    waiting.send("map", str(path))
    eventually(lambda: helper.stats()["maps"] == 2)
    helper.kill()
    with pytest.raises(OSError) as e:
        waiting.receive()
    assert e.value.errno == errno.EPIPE
    fails(errno.EPIPE, early.wait, key, 1, 30)
    # What the dead one held of the file is free.
    eventually(lambda: helper.kv.kvfs("evict", "--force", path, check=False).returncode == 0)
    helper.tell()
    helper.start()


@FAKE
def test_device__lost_ends_the_helper_and_nobody_else(start):
    """A sticky error: who waits is told, exit status 70, old mappings live on."""
    helper = start()
    old, path = store(helper, "old", data := blob(1, SIZE)), store(helper, "f", blob(2, SIZE))
    engine = engine_of(helper)
    key = engine.map(str(old))[0]
    helper.tell("fail cuEventQuery:1:700")
    with pytest.raises(OSError) as e:
        engine.map(str(path))
    assert e.value.errno in (errno.EIO, errno.EPIPE)
    assert helper.process.wait(30) == 70
    helper.ends = 70
    assert engine.digest(key) == digest(data)


@FAKE
def test_device__lost_while_files_are_staged(start):
    """One of them may end before the other: what the stager still works on stays until it has stopped."""
    helper = start(*SMALL, MALLOC_PERTURB_="165")
    paths = [store(helper, f"f{i}", blob(i, SIZE)) for i in range(8)]
    for path in paths:
        cold(helper, path)
    fds = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in paths]
    raw = Raw(helper)
    # Nobody has them mapped: a file that is given up is forgotten at once.
    helper.tell("fail cuEventQuery:6:700")
    for i, fd in enumerate(fds):
        raw.send(gpu.PREFETCH, packed_ticket(fd), [fd], request=i)
    assert helper.process.wait(30) == 70
    helper.ends = 70
    raw.close()
    for fd in fds:
        os.close(fd)


def test_daemon__killed_leaves_engines_what_they_have(helper):
    """After the next mount the helper is there again by itself, and trusts nothing from before."""
    path = store(helper, "f", data := blob(1, SIZE))
    helper.kv.settle()
    engine = engine_of(helper)
    key = engine.map(str(path))[0]
    helper.kv.kill()
    eventually(lambda: helper.stats()["daemon"] == 0)
    assert engine.digest(key) == digest(data)
    helper.kv.mount()
    eventually(lambda: helper.stats()["daemon"] == 1)
    assert [e[:2] for e in engine.events(10)] == [(key, 2)]
    assert engine.digest(engine.map(str(path))[0]) == digest(data)
    assert helper.stats()["misses"] == 2


def test_daemon__gone_for_long_makes_everything_unsure(start):
    helper = start("--unsure", "1s")
    path = store(helper, "f", data := blob(1, SIZE))
    helper.kv.settle()
    engine = engine_of(helper)
    key = engine.map(str(path))[0]
    helper.kv.kill()
    assert [e[:2] for e in engine.events(20)] == [(key, 2)]
    assert engine.digest(key) == digest(data), "who has it keeps it"
    assert helper.stats()["entries"] == 0
    helper.kv.mount()


def test_daemon__unmounts_while_files_are_in_device_memory(helper):
    path = store(helper, "f", blob(1, SIZE))
    engine = engine_of(helper)
    engine.map(str(path))
    helper.kv.remount()
    assert engine.read(1, 0, 9) == blob(1, 9)
