"""``fxpart train --run``: runs that are saved, supervised and resumed."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fxpart.checkpoint.run_directory import RunDir
from fxpart.checkpoint.run_lock import check_unlocked
from fxpart.checkpoint.signature import SigningKey
from fxpart.cli import output
from fxpart.cli.options import Command, CommandLineRequest, sign_option
from fxpart.elastic.progress import read_saved_step
from fxpart.elastic.rank_bounds import RankBounds
from fxpart.elastic.slow_rank_report import SlowRankReport, write_slow_rank_report
from fxpart.environment import Launch, is_launched_by_fxpart
from fxpart.errors import EXIT_INCOMPLETE, error
from fxpart.files import read_bytes

if TYPE_CHECKING:
    from fxpart.runtime.callbacks import Event, StepInfo
    from fxpart.runtime.fit_reports import FitResult

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
    on_nonfinite: str = "warn"
    sign: str | None = None

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
            "--on-nonfinite": None if self.on_nonfinite == "warn" else self.on_nonfinite,
            "--sign": self.sign,
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
    click.option(
        "--on-nonfinite",
        type=click.Choice(("warn", "skip", "stop", "rollback")),
        help="Reaction to a loss or gradient that is not finite.  [default: warn]",
    ),
    sign_option("Sign checkpoints with the secret key in this file, and resume from no others."),
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
    names = ("every", "keep", "stop_on_failed_save", "copies", "rebalance", "on_nonfinite", "sign")
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
    if kept is not None:
        _check_signature(kept)
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


def _check_signature(kept: ResumableRunOptions) -> None:
    """Verify the newest checkpoint before ranks start, so that the error is printed once. FXP524.

    The ranks verify it again, and whatever they load.
    """
    from fxpart.checkpoint.folder import list_complete
    from fxpart.checkpoint.manifest import NAME
    from fxpart.checkpoint.manifest_codec import LARGEST

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first rank reports a key file that others can read
        key = SigningKey.load(kept.sign)
    if key is None:
        return
    for path in list_complete(kept.run.checkpoints)[:1]:
        with suppress(OSError):  # a damaged checkpoint is passed over
            key.check(path, read_bytes(path / NAME, LARGEST))


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
    if started is None or started.rank == 0:
        check_unlocked(kept.run)
    if started is not None:
        from fxpart.cli.elastic_run import with_shared_plan

        return with_shared_plan(request, kept.run, started)
    if request.plan is None and kept.run.plan.exists():
        from fxpart.cli.elastic_run import check_started

        check_started(request, kept.run)
        return replace(request, plan=str(kept.run.plan))
    return request


def fit(
    trainer: Any, data: Any, kept: ResumableRunOptions, steps: int, *, first: bool, as_json: bool
) -> tuple[bool, int]:
    """Train until the run has ``steps`` steps; return whether it has, and the exit status.

    first: whether this process prints.
    """
    from fxpart.runtime.monitor.nonfinite_guard import NonFiniteNotice
    from fxpart.runtime.training_run import Checkpoints

    checkpoints = Checkpoints(
        kept.folder, every=kept.every, keep=kept.keep, strict=kept.strict, copies=kept.copies,
        sign=kept.sign,
    )  # fmt: skip
    printer = _StepPrinter(as_json)
    callbacks: list[Any] = [printer] if first else []
    if first and kept.rebalance:
        callbacks.append(_SlowRankReporter(trainer, kept.run))
    with warnings.catch_warnings():
        if not first:
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", NonFiniteNotice)  # by the rank that has found it
        warnings.showwarning = _note
        fitted: FitResult = trainer.fit(
            data,
            steps=steps,
            callbacks=callbacks,
            checkpoints=checkpoints,
            nonfinite=kept.on_nonfinite,
        )
    if first and as_json:
        ended = {"ended": fitted.why, "steps": fitted.steps, "run": str(kept.folder)}
        output.line({**ended, "saved": fitted.saved})
    elif first and fitted.saved:
        _explain_end(fitted, printer.resumed, kept.folder)
    return is_complete(fitted), _end(trainer, fitted, kept.run, first=first)


def is_complete(fitted: FitResult) -> bool:
    """Return whether the run has all its steps, as opposed to one that a signal has ended."""
    return fitted.why in ("steps", "data")


def _end(trainer: Any, fitted: FitResult, run: RunDir, *, first: bool) -> int:
    """Return the exit status of a run that has ended: 6 if its last state is not on the disk.

    The first rank prints FXP522 then. All ranks must call it: the others wait until that is done,
    as the first end of a rank ends all.
    """
    if fitted.saved:
        return 0
    if not first:
        trainer.transport.exchange([0])
        return EXIT_INCOMPLETE
    saved = read_saved_step(run)
    newest = f"the newest is of step {saved}" if saved is not None else "there is no other"
    failure = error(
        "FXP522", where=str(run.checkpoints),
        why=f"{fitted.steps} steps are done, but the checkpoint of the last one is not complete on "
        f"the disk; {newest}",
        fix="free disk space, or make the folder writable; the same command then resumes the run",
    )  # fmt: skip
    output.note(str(failure))
    trainer.transport.exchange([0])
    return failure.exit_code


def _explain_end(fitted: FitResult, resumed: int, folder: Path) -> None:
    """Print how a run has ended that is saved."""
    if is_complete(fitted) and resumed == fitted.steps:
        output.note(f"the run in {folder} already has {fitted.steps} steps")
    elif is_complete(fitted):
        ended = "" if fitted.why == "steps" else "the data ended: "
        output.note(f"{ended}{fitted.steps} steps are done and saved in {folder}")
    else:
        after = "" if is_launched_by_fxpart() else "; the same command resumes the run"
        output.note(f"{fitted.why}: saved after step {fitted.steps} in {folder}{after}")


class _StepPrinter:
    """Prints each step. resumed: number of updates that the run had at the start."""

    def __init__(self, as_json: bool) -> None:
        self.resumed = 0
        self._as_json = as_json

    def on_step(self, info: StepInfo) -> None:
        """Print a line."""
        # Training does not end with the terminal, or because the disk of a log is full.
        with suppress(OSError):
            if self._as_json:
                output.line({"step": info.step, "loss": info.loss, "seconds": info.seconds})
            else:
                output.text(f"step {info.step:>4}  loss {info.loss:.6f}  {info.seconds:.3f} s")

    def on_event(self, event: Event) -> None:
        """Print where the run is resumed, and that an asynchronous pipeline flushes."""
        with suppress(OSError):
            if event.kind == "fallback":
                output.note(f"warning: {event.why}")
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
