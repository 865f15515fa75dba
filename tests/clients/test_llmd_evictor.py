# SPDX-License-Identifier: Apache-2.0
"""llm-d's pvc_evictor: a deployment of its own that looks after the volume where engines store blocks.

It is not in the package index, so what its processes do with the volume is done here, after its
processes/crawler.py, activator, deleter.py, folder_cleaner.py and utils/system.py: statvfs tells whether
to delete, scandir at four levels and each file's atime tell what, `xargs -0 rm -f` deletes in batches,
rmdir takes the folders that came empty. Engines go on storing and loading meanwhile, and touch the atime
of what they find stored.
"""
import os
import re
import subprocess
import time

from data import KIB, blob, get, put
from procs import Child, eventually

BLOCK = 128 * KIB
COUNT = 300
HOT_SECONDS = 3600
START, STOP = 0.50, 0.25  # 0.85 and 0.70 by default, where kvfs keeps the store below by itself


def path_of(root, i):
    name = f"{i * 2654435761 % (1 << 64):064x}"[::-1]
    return root / "Qwen_Qwen3-8B_0123456789ab_r0" / name[:3] / f"{name[3:5]}_g0" / f"{name}.bin"


def usage(root):
    info = os.statvfs(root)
    assert info.f_frsize == 4096
    return (info.f_blocks - info.f_bfree) / info.f_blocks


def crawl(root):
    """Files whose atime is not recent, as they are found; folders may go while it looks."""
    def entries(path):
        try:
            return list(os.scandir(path))
        except OSError:
            return []

    for rank in entries(root):
        if not (rank.is_dir(follow_symlinks=False) and re.search(r"_r\d+$", rank.name)):
            continue
        for first in entries(rank.path):
            assert first.is_dir() and len(first.name) == 3
            for second in entries(first.path):
                for file in entries(second.path):
                    if not (file.is_file() and file.name.endswith(".bin")):
                        continue
                    try:
                        atime = os.stat(file.path).st_atime
                    except FileNotFoundError:
                        continue
                    if time.time() - atime >= HOT_SECONDS:
                        yield file.path


def delete(paths):
    done = subprocess.run(["xargs", "-0", "rm", "-f"], input="\0".join(paths).encode(),
                          capture_output=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    for folder in {os.path.dirname(path) for path in paths}:
        for empty in (folder, os.path.dirname(folder)):
            try:
                os.rmdir(empty)
            except OSError:
                break


def evict(root):
    """Deletes in batches until enough is free, or all that is left is hot; how many files."""
    deleted = 0
    if usage(root) < START:
        return 0
    batch = []
    for path in crawl(root):
        batch.append(path)
        if len(batch) == 20:
            delete(batch)
            deleted += len(batch)
            batch = []
            if usage(root) <= STOP:
                return deleted
    if batch:
        delete(batch)
    return deleted + len(batch)


def store(path, i):
    """Skips what is there, but for the atime; makes the folders again if the evictor took them."""
    try:
        with open(path, "rb"):
            pass
        os.utime(path, ns=(time.time_ns(), os.stat(path).st_mtime_ns))
        return
    except FileNotFoundError:
        pass
    temporary = f"{path}_{os.getpid():08x}.tmp"
    for _ in range(100):
        os.makedirs(path.parent, exist_ok=True)
        try:
            put(temporary, blob(i, BLOCK))
            os.rename(temporary, path)
            return
        except FileNotFoundError:
            continue
    raise AssertionError("the folder went a hundred times")


def test_evictor_beside_engines(fresh):
    kv = fresh(size="64M", dram="32M")
    old = time.time() - 2 * HOT_SECONDS
    for i in range(COUNT):
        store(path_of(kv.mnt, i), i)
        if i % 3:
            os.utime(path_of(kv.mnt, i), (old, old))
    assert usage(kv.mnt) > START

    def engine():
        """Uses the hot blocks, and stores new ones into the folders that are being emptied."""
        for turn in range(3):
            for i in range(0, COUNT, 3):
                assert get(path_of(kv.mnt, i)) == blob(i, BLOCK)
                store(path_of(kv.mnt, i), i)
                number = COUNT + turn * 20 + i % 20
                store(path_of(kv.mnt, number), number)

    worker = Child(engine)
    deleted = evict(kv.mnt)
    worker.result()
    assert deleted >= 100
    left = [i for i in range(COUNT) if path_of(kv.mnt, i).exists()]
    assert len(left) == COUNT - deleted
    assert {i for i in range(COUNT) if i % 3 == 0} <= set(left), "hot blocks were taken"
    for i in (*left, *range(COUNT, COUNT + 60)):
        assert get(path_of(kv.mnt, i)) == blob(i, BLOCK)
    assert not list(kv.mnt.rglob("*.tmp"))


def test_statvfs_follows_deletion(fresh):
    """The activator turns off by what statvfs says: space comes back by itself, with no other call."""
    kv = fresh(size="256M")  # where no other test's files are still being freed
    before = os.statvfs(kv.mnt).f_bfree
    for i in range(40):
        put(kv.dir / f"{i}", blob(i, BLOCK))
    full = os.statvfs(kv.mnt).f_bfree
    assert full <= before - 40 * BLOCK // 4096
    delete([os.fspath(kv.dir / f"{i}") for i in range(20)])
    eventually(lambda: os.statvfs(kv.mnt).f_bfree >= full + 20 * BLOCK // 4096, what="free space")
