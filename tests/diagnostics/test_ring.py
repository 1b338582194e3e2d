"""The ring of events: what is kept, that it outlives its process, and that no file fools it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpart.diagnostics.flight_recorder import FlightRecorder, read
from fxpart.diagnostics.flight_recorder_format import HEAD, RECORD, set_event_microbatch
from fxpart.diagnostics.rank_event import ALL, NO_RANK, PHASES, RankEvent
from fxpart.errors import FxpartError

_WHAT = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=50)
_PUT = st.tuples(
    _WHAT, st.sampled_from(PHASES), st.integers(-1, 9), st.integers(-1, 99), st.integers(ALL, 9)
)


@pytest.mark.slow
@given(st.integers(1, 9), st.lists(_PUT, max_size=30), st.integers(0, 30))
@settings(max_examples=60, deadline=None)
def test_the_newest_are_kept_in_memory_and_file(
    tmp_path_factory: pytest.TempPathFactory, size: int, puts: list[tuple], move: int
) -> None:
    """A list of which the last ``size`` are left is the oracle, whenever the file is made."""
    path = tmp_path_factory.mktemp("ring") / "deep" / "rank-3.ring"
    ring, told = FlightRecorder(3, size), []
    for at, (what, phase, stage, microbatch, peer) in enumerate(puts):
        if at == move:
            ring.keep(path)
        ring.step = at
        ring.put(what, phase, stage=stage, microbatch=microbatch, peer=peer)
        numbered = what.replace("#", str(microbatch), 1) if microbatch >= 0 else what
        told.append((at + 1, at, numbered, phase, stage, microbatch, peer))
    if ring.path is None:
        ring.keep(path)

    def plain(event: RankEvent) -> tuple:
        return (
            event.number, event.step, event.what, event.phase, event.stage, event.microbatch,
            event.peer,
        )  # fmt: skip

    kept = read(path)
    assert [plain(e) for e in ring.events()] == told[-size:]
    assert [plain(e) for e in kept.events] == told[-size:]
    assert (kept.rank, kept.process) == (3, os.getpid())
    times = [e.nanoseconds for e in kept.events]
    assert times == sorted(times)
    assert all(abs(t - time.time_ns()) < 60e9 for t in times)
    if told:
        words, ago = ring.last()
        assert words == ring.events()[-1].words and 0 <= ago < 60
    else:
        assert ring.last() == ("", 0.0)


def test_words() -> None:
    ring = FlightRecorder()
    ring.step = 118
    ring.put("0F3", "wait", peer=2)
    assert ring.last()[0] == "0F3 of step 118 waits for rank 2"
    ring.put("the end of the pass", "wait", peer=ALL)
    assert ring.last()[0] == "the end of the pass of step 118 waits for all ranks"
    ring.put("0SEND_F3", "send", peer=1)
    assert ring.last()[0] == "0SEND_F3 of step 118 is sent to rank 1"
    ring.put("x" * 99 + "é", peer=NO_RANK)
    assert ring.last()[0] == "x" * 50 + " of step 118 began"
    ring.put("é", stage=1 << 40)
    assert ring.last()[0] == "? of step 118 began"
    assert ring.events()[-1].stage == (1 << 31) - 1


def test_a_mark_of_any_microbatch() -> None:
    ring = FlightRecorder()
    mark = ring.mark("2F#", stage=2, microbatch=0)
    ring.write(mark)
    ring.write(set_event_microbatch(mark, 17))
    assert [(e.what, e.stage, e.microbatch) for e in ring.events()] == [
        ("2F0", 2, 0),
        ("2F17", 2, 17),
    ]


def test_many_threads_write_whole_records(tmp_path: Path) -> None:
    ring = FlightRecorder.create(tmp_path / "a.ring", 0, 64)

    def work(name: str) -> None:
        for at in range(2000):
            ring.put(name, microbatch=at)

    threads = [threading.Thread(target=work, args=(f"thread {i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        read(tmp_path / "a.ring")  # while it is written
    for thread in threads:
        thread.join()
    kept = read(tmp_path / "a.ring").events
    assert [e.number for e in kept] == list(range(8000 - 63, 8001))


WRITER = """
import sys
from fxpart.diagnostics.flight_recorder import FlightRecorder
ring = FlightRecorder.create(sys.argv[1], 2, 100, generation=4)
ring.step = 7
marks = [ring.mark(f"1F{i}", stage=1, microbatch=i) for i in range(8)]
print("there", flush=True)
while True:
    for mark in marks:
        ring.write(mark)
