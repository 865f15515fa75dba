# SPDX-License-Identifier: Apache-2.0
"""P2 and P4: when content is published, and who sees which version."""
import os

import pytest
from data import MIB, blob, get, put, sync
from procs import eventually, parallel

SIZE = 2 * MIB + 99
OLD, NEW = blob(1, SIZE), blob(2, SIZE + 5000)
WAYS = {"O_TRUNC": os.O_WRONLY | os.O_TRUNC, "O_RDWR": os.O_RDWR, "O_WRONLY": os.O_WRONLY,
        "O_CREAT": os.O_CREAT | os.O_WRONLY | os.O_TRUNC, "O_DIRECT": os.O_RDWR | os.O_DIRECT}


def version(kv, path):
    return kv.stat(path)["version"]


@pytest.mark.parametrize("way", WAYS)
def test_p4_rewriting_leaves_the_old_version_to_its_readers(kv, agent, way):
    path = kv.dir / "f"
    put(path, OLD)
    reader, late, writer = agent(), agent(), agent()
    early = reader.open(path)
    assert reader.pread(early, 100) == OLD[:100]
    fd = writer.open(path, WAYS[way])
    assert late.read_file(path) == OLD, "nothing is published yet"
    writer.pwrite(fd, NEW[:MIB], 0)
    writer.pwrite(fd, NEW[MIB:], MIB)
    assert late.read_file(path) == OLD
    assert os.stat(path).st_size in (SIZE, len(NEW))
    middle = late.open(path)
    writer.close(fd)
    assert late.read_file(path) == NEW
    assert writer.read_file(path) == NEW
    for who, handle in ((reader, early), (late, middle)):
        assert who.pread(handle, SIZE + 9999) == OLD
        who.close(handle)
    assert get(path) == NEW


def test_p4_append_makes_a_version(kv, agent):
    path = kv.dir / "f"
    put(path, OLD)
    reader, writer = agent(), agent()
    early = reader.open(path)
    fd = writer.open(path, os.O_WRONLY | os.O_APPEND)
    writer.write(fd, b"appended")
    assert reader.read_file(path) == OLD
    writer.close(fd)
    assert reader.read_file(path) == OLD + b"appended"
    assert reader.pread(early, SIZE + 100) == OLD


def test_p4_truncate_by_path_makes_a_version(kv, agent):
    path = kv.dir / "f"
    put(path, OLD)
    reader = agent()
    early = reader.open(path)
    os.truncate(path, 1000)
    assert get(path) == OLD[:1000]
    assert reader.pread(early, SIZE + 1) == OLD
    assert reader.read_file(path) == OLD[:1000]


def test_p4_rename_over_an_open_file(kv, agent):
    path = kv.dir / "f"
    put(path, OLD)
    reader = agent()
    early = reader.open(path)
    put(kv.dir / "tmp", NEW)
    os.rename(kv.dir / "tmp", path)
    assert reader.pread(early, SIZE + 1) == OLD
    assert reader.read_file(path) == NEW


def test_p4_the_inode_number_stays(kv):
    put(kv.dir / "f", OLD)
    before = os.stat(kv.dir / "f")
    put(kv.dir / "f", NEW)
    assert os.stat(kv.dir / "f").st_ino == before.st_ino


def test_p4_many_versions_with_a_reader_on_each(kv, agent):
    path = kv.dir / "f"
    reader = agent()
    handles = []
    for i in range(12):
        put(path, blob(i, 100_000 + i))
        handles.append(reader.open(path))
    for i, handle in enumerate(handles):
        assert reader.pread(handle, 200_000) == blob(i, 100_000 + i)
        assert reader.size(handle) in (100_000 + i, 100_011)


def test_p4_reader_and_writer_in_one_process(kv):
    path = kv.dir / "f"
    put(path, OLD)
    reader = os.open(path, os.O_RDONLY)
    put(path, NEW)
    assert os.pread(reader, SIZE + 1, 0) == OLD
    assert get(path) == NEW
    os.close(reader)


def test_p4_open_for_writing_without_a_write_changes_nothing(kv, agent):
    path = kv.dir / "f"
    put(path, OLD)
    sync(path)
    before, mtime = version(kv, path), os.stat(path).st_mtime_ns
    written = kv.counter("writeback_bytes")
    for flags in (os.O_RDWR, os.O_WRONLY, os.O_WRONLY | os.O_APPEND, os.O_CREAT | os.O_RDWR):
        fd = os.open(path, flags, 0o644)
        if flags & os.O_RDWR:
            assert os.pread(fd, SIZE + 1, 0) == OLD
        os.close(fd)
    assert get(path) == OLD
    assert version(kv, path) == before
    assert os.stat(path).st_mtime_ns == mtime
    assert kv.counter("writeback_bytes") == written
    assert agent().read_file(path) == OLD


def test_p2_fsync_publishes_and_writing_goes_on(kv, agent):
    path = kv.dir / "f"
    reader = agent()
    fd = os.open(path, os.O_CREAT | os.O_WRONLY, 0o644)
    os.write(fd, OLD)
    os.fsync(fd)
    assert reader.read_file(path) == OLD
    early = reader.open(path)
    os.write(fd, b"after the sync")
    assert reader.pread(early, SIZE + 100) == OLD
    os.close(fd)
    assert reader.read_file(path) == OLD + b"after the sync"
    assert reader.pread(early, SIZE + 100) == OLD


