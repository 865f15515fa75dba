# SPDX-License-Identifier: Apache-2.0
"""What people and programs use of the GPU helper: hints, `kvfs gpu`, kvgpud's options, the Python module."""
import ctypes
import errno
import json
import os
import random
import threading

import gpu
import pytest
from data import MIB, blob, get
from gpu import NOSTAGE
from gpufixtures import (FAKE, HOST, SIZE, digest, engine_of, helper, memory, mode,
                         pytest_generate_tests, start, store)  # noqa: F401
from procs import Child, eventually, run
from syscalls import fails


# ---- Hints, prefetch, the tool ----


def test_hints__what_is_opened_again_comes_by_itself(start):
    helper = start("--hints")
    path = store(helper, "f", blob(1, SIZE))
    get(path)
    assert helper.stats()["staged"] == 0, "once is not often"
    get(path)
    eventually(lambda: helper.stats()["resident"] == 1)
    engine = engine_of(helper)
    engine.map(str(path), 0, 0, NOSTAGE)
    quiet = start(mount=helper.kv)
    get(path)
    get(path)
    assert quiet.stats()["staged"] == 0


def test_prefetch__and_evict(helper):
    path = str(store(helper, "f", blob(1, SIZE)))
    engine = engine_of(helper)
    engine.prefetch(path)
    eventually(lambda: engine.stats(path)["asked_resident"] == SIZE)
    key = engine.map(path, 0, 0, NOSTAGE)[0]
    fails(errno.EBUSY, engine.evict, path)
    engine.unmap(key)
    assert engine.evict(path) == 22 * MIB
    assert engine.stats(path)["asked_resident"] == 0 and engine.evict(path) == 0


def test_tool__status_warm_and_evict(helper):
    kv = helper.kv
    (kv.mnt / "d").mkdir()
    for i in range(3):
        store(helper, f"d/f{i}", blob(i, 5 * MIB))
    store(helper, "d/small", b"x")
    at = ("--socket", helper.socket)
    done = kv.kvfs("gpu", "warm", kv.mnt / "d", *at)
    assert done.stdout == ("3 files in device memory, 15.0M\n"
                           "1 are too small for it: engines read them from DRAM\n")
    status = json.loads(kv.kvfs("gpu", "status", "--json", *at).stdout)[0]
    assert (status["resident"], status["staged_bytes"]) == (3, 15 * MIB)
    assert helper.kind in status["backend"].lower() and status["socket"] == str(helper.socket)
    text = kv.kvfs("gpu", "status", *at).stdout
    assert status["backend"] in text and "files staged" in text and "kernels" not in text
    assert kv.kvfs("gpu", "evict", "-q", kv.mnt / "d" / "f1", *at).stdout == ""
    assert kv.kvfs("gpu", "evict", kv.mnt / "d", *at).stdout.startswith("2 files dropped from device")
    assert helper.stats()["used"] == 0
    engine = engine_of(helper)
    engine.map(str(kv.mnt / "d" / "f0"))
    busy = kv.kvfs("gpu", "evict", kv.mnt / "d" / "f0", *at, check=False)
    assert busy.returncode == 1 and "an engine has it mapped" in busy.stderr


@pytest.mark.parametrize("arguments, words", [
    ([], "say status, warm or evict"), (["cool"], "say status"), (["warm"], "PATH is missing"),
    (["status", "x"], "takes no PATH"), (["status", "--socket", "/nowhere"], "no kvgpud listens"),
])
def test_tool__bad_usage(arguments, words):
    done = run(gpu.build_folder() / "tools" / "kvfs", "gpu", *arguments, check=False)
    assert done.returncode == 1 and words in done.stderr and done.stderr.count("\n") == 1


BAD_USAGE = (
    ([], "give a store"), (["{store}", "{store}"], "give a store"), (["/nowhere"], "is no store"),
    (["{store}", "--share", "0%"], "bad value '0%'"), (["{store}", "--share", "9"], "bad value '9'"),
    (["{store}", "--hbm", "x"], "bad value 'x'"), (["{store}", "--segment", "0"], "bad value '0'"),
    (["{store}", "--log", "loud"], "bad value"), (["{store}", "--what"], "see `kvgpud --help`"),
    (["{store}", "--backend", "gpu"], "there is no backend 'gpu'"),
    (["{store}", "--backend", "host", "--device", "x"], "host devices are numbers"),
    (["{store}", "--backend", "host", "--hbm", "1M", "--socket", "{home}/s"], "is too little"),
    (["{store}", "--backend", "host", "--group", "nosuch", "--socket", "{home}/s"], "no group"),
    (["{store}", "--backend", "host", "--socket", "{home}/no/s"], "cannot listen at"),
    (["{store}", "--backend", "host", "--socket", "/" + 120 * "x"], "too long for a socket"),
)


