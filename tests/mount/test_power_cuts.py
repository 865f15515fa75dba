# SPDX-License-Identifier: Apache-2.0
"""P1: after a power cut at any moment every acknowledged fsync is there, and everything else whole or
absent; and a daemon that does not flush before it commits is found out by the same check.

KVFS_LONG=1: five hundred cuts in all.
"""
import os
import time

import loopdisk
import pytest
from kvmount import build_folder
from manifest import Manifest, check_promises, store
from procs import LONG, Child, eventually

CUTS = 250 if LONG else 25


@pytest.fixture
def victim(fresh):
    """A store on a loop disk, its manifest, and a second Kvfs that looks at what a cut left."""
    if loopdisk.missing():
        pytest.skip(loopdisk.missing())
    made = []

    def make(program=None):
        kv, looker = (fresh(size="400M", dram="64M", mount=False, format=False) for _ in range(2))
        disk = loopdisk.LoopDisk(kv.home)
        made.append((kv, looker, disk))
        kv.store, looker.store = disk.disk / "store", disk.survivor / "store"
        if program:
            path = build_folder() / "tests" / "crash" / program
            if not path.exists():
                pytest.skip(f"{program} is not built")
            kv.programs["kvfsd"] = path
        kv.format()
        os.sync()
        kv.mount()
        return kv, looker, disk, Manifest(kv.home / "manifest")

    yield make
    Child.end_all()
    for kv, looker, disk in made:
        for mount in (looker, kv):
            if mount.daemon is not None:
                mount.umount()
        disk.close()


def cut_and_check(looker, disk, manifest):
    promised = manifest.size()
    with disk.cut():
        looker.mount()
        try:
            check_promises(looker.mnt, manifest, promised)
        finally:
            looker.umount()


def workload(kv, manifest):
    children = [Child(store, kv.mnt, manifest, w, (w + 1) * 1_000_000) for w in range(2)]
    eventually(lambda: manifest.size() > 600 and b"synced" in manifest.path.read_bytes(),
               what="a workload")
    return children


@pytest.mark.timeout(60 + 20 * CUTS)
def test_p1_power_cuts(victim):
    kv, looker, disk, manifest = victim()
    workload(kv, manifest)
    for turn in range(CUTS):
        before = manifest.size()
        cut_and_check(looker, disk, manifest)
        eventually(lambda: manifest.size() > before, what="work between the cuts")
        time.sleep(0.01 * (turn % 10))


def test_p1_a_daemon_that_does_not_flush_is_found_out(victim):
    kv, looker, disk, manifest = victim("kvfsd_unflushed")
    looker.expect_errors(".")
    workload(kv, manifest)
    for _ in range(30):
        try:
            cut_and_check(looker, disk, manifest)
        except (AssertionError, OSError) as e:
            assert isinstance(e, OSError) or "versions" in str(e) or "synced and gone" in str(e)
            return
    pytest.fail("nothing was ever lost")
