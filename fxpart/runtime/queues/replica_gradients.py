"""Gradients of one replica for a minibatch, and their sum over all replicas.

Dense gradients are summed per parameter, and over the replicas in their order, so that all replicas
compute the same bits; those of tied parameters are summed over the replicas of all groups. Sparse
gradients are stored per microbatch and concatenated in microbatch order, as in a single process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from fxpart.errors import error
from fxpart.program.replica_groups import ReplicaGroupGraph
from fxpart.runtime.asynchronous.stage_optimizers import collect_stage_parameters
from fxpart.runtime.embedding_tables import SparseGradientParts, SparseGradients
from fxpart.runtime.embedding_tables.sparse_gradient_parts import merge_parts
from fxpart.schedule.queues.messages import DispatcherMessage

if TYPE_CHECKING:
    from fxpart.runtime.trainer_parts import TrainerParts


class ReplicaGradients(DispatcherMessage, frozen=True):
    """One replica's gradients of a minibatch; its tensors are dense ones, then ids and values.

    microbatches: computed by the replica. dense: indices of parameters. rows: of sparse gradients,
    (parameter index, microbatches, number of rows of each).
    """

    minibatch: int
    attempt: int
    copy: int
    microbatches: tuple[int, ...]
    dense: tuple[int, ...]
    rows: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]


class TiedReplicaGradients(DispatcherMessage, frozen=True):
    """One replica's gradients of parameters that are tied to another group.

    microbatches: computed by the replica. names: of the parameters whose dense gradients follow.
    """

    minibatch: int
    attempt: int
    copy: int
    microbatches: tuple[int, ...]
    names: tuple[str, ...]


Letter = tuple["ReplicaGradients | TiedReplicaGradients", Sequence[torch.Tensor]]


@dataclass
class MinibatchGradients:
    """Accumulated gradients of one minibatch in one replica."""

    microbatches: list[int] = field(default_factory=list)
    dense: dict[int, torch.Tensor] = field(default_factory=dict)
    sparse: dict[int, list[tuple[int, SparseGradientParts]]] = field(default_factory=dict)


@dataclass(frozen=True)
class CrossGroupParameter:
    """A parameter tied to other groups. own: whether this group counts it in the norm."""

    place: int
    own: bool


class ReplicaParameters:
    """Trainable parameters of a replica, in the same order on all replicas."""

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        rows: SparseGradients,
        ties: Mapping[str, CrossGroupParameter] | None = None,
    ) -> None:
        """Create the list. rows: intercepts sparse gradients. ties: parameters tied to other
        groups.
        """
        self.all = list(parameters)
        self._rows, self._ties = rows, dict(ties or {})
        self._names = {tie.place: name for name, tie in self._ties.items()}

    @classmethod
    def of(cls, parts: TrainerParts, stage: int, layout: ReplicaGroupGraph) -> ReplicaParameters:
        """Return those of a replica, and which are tied to other groups."""
        mine = collect_stage_parameters(parts.state, owned=False)[stage, 0]
        places = {name: place for place, (name, _) in enumerate(mine)}
        ties = {
            name: CrossGroupParameter(places[name], layout.owns(stage, name))
            for names in layout.ties(stage).values()
            for name in names
        }
        return cls([p for _, p in mine], parts.shards.rows, ties)

    def set_accumulated(self, part: MinibatchGradients) -> None:
        """Set the accumulated gradients before a backward."""
        for place, parameter in enumerate(self.all):
            parameter.grad = part.dense.get(place)

    def store_accumulated(self, part: MinibatchGradients, microbatch: int) -> None:
        """Store the accumulated gradients after a backward."""
        for place, parameter in enumerate(self.all):
            gradient, parameter.grad = parameter.grad, None
            taken = self._rows.pending(parameter)
            self._rows.drop(parameter)
            if place in self._names and gradient is not None:
                gradient = gradient.to_dense()  # to be summed with the gradients of other stages
            if taken is None and gradient is not None and gradient.is_sparse:
                taken = SparseGradientParts.of([gradient])
            elif gradient is not None:
                part.dense[place] = gradient
            if taken is not None:
                part.sparse.setdefault(place, []).append((microbatch, taken))
        part.microbatches.append(microbatch)

    def set(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Set the gradients for the optimizer step."""
        for parameter, gradient in zip(self.all, gradients, strict=True):
            parameter.grad = gradient

    def make_message(
        self, part: MinibatchGradients, minibatch: int, attempt: int, copy: int
    ) -> tuple[ReplicaGradients, list[torch.Tensor]]:
        """Return the accumulated gradients as a message."""
        dense = sorted(part.dense)
        tensors = [part.dense[place] for place in dense]
        rows = []
        for place, pieces in sorted(part.sparse.items()):
            whole = merge_parts(((number,) * len(p.lengths), p) for number, p in pieces)
            numbers = tuple(sorted({number for number, _ in pieces}))
            rows.append((place, numbers, whole.lengths))
            tensors += [whole.ids, whole.values]
        message = ReplicaGradients(
            minibatch, attempt, copy, tuple(part.microbatches), tuple(dense), tuple(rows)
        )
        return message, tensors

    def make_tied_message(
        self,
        part: MinibatchGradients,
        names: Sequence[str],
        minibatch: int,
        attempt: int,
        copy: int,
    ) -> tuple[TiedReplicaGradients, list[torch.Tensor]]:
        """Return the gradients that another group needs as a message."""
        mine = [name for name in names if self._ties[name].place in part.dense]
        tensors = [part.dense[self._ties[name].place] for name in mine]
        return TiedReplicaGradients(
            minibatch, attempt, copy, tuple(part.microbatches), tuple(mine)
        ), tensors

    def total(
        self, parts: Sequence[Letter], count: int, others: Sequence[Sequence[Letter]] = ()
    ) -> list[torch.Tensor | None]:
        """Sum the gradients by parameter index; FXP900 unless each of ``count`` microbatches is
        there once.

        parts: of the replicas of this group. others: of each group with tied parameters.
        """
        for group in (parts, *others):
            _check(group, count)
        found: list[torch.Tensor | None] = [None] * len(self.all)
        own: set[int] = set()
        sparse: dict[int, list[tuple[tuple[int, ...], SparseGradientParts]]] = {}
        # All groups with a parameter sum in the order of the replicas, for the same bits.
        letters = [letter for group in (parts, *others) for letter in group]
        for message, tensors in sorted(letters, key=lambda letter: letter[0].copy):
            for place, tensor in zip(self._places(message), tensors, strict=False):
                tensor, before = tensor.to(self.all[place].device), found[place]
                if before is None:
                    found[place] = tensor
                elif place in own:
                    before.add_(tensor)
                else:  # keep the message unchanged: it may have to be sent again
                    found[place] = before + tensor
                    own.add(place)
            if isinstance(message, TiedReplicaGradients):
                continue
            sparse_tensors = iter(tensors[len(message.dense) :])
            for place, numbers, lengths in message.rows:
                device = self.all[place].device
                piece = SparseGradientParts(
                    tuple(lengths), next(sparse_tensors).to(device), next(sparse_tensors).to(device)
                )
                sparse.setdefault(place, []).append((tuple(numbers), piece))
        for place, pieces in sparse.items():
            gradient = merge_parts(pieces).gradient(self.all[place])
            dense = found[place]
            found[place] = gradient if dense is None else dense + gradient
        return found

    def square(self, gradients: Sequence[torch.Tensor | None]) -> float:
        """Return the squared norm of all gradients that this group counts."""
        total = 0.0
        for place, gradient in enumerate(gradients):
            if gradient is None or (
                place in self._names and not self._ties[self._names[place]].own
            ):
                continue
            values = gradient.coalesce()._values() if gradient.is_sparse else gradient
            total += float(torch.linalg.vector_norm(values, 2.0)) ** 2
        return total

    def _places(self, message: ReplicaGradients | TiedReplicaGradients) -> Sequence[int]:
        """Return the parameter indices of the dense gradients of a message."""
        if isinstance(message, TiedReplicaGradients):
            return [self._ties[name].place for name in message.names]
        return message.dense


def _check(group: Sequence[Letter], count: int) -> None:
    done = sorted(m for message, _ in group for m in message.microbatches)
    if done != list(range(count)):
        where = f"minibatch {group[0][0].minibatch}"
        why = f"gradients cover microbatches {done} of {count}"
        raise error("FXP900", where=where, why=why, fix="")


def clip_gradients(
    gradients: Sequence[torch.Tensor | None], factor: float, value: float | None
) -> None:
    """Scale gradients by a factor and clamp them to a value, in place."""
    for gradient in gradients:
        if gradient is not None:
            values = gradient._values() if gradient.is_sparse else gradient
            if factor < 1.0:
                values.mul_(factor)
            if value is not None:
                values.clamp_(-value, value)
