"""Expert parallelism: mixtures whose experts are distributed over the data-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import gcd
from typing import TYPE_CHECKING

from torch import fx

from fxpart.annotations.entry_syntax import AnnotationKey, read_placements
from fxpart.compiler.mixture_ops import Mixture, list_mixtures
from fxpart.errors import FxpartError, error
from fxpart.plan.constraint_table import DATA_AXIS, SHARD_AXIS
from fxpart.solver.joint.constraints.parse import parse_constraints

if TYPE_CHECKING:
    from fxpart.planner.request import PlanRequest


def shard_experts(graph: fx.Graph) -> dict[str, str]:
    """Return annotations that shard the weights of all mixtures over the data axis, by expert."""
    return {name: f"{DATA_AXIS}:S(0)" for one in list_mixtures(graph) for name in one.weights}


def list_expert_choices(
    graph: fx.Graph, request: PlanRequest, given: Mapping[str, str]
) -> tuple[bool, ...]:
    """Return whether experts may be replicated (False) and distributed (True) on a given mesh.

    They are distributed over the data axis of a synchronous plan, if the constraint ep allows it
    and neither an axis ep, hybrid sharding nor the user's annotations (``given``) decide it. FXP202
    where ep requires to distribute them and they cannot be.
    """
    axes = dict(request.mesh.axes)
    ranks = 1 if {"ep", SHARD_AXIS} & {*axes} else axes.get(DATA_AXIS, 1)
    mixtures = list_mixtures(graph)
    even = mixtures and gcd(*(one.experts for one in mixtures)) % ranks == 0
    names = [name for one in mixtures for name in one.weights]
    wanted = [one for one in parse_constraints(request.constraints) if one.key == "ep"]
    if ranks == 1 or request.mode != "sync" or is_annotated_by_expert(given, names):
        return (False,)
    if not even:
        if any(one.kind == "fix" and "1" not in one.values for one in wanted):
            raise _explain_undivided(mixtures, ranks)
        return (False,)
    found = [False, True]
    for constraint in wanted:
        values = constraint.values or (str(ranks),)
        found = [
            e for e in found if (str(ranks if e else 1) in values) == (constraint.kind == "fix")
        ]
    return tuple(found) or (False,)


def _explain_undivided(mixtures: Sequence[Mixture], ranks: int) -> FxpartError:
    """Return FXP202 for experts that cannot be distributed over the data-parallel ranks."""
    counts = " and ".join(str(n) for n in sorted({one.experts for one in mixtures}))
    return error(
        "FXP202",
        where=f"constraint ep={ranks}",
        why=f"{ranks} ranks do not divide {counts} experts"
        if mixtures
        else "the captured model has no mixture of experts in a form that can be distributed: "
        "grouped products over the weights of all experts, as in transformers with "
        "experts_implementation='grouped_mm'",
        fix="remove ep, or use a number of ranks that divides the experts"
        if mixtures
        else "remove ep, or use grouped products",
    )


def is_annotated_by_expert(given: Mapping[str, str], names: Iterable[str]) -> bool:
    """Return whether annotations place one of these parameters on the data axis, or all values."""
    keys = [(AnnotationKey.parse(text), placements) for text, placements in given.items()]
    placed = [
        key
        for key, placements in keys
        if key.kind == "state" and DATA_AXIS in read_placements(placements)
    ]
    return any(key.matches(name) for name in names for key in placed)
