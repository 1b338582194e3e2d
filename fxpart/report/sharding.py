"""The sharding of a plan as text, and the origin of one placement."""

from __future__ import annotations

import difflib
from collections import Counter

from fxpart import units
from fxpart.errors import error
from fxpart.plan.model import Certificate, Plan, PlanPlacement, PlanSharding
from fxpart.report.table import shortened, table

SHOWN = 12  # kinds of placement in the summary
KINDS = {"input": "input", "state": "weight", "op": "op"}


def headline(plan: Plan) -> str:
    """Return mesh, degrees and ZeRO in one line; "" where each stage has one rank."""
    given, stage = plan.sharding, max(plan.stages, key=lambda stage: len(stage.ranks))
    if given is None:
        return ""
    counts = list(dict.fromkeys(len(each.ranks) for each in plan.stages))
    several = f"{' or '.join(map(str, sorted(counts)))} ranks"
    ranks = several if len(counts) > 1 else units.plural(counts[0], "rank")
    parts = [f"mesh {given.mesh}: {ranks} per stage"]
    if stage.data_parallel > 1:
        parts.append(f"{stage.data_parallel} data-parallel")
    if stage.tensor_parallel > 1:
        parts.append(f"{stage.tensor_parallel} tensor-parallel")
    if stage.context_parallel > 1:
        parts.append(f"{stage.context_parallel} context-parallel")
    if given.zero:
        what = ("optimizer state", "optimizer state and gradients", "parameters")[given.zero - 1]
        copies = stage.data_parallel // stage.shard_degree if stage.shard_degree else 1
        more = f", {copies} replicas" if copies > 1 else ""
        parts.append(f"ZeRO {given.zero} over {given.zero_axis} ({what}{more})")
    return ", ".join(parts)


def rows(given: PlanSharding) -> list[tuple[str, str, str, str]]:
    """Return kind, placements, count and names of inputs, weights and ops, by placement."""
    counts: Counter[tuple[str, str]] = Counter()
    names: dict[tuple[str, str], list[str]] = {}
    for entry in given.placed:
        key = (KINDS[entry.kind], how(entry))
        counts[key] += len(entry.names)
        names.setdefault(key, []).extend(entry.names)
    order = {kind: index for index, kind in enumerate(KINDS.values())}
    listed = sorted(counts, key=lambda key: (order[key[0]], -counts[key], key))
    return [
        (kind, text, str(counts[kind, text]), shortened(", ".join(names[kind, text]), 60))
        for kind, text in listed
    ]


def how(entry: PlanPlacement) -> str:
    """Return the placements of an entry; of an op, the factors that each axis shards."""
    return " -> ".join(filter(None, (entry.strategy, entry.placements))) or "replicated"


def lines(plan: Plan) -> list[str]:
    """Return the section of `fxpart explain`; empty where each stage has one rank."""
    given = plan.sharding
    if given is None:
        return []
    found = rows(given)
    result = [
        "Sharding (all else is replicated; `fxpart explain PLAN NAME` explains a placement)",
        *("  " + line for line in table(("", "placement", "", "names"), "<<><", found[:SHOWN])),
    ]
    if len(found) > SHOWN:
        result.append(f"  and {units.plural(len(found) - SHOWN, 'other placement')}")
    if given.unruled:
        listed = ", ".join(f"{name} ({count})" for name, count in sorted(given.unruled.items()))
        result.append(f"  Replicated on every rank, without a sharding rule: {listed}")
    if given.certificate is not None:
        result.append(f"  {describe_certificate(given.certificate)}")
    return result


def describe_certificate(given: Certificate) -> str:
    """Return the certificate of the placements that the solver chose, as a sentence."""
    cost, bound = units.seconds(given.objective), units.seconds(given.lower_bound)
    what = f"The solver chose {given.over or 'the open placements'}"
    if given.status == "optimal":
        return f"{what}: optimal, objective {cost} (by {given.solver})."
    return f"{what}: objective {cost}, lower bound {bound} (by {given.solver})."


def explain_placement(plan: Plan, name: str) -> str:
    """Return the origin of the placements of an input, weight or op, by mesh axis.

    Raises FXP109 for a name without placements in the plan.
    """
    given = plan.sharding
    if given is None:
        raise error(
            "FXP109",
            where=f"explain {name}",
            why="each stage of the plan has one rank, and nothing is sharded",
            fix='plan with a mesh: fxpart plan TARGET --mesh "dp=2,tp=2"',
        )
    found = [entry for entry in given.placed if name in entry.names]
    if not found:
        known = sorted({n for entry in given.placed for n in entry.names})
        near = difflib.get_close_matches(name, known, 3) or known[:3]
        raise error(
            "FXP109",
            where=f"explain {name}",
            why="the plan has no placement of this name: it is replicated, or does not exist",
            fix=f"for example {', '.join(near)}" if near else "nothing in this plan is sharded",
        )
    parts = []
    for entry in found:
        parts.append(f"{KINDS[entry.kind]} {name}: {how(entry)}")
        parts += [f"  {axis}  {origin}" for axis, origin in entry.origins.items()]
    return "\n".join(parts)
