# SPDX-License-Identifier: Apache-2.0
"""Random calls by three processes, with files held open, against a plain directory: results,
metadata and bytes. A sequence that fails is shrunk and printed; to run it again, put what is printed
into a file and set KVFS_REPLAY to its path.

KVFS_LONG=1: others each time, many more.
"""
import os
import random
import shutil
from pathlib import Path

import pytest
from model import Calls, Process, Side, draw_sequence, run_both, script, shrink
from procs import LONG

COUNT = 300
SEEDS = [random.randrange(1 << 32) for _ in range(100)] if LONG else range(3)


def differ(sequence, plain_root, other_root, make=Process):
    """What differs when SEQUENCE runs in new directories in the two places."""
    roots = [root / f"run{random.randrange(1 << 48)}" for root in (plain_root, other_root)]
    sides = []
    try:
        sides += [Side(roots[0]), Side(roots[1], make)]
        return run_both(sequence, *sides)
    finally:
        for side in sides:
            side.stop()
        for root in roots:
            shutil.rmtree(root, ignore_errors=True)


def check(sequence, plain_root, other_root, make=Process):
    """Raises with the shortest sequence that was found to differ."""
    if differ(sequence, plain_root, other_root, make) is None:
        return
    short = shrink(sequence, lambda s: differ(s, plain_root, other_root, make) is not None)
    raise AssertionError(f"{differ(short, plain_root, other_root, make)}\n{script(short)}")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", SEEDS)
def test_as_a_plain_directory(kv, elsewhere, seed):
    check(draw_sequence(seed, COUNT), elsewhere, kv.dir)
    kv.check()


if "KVFS_REPLAY" in os.environ:

    def test_replay(kv, elsewhere):
        sequence = eval(Path(os.environ["KVFS_REPLAY"]).read_text(), {"__builtins__": {}})
        check(sequence, elsewhere, kv.dir)


# ---- The test can fail ----


class Forgetful(Calls):
    """A filesystem that loses attributes when a file replaces another."""

    def rename(self, name, other):
        replaces = os.path.isfile(self.path(other)) and os.path.isfile(self.path(name))
        super().rename(name, other)
        if replaces and not os.path.samefile(self.root, self.path(other)):
            for key in os.listxattr(self.path(other)):
                os.removexattr(self.path(other), key)


class ForgetfulProcess(Process):
    tools = Forgetful


def test_a_difference_is_found_and_shrunk(elsewhere):
    for seed in range(20):
        sequence = draw_sequence(seed, COUNT)
        if differ(sequence, elsewhere, elsewhere, ForgetfulProcess):
            break
    with pytest.raises(AssertionError) as caught:
        check(sequence, elsewhere, elsewhere, ForgetfulProcess)
    text = str(caught.value)
    short = eval(text[text.index("[\n"):], {"__builtins__": {}})
    assert differ(short, elsewhere, elsewhere, ForgetfulProcess)
    assert differ(short, elsewhere, elsewhere) is None
    assert 3 <= len(short) <= 8, text
    assert {"rename", "setxattr"} <= {call[1] for call in short}
