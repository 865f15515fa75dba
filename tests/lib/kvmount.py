# SPDX-License-Identifier: Apache-2.0
"""A store and its mount, for tests: format, mount, look inside, kill, remount, clean up."""
import contextlib
import errno
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from procs import eventually, in_child, run

ROOT = Path(__file__).resolve().parents[2]
MODES = ("passthrough", "daemon")
_TROUBLE = re.compile(r"^(<\d>)?error\b|Sanitizer|runtime error:|Assertion .* failed", re.MULTILINE)


class MountFailed(Exception):
    """kvfsd ended before the mount was there: its exit status and what it printed."""

    def __init__(self, status, text):
        super().__init__(f"kvfsd exited {status}: {text}")
        self.status = status
        self.text = text


def build_folder():
    """Where the programs under test are, or None."""
    names = [os.environ["KVFS_BUILD"]] if "KVFS_BUILD" in os.environ else ["build-check", "build"]
    for name in names:
        if (ROOT / name / "fs" / "kvfsd").exists():
            return ROOT / name
    return None


def missing():
    """What this machine lacks for tests on a mount, or None."""
    if os.geteuid() != 0:
        return "these tests need root"
    if not os.path.exists("/dev/fuse"):
        return "these tests need /dev/fuse"
    return None


def mount_device(mountpoint):
    """The minor device number of what is mounted at MOUNTPOINT, or None; asks no filesystem."""
    found = None
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as f:
        for line in f:
            words = line.split()
            if words[4] == os.fspath(mountpoint):
                found = words[2].split(":")[1]
    return found


class Sandbox:
    """The scratch folder of a test run, its control of FUSE connections, and its watchdog."""

    def __init__(self):
        parent = os.environ.get("KVFS_TEST_DIR", "/var/tmp")
        self.base = Path(tempfile.mkdtemp(prefix="kvfs-test-", dir=parent))
        self.base.chmod(0o755)
        self.report = self.base / "watchdog.report"
        self.connections = self.base / "fusectl"
        self.connections.mkdir()
        self.counter = 0
        self.mounts = []
        subprocess.run(["mount", "-t", "fusectl", "kvfs-test", self.connections], check=False,
                       stderr=subprocess.DEVNULL)
        self.watchdog = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("watchdog.py"), self.connections],
            stdin=subprocess.PIPE, start_new_session=True)
        self.tell("base", self.base)

    def tell(self, *words):
        line = " ".join(os.fspath(w) if isinstance(w, os.PathLike) else str(w) for w in words)
        os.write(self.watchdog.stdin.fileno(), os.fsencode(line) + b"\n")

    def folder(self, name):
        self.counter += 1
        path = self.base / f"{self.counter}-{name}"
        path.mkdir(mode=0o755)
        return path

    def close_descriptors(self):
        """Closes what a failed test left open here, so that its mount can go."""
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{fd}").startswith(f"{self.base}/"):
                    os.close(int(fd))

    def abort(self, connection):
        with contextlib.suppress(OSError):
            (self.connections / connection / "abort").write_text("1")

    def close(self):
        """Ends everything; returns what was wrongly left behind."""
        left = []
        for kv in list(self.mounts):
            try:
                kv.close()
            except Exception as e:  # the other mounts must go as well
                left.append(str(e))
        self.tell("quit")
        self.watchdog.wait(60)
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as f:
            left += [line.strip() for line in f if os.fspath(self.base) in line]
        if self.base.exists():
            left.append(f"{self.base} could not be removed")
        return left


