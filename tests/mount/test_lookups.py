# SPDX-License-Identifier: Apache-2.0
"""Storms of look-ups: what the kernel may remember, and that it forgets in time; the batch look-up."""
import errno
import mmap
import os
import random
import shutil
import stat
import struct
import threading

import ioctls
import pytest
from data import MIB, blob, get, put, put_synced, replace, sync
from kvmount import ROOT
from procs import Child, as_nobody, eventually, in_child, parallel, run
from syscalls import RENAME_EXCHANGE, fails, rename2

STORM = 3600


def storm(folder, count=STORM):
    """COUNT names of the length of engines' keys."""
    return [f"{folder}/{i:064x}" for i in range(count)]


def exist(paths):
    return [os.access(path, os.F_OK) for path in paths]


# ---- what the kernel remembers ----


def test_absent_names_are_asked_for_once(kv):
    """3,600 names that are not there: the second pass costs no request at all, whoever asks."""
    paths = storm(kv.dir)
    first = kv.counter("fuse_lookup")
    assert not any(exist(paths))
    assert kv.counter("fuse_lookup") - first >= STORM

    def look():
        assert not any(exist(paths))
        assert not any(in_child(exist, paths))

    assert second_pass_is_free(kv, look)


def test_present_names_are_asked_for_once(kv):
    paths = storm(kv.dir)
    for path in paths:
        put(path, b"x")

    def look():
        assert all(exist(paths))
        assert all(os.stat(path).st_size == 1 for path in paths)
        assert all(in_child(exist, paths))

    assert second_pass_is_free(kv, look)


def test_written_names_are_asked_for_once(kv):
    """
    Behind its writer's close a file keeps the node it was made with: one request finds its name.

    The last ones may still be open as far as the daemon has heard.
    """
    paths = storm(kv.dir, 200)
    for path in paths:
        put(path, b"x")
    before = kv.counter("fuse_lookup")
    for path in paths:
        os.unlink(path)
    assert kv.counter("fuse_lookup") - before < 1.5 * len(paths)


def test_file_that_was_read_by_its_writer_is_read_anew(kv):
    """What the kernel has kept for a mapping of the writer's is not what readers see later."""
    path = f"{kv.dir}/file"
    with open(path, "w+b", buffering=0) as f:
        f.write(b"a" * 8192)
        with mmap.mmap(f.fileno(), 8192) as pages:
            assert pages[:2] == b"aa"
            os.pwrite(f.fileno(), b"b" * 4096, 0)
            pages[4096:] = b"c" * 4096
    assert os.stat(path).st_size == 8192
    assert get(path) == b"b" * 4096 + b"c" * 4096
    assert in_child(get, path) == b"b" * 4096 + b"c" * 4096


def second_pass_is_free(kv, look):
    """
    LOOK() once, then again without one request more.

    The machine may drop its caches in between, for whatever reason; but not every time.
    """
    for _ in range(5):
        look()
        before = kv.counter("fuse_lookup")
        look()
        if kv.counter("fuse_lookup") == before:
            return True
    return False


def made_by(way, path, other):
    """Makes PATH in the given way; OTHER is a file that is there."""
    ways = {
        "create": lambda: put(path, b"new"),
        "exclusive": lambda: os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)),
        "mknod": lambda: os.mknod(path, stat.S_IFREG | 0o644),
        "mkdir": lambda: os.mkdir(path),
        "symlink": lambda: os.symlink("anywhere", path),
        "link": lambda: os.link(other, path),
        "rename": lambda: os.rename(other, path),
        "replace": lambda: replace(path, b"new"),
        "copy": lambda: shutil.copy(other, path),
    }
    ways[way]()


@pytest.mark.parametrize("way", ("create", "exclusive", "mknod", "mkdir", "symlink", "link",
                                 "rename", "replace", "copy"))
def test_a_name_that_was_absent_appears_at_once(kv, way):
    """However another process makes the name: who was told that there is none sees it."""
    (kv.dir / "sub").mkdir()
    put(kv.dir / "sub" / "other", b"other")
    path = kv.dir / "name"
    for _ in range(2):
        assert not os.path.lexists(path)
    in_child(made_by, way, path, kv.dir / "sub" / "other")
    assert os.path.lexists(path)
    assert "name" in os.listdir(kv.dir)
    if way in ("create", "replace"):
        assert get(path) == b"new"


