"""The tables of ``fxpart emulate``: losses by weight mode, and steps to a target loss."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fxpart.emulator import EmulationResult, StalenessPenalty

SYNC = "sync"


@dataclass(frozen=True)
class EmulatedMode:
    """A weight mode with numbers of stages and microbatches."""

    weights: str
    stages: int
    microbatches: int

    def describe(self, several: bool) -> str:
        """Return the weight mode; with several pipelines also its numbers, except of sync."""
        if not several or self.weights == SYNC:
            return self.weights
        return f"{self.weights} {self.stages}x{self.microbatches}"


Runs = Mapping[EmulatedMode, "list[EmulationResult]"]


def find_sync(found: Runs) -> list[EmulationResult] | None:
    """Return the synchronous runs, None without any."""
    return next((runs for mode, runs in found.items() if mode.weights == SYNC), None)


def summarize_mode(
    mode: EmulatedMode, runs: Sequence[EmulationResult], sync: Sequence[EmulationResult] | None
) -> dict[str, Any]:
    """Return a mode's figures over its seeds; those that are not finite are None."""
    finals = [run.final() for run in runs]
    mean = fmean(finals)
    base = None if sync is None else fmean(run.final() for run in sync)
    spread = math.sqrt(fmean((f - mean) ** 2 for f in finals)) if math.isfinite(mean) else math.nan
    beside = math.nan if base is None else mean - base
    return {
        "weights": mode.weights,
        "stages": mode.stages,
        "microbatches": mode.microbatches,
        "final_loss": mean if math.isfinite(mean) else None,
        "spread": spread if math.isfinite(spread) else None,
        "to_sync": beside if math.isfinite(beside) else None,
        "diverged": sum(run.diverged is not None for run in runs),
    }


def loss_table(found: Runs, seeds: int, *, several: bool) -> list[str]:
    """Return a line per mode: final loss, difference to sync, staleness, weight copies, rho.

    several: whether there are several pipelines, which the mode's name then includes.
    """
    head = ["weights", "final loss", "to sync", "staleness", "copies", "rho"]
    if seeds > 1:
        head.insert(2, "spread")
    rows = [head]
    for mode, runs in found.items():
        made = summarize_mode(mode, runs, find_sync(found))
        rhos = [rho for run in runs for rho in run.rho if rho is not None]
        row = [
            mode.describe(several),
            _shown(made["final_loss"]) if made["final_loss"] is not None else _divergence(runs),
            _shown(made["to_sync"], sign=True) if mode.weights != SYNC else "",
            _range(runs[0].staleness),
            _range(runs[0].copies),
            f"{min(rhos):.2f}..{max(rhos):.2f}" if rhos else "",
        ]
        if seeds > 1:
            row.insert(2, _shown(made["spread"]))
        rows.append(row)
    return _aligned(rows)


def penalty_table(found: StalenessPenalty) -> list[str]:
    """Return a line per delay: steps to the target loss relative to sync, and their interval."""
    rows = [["weights", "stages", "microbatches", "delay", "relative steps", "95 % interval"]]
    for row in found.measured:
        low, high = row.interval or (None, None)
        rows.append([
            row.weights,
            str(row.stages),
            str(row.microbatches),
            f"{row.delay:.3g}",
            "not reached" if row.relative_steps is None else f"{row.relative_steps:.3f}",
            "" if low is None or high is None else f"{low:.3f} to {high:.3f}",
        ])  # fmt: skip
    steps = ", ".join(map(str, found.sync_steps))
    return [
        f"Steps to a loss of {found.target_loss:g} (mean of {found.window}), relative to sync "
        f"({steps} steps)",
        *_aligned(rows),
    ]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _shown(value: float | None, *, sign: bool = False) -> str:
    if value is None:
        return ""
    return f"{round(value, 4) + 0.0:{'+' if sign else ''}.4f}"


def _range(counts: tuple[int, ...]) -> str:
    """Return the values of the first and last stage, or one value if they are equal."""
    first, last = counts[0], counts[-1]
    return str(first) if first == last else f"{first}..{last}"


def _divergence(runs: Sequence[EmulationResult]) -> str:
    update = min(run.diverged for run in runs if run.diverged is not None)
    return f"diverged at {update}"
