"""The folder of a run: where everything stands that outlives a process of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunDir:
    """A run's folder, which all its processes share.

    A generation is one life of the job: all ranks from their meeting to the first that ends. They
    are numbered from 1 by who meets first, and never twice.
    """

    path: Path

    @property
    def checkpoints(self) -> Path:
        """One folder for each checkpoint; see :mod:`fxpart.checkpoint.folder`."""
        return self.path / "checkpoints"

    @property
    def identity(self) -> Path:
        """A random name that this run alone has: what stands elsewhere is found by it."""
        return self.path / "identity"

    @property
    def plans(self) -> Path:
        """Plans by what they are for: ``<fingerprint>-<cluster hash>-<ranks>.json``."""
        return self.path / "plans"

    @property
    def plan(self) -> Path:
        """The plan of the newest generation."""
        return self.path / "plan.json"

    @property
    def ledger(self) -> Path:
        """A line for each update: its step, loss and samples."""
        return self.path / "steps.jsonl"

    @property
    def generations(self) -> Path:
        """A line for each generation: when it began, with how many ranks, from which step."""
        return self.path / "generations.jsonl"

    def events(self, generation: int, rank: int) -> Path:
        """The ring of a rank's last events; see :mod:`fxpart.diagnostics.flight_recorder`."""
        return self.path / "events" / f"generation-{generation}" / f"rank-{rank}.ring"

    def failure(self, generation: int, rank: int) -> Path:
        """What a rank said of its failure, if it could."""
        return self.path / "events" / f"generation-{generation}" / f"rank-{rank}.failure.json"
