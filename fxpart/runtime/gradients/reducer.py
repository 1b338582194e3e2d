"""Sums of gradients between lanes that start while a stage's last backward of a step still runs.

A stage's gradients lie in buckets (:mod:`fxpart.runtime.gradients.buckets`) whose contents and
order are known before anything runs and equal on all lanes. A bucket is started when its gradients
are final and those before it have been started, whatever the order in which gradients come; so all
lanes start the same transfers in the same order, and none of them waits for one that another has
not begun. They travel in groups of their own, beside the collectives of forward and backward.

At most UNDER_WAY buckets of a rank move at once. Waiting for the oldest before a new one starts
cannot end in a circle: every wait comes after the start that it needs in the order of the
schedule, which is the same on all lanes and can be run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from fxpart.collectives import Communicator, start_reduce_scatter
from fxpart.errors import error
from fxpart.runtime.gradients.buckets import GradientBucket, PartialGradient
from fxpart.runtime.gradients.reduce_scatter import get_dense_gradient

UNDER_WAY = 4  # buckets of a rank that move at once: what is received takes their memory once more


class ReductionQueue:
    """What a rank has under way, oldest first."""

    def __init__(self) -> None:
        """Nothing."""
        self._ends: deque[Callable[[], None]] = deque()

    def make_room(self) -> None:
        """Finish the oldest where as many as may be are under way."""
        while len(self._ends) >= UNDER_WAY:
            self._ends.popleft()()

    def add(self, end: Callable[[], None]) -> None:
        """Something has been started; ``end`` waits for it."""
        self._ends.append(end)

    def finish(self) -> None:
        """Wait for everything."""
        while self._ends:
            self._ends.popleft()()

    def clear(self) -> None:
        """Forget everything, after a failure."""
        self._ends.clear()


class StageGradientReducer:
    """The sums of one stage of one lane, once for each update.

    Either :meth:`arm`, a backward and :meth:`rest`, and later :meth:`finish`; or that alone.

    armed: between the first two.
    """

    def __init__(
        self, mesh: Communicator, buckets: Sequence[GradientBucket], queue: ReductionQueue
    ) -> None:
        """mesh: for these sums alone. buckets: as they are started. queue: of the rank."""
        self._mesh = mesh
        self._buckets = list(buckets)
        self._queue = queue
        self._terms = [term for bucket in buckets for term in bucket.terms]
        self._bucket_of = [at for at, bucket in enumerate(buckets) for _ in bucket.terms]
        # How often a gradient is added to in the last backward, known once there was one.
        self._expected = [0] * len(self._terms)
        self.armed = False
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._begin()

    @property
    def parameters(self) -> set[int]:
        """The parameters whose gradients are summed here, by identity."""
        return {id(term.parameter) for term in self._terms}

    def arm(self) -> None:
        """The last backward before an update begins: start what becomes final."""
        self.armed = True
        self._hooks = [
            term.parameter.register_post_accumulate_grad_hook(self._counter(index))
            for index, term in enumerate(self._terms)
        ]

    def rest(self) -> None:
        """The backward is over: start all that is left."""
        if self.armed:
            self._disarm()
            self._expected = list(self._seen)
        while self._next < len(self._buckets):
            self._start(self._buckets[self._next])

    def skip(self) -> None:
        """The backward failed: give zeros for all that is left, since the other lanes wait."""
        self._disarm()
        for term in self._terms:
            term.parameter.grad = None
        self.rest()

    def finish(self) -> None:
        """Start what is left and wait for all; the gradients are sums then."""
        self.rest()
        self._queue.finish()
        self._begin()

    def reset(self) -> None:
        """Forget what has begun."""
        self._disarm()
        self._queue.clear()
        self._begin()

    def _begin(self) -> None:
        self._next = 0
        self._seen = [0] * len(self._terms)
        self._waiting = [len(bucket.terms) for bucket in self._buckets]
        self._absent: list[PartialGradient] = []

    def _disarm(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self.armed = [], False

    def _counter(self, index: int) -> Callable[[torch.Tensor], None]:
        at = self._bucket_of[index]

        def count(parameter: torch.Tensor) -> None:
            self._seen[index] += 1
            if self._seen[index] == self._expected[index]:
                self._waiting[at] -= 1
                self._advance()
            elif self._seen[index] == self._expected[index] + 1 > 1:
                self._again(index, at)

        return count

    def _advance(self) -> None:
        """Start the buckets whose turn it is; one with flags only when the backward is over."""
        while self._next < len(self._buckets):
            bucket = self._buckets[self._next]
            if self._waiting[self._next] or bucket.flags:
                return
            self._start(bucket)

    def _again(self, index: int, at: int) -> None:
        """More comes to a gradient than in the step before: it is final at the end only."""
        if at < self._next:
            raise error(
                "FXP900",
                where="the last backward of a step",
                why="it has added to a gradient whose sum over the lanes was on its way",
                fix="",
            )
        self._waiting[at] += 1

    def _start(self, bucket: GradientBucket) -> None:
        self._queue.make_room()
        self._next += 1
        with torch.no_grad():
            if bucket.scattered:
                lines = [self._line(term) for term in bucket.terms]
                self._queue.add(self._start_scatter(bucket, lines))
            else:
                self._queue.add(self._start_sum(bucket))

    def _line(self, term: PartialGradient) -> torch.Tensor:
        """The gradient as a flat tensor; zeros where there is none."""
        if term.parameter.grad is None:
            self._absent.append(term)
            return torch.zeros_like(term.parameter, memory_format=torch.contiguous_format).view(-1)
        return get_dense_gradient(term.parameter).reshape(-1)

    def _start_sum(self, bucket: GradientBucket) -> Callable[[], None]:
        lines = [self._line(term) for term in bucket.terms]
        layouts = [_layout(term.parameter.grad) for term in bucket.terms]
        if bucket.flags:
            absent = {id(term) for term in self._absent}
            there = [0.0 if id(term) in absent else 1.0 for term in bucket.flags]
            # In the dtype of the bucket: torch.cat would convert all gradients to a wider one.
            like = (bucket.terms or bucket.flags)[0].parameter
            lines = [*lines, torch.tensor(there, dtype=like.dtype, device=like.device)]
        flat = lines[0] if len(lines) == 1 else torch.cat(lines)
        del lines  # the bucket has them; what is received takes as much once more
        for term in bucket.terms:
            term.parameter.grad = None
        handle = self._mesh.start_all_reduce(flat, bucket.axes, reuse=True)

        def end() -> None:
            found, at = handle.wait(), 0
            for term, layout in zip(bucket.terms, layouts, strict=True):
                count = term.parameter.numel()
                total = found.narrow(0, at, count).view(term.parameter.shape)
                term.parameter.grad = total if layout is None else _laid(total, layout)
                at += count
            if bucket.flags and self._absent:
                self._drop(bucket.flags, found[at:])

        return end

    def _start_scatter(
        self, bucket: GradientBucket, lines: list[torch.Tensor]
    ) -> Callable[[], None]:
        pending = start_reduce_scatter(self._mesh, lines, bucket.scattered)
        for term in bucket.terms:
            term.parameter.grad = None

        def end() -> None:
            for term, piece in zip(bucket.terms, pending.wait(), strict=True):
                held = term.held
                held.grad = piece if held.grad is None else held.grad.add_(piece)

        return end

    def _drop(self, terms: Sequence[PartialGradient], there: torch.Tensor) -> None:
        """No gradient where no lane had one: an optimizer leaves such a parameter alone."""
        for term, lanes in zip(terms, there.tolist(), strict=True):
            if not lanes:
                term.parameter.grad = term.held.grad = None


def _layout(gradient: torch.Tensor | None) -> tuple[int, ...] | None:
    """The strides of a gradient that is not contiguous."""
    if gradient is None or gradient.is_sparse or gradient.is_contiguous():
        return None
    return gradient.stride()


def _laid(total: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """The same numbers with these strides, in which norms add them up in the same order."""
    like = torch.empty_strided(total.shape, strides, dtype=total.dtype, device=total.device)
    return like.copy_(total)
