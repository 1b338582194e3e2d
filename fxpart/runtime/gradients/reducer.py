"""Gradient reduction that overlaps with a stage's last backward of a step.

A stage's gradients are grouped into buckets (:mod:`fxpart.runtime.gradients.buckets`) whose
contents and order are fixed before anything runs and equal on all mesh ranks. A bucket starts when
its gradients are final and all earlier buckets have started, whatever the order of gradients. So
all mesh ranks start the same transfers in the same order, and none waits for one that another has
not started. They use process groups of their own, separate from the collectives of forward and
backward.

At most UNDER_WAY buckets of a rank are in flight. Waiting for the oldest before a new one starts
cannot deadlock: in the order of the schedule, which is the same on all mesh ranks and can be
executed, every wait comes after the start that it needs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fxpart.collectives import Communicator, start_reduce_scatter
from fxpart.collectives.communicator import CollectiveHandle
from fxpart.errors import error
from fxpart.runtime.gradients.buckets import GradientBucket, PartialGradient
from fxpart.runtime.gradients.reduce_scatter import get_dense_gradient
from fxpart.sharding.mesh import parse_axes

UNDER_WAY = 4  # Buckets in flight per rank; the received data needs their memory once more.


class ReductionQueue:
    """A rank's reductions in flight, oldest first."""

    def __init__(self) -> None:
        """Start empty."""
        self._ends: deque[Callable[[], None]] = deque()

    def make_room(self) -> None:
        """Finish the oldest reductions while the maximum number is in flight."""
        while len(self._ends) >= UNDER_WAY:
            self._ends.popleft()()

    def add(self, end: Callable[[], None]) -> None:
        """Add a started reduction; ``end`` waits for it."""
        self._ends.append(end)

    def finish(self) -> None:
        """Wait for all reductions."""
        while self._ends:
            self._ends.popleft()()

    def clear(self) -> None:
        """Discard all, after a failure."""
        self._ends.clear()


