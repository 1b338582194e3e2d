"""Check of loss and gradients before each update of ``fit``, and the reaction if one is not finite.

Each rank checks the reduced gradients that its optimizer is about to use. By default a rank that
finds one reports it and training continues. With another reaction the ranks exchange one number
per update and reject the update together.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, get_args

import torch

from fxpart.errors import FxpartError, error
from fxpart.runtime.embedding_tables import get_gradient_values
from fxpart.runtime.gradients.gradient_norm import measure_gradients
from fxpart.runtime.state.written_buffers import WrittenBuffers
from fxpart.runtime.transport.agreement import convert_transport_errors

if TYPE_CHECKING:
    from fxpart.runtime.trainer import Trainer

NonFiniteReaction = Literal["warn", "skip", "stop", "rollback"]
REACTIONS: tuple[str, ...] = get_args(NonFiniteReaction)
MOST_SKIPPED = 100  # updates in a row; then the run stops
_FIX = (
    'use a lower learning rate, clip_norm or a wider dtype; nonfinite="skip", "stop" or "rollback" '
    "(--on-nonfinite) rejects such updates"
)


class NonFiniteNotice(UserWarning):
    """A loss or gradient is not finite; reported by the rank that has found it."""


class NonFiniteGuard:
    """Guard of the updates of a synchronous trainer.

    rejected: why the last update was rejected, or "". row: number of updates in a row with a
    non-finite loss or gradient. applied: whether the last such update was applied, so that this
    rank's state may not be finite.
    """

    def __init__(self, trainer: Trainer, reaction: str) -> None:
        """Create a guard; see :meth:`accept`."""
        self.reaction = reaction
        self.rejected = ""
        self.row = 0
        self.applied = False
        self._trainer = trainer
        self._buffers = WrittenBuffers(
            tensor
            for entry in trainer.parts.state.entries.values()
            if entry.spec.kind != "parameter" and entry.spec.written
            for tensor in entry.copies.values()
        )

    def begin_update(self) -> None:
        """Store the buffers before the first forward pass of an update that may be rejected."""
        if self.reaction != "warn":
            self._buffers.store()

    def accept(self) -> bool:
        """Return whether to apply the update; equal on every rank.

        Called after the reduction of the gradients, by every rank. Buffers are then as before a
        rejected update.
        """
        loss, name = float(self._trainer.last_loss), _find_nonfinite_gradient(self._trainer)
        found = "" if math.isfinite(loss) else f"the loss is {loss}"
        if name:
            found = f"{found}, and " if found else ""
            found += f"the gradient of {name} is not finite"
        ranks = [self._trainer.rank] if found else []
        if self.reaction != "warn":
            ranks = self._exchange(bool(found))
        self.row = self.row + 1 if ranks else 0
        self.rejected = ""
        if not ranks:
            self.applied = False
            return True
        if self.reaction == "warn":
            self.applied = True
            if math.isfinite(loss) or self._trainer.rank == 0:
                self._report(found, "the update is applied")
            return True
        others = f"on rank {', '.join(map(str, ranks))}"
        self.rejected = found or f"the loss or a gradient is not finite {others}"
        if found and self._trainer.rank == ranks[0]:
            self._report(found, f"the update is rejected ({self.reaction})")
        self._buffers.restore()
        return False

    def make_error(self, step: int) -> FxpartError:
        """Return FXP523 for the rejected update."""
        where = f"rank {self._trainer.rank}, step {step}"
        return error("FXP523", where=where, why=self.rejected, fix=_FIX)

    def _exchange(self, found: bool) -> list[int]:
        """Return the ranks that have found a non-finite value."""
        transport = self._trainer.transport
        with convert_transport_errors(transport, "checking gradients"):
            rows = transport.exchange([int(found)])
        return [rank for rank, row in enumerate(rows) if row[0]]

    def _report(self, found: str, then: str) -> None:
        """Warn of the first update of a row, and of every power of two."""
        if self.row & (self.row - 1):
            return
        more = f", {self.row} updates in a row" if self.row > 1 else ""
        where = f"rank {self._trainer.rank}, step {self._trainer.updates + 1}"
        failure = error("FXP523", where=where, why=f"{found}; {then}{more}", fix=_FIX)
        warnings.warn(str(failure), NonFiniteNotice, stacklevel=6)


def describe_nonfinite_loss(step: int, loss: float) -> str:
    """Return FXP523 as text for the loss of a step, where updates are not checked here."""
    return str(
        error("FXP523", where=f"step {step}", why=f"the loss of step {step} is {loss}", fix=_FIX)
    )


def report_nonfinite_loss(step: int, loss: float) -> None:
    """Warn that the loss of a step is not finite, where updates are checked elsewhere."""
    warnings.warn(describe_nonfinite_loss(step, loss), NonFiniteNotice, stacklevel=4)


def _find_nonfinite_gradient(trainer: Trainer) -> str:
    """Return the first of this process's parameters with a non-finite gradient, or ""."""
    found = []
    for name, parameter in trainer.parts.state.parameters():
        gradient = get_gradient_values(trainer.parts.shards.of(parameter))
        if gradient is not None:
            found.append((name, gradient))
    return _find_nonfinite(found)


def find_nonfinite_state(trainer: Trainer) -> str:
    """Return the first of this process's parameters and buffers that is not finite, or "".

    Forward passes update buffers, whatever the gradients are.
    """
    found = [
        (name, tensor.detach())
        for name, entry in trainer.parts.state.saved()
        for tensor in entry.copies.values()
        if tensor.is_floating_point() and tensor.itemsize > 1
    ]
    return _find_nonfinite(found)


def _find_nonfinite(named: Sequence[tuple[str, torch.Tensor]]) -> str:
    """Return the name of the first tensor with NaN or infinity, or ""."""
    named = [each for each in named if each[1].numel()]
    tensors = [tensor for _, tensor in named]
    finite = torch.isfinite(measure_gradients(tensors)) if tensors else torch.ones(0)
    indices: list[int] = (~finite.bool()).nonzero().flatten().tolist()
    for index in indices:
        # The norm of large finite values may overflow.
        if not bool(torch.isfinite(tensors[index]).all()):
            return named[index][0]
    return ""
