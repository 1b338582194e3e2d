"""The parts of the joint problem: pools, layouts, options, and their works."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from math import gcd
from typing import TYPE_CHECKING

from torch import fx

from fxpart.errors import error
from fxpart.pricing.joint_experts import Dealt, find_mixtures
from fxpart.pricing.joint_kinds import Kinds, find_kinds
from fxpart.pricing.joint_links import DevicePool, Lines
from fxpart.pricing.joint_ops import OpPrices, Row
from fxpart.pricing.joint_recompute import Again, selected
from fxpart.pricing.joint_samples import samples
from fxpart.pricing.joint_sheet import Axis, Bytes, SampleOps, Seconds, Sheet, Whole
from fxpart.pricing.joint_space import (
    Space,
    data_degrees,
    expert_degrees,
    microbatch_counts,
    odd,
    tensor_degrees,
)
from fxpart.pricing.joint_tensor import Cut, Cutter, Situation
from fxpart.pricing.memory import crossing
from fxpart.pricing.placements import state_costs
from fxpart.pricing.specs import Specs
from fxpart.pricing.variants import Sizes, Split, captured_rows
from fxpart.pricing.weights import step_seconds, trained_names, weights
from fxpart.solver.joint.problem import (
    Boundary,
    Layout,
    Line,
    Option,
    Recompute,
    State,
    Tie,
    Work,
    rows_of,
)

if TYPE_CHECKING:
    from fxpart.capture.captured import Captured
    from fxpart.cluster import Link
    from fxpart.costs import CostModel
    from fxpart.optimizers import OptimizerChoice
    from fxpart.solver.problem import Weight

_STEP = 32  # microbatches of a step, at most, for which placements are chosen


class JointPricer:
    """One graph's kinds of blocks, priced for every way to run a stage."""

    def __init__(
        self,
        graph: fx.GraphModule,
        captured: Captured,
        model: CostModel,
        pools: tuple[DevicePool, ...],
        optimizer: OptimizerChoice,
        batch: int,
        microbatches: int | None,
        space: Space,
    ) -> None:
        """Find kinds, layouts and what is made again; FXP105 where the batch cannot be cut."""
        self.graph, self.captured, self.model, self.pools = graph, captured, model, pools
        self.batch, self.space = batch, space
        self.lines = Lines(model)
        trained = trained_names(captured) if captured.training else frozenset()
        self.specs = Specs(trained)
        self.weights = weights(graph.graph, captured, trained, optimizer)
        self.kinds: Kinds = find_kinds(graph, self.specs, self.weights)
        devices = sum(p.pool.devices for p in pools)
        self.most_stages = max(1, min(devices, len(self.kinds.of), space.max_stages or devices))
        self.unknown: set[str] = set()
        self._sizes: dict[int, Sizes] = {}
        self._bytes: dict[tuple[int, int], Bytes] = {}
        self._timed: dict[tuple[int, int, int], tuple[Seconds, Seconds]] = {}
        self.counts = self._counts(microbatches)
        self.tied = [w for w in self.weights if len(w.blocks) > 1]
        self.ties = tuple(Tie(name=w.name, blocks=w.blocks) for w in self.tied)
        self.prices = OpPrices(model)
        self.ops = SampleOps.of(graph, self.kinds, self.specs)
        self.mixtures = find_mixtures(self.kinds)
        again = self._again()
        cuts: dict[int, Whole] = {1: Whole()}
        for tensor in self._tensor_degrees():
            cut = self._cut(tensor, trained, optimizer)
            if cut.cuts:
                cuts[tensor] = cut
        self.sheets: dict[tuple[int, int], Sheet] = {
            (tensor, expert): self._sheet(
                cut if expert == 1 else Dealt(cut, expert, self.mixtures, self.specs), again
            )
            for tensor, cut in cuts.items()
            for expert in self._expert_degrees()
        }

    # -- what is chosen from ---------------------------------------------------------------------

    def _counts(self, wish: int | None) -> tuple[int, ...]:
        """The numbers of microbatches; FXP105 where the batch cannot be cut so."""
        batch, fixed = self.batch, 0 if self.captured.symbolic else captured_rows(self.captured)
        asked = (wish,) if wish is not None else self.space.microbatches
        if batch < 1 or any(not 1 <= m <= batch for m in asked or ()):
            raise error(
                "FXP105",
                where=f"batch of {batch}, {wish or 'any number of'} microbatches",
                why="every microbatch needs at least one row",
                fix="give a larger batch or fewer microbatches",
            )
        if not fixed:
            return tuple(sorted(set(asked or microbatch_counts(batch, self.most_stages))))
        whole = batch // fixed if batch % fixed == 0 else 0
        found = [m for m in asked or range(1, whole + 1) if whole and whole % m == 0]
        if not found:
            raise error(
                "FXP105",
                where=f"batch of {batch}" + (f" in {wish} microbatches" if wish else ""),
                why=f"the model could only be captured with a fixed batch, here of {fixed} rows",
                fix=f"capture at the microbatch size you want, or give a batch that {fixed} "
                "divides",
            )
        return tuple(sorted(set(found)))

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        """Bytes of parameters, by layout."""
        return tuple(self._layout(*degrees) for degrees in sorted(self.sheets))

    def options(self) -> tuple[Option, ...]:
        """Every way to run a stage, in the order of pools, layouts, data degrees, ZeRO, modes."""
        found = [
            option
            for pool in range(len(self.pools))
            for index, layout in enumerate(self.layouts)
            for data in self._data(pool, layout)
            for zero in self._zero(data)
            for option in self._option(pool, index, layout, data, zero)
        ]
        found = [o for o in found if self._holds(o)] or found
        if len(found) > self.space.most_options:
            order = sorted({o.data for o in found}, key=lambda d: (odd(d), d))
            keep = set(order)
            while len(found) > self.space.most_options and len(order) > 1:
                keep.discard(order.pop())
                found = [o for o in found if o.data in keep]
        return tuple(found)

    def _holds(self, option: Option) -> bool:
        """Whether some block alone fits with this option, at the smallest microbatch."""
        rows = min({self._rows(m, option.data) for m in self.counts} - {0})
        layout, memory = self.layouts[option.layout], self._memory(option.layout, rows)
        limit = self.pools[option.pool].pool.memory
        shares = ((layout.dense, option.data), (layout.experts, option.data // layout.expert))
        for kind in range(len(self.kinds.samples)):
            held = memory.activation[option.recompute][kind]
            held += memory.workspace[option.recompute][kind] + layout.buffer[kind]
            for state, replicas in shares:
                if state is not None:
                    cut = [replicas if option.zero >= level else 1 for level in (3, 2, 1)]
                    held += -(-state.weight[kind] // cut[0]) + -(-state.gradient[kind] // cut[1])
                    held += -(-state.optimizer[kind] // cut[2])
            if held <= limit:
                return True
        return False

    def _data(self, pool: int, layout: Layout) -> list[int]:
        """Data degrees that the pool has devices and the batch has rows for."""
        most = self.pools[pool].pool.devices // layout.tensor
        degrees = self.space.data or data_degrees(self.pools[pool].pool.devices)
        return [
            d for d in sorted(set(degrees))
            if d <= most and d % layout.expert == 0 and any(self._rows(m, d) for m in self.counts)
        ]  # fmt: skip

    def _rows(self, microbatches: int, data: int) -> int:
        """Rows of a microbatch on a replica; 0 where it cannot be had."""
        rows = rows_of(self.batch, microbatches, data)
        if self.captured.symbolic or rows * microbatches * data == self.batch:
            fixed = 0 if self.captured.symbolic else captured_rows(self.captured)
            return rows if not fixed or rows == fixed else 0
        return 0

    def _zero(self, data: int) -> list[int]:
        levels = sorted(set(self.space.zero))
        if data == 1:
            return levels[:1]
        return [z for z in levels if z != 1 or 2 not in levels]

    @cached_property
    def _modes(self) -> tuple[Recompute, ...]:
        """The modes of recomputation that free something, or all of those allowed."""
        useful: list[Recompute] = ["none"]
        if any(again.dropped for again in self.sheets[1, 1].again):
            useful.append("selective")
        if any(sheet.full.any() for sheet in self.sheets.values()):
            useful.append("full")
        found = tuple(mode for mode in useful if mode in self.space.recompute)
        return found or self.space.recompute[:1]

    def _option(self, pool: int, index: int, layout: Layout, data: int, zero: int) -> list[Option]:
        """One option for each mode of recomputation."""
        place, t, e = self.pools[pool], layout.tensor, layout.expert
        dense = self.lines.ring(place, data, t)
        apart = self.lines.ring(place, data // e, t * e) if layout.experts is not None else ()
        to = "shard(0)" if zero else "replicate"
        rings = (dense, apart)
        reduce = [self.lines.line("partial", to, ring) for ring in rings]
        gather = [
            self.lines.line("shard(0)", "replicate", ring) if zero else Line() for ring in rings
        ]
        return [
            Option(
                pool=pool, layout=index, data=data, zero=zero, recompute=mode,  # type: ignore[arg-type]
                reduce=reduce[0], gather=gather[0],
                reduce_experts=reduce[1], gather_experts=gather[1],
            )
            for mode in self._modes
        ]  # fmt: skip

    def _tensor_degrees(self) -> list[int]:
        """Degrees above one, for which some pool has devices."""
        wished = self.space.tensor
        degrees = {
            t
            for place in self.pools
            for t in (tensor_degrees(place.pool.host) if wished is None else wished)
            if 1 < t <= place.pool.devices
        }
        return sorted(degrees)

    @property
    def tensor_note(self) -> str:
        """Where the costs of tensor parallelism come from."""
        degrees = ", ".join(str(t) for t in sorted({t for t, _ in self.sheets}) if t > 1)
        return (
            f"degrees {degrees}: placements of one block of each kind chosen by the solver, values "
            "between blocks whole on every rank"
            if degrees
            else "no degree above 1 cuts anything"
        )

    # -- what it costs ---------------------------------------------------------------------------

    def works(self, options: Sequence[Option]) -> tuple[Work, ...]:
        """A work for each pool, layout, rows and mode that an option can need and that may fit."""
        needed: dict[tuple[int, int, Recompute], set[int]] = {}
        for option in options:
            wanted = {self._rows(m, option.data) for m in self.counts} - {0}
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

    def _work(self, pool: int, layout: int, rows: int, mode: Recompute) -> Work:
        ops, sums = self._seconds(pool, layout, rows)
        again = ops.again[mode] + sums.again[mode]
        memory = self._memory(layout, rows)
        return Work(
            pool=pool,
            layout=layout,
            rows=rows,
            recompute=mode,
            forward=_row(ops.forward + sums.forward),
            backward=_row(ops.backward + sums.backward + again),
            collective=_row(sums.forward + sums.backward + sums.again[mode]),
            activation=memory.activation[mode],
            workspace=memory.workspace[mode],
        )

    def _seconds(self, pool: int, layout: int, rows: int) -> tuple[Seconds, Seconds]:
        """Of the ops, and of the collectives."""
        key = (pool, layout, rows)
        if key not in self._timed:
            tensor, expert = self.layouts[layout].tensor, self.layouts[layout].expert
            sheet, sizes, place = self.sheets[tensor, expert], self._at(rows), self.pools[pool]
            rings: dict[Axis, tuple[Link, ...]] = {
                "tensor": self.lines.ring(place, tensor, 1),
                "expert": self.lines.ring(place, expert, tensor),
            }
            self._timed[key] = (
                sheet.seconds(sizes, place.sample, accumulate=rows < self.batch),
                sheet.messages(sizes, rings),
            )
            self.unknown |= sizes.unknown
        return self._timed[key]

    def _memory(self, layout: int, rows: int) -> Bytes:
        if (layout, rows) not in self._bytes:
            degrees = self.layouts[layout].tensor, self.layouts[layout].expert
            self._bytes[layout, rows] = self.sheets[degrees].bytes(self._at(rows))
        return self._bytes[layout, rows]

    def boundaries(self) -> tuple[Boundary, ...]:
        """Values between blocks, as lines in rows: exact where sizes are, else from above."""
        values, amounts = crossing(self.graph.graph, self.specs)
        low = 1 if self.captured.symbolic else captured_rows(self.captured)
        high = max(self.batch, low + 1) if self.captured.symbolic else low
        found = []
        for value, amount in zip(values, amounts, strict=True):
            small, large = (self._at(r).number(amount) for r in (low, high))
            slope = -(-(large - small) // (high - low)) if high > low else 0
            found.append(
                Boundary(
                    producer=value.producer,
                    consumers=value.consumers,
                    row_bytes=max(0, slope),
                    fixed_bytes=max(0, small - slope * low),
                    gradient=value.gradient,
                    saved=value.saved,
                )
            )
        return tuple(found)

    def _at(self, rows: int) -> Sizes:
        if rows not in self._sizes:
            self._sizes[rows] = Sizes(self.captured, Split(rows, 1))
        return self._sizes[rows]

    @property
    def sources(self) -> set[str]:
        """Where the seconds of ops and collectives come from."""
        return self.prices.sources

    # -- layouts ---------------------------------------------------------------------------------

    def _sheet(self, cut: Whole, again: Sequence[Again]) -> Sheet:
        sizes = self._at(self._reference())
        return Sheet(self.ops, self.prices, cut, sizes, again)

    def _again(self) -> tuple[Again, ...]:
        """By kind what the selective mode makes again, decided for whole blocks."""
        if "selective" not in self.space.recompute:
            return ()
        sizes, device = self._at(self._reference()), self.pools[0].sample
        plain = self._sheet(Whole(), ())
        each = plain.forward_of(sizes, device)
        found: list[Again] = []
        for kind, block in enumerate(self.kinds.samples):
            whole, handed = plain.kept(kind, sizes)
            found.append(
                selected(
                    block,
                    lambda node: each.get(node, 0.0),
                    float(whole - handed),
                    sum(each.get(node, 0.0) for node in block.nodes),
                    lambda storage: sizes.number(storage.size),
                )
            )
        return tuple(found)

    def _expert_degrees(self) -> tuple[int, ...]:
        """Degrees that divide the experts of every mixture; 1 where there are none."""
        number = gcd(*self.mixtures.numbers) if self.mixtures.numbers else 0
        devices = max(p.pool.devices for p in self.pools)
        wished = self.space.expert
        if wished is None or not number:
            return expert_degrees(number, devices)
        found = tuple(e for e in sorted(set(wished)) if e <= devices and number % e == 0)
        return found or (1,)

    def _cut(self, tensor: int, trained: frozenset[str], optimizer: OptimizerChoice) -> Cut:
        """The placements on ``tensor`` ranks, chosen for the first pool that has them."""
        place = next(p for p in self.pools if p.pool.devices >= tensor)
        rows = self._reference()
        count = max(1, min(_STEP, self.batch // rows))
        situation = Situation(
            self.model, self.specs, self._at(rows), place.sample,
            self.lines.ring(place, tensor, 1), count,
            state_costs(self.captured, trained, optimizer, count),
        )  # fmt: skip
        return self._cutter(tensor, situation)

    @cached_property
    def _cutter(self) -> Cutter:
        return Cutter(samples(self.kinds))

    def _reference(self) -> int:
        """The rows at which is decided what does not depend on rows: the middle of those needed."""
        degrees = [1, *(2**k for k in range(1, 15))]
        rows = sorted({r for m in self.counts for d in degrees if (r := self._rows(m, d))})
        return rows[len(rows) // 2] if rows else self.batch

    def _layout(self, tensor: int, expert: int) -> Layout:
        """Bytes on a rank; the experts' apart where they are dealt out."""
        cut = self.sheets[tensor, expert].cut
        apart = self.mixtures.weights if expert > 1 else frozenset()

        def parts(weight: Weight, size: int) -> int:
            return -(-size // cut.weight(weight))

        return Layout(
            tensor=tensor,
            expert=expert,
            dense=self._state(tensor, expert, lambda w: w.name not in apart),
            experts=self._state(tensor, expert, lambda w: w.name in apart) if apart else None,
            buffer=tuple(
                sum(parts(w, w.weight) for w in b.own if w.buffer) for b in self.kinds.samples
            ),
            tie_weight=tuple(parts(w, w.weight) for w in self.tied),
            tie_gradient=tuple(parts(w, w.gradient) for w in self.tied),
            tie_optimizer=tuple(parts(w, w.optimizer) for w in self.tied),
        )

    def _state(self, tensor: int, expert: int, of: Callable[[Weight], bool]) -> State:
        """Those parameters, by kind of block; tied ones in the step of their first block alone."""
        cut = self.sheets[tensor, expert].cut
        rows: dict[str, list[int]] = {"weight": [], "gradient": [], "optimizer": []}
        for block in self.kinds.samples:
            held = self._local([w for w in block.own if of(w) and not w.buffer], cut)
            for part, row in rows.items():
                row.append(sum(getattr(w, part) for w in held))
        step = []
        for place in self.pools:
            ring = self.lines.ring(place, tensor, 1)
            line = self.lines.line("partial", "replicate", ring)
            seconds = []
            for block in self.kinds.samples:
                held_ = [w for w in (*block.own, *block.first) if of(w)]
                waiting = sum(w.gradient for w in held_ if cut.waits(w))
                stepped = step_seconds(self._local(held_, cut), 1, place.sample)
                seconds.append(sum(stepped) + line(waiting))
            step.append(tuple(seconds))
        return State(
            weight=tuple(rows["weight"]), gradient=tuple(rows["gradient"]),
            optimizer=tuple(rows["optimizer"]), step=tuple(step),
        )  # fmt: skip

    def _local(self, held: Sequence[Weight], cut: Whole) -> tuple[Weight, ...]:
        """Parameters as one rank holds them, all in one block."""
        return tuple(
            type(w)(
                name=w.name, blocks=(0,), weight=-(-w.weight // cut.weight(w)),
                gradient=-(-w.gradient // cut.weight(w)),
                optimizer=-(-w.optimizer // cut.weight(w)), buffer=w.buffer,
            )
            for w in held
        )  # fmt: skip


def _row(values: Row) -> tuple[float, ...]:
    return tuple(map(float, values))
