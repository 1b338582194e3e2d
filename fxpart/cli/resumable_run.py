"""``fxpart train --run``: a run that is saved, watched over, and gone on with."""

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
        """The folder."""
        return RunDir(self.folder)

    def options(self) -> dict[str, object]:
        """As they are given on the command line."""
        return {
            "--run": self.folder, "--every": self.every, "--keep": self.keep,
            "--stop-on-failed-save": self.strict, "--copies": self.copies,
            "--rebalance": self.rebalance,
        }  # fmt: skip


_OPTIONS = (
    click.option(
        "--run", "--run-dir", "folder", type=click.Path(), help="Save into it, and go on from it."
    ),
    click.option(
        "--every", type=click.IntRange(1), help=f"Steps between checkpoints.  [default: {_EVERY}]"
    ),
    click.option(
        "--keep", type=click.IntRange(2), help=f"Checkpoints that stay.  [default: {_KEEP}]"
    ),
    click.option("--stop-on-failed-save", is_flag=True, help="End if a save fails."),
    click.option(
        "--copies", is_flag=True, help="Keep the last checkpoints in two hosts' memory too."
    ),
    click.option("--rebalance", is_flag=True, help="Plan anew where a rank has become slow."),
)


def run_options(command: Command) -> Command:
    """Add the options of a run that is kept; :func:`parse_run_options` takes them out of the
    keywords.
    """
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def parse_run_options(options: dict[str, Any], *, traced: bool) -> ResumableRunOptions | None:
    """What --run and its options say, taken out of ``options``; None without --run.

    FXP109 for those that do not go together.
    """
    folder = options.pop("folder")
    names = ("every", "keep", "stop_on_failed_save", "copies", "rebalance")
    given = {name: value for name in names if (value := options.pop(name))}
    if folder is None:
        if given:
            raise error(
                "FXP109", where=" ".join(f"--{name.replace('_', '-')}" for name in given),
                why="nothing is saved without --run", fix="give --run DIR too",
            )  # fmt: skip
        return None
    if traced:
        raise error(
            "FXP109", where="--run --trace", why="a recording is of whole runs",
            fix="train without --run to measure",
        )  # fmt: skip
    strict = given.pop("stop_on_failed_save", False)
    return ResumableRunOptions(Path(folder), strict=strict, **given)


def bounds_of(nproc: str, kept: ResumableRunOptions | None) -> RankBounds:
    """How many processes; FXP109 for several numbers without --run."""
    bounds = RankBounds.parse(nproc)
    if bounds.elastic and kept is None:
        raise error(
            "FXP109", where=f"--nproc {bounds}",
            why="a run that changes its ranks goes on from its checkpoints",
            fix="give --run DIR too, or one number",
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
    """Start the ranks; the exit status. A run that is kept is watched over, too.

    options: others of train, by name. Ranks of queues are missed by nobody while rank 0 lives, so
    that nobody starts them again: the same command goes on. FXP109 for what that cannot be.
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
    """FXP109 for what a run from queues does not have."""
    given = {
        "--copies": kept.copies,
        "--rebalance": kept.rebalance,
        f"--nproc {bounds}": bounds.elastic,
    }
    for name, asked in given.items():
        if asked:
            raise error(
                "FXP109", where=f"--routing queue {name}",
                why="a run from queues keeps its plan and its ranks",
                fix="leave it out, or --routing turns",
            )  # fmt: skip


def with_run_plan(
    request: CommandLineRequest, kept: ResumableRunOptions, started: Launch | None
) -> CommandLineRequest:
    """The request with the run's plan: torchrun's ranks share one; one process has the first."""
    if started is not None:
        from fxpart.cli.elastic_run import with_shared_plan

        return with_shared_plan(request, kept.run, started)
    if request.plan is None and kept.run.plan.exists():
        return replace(request, plan=str(kept.run.plan))
    return request


def fit(
    trainer: Any, data: Any, kept: ResumableRunOptions, steps: int, *, first: bool, as_json: bool
) -> bool:
    """Train until the run has so many steps; False where a signal ended it before.

    first: whether this process is the one that tells.
    """
    from fxpart.runtime.training_run import Checkpoints

    checkpoints = Checkpoints(
        kept.folder, every=kept.every, keep=kept.keep, strict=kept.strict, copies=kept.copies
    )
    telling = _StepPrinter(as_json)
    callbacks: list[Any] = [telling] if first else []
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
    elif first and done and telling.begun == fitted.steps:
        output.note(f"the run in {kept.folder} has {fitted.steps} steps: nothing is left to do")
    elif first and done:
        ended = "" if fitted.why == "steps" else "the data ended: "
        output.note(f"{ended}{fitted.steps} steps are done and saved in {kept.folder}")
    elif first:
        after = "" if is_launched_by_fxpart() else "; the same command goes on"
        output.note(f"{fitted.why}: saved after step {fitted.steps} in {kept.folder}{after}")
    return done


class _StepPrinter:
    """Tells of each step as it is done. begun: updates that the run had at the start."""

    def __init__(self, as_json: bool) -> None:
        self.begun = 0
        self._as_json = as_json

    def on_step(self, info: StepInfo) -> None:
        """A line."""
        if self._as_json:
            output.line({"step": info.step, "loss": info.loss, "seconds": info.seconds})
        else:
            output.text(f"step {info.step:>4}  loss {info.loss:.6f}  {info.seconds:.3f} s")

    def on_event(self, event: Event) -> None:
        """Where the run goes on."""
        if event.kind != "start" or not event.step:
            return
        self.begun = event.step
        if self._as_json:
            output.line({"from": event.step})
        else:
            output.note(f"going on after step {event.step}")


def _note(message: Warning | str, *_: Any, **__: Any) -> None:
    output.note(f"warning: {message}")


class _SlowRankReporter:
    """Tells the launcher of ranks that have become slow."""

    def __init__(self, trainer: Any, run: RunDir) -> None:
        self._pace, self._run = trainer.pace, run

    def on_step(self, info: StepInfo) -> None:
        """Nothing."""

    def on_event(self, event: Event) -> None:
        """The numbers of all ranks."""
        if event.kind == "slow":
            pace = self._pace
            write_slow_rank_report(
                self._run, SlowRankReport(event.step, pace.seconds(), dict(pace.past), pace.slow)
            )
