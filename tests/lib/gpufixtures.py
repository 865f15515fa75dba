# SPDX-License-Identifier: Apache-2.0
"""Fixtures for tests of the GPU helper, and what they share; import them by name."""
import ctypes
import hashlib

import gpulink
import pytest
from data import MIB, put
from gpu import Engine, Helper
from procs import eventually

SIZE = 21 * MIB + 12345

# Whose segments are all cleared before anything is held back.
SMALL = ("--segment", "2M")


def digest(data):
    return hashlib.sha256(data).hexdigest()


def on(*settings):
    """Where a test runs, if not on both kinds of device with a mount that passes reads through."""
    def mark(function):
        function.settings = settings
        return function
    return mark


EVERYWHERE = on("host-passthrough", "host-daemon", "cuda-passthrough", "cufile-passthrough")
HOST, FAKE = on("host-passthrough"), on("cuda-passthrough")
CUFILE = on("cufile-passthrough")


def pytest_generate_tests(metafunc):
    if "setting" in metafunc.fixturenames:
        metafunc.parametrize("setting", getattr(metafunc.function, "settings", (
            "host-passthrough", "cuda-passthrough")))


@pytest.fixture
def mode(setting):
    return setting.split("-")[1]


@pytest.fixture
def start(setting, fresh):
    """start(*kvgpud's arguments, **environment): a mount with a helper, which is looked at afterwards."""
    made = []

    def start(*arguments, mount=None, **environment):
        kv = mount or fresh()
        helper = Helper(kv, setting.split("-")[0], *arguments, **environment)
        helper.engines = []
        made.append(helper)
        return helper

    yield start
    for helper in made:
        for engine in helper.engines:
            engine.stop()
        status = helper.stop()
        assert status in (0, helper.__dict__.get("ends", 0)), helper.log()
        if helper.kind == "cuda" and status == 0:
            # Appended to at every orderly end of a process that has used the driver.
            report = helper.report.read_text() if helper.report.exists() else ""
            assert "leak" not in report, report


def engine_of(helper, **who):
    engine = Engine(helper, **who)
    helper.engines.append(engine)
    return engine


@pytest.fixture
def helper(start):
    return start()


def store(helper, name, data):
    path = helper.kv.mnt / name
    put(path, data)
    return path


def cold(helper, path):
    helper.kv.settle()
    eventually(lambda: helper.kv.kvfs("cool", path, check=False).returncode == 0)


def damage(helper, path):
    """Its first bytes on the device are others, and it is not in DRAM."""
    cold(helper, path)
    _, device, offset, _ = helper.kv.extents(path)[0]
    with open(helper.kv.device_path(device), "r+b") as f:
        f.seek(offset + 5)
        f.write(b"damage")
    helper.kv.expect_errors("checksum mismatch")


def packed_ticket(fd):
    token, *numbers = gpulink.ticket(fd)
    return token + b"".join(n.to_bytes(8, "little") for n in numbers)


def memory(data):
    return ctypes.create_string_buffer(data, len(data))
