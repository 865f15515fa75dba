# SPDX-License-Identifier: Apache-2.0
"""A user's own mount, without any privilege: everything but speed is the same."""
import os
import shutil
import signal
import subprocess

import pytest
from data import MIB, blob, check_big, get, put, write_big
from kvmount import MountFailed
from procs import NOBODY, as_nobody, eventually, in_child

pytestmark = [
    pytest.mark.parametrize("mode", ["daemon"]),
    pytest.mark.skipif(not shutil.which("fusermount3"),
                       reason="fusermount3 (package fuse3) is not installed")]


@pytest.fixture
def users_own(fresh):
    """Makes a store of uid 65534, which may open /dev/fuse as on most machines; not mounted."""
    def make(**options):
        kv = fresh(mount=False, user=NOBODY, **options)
        if not as_nobody(os.access, "/dev/fuse", os.R_OK | os.W_OK):
            kv.open_fuse_device()
        return kv
    return make


@pytest.fixture
def mine(users_own):
    return users_own(allow_other=False, passthrough="auto").mount()


def test_user_mount_stores_and_loads(mine):
    assert mine.status()["mode"] == "daemon"
    assert mine.status()["mode_reason"]

    def use():
        put(mine.mnt / "f", blob(1, 5 * MIB))
        assert get(mine.mnt / "f") == blob(1, 5 * MIB)
        assert os.stat(mine.mnt / "f").st_uid == NOBODY
        write_big(mine.mnt / "big", 300 * MIB, 2)
        check_big(mine.mnt / "big", 300 * MIB, 2)
        os.rename(mine.mnt / "f", mine.mnt / "g")

    as_nobody(use)
    mine.remount()
    assert as_nobody(get, mine.mnt / "g") == blob(1, 5 * MIB)
    as_nobody(check_big, mine.mnt / "big", 300 * MIB, 2)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_p6_user_mount_sees_how_a_writer_ended(mine, how):
    """The kernel shows exit codes to the same user, without any capability."""
    # A program: who has changed its user since its last exec may not be traced by that user.
    writer = subprocess.Popen(
        ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups",
         "dd", "if=/dev/zero", f"of={mine.mnt}/f", "bs=4k"], stderr=subprocess.DEVNULL)
    eventually(lambda: as_nobody(os.path.exists, mine.mnt / "f"), what="the file")
    writer.send_signal(how)
    assert writer.wait(30) == -how
    assert as_nobody(os.listdir, mine.mnt) == []
    as_nobody(put, mine.mnt / "f", blob(2, MIB))
    assert as_nobody(get, mine.mnt / "f") == blob(2, MIB)
    assert "cannot be seen" not in mine.log()


def test_user_mount_is_closed_to_others(mine):
    as_nobody(put, mine.mnt / "f", b"x")
    with pytest.raises(PermissionError):
        in_child(get, mine.mnt / "f", uid=1234)


def test_the_store_is_closed_to_others(mine):
    assert os.stat(mine.store).st_mode & 0o777 == 0o700
    with pytest.raises(PermissionError):
        in_child(os.listdir, mine.store, uid=1234)


def test_allow_other_needs_the_administrators_leave(users_own):
    if os.path.exists("/etc/fuse.conf"):
        with open("/etc/fuse.conf", encoding="utf-8") as f:
            if any(line.strip() == "user_allow_other" for line in f):
                pytest.skip("this machine's /etc/fuse.conf has user_allow_other")
    kv = users_own()
    with pytest.raises(MountFailed) as e:
        kv.mount()
    assert e.value.status == 1
    assert "allow_other" in e.value.text
    assert os.listdir(kv.mnt) == []


def test_passthrough_on_fails_where_it_is_impossible(users_own):
    kv = users_own(allow_other=False, passthrough="on")
    with pytest.raises(MountFailed) as e:
        kv.mount()
    assert e.value.status == 1
    assert "passthrough" in e.value.text
