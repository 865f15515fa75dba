# SPDX-License-Identifier: Apache-2.0
"""Where loads run: a plain directory, tmpfs, kvfs, libfuse's example; made, made cold, removed."""
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

PLAIN_TIMEOUT = 3600
MOUNT_TIMEOUT = 60
UMOUNT_TIMEOUT = 300
TICKS = os.sysconf("SC_CLK_TCK")


class BenchError(Exception):
    """Something that was to be measured did not work; the text says what."""


def run(*command, timeout=PLAIN_TIMEOUT):
    done = subprocess.run([str(c) for c in command], stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, errors="replace", timeout=timeout,
                          check=False)
    if done.returncode != 0:
        raise BenchError(f"{Path(command[0]).name} {' '.join(map(str, command[1:4]))}...:"
                         f" {done.stderr.strip() or done.returncode}")
    return done.stdout


def mount_of(path):
    """(minor device number, filesystem type) of the mount that PATH is in; asks no filesystem."""
    best, found = "", (None, None)
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as f:
        for line in f:
            words = line.split()
            point = words[4]
            if (f"{path}/".startswith(f"{point.rstrip('/')}/")) and len(point) >= len(best):
                best = point
                found = (words[2].split(":")[1], words[words.index("-") + 1])
    return best, *found


def is_mounted(path):
    return mount_of(path)[0] == os.fspath(path)


def process_cpu(pid):
    """Seconds of CPU that process PID has used."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as f:
        words = f.read().rsplit(")", 1)[1].split()
    return (int(words[11]) + int(words[12])) / TICKS


def drop_caches():
    Path("/proc/sys/vm/drop_caches").write_text("3", encoding="ascii")


class Sandbox:
    """The scratch folder of a run: all places are in it, and nothing stays of it."""

    def __init__(self, parent, build, options):
        self.build = build
        self.kvfs_options = options
        self.base = Path(tempfile.mkdtemp(prefix="kvfs-bench-", dir=parent)).resolve()
        self.fstype = mount_of(self.base)[2]
        self.connections = self.base / "fusectl"
        self.connections.mkdir()
        self.places = {}
        with contextlib.suppress(BenchError):
            run("mount", "-t", "fusectl", "kvfs-bench", self.connections)

    def kvbench(self, kernel, directory, *options, timeout=PLAIN_TIMEOUT):
        """Runs one load; the values it printed, by name."""
        command = [self.build / "tools/bench/kvbench", kernel, directory, *options]
        with subprocess.Popen([str(c) for c in command], stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              text=True) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired as e:
                self.abort()  # a process that waits for a dead daemon cannot be killed
                process.kill()
                raise BenchError(f"kvbench {kernel} did not end in {timeout} s") from e
            except BaseException:
                process.kill()
                raise
        if process.returncode != 0:
            raise BenchError(err.strip() or f"kvbench {kernel} exited {process.returncode}")
        lines = [line.split() for line in out.splitlines()]
        return {name: float(value) for name, value, _ in lines}

    def touch_memory(self, size):
        """
        The memory that a run of SIZE bytes will take, and as much again, is touched first. In a
        virtual machine what was free for a while may be with the host: without this a run would
        measure how fast the host gives it back, and whose turn it was.
        """
        room = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
        size = min(2 * size, room) >> 21 << 21
        if size > 0:
            self.kvbench("touch", self.base, f"--size={size}")

    def open(self, name, description=None):
        """Makes the place NAME; None where this machine has no such system."""
        kinds = {"plain": Plain, "tmpfs": Tmpfs, "libfuse": Libfuse}
        kind = kinds.get(name, KvfsPlace)
        if kind is Libfuse and self.example() is None:
            return None
        home = self.base / name
        home.mkdir()
        self.places[name] = place = kind(self, home, description)
        place.start()
        return place

    def example(self):
        """libfuse's own passthrough example, where it is built."""
        names = [os.environ.get("PASSTHROUGH_HP", "")]
        names += self.build.glob("subprojects/fuse-*/example/passthrough_hp")
        return next((Path(n) for n in names if n and Path(n).is_file()), None)

    def abort(self):
        for place in self.places.values():
            place.abort()

    def close_places(self):
        """Removes all places, whatever state they are in; others may be built on the plain one."""
        for name in sorted(self.places, key=lambda n: n == "plain"):
            place = self.places[name]
            try:
                place.stop()
            except (BenchError, OSError, subprocess.SubprocessError):
                place.abort()
                place.destroy()
            shutil.rmtree(place.home, ignore_errors=True)
        self.places = {}

    def close(self):
        self.close_places()
        subprocess.run(["umount", self.connections], check=False, stderr=subprocess.DEVNULL)
        shutil.rmtree(self.base, ignore_errors=True)


