"""How a run is kept, as data: what every rank has to be given alike."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fxpart.checkpoint.run_directory import RunDir
from fxpart.errors import error


@dataclass(frozen=True)
class Checkpoints:
    """That a run saves itself into a folder, and goes on from what it finds there.

    folder: of the run; all processes share it. every: updates from one checkpoint to the next.
    keep: how many of them stay, at least two. strict: a checkpoint that cannot be written ends the
    run (FXP513); else it is told, and training goes on. check: steps that are done again after a
    restart have to give the numbers that they gave before (FXP518). restarts: how many of them in a
    row may bring the run no further (FXP517). signals: SIGTERM, SIGINT and SIGUSR1 save and end the
    run; where False they do what they did. copies: the last checkpoints stand in memory too, here
    and on another machine, so that losing one needs no disk; a folder instead of True: where.
    """

    folder: str | Path
    every: int = 50
    keep: int = 2
    strict: bool = False
    check: bool = True
    restarts: int = 3
    signals: bool = True
    copies: bool | str | Path = False

    def __post_init__(self) -> None:
        """FXP109 for what cannot be."""
        wrong = ""
        if self.every < 1 or self.restarts < 0:
            wrong = "every is at least 1, and restarts at least 0"
        elif self.keep < 2:
            wrong = "keep is at least 2: the newest may be damaged, or half written"
        if wrong:
            raise error("FXP109", where="Checkpoints", why=wrong, fix="Checkpoints(folder)")

    @classmethod
    def of(cls, given: Checkpoints | str | Path | None) -> Checkpoints | None:
        """A folder is enough."""
        return cls(given) if isinstance(given, (str, Path)) else given

    @property
    def run(self) -> RunDir:
        """The folder."""
        return RunDir(Path(self.folder))

    def describe(self) -> str:
        """What ranks have to be given alike."""
        return f"every {self.every} keep {self.keep} strict {self.strict} check {self.check}"
