"""Checkpoint options of a run; they must be equal on every rank."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from fxpart.checkpoint.run_directory import RunDir
from fxpart.checkpoint.signature import KeySource
from fxpart.errors import error


@dataclass(frozen=True)
class Checkpoints:
    """Save a run into a folder and resume from it.

    folder: of the run, shared by all processes; its path may differ between them. every: updates
    between two checkpoints. keep: number of checkpoints kept, at least two. strict: end the run if
    a checkpoint or another file of the run cannot be written (FXP513, FXP603); otherwise warn and
    continue. check: steps repeated after a restart must give the same results (FXP518). restarts:
    largest number of restarts in a row without progress (FXP517). signals: SIGTERM, SIGINT, SIGHUP
    and SIGUSR1 save and end the run, and a second one of the first three ends it at once; if False
    their handlers are unchanged. copies: keep the last checkpoints in the memory of this and
    another host too, so that the loss of a host needs no disk; a path instead of True selects the
    folder. sign: a file with a secret key, which signs every checkpoint; only checkpoints that it
    has signed are restored (FXP524).
    """

    folder: str | Path
    every: int = 50
    keep: int = 2
    strict: bool = False
    check: bool = True
    restarts: int = 3
    signals: bool = True
    copies: bool | str | Path = False
    sign: KeySource = None

    def __post_init__(self) -> None:
        """Raise FXP109 for invalid values."""
        problem = ""
        if self.every < 1 or self.restarts < 0:
            problem = "every must be at least 1 and restarts at least 0"
        elif self.keep < 2:
            problem = "keep must be at least 2, because the newest checkpoint may be incomplete"
        if problem:
            raise error(
                "FXP109",
                where="Checkpoints",
                why=problem,
                fix="use the defaults of Checkpoints(folder)",
            )

    @classmethod
    def of(cls, given: Checkpoints | str | Path | None) -> Checkpoints | None:
        """Return the options of a folder with defaults; return options unchanged."""
        return cls(given) if isinstance(given, (str, Path)) else given

    @property
    def run(self) -> RunDir:
        """The folder of the run."""
        return RunDir(Path(self.folder).absolute())

    def describe(self) -> str:
        """Return the options that must be equal on every rank, as text.

        Hosts may have the folder, key files and memory at different paths.
        """
        found = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "folder"}
        found |= {"copies": bool(self.copies), "sign": self.sign is not None}
        return " ".join(f"{name} {value}" for name, value in found.items())
