"""The tests that `make test` leaves out follow from the times of cases."""

from __future__ import annotations

from pathlib import Path

import long_tests
from long_tests import LIMIT, read_times, select


def test_what_remains_of_a_file() -> None:
    """Short cases, one of each test unless it is long, and no file without any."""
    times = {
        "a.py": {
            "test_short": {"": 0.01},
            "test_cases": {"[x]": 0.9, "[y]": 0.6, "[z]": 0.8},
            "test_long": {"": LIMIT},
        },
        "b.py": {"test_only": {"": 30.0}},
    }
    names = [f"tests/{f}::{t}{c}" for f, of in times.items() for t, cs in of.items() for c in cs]
    found = select(times, [*names, "tests/b.py::test_without_time"])
    assert found["cases"] == {
        "a.py": {"test_cases": ["[y]", "[z]"], "test_long": []},
        "b.py": {"test_without_time": []},
    }
    assert found["seconds"] == {"b.py": 30.0}


def test_a_report_of_pytest(tmp_path: Path) -> None:
    report = tmp_path / "times.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="tests.x.test_a.TestB" name="test_c[1]" '
        'time="0.5"/><testcase classname="tests.test_d" name="test_e" time="0"><skipped/>'
        "</testcase></testsuite></testsuites>"
    )
    assert read_times(report) == {
        "x/test_a.py": {"TestB::test_c": {"[1]": 0.5}}, "test_d.py": {"test_e": {"": 0.0}},
    }  # fmt: skip


def test_the_list_has_only_files_that_exist() -> None:
    tests = Path(long_tests.__file__).resolve().parents[1]
    assert [name for name in long_tests._read()["cases"] if not (tests / name).is_file()] == []