class StageGradientReducer:
    """The gradient reduction of one stage on one mesh rank, once per update.

    Call :meth:`arm`, run a backward, call :meth:`rest`, and later :meth:`finish`; or only finish.

    armed: whether a backward runs between arm and rest.
    """

    def __init__(
        self, mesh: Communicator, buckets: Sequence[GradientBucket], queue: ReductionQueue
    ) -> None:
        """mesh: used only for these reductions. buckets: in starting order. queue: of the rank."""
        self._mesh = mesh
        self._buckets = list(buckets)
        self._queue = queue
        self._terms = [term for bucket in buckets for term in bucket.terms]
        self._bucket_of = [at for at, bucket in enumerate(buckets) for _ in bucket.terms]
        # How often the last backward adds to each gradient; known after the first one.
        self._expected = [0] * len(self._terms)
        self.armed = False
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._reset_counts()

    @property
    def parameters(self) -> set[int]:
        """The ids of the parameters whose gradients are reduced here."""
        return {id(term.parameter) for term in self._terms}

    def arm(self) -> None:
        """Start buckets as they become final during the last backward before an update."""
        self.armed = True
        self._hooks = [
            term.parameter.register_post_accumulate_grad_hook(self._make_count_hook(index))
            for index, term in enumerate(self._terms)
        ]

    def rest(self) -> None:
        """Start all remaining buckets after the backward."""
        if self.armed:
            self._disarm()
            self._expected = list(self._seen)
        while self._next < len(self._buckets):
            self._start(self._buckets[self._next])

    def skip(self) -> None:
        """After a failed backward, reduce zeros for all remaining buckets, as other mesh ranks
        wait.
        """
        self._disarm()
        for term in self._terms:
            term.parameter.grad = None
        self.rest()

    def finish(self) -> None:
        """Start the remaining buckets and wait for all; the gradients are then reduced."""
        self.rest()
        self._queue.finish()
        self._reset_counts()

    def reset(self) -> None:
        """Discard started reductions."""
        self._disarm()
        self._queue.clear()
        self._reset_counts()

    def _reset_counts(self) -> None:
        self._next = 0
        self._seen = [0] * len(self._terms)
        self._waiting = [len(bucket.terms) for bucket in self._buckets]
        self._missing: list[PartialGradient] = []

    def _disarm(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self.armed = [], False

    def _make_count_hook(self, index: int) -> Callable[[torch.Tensor], None]:
        at = self._bucket_of[index]

        def count(parameter: torch.Tensor) -> None:
            self._seen[index] += 1
            if self._seen[index] == self._expected[index]:
                self._waiting[at] -= 1
                self._advance()
            elif self._seen[index] == self._expected[index] + 1 > 1:
                self._handle_extra_addition(index, at)

        return count

    def _advance(self) -> None:
        """Start the buckets that are complete in order; one with flags only after the backward."""
        while self._next < len(self._buckets):
            bucket = self._buckets[self._next]
            if self._waiting[self._next] or bucket.flags:
                return
            self._start(bucket)

    def _handle_extra_addition(self, index: int, at: int) -> None:
        """Handle more additions to a gradient than in the previous step: it is final at the end."""
        if at < self._next:
            raise error(
                "FXP900",
                where="the last backward of a step",
                why="a gradient was added to after its reduction had started",
                fix="",
            )
        self._waiting[at] += 1

    def _start(self, bucket: GradientBucket) -> None:
        self._queue.make_room()
        self._next += 1
        with torch.no_grad():
            if bucket.scattered:
                lines = [self._flatten_gradient(term) for term in bucket.terms]
                self._queue.add(self._start_scatter(bucket, lines))
            else:
                self._queue.add(self._start_sum(bucket))

    def _flatten_gradient(self, term: PartialGradient) -> torch.Tensor:
        """Return the gradient as a flat tensor; zeros if there is none."""
        if term.parameter.grad is None:
            self._missing.append(term)
            return torch.zeros_like(term.parameter, memory_format=torch.contiguous_format).view(-1)
        return get_dense_gradient(term.parameter).reshape(-1)

    def _start_sum(self, bucket: GradientBucket) -> Callable[[], None]:
        lines = [self._flatten_gradient(term) for term in bucket.terms]
        layouts = [_get_strides(term.parameter.grad) for term in bucket.terms]
        if bucket.flags:
            absent = {id(term) for term in self._missing}
            there = [0.0 if id(term) in absent else 1.0 for term in bucket.flags]
            # Keep the dtype of the bucket: torch.cat would convert all gradients to a wider one.
            like = (bucket.terms or bucket.flags)[0].parameter
            flags = torch.tensor(there, dtype=like.dtype)
            lines = [*lines, flags.to(like.device, non_blocking=True)]
        pending = self._mesh.start_pair_sum(lines, bucket.axes)
        if pending is not None:
            return self._end_pair_sum(bucket, layouts, lines, pending)
        flat = lines[0] if len(lines) == 1 else torch.cat(lines)
        del lines  # The bucket has copied them; the received data needs the memory.
        for term in bucket.terms:
            term.parameter.grad = None
        handle = self._mesh.start_all_reduce(flat, bucket.axes, reuse=True)

        def end() -> None:
            found, at = handle.wait(), 0
            for term, layout in zip(bucket.terms, layouts, strict=True):
                count = term.parameter.numel()
                total = found.narrow(0, at, count).view(term.parameter.shape)
                term.parameter.grad = total if layout is None else _apply_strides(total, layout)
                at += count
            if bucket.flags and self._missing:
                self._remove_absent(bucket.flags, found[at:])

        return end

    def _end_pair_sum(
        self,
        bucket: GradientBucket,
        layouts: list[tuple[int, ...] | None],
        lines: list[torch.Tensor],
        pending: CollectiveHandle,
    ) -> Callable[[], None]:
        """Return the end of a sum in place: most lines are views of the gradients."""
        gradients = [term.parameter.grad for term in bucket.terms]
        for term in bucket.terms:
            term.parameter.grad = None

        def end() -> None:
            pending.wait()
            for term, layout, line, own in zip(
                bucket.terms, layouts, lines, gradients, strict=False
            ):
                if own is None or own.is_sparse or layout is not None:
                    total = line.view(term.parameter.shape)
                    own = total if layout is None else _apply_strides(total, layout)
                term.parameter.grad = own
            if bucket.flags and self._missing:
                self._remove_absent(bucket.flags, lines[-1])

        return end

    def _start_scatter(
        self, bucket: GradientBucket, lines: list[torch.Tensor]
    ) -> Callable[[], None]:
        pending = start_reduce_scatter(self._mesh, lines, parse_axes(bucket.scattered))
        for term in bucket.terms:
            term.parameter.grad = None

        def end() -> None:
            for term, piece in zip(bucket.terms, pending.wait(), strict=True):
                shard = term.shard
                shard.grad = piece if shard.grad is None else shard.grad.add_(piece)

        return end

    def _remove_absent(self, terms: Sequence[PartialGradient], there: torch.Tensor) -> None:
        """Remove gradients that no mesh rank has: an optimizer skips such a parameter."""
        for term, mesh_ranks in zip(terms, there.tolist(), strict=True):
            if not mesh_ranks:
                term.parameter.grad = term.shard.grad = None


def _get_strides(gradient: torch.Tensor | None) -> tuple[int, ...] | None:
    """Return the strides of a gradient that is not contiguous."""
    if gradient is None or gradient.is_sparse or gradient.is_contiguous():
        return None
    return gradient.stride()


def _apply_strides(total: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return the same values with these strides, so that norms sum them in the same order."""
    like = torch.empty_strided(total.shape, strides, dtype=total.dtype, device=total.device)
    return like.copy_(total)


@dataclass
class GradientAccumulation:
    """The batches whose gradients are accumulated for the next update.

    A batch's weight is the divisor of its loss, such as the number of valid tokens, or its rows.
    Gradients are sums of each batch's gradient times its weight divided by the weight of the first
    batch. The gradient of the first batch is therefore exactly that of an update without
    accumulation.

    batches: their number. is_reduced: whether gradients are those of the last update. total: the
    divisor of the sum, in units of the first weight; by default the sum of the weights. is_divided:
    whether it differs from one batch's weight.
    """

    batches: int = 0
    is_reduced: bool = False
    total: float = 0.0
    is_divided: bool = False
    _unit: float = 1.0

    def factor(self, weight: float) -> float:
        """Return the factor for the gradient of another batch of this weight."""
        return weight / self._unit if self.batches else 1.0

    def add(self, weight: float) -> None:
        """Count a batch whose gradients were added."""
        if not self.batches:
            self._unit = weight or 1.0
        self.total += weight / self._unit
        self.is_divided = self.batches > 0
        self.batches += 1

    def divide_by(self, total: float | None) -> None:
        """Divide the sum by ``total``, in the unit of weights; None for the sum of the weights."""
        if total is not None:
            self.total, self.is_divided = total / self._unit, True

    def reset(self, *, reduced: bool = False) -> None:
        """Reset to zero batches. reduced: gradients are those of an update, and not cleared."""
        self.is_reduced = reduced
        self.batches, self.total, self.is_divided, self._unit = 0, 0.0, False, 1.0
