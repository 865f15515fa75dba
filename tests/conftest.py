# SPDX-License-Identifier: Apache-2.0
"""Fixtures for tests on real mounts.

    place      a directory, plain and on a mount in each mode: for what POSIX defines
    elsewhere  a directory in a plain filesystem
    kv         the run's mount in each mode, with a scratch directory kv.dir
    fresh      makes mounts of the test's own: fresh(size="1G", dram="256M", ...)
    sparse     makes such mounts with stores of 2 TiB
    agent      makes processes that hold files open
    drive      a device of 256 MiB that stops answering on command
"""
import contextlib
import os
import shutil

import pytest
from hangdrive import Drive
from kvmount import MODES, Kvfs, Sandbox, build_folder, missing
from procs import Agent, Child, eventually, run

_state = {"sandbox": None, "shared": {}}


def sandbox():
    if _state["sandbox"] is None:
        _state["sandbox"] = Sandbox()
    return _state["sandbox"]


def require_mounts():
    reason = missing()
    if reason:
        pytest.skip(reason)
    if build_folder() is None:
        pytest.fail("no build found: set KVFS_BUILD to a Meson build folder, or run tools/check")


def settle_mode(kv):
    """A mount that was to pass reads through and cannot skips its tests, saying why."""
    status = kv.status()
    if kv.mode == "passthrough" and status["mode"] != "passthrough":
        pytest.skip(f"passthrough is not possible here: {status['mode_reason']}")
    assert status["mode"] == kv.mode
    return kv


def shared_mount(mode, **options):
    """The run's mount in MODE with OPTIONS: made once, and again when a test has broken it."""
    require_mounts()
    key = (mode, *options.items())
    kv = _state["shared"].get(key)
    if kv is None or kv.daemon is None:
        kv = _state["shared"][key] = Kvfs(sandbox(), mode, size="2G", **options).format().mount()
    return settle_mode(kv)


@contextlib.contextmanager
def scratch(kv):
    """A new directory on a shared mount, removed (and the mount looked at) after the test."""
    sandbox().counter += 1
    path = kv.mnt / f"t{sandbox().counter}"
    path.mkdir()
    path.chmod(0o755)
    yield path
    sandbox().close_descriptors()
    kv.check()
    shutil.rmtree(path)


@pytest.fixture(autouse=True)
def watchdog(request):
    """Aborts the mounts shortly before pytest gives up on the test."""
    marker = request.node.get_closest_marker("timeout")
    seconds = marker.args[0] if marker else float(request.config.getini("timeout"))
    box = sandbox() if missing() is None else None
    if box:
        box.tell("arm", seconds * 0.8, box.report)
    yield
    Child.end_all()
    if box:
        box.tell("disarm")
        if box.report.exists():
            text = box.report.read_text()
            box.report.unlink()
            pytest.fail(text)


@pytest.fixture(params=MODES)
def mode(request):
    return request.param


@pytest.fixture(params=("plain", *MODES))
def place(request):
    if request.param == "plain":
        yield request.getfixturevalue("elsewhere")
    else:
        with scratch(shared_mount(request.param)) as path:
            yield path


@pytest.fixture
def elsewhere():
    """A directory in a plain filesystem, to compare with."""
    path = sandbox().folder("plain")
    yield path
    shutil.rmtree(path)


@pytest.fixture
def kv(mode):
    mount = shared_mount(mode)
    with scratch(mount) as mount.dir:
        yield mount


@pytest.fixture
def fresh(mode):
    made = []

    def make(mount=True, format=True, **options):
        require_mounts()
        kv = Kvfs(sandbox(), mode, **options)
        made.append(kv)
        kv.dir = kv.mnt
        if format:
            kv.format()
        return settle_mode(kv.mount()) if mount else kv

    yield make
    if _state["sandbox"]:
        sandbox().close_descriptors()
    errors = []
    for kv in made:
        try:
            kv.close()
        except AssertionError as e:  # close the others first
            errors.append(e)
    if errors:
        raise errors[0]


@pytest.fixture
def sparse(fresh):
    """Makes mounts of stores of 2 TiB, on a file with holes."""
    def make(**options):
        kv = fresh(mount=False, format=False, **options)
        device = kv.home / "device"
        with open(device, "wb") as f:
            f.truncate(2 << 40)
        kv.devices = [device]
        kv.format()
        return kv.mount()

    return make


@pytest.fixture
def agent():
    """Makes agents (processes that hold files open), which end with the test at the latest."""
    made = []

    def make(**who):
        made.append(Agent(**who))
        return made[-1]

    yield make
    for one in made:
        one.stop(kill=True)


@pytest.fixture
def drive():
    require_mounts()
    one = Drive(sandbox())
    yield one
    one.close()


@pytest.fixture
def loop_device():
    """Makes a block device of SIZE bytes over a file in KV's home: [path], or [] if there are none."""
    made = []

    def make(kv, size):
        image = kv.home / f"loop{len(made)}.img"
        with open(image, "wb") as f:
            f.truncate(size)
        done = run("losetup", "--find", "--show", "--direct-io=on", image, check=False)
        if done.returncode:
            return []
        made.append(done.stdout.strip())
        return made[-1:]

    yield make
    for path in made:
        eventually(lambda path=path: run("losetup", "--detach", path, check=False).returncode == 0,
                   what=f"detaching {path}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed and _state["sandbox"]:
        for kv in _state["sandbox"].mounts:
            report.sections.append((f"kvfsd log ({kv.mode}, {kv.home.name})", kv.log_tail()))
    return report


def pytest_sessionfinish(session):
    if _state["sandbox"]:
        left = _state["sandbox"].close()
        if left:
            print("\n".join(["", "left behind by the tests:", *left]))
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_report_header():
    return f"kvfs: build {build_folder()}, scratch in {os.environ.get('KVFS_TEST_DIR', '/var/tmp')}"
