"""Many tensors in buckets, a few at a time; gradients on their way to the lanes' pieces of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from fxpart.collectives import BucketedCollective, Communicator, start_reduce_scatter

BUCKET = 25 << 20  # bytes of gradients that are sent together, as in PyTorch's data parallelism
_UNDER_WAY = 1  # buckets that move while the next is filled; each holds its gradients once more


def run_in_buckets(sizes: Sequence[int], start: Callable[[slice], BucketedCollective]) -> None:
    """``start`` collectives over neighbours of about BUCKET bytes each, and wait for all.

    sizes: of each tensor, in bytes. Only a few are under way at a time, since a bucket is a copy.
    """
    sent: deque[BucketedCollective] = deque()
    first = held = 0
    for index, size in enumerate(sizes):
        held += size
        if held >= BUCKET or index == len(sizes) - 1:
            sent.append(start(slice(first, index + 1)))
            first, held = index + 1, 0
            if len(sent) > _UNDER_WAY:
                sent.popleft().wait()
    while sent:
        sent.popleft().wait()


class GradientReduceScatter:
    """Reduce-scatters of one stage of one lane.

    All lanes add the same parameters in the same order. A parameter's gradient is dropped as soon
    as its bucket is on its way, so what is there twice is never more than a few buckets.
    """

    def __init__(self, mesh: Communicator, axis: str) -> None:
        """axis: along which the optimizer's tensors are cut."""
        self._mesh = mesh
        self._axis = axis
        self.reset()

    def reset(self) -> None:
        """Forget what has begun, after a failure."""
        self._bucket: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._bytes = 0
        self._sent: deque[tuple[BucketedCollective, list[torch.Tensor]]] = deque()

    def add(self, parameter: torch.Tensor, held: torch.Tensor) -> None:
        """Take the parameter's gradient; its sum's piece is added to that of ``held``."""
        assert parameter.grad is not None
        self._bucket.append((parameter, held))
        self._bytes += parameter.grad.nbytes
        if self._bytes >= BUCKET:
            self._send()

    def finish(self) -> None:
        """Send the rest, and wait for everything."""
        if self._bucket:
            self._send()
        while self._sent:
            self._receive()

    def _send(self) -> None:
        lines = [get_dense_gradient(parameter).reshape(-1) for parameter, _ in self._bucket]
        pending = start_reduce_scatter(self._mesh, lines, self._axis)
        for parameter, _ in self._bucket:
            parameter.grad = None
        self._sent.append((pending, [held for _, held in self._bucket]))
        self._bucket, self._bytes = [], 0
        if len(self._sent) > _UNDER_WAY:
            self._receive()

    def _receive(self) -> None:
        pending, targets = self._sent.popleft()
        for held, piece in zip(targets, pending.wait(), strict=True):
            held.grad = piece if held.grad is None else held.grad.add_(piece)


def get_dense_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """The gradient of a parameter that has one, as a plain tensor."""
    assert parameter.grad is not None
    return parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
