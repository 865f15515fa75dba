# SPDX-License-Identifier: Apache-2.0
"""Many clients of the GPU helper at once, clients that die anywhere or make no sense, other versions."""
import errno
import os
import random
import signal
import socket
import struct
import threading

import gpu
import pytest
from data import MIB, blob, put
from gpu import EARLY, NOSTAGE, Raw
from gpufixtures import (FAKE, HOST, SIZE, SMALL, cold, digest, engine_of, mode, packed_ticket,
                         pytest_generate_tests, start, store)  # noqa: F401
from procs import Child, eventually, in_child, open_files
from syscalls import fails

UNSUPPORTED = errno.EPROTONOSUPPORT


# ---- Stretches that overlap ----


@FAKE
def test_overlap__is_staged_once_for_both(start):
    """The second stretch waits for what the first one brings, and brings the rest itself."""
    helper = start(*SMALL)
    path = str(store(helper, "f", data := blob(1, SIZE)))
    cold(helper, path)
    one, two = engine_of(helper), engine_of(helper)
    helper.tell("hold")
    first = one.map(path, 0, 8 * MIB, EARLY)[0]
    second = two.map(path, 4 * MIB, 8 * MIB, EARLY)[0]
    third = two.map(path, 6 * MIB, 4 * MIB, NOSTAGE | EARLY)[0]
    assert helper.stats()["used"] == 12 * MIB
    helper.tell()
    for engine, key, off, size in ((two, second, 4, 8), (one, first, 0, 8), (two, third, 6, 4)):
        engine.wait(key, size * MIB, 30)
        assert engine.digest(key) == digest(data[off * MIB:(off + size) * MIB])
    stats = helper.stats()
    assert (stats["used"], stats["staged_bytes"]) == (12 * MIB, 12 * MIB)
    one.unmap(first)
    fails(errno.EBUSY, one.evict, path)
    assert helper.stats()["used"] == 8 * MIB, "what the second one has stays"
    assert two.digest(second) == digest(data[4 * MIB:12 * MIB])


@FAKE
def test_overlap__fails_with_the_first(start):
    """What it waited for does not come: it is told so, and the next try brings all."""
    helper = start(*SMALL)
    path = str(store(helper, "f", data := blob(1, SIZE)))
    one, two = engine_of(helper), engine_of(helper)
    helper.tell("hold")
    first = one.map(path, 0, 8 * MIB, EARLY)[0]
    second = two.map(path, 6 * MIB, 2 * MIB + 1, EARLY)[0]
    # Both have copies under way, and no order says whose is asked for first: all are to fail.
    helper.tell("fail cuEventQuery:1+:1")
    for engine, key in ((one, first), (two, second)):
        with pytest.raises(OSError) as e:
            engine.wait(key, 8 * MIB, 30)
        assert e.value.errno in (errno.EIO, errno.EINVAL)
        engine.unmap(key)
    helper.tell()
    assert eventually(lambda: helper.stats()["used"] == 0)
    assert eventually(lambda: mapped(two, path, 6 * MIB, 2 * MIB + 1)) == digest(
        data[6 * MIB:8 * MIB + 1])


def mapped(engine, path, off, length):
    """The digest of a range; None while an earlier failure is not forgotten."""
    try:
        return engine.digest(engine.map(path, off, length)[0])
    except OSError:
        return None


# ---- Prefetches for a time ----


