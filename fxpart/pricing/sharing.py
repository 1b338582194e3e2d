"""What several ranks of a stage pay for sharing its work: collectives, in a block and each step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
from torch import fx

from fxpart.costmodels.sizes import tensor_bytes
from fxpart.costs import TensorSpec
from fxpart.pricing.specs import Specs
from fxpart.sharding import Mesh
from fxpart.solver.problem import Weight

if TYPE_CHECKING:
    from fxpart.costs import CostModel, Size
    from fxpart.pricing.groups import Rings

_BUCKET = 25 << 20  # bytes of gradients that are summed at once
# Bytes read and written for each byte that is packed into a bucket, and for each unpacked.
_PACKED = {
    ("partial", "replicate"): 2,  # in; the sums stay where they are, and are used there
    ("partial", "shard(0)"): 2,  # in; a piece of the bucket is what is wanted
    ("shard(0)", "replicate"): 2,  # out; what goes in is a lane's part
}
# Bytes read and written for each byte of a table's rows, where ZeRO cuts the table: every lane sums
# the rows of all, takes its range of the flat table, and updates that number by number.
_SETTLED = 38


@dataclass(frozen=True)
class Sharing:
    """How the ranks of every stage share its work.

    rows: into how many parts each microbatch is cut; multiple: what its rows have to be a multiple
    of (of some inputs more parts may be made). parts: symbol -> into how many parts the dim
    that it is read from is cut. partial: per parameter the axes over which its gradient is summed
    at the end of a step. zero: 1 cuts optimizer state over ``zero_axis``, 2 gradients too.
    """

    mesh: Mesh
    rows: int = 1
    multiple: int = 1
    parts: Mapping[str, int] = field(default_factory=dict)
    partial: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    zero: int = 0
    zero_axis: str = ""
    cut: frozenset[str] = frozenset()  # state that lies in parts over zero_axis already

    def divided(self, weight: Weight) -> Weight:
        """A parameter's bytes on one rank under ZeRO: state, and from 2 on the gradient, in parts.

        The weight's gradient stays whole while a block's backward makes it; with 2 it is kept only
        until the step's sums, which is what is counted here as divided. Of a table every lane is
        given the rows of all.
        """
        if self.zero not in (1, 2) or weight.name in self.cut or not weight.gradient:
            return weight
        parts = self.mesh.shape[self.mesh.index(self.zero_axis)]
        whole = self.zero == 1 or weight.sparse
        return msgspec.structs.replace(
            weight,
            temporary=-(-weight.temporary // parts),
            optimizer=-(-weight.optimizer // parts),
            gradient=weight.gradient if whole else -(-weight.gradient // parts),
        )

    def sums(
        self,
        weights: Sequence[Weight],
        blocks: int,
        model: CostModel,
        rings: Rings,
        copying: float = 0.0,
    ) -> StepSums:
        """Seconds a step that sums of gradients and ZeRO's collectives take, and what it settles.

        A stage's tensors travel together in buckets, so that a block pays for its bytes alone and
        the stage once for what a first bucket takes however small. A tied weight counts for its
        first block. weights: as they are without ZeRO. copying: seconds per byte that packing a
        bucket, and unpacking it, reads or writes.
        """
        bytes_of: defaultdict[tuple[int, str, str, tuple[str, ...]], int] = defaultdict(int)
        settled: defaultdict[int, int] = defaultdict(int)
        for weight in weights:
            if not weight.gradient:
                continue
            block, axes = weight.blocks[0], self.partial.get(weight.name, ())
            if weight.sparse:  # every lane is given the rows of all, and ZeRO takes its own of them
                for axis in axes:
                    bytes_of[block, "shard(0)", "replicate", (axis,)] += weight.rows
                axes = ()
            if self.zero in (1, 2) and weight.name not in self.cut:
                zero = (self.zero_axis,)
                bytes_of[block, "shard(0)", "replicate", zero] += weight.weight
                settled[block] += weight.rows
                if self.zero_axis in axes:
                    bytes_of[block, "partial", "shard(0)", zero] += weight.gradient
                axes = tuple(axis for axis in axes if axis != self.zero_axis)
            for axis in axes:
                bytes_of[block, "partial", "replicate", (axis,)] += weight.gradient
        seconds = [settled[block] * _SETTLED * copying for block in range(blocks)]
        first: dict[tuple[str, str, tuple[str, ...]], float] = {}
        for (block, source, target, axes), size in bytes_of.items():
            ring = rings(*axes)
            bucket = model.reshard(source, target, float(_BUCKET), ring).seconds
            seconds[block] += size * (bucket / _BUCKET + packing(source, target) * copying)
            if size:
                first[source, target, axes] = model.reshard(source, target, 1.0, ring).seconds
        return StepSums(by_block=tuple(seconds), once=sum(first.values()))


def packing(source: str, target: str) -> int:
    """Bytes that are read and written for each byte that goes through a bucket."""
    return _PACKED[source, target]


@dataclass(frozen=True)
class StepSums:
    """Seconds a step for sums of gradients: by block, and for each stage whatever its blocks."""

    by_block: tuple[float, ...] = ()
    once: float = 0.0


@dataclass(frozen=True)
class Move:
    """A collective: the change of placement, the bytes of the whole tensor, and its axes."""

    source: str
    target: str
    size: Size
    axes: tuple[str, ...]


def is_plain(node: fx.Node) -> bool:
    """Whether a collective node moves a tensor and computes nothing."""
    return getattr(node.target, "__name__", "") in _KINDS.keys() | {"leave", "first_only"}


def moves(node: fx.Node, specs: Specs, mesh: Mesh) -> tuple[tuple[Move, ...], tuple[Move, ...]]:
    """What a collective node moves in its forward and, where it takes a gradient, in its backward.

    A local form of an op (an embedding whose rows are cut) that makes results without a cut dim
    leaves sums to explicit nodes; where it sums inside, that is small (a loss, statistics) and
    counted as the sum of its results over its axes.
    """
    forward, back = _both(node, specs, mesh)
    return forward, back if specs.requires_grad(node) else ()


def _both(node: fx.Node, specs: Specs, mesh: Mesh) -> tuple[tuple[Move, ...], tuple[Move, ...]]:
    name = getattr(node.target, "__name__", "")
    if name not in _KINDS and name not in _SILENT:
        return _form(node, specs, mesh)
    if name in _SILENT:
        return (), ()
    axis = node.kwargs.get("axis", node.args[1] if len(node.args) > 1 else None)
    axes = (axis,) if isinstance(axis, str) else tuple(axis or ())  # type: ignore[arg-type]
    kind = "P" if "P" in (*node.args, *node.kwargs.values()) else "R"
    whole = max((_bytes(n, specs) for n in (node, *node.all_input_nodes)), key=_rank)
    if name == "all_to_all":
        whole = _bytes(node, specs) * _count(axes, mesh)
    forward, back = _KINDS[name][0], _KINDS[name][1].get(kind)
    return (
        (Move(*forward, whole, axes),) if forward else (),
        (Move(*back, whole, axes),) if back else (),
    )


def _form(node: fx.Node, specs: Specs, mesh: Mesh) -> tuple[tuple[Move, ...], tuple[Move, ...]]:
    axes = node.args[0] if node.args else ()
    if not isinstance(axes, tuple | list) or not all(a in mesh.names for a in axes) or not axes:
        return (), ()
    name = getattr(node.target, "__name__", "")
    if name == "experts_dispatched":  # rows of (axes, size, hidden, index, ...) travel, and back
        hidden, chosen = (specs.tensors(n)[0] for n in node.all_input_nodes[:2])
        rows = tensor_bytes(hidden) * chosen.shape[1] * _count(axes, mesh)
        way = Move(*_TURN, rows, tuple(map(str, axes)))
        return (way, way), (way, way)
    if name in ("embedding_sent", "embedding_bag_sent"):  # (axes, size, table, indices, ...)
        table, ids = (specs.tensors(n)[0] for n in node.all_input_nodes[:2])
        lanes, places = _count(axes, mesh), tuple(map(str, axes))
        there = Move(*_TURN, tensor_bytes(ids) * lanes, places)
        rows = row_bytes(table, ids) * lanes
        home = Move(*_TURN, rows, places)
        return (there, home), (home,)
    ahead, back = _INSIDE.get(name, (0, 0))
    places = tuple(map(str, axes))
    if name == "batch_norm_rows":  # every lane's means and squares, and two sums of gradients
        channels = specs.tensors(node)[0].shape[1]
        given = 2 * 4 * channels
        gather = Move(*_GATHER, given * _count(places, mesh), places)
        return (gather,), (Move(*_REDUCE, given, places),)
    size = sum((tensor_bytes(t) for t in specs.tensors(node)[-1:]), start=0)
    move = Move(*_REDUCE, size, places)
    return (move,) * ahead, (move,) * back


# Sums that forms take inside, of the size of their results: in the forward and in the backward.
_INSIDE = {
    "cross_entropy_classes": (2, 1),
    "cross_entropy_rows": (1, 0),
    "cross_entropy_rows_classes": (3, 1),
    "nll_loss_rows": (1, 0),
    "softmax_cut": (2, 1),
}
_REDUCE, _GATHER = ("partial", "replicate"), ("shard(0)", "replicate")
_SCATTER, _TURN = ("partial", "shard(0)"), ("shard(0)", "shard(1)")
# name -> forward, and by what the users leave for gradients (R or P) the backward.
_KINDS: dict[str, tuple[tuple[str, str] | None, dict[str, tuple[str, str] | None]]] = {
    "slice_shard": (None, {"R": _GATHER, "P": None}),
    "all_gather": (_GATHER, {"R": None, "P": _SCATTER}),
    "all_reduce": (_REDUCE, {"R": None, "P": _REDUCE}),
    "reduce_scatter": (_SCATTER, {"R": _GATHER}),
    "all_to_all": (_TURN, {"R": _TURN}),
    "enter": (None, {"R": _REDUCE}),
}
_SILENT = frozenset({"leave", "first_only", "random_shard"})


def row_bytes(table: TensorSpec, ids: TensorSpec) -> Size:
    """What the rows of a table take that are asked for, each as often as it is asked for."""
    rows: Size = 1
    for size in ids.shape:
        rows = rows * size
    return tensor_bytes(TensorSpec((rows, *table.shape[1:]), table.dtype))


def _bytes(node: fx.Node, specs: Specs) -> Size:
    total: Size = 0
    for tensor in specs.tensors(node):
        total = total + tensor_bytes(tensor)
    return total


def _rank(size: Size) -> float:
    """Sizes in symbols, compared as if every symbol were 64."""
    return float(
        size if isinstance(size, int) else size.xreplace(dict.fromkeys(size.free_symbols, 64))
    )


def _count(axes: Sequence[str], mesh: Mesh) -> int:
    total = 1
    for axis in axes:
        total *= mesh.shape[mesh.index(axis)]
    return total
