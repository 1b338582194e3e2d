"""Storages kept by more than one block: every solver agrees with enumeration on what they cost."""

from __future__ import annotations

import random

import msgspec
import pytest
from partition_problems import random_problem

from fxpart.solver.brute import solve_brute
from fxpart.solver.objective import evaluate
from fxpart.solver.portfolio import solve
from fxpart.solver.problem import (
    Choice,
    DeviceLimit,
    Kept,
    PartitionProblem,
    Value,
    Variant,
)


def with_kept(seed: int) -> PartitionProblem:
    problem, r = random_problem(seed), random.Random(seed)
    blocks = len(problem.blocks)
    if blocks < 2:
        return problem
    kept = []
    for _ in range(r.randint(1, 2 * blocks)):
        producer = r.randrange(blocks - 1)
        kept.append(Kept(producer=producer, user=r.randrange(producer + 1, blocks)))
    variants = tuple(
        msgspec.structs.replace(v, kept_bytes=tuple(r.randint(0, 30) for _ in kept))
        for v in problem.variants
    )
    return msgspec.structs.replace(problem, kept=tuple(kept), variants=variants)


@pytest.mark.slow
@pytest.mark.parametrize(("solver", "count"), [("dp", 150), ("cp-sat", 60)])
def test_solvers_equal_enumeration(solver: str, count: int) -> None:
    tight = 0
    for seed in range(count):
        problem = with_kept(seed)
        best, found = solve_brute(problem), solve(problem, time_limit=20, solver=solver)
        assert (best.choice is None) == (found.choice is None), seed
        if best.choice is not None:
            assert found.objective == pytest.approx(best.objective, rel=1e-9), seed
        free = msgspec.structs.replace(
            problem,
            variants=tuple(
                msgspec.structs.replace(v, kept_bytes=(0,) * len(problem.kept))
                for v in problem.variants
            ),
        )
        tight += solve_brute(free).objective < best.objective
    assert tight > 1, "kept storages decided nothing: the test is too weak"


def test_counted_once_a_stage_and_received_elsewhere() -> None:
    """Block 0 makes 100 bytes that blocks 1 and 2 save."""
    device = DeviceLimit(name="d", type=0, memory=10**6, latency=0.0, inverse_bandwidth=0.0)
    problem = PartitionProblem(
        blocks=("a", "b", "c"),
        devices=(device,) * 3,
        values=(Value(producer=0, consumers=(1, 2), gradient=True),),
        weights=(),
        variants=(
            Variant(
                microbatch_size=1,
                microbatches=1,
                forward=((1.0,) * 3,),
                backward=((1.0,) * 3,),
                activation=(0, 0, 0),
                workspace=(0, 0, 0),
                value_bytes=(100,),
                kept_bytes=(100,),
            ),
        ),
        step=((0.0,) * 3,),
        max_stages=3,
        kept=(Kept(producer=0, user=1),),
    )

    def held(*starts: int) -> list[tuple[int, int]]:
        choice = Choice(variant=0, schedule="1f1b", starts=starts)
        memory = [stage.memory for stage in evaluate(problem, choice).stages]
        return [(m.activations, m.transfers) for m in memory]

    assert held(0) == [(100, 0)]
    assert held(0, 2) == [(100, 0), (0, 100)]
    assert held(0, 1) == [(0, 0), (0, 100)]
    assert held(0, 1, 2) == [(0, 0), (0, 100), (0, 100)]
