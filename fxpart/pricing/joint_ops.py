"""Times of distinct ops at each microbatch size on each device, each priced once."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from fxpart.cluster.devices import Device
    from fxpart.costs import CostModel, OpSpec
    from fxpart.pricing.variants import Sizes

Row = NDArray[np.float64]


class OpPrices:
    """Ops by number; sheets of different degrees share common ops."""

    def __init__(self, model: CostModel) -> None:
        """Create it; nothing is priced before it is needed."""
        self.model = model
        self.sources: set[str] = set()
        self._ops: dict[OpSpec, int] = {}
        self._list: list[OpSpec] = []
        self._known: dict[Hashable, dict[int, tuple[float, float]]] = {}

    def number(self, op: OpSpec) -> int:
        """Return the op's number, the same for equal ops."""
        if op not in self._ops:
            self._ops[op] = len(self._list)
            self._list.append(op)
        return self._ops[op]

    def seconds(self, numbers: Iterable[int], sizes: Sizes, device: Device) -> tuple[Row, Row]:
        """Return forward and backward seconds of these ops, in their order."""
        known = self._known.setdefault((id(sizes), device.name), {})
        found = []
        for number in numbers:
            if number not in known:
                op = sizes.op(self._list[number])
                costs = [self.model.op(op, device, backward) for backward in (False, True)]
                self.sources |= {cost.source for cost in costs}
                known[number] = (costs[0].seconds, costs[1].seconds)
            found.append(known[number])
        table = np.array(found).reshape(-1, 2)
        return table[:, 0], table[:, 1]
