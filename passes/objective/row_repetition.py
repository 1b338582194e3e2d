"""Whether the rows of a batch may be there several times, so that they divide over ranks.

A value that is a mean over rows is the same for rows that are there twice, and so is its gradient:
it is the mean of the two parts' values, which are equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from .analysis import ObjectiveAnalysis, analyze
from .batch_weight import divisor_of, unscaled
from .microbatch_rewrite import live_nodes, needed_for, total_reads
from .value_kinds import BatchRelation

REPEAT_KEY = "fxpart_repeated_rows"  # a captured graph: for one microbatch, and for several
ROWS = "rows"  # results do not change
DIVISOR = "divisor"  # they do not if the number that the loss is divided by changes as rows do
_SAME = frozenset({BatchRelation.FIXED, BatchRelation.MEAN})


def repetition_of(
    module: fx.GraphModule, batch_dims: Mapping[str, int | None], *, outputs: bool = False
) -> tuple[str, str]:
    """Whether rows may be repeated in a program of one microbatch, and in one of several.

    "" where results would depend on the number of rows. module: a prepared graph that was not
    divided. outputs: the user's outputs are results, too.
    """
    found = analyze(module, batch_dims)
    if outputs and not _fit(found):
        return "", ""
    loss = found.loss
    if loss is None:
        return (ROWS, ROWS) if not found.writers else ("", "")
    several = "" if found.kind(loss).coupled or found.writers else ROWS
    return _of_one(found, loss), several


def _fit(found: ObjectiveAnalysis) -> bool:
    """Whether outputs are rows, or the same for repeated rows."""
    given = found.graph.output_node().args[0]
    given = given[1:] if isinstance(given, (tuple, list)) else ()
    nodes = [node for node in given if isinstance(node, fx.Node)]
    kinds, live = [found.kind(node) for node in nodes], needed_for(nodes)
    plain = not any(node in live for node, _ in (*found.sizes, *found.conversions))
    plain = plain and not any(node in live for node in found.losses)
    plain = plain and not any(True for _ in total_reads(found, live))
    return plain and all(k.relation in _SAME | {BatchRelation.ROWS} for k in kinds)


def _of_one(found: ObjectiveAnalysis, loss: fx.Node) -> str:
    """For one microbatch, whose graph is as it was captured."""
    live = live_nodes(found)
    if any(node in live for node, _ in found.sizes) or not all(map(_is_same, _written(found))):
        return ""
    for node, operand in found.conversions:
        if node in live and unscaled(operand) not in found.losses:
            return ""
    root, reads = unscaled(loss), list(total_reads(found, live))
    divisor = divisor_of(found, root)
    if divisor is not None:
        inside = needed_for([root])
        alone = reads == [(root, divisor)] and not any(n in inside for n in found.losses)
        return DIVISOR if alone else ""
    if reads:
        return ""
    same = root in found.losses or found.kind(loss).relation in _SAME
    return ROWS if same else ""


def _written(found: ObjectiveAnalysis) -> list[Any]:
    """The kinds of what state is written with."""
    return [
        kind
        for writer in found.writers
        for operand in writer.all_input_nodes
        for kind in found.kinds.get(operand, ())
    ]


def _is_same(kind: Any) -> bool:
    return kind.relation in _SAME
