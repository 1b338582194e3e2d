"""Bucketed collectives, and reduce-scatter of gradients into optimizer shards."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch

from fxpart.collectives import (
    BucketedCollective,
    Communicator,
    start_all_gather,
    start_reduce_scatter,
    start_sum,
)
from fxpart.collectives.communicator import Axis

BUCKET = 25 << 20  # Bytes of gradients per bucket, as in PyTorch's DDP.
_UNDER_WAY = 1  # Buckets in flight while the next is filled; each holds a copy of its gradients.


def run_in_buckets(sizes: Sequence[int], start: Callable[[slice], BucketedCollective]) -> None:
    """Call ``start`` for slices of about BUCKET bytes each, and wait for all collectives.

    sizes: of each tensor, in bytes. Only a few buckets are in flight, because each is a copy.
    """
    sent: deque[BucketedCollective] = deque()
    first = filled = 0
    for index, size in enumerate(sizes):
        filled += size
        if filled >= BUCKET or index == len(sizes) - 1:
            sent.append(start(slice(first, index + 1)))
            first, filled = index + 1, 0
            if len(sent) > _UNDER_WAY:
                sent.popleft().wait()
    while sent:
        sent.popleft().wait()


def all_reduce(
    mesh: Communicator, gradients: Iterable[tuple[tuple[str, ...], torch.Tensor]]
) -> None:
    """All-reduce gradients in place over their axes, in buckets of the same axes."""
    groups: dict[tuple[str, ...], list[torch.Tensor]] = {}
    for axes, gradient in gradients:
        if axes:
            groups.setdefault(axes, []).append(gradient)
    for axes, tensors in groups.items():
        _all_reduce_along(mesh, axes, tensors)


def _all_reduce_along(
    mesh: Communicator, axes: tuple[str, ...], tensors: list[torch.Tensor]
) -> None:
    run_in_buckets([t.nbytes for t in tensors], lambda these: start_sum(mesh, tensors[these], axes))


def all_gather(
    mesh: Communicator, axis: Axis, pieces: list[torch.Tensor], wholes: list[torch.Tensor]
) -> None:
    """Fill flat tensors with the shards of all ranks of the axis."""
    run_in_buckets(
        [whole.nbytes for whole in wholes],
        lambda these: start_all_gather(mesh, pieces[these], axis, wholes[these]),
    )


class GradientReduceScatter:
    """Reduce-scatters of one stage on one mesh rank.

    All mesh ranks add the same parameters in the same order. A gradient is freed as soon as its
    bucket is sent, so at most a few buckets of gradients exist twice.
    """

    def __init__(self, mesh: Communicator, axis: Axis) -> None:
        """axis: the mesh axes along which the optimizer's tensors are sharded."""
        self._mesh = mesh
        self._axis = axis
        self.reset()

    def reset(self) -> None:
        """Discard pending buckets, after a failure."""
        self._bucket: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._bytes = 0
        self._sent: deque[tuple[BucketedCollective, list[torch.Tensor]]] = deque()

    def add(self, parameter: torch.Tensor, shard: torch.Tensor) -> None:
        """Take the parameter's gradient; its reduced part is added to that of ``shard``."""
        assert parameter.grad is not None
        self._bucket.append((parameter, shard))
        self._bytes += parameter.grad.nbytes
        if self._bytes >= BUCKET:
            self._send()

    def finish(self) -> None:
        """Send the last bucket, and wait for all."""
        if self._bucket:
            self._send()
        while self._sent:
            self._receive()

    def _send(self) -> None:
        lines = [get_dense_gradient(parameter).reshape(-1) for parameter, _ in self._bucket]
        pending = start_reduce_scatter(self._mesh, lines, self._axis)
        for parameter, _ in self._bucket:
            parameter.grad = None
        self._sent.append((pending, [shard for _, shard in self._bucket]))
        self._bucket, self._bytes = [], 0
        if len(self._sent) > _UNDER_WAY:
            self._receive()

    def _receive(self) -> None:
        pending, targets = self._sent.popleft()
        for shard, piece in zip(targets, pending.wait(), strict=True):
            shard.grad = piece if shard.grad is None else shard.grad.add_(piece)


def get_dense_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a parameter that has one, as a dense tensor."""
    assert parameter.grad is not None
    return parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
