"""Gather sharded parameters before their use, and reduce their gradients during the backward.

A stage of ZeRO-3 gathers each parameter where a block uses it. Without this, the gather starts when
the host reaches that place, and the device waits for it. Here the gathers of the next blocks start
when the first one of a block is taken. All mesh ranks run the same program, so they start the same
gathers in the same order. The reductions of gradients start where autograd needs them, and end
later. Between GPUs, NCCL executes both concurrently with the computation.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxpart.collectives import redistribution
from fxpart.collectives.communicator import Communicator

UNDER_WAY = 8  # Reductions of gradients; each holds the gradient of a whole parameter.

# (attribute of the parameter, axis, dim, size of the whole dim, outer): arguments of an all_gather.
ParameterGather = tuple[str, str, int, int, int]
Finish = Callable[[], torch.Tensor]


class ForwardGathers:
    """The gathers of one call of a stage module, by block, in the order of the program.

    block: the last one of which a gather was taken.
    """

    def __init__(
        self,
        module: Any,
        mesh: Communicator,
        blocks: Sequence[Sequence[ParameterGather]],
        ahead: int,
    ) -> None:
        """ahead: number of blocks."""
        self._module, self._mesh, self._ahead = module, mesh, ahead
        self._order = [(number, one) for number, own in enumerate(blocks) for one in own]
        self._taken = 0
        self._started: deque[Finish] = deque()
        self.block = 0

    def take(self, x: torch.Tensor, axis: object, dim: int, outer: int) -> torch.Tensor | None:
        """Return the gathered parameter; None for a gather that is not the program's next one."""
        if self._taken == len(self._order):
            return None
        number, (name, *how, _, last) = self._order[self._taken]
        if x is not getattr(self._module, name) or [axis, dim, outer] != [*how, last]:
            return None
        self.block = number
        self._start_until(number + self._ahead)
        self._taken += 1
        return self._started.popleft()()

    def close(self) -> None:
        """Wait for gathers that were not taken."""
        while self._started:
            self._started.popleft()()

    def _start_until(self, block: int) -> None:
        at = self._taken + len(self._started)
        while at < len(self._order) and self._order[at][0] <= block:
            name, axis, dim, size, outer = self._order[at][1]
            shard = getattr(self._module, name).detach()
            self._started.append(
                redistribution.start_gather(self._mesh, shard, axis, dim, size, outer)
            )
            at += 1


class BackwardGathers:
    """The parameters that the backward of one microbatch gathers again, in order of the forward."""

    def __init__(self, ahead: int) -> None:
        """ahead: number of blocks."""
        self._ahead = ahead
        self._known: list[weakref.ref[RegatheredTensor]] = []
        self._next = 0  # All from here on have been started or used.

    def add(self, start: Callable[[], Finish], block: int) -> RegatheredTensor:
        """Return the placeholder of a parameter that a block of the forward used."""
        made = RegatheredTensor(start, block, self if self._ahead else None)
        if self._ahead:
            self._known.append(weakref.ref(made))
            self._next = len(self._known)
        return made

    def start_before(self, block: int) -> None:
        """Start the gathers of the blocks before one, whose backward begins."""
        while self._next:
            found = self._known[self._next - 1]()
            if found is not None and found.block < block - self._ahead:
                return
            self._next -= 1
            if found is not None and found.block < block:
                found.start()

    def close(self) -> None:
        """Wait for gathers that the backward did not use."""
        for reference in self._known:
            found = reference()
            if found is not None:
                found.drop()


class RegatheredTensor:
    """Placeholder for a saved tensor that is gathered again. block: of its use in the forward."""

    __slots__ = ("__weakref__", "_finish", "_gathers", "_start", "block")

    def __init__(
        self, start: Callable[[], Finish], block: int, gathers: BackwardGathers | None
    ) -> None:
        self._start, self._gathers, self.block = start, gathers, block
        self._finish: Finish | None = None

    def start(self) -> None:
        """Start the gather, if it is not under way."""
        if self._finish is None:
            with torch.no_grad():
                self._finish = self._start()

    def make(self) -> torch.Tensor:
        """Return the tensor; start the gathers of the blocks that follow in the backward."""
        self.start()
        if self._gathers is not None:
            self._gathers.start_before(self.block)
        finish, self._finish = self._finish, None
        assert finish is not None
        with torch.no_grad():
            return finish()

    def drop(self) -> None:
        """Wait for a gather under way, and drop its result."""
        if self._finish is not None:
            self._finish()
            self._finish = None


class BackwardScatters:
    """The gradients of sharded parameters in one backward, which are reduced during it.

    Autograd would wait for each reduction. Here a gradient is added when its reduction ends.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._started: deque[tuple[torch.Tensor, Finish]] = deque()

    def add(self, parameter: torch.Tensor, finish: Finish) -> None:
        """Add a started reduction, after the oldest ones have ended."""
        while len(self._started) >= UNDER_WAY:
            self._end()
        self._started.append((parameter, finish))

    def close(self) -> None:
        """Wait for all, and add the gradients."""
        while self._started:
            self._end()

    def _end(self) -> None:
        parameter, finish = self._started.popleft()
        with torch.no_grad():
            found = finish()
            parameter.grad = found if parameter.grad is None else parameter.grad.add_(found)
