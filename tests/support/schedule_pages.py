"""The outputs in ``fxpart/docs/schedules.md``: what its commands print, and its tables.

    python tests/support/schedule_pages.py    (writes them into the page)

A block of a command starts with ``$``; what follows is what it prints, notes first.
"""

from __future__ import annotations

import io
import re
import shlex
import tempfile
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path

from fxpart import cli
from fxpart.schedule.spec import document_rows
from fxpart.schedule.weight_modes import document_mode_rows

PAGE = Path(__file__).parents[2] / "fxpart" / "docs" / "schedules.md"
TABLE = re.compile(r"^\| (name|mode) \|.*?\n(?=\n)", re.DOTALL | re.MULTILINE)
BLOCK = re.compile(r"(```console\n\$ )([^\n]+)\n(.*?)(```)", re.DOTALL)


def filled(text: str) -> str:
    """The page with the tables of schedules and modes, and with what each command prints."""
    rows = {"name": document_rows, "mode": document_mode_rows}
    text = TABLE.sub(lambda m: "".join(f"{row}\n" for row in rows[m[1]]()), text)
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        sizes = ["--stages", "4", "--microbatches", "4"]
        lines = printed(shlex.join(["fxpart", "schedule", "show", "zb-v", *sizes, "--csv"]))
        Path("theirs.csv").write_text(lines)
        made: list[str] = []
        for piece in re.split(r"(?<=```\n)", text):
            made.append(BLOCK.sub(lambda m: f"{m[1]}{m[2]}\n{printed(m[2])}{m[4]}", piece))
            if Path("ours.txt").exists() and not Path("broken.txt").exists():
                ours = Path("ours.txt").read_text()
                swapped = ours.replace("1RECV_F0 1F0", "1F0 1RECV_F0").replace(" 3W1", "")
                Path("broken.txt").write_text(swapped)
    return "".join(made)


def printed(command: str) -> str:
    """What a command prints: notes, then its answer."""
    words = shlex.split(command)
    assert words[0] == "fxpart", command
    answer, notes = io.StringIO(), io.StringIO()
    with redirect_stdout(answer), redirect_stderr(notes):
        cli.run(words[1:])
    return notes.getvalue() + answer.getvalue()


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
