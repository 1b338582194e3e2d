"""Every option for a stage: pool, layout, data degree, ZeRO level, recompute mode."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fxpart.pricing.joint_layouts import ModelLayouts
from fxpart.pricing.joint_microbatch_costs import MicrobatchCosts
from fxpart.pricing.joint_space import SearchSpace, data_degrees, odd
from fxpart.solver.joint.problem import LinearCost, ParallelLayout, ParallelOption
from fxpart.solver.problem import Recompute


@dataclass
class StageOptionEnumerator:
    """Enumerates the options that a space allows and that are not dominated by construction."""

    layouts: ModelLayouts
    works: MicrobatchCosts
    space: SearchSpace

    def __post_init__(self) -> None:
        """Use pools, rows and collective times of the layouts."""
        self.pools, self.rows = self.layouts.pools, self.layouts.rows
        self.lines = self.layouts.lines

    def all(self) -> tuple[ParallelOption, ...]:
        """Return every option, in the order of pools, layouts, data degrees, ZeRO, modes."""
        found = [
            option
            for pool in range(len(self.pools))
            for index, layout in enumerate(self.layouts.all)
            for data in self._data(pool, layout)
            for zero in self._zero(data)
            for option in self._option(pool, index, layout, data, zero)
        ]
        found = [o for o in found if self._fits(o)] or found
        if len(found) > self.space.most_options:
            order = sorted({o.data for o in found}, key=lambda d: (odd(d), d))
            keep = set(order)
            while len(found) > self.space.most_options and len(order) > 1:
                keep.discard(order.pop())
                found = [o for o in found if o.data in keep]
        return tuple(found)

    def _fits(self, option: ParallelOption) -> bool:
        """Return whether some block alone fits with this option, at the smallest microbatch."""
        rows = min({self.rows.of(m, option.data) for m in self.rows.counts} - {0})
        layout, memory = self.layouts.all[option.layout], self.works.memory(option.layout, rows)
        limit = self.pools[option.pool].pool.memory
        shares = ((layout.dense, option.data), (layout.experts, option.data // layout.expert))
        for kind in range(len(self.layouts.kinds.samples)):
            needed = memory.activation[option.recompute][kind]
            needed += memory.workspace[option.recompute][kind] + layout.buffer[kind]
            for state, replicas in shares:
                if state is not None:
                    cut = [replicas if option.zero >= level else 1 for level in (3, 2, 1)]
                    needed += -(-state.weight[kind] // cut[0]) + -(-state.gradient[kind] // cut[1])
                    needed += -(-state.optimizer[kind] // cut[2])
            if needed <= limit:
                return True
        return False

    def _data(self, pool: int, layout: ParallelLayout) -> list[int]:
        """Return the data degrees for which the pool has devices and the batch has rows."""
        most = self.pools[pool].pool.devices // layout.tensor
        degrees = self.space.data or data_degrees(self.pools[pool].pool.devices)
        fit = [d for d in sorted(set(degrees)) if d <= most and d % layout.expert == 0]
        if self.space.all_replicas and layout.expert > 1:
            fit = [d for d in fit if d == layout.expert]
        return [d for d in fit if any(self.rows.of(m, d) for m in self.rows.counts)]

    def _zero(self, data: int) -> list[int]:
        levels = sorted(set(self.space.zero))
        if data == 1:
            return levels[:1]
        return [z for z in levels if z != 1 or 2 not in levels]

    @cached_property
    def _modes(self) -> tuple[Recompute, ...]:
        """Return the recompute modes that free something, or all that are allowed."""
        useful: list[Recompute] = ["none"]
        sheet, sizes = self.layouts.sheets[1, 1, 1], self.rows.reference
        if any(modes["selective"].skipped for modes in sheet.recomputed(sizes)):
            useful.append("selective")
        if any(sheet.full.any() for sheet in self.layouts.sheets.values()):
            useful.append("full")
        found = tuple(mode for mode in useful if mode in self.space.recompute)
        return found or self.space.recompute[:1]

    def _option(
        self, pool: int, index: int, layout: ParallelLayout, data: int, zero: int
    ) -> list[ParallelOption]:
        """Return one option for each recompute mode."""
        place, t, e = self.pools[pool], layout.tensor, layout.expert
        dense = self.lines.ring(place, data, t)
        experts = self.lines.ring(place, data // e, t * e) if layout.experts is not None else ()
        to = "shard(0)" if zero else "replicate"
        rings = (dense, experts)
        reduce = [self.lines.line("partial", to, ring) for ring in rings]
        gather = [
            self.lines.line("shard(0)", "replicate", ring) if zero else LinearCost()
            for ring in rings
        ]
        return [
            ParallelOption(
                pool=pool, layout=index, data=data, zero=zero, recompute=mode,  # type: ignore[arg-type]
                reduce=reduce[0], gather=gather[0],
                reduce_experts=reduce[1], gather_experts=gather[1],
            )
            for mode in self._modes
        ]  # fmt: skip
