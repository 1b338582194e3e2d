"""Sends of one rank: the values or gradients of a stage pair, for one microbatch at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from fxpart.errors import FxpartError, error
from fxpart.program.edges import ValueEdge
from fxpart.runtime.batch.symbolic_shapes import Sizes, make_shape_function
from fxpart.runtime.dtypes import torch_dtype
from fxpart.runtime.executor.dim_order import (
    Order,
    get_dim_order,
    has_several_orders,
    pack_to_order,
)
from fxpart.runtime.executor.stage_microbatch import StageMicrobatch
from fxpart.runtime.transport.interface import BACKWARD, FORWARD, Transport

# Maximum number of sends in flight; bounds the memory of sent tensors.
WINDOW = 4
NewOrders = dict[tuple[int, ValueEdge], Order]


class ValueSender:
    """Sends tensors in the memory order of the first one over the same link."""

    def __init__(self, transport: Transport, rank: int, device: torch.device) -> None:
        """rank: of the sender. device: of zeros that replace values after a failure."""
        self._transport, self._rank, self._device = transport, rank, device
        self._sending: deque[Any] = deque()
        self._orders: NewOrders = {}

    def finish(self) -> None:
        """Wait for the last sends; call it when all ranks have received their messages."""
        while self._sending:
            self._transport.wait(self._sending.popleft())

    def send(self, tensors: list[torch.Tensor], targets: Sequence[int], channel: int) -> None:
        """Send tensors to each of the ranks; wait for earlier sends while many are in flight."""
        for target in targets:
            # Within a process a message is the tensor itself, and ranks must not share memory.
            copies = target != targets[0] and target in self._transport.local
            for tensor in tensors:
                if len(self._sending) >= WINDOW:
                    self._transport.wait(self._sending.popleft())
                message = tensor.clone() if copies else tensor
                self._sending.append(self._transport.send(self._rank, target, channel, message))

    def pack(
        self, channel: int, link: ValueEdge, value: torch.Tensor, new: NewOrders
    ) -> list[torch.Tensor]:
        """Return the tensors to send for a value, preceded by its dim order the first time.

        new: receives an order that is to be sent.
        """
        if not has_several_orders(link.shape):
            return [value.contiguous()]
        known = self._orders.get((channel, link))
        if known is not None:
            return [pack_to_order(value, known)]
        order = new[channel, link] = get_dim_order(value)
        head = torch.tensor(order, dtype=torch.int64)
        return [head, pack_to_order(value, order)]

    def note_orders(self, new: NewOrders) -> None:
        """Note the orders that are sent now."""
        self._orders.update(new)

    def make_zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return zeros in place of a value."""
        return torch.zeros(shape, dtype=dtype, device=self._device)


class LinkSender:
    """Sends the values (or gradients) of all links of a stage pair to one or more ranks."""

    def __init__(
        self,
        sender: ValueSender,
        links: tuple[ValueEdge, ...],
        targets: tuple[int, ...],
        *,
        forward: bool,
    ) -> None:
        """targets: ranks. forward: values, otherwise gradients."""
        self._sender, self._targets, self._forward = sender, targets, forward
        self._channel = FORWARD if forward else BACKWARD
        self._links = [(link, make_shape_function(link.shape)) for link in links]

    def send(self, cell: StageMicrobatch, sizes: Sizes) -> None:
        """Send the values of a microbatch; FXP900 for a shape or dtype that was not compiled."""
        tensors: list[torch.Tensor] = []
        new: NewOrders = {}
        for link, of in self._links:
            value = cell.value(link, forward=self._forward)
            if value.shape != of(sizes) or value.dtype != torch_dtype(link.dtype):
                raise make_shape_error(link, value, of(sizes))
            value = value.detach()
            if link.sent != link.dtype:
                value = value.to(torch_dtype(link.sent))
            tensors += self._sender.pack(self._channel, link, value, new)
        self._sender.note_orders(new)
        self._sender.send(tensors, self._targets, self._channel)

    def send_zeros(self, sizes: Sizes) -> None:
        """Send zeros after a failure."""
        tensors: list[torch.Tensor] = []
        new: NewOrders = {}
        for link, of in self._links:
            zeros = self._sender.make_zeros(of(sizes), torch_dtype(link.sent))
            tensors += self._sender.pack(self._channel, link, zeros, new)
        self._sender.note_orders(new)
        self._sender.send(tensors, self._targets, self._channel)


def make_shape_error(
    link: ValueEdge, value: torch.Tensor, expected: tuple[int, ...]
) -> FxpartError:
    """Return the error for a value of another shape or dtype than compiled."""
    dtype = torch_dtype(link.dtype)
    return error(
        "FXP900",
        where=f"value {link.name} from stage {link.source} to stage {link.target}",
        why=f"it is {value.dtype} {tuple(value.shape)}, not {dtype} {expected} as compiled",
        fix="",
    )
