"""Split a stage's operations into segments, one per contiguous part of a block.

A segment takes all values that it needs from other segments and returns all values that others
need. Activation recomputation therefore stores only the values between segments.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from fxpart.compiler.graph_edit import annotation


@dataclass(frozen=True)
class RecomputeSegment:
    """Operations in order. takes, gives: values (no state) from before and after the segment."""

    ops: tuple[fx.Node, ...]
    takes: tuple[fx.Node, ...]
    gives: tuple[fx.Node, ...]


def split_recompute_segments(graph: fx.Graph) -> tuple[RecomputeSegment, ...]:
    """Return the segments of a stage's graph; empty if there is only one.

    Operations without a block belong to the current segment.
    """
    stretches: list[list[fx.Node]] = []
    current: int | None = None
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        block = annotation(node).block
        if not stretches or (block is not None and current is not None and block != current):
            stretches.append([])
            current = None
        current = current if block is None else block
        stretches[-1].append(node)
    if len(stretches) < 2:
        return ()
    return tuple(_piece(ops) for ops in stretches)


def _piece(ops: list[fx.Node]) -> RecomputeSegment:
    own = set(ops)
    read = dict.fromkeys(n for op in ops for n in op.all_input_nodes)
    takes = tuple(n for n in read if n not in own and n.op != "get_attr")
    gives = tuple(op for op in ops if any(user not in own for user in op.users))
    return RecomputeSegment(tuple(ops), takes, gives)
