"""Why nothing fits a joint problem: what is named is true, what is offered works."""

from __future__ import annotations

import re
from math import inf

import pytest
from joint_oracle import small_problems
from joint_problems import transformer
from msgspec.structs import replace
from oracles.joint_brute import solve_joint_brute

from fxpart.solver.joint.constraint_conflicts import RelaxableConstraints, with_unlimited_memory
from fxpart.solver.joint.constraints.apply import apply_constraints
from fxpart.solver.joint.constraints.parse import PlanConstraint, parse_constraint
from fxpart.solver.joint.enumeration import choices
from fxpart.solver.joint.feasibility import find_feasible_joint_choice
from fxpart.solver.joint.infeasible import explain_joint_infeasible
from fxpart.solver.joint.memory_bounds import compute_min_state_bytes, list_min_unit_bytes
from fxpart.solver.joint.objective import JointEvaluation, JointScorer, evaluate
from fxpart.solver.joint.problem import JointProblem, StagePin
from fxpart.solver.joint.remedies import (
    extra_memory,
    more_devices,
    more_microbatches,
    with_more,
)
from fxpart.solver.joint.what_if import with_devices
from fxpart.solver.offload import with_offload
from fxpart.solver.remedies import find_least_sufficient, format_byte_count


def fits(problem: JointProblem) -> bool:
    return solve_joint_brute(problem).choice is not None


def infeasible(count: int, *, memory: bool) -> list[tuple[int, JointProblem]]:
    """Random problems that nothing fits, for memory alone or whatever the memory."""
    found = list[tuple[int, JointProblem]]()
    for seed, problem in small_problems(10**6, most=1500):
        if not fits(problem) and fits(with_unlimited_memory(problem)) == memory:
            found.append((seed, problem))
        if len(found) == count:
            break
    return found


