# SPDX-License-Identifier: Apache-2.0
"""The GPU helper with cuFile, on the fakes: cold files come past the CPU, and nothing is shown unchecked."""
import errno
import json
import os
import subprocess

import pytest
from data import MIB, blob, put
from gpu import EARLY
from gpufixtures import (CUFILE, SIZE, SMALL, cold, damage, digest, engine_of, mode,
                         pytest_generate_tests, start, store)  # noqa: F401
from procs import eventually

# Chunks that are read past the CPU; the odd end goes by the ring.
WHOLE = SIZE // MIB * MIB


def cold_file(helper, name="f", seed=1, size=SIZE):
    path = store(helper, name, data := blob(seed, size))
    cold(helper, path)
    return str(path), data


def status(helper):
    return json.loads(helper.kv.kvfs("gpu", "status", "--json", "--socket", helper.socket).stdout)[0]


def map_cold(engine, path, off=0, length=0, flags=0):
    return engine.map(path, off, length, flags, os.O_DIRECT)


def right(helper, path, data):
    """PATH is mapped and right; the counters afterwards."""
    engine = engine_of(helper)
    assert engine.digest(map_cold(engine, path)[0]) == digest(data)
    return helper.stats()


# ---- Bytes ----


@CUFILE
def test_direct__cold_files_come_past_the_cpu(start):
    helper = start()
    assert "cuFile 1.14" in status(helper)["backend"]
    path, data = cold_file(helper)
    stats = right(helper, path, data)
    assert (stats["direct_bytes"], stats["from_device_bytes"]) == (WHOLE, SIZE)
    assert stats["direct_errors"] == stats["checksum_errors"] == stats["from_file_bytes"] == 0
    # What is in DRAM is copied from there.
    warm = store(helper, "warm", other := blob(2, SIZE))
    stats = right(helper, str(warm), other)
    assert (stats["direct_bytes"], stats["from_dram_bytes"]) == (WHOLE, SIZE)
    assert status(helper)["not"] == ""


@CUFILE
def test_direct__small_segments_and_ranges(start):
    helper = start(*SMALL)
    path, data = cold_file(helper, size=60 * MIB)
    engine = engine_of(helper)
    key = map_cold(engine, path, 5 * MIB + 3, 20 * MIB)[0]
    assert engine.read(key) == data[5 * MIB + 3:25 * MIB + 3]
    assert helper.stats()["direct_bytes"] == 22 * MIB
    key = map_cold(engine, path)[0]
    assert engine.digest(key) == digest(data)
    assert helper.stats()["direct_bytes"] == 60 * MIB


# ---- What goes wrong ----


@CUFILE
def test_direct__flipped_bytes_are_caught(start):
    helper = start()
    path, data = cold_file(helper)
    helper.tell("fail cuFileRead:1+:2")
    stats = right(helper, path, data)
    assert stats["checksum_errors"] > 0 and stats["failed"] == 0
    assert stats["direct_bytes"] < WHOLE and stats["from_device_bytes"] == SIZE


@CUFILE
def test_direct__damage_on_the_drive_is_an_error(start):
    """Read past the CPU, by the ring, through the mount: then it is given up."""
    helper = start()
    path = store(helper, "f", blob(1, SIZE))
    damage(helper, path)
    engine = engine_of(helper)
    with pytest.raises(OSError) as e:
        map_cold(engine, str(path))
    assert e.value.errno == errno.EIO
    stats = engine.stats()
    assert (stats["checksum_errors"], stats["failed"]) == (2, 1)


@CUFILE
@pytest.mark.parametrize("code", [1, errno.EIO], ids=["short", "EIO"])
def test_direct__failed_reads_go_by_the_ring(start, code):
    helper = start(*SMALL)
    path, data = cold_file(helper)
    helper.tell(f"fail cuFileRead:2:{code}")
    stats = right(helper, path, data)
    assert stats["direct_errors"] == 1 and stats["failed"] == 0
    assert 0 < stats["direct_bytes"] < WHOLE
    eventually(lambda: "goes by the ring" in status(helper)["not"])
    assert helper.log().count("a read past the CPU failed") == 1


@CUFILE
@pytest.mark.parametrize("code", [5030, 5008])
def test_direct__is_off_for_good_when_it_is_not_supported(start, code):
    helper = start()
    path, data = cold_file(helper)
    other, more = cold_file(helper, "g", 2)
    helper.tell(f"fail cuFileRead:1+:{code}")
    stats = right(helper, path, data)
    assert stats["direct_bytes"] == 0 and stats["failed"] == 0
    eventually(lambda: f"not read past the CPU any more: error {code}, " in status(helper)["not"])
    helper.tell()
    stats = right(helper, other, more)
    assert stats["direct_bytes"] == 0 and stats["from_device_bytes"] == 2 * SIZE
    assert helper.log().count("any more") == 1


@CUFILE
def test_direct__a_device_that_fails_its_probe(start):
    """As on overlay: the helper works, and says what does not."""
    helper = start(FAKECU_FAIL="cuFileHandleRegister:1+:5030")
    assert "a drive is not read past the CPU: cuFileHandleRegister: error 5030" in status(helper)["not"]
    path, data = cold_file(helper)
    stats = right(helper, path, data)
    assert (stats["direct_bytes"], stats["from_device_bytes"]) == (0, SIZE)