def test_kvgpud__bad_usage(kv):
    for arguments, words in BAD_USAGE:
        arguments = [a.format(store=kv.store, home=kv.home) for a in arguments]
        done = run(gpu.build_folder() / "gpu" / "kvgpud", *arguments, check=False)
        assert done.returncode == 1 and words in done.stderr.replace(str(kv.store), "STORE"), done
        assert done.stderr.count("\n") == 1 and done.stdout == ""


@HOST
def test_kvgpud__says_what_is_missing(fresh):
    kv = fresh()
    kv.umount()
    done = run(gpu.build_folder() / "gpu" / "kvgpud", kv.store, check=False)
    assert done.returncode == 1 and "run `kvfs mount` first" in done.stderr
    assert "kvgpud STORE" in run(gpu.build_folder() / "gpu" / "kvgpud", "--help").stdout
    assert run(gpu.build_folder() / "gpu" / "kvgpud", "--version").stdout.startswith("kvgpud ")


@HOST
def test_kvgpud__takes_no_file_for_its_socket(kv):
    """What lies there is not removed, unless it is the socket of one that has died."""
    path = kv.home / "file"
    path.write_text("precious")
    done = run(gpu.build_folder() / "gpu" / "kvgpud", kv.store, "--backend", "host", "--hbm", "4M",
               "--socket", path, check=False)
    assert done.returncode == 1 and "is no socket: name another" in done.stderr
    assert path.read_text() == "precious"


@FAKE
def test_kvgpud__says_what_others_have_left(kv):
    """On a device of 1 GiB, half of which is taken already."""
    fake = gpu.build_folder() / "tests" / "gpu" / "fake"
    done = run(gpu.build_folder() / "gpu" / "kvgpud", kv.store, "--backend", "cuda", "--hbm", "768M",
               "--socket", kv.home / "s", check=False,
               env={**os.environ, "LD_LIBRARY_PATH": str(fake), "FAKECU_MEMORY": str(1 << 30)})
    assert done.returncode == 1 and "cannot take 768.0M of device memory" in done.stderr
    assert "only 512.0M are free" in done.stderr and "--hbm" in done.stderr


@HOST
def test_kvgpud__says_why_there_are_no_kernels(start):
    helper = start("--no-kernels")
    status = json.loads(helper.kv.kvfs("gpu", "status", "--json", "--socket", helper.socket).stdout)[0]
    told = status["not"].split("; ")[-1] == "kernels: not wanted"
    assert told == (helper.kind == "cuda"), status["not"]


def test_kvgpud__one_a_device(helper):
    done = run(gpu.build_folder() / "gpu" / "kvgpud", helper.kv.store, "--backend", "host", "--socket",
               helper.socket, check=False)
    assert done.returncode == 1 and "another kvgpud listens" in done.stderr
    assert helper.stats()["daemon"] == 1


@HOST
def test_library__helper_of_another_device(helper):
    kvg = gpu.load_kvg()
    fails(errno.EXDEV, kvg.Context, str(helper.socket), 1, "host")


# ---- Python ----


@HOST
def test_python__dlpack(helper):
    numpy = pytest.importorskip("numpy")
    kvg = gpu.load_kvg()
    path = store(helper, "f", data := blob(1, 4 * MIB))
    with kvg.Context(str(helper.socket), backend="host") as ctx, open(path, "rb") as f:
        with ctx.map(f) as buffer:
            whole = numpy.from_dlpack(buffer)
            part = numpy.from_dlpack(buffer.tensor((2, 3, 5), "float32", 64))
            with pytest.raises(ValueError):
                buffer.tensor((4 * MIB,), "uint16")
            unused = buffer.__dlpack__()
            del unused
        assert bytes(whole) == data and part.shape == (2, 3, 5)
        assert part.tobytes() == data[64:64 + 120]
        assert helper.stats()["maps"] == 1, "it lives as long as what was made from it"
        del whole, part
        assert eventually(lambda: helper.stats()["maps"] == 0)


