"""What lives at a rank's predicted peak: a step followed op by op, and its ten largest tensors.

Three moments are compared: a microbatch's forward and backward while the most microbatches are in
flight, and the optimizer's step. Gradients of weights are there from the second backward on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray
from torch import fx

from fxpart.plan.model import Plan
from fxpart.plan.prediction import LiveTensor, RankPrediction
from fxpart.pricing.memory import BlockScope, Workspace, find_needed_nodes
from fxpart.pricing.specs import Specs, annotation
from fxpart.pricing.stage_parallelism import StageParallelism
from fxpart.pricing.variants import BatchSplit, Sizes, captured_rows
from fxpart.pricing.weights import trained_names
from fxpart.schedule.weight_modes import FLUSH
from fxpart.sharding import Mesh
from fxpart.solver.problem import PartitionProblem, Weight

if TYPE_CHECKING:
    from fxpart.capture.captured_model import CapturedModel
    from fxpart.costs import Size

TOP = 10


def with_live_tensors(
    plan: Plan,
    problem: PartitionProblem,
    graph: fx.GraphModule,
    captured: CapturedModel,
    sharing: StageParallelism | None,
) -> Plan:
    """The plan with the peak and the largest tensors of each stage.

    problem, graph: of one lane. Stages must be runs of blocks in the graph's order, as in plans
    without branches. sharing: where a stage is several ranks.
    """
    shared = sharing or StageParallelism(Mesh())
    rows = captured_rows(captured)
    if captured.symbolic:
        rows = -(-plan.batch_size // shared.rows // plan.microbatches)
    sizes = Sizes(captured, BatchSplit(rows, plan.microbatches), shared.parts)
    specs = Specs(trained_names(captured) if captured.training else ())
    alive = find_needed_nodes(graph.graph)
    nodes = [n for n in graph.graph.nodes if n in alive and annotation(n).block is not None]
    found = []
    for entry in plan.prediction.ranks:
        stage = plan.stages[entry.stage]
        held = [
            w for w in problem.weights if set(w.blocks) & set(range(stage.first, stage.last + 1))
        ]
        mine = [n for n in nodes if stage.first <= (annotation(n).block or 0) <= stage.last]
        peak = StagePeak(mine, held, specs, sizes)
        found.append(
            peak.predicted(entry, plan.microbatches, plan.weights if plan.weights != FLUSH else "")
        )
    prediction = msgspec.structs.replace(plan.prediction, ranks=tuple(found))
    return msgspec.structs.replace(plan, prediction=prediction)


@dataclass(frozen=True)
class _SavedTensor:
    """A saved storage: its bytes, its first and last saver's place, its maker's place and name."""

    size: int
    first: int
    made: int
    name: str
    saver: str


class StagePeak:
    """One stage's tensors over a microbatch."""

    def __init__(
        self, nodes: Sequence[fx.Node], held: Sequence[Weight], specs: Specs, sizes: Sizes
    ) -> None:
        """nodes: of the stage, in order. held: its parameters and buffers."""
        self._nodes, self._held, self._sizes = nodes, held, sizes
        names = frozenset(saved.source for n in nodes for saved in annotation(n).saved)
        self._space = Workspace(BlockScope(tuple(nodes), names), specs, 1, whole=True)
        self._kept = list(self._storages())
        self._saved = sum(kept.size for kept in self._kept)

    def _storages(self) -> Iterator[_SavedTensor]:
        order = {node.name: index for index, node in enumerate(self._nodes)}
        found: dict[int, tuple[Size, str, list[int]]] = {}
        for index, node in enumerate(self._nodes):
            for saved in annotation(node).saved:
                found.setdefault(saved.storage, (saved.size, saved.source, []))[2].append(index)
        for size, source, savers in found.values():
            if source and source not in order:
                continue  # received, or the user's: counted as such
            saver = self._nodes[savers[0]].name
            made = order.get(source, savers[0])
            yield _SavedTensor(self._sizes.number(size), savers[0], made, source or saver, saver)

    def predicted(
        self, entry: RankPrediction, microbatches: int, weights: str = ""
    ) -> RankPrediction:
        """The entry with its peak and what lives then. weights: the weight mode of a stream."""
        flying, trained = entry.in_flight, [w for w in self._held if w.gradient]
        gradients = entry.memory.gradients
        full = flying if microbatches > flying else flying - 1  # in flight beside all gradients
        if weights and microbatches > 1:
            full = flying  # the next minibatch's follow at once
        forward, backward = self._space.live(self._sizes)
        ahead, back = forward + self._made(), backward + self._left()
        fixed = entry.memory.weights + entry.memory.buffers + entry.memory.optimizer
        fixed += entry.memory.copies
        moved = entry.memory.transfers // max(1, flying)
        grown, packed = self._grown(trained), entry.memory.sums
        cases: list[tuple[int, str, int, int, bool]] = []
        for count, whole in ((flying, False), (full, True)):
            if count < 1:
                continue
            others = fixed + count * moved + (count - 1) * self._saved
            for way, live in (("forward", ahead), ("backward", back)):
                extra = np.full(len(live), gradients) if whole else np.zeros(len(live), np.int64)
                if way == "backward":
                    extra = (extra if whole else grown) + packed
                at = int(np.argmax(live + extra)) if len(live) else 0
                most = int((live + extra)[at]) if len(live) else 0
                cases.append((others + most, way, at, count, whole))
        temporary = max((w.temporary for w in trained), default=0)
        still = flying - 1 if weights else 0  # others are in flight while a stream's stage updates
        known = fixed + gradients + max(temporary, packed) + still * (moved + self._saved)
        most = known if weights else max(known, entry.update)
        cases.append((most, "update", 0, still, True))
        peak, way, at, count, whole = max(cases, key=lambda case: case[0])
        rows = [*self._fixed(way, whole)]
        if entry.memory.copies:
            why = f"copies of weights, {weights}"
            rows.append(LiveTensor(name="weights", bytes=entry.memory.copies, why=why))
        if packed and way == "backward":
            rows.append(LiveTensor(name="gradients", bytes=packed, why="packed to be summed"))
        if way != "update":
            rows += self._moment(way, at, count)
        else:
            rows += self._flying(count)
            if more := most - known:
                rows.append(LiveTensor(name="gradients", bytes=more, why="packed to be summed"))
        rows.sort(key=lambda row: (-row.bytes, row.name))
        return msgspec.structs.replace(entry, peak=peak, top=tuple(rows[:TOP]))

    def _grown(self, trained: Sequence[Weight]) -> NDArray[np.int64]:
        """By op, the gradients that a first backward has left before it: those of later ops."""
        size = {w.name: w.gradient for w in trained}
        seen: set[str] = set()
        total, rows = 0, np.zeros(len(self._nodes), dtype=np.int64)
        for index in range(len(self._nodes) - 1, -1, -1):
            rows[index] = total
            for source in self._nodes[index].all_input_nodes:
                name = str(source.target)
                if source.op == "get_attr" and name in size and name not in seen:
                    seen.add(name)
                    total += size[name]
        return rows

    def _made(self) -> NDArray[np.int64]:
        """By op, the saved tensors that a forward has made."""
        rows = np.zeros(len(self._nodes), dtype=np.int64)
        for kept in self._kept:
            rows[kept.made :] += kept.size
        return rows

    def _left(self) -> NDArray[np.int64]:
        """By op, the saved tensors that a backward has not freed."""
        rows = np.zeros(len(self._nodes), dtype=np.int64)
        for kept in self._kept:
            rows[kept.first :] += kept.size
        return rows

    def _fixed(self, way: str, whole: bool) -> Iterator[LiveTensor]:
        for weight in self._held:
            kind = "buffer" if weight.buffer else "weight"
            yield LiveTensor(name=weight.name, bytes=weight.weight, why=kind)
            if weight.optimizer:
                yield LiveTensor(name=weight.name, bytes=weight.optimizer, why="optimizer state")
            if weight.gradient and whole:
                yield LiveTensor(name=weight.name, bytes=weight.gradient, why="gradient")
        if way == "update":
            largest = max((w for w in self._held if w.gradient), key=lambda w: w.temporary)
            why = "working memory, optimizer"
            yield LiveTensor(name=largest.name, bytes=largest.temporary, why=why)

    def _flying(self, count: int) -> Iterator[LiveTensor]:
        """What so many microbatches have saved, and wait with."""
        for kept in self._kept if count else ():
            times = f", {count} microbatches" if count > 1 else ""
            yield LiveTensor(
                name=kept.name, bytes=count * kept.size, why=f"saved for {kept.saver}{times}"
            )

    def _moment(self, way: str, at: int, count: int) -> Iterator[LiveTensor]:
        """What the microbatch in hand has at one op, and what the others in flight have."""
        for kept in self._kept:
            now = kept.made <= at if way == "forward" else kept.first <= at
            copies = count - 1 + now
            if copies:
                times = f", {copies} microbatches" if copies > 1 else ""
                yield LiveTensor(
                    name=kept.name, bytes=copies * kept.size, why=f"saved for {kept.saver}{times}"
                )
        for node, size in self._space.alive_at(self._sizes, at, way == "forward"):
            what = "result" if way == "forward" else "gradient of the result"
            yield LiveTensor(name=node.name, bytes=size, why=what)
        inside = self._space.inside(self._sizes, at, way == "forward")
        if inside:
            name = self._nodes[at].name
            yield LiveTensor(name=name, bytes=inside, why=f"working memory, {way}")
