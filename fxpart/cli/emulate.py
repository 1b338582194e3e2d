"""``fxpart emulate``: what asynchronous training would do to a model, before it is run."""

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
_NADAM_BETAS = (0.99, 0.999)  # what the method prescribes (arXiv 2505.01099)


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
@click.option("--optimizer", help="Its name, such as adamw; by default the target's.")
@click.option("--lr", type=float, help="The optimizer's learning rate, if not its default.")
@click.option("--momentum", type=float, help="The optimizer's momentum, where it has one.")
@click.option("--clip-norm", type=float, help="Largest gradient norm; each stage has its share.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of weights and random ops.")
@click.option(
    "--seeds",
    type=click.IntRange(1, 100),
    default=1,
    show_default=True,
    help="Train from so many initial weights; the target's function is called for each.",
)
@click.option("--out", "-o", type=click.Path(), help="Draw the losses into this SVG file.")
@click.option("--smooth", type=click.IntRange(1), help="Updates that a drawn loss is the mean of.")
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

    Forwards and backwards read the very weights that they would read over K ranks; only the time is
    not that of K ranks. Batches come from the Workload's data, again and again; without data, the
    example batch is repeated. The loss of a mode is the mean over the last tenth of the updates,
    the spread the standard deviation over seeds. nadam-stash brings its own optimizer, with the
    given rate where that is one for an Adam.
    """
    names, every = _modes(weights)
    emulation = _EmulationRuns(target, stages, steps, range(seed, seed + seeds), options)
    found = emulation.go(names, every=every)
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
    """The modes asked for, each once, and whether "all" were; FXP109 for an unknown one."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    every = "all" in words
    if every:
        words = [SYNC, *MODES]
    found = list(dict.fromkeys(SYNC if word == FLUSH else word for word in words))
    for name in found:
        _mode(name)
    if not found:
        fix = f"one of {SYNC}, {', '.join(MODES)}"
        raise error("FXP109", where="--weights", why="no mode is given", fix=fix)
    return found, every


def _mode(name: str) -> WeightMode:
    return weight_mode(FLUSH if name == SYNC else name)


@dataclass(frozen=True)
class _EmulationRuns:
    """All runs: of each mode one for each seed."""

    target: str
    stages: int
    steps: int
    seeds: range
    options: dict[str, Any]

    def go(self, names: list[str], *, every: bool) -> dict[str, list[EmulationResult]]:
        """By mode the runs in the order of the seeds; every: leave out those that cannot be."""

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
            # What the model holds now, which the function has drawn by the seed.
            initial = {name: t.detach() for name, t in workload.model.state_dict().items()}
            for name in names:
                run = self._run(emulator, workload, name, seed, initial)
                found.setdefault(name, []).append(run)
        return found

    def _can(self, emulator: Emulator, name: str, *, every: bool) -> bool:
        """Whether the pipeline can train by the mode; raises FXP109 where it was asked for."""
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

        with output.show_activity(f"cutting {self.target} into {self.stages} stages"):
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
        """As asked for; the one that a method prescribes takes its place. FXP109."""
        from fxpart.compat.optimizer_choice import choose

        given: dict[str, Any] = {}
        for key in ("lr", "momentum"):
            if self.options[key] is not None:
                given[key] = self.options[key]
        chosen = choose(self.options["optimizer"] or workload.optimizer or "adamw")
        if mode.optimizer:
            # A rate for SGD is none for Adam's kind.
            rate = {"lr": given["lr"]} if "lr" in given and "adam" in chosen.name else {}
            prescribed: Any = choose(mode.optimizer).make
            return partial(prescribed, betas=_NADAM_BETAS, **rate)
        made = partial(chosen.make, **given) if given else chosen.make
        _try(made, given)
        return made


def _try(make: Any, given: dict[str, Any]) -> None:
    """FXP109 where the optimizer does not take what it is given."""
    import torch

    try:
        make([torch.nn.Parameter(torch.zeros(1))])
    except (TypeError, ValueError) as fault:
        where = " ".join(f"--{key} {value}" for key, value in given.items()) or "--optimizer"
        fix = "leave out what the optimizer does not have"
        raise error("FXP109", where=where, why=str(fault), fix=fix) from fault


@contextmanager
def _progress(words: str, steps: int) -> Iterator[Callable[[int, float], None]]:
    """On a terminal the newest loss; elsewhere one line for a run."""
    with output.show_messages(words, first=True) as tell:

        def show(update: int, loss: float) -> None:
            if tell is not None:
                tell(f"update {update} of {steps}, loss {loss:.4f}")

        yield show


def _batches(emulator: Emulator, workload: Workload, target: str) -> Callable[[], Iterator[Any]]:
    """What gives the batches from the data's start; the user's own faults as such."""
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
    """A mode's numbers over its seeds: finite ones or None."""
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
    """A line for each mode: final loss, what it is above sync, staleness, copies, rho."""
    head = ["weights", "final loss", "to sync", "staleness", "copies", "rho"]
    if seeds > 1:
        head.insert(2, "spread")
    rows = [head]
    for name, runs in found.items():
        made = _summary(name, runs, found.get(SYNC))
        rhos = [rho for run in runs for rho in run.rho if rho is not None]
        row = [
            name,
            _shown(made["final_loss"]) if made["final_loss"] is not None else _ended(runs),
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
    """The first stage's and the last one's, where they differ."""
    first, last = counts[0], counts[-1]
    return str(first) if first == last else f"{first}..{last}"


def _ended(runs: list[EmulationResult]) -> str:
    update = min(run.diverged for run in runs if run.diverged is not None)
    return f"diverged at {update}"


def _draw(
    found: dict[str, list[EmulationResult]], title: str, path: str, smooth: int | None
) -> str:
    """Write the picture: of each mode the mean over seeds; the path."""
    from fxpart.cli.report import write
    from fxpart.emulator.loss_plot import losses_svg, mean_curve

    curves = [mean_curve(name, [run.losses for run in runs]) for name, runs in found.items()]
    write(path, losses_svg(curves, title, window=smooth))
    return path
