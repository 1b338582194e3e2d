"""Final decisions after propagation: forced choices, constants, and replicated state."""

from __future__ import annotations

from fxpart.annotations.graph_values import list_result_tensors
from fxpart.compiler.graph_edit import annotate
from fxpart.compiler.node_annotation import NodeSharding
from fxpart.sharding import PARTIAL, REPLICATE, Mesh, Placements, Shard

from ..rules import PASS, REPLICATED
from .axis_placements import to_left
from .propagation_graph import PropagationOp, PropagationValue

NO_RULE = "it has no rule: every rank computes it whole"
ONLY = "no axis can cut it so: every rank computes it whole"
CONSTANT = "made of constants: every rank computes it whole"
WHOLE = "every use needs it whole"
CLOSED = "nothing cuts it: every rank holds it whole"


def decide_forced(ops: list[PropagationOp], axes: int, *, close: bool) -> None:
    """Decide what is forced along each axis; with ``close`` replicate everything undecided.

    Ops without a rule and ops that cannot be sharded have only one choice; their operands come
    before them and are final. Constants whose users do not request the same shard are replicated.
    Inputs and state are replicated if all users are decided and none requests a shard.
    """
    for op in ops:
        for axis in range(axes):
            if op.leaf or op.strategy[axis] is not None:
                continue
            if not _choices(op, axis):
                _whole(op, axis, NO_RULE if op.ruled is None else ONLY)
            elif op.constant:
                _whole(op, axis, CONSTANT)
            elif close:
                _whole(op, axis, CLOSED)
    for op in ops:
        for axis in range(axes):
            if op.leaf and op.results[0].placed[axis] is None:
                value = op.results[0]
                decided = all(user.strategy[axis] is not None for user, _ in value.users)
                if close or decided:
                    value.placed[axis] = REPLICATE
                    op.origins[axis] = WHOLE if decided and value.users else CLOSED


def _choices(op: PropagationOp, axis: int) -> list[str]:
    """Return an op's choices besides replication; linear ones need a possible Partial operand."""
    if op.ruled is None:
        return []
    found = op.ruled.possible(axis, op.strategy)
    return [
        name
        for name in found
        if not name.startswith(PASS)
        or any(
            not op.inputs[i].op.leaf and op.inputs[i].placed[axis] in (None, PARTIAL)
            for i in op.ruled.rule.linear[int(name.removeprefix(PASS))]
        )
    ]


def _whole(op: PropagationOp, axis: int, origin: str) -> None:
    """Replicate the op along the axis."""
    op.strategy[axis] = REPLICATED
    if not op.annotated[axis]:
        op.origins[axis] = origin
    for value in op.results:
        if not value.pinned[axis]:
            value.placed[axis] = REPLICATE


def write(ops: list[PropagationOp], mesh: Mesh) -> None:
    """Write the results to the nodes."""
    for op in ops:
        placed = tuple(_placements(op, value, mesh) for value in op.results)
        assert len(placed) == len(list_result_tensors(op.node))
        annotate(
            op.node,
            sharding=NodeSharding(
                strategy=tuple(op.strategy), results=placed, origins=tuple(op.origins)
            ),
        )


def _placements(op: PropagationOp, value: PropagationValue, mesh: Mesh) -> Placements:
    """Return the placements of a value, with outer parts counted after earlier axes."""
    made = op.ruled.joint(tuple(op.strategy)) if op.ruled is not None else None
    if made is not None and not any(value.pinned):
        own = made.results[value.index]
        return tuple(p if s is not None else None for p, s in zip(own, op.strategy, strict=True))
    left = to_left(tuple(value.placed), mesh)
    if left is not None:
        return left
    # An axis splits an outer part of an annotated sharding, so only the annotated axes are kept.
    return tuple(
        p if not isinstance(p, Shard) or p.outer == 1 else None
        for p in value.placed
    )  # fmt: skip
