"""A copy's part of a minibatch's gradients, and the sum of those of all copies of its group.

Dense gradients add up in one tensor for each parameter, and copies' sums in the order of the
copies, so that all have the same bits; those of a parameter that other groups hold too are summed
over all copies of all of them. Sparse ones are kept microbatch by microbatch and put in their
order, as in one process, whoever did them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from fxpart.errors import error
from fxpart.runtime.embedding_tables import SparseGradientParts, SparseGradients
from fxpart.runtime.embedding_tables.sparse_gradient_parts import merge_parts
from fxpart.schedule.queues.messages import DispatcherMessage


class ReplicaGradients(DispatcherMessage, frozen=True):
    """A copy's part of a minibatch's gradients. What comes with it: dense ones, then ids, values.

    microbatches: those it has done. dense: places of parameters. rows: of sparse ones, (place,
    microbatches, rows of each).
    """

    minibatch: int
    attempt: int
    copy: int
    microbatches: tuple[int, ...]
    dense: tuple[int, ...]
    rows: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]


class TiedReplicaGradients(DispatcherMessage, frozen=True):
    """A copy's part of the gradients of parameters that another group holds as well.

    microbatches: those it has done. names: of the parameters whose gradients come with it, dense.
    """

    minibatch: int
    attempt: int
    copy: int
    microbatches: tuple[int, ...]
    names: tuple[str, ...]


Letter = tuple["ReplicaGradients | TiedReplicaGradients", Sequence[torch.Tensor]]


@dataclass
class MinibatchGradients:
    """What backwards of one minibatch have left in one copy."""

    microbatches: list[int] = field(default_factory=list)
    dense: dict[int, torch.Tensor] = field(default_factory=dict)
    sparse: dict[int, list[tuple[int, SparseGradientParts]]] = field(default_factory=dict)


@dataclass(frozen=True)
class CrossGroupParameter:
    """A parameter that other groups hold too. own: whether its norm counts in this one."""

    place: int
    own: bool


class ReplicaParameters:
    """The parameters of a copy that get gradients: the same, in the same order, on all copies."""

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        rows: SparseGradients,
        ties: Mapping[str, CrossGroupParameter] | None = None,
    ) -> None:
        """rows: which takes away the sparse gradients of some. ties: that other groups hold too."""
        self.all = list(parameters)
        self._rows, self._ties = rows, dict(ties or {})
        self._names = {tie.place: name for name, tie in self._ties.items()}

    def enter(self, part: MinibatchGradients) -> None:
        """Before a backward: what is there already is added to."""
        for place, parameter in enumerate(self.all):
            parameter.grad = part.dense.get(place)

    def leave(self, part: MinibatchGradients, microbatch: int) -> None:
        """After it: keep what it has left."""
        for place, parameter in enumerate(self.all):
            gradient, parameter.grad = parameter.grad, None
            taken = self._rows.pending(parameter)
            self._rows.drop(parameter)
            if place in self._names and gradient is not None:
                gradient = gradient.to_dense()  # as the sum with what other stages have
            if taken is None and gradient is not None and gradient.is_sparse:
                taken = SparseGradientParts.of([gradient])
            elif gradient is not None:
                part.dense[place] = gradient
            if taken is not None:
                part.sparse.setdefault(place, []).append((microbatch, taken))
        part.microbatches.append(microbatch)

    def set(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """For the optimizer's step."""
        for parameter, gradient in zip(self.all, gradients, strict=True):
            parameter.grad = gradient

    def packed(
        self, part: MinibatchGradients, minibatch: int, attempt: int, copy: int
    ) -> tuple[ReplicaGradients, list[torch.Tensor]]:
        """A part as a message."""
        dense = sorted(part.dense)
        tensors = [part.dense[place] for place in dense]
        rows = []
        for place, pieces in sorted(part.sparse.items()):
            whole = merge_parts(((number,) * len(p.lengths), p) for number, p in pieces)
            numbers = tuple(sorted({number for number, _ in pieces}))
            rows.append((place, numbers, whole.lengths))
            tensors += [whole.ids, whole.values]
        said = ReplicaGradients(
            minibatch, attempt, copy, tuple(part.microbatches), tuple(dense), tuple(rows)
        )
        return said, tensors

    def shared(
        self,
        part: MinibatchGradients,
        names: Sequence[str],
        minibatch: int,
        attempt: int,
        copy: int,
    ) -> tuple[TiedReplicaGradients, list[torch.Tensor]]:
        """Of a part what another group needs, as a message."""
        mine = [name for name in names if self._ties[name].place in part.dense]
        tensors = [part.dense[self._ties[name].place] for name in mine]
        return TiedReplicaGradients(
            minibatch, attempt, copy, tuple(part.microbatches), tuple(mine)
        ), tensors

    def total(
        self, parts: Sequence[Letter], count: int, others: Sequence[Sequence[Letter]] = ()
    ) -> list[torch.Tensor | None]:
        """The sum, by place; FXP900 unless each of ``count`` microbatches is there once.

        parts: of the copies of the group. others: of each group that holds some parameters too.
        """
        for group in (parts, *others):
            _check(group, count)
        found: list[torch.Tensor | None] = [None] * len(self.all)
        own: set[int] = set()
        sparse: dict[int, list[tuple[tuple[int, ...], SparseGradientParts]]] = {}
        # All that hold a parameter add up in the order of the copies: the same bits everywhere.
        every = [letter for group in (parts, *others) for letter in group]
        for said, tensors in sorted(every, key=lambda letter: letter[0].copy):
            for place, tensor in zip(self._places(said), tensors, strict=False):
                tensor, before = tensor.to(self.all[place].device), found[place]
                if before is None:
                    found[place] = tensor
                elif place in own:
                    before.add_(tensor)
                else:  # a part stays as it is: it may have to be given again
                    found[place] = before + tensor
                    own.add(place)
            if isinstance(said, TiedReplicaGradients):
                continue
            rest = iter(tensors[len(said.dense) :])
            for place, numbers, lengths in said.rows:
                device = self.all[place].device
                piece = SparseGradientParts(
                    tuple(lengths), next(rest).to(device), next(rest).to(device)
                )
                sparse.setdefault(place, []).append((tuple(numbers), piece))
        for place, pieces in sparse.items():
            gradient = merge_parts(pieces).gradient(self.all[place])
            dense = found[place]
            found[place] = gradient if dense is None else dense + gradient
        return found

    def square(self, gradients: Sequence[torch.Tensor | None]) -> float:
        """Of the norm of all together, without those that another group counts."""
        total = 0.0
        for place, gradient in enumerate(gradients):
            if gradient is None or (
                place in self._names and not self._ties[self._names[place]].own
            ):
                continue
            values = gradient.coalesce()._values() if gradient.is_sparse else gradient
            total += float(torch.linalg.vector_norm(values, 2.0)) ** 2
        return total

    def _places(self, said: ReplicaGradients | TiedReplicaGradients) -> Sequence[int]:
        """Where the dense gradients of a message belong."""
        if isinstance(said, TiedReplicaGradients):
            return [self._ties[name].place for name in said.names]
        return said.dense


def _check(group: Sequence[Letter], count: int) -> None:
    done = sorted(m for said, _ in group for m in said.microbatches)
    if done != list(range(count)):
        where = f"minibatch {group[0][0].minibatch}"
        why = f"gradients of microbatches {done} of {count}"
        raise error("FXP900", where=where, why=why, fix="")


def clip_gradients(
    gradients: Sequence[torch.Tensor | None], factor: float, value: float | None
) -> None:
    """Scale them by a factor; cut them at a value. In place, but for those that are parts."""
    for gradient in gradients:
        if gradient is not None:
            values = gradient._values() if gradient.is_sparse else gradient
            if factor < 1.0:
                values.mul_(factor)
            if value is not None:
                values.clamp_(-value, value)
