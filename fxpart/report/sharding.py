"""How the ranks of a stage share its work, in words: the whole, and where one placement is from."""

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
    """The mesh, what its degrees do, and ZeRO, in one line; "" where a stage is one rank."""
    given, stage = plan.sharding, plan.stages[0]
    if given is None:
        return ""
    parts = [f"mesh {given.mesh}: {units.plural(len(stage.ranks), 'rank')} a stage"]
    if stage.data_parallel > 1:
        parts.append(f"batch in {stage.data_parallel} parts")
    if stage.tensor_parallel > 1:
        parts.append(f"{stage.tensor_parallel} ranks share each op")
    if given.zero:
        what = ("optimizer state", "optimizer state and gradients", "parameters too")[
            given.zero - 1
        ]
        parts.append(f"ZeRO {given.zero} over {given.zero_axis} ({what})")
    return ", ".join(parts)


def rows(given: PlanSharding) -> list[tuple[str, str, str, str]]:
    """Kind, placements, how many, names: inputs and weights by placement, ops by strategy."""
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
    """An entry's placements or, of an op, what each axis cuts, as text."""
    return " -> ".join(filter(None, (entry.strategy, entry.placements))) or "replicated"


def lines(plan: Plan) -> list[str]:
    """The section of `fxpart explain`; empty where a stage is one rank."""
    given = plan.sharding
    if given is None:
        return []
    found = rows(given)
    result = [
        "Sharding (what is not named is replicated; `fxpart explain PLAN NAME` says why)",
        *("  " + line for line in table(("", "how", "", "names"), "<<><", found[:SHOWN])),
    ]
    if len(found) > SHOWN:
        result.append(f"  and {units.plural(len(found) - SHOWN, 'other placement')}")
    if given.unruled:
        listed = ", ".join(f"{name} ({count})" for name, count in sorted(given.unruled.items()))
        result.append(f"  Computed whole by every rank, for want of a rule: {listed}")
    if given.certificate is not None:
        result.append(f"  {describe_certificate(given.certificate)}")
    return result


def describe_certificate(given: Certificate) -> str:
    """The certificate of the placements that annotations left open, as a sentence."""
    cost, bound = units.seconds(given.objective), units.seconds(given.lower_bound)
    what = f"The solver chose {given.over}" if given.over else "The solver chose what was open"
    if given.status == "optimal":
        return f"{what}: {cost}, and no choice takes less (by {given.solver})."
    return f"{what}: {cost}, and none takes less than {bound} (by {given.solver})."


def explain_placement(plan: Plan, name: str) -> str:
    """Where the placements of an input, weight or op of the plan come from, by axis.

    FXP109 where the plan says nothing of such a name.
    """
    given = plan.sharding
    if given is None:
        raise error(
            "FXP109",
            where=f"explain {name}",
            why="each stage of the plan is one rank, so that nothing is sharded",
            fix='plan with a mesh: fxpart plan TARGET --mesh "dp=2,tp=2"',
        )
    found = [entry for entry in given.placed if name in entry.names]
    if not found:
        known = sorted({n for entry in given.placed for n in entry.names})
        near = difflib.get_close_matches(name, known, 3) or known[:3]
        raise error(
            "FXP109",
            where=f"explain {name}",
            why="the plan says nothing of it: it does not exist, or is replicated by default",
            fix=f"for example {', '.join(near)}" if near else "nothing in this plan is sharded",
        )
    parts = []
    for entry in found:
        parts.append(f"{KINDS[entry.kind]} {name}: {how(entry)}")
        parts += [f"  {axis}  {origin}" for axis, origin in entry.origins.items()]
    return "\n".join(parts)
