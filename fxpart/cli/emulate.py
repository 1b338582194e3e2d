"""``fxpart emulate``: emulate the effect of asynchronous training on a model's loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

import click

from fxpart.cli import output
from fxpart.cli.options import json_option
from fxpart.errors import FxpartError, error
from fxpart.schedule.weight_modes import FLUSH, MODES, SPECTRAIN, STASH, WeightMode, weight_mode

if TYPE_CHECKING:
    from fxpart.capture.workload import Workload
    from fxpart.emulator import EmulationResult, Emulator

SYNC = "sync"


@click.command()
@click.argument("target")
@click.option("--stages", "-k", type=click.IntRange(1, 32), default=4, show_default=True)
@click.option(
    "--weights",
    default=f"{SYNC},{STASH},{SPECTRAIN}",
    show_default=True,
    metavar="MODE[,MODE]",
    help=f"sync, {', '.join(name for name in MODES.builtin if name != FLUSH)}; or all.",
)
@click.option("--steps", type=click.IntRange(1), default=100, show_default=True)
@click.option("--microbatches", "-m", type=click.IntRange(1), default=1, show_default=True)
@click.option("--batch-size", "-b", type=click.IntRange(1), help="Global batch.")
@click.option("--optimizer", help="Optimizer name, such as adamw; by default the target's.")
@click.option("--lr", type=float, help="Learning rate, by default the optimizer's.")
@click.option("--momentum", type=float, help="Momentum, if the optimizer has one.")
@click.option("--clip-norm", type=float, help="Maximum gradient norm, divided over the stages.")
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Seed of weights and random ops."
)
@click.option(
    "--seeds",
    type=click.IntRange(1, 100),
    default=1,
    show_default=True,
    help="Number of seeds; the target's function is called for each.",
)
@click.option("--out", "-o", type=click.Path(), help="Write a plot of the losses to this SVG file.")
@click.option(
    "--smooth",
    type=click.IntRange(1),
    help="Number of updates over which plotted losses are averaged.",
)
@json_option
def command(
    target: str,
    stages: int,
    weights: str,
    steps: int,
    seed: int,
    seeds: int,
    out: str | None,
    smooth: int | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Train TARGET as a pipeline of K stages under several weight modes, all in this process.

    Forwards and backwards read the same weight versions as on K ranks. Batches are those of the
    Workload's data, repeated; without data, the example batch is repeated. The loss of a mode is
    the mean over the last tenth of the updates, and the spread is the standard deviation over
    seeds. nadam-stash has its own optimizer, with the given learning rate if that is for Adam.
    """
    names, every = _modes(weights)
    emulation = _EmulationRuns(target, stages, steps, range(seed, seed + seeds), options)
    found = emulation.run_all(names, every=every)
    svg = None
    if out is not None:
        svg = _draw(found, f"{target}: {stages} stages", out, smooth)
    if as_json:
        output.data({
            "target": target, "stages": stages, "microbatches": options["microbatches"],
            "steps": steps, "seeds": list(emulation.seeds), "out": svg,
            "modes": [
                {
                    **_summary(name, runs, found.get(SYNC)),
                    "runs": [run.to_dict() for run in runs],
                }
                for name, runs in found.items()
            ],
        })  # fmt: skip
        return 0
    for line in _table(found, seeds):
        output.text(line)
    from fxpart.runtime.asynchronous.stage_report import describe_inaccurate_predictions

    for name, runs in found.items():
        warning = describe_inaccurate_predictions(
            [_mean(rhos) for rhos in zip(*(run.rho for run in runs), strict=True)]
        )
        if warning:
            output.note(f"warning, {name}: {warning}")
    if svg is not None:
        output.note(f"wrote {svg}")
    return 0


