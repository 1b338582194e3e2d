"""``fxpart emulate``: emulate the effect of asynchronous training on a model's loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from fxpart.cli import output
from fxpart.cli.emulation_table import (
    SYNC,
    EmulatedMode,
    Runs,
    find_sync,
    loss_table,
    penalty_table,
    summarize_mode,
)
from fxpart.cli.options import CountsType, json_option
from fxpart.errors import FxpartError, error
from fxpart.schedule.weight_modes import FLUSH, MODES, SPECTRAIN, STASH, WeightMode, weight_mode

if TYPE_CHECKING:
    from fxpart.capture.workload import Workload
    from fxpart.emulator import EmulationResult, Emulator, StalenessPenalty


@click.command()
@click.argument("target")
@click.option(
    "--stages",
    "-k",
    type=CountsType(32),
    default="4",
    show_default=True,
    help="One number or more.",
)
@click.option(
    "--weights",
    default=f"{SYNC},{STASH},{SPECTRAIN}",
    show_default=True,
    metavar="MODE[,MODE]",
    help=f"sync, {', '.join(name for name in MODES.builtin if name != FLUSH)}; or all.",
)
@click.option("--steps", type=click.IntRange(1), default=100, show_default=True)
@click.option(
    "--microbatches",
    "-m",
    type=CountsType(),
    default="1",
    show_default=True,
    help="Of a minibatch: one number or more.",
)
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
@click.option(
    "--target-loss", type=float, help="Count the steps to this loss, relative to weights=sync."
)
@click.option(
    "--penalty",
    type=click.Path(),
    help="Write these steps to this file, for --staleness-penalty of `fxpart plan`.",
)
@click.option("--out", "-o", type=click.Path(), help="Write a plot of the losses to this SVG file.")
@click.option(
    "--smooth",
    type=click.IntRange(1),
    help="Number of updates over which losses are averaged, for --out and --target-loss.",
)
@json_option
def command(
    target: str,
    stages: tuple[int, ...],
    weights: str,
    steps: int,
    seed: int,
    seeds: int,
    target_loss: float | None,
    penalty: str | None,
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
    Several numbers of stages or microbatches are emulated one after another, as stash 8x2: eight
    stages and two microbatches.
    """
    names, every = _modes(weights)
    _check_penalty(names, target_loss, penalty)
    emulation = _EmulationRuns(target, stages, steps, range(seed, seed + seeds), options)
    found = emulation.run_all(names, every=every)
    several, measured = len(stages) * len(options["microbatches"]) > 1, None
    for line in [] if as_json else loss_table(found, seeds, several=several):
        output.text(line)
    if target_loss is not None:
        measured = emulation.measure_penalty(found, target_loss, smooth)
    sync = find_sync(found) or []
    if measured is not None and seeds > 1 and len({run.losses for run in sync}) == 1:
        output.note("no interval: all seeds have the same losses, as the target sets its own seed")
    if penalty is not None and measured is not None:
        measured.dump(penalty)
    svg = None
    if out is not None:
        title = f"{target}: {', '.join(map(str, stages))} stages"
        svg = _draw(found, title, out, smooth, several=several)
    if as_json:
        output.data({
            "target": target, "stages": _single(stages),
            "microbatches": _single(options["microbatches"]),
            "steps": steps, "seeds": list(emulation.seeds), "out": svg,
            "penalty": None if measured is None else measured.to_dict(),
            "modes": [
                {
                    **summarize_mode(mode, runs, find_sync(found)),
                    "runs": [run.to_dict() for run in runs],
                }
                for mode, runs in found.items()
            ],
        })  # fmt: skip
        return 0
    for line in [] if measured is None else ["", *penalty_table(measured)]:
        output.text(line)
    _warn_of_predictions(found, several=several)
    for path in (penalty, svg):
        if path is not None:
            output.note(f"wrote {path}")
    return 0


def _warn_of_predictions(found: Runs, *, several: bool) -> None:
    """Print a warning for each mode whose predictions were worse than none."""
    from fxpart.runtime.asynchronous.stage_report import describe_inaccurate_predictions

    for mode, runs in found.items():
        warning = describe_inaccurate_predictions(
            [_mean(rhos) for rhos in zip(*(run.rho for run in runs), strict=True)]
        )
        if warning:
            output.note(f"warning, {mode.describe(several)}: {warning}")


def _single(numbers: tuple[int, ...]) -> int | list[int]:
    """Return the only number, or a list of several."""
    return numbers[0] if len(numbers) == 1 else list(numbers)


