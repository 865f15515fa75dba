# SPDX-License-Identifier: Apache-2.0
"""The conformance table: every system call on a file in every state.

The expected result is what a plain directory gives for the same row and state; but not while the
file is being written by another process, where the contract differs from POSIX (P3 to P5).
"""
import os

import pytest
from procs import Agent
from table import CONTENT, ROWS, SIZE, Case, outcome, tree



class State:
    """Brings a case's file into a state; the writer, where there is one, is another process."""

    def __init__(self, name, agent):
        self.name = name
        self.agent = agent
        self.fd = None

    def enter(self, case, kv):
        case.prepare()
        getattr(self, self.name)(case, kv)

    def leave(self):
        if self.fd is not None:
            self.agent.close(self.fd)
            self.fd = None

    def absent(self, case, kv):
        pass

    def written(self, case, kv):
        """For the first time, by a process that has it open still."""
        self.fd = self.agent.open(os.fspath(case.path), os.O_CREAT | os.O_WRONLY)
        self.agent.write(self.fd, CONTENT)

    def rewritten(self, case, kv):
        """Published, and a process is at work on its next version."""
        self.published(case, kv)
        self.fd = self.agent.open(os.fspath(case.path), os.O_RDWR)
        self.agent.pwrite(self.fd, CONTENT, 0)

    def published(self, case, kv):
        with open(case.path, "wb") as f:
            f.write(CONTENT)

    def evicted(self, case, kv):
        """Published, and on the device only."""
        self.published(case, kv)
        if kv:
            kv.settle()
            kv.kvfs("cool", case.path)

    def scratch(self, case, kv):
        """A pool: allocated, written in part, and held open by its owner."""
        self.fd = self.agent.open(os.fspath(case.path), os.O_CREAT | os.O_RDWR)
        self.agent.allocate(self.fd, SIZE)
        self.agent.pwrite(self.fd, CONTENT, 0)
        if kv:
            self.agent.fsync(self.fd)


    def empty(self, case, kv):
        """What a process finds that opens for writing what another one has not published."""
        with open(case.path, "wb"):
            pass


STATES = ("absent", "written", "rewritten", "published", "evicted", "scratch")

# Rows that open the file for reading alone.
READERS = {
    "open_read", "open_read_twice", "open_nofollow", "open_through_symlink", "open_direct",
    "read_behind_the_end", "read_negative_offset", "read_vectors", "seek", "sendfile", "splice",
    "map_and_read", "map_private_and_write", "map_shared_of_a_reader_for_writing", "advise",
    "write_of_a_reader_fails", "sync_of_a_reader", "copy_range_out", "ftruncate_of_a_reader_fails",
    "allocate_of_a_reader_fails", "unlink_while_open", "rename_while_open", "rename_to_a_new_name",
    "rename_into_a_directory", "flock"}
# Those of them that have changed names before, or after, they look at the content.
NAMES_CHANGED = {"open_through_symlink", "rename_to_a_new_name", "rename_into_a_directory"}
# Rows that would put what was not published in the place of a whole file, or the other way round.
REFUSED = {"rename_over_another", "rename_exchange"}
# Rows that open the file for writing, or change its size.
WRITERS = {
    "open_read_write_and_read", "open_write_and_close", "open_create", "open_truncate",
    "open_truncate_and_write", "open_append", "open_sync_and_write", "read_of_a_writer_fails",
    "map_shared_and_write", "write_inside", "write_far_behind_the_end", "write_nothing",
    "write_vectors", "write_negative_offset", "write_and_read_back", "write_and_sync",
    "copy_range_in", "copy_range_within_overlapping", "truncate_shorter", "truncate_longer",
    "truncate_to_nothing", "ftruncate_and_write", "allocate", "allocate_keep_size",
    "allocate_nothing", "punch", "punch_without_keep_size", "zero", "lock_range"}


def run_row(name, folder, state, kv):
    """(outcome of the row, what is left in the folder when its writer has closed the file)"""
    case = Case(folder)
    state.enter(case, kv)
    got = outcome(ROWS[name], case)
    state.leave()
    return got, tree(folder)


class Plain:
    """The answers of a plain directory, and what the contract makes of them."""

    def __init__(self, folder, agent):
        self.folder = folder
        self.agent = agent
        case = Case(folder / "untouched")
        State("published", agent).enter(case, None)
        self.untouched = tree(case.folder)

    def run(self, name, state):
        return run_row(name, self.folder / f"{name}.{state}", State(state, self.agent), None)

    def expected(self, name, state):
        got, left = self.run(name, state)
        if state == "written" and name in READERS:  # P3: there is nothing to be read yet
            return "ENOENT", left if name in NAMES_CHANGED else self.untouched
        if state == "written" and name in REFUSED:
            return "ENOENT", self.untouched
        if state in ("written", "rewritten") and name in WRITERS:
            # P4, P5: each process writes a version of its own; the last publish wins whole.
            own = self.run(name, "empty")[0] if state == "written" else got
            return own, self.untouched
        return got, left


@pytest.mark.parametrize("state", STATES)
def test_conformance(fresh, elsewhere, state):
    kv = fresh(size="1G", dram="256M", read_wait="20ms")
    agent = Agent()
    plain = Plain(elsewhere, agent)
    wrong = []
    try:
        for name in ROWS:
            expected = plain.expected(name, state)
            got = run_row(name, kv.mnt / name, State(state, agent), kv)
            if got != expected:
                wrong.append(name)
                print(f"{state} {name}:\n  {str(got)[:500]}\n  not {str(expected)[:500]}")
    finally:
        agent.stop()
    assert not wrong


def test_the_table_has_every_row():
    assert READERS | WRITERS | REFUSED <= set(ROWS)