@HOST
def test_prefetch__for_a_time(start):
    """What nobody has mapped by then goes; what was mapped, or asked for once more, stays."""
    helper = start("--segment", "4M")
    paths = [str(store(helper, f"f{i}", blob(i, 4 * MIB))) for i in range(4)]
    engine = engine_of(helper)
    for path, ttl in zip(paths, (2, 2, 2, 600)):
        engine.prefetch(path, 0, 0, 0, ttl)
    engine.unmap(engine.map(paths[1])[0])
    engine.prefetch(paths[2])

    def there():
        return [engine.stats(p)["asked_resident"] // MIB for p in paths]

    # They come in no order; and the first one may be gone before the last one is there.
    assert eventually(lambda: there()[1:] == [4, 4, 4])
    assert eventually(lambda: there()[0] == 0 and helper.stats()["evicted"] > 0)
    assert there() == [0, 4, 4, 4]
    assert helper.stats()["used"] == 12 * MIB


@FAKE
def test_prefetch__that_nobody_waits_for_any_more_ends(start):
    """Its memory is free although the link never brought it."""
    helper = start(*SMALL)
    path, other = (str(store(helper, n, blob(i, SIZE))) for i, n in enumerate("fg"))
    cold(helper, path)
    engine = engine_of(helper)
    helper.tell("hold")
    engine.prefetch(path, 0, 0, 0, 1)
    assert eventually(lambda: engine.stats(path)["asked_resident"] == 0
                      and helper.stats()["entries"] == 0, 30)
    helper.tell()
    assert eventually(lambda: helper.stats()["used"] == 0)
    assert helper.stats()["failed"] == 0
    assert engine.digest(engine.map(other)[0]) == digest(blob(1, SIZE))


@FAKE
def test_prefetch__that_the_last_waiter_has_left_ends(start):
    """While another stretch waits for what it brings it stays, though its time is over."""
    helper = start("--segment", "4M")
    path = str(store(helper, "f", data := blob(1, SIZE)))
    cold(helper, path)
    engine = engine_of(helper)
    helper.tell("hold")
    engine.prefetch(path, 0, 8 * MIB, 0, 5)
    engine.prefetch(path, 8 * MIB, 8 * MIB, 0, 5)
    # It waits for segments of both.
    engine.prefetch(path, 4 * MIB, 8 * MIB, 0, 8)
    assert helper.stats()["entries"] == 3
    # It goes at its time, and with it those two.
    assert eventually(lambda: helper.stats()["entries"] == 0, 60)
    helper.tell()
    assert eventually(lambda: helper.stats()["used"] == 0)
    stats = helper.stats()
    assert (stats["evicted"], stats["failed"]) == (3, 0)
    assert engine.digest(engine.map(path)[0]) == digest(data)


# ---- Clients that want the link for themselves ----


def copies_for_a_file(start, mark):
    """How many copies the helper makes of 32 MiB; MARK: what is done before."""
    helper = start()
    path = str(store(helper, "f", data := blob(1, 32 * MIB)))
    mark(helper)
    engine = engine_of(helper)
    assert engine.digest(engine.map(path)[0]) == digest(data)
    assert helper.stats()["from_dram_bytes"] == 32 * MIB
    pid = helper.process.pid
    engine.stop()
    helper.engines.clear()
    assert helper.stop() == 0
    line = next(text for text in helper.report.read_text().splitlines()
                if text.startswith(f"fakecu: process={pid} h2d"))
    return int(line.split("copies=")[1].split()[0])


@FAKE
def test_latency__copies_are_short_as_long_as_that_client_is_there(start):
    kvg = gpu.load_kvg()
    here = []

    def connect(helper):
        here.append(kvg.Context(str(helper.socket), control=True, latency=True))

    def connect_and_go(helper):
        connect(helper)
        here.pop().close()
        # This call's own is the one.
        eventually(lambda: helper.stats()["clients"] == 1)

    assert copies_for_a_file(start, lambda helper: None) == 4
    assert copies_for_a_file(start, connect) == 8
    here.pop().close()
    assert copies_for_a_file(start, connect_and_go) == 4


# ---- Versions ----


@HOST
def test_version__a_client_of_another_one_is_told(start):
    helper = start()
    for version in (1, 2, 65535):
        raw = Raw(helper)
        raw.send(gpu.HELLO, version=version, request=version)
        data, *_ = socket.recv_fds(raw.socket, 1 << 16, 1)
        header = struct.unpack_from("<IHHIIQQQQi", data)
        assert (header[1], header[2], header[5], header[9]) == (
            gpu.VERSION, gpu.HELLO, version, -UNSUPPORTED)
        with pytest.raises(OSError):
            raw.ask(gpu.HELLO)
        raw.close()
    assert "speaks version 2 of the protocol, this kvgpud 3" in helper.log()
    assert helper.stats()["malformed"] == 0


def test_version__a_helper_of_another_one_is_told_of(tmp_path):
    """libkvg says which versions they are, and what to do."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(tmp_path / "s"))
    listener.listen()

    def answer():
        client, _ = listener.accept()
        request = struct.unpack_from("<IHHIIQ", client.recv(1 << 16))
        client.send(struct.pack("<IHHIIQQQQiIQ", gpu.MAGIC, 9, gpu.HELLO, 1, 0, request[5], 0, 0, 0,
                                -UNSUPPORTED, 0, 0))
        client.close()

    thread = threading.Thread(target=answer)
    thread.start()
    kvg = gpu.load_kvg()
    with pytest.raises(OSError, match="speaks version 9 of the protocol, this libkvg 3") as e:
        kvg.Context(str(tmp_path / "s"), control=True)
    assert e.value.errno == UNSUPPORTED
    thread.join()
    listener.close()


# ---- A daemon that is slow to read ----


@HOST
def test_daemon__that_does_not_read_loses_nothing(start):
    """More questions than its socket holds are all answered; nothing stays held or watched by mistake."""
    helper = start()
    kv, path = helper.kv, store(helper, "f", blob(1, SIZE))
    raws = [Raw(helper) for _ in range(16)]
    with open(path, "rb") as f:
        ticket = packed_ticket(f.fileno())
        os.kill(kv.pid, signal.SIGSTOP)
        try:
            for raw in raws:
                for i in range(64):
                    raw.send(gpu.STAT, ticket, [f.fileno()], request=i + 2)
                # Answered by the helper alone, when it has asked the daemon for all the others.
                assert raw.ask(gpu.HELLO)[2] == 0
        finally:
            os.kill(kv.pid, signal.SIGCONT)
        for raw in raws:
            assert [raw.receive()[2] for _ in range(64)] == 64 * [0]
    engine = engine_of(helper)
    key = engine.map(str(path))[0]
    put(path, blob(2, SIZE))
    assert [e[:2] for e in engine.events(20)] == [(key, 2)]
    engine.unmap(key)
    eventually(lambda: kv.kvfs("evict", "--force", path, check=False).returncode == 0)
    assert helper.stats()["daemon"] == 1 and "has gone" not in helper.log()
    for raw in raws:
        raw.close()


# ---- A hundred clients ----

POINTS = ("connect", "hello", "half a map", "map", "ready", "unmap", "prefetch", "stat")


def die_at(helper, f, point):
    """A client that ends by a signal there."""
    raw, ticket = Raw(helper), packed_ticket(f.fileno())
    if point != "connect":
        raw.ask(gpu.HELLO)
    if point == "half a map":
        raw.send(gpu.MAP, ticket, [f.fileno()])
    elif point in ("map", "ready", "unmap"):
        reply = raw.ask(gpu.MAP, ticket, [f.fileno()])
        assert (reply[0], reply[2]) == (gpu.MAP, 0)
        if point != "map" and not reply[1] & 4:
            raw.receive()
        if point == "unmap":
            raw.send(gpu.UNMAP, map_id=1)
    elif point == "prefetch":
        raw.send(gpu.PREFETCH, ticket, [f.fileno()])
    elif point == "stat":
        raw.send(gpu.STAT, ticket, [f.fileno()])
    os.kill(os.getpid(), signal.SIGKILL)


@HOST
def test_crowd__of_clients_that_die_anywhere(start):
    """A hundred at once, of which none leaves anything; others do not notice."""
    helper = start("--segment", "4M")
    path = store(helper, "f", data := blob(1, SIZE))
    engine = engine_of(helper)
    assert helper.stats()["maps"] == 0
    before = len(open_files(helper.process.pid))
    with open(path, "rb") as f:
        dice = random.Random(4)
        children = [Child(die_at, helper, f, dice.choice(POINTS)) for _ in range(100)]
        for child in children:
            assert os.WTERMSIG(child.collect()) == signal.SIGKILL
    assert engine.digest(key := engine.map(str(path))[0]) == digest(data)
    engine.unmap(key)
    assert eventually(lambda: helper.stats()["maps"] == 0 and helper.stats()["clients"] == 2, 30)
    stats = helper.stats()
    assert (stats["entries"], stats["used"], stats["malformed"]) == (1, 22 * MIB, 0)
    engine.evict(str(path))
    assert eventually(lambda: len(open_files(helper.process.pid)) <= before, 30)


@HOST
def test_crowd__of_a_hundred_that_share_one_copy(start):
    helper = start("--segment", "4M")
    path = store(helper, "f", blob(1, SIZE))
    raws = [Raw(helper) for _ in range(100)]
    with open(path, "rb") as f:
        ticket = packed_ticket(f.fileno())
        for raw in raws:
            raw.send(gpu.MAP, ticket, [f.fileno()])
        for raw in raws:
            kind, flags, status, length, fds = raw.receive()
            assert (kind, status, length, len(fds)) == (gpu.MAP, 0, SIZE, 7)
            for fd in fds:
                os.close(fd)
            if not flags & 4:
                assert raw.receive()[:3] == (gpu.READY, 0, 0)
    stats = helper.stats()
    assert (stats["maps"], stats["misses"], stats["hits"], stats["staged"]) == (100, 1, 99, 1)
    for raw in raws:
        raw.close()
    # They were all of one process, which lives: what it has mapped is its own until it ends.
    assert helper.stats()["maps"] == 100 and helper.stats()["clients"] == 1


def attack(helper, f, count):
    """How many of COUNT connections with a random change of a good request were ended."""
    dice, ended, ticket = random.Random(7), 0, packed_ticket(f.fileno())
    for _ in range(count):
        raw = Raw(helper)
        kind = dice.choice((gpu.HELLO, gpu.MAP, gpu.UNMAP, gpu.PREFETCH, gpu.STAT, gpu.EVICT))
        payload = b"" if kind in (gpu.HELLO, gpu.UNMAP) else ticket
        packet = bytearray(struct.pack(
            "<IHHIIQQQQiIiI", gpu.MAGIC, gpu.VERSION, kind, 0, 0, 1, dice.choice((0, 1, 2**63)),
            dice.choice((0, 1, 2**64 - 1)), dice.choice((0, SIZE, 2**64 - 1)), 0, len(payload),
            dice.randint(-2, 2) if kind == gpu.PREFETCH else 0, 0) + payload)
        for _ in range(dice.randrange(3)):
            packet[dice.randrange(len(packet))] = dice.randrange(256)
        fds = dice.choice(([], [f.fileno()], [f.fileno()], [0, 1, 2]))
        try:
            socket.send_fds(raw.socket, [bytes(packet)], fds)
            raw.send(gpu.HELLO, request=99)
            while (reply := raw.receive())[0] != gpu.HELLO:
                for fd in reply[4]:
                    os.close(fd)
        except OSError:
            ended += 1
        raw.close()
    return ended


@HOST
def test_hostile__packets_of_any_kind_hurt_nobody_else(start):
    """With whatever descriptors: answered or ended, each connection for itself."""
    helper = start("--segment", "4M")
    path = store(helper, "f", data := blob(1, SIZE))
    engine = engine_of(helper)
    key = engine.map(str(path))[0]
    before = len(open_files(helper.process.pid))
    with open(path, "rb") as f:
        assert 20 < in_child(attack, helper, f, 400) < 380
    assert engine.digest(key) == digest(data)
    assert eventually(lambda: helper.stats()["maps"] == 1 and helper.stats()["clients"] == 2, 30)
    assert helper.process.poll() is None
    # What was prefetched stays: a descriptor of a watermark each.
    stretches = helper.stats()["entries"]
    assert eventually(lambda: len(open_files(helper.process.pid)) <= before + stretches, 30)
