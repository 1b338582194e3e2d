"""The progress of planning: phases and bounds, for a callback or a progress bar."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fxpart.diagnostics.progress import listen_to_phases, progress_bar
from fxpart.units import percent, seconds

_log = logging.getLogger("fxpart.planner")


@dataclass(frozen=True)
class Progress:
    """The best objective found and the proven lower bound so far, both in seconds.

    incumbent: infinite while nothing feasible is known. seconds_left: until the time limit.
    phase: the current work of the solver, in a few words.
    """

    incumbent: float
    bound: float
    seconds_left: float
    phase: str

    def __str__(self) -> str:
        if self.incumbent == float("inf"):
            found, gap = "no solution yet", "unknown"
        else:
            found = f"best objective {seconds(self.incumbent)}"
            rest = self.incumbent - self.bound
            gap = percent(rest / self.incumbent) if self.incumbent > 0 else "unknown"
        return (
            f"{found}, lower bound {seconds(self.bound)}, gap {gap}, "
            f"{self.seconds_left:.0f} s left ({self.phase})"
        )


@contextmanager
def planning_progress(
    progress: Callable[[Progress], None] | bool | None,
) -> Iterator[Callable[[Progress], None]]:
    """Yield a function that logs the solver's progress, and calls or shows ``progress``.

    progress: a function; or whether to show a progress bar, by default on a terminal and in a
    notebook.
    """
    if callable(progress):
        given = progress

        def pass_on(now: Progress) -> None:
            _log.debug("%s", now)
            given(now)

        yield pass_on
        return
    with progress_bar("fxpart", progress) as bar:

        def show(now: Progress) -> None:
            _log.debug("%s", now)
            if bar is not None:
                bar.show(str(now))

        if bar is None:
            yield show
            return
        with listen_to_phases(bar.show_phase):
            yield show
