"""Parameters and optimizer state in host memory: the update runs on the CPU (ZeRO-Offload).

As in ZeRO-Offload (Ren et al., USENIX ATC 2021): an update copies the reduced and clipped gradients
to the host, runs the optimizer on the host's copy of the parameters, and copies the parameters
back. The copies of one direction are enqueued together and awaited once. Memory is allocated in
buckets, because torch rounds each pinned allocation up to a power of two.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from fxpart.accelerator import allocate_pinned, is_accelerator, synchronize
from fxpart.compat import get_write_count
from fxpart.errors import error

_BUCKET = 1 << 28  # bytes; larger tensors have an allocation of their own
_ALIGNED = 64  # bytes


class _HostCopy(NamedTuple):
    """What an optimizer updates in place of a tensor: whole is the parameter that has it."""

    whole: torch.Tensor
    tensor: torch.Tensor
    host: nn.Parameter
    gradient: torch.Tensor


class HostParameters:
    """The host's copies of the tensors that this process's optimizers update.

    On a CPU rank the host's memory is the device's; the copies are separate tensors all the same.
    """

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """pairs: each parameter, and the tensor or ZeRO shard of it that is updated."""
        tensors = [tensor for _, tensor in pairs]
        memory = iter(_allocate([*tensors, *tensors]))
        made = [nn.Parameter(next(memory)) for _ in tensors]
        self._copies = [
            _HostCopy(whole, tensor, host, next(memory))
            for (whole, tensor), host in zip(pairs, made, strict=True)
        ]
        self._by_tensor = {id(copy.tensor): copy.host for copy in self._copies}
        self._devices = {t.device for t in tensors if is_accelerator(t.device)}
        self._seen: list[tuple[int, int]] = []  # Memory and writes of each parameter; [] to copy.

    @classmethod
    def of_optimizers(
        cls,
        optimizers: Collection[torch.optim.Optimizer],
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> HostParameters:
        """Replace the optimizers' tensors and their state by copies on the host.

        pairs: of all parameters of this process, as for the constructor.
        """
        groups = [group for each in optimizers for group in each.param_groups]
        owned = {id(p) for group in groups for p in group["params"]}
        made = cls([pair for pair in pairs if id(pair[1]) in owned])
        for optimizer in optimizers:
            made.move(optimizer)
            for group in optimizer.param_groups:
                moved = [(p, made.of(p)) for p in group["params"]]
                group["params"] = [host for _, host in moved]
                for p, host in moved:
                    if p in optimizer.state:
                        found = optimizer.state.pop(p)
                        optimizer.state[host] = {k: move_to_host(v) for k, v in found.items()}
        return made

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the host's copy of a tensor, or the tensor itself if it has none."""
        return self._by_tensor.get(id(tensor), tensor)

    def move(self, optimizer: torch.optim.Optimizer) -> None:
        """Move tensors among an optimizer's options to the host; FXP109 if its step needs a GPU."""
        for group in optimizer.param_groups:
            if group.get("capturable"):
                raise error(
                    "FXP109",
                    where=f"optimizer {type(optimizer).__name__}, offload",
                    why="capturable=True runs its step on an accelerator, but its state is on the "
                    "host",
                    fix='leave capturable= out, or use offload="none"',
                )
            for key, value in group.items():
                if key != "params":
                    group[key] = move_to_host(value)

    def note_written(self) -> None:
        """Note that parameters may have been written by others than :meth:`store`."""
        self._seen = []

    @torch.no_grad()
    def fetch(self) -> None:
        """Copy gradients to the host, and parameters that were written since the last update."""
        seen = self._seen or [(0, -1)] * len(self._copies)
        for copy, before in zip(self._copies, seen, strict=True):
            if _identify(copy.whole) != before:
                copy.host.copy_(copy.tensor, non_blocking=True)
            copy.host.grad = _fetch_gradient(copy)
        for device in self._devices:
            synchronize(device)

    @torch.no_grad()
    def store(self) -> None:
        """Copy the updated parameters back. The host's are not written before the next fetch."""
        for copy in self._copies:
            if copy.host.grad is not None:
                copy.tensor.copy_(copy.host, non_blocking=True)
                copy.host.grad = None
        self._seen = [_identify(copy.whole) for copy in self._copies]


def move_to_host(value: Any) -> Any:
    """Return a tensor, or tensors in a tuple or list, in host memory."""
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, (tuple, list)):
        return type(value)(move_to_host(each) for each in value)
    return value


def _identify(parameter: torch.Tensor) -> tuple[int, int]:
    return parameter.data_ptr(), get_write_count(parameter)


def _fetch_gradient(copy: _HostCopy) -> torch.Tensor | None:
    """Return the gradient on the host, with its layout, in the memory that is reserved for it."""
    gradient = copy.tensor.grad
    if gradient is None:
        return None
    fits = gradient.dtype == copy.gradient.dtype and gradient.layout == torch.strided
    if not fits or not _is_dense(gradient):
        return gradient.clone() if gradient.device.type == "cpu" else gradient.cpu()
    target = copy.gradient.as_strided(
        gradient.size(), gradient.stride(), copy.gradient.storage_offset()
    )
    return target.copy_(gradient, non_blocking=True)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill their memory, each once."""
    expected = 1
    order = sorted(range(tensor.dim()), key=lambda dim: (tensor.stride(dim), tensor.size(dim)))
    for dim in order:
        if tensor.size(dim) != 1 and tensor.stride(dim) != expected:
            return False
        expected *= tensor.size(dim)
    return True


def _allocate(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield host memory for each tensor, with its dtype and, if dense, its strides."""
    bucket: list[tuple[torch.Tensor, int]] = []
    used = 0
    for tensor in tensors:
        size = -(-tensor.nbytes // _ALIGNED) * _ALIGNED
        if bucket and used + size > _BUCKET:
            yield from _allocate_bucket(bucket, used)
            bucket, used = [], 0
        bucket.append((tensor, used))
        used += size
    yield from _allocate_bucket(bucket, used)


def _allocate_bucket(bucket: Sequence[tuple[torch.Tensor, int]], size: int) -> list[torch.Tensor]:
    like = torch.empty(size, dtype=torch.uint8, device="meta")
    pinned = any(is_accelerator(tensor.device) for tensor, _ in bucket)
    line = (
        allocate_pinned(like, torch.contiguous_format)
        if pinned
        else torch.empty(size, dtype=torch.uint8)
    )
    found = []
    for tensor, start in bucket:
        part = line[start : start + tensor.nbytes].view(tensor.dtype)
        layout = (
            tensor.stride()
            if _is_dense(tensor)
            else torch.empty(tensor.shape, device="meta").stride()
        )
        found.append(part.as_strided(tensor.size(), layout, part.storage_offset()))
    return found
