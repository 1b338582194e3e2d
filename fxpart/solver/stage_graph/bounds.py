"""A cheap lower bound on every graph of stages: no search, no tables."""

from __future__ import annotations

from math import fsum

from fxpart.solver.bounds import cheap_bound
from fxpart.solver.problem import PartitionProblem
from fxpart.solver.stage_graph.block_graph import BlockGraph, members

_ROUNDING = 1e-12  # relative; the parts below are rounded sums


def branch_bound(problem: PartitionProblem, variant: int, graph: BlockGraph) -> float:
    """Seconds that no acyclic graph of stages of ``variant`` falls below.

    The longest path of stages takes at least as long as the longest path of blocks, each on its
    fastest device; the longest load is bounded as in a chain (work over speed, largest unit).
    """
    one = problem.variants[variant]
    kinds = sorted({d.type for d in problem.devices[: problem.max_stages]})
    rows = [[f + b for f, b in zip(one.forward[k], one.backward[k], strict=True)] for k in kinds]
    fastest = [min(costs) for costs in zip(*rows, strict=True)]
    tail = list(fastest)
    for b in reversed(range(len(fastest))):
        tail[b] += max((tail[c] for c in members(graph.after[b])), default=0.0)
    load = max(0.0, cheap_bound(problem, variant) - fsum(fastest))
    path: float = max(tail)
    return (path + load + problem.once) * (1 - _ROUNDING)
