# SPDX-License-Identifier: Apache-2.0
"""P1-P6, R3: processes that race for the same names. Contents carry their writer's mark throughout."""
import errno
import mmap
import os
import random
import signal
import time

import pytest
from data import MIB, get, put
from procs import Child, eventually, parallel, race
from syscalls import fails

BLOCK = 4096


def content(mark, size=None):
    """Whole blocks of one mark, as many as it says itself."""
    blocks = 1 + mark % 60 if size is None else size // BLOCK
    return (b"%08d %08d " % (mark, blocks)).ljust(64, b".") * (BLOCK // 64) * blocks


def mark_of(data):
    """The mark of a whole content; anything else is an error."""
    assert len(data) >= BLOCK, f"{len(data)} bytes"
    mark, blocks = int(data[:8]), int(data[9:17])
    assert len(data) == blocks * BLOCK, f"{len(data)} bytes of {blocks} blocks of {mark}"
    assert data == data[:64] * (blocks * BLOCK // 64), f"bytes of others in the content of {mark}"
    return mark


def write_slowly(fd, data, pieces=5):
    """Several writes, as clients with buffers make them."""
    step = -(-len(data) // pieces)
    for offset in range(0, len(data), step):
        assert os.pwrite(fd, data[offset:offset + step], offset) == len(data[offset:offset + step])


def reader_of(path):
    """A job of a race: every content seen is whole; absent is the only error."""
    def read(going):
        seen = set()
        while going(len(seen)):
            try:
                seen.add(mark_of(get(path)))
            except FileNotFoundError:
                continue

    return read


# ---- Two processes on one name ----

def test_p5_one_temporary_name_for_all_processes(kv):
    """LMCache #4991 and #2517: the same staging name in every process, then a rename."""
    path, staging = kv.dir / "chunk.data", kv.dir / "chunk.data.tmp"

    def writer(worker):
        def store(going):
            stored, mark = 0, worker * 1_000_000
            while going(stored):
                mark += 1
                fd = os.open(staging, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
                write_slowly(fd, content(mark))
                os.close(fd)
                try:
                    os.rename(staging, path)
                    stored += 1
                except OSError as e:
                    # The other one took it along, or is writing it.
                    assert e.errno == errno.ENOENT

        return store

    race((writer(1), 3), (writer(2), 3), (writer(3), 3), (reader_of(path), 3))
    mark_of(get(path))
    assert set(os.listdir(kv.dir)) <= {path.name, staging.name}


def test_p5_two_processes_in_place(kv):
    """CP ranks, SGLang #26670: both open the final name and write."""
    path = kv.dir / "page.bin"

    def writer(worker):
        def store(going):
            stored = 0
            while going(stored):
                stored += 1
                mark = worker * 1_000_000 + stored
                flags = os.O_CREAT | os.O_RDWR | (os.O_TRUNC if mark % 2 else 0)
                fd = os.open(path, flags, 0o644)
                data = content(mark)
                write_slowly(fd, data)
                os.ftruncate(fd, len(data))
                os.close(fd)

        return store

    race((writer(1), 10), (writer(2), 10), (reader_of(path), 3), (reader_of(path), 3))


def test_p5_the_last_publish_wins_whole(kv, agent):
    """Writes that take turns in time, never in content."""
    path = kv.dir / "f"
    writers = [agent() for _ in range(3)]
    for turn in range(20):
        data = [content(100 * turn + i, 10 * BLOCK) for i in range(3)]
        fds = [w.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC) for w in writers]
        for offset in range(0, 10 * BLOCK, BLOCK):
            for w, fd, mine in zip(writers, fds, data):
                w.pwrite(fd, mine[offset:offset + BLOCK], offset)
        order = random.Random(turn).sample(range(3), 3)
        for i in order:
            writers[i].close(fds[i])
            assert get(path) == data[i]


# ---- Names moved while others write what they are of ----

def test_p2_rename_by_another_process_does_not_publish_half_a_file(kv, agent):
    writer = agent()
    fd = writer.open(kv.dir / "f.tmp", os.O_CREAT | os.O_WRONLY)
    writer.write(fd, content(1, 2 * BLOCK)[:BLOCK])
    os.rename(kv.dir / "f.tmp", kv.dir / "f")
    assert kv.stat(kv.dir / "f")["tier"] == "writing"
    writer.write(fd, content(1, 2 * BLOCK)[BLOCK:])
    writer.close(fd)
    assert get(kv.dir / "f") == content(1, 2 * BLOCK)


def test_p2_rename_of_anothers_half_file_over_a_whole_one_is_refused(kv, agent):
    put(kv.dir / "f", content(1))
    writer = agent()
    fd = writer.open(kv.dir / "f.tmp", os.O_CREAT | os.O_WRONLY)
    writer.write(fd, content(2)[:BLOCK])
    fails(errno.ENOENT, os.rename, kv.dir / "f.tmp", kv.dir / "f")
    assert get(kv.dir / "f") == content(1)
    writer.pwrite(fd, content(2), 0)
    writer.close(fd)
    os.rename(kv.dir / "f.tmp", kv.dir / "f")
    assert get(kv.dir / "f") == content(2)


def test_p4_rename_over_a_file_that_another_process_is_writing(kv, agent):
    """Nobody has seen that one: it loses its name, and its writer notices nothing."""
    writer = agent()
    fd = writer.open(kv.dir / "f", os.O_CREAT | os.O_RDWR)
    writer.write(fd, content(1))
    put(kv.dir / "f.tmp", content(2))
    os.rename(kv.dir / "f.tmp", kv.dir / "f")
    assert get(kv.dir / "f") == content(2)
    writer.pwrite(fd, content(3), 0)
    assert writer.pread(fd, len(content(3))) == content(3)
    writer.close(fd)
    assert get(kv.dir / "f") == content(2)


# ---- Readers of what is being replaced ----

@pytest.mark.parametrize("way", ["truncate", "rename", "unlink"])
def test_p4_mapped_readers_keep_their_version(kv, way):
    """A truncating rewriter under a live mapping, and a rename over an open file: no SIGBUS."""
    path = kv.dir / "f"
    put(path, content(1))

    def rewrite(going):
        mark = 1
        while going(mark):
            mark += 1
            target = f"{path}.tmp" if way == "rename" else path
            if way == "unlink":
                os.unlink(path)
            put(target, content(mark))
            if way == "rename":
                os.rename(target, path)

    def read(going):
        choice, held, seen = random.Random(os.getpid()), [], set()
        while going(len(seen)):
            try:
                fd = os.open(path, os.O_RDONLY)
            except FileNotFoundError:
                continue
            mapping = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
            held.append((mark_of(os.pread(fd, 1 << 20, 0)), fd, mapping))
            seen.add(held[-1][0])
            for mark, fd, mapping in choice.sample(held, min(3, len(held))):
                assert mark_of(bytes(mapping)) == mark
                assert mark_of(os.pread(fd, 1 << 20, 0)) == mark
            if len(held) > 20:
                _, fd, mapping = held.pop(choice.randrange(len(held)))
                mapping.close()
                os.close(fd)

    race((rewrite, 11), (read, 6), (read, 6))


def test_p2_rename_while_the_file_is_still_being_written(kv):
    """The rename publishes what there is, the close what came later; the old content until then."""
    path = kv.dir / "f"
    put(path, content(1))

    def rewrite(going):
        mark = 1
        while going(mark):
            mark += 1
            fd = os.open(f"{path}.tmp", os.O_CREAT | os.O_WRONLY, 0o644)
            os.write(fd, content(mark))
            os.rename(f"{path}.tmp", path)
            data = content(mark + 1_000_000, 70 * BLOCK)
            write_slowly(fd, data)
            os.close(fd)
            assert get(path) == data

    race((rewrite, 6), (reader_of(path), 3), (reader_of(path), 3))


# ---- Writers that are killed ----

WAYS = ("in place", "rename", "part", "new name", "dup", "threads")


def store_until_killed(root, way, mark, begun):
    """Stores contents with growing marks, without end."""
    while True:
        mark += 1
        path, data = root / "f", content(mark)
        if way == "part":
            fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
        elif way == "rename":
            fd = os.open(root / "f.tmp", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
        elif way == "new name":
            fd = os.open(root / f"n{mark}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        else:
            fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
        copy = os.dup(fd) if way == "dup" else -1
        write_slowly(fd, data)
        if way == "part":
            os.ftruncate(fd, len(data))
        os.close(fd)
        if copy >= 0:
            os.close(copy)
        if way == "rename":
            os.rename(root / "f.tmp", path)
        if begun >= 0:
            os.write(begun, b"x")
            begun = -1


def killed_at_random(root, way, mark, choice):
    out, begun = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            store_until_killed(root, way, mark, begun)
        finally:
            os._exit(1)
    os.close(begun)
    assert os.read(out, 1) == b"x"
    os.close(out)
    time.sleep(choice.random() * 0.01)
    os.kill(pid, choice.choice((signal.SIGKILL, signal.SIGTERM)))
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("way", WAYS[:-1])
def test_p6_writer_killed_at_a_random_point(kv, way):
    """500 times over the five ways: each file is absent, or one whole content, new or old."""
    choice, last, dropped = random.Random(way), 0, kv.counter("unfinished")
    handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for turn in range(100):
        killed_at_random(kv.dir, way, turn * 10_000, choice)
        for name in os.listdir(kv.dir):
            try:
                mark = mark_of(get(kv.dir / name))
            except FileNotFoundError:
                assert name != "f"  # else it was about to vanish with its writer
                continue
            if name == "f":
                assert mark > max(last, turn * 10_000), "what its writer had closed is gone"
                last = mark
            if name.startswith("n"):
                assert mark == int(name[1:])
                os.unlink(kv.dir / name)
    signal.signal(signal.SIGTERM, handler)
    assert kv.counter("unfinished") > dropped, "nobody was ever killed while writing"
    eventually(lambda: kv.status()["open_handles"] == 0, what="all handles closed")


def test_p6_readers_of_names_whose_writers_are_killed(kv):
    """Who waits for a writer that dies gets ENOENT soon, not when its patience ends."""
    path = kv.dir / "f"
    choice = random.Random(7)
    for turn in range(40):
        out, begun = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                fd = os.open(path, os.O_CREAT | os.O_WRONLY, 0o644)
                os.write(fd, content(turn)[:BLOCK])
                os.write(begun, b"x")
                signal.pause()
            finally:
                os._exit(1)
        os.close(begun)
        assert os.read(out, 1) == b"x"
        os.close(out)
        reader = Child(lambda: os.path.exists(path) and get(path))
        time.sleep(choice.random() * 0.01)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        try:
            assert reader.result() is False, "a file that nobody published"
        except FileNotFoundError:
            pass
        assert os.listdir(kv.dir) == []


# ---- A store under load ----

def test_p2_publish_while_write_back_is_behind(drive, fresh):
    """More is written than may be dirty: each content is there for others as soon as it is closed."""
    kv = fresh(dram="32M", devices=(drive.data,), io_timeout="600s")
    drive.hang()
    read_end, write_end = os.pipe()

    def store(worker):
        for i in range(8):
            put(kv.mnt / f"f{worker}", content(worker * 1000 + i, 16 * MIB))
            os.write(write_end, b"%08d" % (worker * 1000 + i))
        return 8

    def load(_):
        os.close(write_end)
        seen = 0
        while mark := os.read(read_end, 8):
            found = mark_of(get(kv.mnt / f"f{int(mark) // 1000}"))
            assert found >= int(mark) and found // 1000 == int(mark) // 1000
            seen += 1
            if seen == 24:
                break
        return seen

    def let_go(_):
        eventually(lambda: kv.counter("throttled") > 0, what="a writer that is held back")
        drive.answer()

    results = parallel(lambda job: job[0](job[1]),
                       [(store, 1), (store, 2), (store, 3), (load, 0), (let_go, 0)])
    assert results == [8, 8, 8, 24, None]
    os.close(read_end)
    os.close(write_end)


def test_r3_eviction_while_engines_load(fresh):
    """A full store, one writer, many readers: ENOENT at open is the only error, all bytes right."""
    kv = fresh(size="256M", dram="64M")
    names = 400
    for i in range(names):
        put(kv.mnt / f"{i}", content(i, MIB))

    def store(going):
        mark = names
        while going(mark - names):
            put(kv.mnt / f"{mark}", content(mark, MIB))
            mark += 1

    def load(going):
        choice, loaded = random.Random(os.getpid()), 0
        while going(loaded):
            name = choice.randrange(2 * names)
            try:
                fd = os.open(kv.mnt / f"{name}", os.O_RDONLY)
            except FileNotFoundError:
                continue
            if name % 3:
                data = os.read(fd, 2 * MIB)
            else:
                with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as mapping:
                    data = bytes(mapping)
            os.close(fd)
            assert mark_of(data) == name
            loaded += 1

    race((store, 50), (load, 20), (load, 20), (load, 20), seconds=6)
    assert kv.counter("evicted_store") > 0