@CUFILE
def test_direct__no_more_memory_can_be_registered(start):
    """The rest goes by the ring; for the next file there may be room again."""
    helper = start(*SMALL, FAKECUFILE_PINNED_MAX=str(4 * MIB))
    path, data = cold_file(helper)
    stats = right(helper, path, data)
    assert 0 < stats["direct_bytes"] <= 8 * MIB and stats["direct_errors"] == 0
    eventually(lambda: "cannot be opened to drives: error 5016" in status(helper)["not"])
    before = stats["direct_bytes"]
    other, more = cold_file(helper, "g", 2)
    assert right(helper, other, more)["direct_bytes"] > before
    assert helper.log().count("error 5016") == 1


@CUFILE
def test_direct__a_read_that_does_not_end(start):
    """Its file fails in time, and its memory is nobody's until the call has returned."""
    helper = start()
    path, data = cold_file(helper)
    other, more = cold_file(helper, "g", 2)
    helper.tell("fail cuFileRead:1+:7", "fail cuFileStuck:1+:1")
    engine = engine_of(helper)
    with pytest.raises(OSError) as e:
        map_cold(engine, path)
    assert e.value.errno == errno.ETIMEDOUT
    eventually(lambda: helper.stats()["maps"] == 0)
    stats = helper.stats()
    assert stats["held"] == stats["used"] == 22 * MIB and stats["failed"] == 1
    assert stats["entries"] == 0
    helper.tell()
    eventually(lambda: helper.stats()["used"] == 0)
    assert helper.stats()["held"] == 0
    assert engine.digest(map_cold(engine, other)[0]) == digest(more)
    assert engine.digest(map_cold(engine, path)[0]) == digest(data)
    assert helper.stats()["direct_bytes"] == 2 * WHOLE


@CUFILE
def test_direct__others_use_the_ring_while_a_read_does_not_end(start):
    helper = start(*SMALL)
    path, data = cold_file(helper)
    other, more = cold_file(helper, "g", 2)
    helper.tell("fail cuFileRead:1:7", "fail cuFileStuck:1+:1")
    engine = engine_of(helper)
    with pytest.raises(OSError) as e:
        map_cold(engine, path)
    assert e.value.errno == errno.ETIMEDOUT
    stats = right(helper, other, more)
    assert stats["held"] == 22 * MIB and stats["from_device_bytes"] >= SIZE
    direct = stats["direct_bytes"]
    assert direct < WHOLE
    helper.tell()
    eventually(lambda: helper.stats()["held"] == 0)
    right(helper, path, data)
    # Of the first try, too, what was brought before it failed.
    assert helper.stats()["direct_bytes"] >= direct + WHOLE


@CUFILE
def test_direct__helper_ends_while_a_read_does_not(start):
    helper = start()
    path, _ = cold_file(helper)
    helper.tell("fail cuFileRead:1+:7", "fail cuFileStuck:1+:1")
    engine = engine_of(helper)
    map_cold(engine, path, 0, 0, EARLY)
    eventually(lambda: helper.stats()["held"] > 0)
    assert helper.stop() == 0
    assert "a read does not end, leaving it" in helper.log()
    helper.report.unlink(missing_ok=True)


# ---- What changes meanwhile ----


@CUFILE
def test_direct__the_file_changes_during_a_read(start):
    """Who asked for the old version gets it whole; who asks now gets the new one."""
    helper = start(*SMALL)
    path, data = cold_file(helper)
    old, new = engine_of(helper), engine_of(helper)
    helper.tell("fail cuFileRead:1+:3", "hold")
    key = map_cold(old, path, 0, 0, EARLY)[0]
    put(path, other := blob(2, SIZE))
    new_key = new.map(path, 0, 0, EARLY)[0]
    helper.tell()
    for engine, k, content in ((old, key, data), (new, new_key, other)):
        engine.wait(k, SIZE, 30)
        assert engine.digest(k) == digest(content)
    assert helper.stats()["failed"] == 0


@CUFILE
@pytest.mark.parametrize("how", ["kill", "unmount"])
def test_direct__the_daemon_goes_during_a_read(start, how):
    """What is on the drives is still right, or it fails: nothing else is shown."""
    helper = start(*SMALL)
    path, data = cold_file(helper)
    engine = engine_of(helper)
    helper.tell("fail cuFileRead:1+:3", "hold")
    key = map_cold(engine, path, 0, 0, EARLY)[0]
    if how == "kill":
        helper.kv.kill()
    else:
        subprocess.run(["umount", "-l", helper.kv.mnt], check=True)
        # The helper has the file open until it has ended with it.
        assert helper.stats()["daemon"] == 1
    helper.tell()
    try:
        engine.wait(key, SIZE, 30)
    except OSError as e:
        assert e.errno in (errno.EIO, errno.ENOTCONN)
    else:
        assert engine.digest(key) == digest(data)
    engine.unmap(key)
    if how == "unmount":
        helper.kv.daemon.wait(30)
    helper.kv.mount()
    eventually(lambda: helper.stats()["daemon"] == 1)
    assert engine.digest(map_cold(engine, path)[0]) == digest(data)
