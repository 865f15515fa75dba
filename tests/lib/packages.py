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


def install(requirement):
    """A folder that holds just REQUIREMENT, for PYTHONPATH."""
    folder = CACHE / requirement.replace("==", "-")
    if not folder.exists():
        CACHE.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            _pip("install", "--no-deps", "--target", f"{scratch}/package", requirement)
            Path(scratch, "package").rename(folder)
    return folder


def module_of_wheel(requirement, member):
    """Module MEMBER (a path inside the wheel of REQUIREMENT), loaded unchanged, on its own."""
    folder = CACHE / requirement.replace("==", "-")
    path = folder / member
    if not path.exists():
        CACHE.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            _pip("download", "--no-deps", "--only-binary", ":all:", "-d", scratch, requirement)
            (wheel,) = Path(scratch).glob("*.whl")
            with zipfile.ZipFile(wheel) as z:
                if member not in z.namelist():
                    pytest.fail(f"{wheel.name} has no {member}")
                data = z.read(member)
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(".part")
            part.write_bytes(data)
            part.rename(path)
    name = f"{path.stem}_of_{requirement.split('=')[0]}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
