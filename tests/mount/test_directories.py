# SPDX-License-Identifier: Apache-2.0
"""K4: large directories, listings while names come and go, races for one name."""
import os
import random

import pytest
from data import blob, get, put
from procs import Child, parallel
from syscalls import Directory

MANY = 100_000


def make_nodes(folder, numbers):
    for i in numbers:
        os.mknod(folder / f"f{i:06}", 0o100644)


def make_files(folder, numbers):
    for i in numbers:
        os.close(os.open(folder / f"f{i:06}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))


def test_k4_100_000_files_in_one_directory(kv):
    folder = kv.dir / "big"
    folder.mkdir()
    parallel(lambda n: (make_files, make_nodes)[n](folder, range(n, MANY, 2)), range(2), timeout=200)
    names = os.listdir(folder)
    assert len(names) == MANY and len(set(names)) == MANY
    choice = random.Random(1)
    for i in choice.sample(range(MANY), 2000):
        assert os.stat(folder / f"f{i:06}").st_size == 0
    seen = 0
    for entry in os.scandir(folder):
        assert entry.is_file(follow_symlinks=False)
        seen += 1
    assert seen == MANY
    parallel(lambda n: [os.unlink(folder / f"f{i:06}") for i in range(n, MANY, 2)], range(2),
             timeout=200)
    assert os.listdir(folder) == []
    folder.rmdir()


def test_listing_has_dots_and_types(place):
    put(place / "f", b"x")
    os.mkdir(place / "d")
    os.symlink("x", place / "l")
    with Directory(place) as d:
        names = set()
        while (name := d.read()) is not None:
            names.add(name)
    assert names == {b".", b"..", b"f", b"d", b"l"}
    kinds = {e.name: "f" * e.is_file(follow_symlinks=False) + "d" * e.is_dir(follow_symlinks=False)
             + "l" * e.is_symlink() for e in os.scandir(place)}
    assert kinds == {"f": "f", "d": "d", "l": "l"}
    assert {e.name: e.inode() for e in os.scandir(place)} == {
        n: os.lstat(place / n).st_ino for n in ("f", "d", "l")}


def test_seekdir_returns_to_every_place(place):
    make_files(place, range(500))
    with Directory(place) as d:
        walked = []
        while True:
            at = d.tell()
            name = d.read()
            if name is None:
                break
            walked.append((at, name))
        assert len({name for _, name in walked}) == 502
        for at, name in random.Random(2).sample(walked, 100):
            d.seek(at)
            assert d.read() == name
        d.rewind()
        assert d.read() == walked[0][1]


def test_places_stay_valid_while_names_come_and_go(place):
    make_files(place, range(1000))
    with Directory(place) as d:
        for _ in range(300):
            d.read()
        at = d.tell()
        following = d.read()
        for i in range(0, 1000, 7):
            path = place / f"f{i:06}"
            if os.fsencode(path.name) != following:
                path.unlink()
        make_files(place, range(2000, 2300))
        d.seek(at)
        # A name made meanwhile may come first: the order is not that of making.
        while (name := d.read()).startswith(b"f002"):
            pass
        assert name == following


def test_listing_while_names_come_and_go(place):
    """Every name that is there all the time is listed exactly once."""
    folder = place / "d"
    folder.mkdir()
    make_files(folder, range(2000))

    def churn(number):
        for _ in range(8):
            numbers = range(10_000 * (number + 1), 10_000 * (number + 1) + 200)
            make_files(folder, numbers)
            for i in numbers:
                os.unlink(folder / f"f{i:06}")

    stable = {f"f{i:06}" for i in range(2000)}
    children = [Child(churn, n) for n in range(2)]
    for _ in range(15):
        names = os.listdir(folder)
        kept = [n for n in names if n in stable]
        assert len(kept) == len(stable) and set(kept) == stable
    for child in children:
        child.result()
    assert set(os.listdir(folder)) == stable


def test_unlinking_while_listing_removes_all(place):
    make_files(place, range(3000))
    with Directory(place) as d:
        while (name := d.read()) is not None:
            if name not in (b".", b".."):
                os.unlink(os.path.join(os.fsencode(place), name))
    assert os.listdir(place) == []


def test_one_of_many_wins_o_excl(place):
    def race(_):
        won = []
        for i in range(100):
            try:
                fd = os.open(place / f"lock{i}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            except FileExistsError:
                continue
            os.close(fd)
            won.append(i)
        return won

    assert sorted(sum(parallel(race, range(8)), [])) == list(range(100))


def test_one_of_many_wins_mkdir_link_and_noreplace(place):
    put(place / "source", b"x")

    def race(number):
        won = {"mkdir": 0, "link": 0}
        for i in range(60):
            for name, func in (("mkdir", lambda p: os.mkdir(p)),
                               ("link", lambda p: os.link(place / "source", p))):
                try:
                    func(place / f"{name}{i}")
                    won[name] += 1
                except FileExistsError:
                    pass
        return won

    results = parallel(race, range(6))
    assert [sum(r[k] for r in results) for k in ("mkdir", "link")] == [60, 60]


def test_open_creat_storm(place):
    """Everybody opens the same names with O_CREAT; nobody may fail."""
    def storm(number):
        for i in range(150):
            fd = os.open(place / f"s{i % 10}", os.O_CREAT | os.O_RDWR, 0o644)
            os.pwrite(fd, f"{number}".encode() * 100, 0)
            os.close(fd)

    parallel(storm, range(6))
    assert len(os.listdir(place)) == 10
    for i in range(10):
        assert get(place / f"s{i}") in {f"{n}".encode() * 100 for n in range(6)}


def test_open_creat_and_unlink_storm(place):
    def storm(number):
        choice = random.Random(number)
        for _ in range(200):
            path = place / f"s{choice.randrange(5)}"
            try:
                if choice.random() < 0.4:
                    os.unlink(path)
                else:
                    put(path, bytes([number]) * 1000)
            except FileNotFoundError:
                pass

    parallel(storm, range(6))
    for name in os.listdir(place):
        assert get(place / name) in {bytes([n]) * 1000 for n in range(6)}


def test_makedirs_race(place):
    def make(_):
        for i in range(40):
            os.makedirs(place / "a" / f"b{i % 4}" / f"c{i}" / "d", exist_ok=True)

    parallel(make, range(6))
    assert sorted(os.listdir(place / "a")) == ["b0", "b1", "b2", "b3"]
    assert sum(len(os.listdir(place / "a" / f"b{i}")) for i in range(4)) == 40


def test_rename_races_lose_and_double_nothing(place):
    """Tokens moved around by many processes: in the end each is somewhere, once."""
    count = 20
    for d in range(3):
        os.mkdir(place / f"d{d}")
    for i in range(count):
        put(place / "d0" / f"t{i}", b"%d" % i)

    def move(number):
        choice = random.Random(number)
        for _ in range(300):
            name = f"t{choice.randrange(count)}"
            try:
                os.rename(place / f"d{choice.randrange(3)}" / name,
                          place / f"d{choice.randrange(3)}" / name)
            except FileNotFoundError:
                pass

    parallel(move, range(6))
    found = sorted(n for d in range(3) for n in os.listdir(place / f"d{d}"))
    assert found == sorted(f"t{i}" for i in range(count))
    for d in range(3):
        for name in os.listdir(place / f"d{d}"):
            assert get(place / f"d{d}" / name) == name[1:].encode()


def test_directory_rename_races(place):
    """Directories moved into each other's way never make a loop or lose their content."""
    for d in "abc":
        os.makedirs(place / d / "inner")
        put(place / d / "inner" / "f", d.encode())

    def move(number):
        choice = random.Random(number)
        for _ in range(200):
            old = choice.choice(["a", "b", "c", "a/b", "b/c", "c/a"])
            new = choice.choice(["a", "b", "c", "a/b", "b/c", "c/a"])
            try:
                os.rename(place / old, place / new)
            except OSError:
                pass

    parallel(move, range(4))
    found = sorted(get(os.path.join(folder, "f"))
                   for folder, _, files in os.walk(place) if "f" in files)
    assert found == [b"a", b"b", b"c"]


def test_visible_to_others_at_once(place, agent):
    """No stale negative entry: what one process made, another finds."""
    other = agent()
    for i in range(100):
        with pytest.raises(FileNotFoundError):
            other.read_file(place / f"n{i}")
        put(place / f"n{i}.tmp", blob(i, 100))
        os.rename(place / f"n{i}.tmp", place / f"n{i}")
        assert other.read_file(place / f"n{i}") == blob(i, 100)
        os.unlink(place / f"n{i}")
        with pytest.raises(FileNotFoundError):
            other.read_file(place / f"n{i}")
