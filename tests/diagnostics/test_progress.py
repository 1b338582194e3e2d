"""Phases in the log, and a progress bar that only appears where it is wanted."""

from __future__ import annotations

import logging
import sys
from types import ModuleType

import pytest
import torch
from torch import nn

import fxpart
from fxpart.diagnostics import progress
from fxpart.diagnostics.progress import listen_to_phases, log_phase, progress_bar
from fxpart.solver.progress import Progress, planning_progress

BATCH = torch.ones(4, 8), torch.ones(4, 8)


def compiled(**options: object) -> fxpart.Program:
    """A small model on two devices."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    return fxpart.compile(
        model, "local:2", example_inputs=BATCH, loss=nn.functional.mse_loss, **options
    )


class Terminal:
    """A stderr that is a terminal and keeps what is written."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        """Nothing is buffered."""


def use_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Make stderr a terminal; within a test, as pytest sets stderr when a test begins."""
    made = Terminal()
    monkeypatch.setattr(sys, "stderr", made)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("RANK", raising=False)
    return made


def test_planning_and_training_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="fxpart")
    program = compiled()
    program.trainer("sgd").fit([BATCH] * 3)
    info = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    for name in ("capture the model", "check the captured program", "search for the best plan",
                 "make the trainer"):  # fmt: skip
        assert sum(line.startswith(f"{name}: ") and line.endswith(" s") for line in info) == 1, name
    assert "fit: start at step 0, epoch 0" in info and "fit: end at step 3, epoch 1: data" in info
    debug = [r.getMessage() for r in caplog.records if r.levelno == logging.DEBUG]
    assert any("lower bound" in line for line in debug)
    assert sum(line.startswith("step ") and "samples/s" in line for line in debug) == 3


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    compiled().trainer("sgd").fit([BATCH] * 2)
    assert capfd.readouterr() == ("", "")


def test_a_terminal_has_a_bar_that_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = use_terminal(monkeypatch)
    program = compiled(progress=False)
    trainer = program.trainer("sgd")
    trainer.fit([BATCH], progress=False)
    assert terminal.text == ""
    compiled()
    assert "fxpart" in terminal.text and "search for the best plan" in terminal.text
    terminal.text = ""
    trainer.fit([BATCH] * 2, steps=2)
    assert "fxpart fit: step 2, loss" in terminal.text


def test_other_ranks_and_files_have_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    use_terminal(monkeypatch)
    monkeypatch.setenv("RANK", "1")
    with progress_bar("title") as bar:
        assert bar is None
    monkeypatch.delenv("RANK")
    monkeypatch.setattr(Terminal, "isatty", lambda self: False)
    with progress_bar("title") as bar:
        assert bar is None
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    for installed in (False, True):  # rich draws bars of notebooks with ipywidgets only
        monkeypatch.setattr(progress, "find_spec", lambda name, found=installed: found or None)
        with progress_bar("title") as bar:
            assert (bar is not None) == installed


def test_a_function_is_called_with_the_solvers_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = use_terminal(monkeypatch)
    seen: list[Progress] = []
    compiled(progress=seen.append)
    assert seen and all(isinstance(now, Progress) for now in seen) and terminal.text == ""


def test_phases_end_with_their_block(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="fxpart")
    names: list[str] = []
    with listen_to_phases(names.append), pytest.raises(ZeroDivisionError), log_phase("one"):
        raise ZeroDivisionError
    with log_phase("two"):
        assert names == ["one"]
    messages = [record.getMessage() for record in caplog.records]
    assert messages[1].startswith("one: failed after") and messages[-1].startswith("two: ")


def test_progress_as_text() -> None:
    assert str(Progress(float("inf"), 0.0, 9.0, "dp")) == (
        "no solution yet, lower bound 0 s, gap unknown, 9 s left (dp)"
    )
    assert str(Progress(2.0, 1.5, 9.0, "dp")) == (
        "best objective 2.00 s, lower bound 1.50 s, gap 25.0 %, 9 s left (dp)"
    )


def test_an_error_of_the_function_ends_the_search() -> None:
    def stop(now: Progress) -> None:
        raise ZeroDivisionError

    with planning_progress(stop) as listener, pytest.raises(ZeroDivisionError):
        listener(Progress(1.0, 1.0, 1.0, "dp"))
