# SPDX-License-Identifier: Apache-2.0
"""What goes first when the store is full, and what does not go (K1, K2)."""
import errno
import os
import time

import pytest
from data import MIB, blob, get, put, replace
from procs import eventually, parallel
from syscalls import RENAME_EXCHANGE, RENAME_NOREPLACE, rename2


def numbers(directory):
    return sorted(int(name[1:]) for name in os.listdir(directory) if name.startswith("f"))


def fill(directory, count, first=0, size=MIB):
    for i in range(first, first + count):
        put(directory / f"f{i}", blob(i, size))


def test_k1_three_times_the_store_by_several_processes(fresh):
    """No writer sees an error; what is left is whole, and the newest is there; most of the store stays full."""
    kv = fresh(size="64M", dram="64M", lease="0s")
    fill(kv.mnt, 64)

    def write(who):
        least = 64
        for i in range(48):
            put(kv.mnt / f"w{who}-{i}", blob(100 * who + i, MIB))
            least = min(least, len(os.listdir(kv.mnt)))
        return least

    # A quarter of so small a store is kept free; the rest may be in the air.
    assert min(parallel(write, range(4), timeout=240)) >= 32
    kv.settle_eviction()
    left = [name for name in os.listdir(kv.mnt) if name.startswith("w")]
    assert 32 <= len(left) <= 64
    for name in left:
        who, i = map(int, name[1:].split("-"))
        assert get(kv.mnt / name) == blob(100 * who + i, MIB)
    assert any(name.endswith("-47") for name in left)


def test_k1_what_a_reader_holds_is_not_waited_for(fresh):
    """An unlinked file that is still open takes its part of the store; the rest works as before."""
    kv = fresh(size="64M", dram="64M", lease="0s")
    put(kv.mnt / "held", blob(1, 20 * MIB))
    kv.settle()
    with open(kv.mnt / "held", "rb") as held:
        (kv.mnt / "held").unlink()
        fill(kv.mnt, 40)
        kv.settle()  # what is not durable yet is passed over
        fill(kv.mnt, 56, first=40)
        left = numbers(kv.mnt)
        assert 12 <= len(left) <= 44 and min(left) >= 40
        assert held.read() == blob(1, 20 * MIB)
    fill(kv.mnt, 96, first=96)
    assert len(numbers(kv.mnt)) > 44


