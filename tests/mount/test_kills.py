# SPDX-License-Identifier: Apache-2.0
"""P1: the daemon dies at every named place of its code, many times; and a daemon that publishes too
early is found out by the same check.

KVFS_LONG=1: a thousand times in all.
"""
import errno
import os
import random
import signal
import time

import pytest
from kvmount import MountFailed, build_folder
from manifest import Manifest, check_promises, store
from procs import LONG, Child, eventually

PLACES = ("writeback-written", "commit-flushed", "commit-published", "publish-before",
          "publish-after", "index-filled", "index-committed", "index-synced")
ROUNDS = 63 if LONG else 4


def use(kv, program):
    """Lets KV be served by another daemon, if the build has it."""
    path = build_folder() / "tests" / "crash" / program
    if not path.exists():
        pytest.skip(f"{program} is not built")
    kv.programs["kvfsd"] = path


def workers(kv, manifest, turn):
    return [Child(store, kv.mnt, manifest, w, (turn * 2 + w + 1) * 100_000) for w in range(2)]


def died(kv, children, timeout=60):
    """The daemon has ended itself, and not otherwise; its clients have noticed on the dead mount."""
    assert kv.daemon.wait(timeout) == -signal.SIGKILL, kv.log_tail()
    for child in children:
        child.result(timeout)
    kv.destroy()


def check_or_died(kv, manifest):
    """Compares; False if the daemon died meanwhile."""
    try:
        check_promises(kv.mnt, manifest)
    except OSError as e:
        if e.errno not in (errno.ENOTCONN, errno.ECONNABORTED):
            raise
        return False
    return True


@pytest.mark.timeout(3600 if ROUNDS > 4 else 300)
def test_p1_killed_at_every_named_place(fresh, monkeypatch):
    kv = fresh(size="1G", dram="64M", mount=False)
    use(kv, "kvfsd_points")
    manifest = Manifest(kv.home / "manifest")
    choice = random.Random(1)
    checks, turns = 0, [(p, r) for r in range(ROUNDS) for p in PLACES]
    for turn, (place, _) in enumerate(turns):
        monkeypatch.setenv("KV_CRASH_AT", f"{place}:{choice.randrange(2, 30)}")
        try:
            kv.mount()
        except (MountFailed, AssertionError):
            continue  # it came there while it mounted: the next one looks at what is left
        # What the kill before has left, seen by a daemon that is to be killed next.
        if turn > 0 and check_or_died(kv, manifest):
            checks += 1
        died(kv, workers(kv, manifest, turn))
    monkeypatch.delenv("KV_CRASH_AT")
    kv.mount()
    check_promises(kv.mnt, manifest)
    assert checks > len(turns) / 2, "too few rounds were looked at"


def test_p1_a_daemon_that_publishes_early_is_found_out(fresh):
    kv = fresh(size="1G", dram="64M", mount=False)
    use(kv, "kvfsd_early")
    kv.expect_errors(".")
    manifest = Manifest(kv.home / "manifest")
    for turn in range(20):
        kv.mount()
        before = os.stat(manifest.path).st_size
        children = workers(kv, manifest, turn)
        eventually(lambda: os.stat(manifest.path).st_size > before + 300, what="a workload")
        time.sleep(0.05 * turn)
        kv.check()
        kv.daemon.kill()
        died(kv, children)
        kv.mount()
        try:
            check_promises(kv.mnt, manifest)
        except (AssertionError, FileNotFoundError) as e:
            assert "none of the versions" in str(e) or isinstance(e, FileNotFoundError)
            return
        kv.umount()
    pytest.fail("names without content were never seen")
