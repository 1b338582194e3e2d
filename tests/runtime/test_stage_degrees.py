"""Stages of different tensor degrees give the numbers of one process, in process and over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
import stage_degree_programs as programs
from oracles.joint_brute import solve_joint_brute
from ranks import Pool

from fxpart.errors import FxpartError
from fxpart.plan.model import Plan
from fxpart.planner.constraints import find_constraint_problems
from fxpart.runtime.mesh.mesh_ranks import build_rank_table, find_receivers
from fxpart.solver.joint.problem import JointProblem

# llama computes norms and rotary embeddings in float32.
LARGEST = {"llama": 1e-5, "gpt2": 1e-6}
CASES = [(name, tp) for name in ("gpt2", "llama", "t5", "unet") for tp in ("1|2", "2|1")]


@pytest.mark.parametrize(
    ("name", "tp"),
    [("dropouts", "1|2"), *(pytest.param(*case, marks=pytest.mark.long) for case in CASES)],
)
def test_steps_are_those_of_one_process(name: str, tp: str) -> None:
    """Losses, norms before clipping, gradients, evaluation and state; gpt2 and t5 have ties."""
    program = programs.compiled(name, tp)
    assert [str(s.tensor_parallel) for s in program.plan.stages] == tp.split("|")
    assert program.plan.runnable == () and program.plan.mesh == {"pipeline": 2}
    assert Plan.loads(program.plan.dumps()) == program.plan
    found = programs.steps(program)
    wanted = programs.steps(programs.compiled(name, "1"))
    assert programs.difference(found, wanted) < LARGEST.get(name, 1e-9)


@pytest.mark.slow
def test_three_ranks_over_gloo_and_a_checkpoint_of_another_layout(
    pool: Pool, tmp_path: Path
) -> None:
    saved = str(tmp_path)
    wanted = programs.train("shared_mlp", "1")
    for found in pool.run(programs.train, "shared_mlp", "1|2", saved, ranks=3, timeout=120):
        assert programs.difference(found, wanted) < 1e-9
    for degrees in ("1", "2|1"):
        last = programs.train("shared_mlp", degrees, "", saved)
        assert len(last["losses"]) == 1
        assert programs.difference(last["state"], wanted["state"]) < 1e-9


@pytest.mark.slow
@pytest.mark.long
def test_the_best_degrees_by_stage_are_found_and_train() -> None:
    """The default plan is the best of all choices, and no slower than a plan of fewer."""
    cluster = programs.one_fast_two_slow()
    found = programs.layers(cluster)
    plan, problem = found.plan, found.costed()
    assert isinstance(problem, JointProblem) and len({s.tensor_parallel for s in plan.stages}) == 2
    seconds = plan.prediction.step_seconds
    assert seconds == pytest.approx(solve_joint_brute(problem).objective, rel=1e-9)
    others = [found.replan(cluster, constraints={"tp": tp}, cost_model="roofline").plan
              for tp in (1, 2, 3, "1|2", "2|1")]  # fmt: skip
    times = [other.prediction.step_seconds for other in others]
    assert seconds == min(times) < 0.97 * min(times[:3])
    assert plan.alternatives[0].what == "equal tensor degrees"
    assert plan.alternatives[0].step_seconds == min(times[:3])
    # a fixed number of ranks is one of these plans' too, and forbidden decisions are kept to
    same = found.replan(cluster, constraints={"ranks": 3}, cost_model="roofline").plan
    assert same.stages == plan.stages
    equal = found.replan(cluster, constraints={"forbid": "tp=1"}, cost_model="roofline").plan
    assert len({s.tensor_parallel for s in equal.stages}) == 1
    wanted = programs.layers("local:1", microbatches=plan.microbatches)
    assert programs.difference(programs.steps(found), programs.steps(wanted)) < 1e-9


def test_each_rank_receives_a_value_once() -> None:
    table = build_rank_table(((0, 1), (2, 3, 4, 5)), 4, (2, 4))
    assert table == ((0, 0, 1, 1), (2, 3, 4, 5))
    assert [find_receivers(table, 0, 1, m) for m in (0, 2)] == [(2, 3), (4, 5)]
    assert [find_receivers(table, 1, 0, m) for m in range(4)] == [(0,), (), (1,), ()]
    assert [find_receivers(table, 1, 1, m) for m in range(4)] == [(2,), (3,), (4,), (5,)]
    assert build_rank_table(table, 4, (2, 4)) == table
    for wrong in ((), (4, 4)):
        with pytest.raises(FxpartError):
            build_rank_table(table, 4, wrong)


@pytest.mark.parametrize(
    "other",
    [{"tp": "2|2"}, {"tp": "2|4"}, {"tp": "1|2|4"}, {"stages": 3}, {"mesh": "tp=2"},
     {"mode": "async"}, {"zero": 1}, {"copies": "always"}, {"offload": "optimizer"}],
)  # fmt: skip
def test_what_these_stages_do_not_support_is_refused(other: dict[str, str | int]) -> None:
    (problem,) = find_constraint_problems({"tp": "1|2"} | other)
    assert problem.code == "FXP109" and "tp=" in problem.where
