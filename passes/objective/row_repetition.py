"""Whether the rows of a batch may be repeated, so that they divide over ranks.

A mean over rows does not change if each row is repeated, and neither does its gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from .analysis import ObjectiveAnalysis, analyze
from .batch_weight import divisor_of, unscaled
from .microbatch_rewrite import live_nodes, needed_for, total_reads
from .value_kinds import BatchRelation

REPEAT_KEY = "fxpart_repeated_rows"  # a captured graph: results for one microbatch, and for several
ROWS = "rows"  # repetition does not change results
DIVISOR = "divisor"  # results do not change if the divisor of the loss scales too
_SAME = frozenset({BatchRelation.FIXED, BatchRelation.MEAN})


def repetition_of(
    module: fx.GraphModule, batch_dims: Mapping[str, int | None], *, outputs: bool = False
) -> tuple[str, str]:
    """Return whether rows may be repeated, for one microbatch and for several.

    "" if results would depend on the number of rows. module: a prepared, undivided graph. outputs:
    the user's outputs also count as results.
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
    """Return whether outputs are rows, or unchanged for repeated rows."""
    given = found.graph.output_node().args[0]
    given = given[1:] if isinstance(given, (tuple, list)) else ()
    nodes = [node for node in given if isinstance(node, fx.Node)]
    kinds, live = [found.kind(node) for node in nodes], needed_for(nodes)
    plain = not any(node in live for node, _ in (*found.sizes, *found.conversions))
    plain = plain and not any(node in live for node in found.losses)
    plain = plain and not any(True for _ in total_reads(found, live))
    return plain and all(k.relation in _SAME | {BatchRelation.ROWS} for k in kinds)


def _of_one(found: ObjectiveAnalysis, loss: fx.Node) -> str:
    """Return the result for one microbatch, whose graph is as captured."""
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
    """Return the kinds of the values written to state."""
    return [
        kind
        for writer in found.writers
        for operand in writer.all_input_nodes
        for kind in found.kinds.get(operand, ())
    ]


def _is_same(kind: Any) -> bool:
    return kind.relation in _SAME
