"""Chains in other orders: the exact chain solver over several topological orders."""

from __future__ import annotations

from fxpart.solver.portfolio import solve
from fxpart.solver.problem import PartitionChoice, PartitionProblem
from fxpart.solver.stage_graph.block_graph import BlockGraph, members, regroup
from fxpart.solver.work import work_seconds


def list_topological_orders(
    problem: PartitionProblem, graph: BlockGraph
) -> tuple[tuple[int, ...], ...]:
    """Return distinct candidate topological orders; the captured one is the first.

    Branch by branch, the longest first and the longest last; and level by level, which puts pieces
    of several branches next to each other.
    """
    n = len(graph.before)
    one, kind = problem.variants[0], problem.devices[0].type
    work = [one.forward[kind][b] + one.backward[kind][b] for b in range(n)]
    level, weight = [0] * n, list(work)
    for b in range(n):
        level[b] = 1 + max((level[a] for a in members(graph.before[b])), default=-1)
        weight[b] += max((weight[a] for a in members(graph.before[b])), default=0.0)
    found = [tuple(range(n)), tuple(sorted(range(n), key=lambda b: (level[b], b)))]
    for sign in (1, -1):
        done: dict[int, None] = {}

        def visit(block: int, sign: int = sign, done: dict[int, None] = done) -> None:
            stack = [block]
            while stack:
                b = stack[-1]
                left = [a for a in members(graph.before[b]) if a not in done]
                if left:
                    stack.append(min(left, key=lambda a: (sign * weight[a], a)))
                else:
                    done.setdefault(stack.pop())

        ends = [b for b in range(n) if not graph.after[b]]
        for end in sorted(ends, key=lambda b: (sign * weight[b], b)):
            visit(end)
        found.append(tuple(done))
    return tuple(dict.fromkeys(found))


def solve_chains(
    problem: PartitionProblem, graph: BlockGraph, deadline: float, seed: int
) -> list[tuple[PartitionChoice, tuple[int, ...]]]:
    """Yield the best chains over each order, and the order; the time until ``deadline`` is shared.

    deadline: a ``work_seconds()`` value.
    """
    found: list[tuple[PartitionChoice, tuple[int, ...]]] = []
    tried = list_topological_orders(problem, graph)
    for index, order in enumerate(tried):
        left = (deadline - work_seconds()) / (len(tried) - index)
        if left <= 0:
            break
        moved = problem if index == 0 else regroup(problem, [(b,) for b in order])
        solution = solve(moved, time_limit=left, seed=seed)
        found += [(choice, order) for choice in solution.candidates]
    return found