class Kvfs:
    """One store and its mount.

    .mnt, .store: paths. .mode: "passthrough" or "daemon". .pid: of the daemon, or None. .dir: a
    scratch directory on the mount, if the fixture made one.
    """

    def __init__(self, sandbox, mode, size="1G", devices=(), user=None, **options):
        self.sandbox = sandbox
        self.mode = mode
        self.size = size
        self.devices = devices
        self.user = user
        self.options = {"dram": "256M", "allow_other": None,
                        "passthrough": "auto" if mode == "passthrough" else "off", **options}
        self.home = sandbox.folder(mode)
        self.store = self.home / "store"
        self.mnt = self.home / "mnt"
        self.mnt.mkdir()
        self.log_path = self.home / "log"
        self.programs = {"kvfs": build_folder() / "tools" / "kvfs",
                         "kvfsd": build_folder() / "fs" / "kvfsd"}
        self.prefix = []
        if user is not None:
            self._prepare_for_user()
        self.daemon = None
        self.connection = None
        self.log_seen = 0
        self.expected = []
        self.dir = None
        self.damaged = False  # a test sets it that leaves the store so
        sandbox.mounts.append(self)

    # ---- programs ----

    def kvfs(self, *args, check=True, timeout=120):
        as_user = [] if self.user is None else self.prefix[-4:]
        return run(*as_user, self.programs["kvfs"], *args, check=check, timeout=timeout)

    def _prepare_for_user(self):
        # The build may lie where only root can go.
        self.programs = {n: shutil.copy(p, self.home / n) for n, p in self.programs.items()}
        for path in (self.home, self.mnt):
            os.chown(path, self.user, self.user)
        self.prefix = ["setpriv", f"--reuid={self.user}", f"--regid={self.user}", "--clear-groups"]

    def open_fuse_device(self):
        """
        Lets the mount's user open /dev/fuse where only root may: the daemon sees another node there.

        It has a mount namespace of its own for that; what it mounts in .home is seen by all.
        """
        node = self.sandbox.folder("dev") / "fuse"
        os.mknod(node, 0o666 | stat.S_IFCHR, os.makedev(10, 229))
        os.chmod(node, 0o666)
        run("mount", "--bind", self.home, self.home)
        run("mount", "--make-shared", self.home)
        self.prefix = ["unshare", "--mount", "--propagation", "unchanged", "sh", "-c",
                       f"mount --make-rprivate /dev && mount --bind {node} /dev/fuse && exec \"$@\"",
                       "sh", *self.prefix]

    def format(self):
        devices = [word for device in self.devices for word in ("--device", device)]
        self.kvfs("format", self.store, "--size", self.size, *devices)
        return self

    # ---- life ----

    def mount(self, timeout=60, **options):
        """Mounts, with OPTIONS changed for good (None as a value: an option without one)."""
        self.options.update(options)
        text = ",".join(k if v is None else f"{k}={v}" for k, v in self.options.items()
                        if v is not False)
        environment = {k: v for k, v in os.environ.items() if k != "JOURNAL_STREAM"}
        before = len(self.log())
        with open(self.log_path, "ab") as log:
            self.daemon = subprocess.Popen(
                [*self.prefix, self.programs["kvfsd"], self.store, self.mnt, "-f", "-o", text],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
                start_new_session=True, cwd="/")
        end = time.monotonic() + timeout
        while not (connection := mount_device(self.mnt)):
            if self.daemon.poll() is not None:
                raise self.refused(before)
            if time.monotonic() > end:
                self.destroy()
                raise AssertionError(f"kvfsd did not mount within {timeout} s:\n{self.log()}")
            time.sleep(0.005)
        self.connection = connection
        self.sandbox.tell("add", self.connection, self.daemon.pid, self.mnt)
        # Answered: the session has begun. Without allow_other only the mount's user may ask.
        try:
            self.ask(timeout)
        except OSError:
            self.daemon.wait(timeout)  # it ended, or the test learns why it did not answer
        # Refused after all: what was asked may have been the folder below.
        if mount_device(self.mnt) != connection:
            self.daemon.wait(timeout)
            self.sandbox.tell("del", self.connection)
            self.connection = None
            raise self.refused(before)
        return self

    def ask(self, timeout):
        try:
            in_child(os.statvfs, self.mnt, uid=self.user, timeout=timeout)
        except OSError as e:
            # A test that takes memory from the mount may have met this very request.
            if e.errno != errno.ENOMEM:
                raise
            in_child(os.statvfs, self.mnt, uid=self.user, timeout=timeout)

    def refused(self, before):
        """What a daemon that ended said since the log had BEFORE characters."""
        status, self.daemon = self.daemon.returncode, None
        self.log_seen = len(self.log())
        return MountFailed(status, self.log()[before:])

    @property
    def pid(self):
        return self.daemon.pid if self.daemon else None

    def umount(self, timeout=90):
        """Unmounts as a user does, and waits until the daemon has flushed and ended well."""
        try:
            # Whoever looks at all mounts from time to time can hold ours for a moment.
            eventually(lambda: run("umount", self.mnt, check=False).returncode == 0, what="umount")
            status = self.daemon.wait(timeout)
        except (AssertionError, subprocess.TimeoutExpired) as e:
            self.destroy()
            raise AssertionError(f"the mount did not end: {e}\n{self.log_tail()}") from e
        self.sandbox.tell("del", self.connection)
        self.daemon = self.connection = None
        assert status == 0, f"kvfsd exited {status} after umount:\n{self.log_tail()}"
        self.check_log()

    def kill(self):
        """SIGKILL to the daemon, as a crash would."""
        self.check()
        assert os.path.samefile(f"/proc/{self.pid}/exe", self.programs["kvfsd"])
        self.daemon.send_signal(signal.SIGKILL)
        assert self.daemon.wait(30) == -signal.SIGKILL
        self.destroy()

    def destroy(self):
        """Ends the mount in any state it may be in."""
        if self.connection is not None:
            # Where the mount has gone, its number may be another one's by now.
            if mount_device(self.mnt) == self.connection:
                self.sandbox.abort(self.connection)
            run("umount", "-l", self.mnt, check=False)
            self.sandbox.tell("del", self.connection)
        if self.daemon is not None and self.daemon.poll() is None:
            self.daemon.kill()
            self.daemon.wait(30)
        self.daemon = self.connection = None

    def remount(self, **options):
        if self.daemon is not None:
            self.umount()
        return self.mount(**options)

    def close(self):
        self.sandbox.mounts.remove(self)
        try:
            if self.daemon is not None:
                self.check()
                self.umount()
                if not self.damaged:
                    done = self.kvfs("check", self.store, check=False, timeout=120)
                    assert done.returncode == 0, f"the store is not sound: {done.stdout}{done.stderr}"
        finally:
            self.destroy()
            if mount_device(self.home):
                run("umount", "-l", self.home, check=False)
            shutil.rmtree(self.home, ignore_errors=True)

    # ---- looking inside ----

    def log(self):
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def log_tail(self):
        return "".join(self.log().splitlines(keepends=True)[-30:])

    def expect_errors(self, pattern):
        """Errors in the log that match PATTERN belong to the test."""
        self.expected.append(re.compile(pattern))

    def check_log(self):
        new = self.log()[self.log_seen:]
        self.log_seen += len(new)
        for line in new.splitlines():
            if _TROUBLE.search(line) and not any(p.search(line) for p in self.expected):
                raise AssertionError(f"the daemon logged trouble: {line}\n{self.log_tail()}")

    def check(self):
        """The daemon lives and has not complained."""
        if self.daemon is not None and self.daemon.poll() is not None:
            status = self.daemon.returncode
            self.destroy()
            raise AssertionError(f"kvfsd died (status {status}):\n{self.log_tail()}")
        self.check_log()

    def status(self):
        return json.loads(self.kvfs("status", self.mnt, "--json").stdout)

    def settle(self):
        """Waits until everything published is durable: fsync of a directory does that."""
        fd = os.open(self.mnt, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def settle_eviction(self):
        """Waits until eviction, which works ahead, has come to rest after the last write."""
        self.settle()
        eventually(self._evicts_no_more, what="the end of eviction")

    def _evicts_no_more(self):
        """
        Nothing goes for a second when as much is free as eviction makes (fs/evict_store.c,
        low_watermark), nor for longer than files are leased that were just written when it is not:
        then all was leased, and it begins anew with the next write.
        """
        before = self.status()
        total = before["store_total"]
        free = total - sum(before[f"store_{part}"] for part in ("used", "busy", "reserved"))
        time.sleep(1 if free >= max(total // 20, min(64 << 20, total // 8)) else 3)
        return self.counter("evicted_store") == before["counters"]["evicted_store"]

    def counter(self, name):
        return self.status()["counters"][name]

    def stat(self, path):
        return json.loads(self.kvfs("stat", path, "--json").stdout)[0]

    def extents(self, path):
        """[(offset in the file, device, offset on it, bytes)] of a durable file."""
        return [(e["file_offset"], e["device"], e["offset"], e["length"])
                for e in self.stat(path)["extents"]]

    def tier(self, path):
        return self.stat(path)["tier"]

    def device_path(self, number):
        """The file or block device behind device NUMBER."""
        return Path(self.devices[number]) if self.devices else self.store / f"data{number}"
