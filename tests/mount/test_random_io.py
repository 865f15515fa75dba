# SPDX-License-Identifier: Apache-2.0
"""P2, P4, R4: random operations, by several processes, compared with a model byte for byte.

The same sequences run in a plain directory, so a wrong model shows there.
"""
import os
import random

import pytest
from data import blob, get, put, snapshot
from fsx import Fsx
from procs import parallel

SEED = int(os.environ.get("KVFS_SEED", "1"))


@pytest.mark.parametrize("seed", range(SEED, SEED + 4))
def test_random_operations(place, seed):
    Fsx(place / "f.0", seed).run(400)


def test_random_operations_with_direct_io(kv):
    Fsx(kv.dir / "f.0", SEED + 100).run(400, direct=True)


def test_random_operations_on_a_small_file(place):
    Fsx(place / "f.0", SEED + 200, limit=20_000).run(1500)


def test_random_operations_by_several_processes(place):
    def work(seed):
        folder = place / f"p{seed}"
        folder.mkdir()
        Fsx(folder / "f.0", seed).run(200)

    parallel(work, range(SEED + 300, SEED + 304))


ACTIONS = ("put", "put", "append", "rename", "link", "unlink", "mkdir", "rmdir", "symlink", "chmod",
           "truncate", "xattr")


def tree_operations(root, seed, count):
    """Random names made, rewritten, renamed, linked and removed under ROOT, as SEED says."""
    choice = random.Random(seed)
    names = [f"{folder}{n}" for folder in ("", "d1/", "d2/", "d2/d3/") for n in "abcdef"]
    results = []
    for folder in ("d1", "d2", "d2/d3"):
        os.makedirs(root / folder, exist_ok=True)
    for step in range(count):
        one, two = root / choice.choice(names), root / choice.choice(names)
        action = choice.choice(ACTIONS)
        length = choice.choice((0, 10, 5000, 200_000))
        try:
            match action:
                case "put":
                    put(one, blob(step, length))
                case "append":
                    with open(one, "ab") as f:
                        f.write(blob(step, length))
                case "rename":
                    os.rename(one, two)
                case "link":
                    os.link(one, two, follow_symlinks=False)
                case "unlink":
                    os.unlink(one)
                case "mkdir":
                    os.mkdir(one)
                case "rmdir":
                    os.rmdir(one)
                case "symlink":
                    os.symlink(two.name, one)
                case "chmod":
                    os.chmod(one, choice.choice((0o600, 0o644, 0o755)))
                case "truncate":
                    os.truncate(one, length)
                case "xattr":
                    os.setxattr(one, "user.t", blob(step, length % 3000))
            results.append((step, action, 0))
        except OSError as e:
            results.append((step, action, e.errno))
    return results


@pytest.mark.parametrize("seed", range(SEED, SEED + 3))
def test_random_names_as_elsewhere(kv, elsewhere, seed):
    expected = tree_operations(elsewhere, seed, 500)
    got = tree_operations(kv.dir, seed, 500)
    for one, other in zip(got, expected, strict=True):
        assert one == other, f"seed {seed}"
    assert snapshot(kv.dir) == snapshot(elsewhere), f"seed {seed}"


def test_random_names_by_several_processes(kv, elsewhere):
    def work(seed):
        for root in (elsewhere, kv.dir):
            (root / str(seed)).mkdir()
        return (tree_operations(kv.dir / str(seed), seed, 300)
                == tree_operations(elsewhere / str(seed), seed, 300))

    assert parallel(work, range(SEED + 10, SEED + 14)) == [True] * 4
    assert snapshot(kv.dir) == snapshot(elsewhere)


def test_whole_files_by_several_writers_and_readers(kv):
    """P2: whoever opens a name finds one whole content, whichever writer it came from."""
    names = [f"f{i}" for i in range(6)]
    size = 300_000
    contents = {blob(w * 100 + r, size) for w in range(3) for r in range(8)}
    for name in names:
        put(kv.dir / name, blob(0, size))

    def writer(number):
        for r in range(8):
            for name in names:
                data = blob(number * 100 + r, size)
                temporary = kv.dir / f"{name}.{number}"
                put(temporary, data)
                os.rename(temporary, kv.dir / name)

    def reader(number):
        choice = random.Random(number)
        for _ in range(150):
            assert get(kv.dir / choice.choice(names)) in contents

    parallel(lambda job: job[0](job[1]),
             [(writer, n) for n in range(3)] + [(reader, n) for n in range(3)])
    for name in names:
        assert get(kv.dir / name) in contents
