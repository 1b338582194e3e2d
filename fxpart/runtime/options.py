"""How a trainer works, as data: what every rank has to be given alike."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class Options:
    """The keyword arguments of :class:`~fxpart.runtime.trainer.Trainer` that are plain data.

    microbatches: into how many a batch is cut (fewer if it has fewer rows). schedule: a name.
    clip_norm: largest global gradient norm. seed: of random ops, by default the program's.
    """

    microbatches: int
    schedule: str = "1f1b"
    clip_norm: float | None = None
    seed: int | None = None

    def describe(self) -> str:
        """All of them in text, for ranks to compare."""
        return " ".join(f"{f.name} {getattr(self, f.name)}" for f in fields(self))
