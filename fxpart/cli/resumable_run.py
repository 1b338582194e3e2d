"""``fxpart train --run``: runs that are saved, supervised and resumed."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fxpart.checkpoint.run_directory import RunDir
from fxpart.cli import output
from fxpart.cli.options import Command, CommandLineRequest
from fxpart.elastic.rank_bounds import RankBounds
from fxpart.elastic.slow_rank_report import SlowRankReport, write_slow_rank_report
from fxpart.environment import Launch, is_launched_by_fxpart
from fxpart.errors import error

if TYPE_CHECKING:
    from fxpart.runtime.callbacks import Event, StepInfo

_EVERY, _KEEP = 50, 2


@dataclass(frozen=True)
class ResumableRunOptions:
    """The options of --run; see :class:`fxpart.runtime.training_run.options.Checkpoints`."""

    folder: Path
    every: int = _EVERY
    keep: int = _KEEP
    strict: bool = False
    copies: bool = False
    rebalance: bool = False

    @property
    def run(self) -> RunDir:
        """The run directory."""
        return RunDir(self.folder)

    def options(self) -> dict[str, object]:
        """Return the options for the command line."""
        return {
            "--run": self.folder, "--every": self.every, "--keep": self.keep,
            "--stop-on-failed-save": self.strict, "--copies": self.copies,
            "--rebalance": self.rebalance,
        }  # fmt: skip


_OPTIONS = (
    click.option(
        "--run",
        "--run-dir",
        "folder",
        type=click.Path(),
        help="Run folder, from which a run is resumed.",
    ),
    click.option(
        "--every", type=click.IntRange(1), help=f"Steps between checkpoints.  [default: {_EVERY}]"
    ),
    click.option(
        "--keep", type=click.IntRange(2), help=f"Checkpoints to keep.  [default: {_KEEP}]"
    ),
    click.option("--stop-on-failed-save", is_flag=True, help="End the run if a save fails."),
    click.option(
        "--copies", is_flag=True, help="Also store the last checkpoints in the memory of two hosts."
    ),
    click.option("--rebalance", is_flag=True, help="Plan again if a rank has become slow."),
)


def run_options(command: Command) -> Command:
    """Add the options of saved runs; :func:`parse_run_options` removes them from keywords."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def parse_run_options(options: dict[str, Any], *, traced: bool) -> ResumableRunOptions | None:
    """Remove --run and its options from ``options`` and return them; None without --run.

    Raises FXP109 for options that exclude each other.
    """
    folder = options.pop("folder")
    names = ("every", "keep", "stop_on_failed_save", "copies", "rebalance")
    given = {name: value for name in names if (value := options.pop(name))}
    if folder is None:
        if given:
            raise error(
                "FXP109", where=" ".join(f"--{name.replace('_', '-')}" for name in given),
                why="nothing is saved without --run", fix="pass --run DIR, too",
            )  # fmt: skip
        return None
    if traced:
        raise error(
            "FXP109", where="--run --trace", why="a saved run cannot be recorded",
            fix="omit --run to record a trace",
        )  # fmt: skip
    strict = given.pop("stop_on_failed_save", False)
    return ResumableRunOptions(Path(folder), strict=strict, **given)


def bounds_of(nproc: str, kept: ResumableRunOptions | None) -> RankBounds:
    """Return the numbers of processes; FXP109 for a range without --run."""
    bounds = RankBounds.parse(nproc)
    if bounds.elastic and kept is None:
        raise error(
            "FXP109", where=f"--nproc {bounds}",
            why="a run with a variable number of ranks needs checkpoints",
            fix="pass --run DIR, too, or a single number",
        )  # fmt: skip
    return bounds


def on_ranks(
    request: CommandLineRequest,
    bounds: RankBounds,
    kept: ResumableRunOptions | None,
    options: Mapping[str, object],
    steps: int,
    as_json: bool,
) -> int:
    """Start the ranks and return the exit status; saved runs are supervised.

    options: other options of train, by name. With queues, lost ranks are not restarted, as training
    continues while rank 0 runs; the same command resumes the run. Raises FXP109 for options that
    queues do not support.
    """
    queue = options.get("--routing") == "queue"
    if kept is None or queue:
        from fxpart.cli.process_launch import run_on

        if kept is not None:
            _check_queued(bounds, kept)
            request = with_run_plan(request, kept, None)
            options = {**options, **kept.options()}
        return run_on(request, bounds.most, "train", options, as_json, each=queue)
    from fxpart.cli.elastic_run import run_supervised

    more = {**options, **kept.options()}
    return run_supervised(request, bounds, kept.run, more, steps, as_json, rebalance=kept.rebalance)


