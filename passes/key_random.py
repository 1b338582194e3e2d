"""Give every random op a key, so that its values do not depend on the plan or global state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from fxpart.compiler.effects import is_random
from fxpart.compiler.graph_edit import annotate
from fxpart.compiler.node_annotation import KEY, RNG_KEY, Level, NodeAnnotation
from fxpart.errors import error
from fxpart.rng import seeded


@dataclass(frozen=True)
class KeyRandomPass:
    """Add the first input ``rng_key`` (an int), and call each random op through ``seeded``.

    The call is ``fxpart.rng.seeded(rng_key, index, op, *args, **kwargs)``. The index numbers the
    random ops in graph order and is stored in ``NodeAnnotation.random``. An op disabled by its
    arguments (dropout in evaluation, or with p=0) is not random.
    """

    name: ClassVar[str] = "key_random"
    requires: ClassVar[Level] = Level.CAPTURED
    ensures: ClassVar[Level] = Level.CAPTURED

    def run(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        """Key all random ops; the input is added even if there are none."""
        graph = graph_module.graph
        key = _key_input(graph)
        index = 0
        for node in graph.nodes:
            if node.target is not seeded and is_random(node):
                node.args = (key, index, node.target, *node.args)
                node.target = seeded
                annotate(node, random=index)
                index += 1
        return graph_module


def _key_input(graph: fx.Graph) -> fx.Node:
    """Add the first placeholder; rename an operation or a parameter of that name."""
    for node in graph.nodes:
        if node.name != RNG_KEY:
            continue
        if node.op == "placeholder":
            raise error(
                "FXP109",
                where=f"the model's input {RNG_KEY}",
                why="the name is reserved for the key of random ops",
                fix="rename the argument of the model's forward",
            )
        with graph.inserting_before(node):
            renamed = graph.node_copy(node, lambda n: n)
        node.replace_all_uses_with(renamed)
        graph.erase_node(node)
    first = next(iter(graph.nodes))
    with graph.inserting_before(first):
        key = graph.placeholder(RNG_KEY)
    key.name = RNG_KEY  # torch.fx appends a number to the name of an erased node
    key.meta["val"] = 0
    key.meta[KEY] = NodeAnnotation()
    return key
