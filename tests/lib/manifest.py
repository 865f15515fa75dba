# SPDX-License-Identifier: Apache-2.0
"""A workload without end that keeps a manifest, and the check of what survived against that.

The guards: the manifest must not be empty, the right process must have been killed (Kvfs.kill
checks), and everything is read again from the device through an empty cache.
"""
import os
import random
from pathlib import Path

from data import MIB, blob, get, put, sync


class Manifest:
    """What the workload tried and was promised, one line each, in a file outside the mount."""

    def __init__(self, path):
        self.path = path
        self.fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)

    def add(self, kind, name, seed):
        os.write(self.fd, f"{kind} {name} {seed}\n".encode())

    def size(self):
        return os.stat(self.path).st_size

    def read(self, promised=None):
        """{name: seeds tried}, {name: last seed synced}, the latter of the first PROMISED bytes."""
        tried, synced, at = {}, {}, 0
        with open(self.path, encoding="ascii") as f:
            for line in f:
                at += len(line)
                kind, name, seed = line.split()
                if kind == "try":
                    tried.setdefault(name, []).append(int(seed))
                elif kind == "synced" and (promised is None or at <= promised):
                    synced[name] = int(seed)
        assert tried and synced, "the manifest is empty: this round proves nothing"
        return tried, synced


def content(seed):
    return blob(seed, random.Random(seed).choice((10, 4096, 60_000, MIB + 17, 3 * MIB)))


def store(root, manifest, worker, seed):
    """Stores without end: new names by temporary file and rename, others in place, some synced."""
    choice = random.Random(seed)
    try:
        os.chdir(root)  # not by path: the mount goes with its daemon, and the path leads below it
    except OSError:
        return  # the daemon is gone already
    if not os.path.ismount("."):
        return  # and the mount is, too
    root = Path()
    while True:
        seed += 1
        name = f"w{worker}-{choice.randrange(40)}"
        path, data = root / name, content(seed)
        manifest.add("try", name, seed)
        try:
            if choice.random() < 0.5:
                put(root / f"{name}.tmp", data)
                os.rename(root / f"{name}.tmp", path)
            else:
                put(path, data)
            if choice.random() < 0.2:
                sync(path)
                manifest.add("synced", name, seed)
        except OSError:
            return  # the daemon is gone


def check_promises(root, manifest, promised=None):
    """
    Every file is one that was stored, whole; a synced one is that version or a later one.

    Of the manifest only the first PROMISED bytes promise something; None: all.
    """
    tried, synced = manifest.read(promised)
    names = os.listdir(root)
    for name in names:
        data, base = get(root / name), name.removesuffix(".tmp")
        oldest = synced.get(name, 0)
        seeds = [s for s in reversed(tried[base]) if s >= oldest]
        assert any(data == content(s) for s in seeds), \
            f"{name}: {len(data)} bytes of none of the versions {seeds}"
    missing = set(synced) - set(names)
    assert not missing, f"synced and gone: {missing}"
    assert names