class Plain:
    """A directory of the filesystem that the run is in."""

    def __init__(self, sandbox, home, description):
        self.sandbox = sandbox
        self.home = home
        self.description = description
        self.root = home

    def start(self):
        pass

    def directory(self, name):
        return self.root / name

    def settle(self):
        """All that was stored is durable, and nothing is left to do for it."""
        self.sandbox.kvbench("sync", self.root)

    def cold(self):
        self.settle()
        drop_caches()

    def daemon_cpu(self):
        return 0.0

    def abort(self):
        pass

    def stop(self):
        pass

    def destroy(self):
        """Ends it in any state it may be in."""


class Tmpfs(Plain):
    """tmpfs with pages of 4 KiB."""

    def start(self):
        run("mount", "-t", "tmpfs", "-o", "huge=never,size=50%", "kvfs-bench", self.home)

    def settle(self):
        pass

    def stop(self):
        run("umount", self.home)

    def destroy(self):
        subprocess.run(["umount", "-l", self.home], check=False, stderr=subprocess.DEVNULL)


class Daemon(Plain):
    """A filesystem that a process of ours serves."""

    def __init__(self, sandbox, home, description):
        super().__init__(sandbox, home, description)
        self.root = home / "mnt"
        self.log = home / "log"
        self.process = None
        self.connection = None

    def spawn(self, *command):
        """Starts the daemon and waits for its mount; the seconds that took."""
        start = time.monotonic()
        environment = {k: v for k, v in os.environ.items() if k != "JOURNAL_STREAM"}
        with open(self.log, "ab") as log:
            # A session of its own: Ctrl-C is for the benchmark, which then unmounts.
            self.process = subprocess.Popen(
                [str(c) for c in command], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=environment, cwd="/", start_new_session=True)
        while not is_mounted(self.root):
            if self.process.poll() is not None:
                self.process = None
                raise BenchError(f"{command[0]} did not mount: {self.log_tail()}")
            if time.monotonic() - start > MOUNT_TIMEOUT:
                self.destroy()
                raise BenchError(f"{command[0]} did not mount in {MOUNT_TIMEOUT} s")
            time.sleep(0.002)
        self.connection = mount_of(self.root)[1]
        run("stat", self.root, timeout=MOUNT_TIMEOUT)
        return time.monotonic() - start

    def log_tail(self):
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return " / ".join(text.splitlines()[-5:])

    def daemon_cpu(self):
        if self.process is None or self.process.poll() is not None:
            raise BenchError(f"the daemon of {self.home.name} has died: {self.log_tail()}")
        return process_cpu(self.process.pid)

    def abort(self):
        if self.connection is not None:
            with contextlib.suppress(OSError):
                (self.sandbox.connections / self.connection / "abort").write_text("1")

    def stop(self):
        if self.process is None:
            return
        self.umount()
        try:
            self.process.wait(UMOUNT_TIMEOUT)
        except subprocess.TimeoutExpired as e:
            raise BenchError(f"the daemon of {self.home.name} did not end") from e
        self.process = self.connection = None

    def umount(self):
        """As a user does; whoever looks at all mounts from time to time can hold ours briefly."""
        for _ in range(20):
            done = subprocess.run(["umount", self.root], check=False, capture_output=True)
            if done.returncode == 0:
                return
            time.sleep(0.25)
        raise BenchError(f"umount {self.root}: {done.stderr.decode(errors='replace').strip()}")

    def destroy(self):
        subprocess.run(["umount", "-l", self.root], check=False, stderr=subprocess.DEVNULL)
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.process = self.connection = None


class KvfsPlace(Daemon):
    """A kvfs mount on a store of its own."""

    def start(self):
        self.root.mkdir()
        store = self.home / "store"
        names = [self.home / f"data{i}" for i in range(self.description.devices)]
        several = self.description.devices > 1
        devices = [word for name in names for word in ("--device", name)] if several else []
        size = self.description.size // self.description.devices
        run(self.sandbox.build / "tools/kvfs", "format", store, "--size", size, *devices)
        self.mount()

    def mount(self):
        options = [self.sandbox.kvfs_options] if self.sandbox.kvfs_options else []
        if self.description.dram:
            options.append(f"dram={self.description.dram}")
        command = [self.sandbox.build / "tools/kvfs", "mount", self.home / "store", self.root, "-f"]
        return self.spawn(*command, *(["-o", ",".join(options)] if options else []))

    def cold(self):
        self.stop()
        drop_caches()
        self.mount()

    def status(self):
        return json.loads(run(self.sandbox.build / "tools/kvfs", "status", self.root, "--json",
                              timeout=MOUNT_TIMEOUT))

    def memory(self):
        """Bytes of resident memory of the daemon."""
        text = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8")
        line = next(line for line in text.splitlines() if line.startswith("VmRSS"))
        return int(line.split()[1]) * 1024


class Libfuse(Daemon):
    """libfuse's passthrough_hp over the plain directory: what passthrough costs without a tier."""

    def start(self):
        self.root.mkdir()
        source = self.sandbox.places["plain"].root
        self.spawn(self.sandbox.example(), "--foreground", source, self.root)

    def settle(self):
        self.sandbox.places["plain"].settle()