@HOST
def test_python__a_buffer_may_be_closed_twice(helper):
    """The second time takes nothing from what was made of it."""
    numpy = pytest.importorskip("numpy")
    kvg = gpu.load_kvg()
    path = store(helper, "f", data := blob(1, 4 * MIB))
    with kvg.Context(str(helper.socket), backend="host") as ctx, open(path, "rb") as f:
        with ctx.map(f) as buffer:
            whole = numpy.from_dlpack(buffer)
            buffer.close()
        assert helper.stats()["maps"] == 1 and bytes(whole) == data
        with pytest.raises(ValueError):
            numpy.from_dlpack(buffer)
        del whole
        assert eventually(lambda: helper.stats()["maps"] == 0)


@HOST
def test_python__what_ends_during_a_call_waits_for_it(helper):
    """From any thread, and from on_event; libkvg takes one call at a time."""
    numpy = pytest.importorskip("numpy")
    kvg = gpu.load_kvg()
    seen, held = [], []

    def on_event(buffer, event, _ms):
        ends = threading.Thread(target=held.clear)
        ends.start()
        ends.join()
        buffer.close()
        with pytest.raises(RuntimeError):
            ctx.stats()
        seen.append((event, helper.stats()["maps"]))

    ctx = kvg.Context(str(helper.socket), backend="host", on_event=on_event)
    with ctx:
        for is_closed in True, False:
            path = store(helper, "f", blob(1, 4 * MIB))
            with open(path, "rb") as f:
                buffer = ctx.map(f)
            if is_closed:
                held.append(numpy.from_dlpack(buffer))
                buffer.close()
            path.unlink()
            eventually(lambda: ctx.dispatch() or seen)
            assert seen.pop() == (kvg.INVALID, 1)
            assert eventually(lambda: helper.stats()["maps"] == 0)


@HOST
def test_python__torch(helper):
    torch = pytest.importorskip("torch")
    kvg = gpu.load_kvg()
    path = store(helper, "f", data := blob(1, 4 * MIB))
    with kvg.Context(str(helper.socket), backend="host") as ctx, open(path, "rb") as f:
        with ctx.map(f) as buffer:
            tensor = torch.from_dlpack(buffer.tensor((2 * MIB,), "int16"))
            assert tensor.numpy().tobytes() == data
            del tensor


@HOST
def test_scatter__into_an_engines_blocks(helper):
    """Segments in any order, some of them neighbours."""
    kvg = gpu.load_kvg()
    path = store(helper, "f", data := blob(1, 4 * MIB))
    pool = memory(bytes(MIB))
    base = ctypes.addressof(pool)
    segments = [(i * 4096, 4096, base + (i * 7 % 64) * 4096) for i in range(64)]
    random.Random(1).shuffle(segments)
    with kvg.Context(str(helper.socket), backend="host") as ctx, open(path, "rb") as f:
        with ctx.map(f) as buffer:
            buffer.scatter(segments)
            with pytest.raises(OSError):
                buffer.scatter([(4 * MIB - 1, 2, base)])
    for i in range(64):
        at = (i * 7 % 64) * 4096
        assert pool.raw[at:at + 4096] == data[i * 4096:(i + 1) * 4096]


@HOST
def test_push__is_published_like_any_other_file(helper):
    """Gathered from blocks in any order; nobody sees it before it is closed, and it needs no helper."""
    kvg = gpu.load_kvg()
    data, path = blob(3, 3 * MIB + 5), helper.kv.mnt / "pushed"
    blocks = [data[i:i + 100000] for i in range(0, len(data), 100000)]
    order = list(range(len(blocks)))
    random.Random(2).shuffle(order)
    pool = memory(b"".join(blocks[i].ljust(100000, b"?") for i in order))
    segments = [(i * 100000, len(blocks[i]), ctypes.addressof(pool) + place * 100000)
                for place, i in enumerate(order)]
    with kvg.Context(helper=False, backend="host") as ctx:
        with open(path, "wb") as f:
            ctx.push(f, segments)
            reader = Child(get, path)
        assert reader.result() == data, "who opens it early waits for the publish"
        assert get(path) == data
        assert helper.kv.kvfs("gpu", "warm", path, "--socket", helper.socket).returncode == 0
        back = memory(bytes(len(data)))
        with open(path, "rb") as f:
            ctx.pull(f, [(0, len(data), ctypes.addressof(back))])
        assert back.raw == data
    engine = engine_of(helper)
    assert engine.digest(engine.map(str(path))[0]) == digest(data)
