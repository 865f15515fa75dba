# SPDX-License-Identifier: Apache-2.0
"""The programs people look after a cache with, on trees compared with a plain directory."""
import os
import shutil
import sqlite3

import pytest
from data import MIB, blob, get, put, snapshot, sync
from procs import eventually, run


def needs(program):
    if not shutil.which(program):
        pytest.skip(f"{program} is not installed")


@pytest.fixture
def tree(elsewhere):
    """A tree with all that a tree can have, in a plain directory."""
    root = elsewhere / "tree"
    (root / "d" / "e").mkdir(parents=True)
    for i, size in enumerate((0, 1, 100, 4096, 70_000, MIB, 3 * MIB + 1)):
        put(root / "d" / f"f{i}", blob(i, size))
        os.utime(root / "d" / f"f{i}", (1_600_000_000 + i, 1_700_000_000 + i))
    os.link(root / "d" / "f3", root / "d" / "e" / "hard")
    os.symlink("../f1", root / "d" / "e" / "soft")
    os.symlink("nowhere", root / "dangling")
    put(root / "größe name", b"odd name")
    fd = os.open(root / "sparse", os.O_CREAT | os.O_WRONLY, 0o644)
    os.pwrite(fd, b"tail", 20 * MIB)
    os.close(fd)
    for name, mode in (("d/f1", 0o600), ("d/f2", 0o755), ("d/e", 0o750), ("d/f4", 0o4755)):
        os.chmod(root / name, mode)
    os.chown(root / "d" / "f2", 12, 34)
    os.setxattr(root / "d" / "f1", "user.kind", b"value")
    return root


def test_cp_r_and_back(kv, tree, elsewhere):
    run("cp", "-a", tree, kv.dir / "copy")
    assert snapshot(kv.dir / "copy", times=True) == snapshot(tree, times=True)
    run("cp", "-a", kv.dir / "copy", kv.dir / "again")
    run("cp", "-a", kv.dir / "again", elsewhere / "back")
    assert snapshot(elsewhere / "back", times=True) == snapshot(tree, times=True)
    run("cp", "-r", tree, kv.dir / "plain-copy")
    run("diff", "-r", "--no-dereference", tree, kv.dir / "plain-copy")


def test_cp_of_a_file_shares_its_extents(kv):
    put(kv.dir / "a", blob(1, 40 * MIB))
    sync(kv.dir / "a")
    used = kv.status()["store_used"]
    run("cp", kv.dir / "a", kv.dir / "b")
    sync(kv.dir / "b")
    assert get(kv.dir / "b") == get(kv.dir / "a")
    assert kv.extents(kv.dir / "b") == kv.extents(kv.dir / "a")
    assert kv.status()["store_used"] <= used + 2 * MIB


def test_rsync(kv, tree, elsewhere):
    needs("rsync")
    run("rsync", "-aHX", f"{tree}/", f"{kv.dir}/copy/")
    assert snapshot(kv.dir / "copy") == snapshot(tree)
    put(tree / "d" / "f5", blob(99, MIB + 5))
    os.unlink(tree / "d" / "f0")
    os.chmod(tree / "d" / "f1", 0o640)
    run("rsync", "-aHX", "--delete", f"{tree}/", f"{kv.dir}/copy/")
    assert snapshot(kv.dir / "copy") == snapshot(tree)
    assert run("rsync", "-aHXin", "--delete", f"{tree}/", f"{kv.dir}/copy/").stdout == ""
    with open(tree / "d" / "f6", "r+b") as f:
        f.seek(MIB)
        f.write(b"a small change")
    run("rsync", "-a", "--inplace", "--no-whole-file", tree / "d" / "f6",
        kv.dir / "copy" / "d" / "f6")
    assert get(kv.dir / "copy" / "d" / "f6") == get(tree / "d" / "f6")
    run("rsync", "-aHX", f"{kv.dir}/copy/", f"{elsewhere}/back/")


@pytest.mark.parametrize("sparse", ([], ["--sparse"]))
def test_tar(kv, tree, sparse):
    run("tar", *sparse, "--xattrs", "-C", tree, "-cf", kv.dir / "t.tar", ".")
    (kv.dir / "out").mkdir()
    run("tar", "--xattrs", "-C", kv.dir / "out", "-xpf", kv.dir / "t.tar")
    assert snapshot(kv.dir / "out", times=True) == snapshot(tree, times=True)
    run("tar", "-C", kv.dir / "out", "-df", kv.dir / "t.tar")


