"""Plans of joint problems for tests: a cluster with the problem's pools, and a solved choice."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from fxpart.cluster.devices import Device, Link
from fxpart.cluster.model import Cluster
from fxpart.plan.model import Plan, PlanModel
from fxpart.planner.joint_plan_builder import make_joint_plan
from fxpart.solver.joint.portfolio import solve
from fxpart.solver.joint.problem import JointProblem, JointSolution


def cluster_of(problem: JointProblem, turns: bool = True) -> Cluster:
    """Devices of the problem's pools, by turns or one pool after another."""
    names = [
        (position if turns else 0, pool.name, pool.memory)
        for pool in problem.pools
        for position in range(pool.devices)
    ]
    order = sorted(names, key=lambda name: name[0]) if turns else names
    return Cluster(
        name="mixed",
        devices=tuple(
            Device(
                name=f"host{i // 8}/gpu:{i}", kind="gpu", model=name, host=f"host{i // 8}",
                memory=memory, flops={"float32": 1e12}, bandwidth=1e12, source="formula",
            )
            for i, (_, name, memory) in enumerate(order)
        ),
        links=(Link(source="*", target="*", latency=1e-5, bandwidth=4e9, kind="net"),),
    )  # fmt: skip


def model_of(problem: JointProblem) -> PlanModel:
    """A model with as many blocks."""
    return PlanModel(
        name="model", fingerprint="0" * 64, capture="export", batch="symbolic",
        nodes=10 * len(problem.blocks), blocks=len(problem.blocks), parameters=10**9,
        parameter_bytes=4 * 10**9, inputs=(),
    )  # fmt: skip


def plan_of(
    problem: JointProblem,
    solution: JointSolution,
    placed: Sequence[Sequence[int]] | None = None,
    turns: bool = True,
) -> Plan:
    """The plan of a solution on a cluster of the problem's pools."""
    return make_joint_plan(
        model_of(problem), cluster_of(problem, turns), problem, solution,
        batch_size=problem.batch, optimizer="adamw", seed=0,
        provenance={"compute": "formula"}, constraints={"time_limit": 5.0}, placed=placed,
        parameters=[100 + b for b in range(len(problem.blocks))],
    )  # fmt: skip


@cache
def solved(seed: int) -> tuple[JointProblem, JointSolution, Plan] | None:
    """A random problem that has a plan, or None."""
    import joint_problems

    problem = joint_problems.random_problem(seed)
    solution = solve(problem, time_limit=10.0)
    if solution.choice is None:
        return None
    return problem, solution, plan_of(problem, solution)
