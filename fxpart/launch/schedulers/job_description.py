"""A job of several nodes, independent of the scheduler, and what a scheduler makes of it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fxpart.errors import FxpartError, Problem

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,48}[a-z0-9])?")
_TIME = re.compile(r"(?:(\d{1,3})-)?(\d{1,3}):([0-5]\d)(?::([0-5]\d))?")


@dataclass(frozen=True, kw_only=True)
class JobDescription:
    """One training job.

    program: a script, or "-m" and a module, with its arguments, as torchrun takes them. nodes:
    their number. devices: processes per node, one per GPU if ``gpus``. name: of lower-case letters,
    digits and dashes. folder: of the run: logs, and what the program writes there. restarts: how
    often torchrun starts the processes again after a failure; a job that the scheduler ends for
    lack of a node is queued again. hours: "HH:MM:SS" or "D-HH:MM", "" without a limit. port: of the
    rendezvous. image, claim: of Kubernetes, the container and the volume claim of the folder.
    options: of the scheduler, "partition=gpu", as it names them.
    """

    program: tuple[str, ...]
    nodes: int = 1
    devices: int = 1
    gpus: bool = True
    cpus: int | None = None
    name: str = "fxpart"
    folder: str = "runs/fxpart"
    restarts: int = 3
    hours: str = ""
    port: int = 29500
    image: str = ""
    claim: str = ""
    options: tuple[str, ...] = ()

    def check(self) -> JobDescription:
        """Return the job; raise FXP109 with everything that is wrong with it."""
        problems = []
        if not _NAME.fullmatch(self.name):
            why = "A name has lower-case letters, digits and dashes, at most 50."
            problems.append(Problem("FXP109", f"--name {self.name}", why, "Use --name my-run."))
        if self.hours and not _TIME.fullmatch(self.hours):
            fix = "Write it as 12:00:00 or 2-00:00."
            why = "It is not a duration."
            problems.append(Problem("FXP109", f"--time {self.hours}", why, fix))
        if "\n" in self.folder or not self.folder.strip():
            why = "It is not the name of a folder."
            problems.append(Problem("FXP109", "--run", why, "Use --run runs/first."))
        for option in self.options:
            name, separator, _ = option.partition("=")
            if not separator or not re.fullmatch(r"[a-z][a-z0-9.-]*", name) or "\n" in option:
                fix = "Write it as --set partition=gpu."
                problems.append(Problem("FXP109", f"--set {option}", "It is not NAME=VALUE.", fix))
        if problems:
            raise FxpartError(problems)
        return self

    @property
    def seconds(self) -> int | None:
        """The time limit in seconds."""
        found = _TIME.fullmatch(self.hours) if self.hours else None
        if found is None:
            return None
        days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds

    def quote_program(self) -> str:
        """Return the program and its arguments for a shell."""
        return shlex.join(self.program)

    def list_options(self) -> list[tuple[str, str]]:
        """Return the scheduler's own options as names and values."""
        return [(name, value) for name, _, value in (o.partition("=") for o in self.options)]


@dataclass(frozen=True, kw_only=True)
class SchedulerSpec:
    """One scheduler.

    file: default name of the job file. write: returns its text. submit: returns the command that
    submits a file. summary: for help texts. needs_folder: whether the run folder has to exist when
    the job is submitted.
    """

    name: str
    file: str
    summary: str
    write: Callable[[JobDescription], str]
    submit: Callable[[str], Sequence[str]]
    needs_folder: bool = False
