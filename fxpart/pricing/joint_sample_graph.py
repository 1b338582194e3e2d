"""One block of each kind in a graph of its own, with replicated boundary values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import fx

from fxpart.compiler.node_annotation import KEY, NodeAnnotation, NodeSharding
from fxpart.compiler.tensor_sizes import tensors
from fxpart.pricing.joint_block_kinds import BlockKind, BlockKinds
from fxpart.pricing.specs import annotation
from fxpart.sharding import REPLICATE, Placements

AXIS = "tp"
WHOLE: Placements = (REPLICATE,)


@dataclass
class SampleGraph:
    """The graph. of: node of the whole graph -> its copy.

    kind: of every copy that belongs to a block. free: values between two blocks that are the only
    ones of their kinds (a head's logits and their loss); they may stay sharded. All other values
    that enter a block, and its outputs to later blocks or as the loss, pass an op that requires and
    returns them replicated.
    """

    graph: fx.Graph = field(default_factory=fx.Graph)
    of: dict[fx.Node, fx.Node] = field(default_factory=dict)
    kind: dict[fx.Node, int] = field(default_factory=dict)
    free: set[fx.Node] = field(default_factory=set)


def samples(kinds: BlockKinds) -> SampleGraph:
    """Copy the first block of every kind; copies share parameters and inputs."""
    found = SampleGraph()
    found.free.update(_free(kinds))
    for kind, block in enumerate(kinds.samples):
        _copy(found, kind, block)
    return found


def _free(kinds: BlockKinds) -> Iterator[fx.Node]:
    """Yield values between two blocks, where no other blocks are of the same kinds."""
    single = {kinds.samples[k].index for k, count in Counter(kinds.of).items() if count == 1}
    for block in kinds.samples:
        for node in block.nodes if block.index in single else ():
            users = {annotation(u).block for u in node.users if annotation(u).block is not None}
            others = users - {block.index}
            if len(others) == 1 and others <= single and not _is_loss(node):
                yield node


def _is_loss(node: fx.Node) -> bool:
    for user in node.users:
        if user.op == "output":
            returned = user.args[0]
            if isinstance(returned, tuple | list) and returned and returned[0] is node:
                return True
    return False


def _copy(found: SampleGraph, kind: int, block: BlockKind) -> None:
    inside = frozenset(block.nodes)
    local: dict[fx.Node, fx.Node] = {}

    def copied(node: fx.Node) -> fx.Node:
        """Return the copy that this block uses; values from outside are copied on demand."""
        if node in inside or node in found.free:
            return found.of[node]
        if node.op in ("placeholder", "get_attr"):
            if node not in found.of:
                new = found.graph.node_copy(node, lambda n: n)
                if node.op == "placeholder" and isinstance(node.meta.get("val"), torch.Tensor):
                    _fix(new, node)
                found.of[node] = new
            return found.of[node]
        if node not in local:
            if not tensors(node.meta.get("val")):  # computed from sizes
                local[node] = found.graph.node_copy(node, copied)
            else:
                entry = found.graph.placeholder(f"{node.name}_given")
                entry.meta["val"] = node.meta.get("val")
                entry.meta[KEY] = NodeAnnotation()
                local[node] = _whole(found, entry, node, kind)
        return local[node]

    for node in block.nodes:
        new = found.graph.node_copy(node, copied)
        found.of[node], found.kind[new] = new, kind
    for node in block.nodes:
        if node not in found.free and _leaves(node, inside):
            _whole(found, found.of[node], node, kind)


def _leaves(node: fx.Node, inside: frozenset[fx.Node]) -> bool:
    """Return whether other blocks use a tensor, or it is the loss."""
    if not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    users = [annotation(u).block for u in node.users if u not in inside]
    return _is_loss(node) or any(block is not None for block in users)


def _whole(found: SampleGraph, source: fx.Node, like: fx.Node, kind: int) -> fx.Node:
    """Add an op that moves nothing and requires its operand replicated."""
    new = found.graph.call_function(torch.ops.aten.alias.default, (source,))
    new.meta["val"] = like.meta.get("val")
    new.meta[KEY] = NodeAnnotation(requires_grad=annotation(like).requires_grad)
    _fix(new, new)
    found.kind[new] = kind
    return new


def _fix(new: fx.Node, like: fx.Node) -> None:
    """Fix the placement of a node as replicated."""
    known = annotation(like)
    new.meta = dict(new.meta)
    new.meta[KEY] = NodeAnnotation(
        requires_grad=known.requires_grad,
        module=known.module,
        sharding=NodeSharding(("",), (WHOLE,)),
    )