def _mean(values: Sequence[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return sum(found) / len(found) if found else None


def _modes(text: str) -> tuple[list[str], bool]:
    """Return the distinct requested modes, and whether "all" were; FXP109 if one is unknown."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    every = "all" in words
    if every:
        words = [SYNC, *MODES]
    found = list(dict.fromkeys(SYNC if word == FLUSH else word for word in words))
    for name in found:
        _mode(name)
    if not found:
        fix = f"use one of {SYNC}, {', '.join(MODES)}"
        raise error("FXP109", where="--weights", why="no mode is given", fix=fix)
    return found, every


def _mode(name: str) -> WeightMode:
    return weight_mode(FLUSH if name == SYNC else name)


@dataclass(frozen=True)
class _EmulationRuns:
    """The runs of all modes and seeds."""

    target: str
    stages: int
    steps: int
    seeds: range
    options: dict[str, Any]

    def run_all(self, names: list[str], *, every: bool) -> dict[str, list[EmulationResult]]:
        """Return the runs by mode, in the order of seeds. every: omit unsupported modes."""

        found: dict[str, list[EmulationResult]] = {}
        emulator: Emulator | None = None
        for seed in self.seeds:
            workload = self._workload(seed)
            if emulator is None:
                for name in names:
                    self._optimizer(workload, _mode(name))
                emulator = self._emulator(workload)
                names = [n for n in names if self._can(emulator, n, every=every)]
                if workload.data is None:
                    output.note("no data in the target: the example batch is repeated")
            # The initial weights, drawn by the target's function with the seed.
            initial = {name: t.detach() for name, t in workload.model.state_dict().items()}
            for name in names:
                run = self._run(emulator, workload, name, seed, initial)
                found.setdefault(name, []).append(run)
        return found

    def _can(self, emulator: Emulator, name: str, *, every: bool) -> bool:
        """Return whether the mode is supported; raises FXP109 if it was requested by name."""
        try:
            emulator.check(name)
        except FxpartError as fault:
            if not every:
                raise
            output.note(f"without {name}: {fault.problems[0].why}")
            return False
        return True

    def _workload(self, seed: int) -> Workload:
        from fxpart.capture.workload import load_target

        return load_target(self.target, seed)

    def _emulator(self, workload: Workload) -> Emulator:
        from fxpart.emulator import Emulator

        with output.show_activity(f"dividing {self.target} into {self.stages} stages"):
            return Emulator(
                workload.model,
                stages=self.stages,
                microbatches=self.options["microbatches"],
                loss=workload.loss,
                example_inputs=workload.example,
                example_kwargs=workload.example_kwargs,
                batch_size=self.options["batch_size"] or workload.batch_size,
                seed=self.seeds[0],
            )

    def _run(
        self, emulator: Emulator, workload: Workload, name: str, seed: int, initial: dict[str, Any]
    ) -> EmulationResult:
        with _progress(f"{name}, seed {seed}", self.steps) as progress:
            return emulator.run(
                _batches(emulator, workload, self.target),
                weights=name,
                optimizer=self._optimizer(workload, _mode(name)),
                steps=self.steps,
                clip_norm=self.options["clip_norm"],
                initial=initial,
                seed=seed,
                watch=max(1, self.steps // 20),
                progress=progress,
            )

    def _optimizer(self, workload: Workload, mode: WeightMode) -> Any:
        """Return the optimizer that the mode prescribes, else the requested one; raises FXP109."""
        from fxpart.compat.optimizer_choice import choose
        from fxpart.runtime.optimizer.factory import make_default_optimizer

        given: dict[str, Any] = {}
        for key in ("lr", "momentum"):
            if self.options[key] is not None:
                given[key] = self.options[key]
        chosen = choose(self.options["optimizer"] or workload.optimizer or "adamw")
        if mode.optimizer:
            # A learning rate for SGD is not one for Adam.
            rate = {"lr": given["lr"]} if "lr" in given and "adam" in chosen.name else {}
            return partial(make_default_optimizer(mode), **rate)
        made = partial(chosen.make, **given) if given else chosen.make
        _try(made, given)
        return made


def _try(make: Any, given: dict[str, Any]) -> None:
    """Raise FXP109 if the optimizer does not accept its options."""
    import torch

    try:
        make([torch.nn.Parameter(torch.zeros(1, 1))])  # Muon accepts only matrices.
    except (TypeError, ValueError) as fault:
        where = " ".join(f"--{key} {value}" for key, value in given.items()) or "--optimizer"
        fix = "omit options that the optimizer does not have"
        raise error("FXP109", where=where, why=str(fault), fix=fix) from fault


@contextmanager
def _progress(title: str, steps: int) -> Iterator[Callable[[int, float], None]]:
    """Show the newest loss on a terminal, else one line per run."""
    with output.show_messages(title, first=True) as show:

        def report(update: int, loss: float) -> None:
            if show is not None:
                show(f"update {update} of {steps}, loss {loss:.4f}")

        yield report


def _batches(emulator: Emulator, workload: Workload, target: str) -> Callable[[], Iterator[Any]]:
    """Return a function that iterates over the data from its start; user errors keep their type."""
    from fxpart.capture.workload import make_user_error

    def batches() -> Iterator[Any]:
        if workload.data is None:
            assert emulator.program.captured.example is not None, "a captured model has its example"
            yield emulator.program.captured.example()
            return
        data = iter(workload.batches() or ())
        while True:
            try:
                batch = next(data, None)
            except FxpartError:
                raise
            except Exception as fault:
                raise make_user_error(fault, None, target, "while the data was read") from fault
            if batch is None:
                return
            yield batch

    return batches


def _summary(
    name: str, runs: list[EmulationResult], sync: list[EmulationResult] | None
) -> dict[str, Any]:
    """Return a mode's figures over its seeds; those that are not finite are None."""
    finals = [run.final() for run in runs]
    mean = fmean(finals)
    base = None if sync is None else fmean(run.final() for run in sync)
    spread = math.sqrt(fmean((f - mean) ** 2 for f in finals)) if math.isfinite(mean) else math.nan
    beside = math.nan if base is None else mean - base
    return {
        "weights": name,
        "final_loss": mean if math.isfinite(mean) else None,
        "spread": spread if math.isfinite(spread) else None,
        "to_sync": beside if math.isfinite(beside) else None,
        "diverged": sum(run.diverged is not None for run in runs),
    }


def _table(found: dict[str, list[EmulationResult]], seeds: int) -> list[str]:
    """Return a line per mode: final loss, difference to sync, staleness, weight copies, rho."""
    head = ["weights", "final loss", "to sync", "staleness", "copies", "rho"]
    if seeds > 1:
        head.insert(2, "spread")
    rows = [head]
    for name, runs in found.items():
        made = _summary(name, runs, found.get(SYNC))
        rhos = [rho for run in runs for rho in run.rho if rho is not None]
        row = [
            name,
            _shown(made["final_loss"]) if made["final_loss"] is not None else _divergence(runs),
            _shown(made["to_sync"], sign=True) if name != SYNC else "",
            _range(runs[0].staleness),
            _range(runs[0].copies),
            f"{min(rhos):.2f}..{max(rhos):.2f}" if rhos else "",
        ]
        if seeds > 1:
            row.insert(2, _shown(made["spread"]))
        rows.append(row)
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
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


def _divergence(runs: list[EmulationResult]) -> str:
    update = min(run.diverged for run in runs if run.diverged is not None)
    return f"diverged at {update}"


def _draw(
    found: dict[str, list[EmulationResult]], title: str, path: str, smooth: int | None
) -> str:
    """Plot the mean loss over seeds of each mode; return the path."""
    from fxpart.cli.report import write
    from fxpart.emulator.loss_plot import losses_svg, mean_curve

    curves = [mean_curve(name, [run.losses for run in runs]) for name, runs in found.items()]
    write(path, losses_svg(curves, title, window=smooth))
    return path
