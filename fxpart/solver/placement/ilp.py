"""The placement problem as a mixed-integer program for HiGHS, through OR-Tools' MathOpt.

For small graphs, and for those too wide for elimination. The model is the flow form: a binary for
each strategy, and for each edge a flow between the strategies of its ends; equality rows instead of
Alpa's inequalities, which take about twice the time. CP-SAT proves no useful bound here, because
its relaxation ignores the edges.
"""

from __future__ import annotations

import datetime
from math import inf

import numpy as np
from ortools.math_opt.python import mathopt
from ortools.math_opt.solvers import highs_pb2

from fxpart.solver.placement.lagrangian import PlacementRecord
from fxpart.solver.placement.problem import PlacementArrays
from fxpart.solver.work import work_seconds


def solve_highs(
    numbers: PlacementArrays,
    record: PlacementRecord,
    deadline: float,
    *,
    gap: float = 1e-7,
    relaxed: bool = False,
) -> float:
    """Add HiGHS's choice to ``record``; return a proven lower bound in seconds.

    The bound is infinite if nothing fits. deadline: a ``work_seconds()`` value. gap: relative gap
    at which it stops. relaxed: solve only the linear relaxation, for its bound. One thread, so that
    equal runs are equal unless the deadline interrupts them.
    """
    left = deadline - work_seconds()
    if left <= 0:
        return 0.0
    model, picks, scale = _model(numbers, record, relaxed)
    hints = [] if record.choice is None or relaxed else [_hint(picks, record.choice)]
    result = mathopt.solve(
        model,
        mathopt.SolverType.HIGHS,
        params=mathopt.SolveParameters(
            time_limit=datetime.timedelta(seconds=left),
            relative_gap_tolerance=None if relaxed else gap,
            # ``threads=`` is not supported for HiGHS (OR-Tools 9.15)
            highs=highs_pb2.HighsOptionsProto(int_options={"threads": 1}),
        ),
        model_params=mathopt.ModelSolveParameters(solution_hints=hints),
    )
    reason = result.termination.reason
    if reason == mathopt.TerminationReason.INFEASIBLE:
        return inf
    if result.has_primal_feasible_solution() and not relaxed:
        values = result.variable_values()
        choice = tuple(
            max(range(len(row)), key=lambda s, row=row: (values[row[s]], -s))  # type: ignore[misc]
            for row in picks
        )
        record.add(choice, "highs")
    bound = float(result.dual_bound())
    return max(0.0, bound / scale) if np.isfinite(bound) else 0.0


def _model(
    numbers: PlacementArrays, record: PlacementRecord, relaxed: bool
) -> tuple[mathopt.Model, list[list[mathopt.Variable]], float]:
    """Return the program, its strategy variables, and the scale of seconds."""
    problem = numbers.problem
    top = record.seconds if np.isfinite(record.seconds) else _most(numbers)
    scale = 1.0 / top if top > 0 else 1.0  # HiGHS's tolerances are absolute
    model = mathopt.Model(name="placement")
    binary = not relaxed
    picks = [[model.add_variable(lb=0, ub=1, is_integer=binary) for _ in range(n)]
             for n in numbers.sizes]  # fmt: skip
    terms = []
    for row, kind in zip(picks, problem.nodes, strict=True):
        model.add_linear_constraint(mathopt.fast_sum(row) == 1)
        terms += [float(c) * scale * x for c, x in zip(numbers.seconds[kind], row, strict=True)]
    for edge in problem.edges:
        matrix = numbers.matrices[edge.matrix]
        flows = [[model.add_variable(lb=0, ub=1) for _ in row] for row in matrix]
        for variable, flow in zip(picks[edge.source], flows, strict=True):
            model.add_linear_constraint(mathopt.fast_sum(flow) == variable)
        for variable, column in zip(picks[edge.target], zip(*flows, strict=True), strict=True):
            model.add_linear_constraint(mathopt.fast_sum(column) == variable)
        terms += [
            float(c) * scale * y
            for costs, flow in zip(matrix, flows, strict=True)
            for c, y in zip(costs, flow, strict=True)
            if c
        ]
    model.minimize(mathopt.fast_sum(terms))
    _limit(numbers, model, picks)
    return model, picks, scale


def _limit(
    numbers: PlacementArrays, model: mathopt.Model, picks: list[list[mathopt.Variable]]
) -> None:
    """Keep standing bytes, with the temporary ones of each point, below the budget.

    In units of the budget. A small tolerance is added, so that rounding excludes no feasible
    choice; choices are evaluated again by the objective.
    """
    problem = numbers.problem
    unit = max(problem.budget, 1.0)
    standing = mathopt.fast_sum([
        float(b) / unit * x
        for row, kind in zip(picks, problem.nodes, strict=True)
        for b, x in zip(numbers.standing[kind], row, strict=True)
    ])  # fmt: skip
    room = problem.budget / unit + 1e-9
    for point in problem.points or ((),):
        temporary = mathopt.fast_sum([
            float(b) / unit * x
            for v in point
            for b, x in zip(numbers.temporary[problem.nodes[v]], picks[v], strict=True)
        ])  # fmt: skip
        model.add_linear_constraint(standing + temporary <= room)


def _hint(picks: list[list[mathopt.Variable]], choice: tuple[int, ...]) -> mathopt.SolutionHint:
    return mathopt.SolutionHint(
        variable_values={
            x: float(s == chosen)
            for row, chosen in zip(picks, choice, strict=True)
            for s, x in enumerate(row)
        }
    )


def _most(numbers: PlacementArrays) -> float:
    """Return more seconds than any choice takes."""
    nodes = sum(float(numbers.seconds[k].max()) for k in numbers.problem.nodes)
    edges = sum(float(numbers.matrices[e.matrix].max()) for e in numbers.problem.edges)
    return nodes + edges
