"""What any reader of files may rely on: bounded files, numbers and messages."""

from __future__ import annotations

import copy
import os
import socket
from pathlib import Path

import msgspec
import pytest

from fxpart import files
from fxpart.cli import output
from fxpart.errors import LONGEST, MOST_PROBLEMS, FxpartError, Problem, error, quoted, short


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100_000)
    assert files.read_bytes(path, 100_000) == b"x" * 100_000
    with pytest.raises(OSError, match="more than 99999 bytes"):
        files.read_bytes(str(path), 99_999)
    with files.open_regular_file(path) as (file, size):
        assert (size, file.read(3)) == (100_000, b"xxx")


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    os.symlink(tmp_path / "pipe", tmp_path / "link")
    open_files = len(os.listdir("/proc/self/fd"))
    for path in (tmp_path / "pipe", tmp_path / "link", tmp_path, "/dev/zero", "/dev/null"):
        with pytest.raises(OSError, match="it is not a regular file"):
            files.read_bytes(path)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        with pytest.raises(OSError, match="No such device"):
            files.read_bytes(tmp_path / "socket")
    with pytest.raises(OSError, match="null"):
        files.read_bytes("a\0b")
    assert len(os.listdir("/proc/self/fd")) == open_files


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('{"a":[1,18446744073709551616]}', r"\$\.a\[1\]"),
        ("-9223372036854775809", r"\$`"),
        ("9" * 400, r"\$`"),
        ('{"a":{"' + "k" * 200 + '":' + "9" * 40 + "}}", r"\$\.a\.\.\.\."),
    ],
)
def test_integers_beyond_64_bits_are_named(text: str, place: str) -> None:
    for given in (text, text.encode()):
        with pytest.raises(msgspec.ValidationError, match=place):
            files.from_json(given)
    with pytest.raises(ValueError, match="too large"):
        files.toml("x = 18446744073709551616")


@pytest.mark.parametrize(
    "text", ["NaN", "1e999", "Infinity", '"\\ud800"', "9" * 5000, "", "[" * 99_999]
)
def test_what_is_no_json_is_refused(text: str) -> None:
    with pytest.raises((ValueError, RecursionError)):
        files.from_json(text)


def test_other_numbers_are_as_they_were() -> None:
    text = (
        '[18446744073709551615,-9223372036854775808,0.00012345678901234567,"99999999999999999999"]'
    )
    assert files.from_json(text) == [2**64 - 1, -(2**63), 0.00012345678901234567, "9" * 20]
    assert files.from_json(b"[1]", list[int]) == [1]
    assert files.toml("x = [1, 2.5, inf]")["x"] == [1, 2.5, float("inf")]


def test_quoted_values_are_cut() -> None:
    nested: list[object] = []
    for _ in range(100_000):
        nested = [nested]
    assert quoted("a'b") == '"a\'b"' and quoted("x" * 81) == "'" + "x" * 80 + "'..."
    assert quoted(nested) == "a list" and quoted(10**5000) == "a int"
    assert quoted([1, 2]) == "[1, 2]" and len(quoted(list(range(1000)), 20)) == 23
    assert short("x" * 80) == "x" * 80 and short("xyz", 2) == "xy..."


def test_a_long_text_of_a_problem_loses_its_middle() -> None:
    why = "first " + "x" * 1_000_000 + " last"
    said = error("FXP109", where="\ud800", why=why).problems[0]
    assert said.why.startswith("first ") and said.why.endswith(" last")
    assert len(said.why) < LONGEST + 100 and "984011 characters left out" in said.why
    assert said.where == "\\ud800"
    assert Problem("FXP109", "é…", "x" * LONGEST, "").why == "x" * LONGEST


@pytest.mark.parametrize(
    ("count", "length"), [(20_000, 10), (257, 10), (400, 9_970), (400, 10_000), (2, 10**6)]
)
def test_of_very_many_problems_the_first_are_listed(count: int, length: int) -> None:
    problems = [Problem("FXP402", f"device {n}", "y" * length, "") for n in range(count)]
    said = FxpartError(problems)
    assert said.problems[0].where == "device 0"
    assert 2 <= len(said.problems) <= MOST_PROBLEMS
    assert len(str(said)) < 150_000 and len(msgspec.json.encode(output.problems(said))) < 200_000
    assert str(copy.copy(said)) == str(said)
    if count > 2:
        left = count - len(said.problems) + 1
        assert said.problems[-1].why == f"{left} more problems are not listed"
    assert FxpartError(problems[:1]).problems == tuple(problems[:1])
