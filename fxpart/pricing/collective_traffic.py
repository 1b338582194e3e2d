"""Traffic of a block's collectives in a microbatch's forward and backward, with packing.

A mesh rank packs the pieces that it sends into one buffer, and unpacks received pieces. Both are
copies, except where the pieces are contiguous already: along the first dim.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from math import prod
from typing import TYPE_CHECKING, Any

from torch import fx

from fxpart.compiler.collective_calls import find_regathered
from fxpart.costmodels.tensor_sizes import tensor_bytes
from fxpart.costs import TensorSpec
from fxpart.pricing.specs import Specs, annotation
from fxpart.sharding import Mesh

if TYPE_CHECKING:
    from fxpart.costs import Size


@dataclass(frozen=True)
class CollectiveTransfer:
    """A collective: its change of placement, the bytes of the whole tensor, and its axes."""

    source: str
    target: str
    size: Size
    axes: tuple[str, ...]


def is_plain(node: fx.Node) -> bool:
    """Return whether a collective node moves a tensor and computes nothing."""
    return getattr(node.target, "__name__", "") in _KINDS.keys() | {"leave", "first_only"}


@dataclass(frozen=True)
class NodeTraffic:
    """Collectives of one node. copied: bytes read and written by packing, (forward, backward)."""

    forward: tuple[CollectiveTransfer, ...] = ()
    backward: tuple[CollectiveTransfer, ...] = ()
    copied: tuple[Size, Size] = (0, 0)


def regathers(graph: fx.Graph) -> Counter[fx.Node]:
    """Return how often the backward gathers a parameter again: for each op that would save it.

    A parameter gathered over two axes counts for both nodes.
    """
    sources = Counter(
        name for n in graph.nodes for name in {tensor.source for tensor in annotation(n).regathered}
    )
    known = find_regathered(graph)
    found = Counter({node: sources[node.name] for node in known})
    for node, given in reversed(known.items()):
        if given is not None:
            found[given] += found[node]
    return found


def compute_node_traffic(
    node: fx.Node, specs: Specs, mesh: Mesh, regathered: int = 0
) -> NodeTraffic:
    """Return the traffic of a collective node in its forward and, with a gradient, its backward.

    A local form of an op (an embedding with sharded rows) whose results lack the sharded dim leaves
    reductions to explicit nodes; where it reduces inside, that is small (a loss, statistics) and
    counted as the all-reduce of its results over its axes. regathered: see :func:`regathers`.
    """
    name = _name(node)
    if name in _SILENT:
        return NodeTraffic()
    found = (
        _plain(node, name, specs, mesh)
        if name in _KINDS
        else NodeTraffic(*_form(node, specs, mesh))
    )
    if not specs.requires_grad(node):
        return NodeTraffic(found.forward, copied=(found.copied[0], 0))
    back, copied = found.forward * regathered, found.copied[0] * regathered
    return NodeTraffic(
        found.forward, found.backward + back, (found.copied[0], found.copied[1] + copied)
    )


def _plain(node: fx.Node, name: str, specs: Specs, mesh: Mesh) -> NodeTraffic:
    """Return the traffic of a change of placement along one axis, or along several as one."""
    given = _arguments(node)
    axes = (given["axis"],) if isinstance(given["axis"], str) else tuple(given["axis"])
    kind = given.get("gradient", "R")
    whole = max((_bytes(n, specs) for n in (node, *node.all_input_nodes)), key=_rank)
    if name == "all_to_all":
        whole = _bytes(node, specs) * _count(axes, mesh)
    forward, back = _KINDS[name][0], _KINDS[name][1].get(kind)
    return NodeTraffic(
        (CollectiveTransfer(*forward, whole, axes),) if forward else (),
        (CollectiveTransfer(*back, whole, axes),) if back else (),
        copies(name, kind, given, specs.tensors(node)[0].shape, whole, _count(axes, mesh)),
    )


def packs(kind: str, ranks: int, apart: int) -> tuple[int, int]:
    """Return how often a collective packs or unpacks, and what fraction of the tensor each time.

    Bytes are read and written, so twice for each of the ``apart`` sharded dims whose pieces are not
    contiguous. The second value is the divisor: an all-to-all packs one rank's part, the others the
    whole tensor.
    """
    if kind not in ("all_gather", "reduce_scatter", "all_to_all"):
        return 0, 1
    return 2 * apart, ranks if kind == "all_to_all" else 1


def copies(
    name: str, kind: str, given: Mapping[str, Any], shape: Sequence[Size], whole: Size, ranks: int
) -> tuple[Size, Size]:
    """Return bytes read and written by packing (:mod:`fxpart.collectives.redistribution`)."""

    def packed(collective: str, apart: int) -> Size:
        times, parts = packs(collective, ranks, apart)
        return times * _part(whole, parts)

    piece = 2 * _part(whole, ranks)
    if name == "all_to_all":
        ways = ((given["source"], given["source_outer"]), (given["target"], given["target_outer"]))
        if given["source"] == given["target"]:  # gathered and sharded again
            return (packed("all_gather", 1) + piece,) * 2
        return (packed(name, sum(not leading(shape, *way) for way in ways)),) * 2
    if "dim" not in given:
        return 0, 0
    apart = int(not leading(shape, given["dim"], given["outer"]))
    cut, gather = apart * piece, packed("all_gather", apart)
    if name == "slice_shard":  # its backward: all pieces, or zeros around the piece
        return cut, gather if kind == "R" else whole + piece
    scatter = packed("reduce_scatter", apart)
    if name == "reduce_scatter":
        return scatter, gather
    return gather, scatter if kind == "P" else cut


def _part(whole: Size, parts: int) -> Size:
    return -(-whole // parts) if isinstance(whole, int) else whole / parts


def leading(shape: Sequence[Size], dim: int, outer: int = 1) -> bool:
    """Return whether pieces along the dim are contiguous in the whole tensor."""
    return outer == 1 and prod(shape[:dim]) == 1


def _arguments(node: fx.Node) -> dict[str, Any]:
    """Return the node's arguments by name, without the communicator."""
    bound = signature(node.target).bind(None, *node.args, **node.kwargs)  # type: ignore[arg-type]
    bound.apply_defaults()
    return bound.arguments


