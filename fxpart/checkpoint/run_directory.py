"""Layout of a run's folder."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from pathlib import Path

from fxpart.errors import FxpartError, error


@dataclass(frozen=True)
class RunDir:
    """A run's folder, shared by all its processes.

    A generation is one start of the job: all ranks from their rendezvous to the first exit.
    Generations are numbered from 1 and never reused.
    """

    path: Path

    @property
    def checkpoints(self) -> Path:
        """Folder with one folder per checkpoint; see :mod:`fxpart.checkpoint.folder`."""
        return self.path / "checkpoints"

    @property
    def identity(self) -> Path:
        """File with a random name unique to this run, which identifies its data elsewhere."""
        return self.path / "identity"

    @property
    def lock(self) -> Path:
        """Locked file with the process that runs the run; see :mod:`fxpart.checkpoint.run_lock`."""
        return self.path / "supervisor.json"

    @property
    def plans(self) -> Path:
        """Folder of cached plans: ``<fingerprint>-<cluster hash>-<ranks>.json``."""
        return self.path / "plans"

    @property
    def plan(self) -> Path:
        """Plan of the newest generation."""
        return self.path / "plan.json"

    @property
    def ledger(self) -> Path:
        """File with a line per update: step, loss and samples."""
        return self.path / "steps.jsonl"

    @property
    def generations(self) -> Path:
        """File with a line per generation: start time, number of ranks, first step."""
        return self.path / "generations.jsonl"

    def events(self, generation: int, rank: int) -> Path:
        """Return a rank's flight recorder file; see :mod:`fxpart.diagnostics.flight_recorder`."""
        return self.path / "events" / f"generation-{generation}" / f"rank-{rank}.ring"

    def failure(self, generation: int, rank: int) -> Path:
        """Return the file of a rank's failure record."""
        return self.path / "events" / f"generation-{generation}" / f"rank-{rank}.failure.json"


def make_unwritable_error(path: Path, cause: OSError) -> FxpartError:
    """Return FXP603 for a file or folder of a run that cannot be written."""
    why, fix = cause.strerror or str(cause), "free disk space, or use a writable folder"
    if cause.errno in (errno.EEXIST, errno.ENOTDIR):
        why, fix = "it is a file or a broken link, not a folder", "remove it, or use another folder"
    return error("FXP603", where=str(path), why=why, fix=fix)
