"""The keyword arguments of fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fxpart.errors import error
from fxpart.runtime.callbacks import AnyCallback, EarlyStopping
from fxpart.runtime.monitor.nonfinite_guard import REACTIONS
from fxpart.runtime.training_run.options import Checkpoints


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """What ``fit(statistics=)`` reports to callbacks, as events of the kind "statistics".

    every: updates from one event to the next. gradients: of each parameter, before clipping, such
    as ``gradient_norm/layers.0.weight``. activations: of each module's output for the update's last
    batch (:meth:`~fxpart.runtime.trainer.Trainer.activation_statistics`), such as
    ``activation_zeros/layers.0.act``; they take one more forward.
    """

    every: int = 100
    gradients: bool = True
    activations: bool = True

    @classmethod
    def of(cls, given: Statistics | int | None) -> Statistics | None:
        """Return the options; a number is ``every``."""
        return cls(every=given) if isinstance(given, int) else given


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """The keyword arguments of :meth:`~fxpart.runtime.trainer.Trainer.fit`."""

    steps: int | None = None
    epochs: int | None = None
    accumulate: int = 1
    evaluate: Iterable[Any] | None = None
    every: int | None = None
    metrics: Mapping[str, Any] | None = None
    scheduler: Any = None
    scheduler_every: str = "step"
    callbacks: Sequence[AnyCallback] = ()
    early_stopping: EarlyStopping | None = None
    local: bool = False
    checkpoints: Checkpoints | str | Path | None = None
    statistics: Statistics | int | None = None
    progress: bool | None = None
    nonfinite: str = "warn"
    prefetch: bool = False

    def check(self) -> FitOptions:
        """Raise FXP109 for invalid combinations."""
        wrong, reported = "", self.reported
        if any(n is not None and n < 1 for n in (self.steps, self.epochs, self.every)):
            wrong = "steps, epochs and every must be at least 1"
        elif self.accumulate < 1:
            wrong = "accumulate must be at least 1"
        elif reported is not None and reported.every < 1:
            wrong = "statistics must be at least 1, the number of updates between two events"
        elif self.evaluate is None and (self.every or self.early_stopping or self.metrics):
            wrong = "every, metrics and early_stopping need evaluate=, the batches to evaluate on"
        elif self.scheduler_every not in ("step", "epoch"):
            wrong = 'scheduler_every must be "step" or "epoch"'
        elif self.nonfinite not in REACTIONS:
            wrong = f"nonfinite must be one of {', '.join(REACTIONS)}"
        elif self.nonfinite == "rollback" and self.checkpoints is None:
            wrong = 'nonfinite="rollback" needs checkpoints='
        elif iter_once(self.evaluate):
            wrong = "evaluate is an iterator, which ends after one evaluation: pass a list, a "
            wrong += "DataLoader, or a function that returns the batches"
        if wrong:
            raise error("FXP109", where="fit", why=wrong, fix="see the docs page on training")
        return self

    @classmethod
    def of(cls, run: Mapping[str, Any]) -> FitOptions:
        """Return the options of keyword arguments; FXP109."""
        try:
            return cls(**run).check()
        except TypeError as cause:
            known = ", ".join(field.name for field in fields(cls))
            fix = f"use one of {known}"
            raise error("FXP109", where="fit", why=str(cause), fix=fix) from cause

    def check_unflushed(self, *, skips: bool) -> None:
        """Raise FXP109 for options that a pipeline without flushes does not support.

        skips: whether stages skip updates with non-finite gradients.
        """
        problem: tuple[str, str, str] | None = None
        if self.accumulate != 1:
            problem = (
                f"accumulate={self.accumulate}",
                "a stage updates after each minibatch, and its backwards end in later calls",
                "use larger batches and more microbatches",
            )
        elif self.statistics is not None:
            problem = (
                "statistics=",
                "each stage updates by itself, and no rank has the gradients of one update of all "
                "stages",
                "call trainer.activation_statistics(batch) in a callback",
            )
        elif self.nonfinite in ("stop", "rollback"):
            problem = (
                f"nonfinite={self.nonfinite!r}",
                "each stage updates by itself",
                'use "warn" or "skip"' if skips else 'use "warn"',
            )
        elif self.nonfinite == "skip" and not skips:
            problem = (
                'nonfinite="skip"',
                "with queues or guard=False, no stage skips non-finite gradients",
                'use "warn", or an asynchronous pipeline with guard=True',
            )
        if problem is not None:
            where, why, fix = problem
            raise error("FXP109", where=f"fit({where})", why=why, fix=fix)

    def describe(self) -> str:
        """Return the options that must be equal on all ranks, as text."""
        stopping = None if self.early_stopping is None else self.early_stopping.describe()
        return (
            f"steps {self.steps} epochs {self.epochs} accumulate {self.accumulate} every "
            f"{self.every} evaluate {self.evaluate is not None} metrics {list(self.metrics or ())} "
            f"scheduler {type(self.scheduler).__name__} {self.scheduler_every} "
            f"early stopping {stopping} local {self.local} prefetch {self.prefetch} "
            f"nonfinite {self.nonfinite} statistics {self.reported} checkpoints "
            f"{None if self.kept is None else self.kept.describe()}"
        )

    @property
    def reported(self) -> Statistics | None:
        """The statistics that callbacks get."""
        return Statistics.of(self.statistics)

    @property
    def kept(self) -> Checkpoints | None:
        """The checkpoint options of the run."""
        return Checkpoints.of(self.checkpoints)


def iter_once(batches: Any) -> bool:
    """Return whether it can be iterated only once."""
    return isinstance(batches, Iterator)
