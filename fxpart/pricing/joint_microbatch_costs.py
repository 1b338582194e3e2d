"""Costs of one microbatch under every allowed option."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fxpart.pricing.joint_cost_sheet import Axis, BlockMemory, BlockTimes
from fxpart.pricing.joint_layouts import ModelLayouts
from fxpart.pricing.joint_ops import Row
from fxpart.solver.joint.problem import MicrobatchCost, ParallelOption
from fxpart.solver.problem import Recompute

if TYPE_CHECKING:
    from fxpart.cluster.devices import Link


class MicrobatchCosts:
    """Times and memory by pool, layout and rows, each computed once for all modes."""

    def __init__(self, layouts: ModelLayouts) -> None:
        """Create it; nothing is priced before it is needed."""
        self.layouts, self.rows, self.pools = layouts, layouts.rows, layouts.pools
        self._bytes: dict[tuple[int, int], BlockMemory] = {}
        self._stored: dict[tuple[int, int, int, int], BlockMemory] = {}
        self._timed: dict[tuple[int, ...], tuple[BlockTimes, BlockTimes]] = {}

    def all(self, options: Sequence[ParallelOption]) -> tuple[MicrobatchCost, ...]:
        """Return the costs for each pool, layout, rows and mode that may be needed and fit."""
        needed: dict[tuple[int, int, Recompute], set[int]] = {}
        for option in options:
            wanted = {self.rows.of(m, option.data) for m in self.rows.counts} - {0}
            needed.setdefault((option.pool, option.layout, option.recompute), set()).update(wanted)
        found = []
        for (pool, layout, mode), all_rows in needed.items():
            for position, rows in enumerate(sorted(all_rows)):
                work = self._work(pool, layout, rows, mode)
                least = max(map(sum, zip(work.activation, work.workspace, strict=True)))
                if position and least > self.pools[pool].pool.memory:
                    break
                found.append(work)
        return tuple(found)

    def _work(self, pool: int, layout: int, rows: int, mode: Recompute) -> MicrobatchCost:
        ops, sums = self._seconds(pool, layout, rows)
        again = ops.again[mode] + sums.again[mode]
        memory = self.memory(layout, rows)
        forward, backward = (
            _row(ops.forward + sums.forward),
            _row(ops.backward + sums.backward + again),
        )
        host = self.layouts.host(layout)
        if host.activations:
            saved = self._saved(layout, rows)
            device = self.pools[pool].sample
            forward, backward = (host.overlap(row, saved, device) for row in (forward, backward))
        return MicrobatchCost(
            pool=pool,
            layout=layout,
            rows=rows,
            recompute=mode,
            forward=forward,
            backward=backward,
            collective=_row(sums.forward + sums.backward + sums.again[mode]),
            activation=memory.activation[mode],
            workspace=memory.workspace[mode],
            largest=memory.largest,
        )

    def _seconds(self, pool: int, layout: int, rows: int) -> tuple[BlockTimes, BlockTimes]:
        """Return the times of the ops, and of the collectives."""
        found = self.layouts.all[layout]
        key = (pool, found.tensor, found.expert, found.context, rows)
        if key not in self._timed:
            sheet, sizes, place = self.layouts.sheet(layout), self.rows.at(rows), self.pools[pool]
            rings: dict[Axis, tuple[Link, ...]] = {
                "tensor": self.layouts.lines.ring(place, found.tensor, 1),
                "expert": self.layouts.lines.ring(place, found.expert, found.tensor),
            }
            self._timed[key] = (
                sheet.seconds(sizes, place.sample, accumulate=rows < self.rows.batch),
                sheet.messages(sizes, rings),
            )
        return self._timed[key]

    def memory(self, layout: int, rows: int) -> BlockMemory:
        """Return the memory of a microbatch of ``rows`` rows."""
        if (layout, rows) not in self._bytes:
            found, host = self._memory(layout, rows), self.layouts.host(layout)
            if host.activations:
                rows_by_mode = {
                    mode: host.memory(row, found.workspace[mode], found.largest)
                    for mode, row in found.activation.items()
                }
                found = BlockMemory(
                    {mode: kept for mode, (kept, _) in rows_by_mode.items()},
                    {mode: working for mode, (_, working) in rows_by_mode.items()},
                    found.largest,
                )
            self._bytes[layout, rows] = found
        return self._bytes[layout, rows]

    def _memory(self, layout: int, rows: int) -> BlockMemory:
        """Return the memory without offload."""
        found = self.layouts.all[layout]
        key = (found.tensor, found.expert, found.context, rows)
        if key not in self._stored:
            self._stored[key] = self.layouts.sheet(layout).bytes(self.rows.at(rows))
        return self._stored[key]

    def _saved(self, layout: int, rows: int) -> tuple[int, ...]:
        """Return the bytes by kind that autograd saves, also under recomputation."""
        return self._memory(layout, rows).activation["none"]


def _row(values: Row) -> tuple[float, ...]:
    return tuple(map(float, values))
