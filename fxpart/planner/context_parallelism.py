"""Context parallelism: the tokens of each sequence are sharded over an axis of the mesh."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING

from torch import fx

from fxpart.annotations.entry_syntax import read_placements, read_strategies
from fxpart.codegen.mesh_programs.sharded_graph import propagate_annotations
from fxpart.compiler.attention_ops import ROWS, list_attentions
from fxpart.compiler.effects import argument
from fxpart.compiler.tensor_sizes import expression, hint
from fxpart.errors import error
from fxpart.passes.rules import rule_of
from fxpart.passes.rules.sharding_rule import PARTS
from fxpart.plan.constraint_table import CONTEXT_AXIS
from fxpart.sharding import REPLICATE, Mesh, Shard

if TYPE_CHECKING:
    from fxpart.capture import CapturedModel

_STRIPES = (2, 4, 8)
_SHORTEST = 512  # queries of a piece, with which fused kernels are as fast as with more


def shard_sequences(
    graph: fx.Graph, captured: CapturedModel, mesh: Mesh, given: Mapping[str, str]
) -> dict[str, str]:
    """Return annotations that shard the sequences of a graph over the context axis.

    The queries of every attention are sharded, and the inputs whose dim after the batch is as long.
    Empty where the mesh lacks the axis, or the user's annotations (``given``) name it. Raise FXP105
    where the axis cannot shard the sequences.
    """
    parts = dict(mesh.axes).get(CONTEXT_AXIS, 1)
    if parts == 1 or _is_named(given):
        return {}
    attentions = list_attentions(graph)
    if whole := [node.name for node in attentions if not _has_rows(node)]:
        more = f" and {len(whole) - 1} more" if len(whole) > 1 else ""
        raise error(
            "FXP105",
            where=f"mesh {mesh}",
            why=f"the axis {CONTEXT_AXIS} cannot shard the queries of {whole[0]}{more}: causal "
            "attention of [batch, heads, tokens, width] without a mask needs as many keys and "
            "values, of as many batches and heads",
            fix="use other axes",
        )
    lengths = {hint(node.meta["val"].shape[-2]) for node in attentions}
    wrong = sorted(length for length in lengths if length % parts)
    if wrong or not attentions:
        tokens = " and ".join(map(str, wrong))
        raise error(
            "FXP105",
            where=f"mesh {mesh}",
            why=f"the axis {CONTEXT_AXIS} has {parts} ranks, which does not divide sequences of "
            f"{tokens} tokens"
            if wrong
            else f"the model has no attention whose queries the axis {CONTEXT_AXIS} could shard",
            fix="use another number of ranks, or pad the sequences" if wrong else "use other axes",
        )
    stripes = _count_stripes(attentions, lengths, parts)
    rows = ROWS if stripes == 1 else f"{ROWS}{PARTS}{stripes}"
    found = {f"op:{node.name}": f"{CONTEXT_AXIS}:{rows}" for node in attentions}
    return found | _place_inputs(graph, captured, lengths, stripes)


def _has_rows(attention: fx.Node) -> bool:
    """Return whether the queries can be sharded."""
    rule = rule_of(attention)
    return rule is not None and ROWS in rule.factors


def _count_stripes(attentions: Sequence[fx.Node], lengths: Collection[int], parts: int) -> int:
    """Return the number of parts of sequences of which each rank has a piece.

    Later queries of causal attention read more keys. With k stripes the last of n ranks reads
    1 + (n - 1) / (n k) times the mean.
    """
    if not any(argument(node, "is_causal") for node in attentions):
        return 1
    even = [k for k in _STRIPES if all(n % (k * parts) == 0 for n in lengths)]
    return max((k for k in even if min(lengths) // (k * parts) >= _SHORTEST), default=1)


def _place_inputs(
    graph: fx.Graph, captured: CapturedModel, lengths: Collection[int], stripes: int
) -> dict[str, str]:
    """Return annotations of the inputs whose dim after the batch has one of these lengths.

    Where some lengths are numbers, inputs with symbols are replicated: a symbol of a sharded input
    is the local length, which would not be known to agree with the local number.
    """
    found: dict[str, tuple[int, bool]] = {}
    for item in captured.inputs:
        node = next((n for n in graph.find_nodes(op="placeholder") if n.name == item.name), None)
        if node is None or item.batch_dim is None:
            continue
        shape, dim = node.meta["val"].shape, item.batch_dim + 1
        if dim < len(shape) and hint(shape[dim]) in lengths:
            found[item.name] = dim, isinstance(expression(shape[dim]), int)
    fixed = any(number for _, number in found.values())
    return {
        f"input:{name}": f"{CONTEXT_AXIS}:{Shard(dim, stripes) if number == fixed else REPLICATE}"
        for name, (dim, number) in found.items()
    }


def _is_named(given: Mapping[str, str]) -> bool:
    """Return whether an annotation names the context axis."""
    return any(
        CONTEXT_AXIS in (read_strategies if key.startswith("op:") else read_placements)(text)
        for key, text in given.items()
    )


@dataclass(frozen=True)
class PlacedSequences:
    """A prepared graph whose sequences are sharded over several ranks, for estimates."""

    graph: fx.GraphModule
    captured: CapturedModel

    @property
    def tokens(self) -> int:
        """The common divisor of the lengths of all sequences with attention; 0 without any."""
        found = list_attentions(self.graph.graph)
        if not all(map(_has_rows, found)):
            return 0
        return gcd(*(hint(node.meta["val"].shape[-2]) for node in found))

    def place(self, ranks: int) -> fx.GraphModule:
        """Return the graph on a mesh of so many ranks, with all placements."""
        mesh = Mesh(((CONTEXT_AXIS, ranks),))
        seeds = shard_sequences(self.graph.graph, self.captured, mesh, {})
        return propagate_annotations(self.graph, mesh, seeds, {}, close=True)
