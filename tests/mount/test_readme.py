# SPDX-License-Identifier: Apache-2.0
"""What README.md says: its commands run as they stand there, and its tables are those of the programs."""
import os
import re
import subprocess

import pytest
from kvmount import ROOT, build_folder, missing, mount_device
from procs import eventually, run

README = (ROOT / "README.md").read_text()
# Made by quickstart, as a release build: not the build that the other tests are using.
BUILD = "build-readme"


def blocks():
    return re.findall(r"^```sh\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def elsewhere(text, store, mnt):
    """The commands, with the paths of a user's machine moved to places of the test's own."""
    text = text.replace("/var/lib/kvfs", str(store)).replace("build/tools/", f"{BUILD}/tools/")
    text = re.sub(r"(?<![\w/.-])/kv(?![\w-])", str(mnt), text)
    return text.replace("tools/quickstart\n", f"tools/quickstart {mnt}\n")


@pytest.mark.timeout(600)
def test_readme__commands_run(tmp_path):
    """Every command block, from top to bottom, on one machine."""
    if missing():
        pytest.skip(missing())
    store, mnt = tmp_path / "store", tmp_path / "kv"
    environment = {**os.environ, "KVFS_STORE": str(store), "KVFS_SIZE": "1G", "KVFS_BUILD": BUILD}
    environment.pop("KVFSD", None)
    found = blocks()
    assert len(found) >= 3
    try:
        for block in found:
            script = elsewhere(block, store, mnt)
            done = subprocess.run(["bash", "-euo", "pipefail", "-c", script], cwd=ROOT, text=True,
                                  env=environment, capture_output=True, timeout=500, check=False)
            assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"
        again = subprocess.run(["tools/quickstart", mnt], cwd=ROOT, text=True, env=environment,
                               capture_output=True, timeout=500, check=True)
        assert "mounted already" in again.stdout
        assert "umount" in again.stdout
    finally:
        while mount_device(mnt):
            run("umount", mnt, check=False)
            if mount_device(mnt):
                run("umount", "-l", mnt)
        lock = store / "lock"
        # The daemon has ended when it has let go of the store.
        eventually(lambda: not lock.exists() or run("flock", "-n", lock, "true", check=False)
                   .returncode == 0, what="the daemon to end")


def test_readme__options_are_those_of_the_program():
    """The options table names each option of `kvfs mount --help`, with its value and its default."""
    shown = run(build_folder() / "tools" / "kvfs", "mount", "--help").stdout
    program = set(re.findall(r"^  ([a-z_]+(?:=\S+)?) +\(default (\S+)\)$", shown, re.MULTILINE))
    table = {(name.replace("\\|", "|"), default) for name, default in
             re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|", README, re.MULTILINE)}
    assert program and table == program


def test_readme__files_it_names_are_there():
    for name in re.findall(r"`((?:tools|tests|fs|index|subprojects)/[^`* ]*)`", README):
        assert (ROOT / name).exists(), name