def test_k1_a_full_store_leaves_temporary_files_to_be_renamed(fresh):
    """Without leases the newest is the last to go: what was written is there to be renamed."""
    kv = fresh(size="64M", dram="64M", lease="0s")

    def write(who):
        for i in range(300):
            replace(kv.mnt / f"w{who}-{i}", blob(1000 * who + i, MIB // 4))

    parallel(write, range(4), timeout=240)
    assert any(name.endswith("-299") for name in os.listdir(kv.mnt))


def test_k1_domains_together_have_one_order(fresh):
    """When the store is full the oldest goes, whichever directory with a quota it is in."""
    kv = fresh(size="64M", dram="64M", lease="0s")
    for name in ("a", "b"):
        (kv.mnt / name).mkdir()
        kv.kvfs("quota", kv.mnt / name, "48M")
    fill(kv.mnt / "a", 10)
    fill(kv.mnt, 10, first=100)
    fill(kv.mnt / "b", 10)
    assert get(kv.mnt / "a" / "f3") == blob(3, MIB)
    kv.settle()  # what is not durable yet is passed over
    fill(kv.mnt, 34, first=200)
    left = [("a", i) for i in numbers(kv.mnt / "a")] + [("", i) for i in numbers(kv.mnt)] + [
        ("b", i) for i in numbers(kv.mnt / "b")]
    order = [("a", i) for i in range(10) if i != 3] + [("", i) for i in range(100, 110)] + [
        ("b", i) for i in range(10)] + [("a", 3)] + [("", i) for i in range(200, 234)]
    assert 35 <= len(left) < 60
    assert sorted(left) == sorted(order[-len(left):])


def test_never_read_files_go_first(fresh):
    """With unread_ttl a file that nobody read back goes before older ones that somebody did."""
    kv = fresh(size="64M", dram="64M", lease="0s", unread_ttl="1ms")
    fill(kv.mnt, 10)
    for i in range(10):
        assert get(kv.mnt / f"f{i}") == blob(i, MIB)
    fill(kv.mnt, 20, first=10)
    kv.settle()
    time.sleep(0.01)  # older than the option says
    fill(kv.mnt, 40, first=100)
    left = numbers(kv.mnt)
    assert set(range(10)) <= set(left)
    assert not set(range(10, 18)) & set(left)  # how many had to go depends on what was under way


def test_never_read_files_go_by_age_without_the_option(fresh):
    kv = fresh(size="64M", dram="64M", lease="0s")
    fill(kv.mnt, 10)
    for i in range(10):
        assert get(kv.mnt / f"f{i}") == blob(i, MIB)
    kv.settle()
    fill(kv.mnt, 80, first=100)
    assert not set(range(10)) & set(numbers(kv.mnt))


# ---- leases ----


def test_k2_who_opened_a_file_finds_it_again(fresh):
    """Within the lease it stays though everything else goes; a writer that needs it waits."""
    kv = fresh(size="64M", dram="64M", lease="10m")
    fill(kv.mnt, 8)
    for i in range(4):
        assert get(kv.mnt / f"f{i}") == blob(i, MIB)
    fill(kv.mnt, 150, first=100)
    left = numbers(kv.mnt)
    assert set(range(4)) <= set(left)
    assert not set(range(4, 8)) & set(left)
    assert int(os.getxattr(kv.mnt / "f0", "user.kvfs.lease")) > 0


def test_k2_who_looked_a_file_up_finds_it_again(fresh):
    kv = fresh(size="64M", dram="64M", lease="10m")
    fill(kv.mnt, 8)
    kv.remount()  # so that the kernel knows none of the names
    for i in range(4):
        assert os.path.exists(kv.mnt / f"f{i}")
    fill(kv.mnt, 150, first=100)
    left = numbers(kv.mnt)
    assert set(range(4)) <= set(left)
    assert not set(range(4, 8)) & set(left)


def lease_of(path):
    return int(os.getxattr(path, "user.kvfs.lease"))


def test_k2_a_rename_ends_the_lease_of_the_old_name(fresh):
    """RENAME looks the old name up, which nobody finds any more: what is stored so can be evicted."""
    kv = fresh(size="64M", dram="64M", lease="10m")
    for i in range(150):
        replace(kv.mnt / f"f{i}", blob(i, MIB))
    assert 149 in numbers(kv.mnt) and not set(range(50)) & set(numbers(kv.mnt))


@pytest.mark.parametrize("how", ["refused", "exchange", "linked"])
def test_k2_a_name_that_stays_stays_leased(fresh, how):
    kv = fresh(size="64M", dram="64M", lease="10m")
    for name in ("a", "b"):
        put(kv.mnt / name, blob(1, MIB))
    if how == "linked":
        os.link(kv.mnt / "a", kv.mnt / "c")
    kv.remount()
    assert os.path.exists(kv.mnt / "a")
    if how == "refused":
        with pytest.raises(FileExistsError):
            rename2(kv.mnt / "a", kv.mnt / "b", RENAME_NOREPLACE)
    elif how == "exchange":
        rename2(kv.mnt / "a", kv.mnt / "b", RENAME_EXCHANGE)
    else:
        os.rename(kv.mnt / "a", kv.mnt / "b")
    assert lease_of(kv.mnt / ("a" if how == "refused" else "b")) > 60_000


def test_k2_a_writer_waits_for_leases(fresh):
    """Everything is leased: the write is done when the first lease has run out, not before."""
    kv = fresh(size="64M", dram="64M", lease="2s")
    fill(kv.mnt, 54)
    for i in range(54):
        assert get(kv.mnt / f"f{i}") == blob(i, MIB)
    put(kv.mnt / "new", blob(7, 16 * MIB))
    assert get(kv.mnt / "new") == blob(7, 16 * MIB)
    assert len(numbers(kv.mnt)) < 50


def test_k2_a_leased_quota_ends_in_edquot(fresh):
    """Leases that outlast a writer's patience: the error of a full quota, and nothing went."""
    kv = fresh(size="64M", dram="64M", lease="12s")
    tenant = kv.mnt / "tenant"
    tenant.mkdir()
    kv.kvfs("quota", tenant, "8M")
    fill(tenant, 7)
    fds = []
    for i in range(7):
        assert get(tenant / f"f{i}") == blob(i, MIB)
    fds = [os.open(tenant / f"f{i}", os.O_RDONLY) for i in range(7)]
    with pytest.raises(OSError) as e:
        put(tenant / "new", blob(9, 4 * MIB))
    assert e.value.errno == errno.EDQUOT
    assert numbers(tenant) == list(range(7))
    for fd in fds:
        os.close(fd)


def test_a_listing_is_no_use(fresh):
    """ls -l of everything keeps nothing."""
    kv = fresh(size="64M", dram="64M", lease="10m")
    fill(kv.mnt, 20)
    kv.remount()
    with os.scandir(kv.mnt) as entries:
        assert len(list(entries)) == 20
    fill(kv.mnt, 150, first=100)
    assert not set(range(20)) & set(numbers(kv.mnt))
    eventually(lambda: kv.counter("evicted_store") > 0, what="eviction")
