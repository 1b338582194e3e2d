"""Asynchronous plans: seconds against an oracle, memory by hand, both modes weighed, faults."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import msgspec
import pytest
import sample_plans
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fxpart
from fxpart.cluster.model import Cluster
from fxpart.errors import FxpartError
from fxpart.plan.model import Plan, RankPrediction
from fxpart.planner.execution_mode import as_asynchronous, as_synchronous, mode_of
from fxpart.planner.families.asynchronous_pipeline import _least_stale
from fxpart.planner.prediction.asynchronous_plan import TrainedWeights, make_asynchronous
from fxpart.planner.prediction.plan_timeline import get_steady_window, plan_steps
from fxpart.planner.prediction.steady_state import measurement_window, simulate_steady_state
from fxpart.report.explanation_text import explain
from fxpart.report.html import report_html
from fxpart.schedule.dependence import chain
from fxpart.schedule.weight_modes import MODES

BATCH = (torch.randn(64, 32), torch.randint(0, 4, (64,)))
STREAMS = [name for name, mode in MODES.items() if not mode.flush]


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x))


def net(width: int = 32, blocks: int = 4) -> nn.Module:
    """Equal blocks and a head."""
    return nn.Sequential(*(Block(width) for _ in range(blocks)), nn.Linear(width, 4))


@cache
def captured(width: int) -> fxpart.api.Program:
    """The model, captured once."""
    batch = BATCH if width == 32 else (torch.randn(8, width), torch.randint(0, 4, (8,)))
    return fxpart.compile(
        net(width), "local:1", example_inputs=batch, loss=nn.functional.cross_entropy,
        constraints={"mesh": "none"},
    )  # fmt: skip


def compiled(cluster: Any = "local:2", width: int = 32, **wishes: Any) -> fxpart.api.Program:
    """The model on two ranks, one stage on each."""
    count = wishes.pop("microbatches", None)
    constraints = {"mesh": "none", "stages": 2, **wishes}
    return captured(width).replan(cluster, microbatches=count, constraints=constraints)


@cache
def asynchronous(weights: str = "spectrain") -> Plan:
    """Its plan under a weight mode."""
    return compiled(mode="async", weights=weights, microbatches=4).plan


def rows_of(
    forward: list[float], backward: list[float], transfer: list[float], once: list[float]
) -> tuple[RankPrediction, ...]:
    """A chain of stages with these seconds."""
    base = sample_plans.plan(len(forward)).prediction.ranks
    found = []
    for row, f, b, t, u in zip(base, forward, backward, transfer, once, strict=True):
        seconds = {"forward_seconds": f, "backward_seconds": b, "transfer_seconds": 2 * t}
        none = {"sync_seconds": 0.0, "tie_seconds": 0.0}
        found.append(msgspec.structs.replace(row, optimizer_seconds=u, **seconds, **none))
    return tuple(found)


def by_hand(m: int, rows: tuple[RankPrediction, ...]) -> float:
    """The mean of late minibatches of a long stream, from the order of each stage alone."""
    count = len(rows)
    steps, first, end = measurement_window(count, m)
    total = steps * m
    order = []
    for k in range(count):
        ahead = min(count - k, total)
        mine = [("F", i) for i in range(ahead)]
        for i in range(total):
            mine.append(("B", i))
            if i + ahead < total:
                mine.append(("F", i + ahead))
        order.append(mine)
    there: dict[tuple[str, int, int], float] = {}  # when what a computation waits for has come
    wire: dict[tuple[str, int], float] = {}
    at, place, ends = [0.0] * count, [0] * count, [0.0] * steps
    moved = True
    while moved:
        moved = False
        for k, row in enumerate(rows):
            while place[k] < len(order[k]):
                kind, i = order[k][place[k]]
                alone = (kind == "F" and k == 0) or (kind == "B" and k == count - 1)
                if not alone and (kind, k, i) not in there:
                    break
                start = max(at[k], there.get((kind, k, i), 0.0))
                at[k] = start + (row.forward_seconds if kind == "F" else row.backward_seconds)
                peer = k + 1 if kind == "F" else k - 1
                if 0 <= peer < count:
                    seconds = rows[max(k, peer)].transfer_seconds / 2
                    link = kind, max(k, peer)
                    wire[link] = max(wire.get(link, 0.0), at[k]) + seconds
                    there[kind, peer, i] = wire[link]
                if kind == "B" and i % m == m - 1:
                    at[k] += row.step_only_seconds
                if kind == "B":
                    ends[i // m] = max(ends[i // m], at[k])
                place[k], moved = place[k] + 1, True
    return (ends[end - 1] - ends[first - 1]) / (end - first)


@pytest.mark.slow
@given(st.integers(0, 10_000))
def test_a_minibatch_takes_what_the_order_of_each_stage_says(seed: int) -> None:
    r = random.Random(seed)
    count, m = r.randint(1, 5), r.randint(1, 6)

    def each(most: float) -> list[float]:
        return [r.random() * most for _ in range(count)]

    rows = rows_of(each(1.0), each(2.0), [0.0, *each(0.3)[1:]], each(1.0))
    found = simulate_steady_state(m, chain(count), rows, (), 0.0)
    assert found.method == "simulation"
    assert found.seconds == pytest.approx(by_hand(m, rows))


@pytest.mark.parametrize(("stages", "m"), [(2, 1), (2, 4), (4, 2), (4, 8)])
def test_equal_stages_take_their_work_and_no_bubble(stages: int, m: int) -> None:
    f, b, u = 0.01, 0.02, 0.004
    rows = rows_of([f] * stages, [b] * stages, [0.0] * stages, [u] * stages)
    plan = sample_plans.plan(stages, m)
    given_ = msgspec.structs.replace(
        plan.prediction, ranks=rows, simulated_seconds=(m + stages - 1) * (f + b) + u
    )
    plan = msgspec.structs.replace(plan, prediction=given_)
    found = make_asynchronous(plan, "naive", [TrainedWeights(1000, 0.001)] * stages).prediction
    assert found.simulated_seconds == pytest.approx(m * (f + b) + u)
    assert found.step_seconds == pytest.approx(m * (f + b) + u)
    assert found.flushed_seconds == pytest.approx((m + stages - 1) * (f + b) + u)
    assert found.bubble == pytest.approx(0.0, abs=1e-9)
    # With one prediction for all forwards of the first stage that miss equally many updates.
    missing = -(-(stages - 1) // m)
    with_it = make_asynchronous(
        plan, "pipeoptim", [TrainedWeights(1000, 0.001)] * stages
    ).prediction
    assert with_it.step_seconds == pytest.approx(m * (f + b) + u + 0.001 * missing)
    assert with_it.ranks[-1].predict_seconds == 0.0


@pytest.mark.parametrize("mode", STREAMS)
def test_memory_has_what_a_stream_keeps(mode: str) -> None:
    stages, m, size = 4, 8, 1000
    plan = sample_plans.plan(stages, m)
    found = make_asynchronous(plan, mode, [TrainedWeights(size, 0.0)] * stages)
    # Eight microbatches to an update, at most three ahead: a forward misses one update or none.
    old = {"stash": 1, "vertical": 1, "2bw": 1, "2bw-ef": 2, "nadam-stash": 1, "naive": 0}
    for was, now in zip(plan.prediction.ranks, found.prediction.ranks, strict=True):
        assert now.in_flight == stages - now.stage
        saved = was.memory.activations - was.workspace
        per = saved // was.in_flight
        assert now.memory.activations == per * now.in_flight + was.workspace
        assert now.staleness == (1 if now.stage < stages - 1 else 0)
        if mode in old:
            stale = old[mode] if mode in ("vertical", "2bw", "2bw-ef") or now.staleness else 0
            assert now.memory.copies == stale * size
        else:
            assert now.memory.copies in (0, size, 2 * size)
        assert (
            now.memory.total
            == was.memory.total
            - was.memory.activations
            - (was.memory.transfers)
            + now.memory.activations
            + now.memory.transfers
            + now.memory.copies
        )
    assert found.problems() == ()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["spectrain", "stash", "naive"])
def test_a_plan_says_both_times_and_comes_back(mode: str) -> None:
    plan = asynchronous(mode)
    assert (plan.schedule, plan.weights) == ("async", mode)
    assert plan.problems() == () and plan.runnable == ()
    assert Plan.loads(plan.dumps()) == plan
    given_ = plan.prediction
    busy = [plan.microbatches * r.microbatch_seconds + r.step_only_seconds for r in given_.ranks]
    assert given_.step_seconds == pytest.approx(max(busy))
    assert plan.certificate.status == "optimal"
    assert plan.certificate.objective == pytest.approx(given_.step_seconds)
    assert [row.staleness for row in given_.ranks] == [1, 0]
    # The stream, and the same stages drained, played again from nothing but the plan.
    steps, first, end = get_steady_window(plan)
    ends = plan_steps(plan, steps=steps).ends
    assert (ends[end - 1] - ends[first - 1]) / (end - first) == pytest.approx(
        given_.simulated_seconds
    )
    same = compiled(mode="sync", microbatches=4).plan
    if [s.first for s in same.stages] == [s.first for s in plan.stages]:
        assert given_.flushed_seconds == pytest.approx(same.prediction.simulated_seconds)
    trained = 4 * same.stages[0].parameters
    assert given_.ranks[0].memory.copies == {"spectrain": trained, "stash": trained}.get(mode, 0)
    text = " ".join(explain(plan).split())
    assert f"schedule async, weights {mode}" in text and "Asynchronous pipeline" in text
    assert "(m + S - 1) / m = 1.25" in text and "1 update" in text
    assert "Asynchronous pipeline" in report_html(plan)


@pytest.mark.slow
def test_a_weight_mode_that_does_not_go_with_the_schedule_is_a_fault() -> None:
    raw = json.loads(asynchronous().dumps())
    for change in ({"weights": "flush"}, {"schedule": "1f1b"}, {"weights": "lookahead"}):
        with pytest.raises(FxpartError) as caught:
            Plan.loads(json.dumps({**raw, **change}))
        assert any(p.where == "weights" for p in caught.value.problems)
    with pytest.raises(FxpartError) as caught:
        Plan.loads(json.dumps({**raw, "weights": "guesswork"}))
    assert caught.value.code == "FXP303"


@pytest.mark.slow
def test_one_stage_is_synchronous() -> None:
    plan = compiled(mode="async", stages=1).plan
    assert (plan.schedule, plan.weights, len(plan.stages)) == ("1f1b", "flush", 1)
    assert "one stage" in plan.provenance["mode"]
    assert plan.constraints["mode"] == "async"


@pytest.mark.slow
def test_asked_to_weigh_it_takes_the_faster() -> None:
    plan = compiled(mode="auto", microbatches=4).plan
    assert plan.schedule == "async" and "faster by simulation" in plan.provenance["mode"]
    assert "miss up to 1 update" in plan.provenance["mode"]
    other = plan.alternatives[0]
    assert (other.what, other.schedule) == ("synchronous", "1f1b")
    same = compiled(mode="sync", microbatches=4).plan
    assert other.step_seconds == same.prediction.step_seconds
    assert same.prediction.simulated_seconds > plan.prediction.simulated_seconds
    assert compiled(microbatches=4).plan == same and same.schedule == "1f1b"


@pytest.mark.slow
def test_what_does_not_fit_names_a_mode_that_does() -> None:
    width = 512
    roomy = compiled("local:2", width, mode="async", weights="naive", microbatches=1).plan
    need = max(row.memory.total for row in roomy.prediction.ranks)
    whole = Cluster.parse("local:2")
    devices = tuple(
        msgspec.structs.replace(d, memory=int(need * 1.1 / 0.92)) for d in whole.devices
    )
    tight = msgspec.structs.replace(whole, devices=devices)
    with pytest.raises(FxpartError) as caught:
        compiled(tight, width, mode="async", weights="stash", microbatches=1)
    assert caught.value.code == "FXP204"
    assert "use weights=naive" in str(caught.value) and "copies of weights" in str(caught.value)
    plan = compiled(tight, width, mode="auto", weights="stash", microbatches=1).plan
    assert plan.schedule == "1f1b" and "no asynchronous plan is possible" in plan.provenance["mode"]
    fits = compiled(tight, width, mode="async", weights="naive", microbatches=1).plan
    assert fits.schedule == "async"


@pytest.mark.parametrize(
    ("constraints", "why"),
    [
        ({"mode": "maybe"}, "not one of the choices"),
        ({"mode": "async", "weights": "guess"}, "not one of the choices"),
        ({"mode": "async", "weights": "flush"}, "flushes the pipeline"),
        ({"weights": "stash"}, "synchronous plan has no weight mode"),
        ({"mode": "async", "schedule": "gpipe"}, "contradict each other"),
        ({"mode": "sync", "schedule": "async"}, "contradict each other"),
        ({"mode": "async", "mesh": "dp=2", "zero": 1, "stages": 1}, "each rank updates on its own"),
    ],
)
def test_contradicting_constraints_are_rejected(constraints: dict[str, Any], why: str) -> None:
    with pytest.raises(FxpartError, match=why) as caught:
        compiled(**constraints)
    assert caught.value.code == "FXP109"


def test_the_schedule_requests_the_mode() -> None:
    assert mode_of({}) == "sync" and mode_of({"schedule": "zb-v,gpipe"}) == "sync"
    assert mode_of({"schedule": "async"}) == "async"
    assert mode_of({"schedule": "1f1b, async"}) == "auto"
    assert as_synchronous({"schedule": "1f1b, async", "weights": "stash"}) == {"schedule": "1f1b"}
    assert as_synchronous({"schedule": "async", "dp": 2}) == {"dp": 2}
    assert as_asynchronous({"mode": "auto"}) == {
        "mode": "async", "schedule": "async", "weights": "spectrain",
    }  # fmt: skip
    plan = compiled(schedule="async", microbatches=4).plan
    assert plan.prediction == asynchronous().prediction


@pytest.mark.slow
def test_a_plan_keeps_its_mode() -> None:
    plan = asynchronous()
    with pytest.raises(FxpartError) as caught:
        fxpart.compile(
            net(), "local:2", example_inputs=BATCH, loss=nn.functional.cross_entropy, plan=plan,
            weights="stash",
        )  # fmt: skip
    assert caught.value.code == "FXP305"
    program = fxpart.compile(
        net(), "local:2", example_inputs=BATCH, loss=nn.functional.cross_entropy, plan=plan,
        mode="async",
    )  # fmt: skip
    assert program.plan == plan
    with pytest.raises(FxpartError, match="stale weights"):
        program.verify()


@pytest.mark.slow
def test_degrees_are_chosen_for_the_stream() -> None:
    plan = compiled("local:4", mode="async", mesh="auto", microbatches=4).plan
    assert plan.degrees is not None and "async (weights spectrain" in plan.degrees.over
    assert {stage.zero for stage in plan.stages} == {0} and len(plan.stages) == 2
    assert plan.problems() == () and plan.runnable == ()
    assert plan.degrees.lower_bound <= plan.degrees.objective


def test_microbatches_are_chosen_with_few_updates_missed() -> None:
    """With four stages one microbatch to an update misses three updates, three of them one."""
    plan = compiled("local:4", stages=4, mode="async").plan
    assert max(row.staleness for row in plan.prediction.ranks) == -(-3 // plan.microbatches)
    others = [one for one in plan.alternatives if one.stages == 4 and one.schedule == "async"]
    mine = plan.prediction.step_seconds
    assert all(o.microbatches <= plan.microbatches or o.step_seconds > mine for o in others)


def aged(seconds: float, stale: int) -> Plan:
    """The plan with this time and this staleness of its first stage."""
    was = asynchronous()
    first, *others = was.prediction.ranks
    rows = (msgspec.structs.replace(first, staleness=stale), *others)
    return msgspec.structs.replace(
        was,
        prediction=msgspec.structs.replace(
            was.prediction, ranks=rows, step_seconds=seconds, simulated_seconds=seconds
        ),
    )


@pytest.mark.parametrize(
    ("plans", "best"),
    [
        ([(1.0, 3), (1.009, 1)], 1),  # not worth two updates
        ([(1.0, 3), (1.011, 1)], 0),
        ([(1.005, 1), (1.0, 1)], 1),
        ([(1.009, 0), (1.0, 7), (1.005, 0)], 2),
    ],
)
def test_of_equals_the_least_stale(plans: list[tuple[float, int]], best: int) -> None:
    made: list[Any] = [(aged(*each), index) for index, each in enumerate(plans)]
    assert _least_stale(made)[1] == best


@pytest.mark.parametrize(
    "constraints",
    [
        {"mode": "async", "virtual": 2}, {"schedule": "async", "virtual": 4},
        {"mode": "queue", "virtual": 2}, {"mode": "async", "weights": "stash", "virtual": 3},
    ],
)  # fmt: skip
def test_virtual_stages_are_refused_where_a_rank_has_one(constraints: dict[str, Any]) -> None:
    with pytest.raises(FxpartError) as raised:
        fxpart.compile(
            nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 4)), "local:2", example_inputs=BATCH,
            loss=nn.functional.cross_entropy, constraints=constraints,
        )  # fmt: skip
    (problem,) = raised.value.problems
    assert problem.code == "FXP109" and "virtual" in problem.where
