"""A rank's peak of live tensors in a step simulated op by op, and its ten largest tensors.

Three moments are compared: a microbatch's forward and backward with the most microbatches in
flight, and the optimizer step. Gradients of weights exist from the second backward on. A stage that
recomputes its blocks runs the forward of each just before its backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray
from torch import fx

from fxpart.plan.prediction import LiveTensor, RankPrediction
from fxpart.pricing.gradient_buckets import PackedGradients
from fxpart.pricing.recompute_costs import RecomputedBlock
from fxpart.pricing.specs import Specs, annotation
from fxpart.pricing.variants import Sizes
from fxpart.pricing.workspace import BlockScope, Workspace
from fxpart.solver.problem import Weight

if TYPE_CHECKING:
    from fxpart.costs import Size

TOP = 10


@dataclass(frozen=True)
class _SavedTensor:
    """A saved storage: bytes, positions and names of its first saver and its maker."""

    size: int
    first: int
    made: int
    name: str
    saver: str


@dataclass(frozen=True)
class StageOps:
    """What a rank computes of a stage.

    nodes: in order. weights: parameters and buffers. buckets: of gradients, in the order in which
    they are reduced. entering: bytes of tied parameters' gradients that later stages have computed
    of a microbatch, which exist during its backward. packed_late: bytes that are packed after the
    last backward of a step. ahead: as of :class:`Workspace`.
    """

    nodes: Sequence[fx.Node]
    weights: Sequence[Weight]
    specs: Specs
    sizes: Sizes
    buckets: Sequence[PackedGradients] = ()
    entering: int = 0
    packed_late: int = 0
    ahead: int = 0

    @property
    def scope(self) -> BlockScope:
        """The nodes, with the names of those that autograd saves."""
        names = frozenset(saved.source for n in self.nodes for saved in annotation(n).saved)
        return BlockScope(tuple(self.nodes), names)


class StagePeak:
    """One stage's tensors during a microbatch."""

    def __init__(self, stage: StageOps) -> None:
        """Find lifetimes."""
        self._nodes, self._weights, self._sizes = stage.nodes, stage.weights, stage.sizes
        self._buckets, self._entering = stage.buckets, stage.entering
        self._packed_late = stage.packed_late
        self._space = Workspace(stage.scope, stage.specs, 1, whole=True, ahead=stage.ahead)
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
        fixed = entry.memory.weights + entry.memory.buffers + entry.memory.optimizer
        fixed += entry.memory.copies
        moved = entry.memory.transfers // max(1, in_flight)
        # The last backward of a step reduces gradients, when no other microbatch is in flight
        # unless the next minibatch follows.
        passes = {(in_flight, False, microbatches == 1), (full, True, False)}
        if microbatches > 1:
            passes.add((in_flight if weights else 1, True, True))
        cases: list[tuple[int, str, int, int, bool, int]] = []
        for count, whole, last in sorted(passes):
            if count < 1:
                continue
            others = fixed + count * moved + (count - 1) * self._saved
            grown, packed = (
                self._extend(rows)
                for rows in (self._count_gradients(trained), self._count_packed(trained, last))
            )
            for way, live in self._live_by_phase().items():
                extra = np.zeros(len(live), np.int64)
                if way in grown:
                    extra = packed[way] + (0 if whole else grown[way])
                extra = extra + (gradients if whole else 0)
                at = int(np.argmax(live + extra)) if len(live) else 0
                most = int((live + extra)[at]) if len(live) else 0
                more = int(packed[way][at]) if way in packed and len(live) else 0
                cases.append((others + most, way, at, count, whole, more))
        temporary = max((w.temporary for w in trained), default=0)
        waiting = in_flight - 1 if weights else 0  # while an asynchronous stage updates
        known = fixed + gradients + max(temporary, self._packed_late)
        known += waiting * (moved + self._saved)
        most = known if weights else max(known, entry.update)
        cases.append((most, "update", 0, waiting, True, max(0, most - known)))
        peak, way, at, count, whole, packed_bytes = max(cases, key=lambda case: case[0])
        rows = [*self._fixed(way, whole)]
        if entry.memory.copies:
            why = f"copies of weights, {weights}"
            rows.append(LiveTensor(name="weights", bytes=entry.memory.copies, why=why))
        if packed_bytes:
            why = "packed for reduction"
            rows.append(LiveTensor(name="gradients", bytes=packed_bytes, why=why))
        rows += self._flying(count) if way == "update" else self._moment(way, at, count)
        rows.sort(key=lambda row: (-row.bytes, row.name))
        return msgspec.structs.replace(entry, peak=peak, top=tuple(rows[:TOP]))

    def _live_by_phase(self) -> dict[str, NDArray[np.int64]]:
        """Return by phase the bytes of a microbatch that are live while each op runs."""
        forward, backward = self._space.live(self._sizes)
        return {
            "forward": forward + self._count_saved_in_forward(),
            "backward": backward + self._count_saved_in_backward(),
        }

    def _extend(self, rows: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
        """Return bytes by op of a backward, by the phases of a backward."""
        return {"backward": rows}

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

    def _count_packed(self, trained: Sequence[Weight], last: bool) -> NDArray[np.int64]:
        """Return by op the bytes by which reductions exceed the gradients that are kept.

        Gradients are packed when the last of a bucket is final, after the backward of the op that
        uses it first. last: whether this backward is a step's last.
        """
        rows = np.full(len(self._nodes), self._entering, dtype=np.int64)
        kept = {w.name: w.gradient for w in trained}
        first: dict[str, int] = {}
        final: dict[str, int] = {}
        for index, node in enumerate(self._nodes):
            for source in node.all_input_nodes:
                if source.op == "get_attr":
                    first[str(source.target)] = index
                    final.setdefault(str(source.target), index)
        sent, until = 0, len(rows)  # a bucket is being sent while the next one fills
        for bucket in self._buckets:
            sizes = {n: size for n, size in bucket.sizes.items() if n in final and n in kept}
            if not sizes or not (last or bucket.each):
                continue
            end = max(0, min(final[name] for name in sizes) - 1)
            if bucket.each:
                for name, size in sizes.items():
                    rows[end : first[name]] += size
                rows[end:until] += sent
                sent, until = bucket.packed, end
            rows[end] += bucket.packed
        rows[:until] += sent
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
        trained = [w for w in self._weights if w.gradient]
        if way == "update" and trained:
            largest = max(trained, key=lambda w: w.temporary)
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


class RecomputedStagePeak(StagePeak):
    """One stage's tensors during a microbatch, where its blocks are recomputed.

    When a block runs again, this and earlier blocks have what they store, later ones have nothing.
    """

    def __init__(self, stage: StageOps, blocks: Mapping[int, RecomputedBlock]) -> None:
        """Find lifetimes. blocks: those of the stage, by number."""
        super().__init__(stage)
        self._blocks = blocks
        self._numbers = [annotation(node).block or 0 for node in stage.nodes]
        last = {number: index for index, number in enumerate(self._numbers)}
        self._ends = np.array([last[number] for number in self._numbers], dtype=np.int64)
        count = max(self._numbers, default=0) + 1
        self._pieces = Workspace(stage.scope, stage.specs, count, ahead=stage.ahead)
        self._saved = sum(block.stored for block in blocks.values())
        self._again = {number for number, block in blocks.items() if block.again}

    def _live_by_phase(self) -> dict[str, NDArray[np.int64]]:
        sizes = self._sizes
        again, back = self._pieces.recomputed_live(
            sizes, self._again, [one for block in self._blocks.values() for one in block.products]
        )
        stored = np.array([
            sum(block.stored for number, block in self._blocks.items() if number <= mine)
            for mine in self._numbers
        ], dtype=np.int64)  # fmt: skip
        others = self._space.waiting(sizes) - self._pieces.waiting(sizes)  # across blocks
        return {
            "recomputation": again + stored + others[self._ends],
            "backward": back + stored + others,
        }

    def _extend(self, rows: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
        return {"recomputation": rows[self._ends], "backward": rows}

    def _flying(self, count: int) -> Iterator[LiveTensor]:
        yield from self._stored(count, -1, False)

    def _stored(self, count: int, at: int, backward: bool) -> Iterator[LiveTensor]:
        """Yield stored tensors of ``count`` microbatches, and of one whose op ``at`` runs."""
        current = self._numbers[at] if at >= 0 else -1
        used = self._nodes[: self._ends[at] + 1 if backward else at + 1]
        for number, block in self._blocks.items():
            for node, size, product in (
                *((*one, False) for one in block.tensors),
                *((*one, True) for one in block.products),
            ):
                gone = product and number == current and node in used
                copies = count + (number <= current and not gone)
                times = f", {copies} microbatches" if copies > 1 else ""
                if copies:
                    yield LiveTensor(name=node.name, bytes=copies * size, why=f"stored{times}")

    def _moment(self, way: str, at: int, count: int) -> Iterator[LiveTensor]:
        """Yield the tensors of the current microbatch at one op, and of the others in flight."""
        sizes, backward = self._sizes, way == "backward"
        yield from self._stored(count - 1, at, backward)
        for node, size in self._pieces.remade_at(sizes, self._again, at, backward):
            yield LiveTensor(name=node.name, bytes=size, why="recomputed")
        for node, size in () if backward else self._pieces.alive_at(sizes, at, True):
            yield LiveTensor(name=node.name, bytes=size, why="result")
        waiting = at if backward else int(self._ends[at])
        for node, size in self._space.alive_at(sizes, waiting, False):
            yield LiveTensor(name=node.name, bytes=size, why="gradient of the result")
        inside = self._pieces.inside(sizes, at, not backward)
        if inside:
            yield LiveTensor(name=self._nodes[at].name, bytes=inside, why=f"working memory, {way}")