def _check_queued(bounds: RankBounds, kept: ResumableRunOptions) -> None:
    """Raise FXP109 for options that runs with queues do not support."""
    given = {
        "--copies": kept.copies,
        "--rebalance": kept.rebalance,
        f"--nproc {bounds}": bounds.elastic,
    }
    for name, requested in given.items():
        if requested:
            raise error(
                "FXP109", where=f"--routing queue {name}",
                why="a run with queue routing cannot change its plan or ranks",
                fix="omit it, or pass --routing turns",
            )  # fmt: skip


def with_run_plan(
    request: CommandLineRequest, kept: ResumableRunOptions, started: Launch | None
) -> CommandLineRequest:
    """Return the request with the run's plan, shared by the ranks of torchrun."""
    if started is not None:
        from fxpart.cli.elastic_run import with_shared_plan

        return with_shared_plan(request, kept.run, started)
    if request.plan is None and kept.run.plan.exists():
        return replace(request, plan=str(kept.run.plan))
    return request


def fit(
    trainer: Any, data: Any, kept: ResumableRunOptions, steps: int, *, first: bool, as_json: bool
) -> bool:
    """Train until the run has ``steps`` steps; return False if a signal ended it before.

    first: whether this process prints.
    """
    from fxpart.runtime.training_run import Checkpoints

    checkpoints = Checkpoints(
        kept.folder, every=kept.every, keep=kept.keep, strict=kept.strict, copies=kept.copies
    )
    printer = _StepPrinter(as_json)
    callbacks: list[Any] = [printer] if first else []
    if first and kept.rebalance:
        callbacks.append(_SlowRankReporter(trainer, kept.run))
    with warnings.catch_warnings():
        if not first:
            warnings.simplefilter("ignore")
        warnings.showwarning = _note
        fitted = trainer.fit(data, steps=steps, callbacks=callbacks, checkpoints=checkpoints)
    done = fitted.why in ("steps", "data")
    if first and as_json:
        output.line({"ended": fitted.why, "steps": fitted.steps, "run": str(kept.folder)})
    elif first and done and printer.resumed == fitted.steps:
        output.note(f"the run in {kept.folder} already has {fitted.steps} steps")
    elif first and done:
        ended = "" if fitted.why == "steps" else "the data ended: "
        output.note(f"{ended}{fitted.steps} steps are done and saved in {kept.folder}")
    elif first:
        after = "" if is_launched_by_fxpart() else "; the same command resumes the run"
        output.note(f"{fitted.why}: saved after step {fitted.steps} in {kept.folder}{after}")
    return done


class _StepPrinter:
    """Prints each step. resumed: number of updates that the run had at the start."""

    def __init__(self, as_json: bool) -> None:
        self.resumed = 0
        self._as_json = as_json

    def on_step(self, info: StepInfo) -> None:
        """Print a line."""
        if self._as_json:
            output.line({"step": info.step, "loss": info.loss, "seconds": info.seconds})
        else:
            output.text(f"step {info.step:>4}  loss {info.loss:.6f}  {info.seconds:.3f} s")

    def on_event(self, event: Event) -> None:
        """Print where the run is resumed."""
        if event.kind != "start" or not event.step:
            return
        self.resumed = event.step
        if self._as_json:
            output.line({"from": event.step})
        else:
            output.note(f"resuming after step {event.step}")


def _note(message: Warning | str, *_: Any, **__: Any) -> None:
    output.note(f"warning: {message}")


class _SlowRankReporter:
    """Reports slow ranks to the launcher."""

    def __init__(self, trainer: Any, run: RunDir) -> None:
        self._pace, self._run = trainer.pace, run

    def on_step(self, info: StepInfo) -> None:
        """Do nothing."""

    def on_event(self, event: Event) -> None:
        """Write the step times of all ranks."""
        if event.kind == "slow":
            pace = self._pace
            write_slow_rank_report(
                self._run, SlowRankReport(event.step, pace.seconds(), dict(pace.past), pace.slow)
            )
