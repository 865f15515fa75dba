# SPDX-License-Identifier: Apache-2.0
"""Sums up a run of tools/check: results.py RESULTS BUILD...

RESULTS is a folder of JUnit files (pytest) and of texts with lines "ok", "not ok" or "skip"; each BUILD is a
Meson build folder with a test log. Prints the end of what each failed unit test has said, then what failed, then one
line with the sums; exits 1 if anything failed.
"""
import json
import re
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree


# Of a program's output: the end says why it failed, and a sanitizer's report is as long.
SHOWN_LINES = 120


def count_lines(path):
    """The lines of tools/lint and of steps that could not be run."""
    words = {"ok": "passed", "not ok": "failed", "skip": "skipped"}
    for line in path.read_text().splitlines():
        match = re.match(r"(ok|not ok|skip) (.*)", line)
        if match:
            yield words[match[1]], match[2]


def count_junit(path):
    for case in ElementTree.parse(path).iter("testcase"):
        kinds = {child.tag for child in case}
        name = f"{case.get('classname')}::{case.get('name')}"
        if kinds & {"failure", "error"}:
            yield "failed", name
        else:
            yield "skipped" if "skipped" in kinds else "passed", name


def meson_entries(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def show_failed(path):
    """What the failed programs of a build have said: the log itself is gone with the next run."""
    for entry in meson_entries(path):
        if entry["result"] in ("OK", "SKIP", "EXPECTEDFAIL"):
            continue
        text = entry.get("stdout", "") + entry.get("stderr", "")
        print(f"--- {path.parts[0]}: {entry['name']}: {entry['result']}, "
              f"status {entry.get('returncode')}, {entry.get('duration', 0):.1f} s")
        lines = [line for line in text.splitlines() if not re.match(r"\[ (RUN  |      OK)", line)]
        print("\n".join(lines[-SHOWN_LINES:]))


def count_meson(path):
    """A cmocka program is many tests, counted one by one; one that died has failed at least once."""
    for entry in meson_entries(path):
        text = entry.get("stdout", "") + entry.get("stderr", "")
        passed = re.findall(r"^\[       OK \] (\w+)", text, re.MULTILINE)
        skipped = set(re.findall(r"^\[  SKIPPED \] (test_\w+)", text, re.MULTILINE))
        failed = set(re.findall(r"^\[  FAILED  \] (test_\w+)", text, re.MULTILINE))
        name = f"{path.parts[0]}: {entry['name']}"
        if entry["result"] == "SKIP":
            yield "skipped", name
            continue
        yield from (("passed", f"{name}: {test}") for test in passed)
        yield from (("skipped", f"{name}: {test}") for test in skipped)
        if entry["result"] != "OK":
            yield from (("failed", f"{name}: {test}") for test in failed or {entry["result"]})
        elif not passed and not skipped:
            yield "passed", name


def main():
    results, builds = Path(sys.argv[1]), sys.argv[2:]
    found = []
    for path in sorted(results.iterdir()):
        found += count_junit(path) if path.suffix == ".xml" else count_lines(path)
    for build in builds:
        path = Path(build) / "meson-logs" / "testlog.json"
        if path.exists():
            show_failed(path)
            found += count_meson(path)
    for result, name in found:
        if result == "failed":
            print("failed:", name)
    sums = Counter(result for result, _ in found)
    print(f"{sums['passed']} passed, {sums['failed']} failed, {sums['skipped']} skipped")
    return 1 if sums["failed"] or not sums["passed"] else 0


sys.exit(main())
