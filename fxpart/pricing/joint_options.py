"""Every option for a stage: pool, layout, data degree, ZeRO level, shard degree, recompute mode."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fxpart.plan.offload import offloads_activations
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
            for shards in self._shard_degrees(pool, layout, data, zero)
            for option in self._option(pool, index, layout, data, zero, shards)
        ]
        found = [o for o in found if self._fits(o)] or found
        # The first to be removed are those of hybrid sharding, which is one more way of ZeRO.
        order = sorted(set(map(_rank_option, found)))
        while len(found) > self.space.most_options and len(order) > 1:
            last = order.pop()
            found = [o for o in found if _rank_option(o) != last]
        return tuple(found)

    def _fits(self, option: ParallelOption) -> bool:
        """Return whether some block alone fits with this option, at the smallest microbatch."""
        rows = min({self.rows.of(m, option.data) for m in self.rows.counts} - {0})
        layout, memory = self.layouts.all[option.layout], self.works.memory(option.layout, rows)
        limit = self.pools[option.pool].pool.memory
        shares = zip((layout.dense, layout.experts), option.shards(layout), strict=True)
        states = [(state, count) for state, count in shares if state is not None]
        for kind in range(len(self.layouts.kinds.samples)):
            needed = memory.activation[option.recompute][kind]
            needed += memory.workspace[option.recompute][kind] + layout.buffer[kind]
            for state, count in states:
                cut = [count if option.zero >= level else 1 for level in (3, 2, 1)]
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

    def _shard_degrees(self, pool: int, layout: ParallelLayout, data: int, zero: int) -> list[int]:
        """Return the shard degrees to try: 0 (all replicas), and those of hybrid sharding.

        Of these the most replicas that fit on one host and divide all, and the requested ones:
        fewer save no traffic between hosts, more would cross them in each gather. With distributed
        experts there is none.
        """
        if not zero or layout.expert > 1:
            return [0]
        within = self.pools[pool].pool.host // layout.tensor
        most = max((d for d in range(1, within + 1) if data % d == 0), default=1)
        tried = sorted({most, *self.space.shard_degree})
        return [0, *(d for d in tried if 1 < d < data and data % d == 0)]

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
        self, pool: int, index: int, layout: ParallelLayout, data: int, zero: int, shards: int
    ) -> list[ParallelOption]:
        """Return one option for each recompute mode that the layout allows."""
        place, t, e = self.pools[pool], layout.tensor, layout.expert
        dense = self.lines.ring(place, shards or data, t)
        experts = self.lines.ring(place, data // e, t * e) if layout.experts is not None else ()
        to = "shard(0)" if zero else "replicate"
        rings = (dense, experts)
        reduce = [self.lines.line("partial", to, ring) for ring in rings]
        gather = [
            self.lines.line("shard(0)", "replicate", ring) if zero else LinearCost()
            for ring in rings
        ]
        if shards:  # the replicas of a shard are on devices of equal place in their groups
            parallel = min(shards, max(1, place.pool.host // t))
            ring = self.lines.ring(place, data // shards, shards * t, parallel)
            line = self.lines.line("partial", "replicate", ring)
            reduce[0] = LinearCost(
                latency=reduce[0].latency + line.latency,
                inverse=reduce[0].inverse + line.inverse / shards,
            )
        return [
            ParallelOption(
                pool=pool, layout=index, data=data, zero=zero, shard_degree=shards,  # type: ignore[arg-type]
                recompute=mode, reduce=reduce[0], gather=gather[0],
                reduce_experts=reduce[1], gather_experts=gather[1],
            )
            for mode in self._modes
            if mode != "selective" or not offloads_activations(layout.offload)
        ]  # fmt: skip


def _rank_option(option: ParallelOption) -> tuple[bool, int, int]:
    """Return the key by which options are kept if there are too many, the smallest first."""
    return option.shard_degree > 0, odd(option.data), option.data