def _check_penalty(names: list[str], target_loss: float | None, penalty: str | None) -> None:
    """Raise FXP109 for options of the penalty that cannot be combined."""
    where, why, fix = f"--penalty {penalty}", "", ""
    if penalty is not None and target_loss is None:
        why, fix = "the steps to a loss are counted, but no loss is given", "add --target-loss LOSS"
    elif target_loss is not None and (SYNC not in names or len(names) < 2):
        where = "--weights"
        why = "steps to a loss are compared with those of synchronous training"
        fix = f"use --weights {SYNC},{STASH} or more modes"
    if why:
        raise error("FXP109", where=where, why=why, fix=fix)


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
    """The runs of all modes, pipelines and seeds. emulators: by number of stages, once compiled."""

    target: str
    stages: tuple[int, ...]
    steps: int
    seeds: range
    options: dict[str, Any]
    emulators: dict[int, Emulator] = field(default_factory=dict)

    def run_all(
        self, names: list[str], *, every: bool
    ) -> dict[EmulatedMode, list[EmulationResult]]:
        """Return the runs by mode, in the order of seeds. every: omit unsupported modes.

        Synchronous training is the same with any number of stages and runs with the first.
        """
        found: dict[EmulatedMode, list[EmulationResult]] = {}
        modes: list[EmulatedMode] = []
        for seed in self.seeds:
            workload = self._workload(seed)
            if not self.emulators:
                for name in names:
                    self._optimizer(workload, _mode(name))
                for count in self.stages:
                    self.emulators[count] = self._emulator(workload, count)
                modes = [mode for mode in self._list_modes(names) if self._can(mode, every=every)]
                if workload.data is None:
                    output.note("no data in the target: the example batch is repeated")
            # The initial weights, drawn by the target's function with the seed.
            initial = {name: t.detach() for name, t in workload.model.state_dict().items()}
            for mode in modes:
                found.setdefault(mode, []).append(self._run(workload, mode, seed, initial))
        return found

    def measure_penalty(
        self, found: Runs, target_loss: float, window: int | None
    ) -> StalenessPenalty:
        """Return the staleness penalty of the runs."""
        runs = [run for mine in found.values() for run in mine]
        return self.emulators[self.stages[0]].measure_penalty(runs, target_loss, window=window)

    @property
    def _several(self) -> bool:
        return len(self.stages) * len(self.options["microbatches"]) > 1

    def _list_modes(self, names: list[str]) -> list[EmulatedMode]:
        pipelines = [(k, m) for k in self.stages for m in self.options["microbatches"]]
        return [
            EmulatedMode(name, stages, microbatches)
            for name in names
            for stages, microbatches in (pipelines[:1] if name == SYNC else pipelines)
        ]

    def _can(self, mode: EmulatedMode, *, every: bool) -> bool:
        """Return whether the mode is supported; raises FXP109 if it was requested by name."""
        try:
            self.emulators[mode.stages].check(mode.weights, mode.microbatches)
        except FxpartError as fault:
            if not every:
                raise
            output.note(f"without {mode.describe(self._several)}: {fault.problems[0].why}")
            return False
        return True

    def _workload(self, seed: int) -> Workload:
        from fxpart.capture.workload import load_target

        return load_target(self.target, seed)

    def _emulator(self, workload: Workload, stages: int) -> Emulator:
        from fxpart.emulator import Emulator

        with output.show_activity(f"dividing {self.target} into {stages} stages"):
            return Emulator(
                workload.model,
                stages=stages,
                microbatches=self.options["microbatches"][0],
                loss=workload.loss,
                example_inputs=workload.example,
                example_kwargs=workload.example_kwargs,
                batch_size=self.options["batch_size"] or workload.batch_size,
                seed=self.seeds[0],
            )

    def _run(
        self, workload: Workload, mode: EmulatedMode, seed: int, initial: dict[str, Any]
    ) -> EmulationResult:
        emulator = self.emulators[mode.stages]
        with _progress(f"{mode.describe(self._several)}, seed {seed}", self.steps) as progress:
            return emulator.run(
                _batches(emulator, workload, self.target),
                weights=mode.weights,
                microbatches=mode.microbatches,
                optimizer=self._optimizer(workload, _mode(mode.weights)),
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


def _draw(found: Runs, title: str, path: str, smooth: int | None, *, several: bool) -> str:
    """Plot the mean loss over seeds of each mode; return the path."""
    from fxpart.cli.report import write
    from fxpart.emulator.loss_plot import losses_svg, mean_curve

    curves = [
        mean_curve(mode.describe(several), [run.losses for run in runs])
        for mode, runs in found.items()
    ]
    write(path, losses_svg(curves, title, window=smooth))
    return path
