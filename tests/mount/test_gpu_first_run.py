# SPDX-License-Identifier: Apache-2.0
"""tools/bench/h200, the first run on a GPU, tried on the fake driver and on the backend host."""
import os
import re
import subprocess
import tempfile
from pathlib import Path

import pytest
from kvmount import missing

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("KVFS_BUILD", ROOT / "build")).resolve()
FAKE = BUILD / "tests/gpu/fake"
NOT_REAL = "NO REAL DEVICE was used: no number above says anything about one."


def first_run(tmp_path, *options, **environment):
    """The output of the script, and its numbers by name."""
    log = tmp_path / "h200.log"
    result = subprocess.run(
        [ROOT / "tools/bench/h200", "--build", BUILD, "--quick", "--log", log, *options],
        capture_output=True, text=True, check=False, timeout=500,
        env={**os.environ, "FAKECUFILE_OVERLAY": "1", **environment})
    assert result.returncode == 0, result.stdout + result.stderr
    assert log.read_text() == result.stdout
    numbers = re.findall(r"^(\S+) +([0-9.]+) \S", result.stdout, re.MULTILINE)
    return result.stdout, {name: float(value) for name, value in numbers}


@pytest.mark.timeout(600)
def test_on_the_fake_driver(tmp_path):
    """Every question is answered, the link is used as it should be, and nobody takes it for real."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as devices:
        output, numbers = first_run(tmp_path, "--libraries", FAKE, "--dir", "/var/tmp",
                                    FAKECU_DIR=devices)
    assert NOT_REAL in output
    assert " 0 failed" in output
    assert 54 < numbers["peak.to_device"] < 55.7
    # The helper's ring: 8 MiB and two streams.
    assert numbers["ring.8M.slots8.streams2"] >= 0.99
    assert numbers["ring.1M.slots8.streams1"] < 0.95
    assert numbers["runs.64K.batch"] >= 0.75
    assert numbers["runs.64K.batch"] > 1.9 * numbers["runs.64K.single"]
    assert numbers["runs.2048K.batch"] >= 0.93
    assert "share.readers: all 3 see the same bytes" in output
    assert "share.store_by_reader: the owner's bytes are as they were" in output
    assert "share.dead_exporter: its bytes are intact" in output
    assert numbers["share.orphan_by_fd"] == 4
    assert numbers["share.orphan_after_close"] == 0
    assert "direct.probe: works" in output
    if os.geteuid() == 0:
        assert "direct.probe: cuFileHandleRegister: error 5030" in output


@pytest.mark.timeout(600)
def test_without_a_device(tmp_path):
    """The script runs to its end on the backend host, and says what it is."""
    output, numbers = first_run(tmp_path, "--backend", "host")
    assert NOT_REAL in output
    assert "skip cuFile: the backend is host" in output
    assert numbers["peak.to_device"] > 0
    assert "share.readers: all 3 see the same bytes" in output
    assert "share.store_by_reader: kills the process" in output


@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", ("host", "cuda", "cufile"))
def test_the_bench_of_a_mount(backend):
    """tools/bench/gpu fills its table, says what was behind it, and leaves nothing."""
    if missing():
        pytest.skip(missing())
    with tempfile.TemporaryDirectory(dir="/dev/shm") as devices, \
            tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        result = subprocess.run(
            [ROOT / "tools/bench/gpu", "--quick", "--backend", backend, "--build", BUILD,
             "--largest", "128", "--dir", folder],
            capture_output=True, text=True, check=False, timeout=500,
            env={**os.environ, "LD_LIBRARY_PATH": str(FAKE), "FAKECU_DIR": devices,
                 "FAKECU_MEMORY": str(2 << 30)})
        assert os.listdir(folder) == []
    assert result.returncode == 0, result.stdout + result.stderr
    assert "NO REAL DEVICE" in result.stdout
    rows = re.findall(r"^([a-h])  ", result.stdout, re.MULTILINE)
    cold = "e" if backend == "cufile" else "de"
    assert "".join(rows) == "a" + "bbbb" + "c" + cold + "fgh", result.stdout
    assert ("e  cold, cuFile, drives to device" in result.stdout) == (backend == "cufile")
    assert ("; 100% past the CPU" in result.stdout) == (backend == "cufile")


def test_a_failure_is_told(tmp_path):
    """A question that cannot be answered fails the run, and the others are asked all the same."""
    result = subprocess.run(
        [ROOT / "tools/bench/h200", "--build", BUILD, "--quick", "--log", tmp_path / "log",
         "--libraries", FAKE, "--backend", "cuda"],
        capture_output=True, text=True, check=False, timeout=500,
        env={**os.environ, "FAKECU_FAIL": "cuMemHostRegister:1+:2"})
    assert result.returncode == 1
    assert "FAILED peak: status 1" in result.stdout
    assert "registering host memory: Cannot allocate memory" in result.stdout
    assert "ok segments: status 0" in result.stdout


def test_no_build(tmp_path):
    result = subprocess.run([ROOT / "tools/bench/h200", "--build", tmp_path],
                            capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 1
    assert "build first" in result.stderr
