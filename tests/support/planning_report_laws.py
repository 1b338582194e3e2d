"""Laws of what is printed of a plan: explanation, report and what-if agree with its JSON."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator
from math import inf

import msgspec
from figures_by_hand import recomputed
from figures_in_text import agree, check_text
from msgspec.structs import replace
from pages import Page
from planning_cases import PlanningCase, with_devices
from planning_outcomes import EXACT, NEVER, NothingToCheckError, Outcome

from fxpart import FxpartError, Plan, units
from fxpart.planner.degrees import build_joint_problem
from fxpart.planner.whatif import WhatIfChange, list_unpriced, solve_whatif
from fxpart.report.explanation_builder import explanation
from fxpart.report.explanation_text import explain
from fxpart.report.html import report_html
from fxpart.solver.joint.portfolio import solve


def printed_numbers(case: PlanningCase, base: Outcome, rng: random.Random) -> Iterator[str]:
    """Every number of the explanation follows from the plan's JSON; text and page show the same."""
    plan = base.plan
    if plan is None or plan.replicas or plan.staleness:
        raise NothingToCheckError
    wanted = recomputed(json.loads(plan.dumps()))
    try:
        agree(json.loads(msgspec.json.encode(explanation(plan))), wanted)
        check_text(explain(plan), plan, wanted)
    except AssertionError as fault:
        first = str(fault).partition("\n")[0]
        yield f"explain: {first}: {base}"
    yield from _find_missing(Page(report_html(plan)), plan)
    yield from _find_better(plan)


def _find_better(plan: Plan) -> Iterator[str]:
    """Yield rejected choices that are faster than the plan, and are not said to be unpriced."""
    given = plan.degrees or plan.certificate
    for other in (*plan.alternatives, *plan.changes):
        if other.step_seconds is None or "estimate of each block" not in other.why:
            faster = (other.step_seconds or inf) < plan.prediction.step_seconds * (1 - 1e-6)
            if faster or "time limit" in other.why:
                yield f"{other.what} is faster: {other.why}"
        elif given.status == "optimal":
            yield f"the plan is {given.status} although {other.what} is {other.why}"


def _find_missing(page: Page, plan: Plan) -> Iterator[str]:
    """Yield the times and sizes of a plan that its report does not show."""
    words = " ".join(page.words)
    prediction, certificate = plan.prediction, plan.certificate
    shown = {
        units.seconds(prediction.expected_seconds),
        units.seconds(certificate.objective),
        units.seconds(certificate.lower_bound),
        *(units.seconds(rank.forward_seconds) for rank in prediction.ranks),
        *(units.seconds(rank.backward_seconds) for rank in prediction.ranks),
        *(units.size(rank.memory.total) for rank in prediction.ranks),
    }
    for text in sorted(shown):
        if text not in words:
            yield f"the report does not show {text}: {words[:200]}"


def what_if(case: PlanningCase, base: Outcome, rng: random.Random) -> Iterator[str]:
    """An estimate after a change is that of the changed cluster, or names what was not priced."""
    if base.plan is None or case.constraints:
        raise NothingToCheckError
    program = base.program
    assert program is not None, "the outcome of a plan has its program"
    problem, plan, cluster = program.costed(), program.plan, case.cluster
    if problem.worst:
        assert list_unpriced(problem, plan, WhatIfChange())
        return
    factor = rng.choice((0.5, 0.8, 1.5, 3.0))
    devices, links = cluster.devices, cluster.links
    larger = tuple(replace(d, memory=int(d.memory * factor)) for d in devices)
    faster = tuple(replace(link, bandwidth=link.bandwidth * factor) for link in links)
    changes = [
        (WhatIfChange(memory=factor), with_devices(cluster, larger)),
        (WhatIfChange(bandwidth=factor), replace(cluster, links=faster)),
    ]
    if len(problem.pools) == 1 and len(devices) > 1:
        fewer = cluster.part(range(len(devices) - 1))
        changes.append((WhatIfChange(devices=str(len(devices) - 1)), fewer))
    for change, other in changes:
        try:
            found = solve_whatif(problem, plan, change)
        except FxpartError as fault:
            if {each.code for each in fault.problems} != {"FXP109"}:
                raise
            continue
        if found.before.seconds <= 0 or found.unpriced:
            continue
        request = dataclasses.replace(program.request, cluster=other)
        wanted = build_joint_problem(program.prepared, program.captured, request, None)[0]
        again = solve(wanted).objective
        here = NEVER if found.after is None else found.after.seconds
        if not (here == again or abs(here - again) <= EXACT * again):
            yield f"{change}: {here} beside {again} of the changed cluster: {base}"