def _name(node: fx.Node) -> str:
    return getattr(node.target, "__name__", "").split(".")[0]


def _form(
    node: fx.Node, specs: Specs, mesh: Mesh
) -> tuple[tuple[CollectiveTransfer, ...], tuple[CollectiveTransfer, ...]]:
    axes = node.args[0] if node.args else ()
    if not isinstance(axes, tuple | list) or not all(a in mesh.names for a in axes) or not axes:
        return (), ()
    name = getattr(node.target, "__name__", "")
    if (
        name == "experts_dispatched"
    ):  # rows of (axes, size, hidden, index, ...) are sent and returned
        hidden, chosen = (specs.tensors(n)[0] for n in node.all_input_nodes[:2])
        rows = tensor_bytes(hidden) * chosen.shape[1] * _count(axes, mesh)
        way = CollectiveTransfer(*_ALL_TO_ALL, rows, tuple(map(str, axes)))
        return (way, way), (way, way)
    if name in ("embedding_sent", "embedding_bag_sent"):  # (axes, size, table, indices, ...)
        table, ids = (specs.tensors(n)[0] for n in node.all_input_nodes[:2])
        ranks, places = _count(axes, mesh), tuple(map(str, axes))
        there = CollectiveTransfer(*_ALL_TO_ALL, tensor_bytes(ids) * ranks, places)
        rows = row_bytes(table, ids) * ranks
        home = CollectiveTransfer(*_ALL_TO_ALL, rows, places)
        return (there, home), (home,)
    ahead, back = _INSIDE.get(name, (0, 0))
    places = tuple(map(str, axes))
    if name == "batch_norm_rows":  # means and squares of every rank, and two gradient reductions
        channels = specs.tensors(node)[0].shape[1]
        given = 2 * 4 * channels
        gather = CollectiveTransfer(*_GATHER, given * _count(places, mesh), places)
        return (gather,), (CollectiveTransfer(*_REDUCE, given, places),)
    size = sum((tensor_bytes(t) for t in specs.tensors(node)[-1:]), start=0)
    move = CollectiveTransfer(*_REDUCE, size, places)
    return (move,) * ahead, (move,) * back


# Reductions inside forms, of the size of their results: (forward, backward).
_INSIDE = {
    "cross_entropy_classes": (2, 1),
    "cross_entropy_rows": (1, 0),
    "cross_entropy_rows_classes": (3, 1),
    "nll_loss_rows": (1, 0),
    "softmax_cut": (2, 1),
}
_REDUCE, _GATHER = ("partial", "replicate"), ("shard(0)", "replicate")
_SCATTER, _ALL_TO_ALL = ("partial", "shard(0)"), ("shard(0)", "shard(1)")
# name -> forward, and the backward by the gradient placement of the users (R or P).
_KINDS: dict[str, tuple[tuple[str, str] | None, dict[str, tuple[str, str] | None]]] = {
    "slice_shard": (None, {"R": _GATHER, "P": None}),
    "all_gather": (_GATHER, {"R": None, "P": _SCATTER}),
    "all_reduce": (_REDUCE, {"R": None, "P": _REDUCE}),
    "reduce_scatter": (_SCATTER, {"R": _GATHER}),
    "all_to_all": (_ALL_TO_ALL, {"R": _ALL_TO_ALL}),
    "enter": (None, {"R": _REDUCE}),
}
_SILENT = frozenset({"leave", "first_only", "random_shard"})


def row_bytes(table: TensorSpec, ids: TensorSpec) -> Size:
    """Return the bytes of the table rows that are looked up, with repetitions."""
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
    """Return a number to compare sizes by; every symbol counts as 64."""
    return float(
        size if isinstance(size, int) else size.xreplace(dict.fromkeys(size.free_symbols, 64))
    )


def _count(axes: Sequence[str], mesh: Mesh) -> int:
    total = 1
    for axis in axes:
        total *= mesh.shape[mesh.index(axis)]
    return total