def test_names_that_were_exchanged_are_seen_at_once(kv):
    put(kv.dir / "a", b"A")
    put(kv.dir / "b", b"BB")
    assert exist([kv.dir / "a", kv.dir / "b"]) == [True, True]
    in_child(rename2, kv.dir / "a", kv.dir / "b", RENAME_EXCHANGE)
    assert (get(kv.dir / "a"), get(kv.dir / "b")) == (b"BB", b"A")
    in_child(os.rename, kv.dir / "a", kv.dir / "c")
    assert exist([kv.dir / "a", kv.dir / "b", kv.dir / "c"]) == [False, True, True]


def test_a_directory_that_went_and_came_back_has_no_old_names(kv):
    (kv.dir / "d").mkdir()
    put(kv.dir / "d" / "old", b"x")
    assert not os.path.exists(kv.dir / "d" / "new")
    in_child(shutil.rmtree, kv.dir / "d")
    in_child(os.mkdir, kv.dir / "d")
    in_child(put, kv.dir / "d" / "new", b"y")
    assert exist([kv.dir / "d" / "old", kv.dir / "d" / "new"]) == [False, True]


def test_an_evicted_name_is_gone_at_once(kv):
    path = kv.dir / "f"
    put_synced(path, b"x" * 5000)
    assert os.path.exists(path)
    kv.kvfs("evict", "--force", path)
    assert not os.path.exists(path)
    fails(errno.ENOENT, os.open, path, os.O_RDONLY)
    assert second_pass_is_free(kv, lambda: os.path.exists(path))
    put(path, b"again")
    assert get(path) == b"again"


def test_names_that_eviction_took_are_gone_from_the_kernel(fresh):
    """A store that fills up: no name outlives its file, and each can be made again."""
    kv = fresh(size="64M", dram="32M", lease="1s")
    paths = [kv.mnt / f"f{i:03}" for i in range(60)]
    for i, path in enumerate(paths):
        put(path, blob(i, 2 * MIB))
        assert os.path.exists(path)
    assert kv.counter("evicted_store") > 0
    listed = set(os.listdir(kv.mnt))
    assert listed < {path.name for path in paths}
    for path in paths:
        if path.name not in listed:
            # Eviction ahead of the writers tells the kernel when it has let them go on.
            eventually(lambda path=path: not os.path.exists(path), what=f"the end of {path.name}")
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))


def test_no_look_up_survives_an_eviction_that_came_between(kv):
    """Look-ups that are under way while the names go: afterwards the kernel knows none of them."""
    names = [f"n{i}" for i in range(40)]
    paths = [os.fspath(kv.dir / name) for name in names]
    stop = threading.Event()

    def look():
        while not stop.is_set():
            for path in paths:
                os.access(path, os.F_OK)
            os.listdir(kv.dir)

    for turn in range(10):
        for path in paths:
            put_synced(path, b"x")
        threads = [threading.Thread(target=look) for _ in range(4)]
        for thread in threads:
            thread.start()
        with ioctls.opened(kv.dir) as fd:
            for name in names:
                eventually(lambda fd=fd, name=name: evicted(fd, name), what=f"evicting {name}")
        stop.set()
        for thread in threads:
            thread.join()
        stop.clear()
        assert not any(exist(paths)), f"turn {turn}"


def evicted(fd, name):
    """The file may be open still: RELEASE comes when it comes."""
    try:
        ioctls.drop(fd, ioctls.EVICT, name, ioctls.DROP_LEASED)
    except OSError as e:
        if e.errno != errno.EBUSY:
            raise
        return False
    return True


# ---- names that come into being ----


def test_create__asks_for_the_attributes_of_the_directory_alone(kv):
    """Those of the new file come with the answer, as far as the call that made it needs them."""
    count = 50
    put(kv.dir / "first", b"x")
    # A call that is held up for a tick of the clock asks for them: on a busy machine many are.
    for turn in range(40):
        before = kv.counter("fuse_getattr")
        for i in range(count):
            put(kv.dir / f"f{turn}-{i}", b"x")
        if kv.counter("fuse_getattr") - before < count * 3 // 2:
            return
    pytest.fail("those of each new file were asked for")


