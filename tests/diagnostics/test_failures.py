"""What a rank says of its failure comes back, and no file fools the reader."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpart.diagnostics.failure_record import read_failure, record_failure
from fxpart.diagnostics.flight_recorder import FlightRecorder
from fxpart.errors import FxpartError, Problem


def test_an_error_of_fxpart_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "events" / "generation-2" / "rank-1.failure.json"
    cause = FxpartError(
        [Problem("FXP514", "rank 1", "rank 2 ended", "again"), Problem("FXP504", "a", "b", "")]
    )
    ring = FlightRecorder(1)
    ring.step = 5
    ring.put("0B3", "wait", peer=2)
    assert record_failure(
        path, cause, rank=1, generation=2, events=ring, lost=[2], peers={2: "0F5 began", 0: "x"}
    )
    found = read_failure(path)
    assert (found.rank, found.generation, found.step, found.lost) == (1, 2, 5, (2,))
    assert [(p.code, p.where, p.why, p.fix) for p in found.problems] == [
        ("FXP514", "rank 1", "rank 2 ended", "again"), ("FXP504", "a", "b", ""),
    ]  # fmt: skip
    assert found.last == "0B3 of step 5 waits for rank 2"
    assert found.peers == {2: "0F5 began", 0: "x"}
    assert ring.last()[0] == "FXP514 of step 5 failed: rank 2 has ended"
    # The first stays.
    assert not record_failure(path, ValueError("later"), rank=1)
    assert read_failure(path) == found


def test_any_exception_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    try:
        raise ValueError("\udc80 bad \x1b[2J" + "x" * 100_000)
    except ValueError as cause:
        assert record_failure(path, cause, rank=0)
    found = read_failure(path)
    assert found.kind == "ValueError" and found.problems[0].code == ""
    assert found.problems[0].why.startswith("ValueError: \\udc80 bad")
    assert any("in test_any_exception_comes_back" in line for line in found.trace)
    assert path.stat().st_size < 20_000


def test_what_cannot_be_written_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert not record_failure(tmp_path / "file" / "f.json", ValueError("x"), rank=0)

    class Bad(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    assert record_failure(tmp_path / "f.json", Bad(), rank=0)
    assert "RuntimeError in __str__" in read_failure(tmp_path / "f.json").problems[0].why


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{}", b"[]", b"null", b"\xff\xfe", b"[" * 500_000, b'{"a":' * 100_000,
        b'{"format":"fxpart-failure","version":2}',
        b'{"rank":-1,"process":1,"time":1,"kind":"x","problems":[]}',
        b'{"rank":0,"process":1,"time":1e400,"kind":"x","problems":[["","",""]]}',
        b'{"rank":0,"process":1,"time":1,"kind":"x","problems":[]}',
        b'{"rank":0,"process":1,"time":1,"kind":"\\ud800","problems":[]}',
        b" " * ((1 << 20) + 1),
    ],
)  # fmt: skip
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "f.json"
    path.write_bytes(content)
    with pytest.raises(FxpartError) as caught:
        read_failure(path)
    assert caught.value.code == "FXP520"


@pytest.mark.slow
@given(st.data())
@settings(max_examples=300, deadline=None)
def test_changed_files_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("changed") / "f.json"
    assert record_failure(path, ValueError("x"), rank=0, lost=[1], peers={1: "a"})
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    path.write_bytes(content)
    try:
        read_failure(path)
    except FxpartError as fault:
        assert fault.code == "FXP520"


def test_folders_and_pipes(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "missing"):
        with pytest.raises(FxpartError) as caught:
            read_failure(path)
        assert caught.value.code == "FXP520"
