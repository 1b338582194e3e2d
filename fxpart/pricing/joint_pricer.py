"""The parts of the joint problem: pools, layouts, options, and their works."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from torch import fx

from fxpart.errors import error
from fxpart.pricing.joint_kinds import Kinds, find_kinds
from fxpart.pricing.joint_links import DevicePool, Lines
from fxpart.pricing.joint_recompute import Again, selected
from fxpart.pricing.joint_samples import Samples, samples
from fxpart.pricing.joint_sheet import Bytes, Row, Sheet, Whole
from fxpart.pricing.joint_space import (
    Space,
    data_degrees,
    microbatch_counts,
    odd,
    tensor_degrees,
)
from fxpart.pricing.joint_tensor import Cut, Situation, choose_cut
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
        self.counts = self._counts(microbatches)
        self.tied = [w for w in self.weights if len(w.blocks) > 1]
        self.ties = tuple(Tie(name=w.name, blocks=w.blocks) for w in self.tied)
        self.sheets: dict[int, Sheet] = {1: self._whole()}
        for tensor in self._tensor_degrees():
            cut = self._cut(tensor, trained, optimizer)
            if cut.cuts:
                sizes, again = self._at(self._reference()), self.sheets[1].again
                self.sheets[tensor] = Sheet(graph, self.kinds, self.specs, model, cut, sizes, again)

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
        return tuple(self._layout(tensor) for tensor in sorted(self.sheets))

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
        if len(found) > self.space.most_options:
            order = sorted({o.data for o in found}, key=lambda d: (odd(d), d))
            keep = set(order)
            while len(found) > self.space.most_options and len(order) > 1:
                keep.discard(order.pop())
                found = [o for o in found if o.data in keep]
        return tuple(found)

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
        if any(again.dropped for again in self.sheets[1].again):
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
        degrees = ", ".join(str(t) for t in sorted(self.sheets) if t > 1)
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
        tensor = self.layouts[layout].tensor
        sheet, sizes, place = self.sheets[tensor], self._at(rows), self.pools[pool]
        ops = sheet.seconds(sizes, place.sample, accumulate=rows < self.batch)
        sums = sheet.messages(sizes, self.lines.ring(place, tensor, 1))
        again = ops.again[mode] + sums.again[mode]
        key = (tensor, rows)
        if key not in self._bytes:
            self._bytes[key] = sheet.bytes(sizes)
        self.unknown |= sizes.unknown
        return Work(
            pool=pool,
            layout=layout,
            rows=rows,
            recompute=mode,
            forward=_row(ops.forward + sums.forward),
            backward=_row(ops.backward + sums.backward + again),
            collective=_row(sums.forward + sums.backward + sums.again[mode]),
            activation=self._bytes[key].activation[mode],
            workspace=self._bytes[key].workspace[mode],
        )

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
        return set().union(*(sheet.sources for sheet in self.sheets.values()))

    # -- layouts ---------------------------------------------------------------------------------

    def _whole(self) -> Sheet:
        """The sheet of blocks that are whole on each rank, with what the selective mode makes."""
        sizes, device = self._at(self._reference()), self.pools[0].sample
        plain = Sheet(self.graph, self.kinds, self.specs, self.model, Whole(), sizes)
        if "selective" not in self.space.recompute:
            return plain
        each = plain.forward_of(sizes, device)
        forward = plain.seconds(sizes, device, accumulate=False).forward
        again: list[Again] = []
        for kind, block in enumerate(self.kinds.samples):
            whole, handed = plain.kept(block, sizes)
            again.append(
                selected(
                    block,
                    lambda node: each.get(node, 0.0),
                    float(whole - handed),
                    float(forward[kind]),
                    lambda storage: sizes.number(storage.size),
                )
            )
        return Sheet(self.graph, self.kinds, self.specs, self.model, Whole(), sizes, again)

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
        return choose_cut(self._samples, tensor, situation)

    @cached_property
    def _samples(self) -> Samples:
        return samples(self.kinds)

    def _reference(self) -> int:
        """The rows at which is decided what does not depend on rows: the middle of those needed."""
        degrees = [1, *(2**k for k in range(1, 15))]
        rows = sorted({r for m in self.counts for d in degrees if (r := self._rows(m, d))})
        return rows[len(rows) // 2] if rows else self.batch

    def _layout(self, tensor: int) -> Layout:
        cut, blocks = self.sheets[tensor].cut, self.kinds.samples

        def parts(weight: Weight, size: int) -> int:
            return -(-size // cut.weight(weight))

        def bytes_of(part: str, *, buffer: bool = False) -> tuple[int, ...]:
            return tuple(
                sum(parts(w, getattr(w, part)) for w in b.own if w.buffer == buffer) for b in blocks
            )

        step = tuple(
            tuple(
                sum(step_seconds(self._local(b.own + b.first, tensor), 1, p.sample))
                + self._waiting(p, b.own + b.first, tensor)
                for b in blocks
            )
            for p in self.pools
        )
        return Layout(
            tensor=tensor,
            dense=State(
                weight=bytes_of("weight"), gradient=bytes_of("gradient"),
                optimizer=bytes_of("optimizer"), step=step,
            ),
            buffer=bytes_of("weight", buffer=True),
            tie_weight=tuple(parts(w, w.weight) for w in self.tied),
            tie_gradient=tuple(parts(w, w.gradient) for w in self.tied),
            tie_optimizer=tuple(parts(w, w.optimizer) for w in self.tied),
        )  # fmt: skip

    def _waiting(self, place: DevicePool, held: Sequence[Weight], tensor: int) -> float:
        """Seconds a step of gradients that are sums over the tensor ranks."""
        cut, ring = self.sheets[tensor].cut, self.lines.ring(place, tensor, 1)
        size = sum(w.gradient for w in held if cut.waits(w))
        return self.lines.line("partial", "replicate", ring)(size)

    def _local(self, held: Sequence[Weight], tensor: int) -> tuple[Weight, ...]:
        """Parameters as one rank holds them, all in one block."""
        cut = self.sheets[tensor].cut
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