@pytest.mark.slow
def test_the_memory_offered_is_the_least_that_is_enough() -> None:
    for seed, problem in infeasible(25, memory=True):
        found = extra_memory(problem, inf)
        assert found is not None
        more, choice = found
        step = max(max(pool.memory for pool in problem.pools) // 1000, 1)
        assert evaluate(with_more(problem, more), choice).feasible, seed
        assert not fits(with_more(problem, more - step)), seed


@pytest.mark.slow
def test_conflicts_hold_no_limit_too_many() -> None:
    """Dropping all but the conflict changes nothing; dropping any one of it as well does."""
    named = 0
    for seed, problem in [*infeasible(25, memory=True), *infeasible(15, memory=False)]:
        limits = RelaxableConstraints(problem, None, ())
        blamed = limits.conflict(inf)
        rest = [i for i in range(len(limits.texts)) if i not in blamed]
        alone = limits.problem(rest)
        assert alone is not None
        assert not fits(alone), seed
        for i in blamed:
            without = limits.problem([*rest, i])
            assert without is not None
            assert fits(without), (seed, limits.texts[i])
        named += bool(blamed)
    assert named > 5


@pytest.mark.slow
def test_devices_and_microbatches_offered_are_the_fewest_that_are_enough() -> None:
    devices = microbatches = 0
    for seed, problem in infeasible(40, memory=True):
        limits = RelaxableConstraints(problem, None, ())

        def find(
            changed: JointProblem, limits: RelaxableConstraints = limits
        ) -> JointEvaluation | None:
            return limits.find(inf, (), lambda _: changed)

        for _, larger in more_devices(find, problem):
            counts = [pool.devices for pool in larger.pools]
            (grown,) = (k for k, pool in enumerate(problem.pools) if pool.devices != counts[k])
            fewer = [c - (k == grown) for k, c in enumerate(counts)]
            fixed = problem.min_stages == problem.max_stages

            def after(counts: list[int], p: JointProblem = problem, fixed: bool = fixed) -> bool:
                changed = with_devices(p, counts)
                return fits(replace(changed, max_stages=p.max_stages) if fixed else changed)

            assert after(counts), seed
            assert not after(fewer), seed
            devices += 1
        for _, smaller in more_microbatches(problem):
            found = find(smaller)
            assert (found is not None) == fits(limits.problem((), lambda _, p=smaller: p)), seed  # type: ignore[misc,arg-type]
            microbatches += found is not None
    assert devices > 5
    assert microbatches > 2


@pytest.mark.slow
def test_what_is_called_certain_is() -> None:
    """No choice takes less state than the least, nor puts a block where it needs less."""
    looked = 0
    for seed, problem in small_problems(120, most=1500):
        scorer, state = JointScorer(problem), compute_min_state_bytes(problem)
        alone = list(list_min_unit_bytes(problem))
        for choice in choices(problem):
            stages = scorer.evaluate(choice).stages
            if not stages:
                continue
            held = 0
            for stage in stages:
                option = problem.options[stage.option]
                memory = stage.memory
                held += (memory.weights + memory.gradients + memory.optimizer + memory.buffers) * (
                    option.data * problem.layouts[option.layout].tensor
                )
                for first, last in stage.pieces:
                    for start, end, need, room in alone:
                        if first <= start and end <= last:
                            assert memory.total - stage.memory_limit >= need - room, seed
            assert held >= state, seed
            looked += 1
    assert looked > 1000


def test_memory_names_the_stage_its_parts_and_the_changes() -> None:
    problem = transformer(12, (4,), hidden=1024, vocabulary=1000, batch=16, memory=15 * 10**8)
    one = next(o for o in problem.options if o.recompute == "none" and o.data == 1)
    problem = replace(problem, options=(one,), microbatches=(4,), offloads=("activations",))
    (found,) = explain_joint_infeasible(problem, time_limit=60)
    assert found.code == "FXP204"
    result = extra_memory(problem, inf)
    assert result is not None
    stages = evaluate(problem, result[1]).stages
    worst = max(stages, key=lambda s: s.memory.total)
    assert f"{format_byte_count(worst.memory.total)} needed, 1.40 GiB available" in found.where
    assert "gpu0" in found.where
    assert "activations" in found.why
    assert "optimizer" in found.why
    assert "microbatches" in found.fix
    assert re.search(r"\d+ more device", found.fix)
    choice = find_feasible_joint_choice(with_offload(problem, "activations"), inf)
    assert choice is not None
    offloaded = evaluate(with_offload(problem, "activations"), choice).stages
    needed = format_byte_count(max(s.memory.total for s in offloaded), up=True)
    assert f"offload=activations (then {needed} per device)" in found.fix
    assert found.fix.endswith("of memory on each device")


@pytest.mark.slow
def test_state_beyond_all_memory_and_a_block_that_fits_nowhere_are_said() -> None:
    problem = transformer(24, (4,), batch=16)
    (found,) = explain_joint_infeasible(problem, time_limit=60)
    state, there = (
        format_byte_count(compute_min_state_bytes(problem)),
        format_byte_count(4 * problem.pools[0].memory),
    )
    assert f"need at least {state} in total, but 4 devices have {there}" in found.why
    problem = transformer(4, (4,), hidden=512, vocabulary=10**6, batch=4, memory=2 * 10**9)
    problem = replace(
        problem,
        options=tuple(o for o in problem.options if not o.zero and o.layout == 0),
    )
    (found,) = explain_joint_infeasible(problem, time_limit=60)
    assert "b0 alone needs at least" in found.why


def test_a_wider_space_offers_recompute_or_zero() -> None:
    """Activations are too large: recompute is offered, ZeRO, which keeps them, is not."""
    wider = transformer(8, (4,), hidden=2048, vocabulary=1000, batch=4, memory=12 * 10**8)
    narrow = replace(
        wider,
        options=tuple(o for o in wider.options if o.recompute == "none" and not o.zero),
        microbatches=(1,),
    )
    (found,) = explain_joint_infeasible(narrow, wider=wider, time_limit=60)
    assert "recompute=" in found.fix
    mode = re.findall(r"recompute=(\w+)", found.fix)[0]
    enough = [o for o in wider.options if o.recompute in ("none", mode) and not o.zero]
    assert explain_fits(replace(narrow, options=tuple(enough)))
    assert "zero=" not in found.fix


def explain_fits(problem: JointProblem) -> bool:
    """A problem with a plan is said to need time only."""
    (found,) = explain_joint_infeasible(problem, time_limit=60)
    return found.code == "FXP205" and "A plan fits" in found.why


def wishes(*texts: str) -> list[PlanConstraint]:
    return [parse_constraint("stage" if text[0] == "b" else "fix", text) for text in texts]


@pytest.mark.slow
def test_a_conflict_is_named_in_the_users_words() -> None:
    """pp=4 with tp=8 needs 32 devices, 16 are there; the other two wishes are not to blame."""
    wider = transformer(24, (16,), hidden=4096, batch=64)
    given = wishes("pp=4", "tp=8", "b3=0", "dp=1")
    problem = apply_constraints(wider, given)
    (found,) = explain_joint_infeasible(problem, wider=wider, constraints=given, time_limit=60)
    assert found.code == "FXP202"
    assert found.where == "fix pp=4; fix tp=8"
    assert "without 'fix pp=4'" in found.fix
    assert "16 more devices" in found.fix
    for text in ("pp=4", "tp=8"):
        kept = [w for w in given if str(w) != f"fix {text}"]
        assert explain_fits(apply_constraints(wider, kept))


def test_pins_that_contradict_each_other() -> None:
    problem = transformer(6, (16,), hidden=256, batch=8)
    pins = (StagePin(first=0, last=3, stage=0), StagePin(first=2, last=2, stage=1))
    (found,) = explain_joint_infeasible(replace(problem, pins=pins, max_stages=3), time_limit=60)
    assert found.code == "FXP202"
    assert found.where == "b0 … b3 on stage 0; b2 on stage 1"
    assert found.fix.startswith("without 'b0 … b3 on stage 0'; or without 'b2 on stage 1'")


def test_two_conflicts_are_given_up_together() -> None:
    """b3 on stage 0 leaves b2 nowhere else, b5 on the last one b6: one wish of each has to go."""
    problem = transformer(6, (16,), hidden=256, batch=8, vocabulary=1000)
    problem = replace(problem, options=problem.options[:1], microbatches=(8,), max_stages=4)
    pairs = (((3, 0), (2, 1)), ((5, -1), (6, -2)))
    pins = tuple(StagePin(first=b, last=b, stage=s) for pair in pairs for b, s in pair)
    (found,) = explain_joint_infeasible(replace(problem, pins=pins), time_limit=60)
    assert found.code == "FXP202"
    names = [[f"b{b} on stage {s}" for b, s in pair] for pair in pairs]
    assert found.where in ["; ".join(pair) for pair in names]
    dropped = re.findall(r"b\d on stage -?\d", found.fix)
    assert [sum(name in dropped for name in pair) for pair in names] == [1, 1]
    kept = tuple(p for p in pins if f"b{p.first} on stage {p.stage}" not in dropped)
    assert explain_fits(replace(problem, pins=kept))


def test_a_batch_too_small_for_any_option() -> None:
    problem = transformer(4, (4,), hidden=256, batch=4)
    wide = tuple(o for o in problem.options if o.data == 4)
    (found,) = explain_joint_infeasible(
        replace(problem, options=wide, microbatches=(2,)), time_limit=60
    )
    assert found.code == "FXP201"
    assert "a batch of 4 cannot be cut into 2 microbatches for 4 or more replicas" in found.why


def test_no_time() -> None:
    (found,) = explain_joint_infeasible(transformer(96, (1024,), memory=10**9), time_limit=0.0)
    assert found.code in ("FXP204", "FXP205")
    (found,) = explain_joint_infeasible(transformer(8, (2, 2), hidden=256, batch=8), time_limit=0.0)
    assert found.code == "FXP205"


def test_bisection_finds_the_least() -> None:
    for most in (1, 2, 7, 64):
        for wanted in range(1, most + 3):
            for start in (1, 5):
                found = find_least_sufficient(lambda x, wanted=wanted: x >= wanted, most, start)  # type: ignore[misc]
                assert found == (wanted if wanted <= most else None)