@pytest.mark.parametrize("how", ("fsync", "rename", "dup"))
def test_p2_second_publish_is_seen_at_once_by_who_saw_the_first(kv, agent, how):
    """The kernel knows the first version by name when the second one is published."""
    other = agent()
    for i in range(100):
        path, first, second = kv.dir / f"f{i}", blob(i, 5000), blob(i + 1000, 5000)
        fd = os.open(f"{path}.tmp" if how == "rename" else path, os.O_CREAT | os.O_RDWR, 0o644)
        os.pwrite(fd, first, 0)
        if how == "fsync":
            os.fsync(fd)
        elif how == "rename":
            os.rename(f"{path}.tmp", path)
        else:
            os.close(os.dup(fd))
        assert other.read_file(path) == first
        os.pwrite(fd, second, 0)
        assert other.read_file(path) == first
        os.close(fd)
        assert get(path) == second
        assert other.read_file(path) == second


def test_p2_rename_publishes_an_open_file(kv, agent):
    reader = agent()
    fd = os.open(kv.dir / "tmp", os.O_CREAT | os.O_WRONLY, 0o644)
    os.write(fd, OLD)
    os.rename(kv.dir / "tmp", kv.dir / "f")
    assert reader.read_file(kv.dir / "f") == OLD
    os.close(fd)
    assert reader.read_file(kv.dir / "f") == OLD


def test_p2_dup_ed_descriptor_writes_on_after_the_close(kv, agent):
    path = kv.dir / "f"
    reader = agent()
    fd = os.open(path, os.O_CREAT | os.O_WRONLY, 0o644)
    os.write(fd, OLD)
    other = os.dup(fd)
    os.close(fd)
    os.write(other, b"more")
    os.close(other)
    assert reader.read_file(path) == OLD + b"more"


def test_p2_descriptor_inherited_by_a_child(kv, agent):
    """A shell's redirection: several processes write through one open file."""
    fd = os.open(kv.dir / "f", os.O_CREAT | os.O_WRONLY, 0o644)
    for i in range(3):
        parallel(lambda n: os.write(fd, f"line {n}\n".encode()), [i])
    os.close(fd)
    assert agent().read_file(kv.dir / "f") == b"line 0\nline 1\nline 2\n"


def test_p2_normal_exit_without_close_publishes(kv, agent):
    writer = agent()
    fd = writer.open(kv.dir / "f", os.O_CREAT | os.O_WRONLY)
    writer.write(fd, OLD)
    writer.stop()
    assert get(kv.dir / "f") == OLD


def test_p2_two_writers_of_one_file_one_after_the_other(kv, agent):
    path = kv.dir / "f"
    put(path, OLD)
    for i in range(5):
        fd = os.open(path, os.O_RDWR)
        os.pwrite(fd, bytes([i]) * 10, i * 10)
        os.close(fd)
    expected = b"".join(bytes([i]) * 10 for i in range(5)) + OLD[50:]
    assert agent().read_file(path) == expected


def test_p2_the_last_writers_close_counts(kv, agent):
    """Two descriptors of one process write one version."""
    path = kv.dir / "f"
    a = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    b = os.open(path, os.O_RDWR)
    os.pwrite(a, b"aaaa", 0)
    os.pwrite(b, b"bbbb", 4)
    assert os.pread(a, 10, 0) == os.pread(b, 10, 0) == b"aaaabbbb"
    os.close(a)
    os.pwrite(b, b"cccc", 8)
    os.close(b)
    assert agent().read_file(path) == b"aaaabbbbcccc"


def test_the_writer_sees_its_own_file(kv):
    """P3: the writing process reads, lists and renames what it has not published yet."""
    path = kv.dir / "f"
    fd = os.open(path, os.O_CREAT | os.O_WRONLY, 0o644)
    os.write(fd, OLD)
    assert os.stat(path).st_size == SIZE
    assert os.listdir(kv.dir) == ["f"]
    os.close(fd)


def test_stat_tells_the_state(kv):
    path = kv.dir / "f"
    put(path, OLD)
    sync(path)
    info = kv.stat(path)
    assert info["size"] == SIZE
    assert info["ino"] == os.stat(path).st_ino
    assert info["tier"] in ("nvme", "dram", "dram+nvme")
    assert info["checksum"] == "stored"
    assert sum(length for *_, length in kv.extents(path)) == -(-SIZE // 4096) * 4096
    hits = info["hits"]
    for _ in range(3):
        get(path)
    eventually(lambda: kv.stat(path)["hits"] >= hits + 3, what="the hits")
    assert version(kv, path) == info["version"]


def test_readers_never_see_a_mixture_while_a_file_is_rewritten_in_place(kv):
    path = kv.dir / "f"
    contents = [bytes([65 + i]) * (300_000 + i) for i in range(26)]
    put(path, contents[0])

    def write(_):
        for i in range(60):
            put(path, contents[i % 26])

    def read(_):
        for _ in range(200):
            data = get(path)
            assert data in contents, f"{len(data)} bytes of {set(data)}"

    parallel(lambda job: job(0), [write, read, read])
