"""Messages from one rank over one channel: posted early, in the order of the sends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxpart.program.edges import ValueEdge
from fxpart.runtime.batch.symbolic_shapes import Sizes, make_shape_function
from fxpart.runtime.dtypes import torch_dtype
from fxpart.runtime.executor.dim_order import Order, has_several_orders, unpack_from_order
from fxpart.runtime.transport.interface import AHEAD, Transport

__all__ = ["AHEAD", "ReceiveQueue", "StageMessage"]

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class StageMessage:
    """The values of one transfer action: links of a stage pair, for one microbatch."""

    links: tuple[ValueEdge, ...]
    microbatch: int


class ReceiveQueue:
    """Receives of one (sender, channel), each with the static shape of its links.

    Messages are matched by the order of the sender's actions, which every rank knows. This also
    works for transports without message tags.
    """

    def __init__(
        self,
        transport: Transport,
        source: int,
        target: int,
        channel: int,
        device: torch.device,
        messages: Sequence[StageMessage],
        *,
        orders: bool = False,
    ) -> None:
        """source, target: ranks. messages: all of one step, in the order of the sends.

        orders: whether the memory order of a link's dims is sent before its first tensor.
        """
        self.source = source
        self.channel = channel
        self._transport = transport
        self._ahead = transport.receives_ahead
        self._route = (source, target, channel)
        self._device = device
        self._plan: list[tuple[int, list[tuple[Callable[[Sizes], tuple[int, ...]], torch.dtype]]]]
        self._plan = [
            (m.microbatch, [(make_shape_function(x.shape), torch_dtype(x.sent)) for x in m.links])
            for m in messages
        ]
        # Original dtypes of each message's tensors, if it is sent in another dtype.
        self._original_dtypes = [
            [torch_dtype(x.dtype) for x in m.links]
            if any(x.sent != x.dtype for x in m.links)
            else None
            for m in messages
        ]
        self._links = [m.links for m in messages]
        self._orders: dict[ValueEdge, Order] | None = {} if orders else None
        self._announced: set[ValueEdge] = set()
        self._pending_orders: dict[
            int, list[tuple[ValueEdge, Any]]
        ] = {}  # By message: orders in flight.
        self._handles: list[list[Any] | None] = []
        self._sizes: Sequence[Sizes] = ()

    def begin(self, sizes: Sequence[Sizes]) -> None:
        """Start a step and post the first receives. sizes: symbol sizes per microbatch."""
        self._sizes = sizes
        self._handles, self._pending_orders = [], {}
        self.ensure(self._ahead)

    def ensure(self, count: int) -> None:
        """Post receives until the first ``count`` messages (or all) are posted."""
        if count <= len(self._handles):
            return
        post, plan, handles = self._transport.post, self._plan, self._handles
        for microbatch, tensors in plan[len(handles) : count]:
            sizes = self._sizes[microbatch]
            index, posted = len(handles), []
            for link, (of, dtype) in zip(self._links[index], tensors, strict=True):
                if self._orders is not None:
                    self._post_order(index, link)
                posted.append(post(*self._route, of(sizes), dtype, self._device))
            handles.append(posted)

    def _post_order(self, index: int, link: ValueEdge) -> None:
        """Post the receive of a link's dim order, which precedes its first tensor.

        It is sent on the CPU, as the host reads it.
        """
        if link not in self._announced and has_several_orders(link.shape):
            self._announced.add(link)
            shape = (len(link.shape),)
            handle = self._transport.post(*self._route, shape, torch.int64, _CPU)
            self._pending_orders.setdefault(index, []).append((link, handle))

    def ready(self, index: int) -> bool:
        """Return whether message ``index`` can be taken without waiting."""
        if index >= len(self._handles):
            self.ensure(index + 1)
        handles = self._handles[index]
        if handles is None:
            return True
        heads = [handle for _, handle in self._pending_orders.get(index, ())]
        return all(map(self._transport.ready, (*heads, *handles)))

    def take(self, index: int) -> list[torch.Tensor]:
        """Wait for message ``index`` and return its tensors; then post further ones."""
        if index >= len(self._handles):
            self.ensure(index + 1)
        handles = self._handles[index]
        assert handles is not None, "a message can be taken only once"
        self._read_orders(index)
        tensors = list(map(self._transport.wait, handles))
        if self._orders:
            orders = self._orders
            tensors = [
                unpack_from_order(tensor, orders[link]) if link in orders else tensor
                for tensor, link in zip(tensors, self._links[index], strict=True)
            ]
        self._handles[index] = None
        self.ensure(index + 1 + self._ahead)
        wanted = self._original_dtypes[index]
        if wanted is not None:
            tensors = [t.to(dtype) for t, dtype in zip(tensors, wanted, strict=True)]
        return tensors

    def _read_orders(self, index: int) -> None:
        """Store the orders that arrive with a message."""
        for link, handle in self._pending_orders.pop(index, ()):
            assert self._orders is not None, "orders were posted"
            self._orders[link] = tuple(self._transport.wait(handle).tolist())

    def settle(self, index: int) -> None:
        """Wait for message ``index`` as :meth:`take` does, but keep it to be taken later.

        Only for transports between processes, whose transfers can be waited for twice.
        """
        self.ensure(index + 1)
        self._read_orders(index)
        for handle in self._handles[index] or ():
            self._transport.wait(handle)
        self.ensure(index + 1 + self._ahead)

    def drop(self, index: int) -> None:
        """Wait for message ``index`` if it was not taken, and discard it."""
        self.ensure(index + 1)
        if self._handles[index] is not None:
            self.take(index)
