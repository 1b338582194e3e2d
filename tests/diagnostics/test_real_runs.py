"""A real pipeline under torchrun whose rank is killed, stopped or raises: it is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ranks import SUPPORT, torchrun

from fxpart.cli import run
from fxpart.diagnostics.postmortem import examine
from fxpart.diagnostics.postmortem_text import headline

SCRIPT = SUPPORT / "postmortem_script.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "faulty", "words"),
    [
        ("kill", 0, ""),
        ("kill", 1, ""),
        ("stop", 2, ""),
        ("raise", 1, "ValueError: a stage that cannot"),
        ("script", 2, "KeyError: 'a row that is missing'"),
    ],
)
def test_the_right_rank_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str, faulty: int, words: str
) -> None:
    ended = torchrun(SCRIPT, str(tmp_path), what, str(faulty), ranks=3, timeout=90)
    assert ended.returncode != 0
    found = examine(tmp_path)
    assert set(found.ranks) == {0, 1, 2}
    assert found.first == (faulty,), f"{headline(found)}\n{ended.stderr}"
    assert words in headline(found)
    if what == "raise":  # all know it: what it could not write down itself others say
        written = {path.name: path for path in tmp_path.rglob("rank-*.failure.json")}
        own = written.pop(f"rank-{faulty}.failure.json", None)
        if own is not None and written:  # the first that ends may have the others ended before
            own.unlink()
        assert words in headline(examine(tmp_path))
    assert all(traces.ring is not None for traces in found.ranks.values())
    # Somebody says whom it waited for, and the rank itself what it did.
    last = found.ranks[faulty].last
    assert last is not None and last.step > 1
    assert run(["postmortem", str(tmp_path), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["first"] == [faulty] and data["ranks"][faulty]["events"]
