"""Mixtures of experts in a prepared graph, and the parameters that they read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from fxpart.compiler.collective_calls import op_name, unwrap_seeded_call

_NAME = "fxpart.experts.default"
DISPATCHED = "t&e"  # strategy of an axis that shards tokens and experts, and exchanges rows
WEIGHTS = range(3, 7)  # positions of up, down and their biases in the op's arguments


@dataclass(frozen=True)
class Mixture:
    """A mixture: its op, the number of its experts, and its parameters by name."""

    node: fx.Node
    experts: int
    weights: tuple[str, ...]


def list_mixtures(nodes: fx.Graph | Iterable[fx.Node]) -> list[Mixture]:
    """Return the mixtures whose parameters are read directly, one row of each per expert."""
    found = []
    for node in nodes.nodes if isinstance(nodes, fx.Graph) else nodes:
        if node.op != "call_function":
            continue
        target, args, _ = unwrap_seeded_call(node)
        if op_name(target) != _NAME:
            continue
        layers = [args[i] for i in WEIGHTS if i < len(args) and isinstance(args[i], fx.Node)]
        number = layers[0].meta["val"].shape[0]
        if isinstance(number, int) and all(layer.op == "get_attr" for layer in layers):
            found.append(Mixture(node, number, tuple(str(layer.target) for layer in layers)))
    return found