def test_dd(kv):
    source, target = kv.dir / "in", kv.dir / "out"
    put(source, blob(1, 10 * MIB + 100))
    for extra in ([], ["oflag=direct", "iflag=direct"], ["conv=fsync"], ["oflag=sync"]):
        run("dd", f"if={source}", f"of={target}", "bs=64K", *extra)
        assert get(target) == get(source)
    run("dd", f"if={source}", f"of={target}", "bs=1000", "count=3", "seek=7", "conv=notrunc")
    data = get(source)
    assert get(target) == data[:7000] + data[:3000] + data[10_000:]
    run("dd", "if=/dev/zero", f"of={kv.dir / 'z'}", "bs=1", "count=0", "seek=1G")
    assert os.stat(kv.dir / "z").st_size == 1 << 30
    assert os.stat(kv.dir / "z").st_blocks < 100


def test_truncate_du_find_stat_df(kv):
    put(kv.dir / "a", blob(1, 5 * MIB))
    sync(kv.dir / "a")
    run("truncate", "-s", "100M", kv.dir / "s")
    assert os.stat(kv.dir / "s").st_size == 100 * MIB
    du = {line.split("\t")[1]: int(line.split("\t")[0]) for line in
          run("du", "-k", kv.dir / "a", kv.dir / "s").stdout.splitlines()}
    assert 5 * 1024 <= du[os.fspath(kv.dir / "a")] <= 6 * 1024
    assert du[os.fspath(kv.dir / "s")] <= 1024
    assert run("du", "-b", kv.dir / "s").stdout.split()[0] == str(100 * MIB)
    os.makedirs(kv.dir / "x" / "y" / "z")
    put(kv.dir / "x" / "y" / "old", b"1")
    os.utime(kv.dir / "x" / "y" / "old", (1000, 1000))
    found = run("find", kv.dir, "-type", "f", "-size", "+1M").stdout.split()
    assert sorted(found) == [os.fspath(kv.dir / n) for n in ("a", "s")]
    assert run("find", kv.dir, "-mtime", "+100").stdout.split() == [
        os.fspath(kv.dir / "x" / "y" / "old")]
    assert len(run("find", kv.dir, "-type", "d").stdout.splitlines()) == 4
    assert run("df", "-B1", "--output=fstype", kv.dir).stdout.split()[1].startswith("fuse")
    run("find", kv.dir / "x", "-delete")
    assert not os.path.exists(kv.dir / "x")


def test_ls_mv_rm_and_back_from_elsewhere(kv, elsewhere):
    for i in range(20):
        put(kv.dir / f"f{i:02}", b"x" * i)
        os.utime(kv.dir / f"f{i:02}", (1000 + i, 1000 + i))
    assert run("ls", "-tr", kv.dir).stdout.split() == [f"f{i:02}" for i in range(20)]
    (kv.dir / "d").mkdir()
    run("mv", *(kv.dir / f"f{i:02}" for i in range(10)), kv.dir / "d")
    assert len(os.listdir(kv.dir / "d")) == 10
    run("mv", kv.dir / "d", elsewhere / "d")
    run("mv", elsewhere / "d", kv.dir / "d")
    assert get(kv.dir / "d" / "f09") == b"x" * 9
    run("rm", "-r", kv.dir / "d")
    assert len(os.listdir(kv.dir)) == 10


def test_append_and_edit_in_place_by_shell(kv):
    run("sh", "-c", "for i in 1 2 3; do echo line $i >>log; done; sed -i s/2/two/ log; "
        "cat log log >both; wc -l <both >count", cwd=kv.dir)
    assert get(kv.dir / "log") == b"line 1\nline two\nline 3\n"
    assert get(kv.dir / "count").strip() == b"6"


def test_programs_run_and_are_mapped_from_the_mount(kv):
    shutil.copy("/bin/true", kv.dir / "true")
    shutil.copy("/bin/cat", kv.dir / "cat")
    put(kv.dir / "f", b"content")
    run(kv.dir / "true")
    assert run(kv.dir / "cat", kv.dir / "f").stdout == "content"


def test_sqlite_on_the_mount(kv):
    """Locks, fsync, rewriting in place and truncation, as a database does them."""
    for journal in ("delete", "truncate", "wal"):
        path = kv.dir / f"{journal}.db"
        with sqlite3.connect(path) as db:
            db.execute(f"pragma journal_mode={journal}")
            db.execute("create table t (k integer primary key, v blob)")
            for i in range(30):
                with db:
                    db.execute("insert into t values (?, ?)", (i, blob(i, 3000)))
        db.close()
        db = sqlite3.connect(path)
        assert db.execute("pragma integrity_check").fetchone() == ("ok",)
        assert [v for _, v in db.execute("select * from t order by k")] == [
            blob(i, 3000) for i in range(30)]
        db.close()


def test_sync_waits_for_durability(kv):
    put(kv.dir / "f", blob(1, MIB))
    run("sync", kv.dir / "f")
    assert kv.stat(kv.dir / "f")["checksum"] == "stored"
    put(kv.dir / "g", blob(2, MIB))
    run("sync", "-f", kv.dir)
    eventually(lambda: kv.stat(kv.dir / "g")["checksum"] == "stored", what="the write-back")