def test_create__attributes_are_those_of_now(kv):
    """What changes right behind the call is seen, by the descriptor and by name."""
    for i in range(50):
        path = kv.dir / f"f{i}"
        fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        os.write(fd, b"12345")
        assert os.fstat(fd).st_size == 5
        os.chmod(path, 0o640)
        os.truncate(path, 3)
        os.link(path, kv.dir / f"l{i}")
        seen, named = os.fstat(fd), os.stat(path)
        for st in (seen, named):
            assert (st.st_size, st.st_mode & 0o777, st.st_nlink) == (3, 0o640, 2)
        os.unlink(path)
        assert os.fstat(fd).st_nlink == 1
        os.close(fd)


# ---- the batch look-up ----


@pytest.fixture
def folder(kv):
    with ioctls.opened(kv.dir) as fd:
        yield fd


def test_batch__says_which_are_there(kv, folder):
    choice = random.Random(5)
    names = [f"{i:064x}" for i in range(STORM)]
    there = {name for name in names if choice.random() < 0.5} | {names[0], names[1]}
    there -= {names[2]}
    for name in there:
        put(kv.dir / name, b"x")
    before = kv.status()["counters"]
    leading, found = ioctls.lookup(folder, names)
    after = kv.status()["counters"]
    assert found == [name in there for name in names]
    assert leading == 2
    assert after["fuse_lookup"] == before["fuse_lookup"]
    assert after["lookup_names"] == before["lookup_names"] + STORM
    assert ioctls.lookup(folder, sorted(there)) == (len(there), [True] * len(there))


def test_batch__stops_at_the_first_absent_one(kv, folder):
    for name in "abdef":
        put(kv.dir / name, b"x")
    assert ioctls.lookup(folder, list("abcdef"), ioctls.LOOKUP_STOP) == (
        2, [True, True, False, False, False, False])
    assert ioctls.lookup(folder, list("abcdef"))[1] == [True, True, False, True, True, True]
    before = kv.counter("lookup_names")
    ioctls.lookup(folder, ["z"] + storm("")[0:1] * 0 + list("abdef"), ioctls.LOOKUP_STOP)
    assert kv.counter("lookup_names") == before + 1


