"""Phases of long work, logged with their seconds, and a progress bar on stderr."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from typing import TYPE_CHECKING

from fxpart.environment import get_variables

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_listener: ContextVar[Callable[[str], None] | None] = ContextVar("listener", default=None)


@contextmanager
def log_phase(name: str, level: int = logging.INFO, *, area: str = "planner") -> Iterator[None]:
    """Log a phase with its seconds, and pass its name to the listener when it begins.

    area: of the logger, such as "planner" for "fxpart.planner".
    """
    log = logging.getLogger(f"fxpart.{area}")
    listener = _listener.get()
    if listener is not None:
        listener(name)
    log.debug("%s: started", name)
    begin = time.perf_counter()
    try:
        yield
    except BaseException:
        log.debug("%s: failed after %.2f s", name, time.perf_counter() - begin)
        raise
    log.log(level, "%s: %.2f s", name, time.perf_counter() - begin)


@contextmanager
def listen_to_phases(listener: Callable[[str], None]) -> Iterator[None]:
    """Call ``listener`` with the name of each phase that begins within the block."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


class ProgressBar:
    """One line on a terminal or in a notebook: a title, a bar, and the elapsed time.

    With a total, also the time that is left.
    """

    def __init__(self, title: str, display: Progress, task: TaskID) -> None:
        """display, task: of rich."""
        self._title, self._display, self._task = title, display, task

    def show(self, text: str, completed: float | None = None) -> None:
        """Show what is being done, and how much of the total is done."""
        self._display.update(self._task, description=f"{self._title}: {text}", completed=completed)

    def show_phase(self, name: str) -> None:
        """Show a phase at once, however short it is."""
        self.show(name)
        self._display.refresh()


@contextmanager
def progress_bar(
    title: str, wanted: bool | None = None, total: float | None = None
) -> Iterator[ProgressBar | None]:
    """Show a progress bar on stderr within the block; yield None where there is none.

    wanted: None shows it on a terminal and in a notebook; False never does. Only rank 0 of a job
    shows it. total: None for work of unknown length.
    """
    shown = is_interactive() if wanted is None else wanted
    if not shown or get_variables().get("RANK", "0") != "0":
        yield None
        return
    from rich.console import Console
    from rich.errors import LiveError
    from rich.progress import (
        BarColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    remaining = () if total is None else (TextColumn("left"), TimeRemainingColumn())
    display = Progress(
        SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(20),
        TimeElapsedColumn(), *remaining, console=Console(stderr=True), transient=True,
    )  # fmt: skip
    task = display.add_task(title, total=total)
    try:
        display.start()
    except LiveError:  # the caller already has a live display of rich
        yield None
        return
    try:
        yield ProgressBar(title, display, task)
    finally:
        display.stop()


def is_interactive() -> bool:
    """Return whether stderr is a terminal, or this process runs a notebook that can draw a bar."""
    notebook = "ipykernel" in sys.modules and find_spec("ipywidgets") is not None
    return notebook or (sys.stderr is not None and sys.stderr.isatty())
