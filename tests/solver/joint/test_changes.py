"""What would be if: the changed problem against the same problem made so from the start."""

from __future__ import annotations

import pytest
from joint_problems import make, random_problem, transformer
from msgspec.structs import replace

from fxpart.errors import FxpartError
from fxpart.solver.archive import decode_joint_problem, encode, get_problem_path
from fxpart.solver.joint.objective import evaluate
from fxpart.solver.joint.problem import JointChoice, JointProblem, LinearCost, Pool
from fxpart.solver.joint.what_if import (
    between,
    with_devices,
    with_links,
    with_memory,
    with_microbatches,
)


def small(*, inverse: float = 0.01, counts: tuple[int, ...] = (1, 2, 4, 8)) -> JointProblem:
    """Six blocks, four devices, replicas and ZeRO, linear in rows but for a fixed overhead."""
    return make(
        forward=[[1.0, 2.0]],
        kinds=(0, 1, 1, 1, 1, 0),
        batch=16,
        microbatches=counts,
        pools=[Pool(name="gpu", devices=4, memory=10**6, host=4,
                    transfer=LinearCost(latency=0.1, inverse=inverse))],
        degrees=[(0, 1, 1, 0, "none"), (0, 2, 1, 0, "none"), (0, 2, 1, 1, "none")],
        weight=[50, 100], activation=[10, 20], workspace=[1, 2], row_bytes=6,
        overhead=0.3, max_stages=4,
    )  # fmt: skip


CHOICE = JointChoice(microbatches=4, schedule="1f1b", starts=(0, 3), options=(2, 1))


@pytest.mark.parametrize("factor", [0.25, 0.5, 2.0])
def test_bandwidth_is_that_of_a_cluster_made_so(factor: float) -> None:
    """No collectives inside blocks here, so that the change is exact."""
    slower = with_links(small(), bandwidth=factor)
    assert evaluate(slower, CHOICE) == evaluate(small(inverse=0.01 / factor), CHOICE)


def test_collectives_inside_blocks_scale_too() -> None:
    problem = transformer(4, [16], batch=64)
    index = next(i for i, o in enumerate(problem.options) if problem.layouts[o.layout].tensor == 8)
    choice = JointChoice(microbatches=8, schedule="1f1b", starts=(0,), options=(index,))
    before = evaluate(problem, choice).stages[0]
    after = evaluate(with_links(problem, bandwidth=0.5), choice).stages[0]
    assert after.collective_seconds == pytest.approx(2 * before.collective_seconds)
    grown = after.forward_seconds + after.backward_seconds
    grown -= before.forward_seconds + before.backward_seconds
    assert grown == pytest.approx(before.collective_seconds)


def test_priced_counts_of_microbatches_stay_as_they_are() -> None:
    problem = small()
    assert with_microbatches(problem, problem.microbatches) == problem


@pytest.mark.parametrize("count", [1, 3, 5, 16])
def test_other_counts_lie_on_the_line(count: int) -> None:
    """Costs here are a straight line in rows: what was never priced comes out right."""
    guessed = with_microbatches(small(counts=(2, 4, 8)), (count,))
    known = small(counts=(count,))
    for option in (0, 1) if count < 16 else (0,):  # 16 of 16 rows leave nothing to share
        one = JointChoice(microbatches=count, schedule="1f1b", starts=(0,), options=(option,))
        assert evaluate(guessed, one).seconds == pytest.approx(evaluate(known, one).seconds)
        assert evaluate(guessed, one).stages[0].memory == evaluate(known, one).stages[0].memory


def test_one_work_alone_is_taken_in_proportion() -> None:
    work = small(counts=(4,)).works[0]
    twice = between([work], 2 * work.rows)
    assert twice.forward == pytest.approx([2 * f for f in work.forward])
    assert between([work], work.rows).forward == pytest.approx(work.forward)


def test_devices_and_memory() -> None:
    problem = small()
    fewer = with_devices(problem, [2])
    assert fewer.pools[0].devices == 2 and fewer.max_stages == 2
    assert evaluate(fewer, CHOICE).faults == ("4 devices of gpu, available are 2",)
    assert with_devices(problem, [6]).max_stages == 6
    assert with_memory(problem, 0.5).pools[0].memory == problem.pools[0].memory // 2
    for counts in ([0], [-1]):
        with pytest.raises(FxpartError, match="FXP109"):
            with_devices(problem, counts)
    for wrong in ((), (0,), (17,)):
        with pytest.raises(FxpartError, match="FXP109"):
            with_microbatches(problem, wrong)


def test_a_problem_in_its_file_is_the_problem() -> None:
    for seed in range(20):
        problem = random_problem(seed)
        assert decode_joint_problem(encode(problem)) == problem
        assert encode(decode_joint_problem(encode(problem))) == encode(problem)
    assert str(get_problem_path("runs/plan.json")).endswith("plan.problem.json")


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"blocks": 3}', b"\xff", b"[" * 100_000])
def test_a_file_that_is_no_problem(data: bytes) -> None:
    with pytest.raises(FxpartError, match="FXP206"):
        decode_joint_problem(data)


def test_a_problem_whose_numbers_are_wrong() -> None:
    broken = replace(small(), kinds=(0, 1, 1, 1, 1, 7))
    with pytest.raises(FxpartError, match="FXP206"):
        decode_joint_problem(encode(broken))