"""


@pytest.mark.slow
def test_it_outlives_kill_9(tmp_path: Path) -> None:
    """20 real processes killed while they write: whole records, one after another."""
    for number in range(20):
        path = tmp_path / f"{number}.ring"
        with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=-1) as child:
            assert child.stdout is not None and child.stdout.readline() == b"there\n"
            time.sleep(0.002 * number)
            child.send_signal(signal.SIGKILL)
            child.wait()
        kept = read(path)
        assert (kept.rank, kept.generation, kept.process) == (2, 4, child.pid)
        numbers = [e.number for e in kept.events]
        assert len(numbers) in (99, 100) or (numbers and numbers[-1] < 100) or number == 0
        # At most the one that was being written is missing.
        assert not numbers or numbers[-1] - numbers[0] <= len(numbers)
        assert all(e.what == f"1F{(e.number - 1) % 8}" and e.step == 7 for e in kept.events)
        assert list(tmp_path.glob(".*")) == []


def _refused(path: Path) -> str:
    with pytest.raises(FxpartError) as caught:
        read(path)
    assert caught.value.code == "FXP520"
    return caught.value.problems[0].why


def test_other_files_are_refused(tmp_path: Path) -> None:
    ring = FlightRecorder.create(tmp_path / "good.ring", 0, 8)
    for _ in range(20):
        ring.put("0F0")
    good = (tmp_path / "good.ring").read_bytes()
    path = tmp_path / "bad.ring"
    for cut in (0, 3, HEAD - 1, HEAD, HEAD + 1, len(good) - 1):
        path.write_bytes(good[:cut])
        _refused(path)
    path.write_bytes(good + b"\0")
    assert "bytes" in _refused(path)
    for at in range(HEAD - 4):  # the last four bytes are nothing
        path.write_bytes(good[:at] + bytes([good[at] ^ 64]) + good[at + 1 :])
        _refused(path)
    path.write_bytes(good[:HEAD] + os.urandom(len(good) - HEAD))
    assert "damaged" in _refused(path)
    assert "not a flight recorder file" in _refused(_written(tmp_path / "x", b"hello" * 100))
    assert "regular file" in _refused(tmp_path)
    assert "No such file" in _refused(tmp_path / "missing")
    os.mkfifo(tmp_path / "pipe")
    assert "regular file" in _refused(tmp_path / "pipe")
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(1 << 40)
    assert "more than" in _refused(tmp_path / "huge")


def _written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.slow
@given(st.data())
@settings(max_examples=300, deadline=None)
def test_changed_rings_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    ring = FlightRecorder(1, 4)
    for at in range(data.draw(st.integers(0, 9))):
        ring.put(f"0F{at}", stage=0, microbatch=at)
    path = tmp_path_factory.mktemp("changed") / "a.ring"
    ring.keep(path)
    content = bytearray(path.read_bytes())
    changes = data.draw(
        st.lists(st.tuples(st.integers(HEAD, len(content) - 1), st.integers(0, 255)), max_size=9)
    )
    for at, byte in changes:
        content[at] = byte
    path.write_bytes(content)
    touched = {(at - HEAD) // RECORD.size for at, _ in changes}
    try:
        kept = read(path).events
    except FxpartError as fault:
        assert fault.code == "FXP520" and len(touched) > 2
        return
    # What was not touched is all there, and nothing that is told can move a cursor.
    whole = [e for e in ring.events() if (e.number - 1) % 4 not in touched]
    found = {e.number for e in kept}
    assert {e.number for e in whole} <= found
    assert all(e.words.isprintable() for e in kept)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ring = FlightRecorder()
    ring.put("0F0")
    with pytest.raises(FxpartError) as caught:
        ring.keep(tmp_path / "file" / "rank-0.ring")
    assert caught.value.code == "FXP603"
    ring.put("0F1")  # goes on in memory
    assert [e.what for e in ring.events()] == ["0F0", "0F1"]
