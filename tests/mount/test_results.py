# SPDX-License-Identifier: Apache-2.0
"""What tools/check says at its end."""
import json
import subprocess
import sys
from pathlib import Path

RESULTS = Path(__file__).parents[2] / "tools" / "results.py"


def program(name, status, *lines):
    return {"name": name, "result": "FAIL" if status else "OK", "returncode": status, "duration": 1.5,
            "stdout": "\n".join(lines) + "\n", "stderr": ""}


def sums(folder, *programs):
    """The lines of results.py for a run of unit tests in folder's build, and its status."""
    (folder / "results").mkdir()
    (folder / "results" / "lint.txt").write_text("ok lint: format\nskip lint: none\n")
    logs = folder / "build" / "meson-logs"
    logs.mkdir(parents=True)
    (logs / "testlog.json").write_text("".join(json.dumps(p) + "\n" for p in programs))
    done = subprocess.run([sys.executable, RESULTS, "results", "build"], cwd=folder, text=True,
                          stdout=subprocess.PIPE, check=False)
    return done.stdout.splitlines(), done.returncode


def test_the_output_of_failed_programs_is_at_the_end(elsewhere):
    lines, status = sums(
        elsewhere,
        program("good", 0, "[ RUN      ] test_a", "[       OK ] test_a", "quiet"),
        program("bad", 1, *(f"early {i}" for i in range(500)), "[ RUN      ] test_b", "[       OK ] test_b",
                "[ RUN      ] test_c", "7 != 8", "[  FAILED  ] test_c"),
        program("dead", 1, "==1==ERROR: AddressSanitizer"))
    assert status == 1
    assert lines[0] == "--- build: bad: FAIL, status 1, 1.5 s"
    assert lines[-7:] == [
        "7 != 8", "[  FAILED  ] test_c",
        "--- build: dead: FAIL, status 1, 1.5 s", "==1==ERROR: AddressSanitizer",
        "failed: build: bad: test_c", "failed: build: dead: FAIL",
        "3 passed, 2 failed, 1 skipped"]
    assert "early 499" in lines and "early 100" not in lines
    assert not any("RUN" in line or "quiet" in line for line in lines)


def test_nothing_is_shown_when_all_is_well(elsewhere):
    lines, status = sums(elsewhere, program("good", 0, "[ RUN      ] test_a", "[       OK ] test_a"))
    assert (lines, status) == (["2 passed, 0 failed, 1 skipped"], 0)
