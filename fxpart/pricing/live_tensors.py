"""Live tensors at a rank's predicted peak: a step simulated op by op, and its ten largest tensors.

Three moments are compared: a microbatch's forward and backward with the most microbatches in
flight, and the optimizer step. Gradients of weights exist from the second backward on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray
from torch import fx

from fxpart.compiler.duplicated_ops import add_duplicated_ops, find_duplicated_ops
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
from fxpart.solver.schedule_costs import splits_backward

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
    """Return the plan with the peak and the largest tensors of each stage that stores its own.

    problem, graph: of one mesh rank. Stages must be runs of blocks in the graph's order, as in
    plans without branches. sharing: where a stage is several ranks.
    """
    shared = sharing or StageParallelism(Mesh())
    rows = captured_rows(captured)
    if captured.symbolic:
        rows = -(-plan.batch_size // shared.rows // plan.microbatches)
    sizes = Sizes(captured, BatchSplit(rows, plan.microbatches), shared.parts)
    specs = Specs(trained_names(captured) if captured.training else ())
    alive, duplicated = find_needed_nodes(graph.graph), find_duplicated_ops(graph.graph)
    nodes = [n for n in graph.graph.nodes if n in alive and annotation(n).block is not None]
    found = []
    for entry in plan.prediction.ranks:
        stage = plan.stages[entry.stage]
        # tensors exist for one block at a time, or until the second half of a backward
        if stage.recompute != "none" or splits_backward(plan.schedule):
            found.append(entry)
            continue
        weights_of_stage = [
            w for w in problem.weights if set(w.blocks) & set(range(stage.first, stage.last + 1))
        ]
        own = [n for n in nodes if stage.first <= (annotation(n).block or 0) <= stage.last]
        with_duplicates = add_duplicated_ops(own, duplicated)
        mine = [n for n in nodes if n in with_duplicates]
        peak = StagePeak(mine, weights_of_stage, specs, sizes)
        found.append(
            peak.with_peak(entry, plan.microbatches, plan.weights if plan.weights != FLUSH else "")
        )
    prediction = msgspec.structs.replace(plan.prediction, ranks=tuple(found))
    return msgspec.structs.replace(plan, prediction=prediction)


@dataclass(frozen=True)
class _SavedTensor:
    """A saved storage: bytes, positions and names of its first saver and its maker."""

    size: int
    first: int
    made: int
    name: str
    saver: str


class StagePeak:
    """One stage's tensors during a microbatch."""

    def __init__(
        self,
        nodes: Sequence[fx.Node],
        weights_of_stage: Sequence[Weight],
        specs: Specs,
        sizes: Sizes,
    ) -> None:
        """Find lifetimes. nodes: in order. weights_of_stage: its parameters and buffers."""
        self._nodes, self._weights, self._sizes = nodes, weights_of_stage, sizes
        names = frozenset(saved.source for n in nodes for saved in annotation(n).saved)
        self._space = Workspace(BlockScope(tuple(nodes), names), specs, 1, whole=True)
        self._saved_tensors = list(self._storages())
        self._saved = sum(kept.size for kept in self._saved_tensors)

    def _storages(self) -> Iterator[_SavedTensor]:
        order = {node.name: index for index, node in enumerate(self._nodes)}
        found: dict[int, tuple[Size, str, list[int]]] = {}
        for index, node in enumerate(self._nodes):
            for saved in annotation(node).saved:
                found.setdefault(saved.storage, (saved.size, saved.source, []))[2].append(index)
        for size, source, savers in found.values():
            if source and source not in order:
                continue  # received or the user's input, which are counted separately
            saver = self._nodes[savers[0]].name
            made = order.get(source, savers[0])
            yield _SavedTensor(self._sizes.number(size), savers[0], made, source or saver, saver)

    def with_peak(
        self, entry: RankPrediction, microbatches: int, weights: str = ""
    ) -> RankPrediction:
        """Return the entry with its peak and its live tensors. weights: weight mode of async."""
        in_flight, trained = entry.in_flight, [w for w in self._weights if w.gradient]
        gradients = entry.memory.gradients
        # In flight besides all gradients.
        full = in_flight if microbatches > in_flight else in_flight - 1
        if weights and microbatches > 1:
            full = in_flight  # the next minibatch follows immediately
        forward, backward = self._space.live(self._sizes)
        ahead = forward + self._count_saved_in_forward()
        back = backward + self._count_saved_in_backward()
        fixed = entry.memory.weights + entry.memory.buffers + entry.memory.optimizer
        fixed += entry.memory.copies
        moved = entry.memory.transfers // max(1, in_flight)
        grown, packed = self._count_gradients(trained), entry.memory.sums
        cases: list[tuple[int, str, int, int, bool]] = []
        for count, whole in ((in_flight, False), (full, True)):
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
        waiting = in_flight - 1 if weights else 0  # while an asynchronous stage updates
        known = fixed + gradients + max(temporary, packed) + waiting * (moved + self._saved)
        most = known if weights else max(known, entry.update)
        cases.append((most, "update", 0, waiting, True))
        peak, way, at, count, whole = max(cases, key=lambda case: case[0])
        rows = [*self._fixed(way, whole)]
        if entry.memory.copies:
            why = f"copies of weights, {weights}"
            rows.append(LiveTensor(name="weights", bytes=entry.memory.copies, why=why))
        if packed and way == "backward":
            rows.append(LiveTensor(name="gradients", bytes=packed, why="packed for reduction"))
        if way != "update":
            rows += self._moment(way, at, count)
        else:
            rows += self._flying(count)
            if more := most - known:
                rows.append(LiveTensor(name="gradients", bytes=more, why="packed for reduction"))
        rows.sort(key=lambda row: (-row.bytes, row.name))
        return msgspec.structs.replace(entry, peak=peak, top=tuple(rows[:TOP]))

    def _count_gradients(self, trained: Sequence[Weight]) -> NDArray[np.int64]:
        """Return by op the gradient bytes that a first backward has made before it."""
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

    def _count_saved_in_forward(self) -> NDArray[np.int64]:
        """Return by op the bytes of saved tensors that a forward has made."""
        rows = np.zeros(len(self._nodes), dtype=np.int64)
        for kept in self._saved_tensors:
            rows[kept.made :] += kept.size
        return rows

    def _count_saved_in_backward(self) -> NDArray[np.int64]:
        """Return by op the bytes of saved tensors that a backward has not freed."""
        rows = np.zeros(len(self._nodes), dtype=np.int64)
        for kept in self._saved_tensors:
            rows[kept.first :] += kept.size
        return rows

    def _fixed(self, way: str, whole: bool) -> Iterator[LiveTensor]:
        for weight in self._weights:
            kind = "buffer" if weight.buffer else "weight"
            yield LiveTensor(name=weight.name, bytes=weight.weight, why=kind)
            if weight.optimizer:
                yield LiveTensor(name=weight.name, bytes=weight.optimizer, why="optimizer state")
            if weight.gradient and whole:
                yield LiveTensor(name=weight.name, bytes=weight.gradient, why="gradient")
        if way == "update":
            largest = max((w for w in self._weights if w.gradient), key=lambda w: w.temporary)
            why = "working memory, optimizer"
            yield LiveTensor(name=largest.name, bytes=largest.temporary, why=why)

    def _flying(self, count: int) -> Iterator[LiveTensor]:
        """Yield the saved tensors of ``count`` waiting microbatches."""
        for kept in self._saved_tensors if count else ():
            times = f", {count} microbatches" if count > 1 else ""
            yield LiveTensor(
                name=kept.name, bytes=count * kept.size, why=f"saved for {kept.saver}{times}"
            )

    def _moment(self, way: str, at: int, count: int) -> Iterator[LiveTensor]:
        """Yield the tensors of the current microbatch at one op, and of the others in flight."""
        for kept in self._saved_tensors:
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
