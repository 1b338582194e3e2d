"""Which test cases `make test` leaves to ``make long``, and in which order files run.

`make test` has to end within ten minutes on two cores, so every file has a limit. Up to it, the
shortest cases run, one of each test before a second of any. Beyond it run short cases, and of each
test the shortest case unless that takes long. No file is left out. ``long_tests.json`` lists, by
file and test, the cases that remain of tests that do not run as a whole. A test that is not listed
runs, so new tests run at once.

`make times` runs all that `make test` does and writes the list anew from the time of each case.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

LIST = Path(__file__).with_suffix(".json")
LIMIT = 1.5  # seconds of the cases of one file
FIRST = 1.0  # seconds of a test's shortest case, up to which it always runs
SHORT = 0.1  # seconds of a case, up to which it always runs

# Seconds by case, of all cases of a test, of all tests of a file.
Times = dict[str, dict[str, dict[str, float]]]


def is_long(name: str) -> bool:
    """Return whether `make test` leaves out a test case, given its full name."""
    file, test, case = split(name)
    kept = _read()["cases"].get(file, {}).get(test)
    return kept is not None and case not in kept


def turn(name: str) -> float:
    """Return the sort key of a test case: files that take longest run first."""
    return -float(_read()["seconds"].get(split(name)[0], 0.0))


def split(name: str) -> tuple[str, str, str]:
    """Return the file below tests/, the test (with its class) and the case of a full name."""
    path, _, case = name.partition("[")
    file, _, test = path.removeprefix("tests/").partition("::")
    return file, test, f"[{case}" if case else ""


def select(times: Times, collected: Iterable[str]) -> dict[str, dict[str, object]]:
    """Return the content of the list.

    collected: the full names of all cases. Those without a time are left out.
    """
    tests: defaultdict[str, defaultdict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in collected:
        file, test, case = split(name)
        tests[file][test].append(case)
    cases: dict[str, dict[str, list[str]]] = {}
    seconds: dict[str, float] = {}
    for file, found in sorted(tests.items()):
        known = times.get(file, {})
        kept = _select_in_file({test: known.get(test, {}) for test in found})
        total = sum(known[test][case] for test, chosen in kept.items() for case in chosen)
        if total >= LIMIT:
            seconds[file] = round(total, 1)
        if listed := {
            test: [case for case in all_ if case in kept.get(test, ())]
            for test, all_ in found.items()
            if not set(all_) <= kept.get(test, set())
        }:
            cases[file] = listed
    return {"seconds": seconds, "cases": cases}


def _select_in_file(times: Mapping[str, Mapping[str, float]]) -> dict[str, set[str]]:
    kept: dict[str, set[str]] = {test: set() for test in times}
    cases: list[tuple[int, float, str, str]] = []
    for test, known in times.items():
        for place, (taken, case) in enumerate(sorted((t, case) for case, t in known.items())):
            cases.append((place if taken > SHORT else -1, taken, test, case))
    left = LIMIT
    for number, (place, taken, test, case) in enumerate(sorted(cases)):
        if number == 0 or taken <= left or (place <= 0 and taken < FIRST):
            kept[test].add(case)
            left -= taken
    return kept


def read_times(report: Path) -> Times:
    """Return the times in a report that pytest has written with ``--junitxml``."""
    times: Times = defaultdict(lambda: defaultdict(dict))
    for each in ElementTree.parse(report).iter("testcase"):
        module, name = each.get("classname", ""), each.get("name", "")
        if not module:  # a file that was skipped as a whole
            continue
        parts = module.removeprefix("tests.").split(".")
        classes = [part for part in parts if part[0].isupper()]
        file = "/".join(parts[: len(parts) - len(classes)]) + ".py"
        _, test, case = split("::".join(["", *classes, name]))
        times[file][test][case] = float(each.get("time", "0"))
    return times


@cache
def _read() -> dict[str, dict[str, dict[str, list[str]]]]:
    found: dict[str, dict[str, dict[str, list[str]]]] = json.loads(LIST.read_text())
    return found


def main(report: str, collected: str) -> None:
    """Write the list from a report, and the output of ``pytest --collect-only -q``."""
    names = [line for line in Path(collected).read_text().splitlines() if "::" in line]
    found = select(read_times(Path(report)), names)
    # One line for each test.
    text = json.dumps(found, ensure_ascii=False, separators=(",", ": "))
    for mark in ('{"', '],"', '},"', ',"tests'):
        text = text.replace(mark, mark[:-1] + "\n" + mark[-1])
    LIST.write_text(text + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