def test_batch__nothing_and_one_name(kv, folder):
    assert ioctls.lookup_raw(folder, 0, 0, b"") == (0, 0, b"")
    put(kv.dir / ("n" * 1023), b"x")
    assert ioctls.lookup(folder, ["n" * 1023, "m" * 1023]) == (1, [True, False])
    most = [f"{i:x}"[-1] for i in range(ioctls.LOOKUP_BYTES // 2)]
    put(kv.dir / "a", b"x")
    leading, found = ioctls.lookup(folder, most)
    assert found == [name == "a" for name in most] and leading == 0


def test_batch__all_kinds_of_names(kv, folder):
    """Directories and links are there; a file counts when it was published."""
    (kv.dir / "directory").mkdir()
    os.symlink("nowhere", kv.dir / "link")
    os.mknod(kv.dir / "node", stat.S_IFREG | 0o644)
    put(kv.dir / "empty", b"")
    put(kv.dir / "\udcff\udcfe é", b"bytes")
    names = ["directory", "link", "node", "empty", "\udcff\udcfe é"]
    assert ioctls.lookup(folder, names) == (5, [True] * 5)


def test_batch__unpublished_files_are_absent(kv, folder, agent):
    other = agent()
    fd = other.open(kv.dir / "f", os.O_CREAT | os.O_WRONLY)
    other.write(fd, b"half")
    assert ioctls.lookup(folder, ["f"]) == (0, [False])
    with ioctls.opened(kv.dir / "mine", os.O_CREAT | os.O_WRONLY):
        assert ioctls.lookup(folder, ["mine"]) == (0, [False])
    other.close(fd)
    assert ioctls.lookup(folder, ["f", "mine"]) == (2, [True, True])
    fd = other.open(kv.dir / "f", os.O_WRONLY | os.O_TRUNC)
    other.write(fd, b"new")
    assert ioctls.lookup(folder, ["f"]) == (1, [True]), "the published version is there"
    other.close(fd)
    assert ioctls.lookup(folder, ["f"]) == (1, [True])


def test_batch__quarantined_and_removed_files_are_absent(fresh):
    kv = fresh()
    for name in ("good", "bad", "gone"):
        put_synced(kv.mnt / name, blob(1, MIB))
    (extent,) = kv.extents(kv.mnt / "bad")
    kv.umount()
    with open(kv.device_path(extent[1]), "r+b") as f:
        f.seek(extent[2] + 5000)
        f.write(b"damage")
    kv.mount()
    kv.expect_errors("checksum mismatch")
    with ioctls.opened(kv.mnt) as fd:
        assert ioctls.lookup(fd, ["good", "bad", "gone"]) == (3, [True] * 3)
        fails(errno.ENOENT, get, kv.mnt / "bad")
        os.unlink(kv.mnt / "gone")
        assert ioctls.lookup(fd, ["good", "bad", "gone"]) == (1, [True, False, False])


def test_batch__what_another_process_makes_and_takes_is_seen_at_once(kv, folder):
    for _ in range(50):
        in_child(put, kv.dir / "f", b"x")
        assert ioctls.lookup(folder, ["f"]) == (1, [True])
        in_child(os.unlink, kv.dir / "f")
        assert ioctls.lookup(folder, ["f"]) == (0, [False])


def test_batch__of_a_removed_directory(kv):
    (kv.dir / "d").mkdir()
    with ioctls.opened(kv.dir / "d") as fd:
        os.rmdir(kv.dir / "d")
        assert ioctls.lookup(fd, ["a", "b"]) == (0, [False, False])


def test_batch__needs_the_directory_open(kv):
    """S1: who may not read the directory cannot ask; search permission is not asked for."""
    put(kv.dir / "f", b"x")

    def ask():
        with ioctls.opened(kv.dir) as fd:
            return ioctls.lookup(fd, ["f"])[0]

    os.chmod(kv.dir, 0o711)
    as_nobody(fails, errno.EACCES, os.open, kv.dir, os.O_RDONLY)
    os.chmod(kv.dir, 0o744)
    assert as_nobody(ask) == 1
    os.chmod(kv.dir, 0o755)
    with ioctls.opened(kv.dir, os.O_PATH) as fd:
        fails(errno.EBADF, ioctls.lookup, fd, ["f"])


BAD = [
    ("a name that is empty", 2, b"a\0\0", {}, errno.EINVAL),
    ("only an empty name", 1, b"\0\0", {}, errno.EINVAL),
    ("a path", 1, b"a/b\0", {}, errno.EINVAL),
    ("an absolute path", 1, b"/a\0", {}, errno.EINVAL),
    ("the directory itself", 1, b".\0", {}, errno.EINVAL),
    ("the parent", 1, b"..\0", {}, errno.EINVAL),
    ("a name that is too long", 1, b"n" * 1024 + b"\0", {}, errno.ENAMETOOLONG),
    ("one that fills all", 1, b"n" * (ioctls.LOOKUP_BYTES - 1) + b"\0", {}, errno.ENAMETOOLONG),
    ("no NUL at the end", 1, b"abc", {}, errno.EINVAL),
    ("more names than counted", 1, b"a\0b\0", {}, errno.EINVAL),
    ("fewer names than counted", 2, b"abcdef\0", {}, errno.EINVAL),
    ("names but none counted", 0, b"a\0", {}, errno.EINVAL),
    ("a count but no names", 1, b"", {}, errno.EINVAL),
    ("a huge count", 0xFFFFFFFF, b"a\0", {}, errno.EINVAL),
    ("a reserved field", 1, b"a\0", {"reserved": 1}, errno.EINVAL),
    ("an unknown flag", 1, b"a\0", {"flags": 2}, errno.EINVAL),
]


@pytest.mark.parametrize("what, count, names, more, error", BAD, ids=[b[0] for b in BAD])
def test_s2_batch__bad_requests(kv, folder, what, count, names, more, error):
    put(kv.dir / "a", b"x")
    fails(error, lambda: ioctls.lookup_raw(folder, count, len(names), names, **more))
    assert ioctls.lookup(folder, ["a"]) == (1, [True])


@pytest.mark.parametrize("length", (ioctls.LOOKUP_BYTES + 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF))
def test_s2_batch__a_length_that_lies(kv, folder, length):
    fails(errno.EINVAL, ioctls.lookup_raw, folder, 1, length, b"a\0")


def test_s2_ioctls__wrong_descriptors_sizes_and_numbers(kv, folder):
    put(kv.dir / "f", b"x")
    with ioctls.opened(kv.dir / "f") as fd:
        fails(errno.ENOTDIR, ioctls.lookup, fd, ["f"])
        fails(errno.ENOTDIR, ioctls.drop, fd, ioctls.COOL, "f")
        fails(errno.ENOTDIR, ioctls.drop, fd, ioctls.EVICT, "f")
    fails(errno.EISDIR, ioctls.warm, folder)
    for number in (0, 5, 99, 255):
        fails(errno.ENOTTY, ioctls.fcntl.ioctl, folder, ioctls.command(number, 1040),
              bytearray(1040))
    for number, size in ((1, 24), (1, 16383), (2, 8), (3, 1039), (4, 0)):
        fails(errno.ENOTTY, ioctls.fcntl.ioctl, folder, ioctls.command(number, size),
              bytearray(16384))
    for direction in (0, 1, 2):
        fails(errno.ENOTTY, ioctls.fcntl.ioctl, folder,
              ioctls.command(1, ioctls.LOOKUP_SIZE, direction), bytearray(16384))


def test_s2_ioctls__fuzz(kv, folder):
    """Requests made of pieces that each have a meaning, and of noise: an answer or an errno, always."""
    choice = random.Random(11)
    put(kv.dir / "a", b"x")
    words = [b"a", b"a\0", b"\0", b"", b"/", b".", b"..", b"n" * 1023, b"n" * 1024, b"\xff" * 9]
    numbers = [0, 1, 2, 3, 7, 8, 255, 16352, 16353, 0x7FFFFFFF, 0xFFFFFFFF]
    refused = 0
    for _ in range(3000):
        names = b"".join(choice.choice(words) + choice.choice((b"\0", b"\0", b""))
                         for _ in range(choice.randrange(12)))[:ioctls.LOOKUP_BYTES]
        if choice.random() < 0.2:
            names = choice.randbytes(choice.randrange(ioctls.LOOKUP_BYTES))
        count = names.count(b"\0") if choice.random() < 0.5 else choice.choice(numbers)
        length = len(names) if choice.random() < 0.7 else choice.choice(numbers)
        head = struct.pack("<6I", count, length, choice.choice((0, 0, 0, 1, 2)),
                           choice.choice((0, 0, 0, 9)), 1, 1)
        for number, size in ((ioctls.LOOKUP, ioctls.LOOKUP_SIZE), (ioctls.COOL, ioctls.DROP_SIZE),
                             (ioctls.EVICT, ioctls.DROP_SIZE)):
            buffer = bytearray((head + names)[:size].ljust(size, b"\0"))
            try:
                ioctls.fcntl.ioctl(folder, number, buffer)
            except OSError as e:
                refused += 1
                assert e.errno in (errno.EINVAL, errno.ENAMETOOLONG, errno.ENOENT, errno.EBUSY,
                                   errno.EAGAIN)
    assert refused > 1000
    kv.check()


def test_batch__by_many_processes_at_once(kv):
    names = [f"{i:064x}" for i in range(1000)]
    for name in names[:700]:
        put(kv.dir / name, b"x")

    def ask(_):
        with ioctls.opened(kv.dir) as fd:
            return [ioctls.lookup(fd, names)[0] for _ in range(20)]

    assert parallel(ask, range(6)) == [[700] * 20] * 6


def test_batch__while_names_come_and_go(kv, folder):
    """What is there all the time is always found, and what never was never."""
    for i in range(200):
        put(kv.dir / f"stays{i}", b"x")

    def churn():
        for i in range(300):
            put(kv.dir / f"comes{i % 10}", b"y")
            os.unlink(kv.dir / f"comes{i % 10}")

    child = Child(churn)
    names = [f"stays{i}" for i in range(200)] + [f"never{i}" for i in range(50)]
    for _ in range(60):
        assert ioctls.lookup(folder, names) == (200, [True] * 200 + [False] * 50)
    child.result()


# ---- the header ----

PROGRAM = """
#include <kvfs_ioctl.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
int main(int argc, char **argv)
{
	size_t count = (size_t)argc - 3;
	const char *const *names = (const char *const *)argv + 3;
	unsigned char *bitmap = (unsigned char *)malloc(count / 8 + 1);
	int fd = open(argv[1], O_RDONLY | O_DIRECTORY);
	long leading = kvfs_lookup_names(fd, names, count, (unsigned)atoi(argv[2]), bitmap);
	if (leading < 0) {
		perror("lookup");
		return 1;
	}
	printf("%ld ", leading);
	for (size_t i = 0; i < count; i++)
		putchar(bitmap[i / 8] >> (i % 8) & 1 ? '1' : '0');
	return 0;
}
"""


@pytest.mark.parametrize("compiler, source", (("cc", "p.c"), ("c++", "p.cc")))
def test_header__is_complete_and_its_function_works(kv, tmp_path, compiler, source):
    """In C and in C++, with all warnings: thousands of names in one call of the inline function."""
    if not shutil.which(compiler):
        pytest.skip(f"{compiler} is not installed")
    (tmp_path / source).write_text(PROGRAM)
    strict = ["-Wall", "-Wextra", "-Wconversion", "-Wpedantic", "-Werror",
              "-std=c11" if compiler == "cc" else "-std=c++11", "-D_GNU_SOURCE"]
    run(compiler, *strict, "-I", ROOT / "fs", tmp_path / source, "-o", tmp_path / "p")
    names = [f"{i:064x}" for i in range(2000)]
    for name in names[:1000] + names[1500:]:
        put(kv.dir / name, b"x")
    shown = run(tmp_path / "p", kv.dir, "0", *names).stdout
    assert shown == "1000 " + "1" * 1000 + "0" * 500 + "1" * 500
    before = kv.counter("lookup_names")
    shown = run(tmp_path / "p", kv.dir, "1", *names).stdout
    assert shown == "1000 " + "1" * 1000 + "0" * 1000
    assert kv.counter("lookup_names") == before + 1001
    assert run(tmp_path / "p", kv.dir, "0").stdout == "0 "
    for bad, word in (("", "Invalid argument"), ("n" * 1024, "too long"), ("a/b", "Invalid")):
        done = run(tmp_path / "p", kv.dir, "0", names[0], bad, check=False)
        assert done.returncode == 1 and word in done.stderr
    done = run(tmp_path / "p", tmp_path, "0", "a", check=False)
    assert done.returncode == 1 and "ioctl" in done.stderr


def test_r3_a_file_that_is_there_gives_no_transient_error(fresh):
    """Opens and reads under eviction, rewrites and storms: the whole content, or ENOENT."""
    kv = fresh(size="128M", dram="32M")
    paths = [kv.mnt / f"f{i}" for i in range(12)]

    def write(number):
        for turn in range(12):
            for i, path in enumerate(paths):
                replace(path, blob(i, 2 * MIB))
            put(kv.mnt / f"filler{number}-{turn}", blob(turn, 6 * MIB))

    def read(number):
        choice = random.Random(number)
        absent = 0
        for _ in range(150):
            i = choice.randrange(len(paths))
            try:
                assert get(paths[i]) == blob(i, 2 * MIB)
            except FileNotFoundError:
                absent += 1
        return absent

    writers = [Child(write, n) for n in range(2)]
    parallel(read, range(4))
    for child in writers:
        child.result()


def test_p3_who_waited_for_a_first_publish_then_finds_it_without_asking(kv, agent):
    """The entry that was given out while the file was being written is not kept."""
    writer, reader = agent(), agent()
    fd = writer.open(kv.dir / "f", os.O_CREAT | os.O_WRONLY)
    writer.write(fd, b"whole")
    reader.send("read_file", kv.dir / "f")
    writer.close(fd)
    assert reader.receive() == b"whole"
    assert os.path.exists(kv.dir / "f")
    sync(kv.dir / "f")
    assert second_pass_is_free(kv, lambda: exist([kv.dir / "f"] * 100))
