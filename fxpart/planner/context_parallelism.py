"""Context parallelism: the tokens of each sequence are sharded over an axis of the mesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import fx

from fxpart.annotations.entry_syntax import read_placements, read_strategies
from fxpart.compiler.attention_ops import ROWS, list_attentions
from fxpart.compiler.tensor_sizes import hint
from fxpart.plan.constraint_table import CONTEXT_AXIS
from fxpart.sharding import Mesh, Shard

if TYPE_CHECKING:
    from fxpart.capture import CapturedModel


def shard_sequences(
    graph: fx.Graph, captured: CapturedModel, mesh: Mesh, given: Mapping[str, str]
) -> dict[str, str]:
    """Return annotations that shard the sequences of a graph over the context axis.

    The queries of every attention are sharded, and the inputs whose dim after the batch is as long.
    None where the mesh lacks the axis, or the user's annotations (``given``) name it.
    """
    if CONTEXT_AXIS not in mesh.names or _is_named(given):
        return {}
    found = {f"op:{one.name}": f"{CONTEXT_AXIS}:{ROWS}" for one in list_attentions(graph)}
    lengths = {hint(one.meta["val"].shape[-2]) for one in list_attentions(graph)}
    for item in captured.inputs:
        node = next((n for n in graph.find_nodes(op="placeholder") if n.name == item.name), None)
        if node is None or item.batch_dim is None:
            continue
        shape, dim = node.meta["val"].shape, item.batch_dim + 1
        if dim < len(shape) and hint(shape[dim]) in lengths:
            found[f"input:{item.name}"] = f"{CONTEXT_AXIS}:{Shard(dim)}"
    return found


def _is_named(given: Mapping[str, str]) -> bool:
    """Return whether an annotation names the context axis."""
    return any(
        CONTEXT_AXIS in (read_strategies if key.startswith("op:") else read_placements)(text)
        for key, text in given.items()
    )
