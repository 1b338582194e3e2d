"""Schedules beyond 1F1B by compile(): planned, valid, trained with the numbers of one process."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from partition_problems import random_problem
from torch import nn

import fxpart
from fxpart import Cluster, Device, Link
from fxpart.errors import FxpartError
from fxpart.plan.model import Plan
from fxpart.plan.schedule import plan_schedule, stage_of
from fxpart.planner.families.schedule_selection import (
    compute_work_bound,
    make_virtual_stage_problem,
    with_cut_schedules,
)
from fxpart.planner.prediction.plan_timeline import plan_timeline
from fxpart.pricing.split_costs import SECONDS
from fxpart.report.comparison_builder import compare
from fxpart.report.recording_file import check_recording
from fxpart.schedule.in_flight import count_in_flight
from fxpart.schedule.spec import INTERLEAVED, SCHEDULES, list_schedules
from fxpart.solver.objective import evaluate
from fxpart.solver.portfolio import solve

PIECES = list_schedules(is_virtual=True)
BATCH = (torch.randn(8, 16), torch.randint(0, 4, (8,)))


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x))


class Ends(nn.Module):
    """The last block, which reads what the first has made as well."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        return self.head(x + first)


class Residual(nn.Module):
    """A few blocks with a skip from the first to the last."""

    def __init__(self, blocks: int = 7) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(blocks))
        self.ends = Ends()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x = self.layers[0](x)
        for layer in list(self.layers)[1:]:
            x = layer(x)
        return self.ends(x, first)


def compiled(schedule: str, **constraints: Any) -> fxpart.api.Program:
    """The model on two ranks under a wished schedule."""
    wishes = {"mesh": "none", "stages": 2, "schedule": schedule, "granularity": "op", **constraints}
    return fxpart.compile(
        Residual(), "local:2", example_inputs=BATCH, loss=nn.functional.cross_entropy,
        microbatches=4, constraints=wishes,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ["interleaved", "breadth-first", "zb-h1", "zb-v", "found"])
def test_a_requested_schedule_is_planned_and_trains_exactly(name: str) -> None:
    program = compiled(name)
    plan = program.plan
    assert plan.schedule == name and plan.problems() == () and plan.runnable == ()
    assert Plan.loads(plan.dumps()) == plan
    assert plan.virtual == (2 if name in PIECES else 1)
    assert len(program.spec.stages) == 2 * plan.virtual
    # The skip is an edge beside the chain's.
    assert any(b - a > 1 for a, b, _ in plan.edges) or name not in PIECES
    step = plan_timeline(plan).step_seconds
    assert step == pytest.approx(plan.prediction.simulated_seconds)
    assert plan.certificate.lower_bound <= plan.certificate.objective
    again = fxpart.compile(
        Residual(), "local:2", example_inputs=BATCH, loss=nn.functional.cross_entropy,
        plan=plan,
    )  # fmt: skip
    assert again.sources == program.sources
    assert program.verify(steps=2).exact


@pytest.mark.slow
def test_the_best_of_several_wishes_is_taken() -> None:
    found = {name: compiled(name).plan.prediction.simulated_seconds for name in ("1f1b", "zb-v")}
    best = compiled("1f1b,zb-v").plan
    assert best.prediction.simulated_seconds == min(found.values())


@pytest.mark.slow
def test_pieces_are_predicted_with_what_the_schedule_keeps() -> None:
    plan = compiled("interleaved").plan
    flying = count_in_flight(plan_schedule(plan))
    for row in plan.prediction.ranks:
        pieces = [k for k, stage in enumerate(stage_of(plan)) if stage == row.stage]
        assert row.in_flight == -(-sum(flying[k] for k in pieces) // len(pieces))
        assert row.forward_seconds == pytest.approx(sum(f for f, _ in row.pieces))
        assert row.backward_seconds == pytest.approx(sum(b for _, b in row.pieces))


@pytest.mark.slow
def test_more_pieces_than_blocks_is_one_clear_error() -> None:
    with pytest.raises(FxpartError) as caught:
        compiled("interleaved", virtual=40)
    assert caught.value.code == "FXP202" and "virtual stages" in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda raw: raw["stages"][0].update(pieces=[[0, 1]]), "stages"),
        (lambda raw: raw.update(schedule="zb-v"), "stages"),
        (lambda raw: raw.update(schedule="1f1b"), "stages"),
    ],
)
def test_pieces_that_do_not_fit_the_schedule_are_refused(change: Any, place: str) -> None:
    raw = json.loads(compiled("interleaved").plan.dumps())
    change(raw)
    with pytest.raises(FxpartError) as caught:
        Plan.loads(json.dumps(raw))
    assert any(p.where.startswith(place) for p in caught.value.problems)


def test_degrees_are_chosen_by_what_has_a_closed_form() -> None:
    assert with_cut_schedules({"dp": 2}) == {"dp": 2}
    assert with_cut_schedules({"schedule": "zb-v"}) == {"schedule": "1f1b"}
    assert with_cut_schedules({"schedule": "found, gpipe"}) == {"schedule": "gpipe"}


@given(ranks=st.integers(1, 5), turns=st.integers(1, 4), name=st.sampled_from(PIECES))
def test_each_rank_has_as_many_pieces(ranks: int, turns: int, name: str) -> None:
    places = SCHEDULES[name].assign_ranks(ranks, turns)
    count = 2 if name == "zb-v" else turns
    assert sorted(places) == sorted(list(range(ranks)) * count)
    assert places[0] == 0 and places[-1] == (0 if name == "zb-v" else ranks - 1)


@pytest.mark.slow
@given(seed=st.integers(0, 10_000))
def test_no_step_is_below_the_work_bound(seed: int) -> None:
    problem = random_problem(seed)
    bound = compute_work_bound(problem)
    answer = solve(problem, time_limit=2.0, seed=0)
    if answer.choice is not None:
        assert bound <= evaluate(problem, answer.choice).seconds * (1 + 1e-9)
    pieces = make_virtual_stage_problem(
        problem, SCHEDULES[INTERLEAVED].assign_ranks(len(problem.devices), 2)
    )
    assert len(pieces.devices) == 2 * len(problem.devices) == pieces.max_stages


@pytest.mark.slow
def test_the_costed_problem_beside_a_plan_has_schedules_of_closed_form() -> None:
    assert compiled("zb-v").costed().schedules == ("1f1b",)
    assert compiled("zb-v,gpipe").costed().schedules == ("gpipe",)


@pytest.mark.slow
def test_recorded_steps_of_pieces_are_compared_by_rank() -> None:
    program = compiled("interleaved")
    trainer = program.trainer(torch.optim.AdamW)
    with trainer.record() as recorder:
        for _ in range(3):
            trainer.step(BATCH)
    recording = recorder.recording
    assert recording.pieces == 2 and recording.places == ((0,), (1,))
    found = compare(program.plan, recording)
    assert [stage.ranks for stage in found.stages] == ["0", "1"]
    for stage in found.stages:
        assert all(part.measured is None or part.measured >= 0 for part in stage.each.values())
    plain = compiled("1f1b").plan
    with pytest.raises(FxpartError, match="stages"):
        check_recording(recording, plain, "t.json")


class Wide(nn.Module):
    """Equal layers whose products take far longer than to start one."""

    def __init__(self, width: int, layers: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def mean_square(output: torch.Tensor) -> torch.Tensor:
    return output.pow(2).mean()


def planned(width: int, rows: int, memory: int = 2**40, **constraints: Any) -> Plan:
    """A chain of four CPUs, in which a pipeline is the only choice."""
    devices = tuple(
        Device(name=f"d{i}", kind="cpu", model="cpu", host=f"h{i}", memory=memory,
               flops={"float32": 1e10}, bandwidth=1e11)
        for i in range(4)
    )  # fmt: skip
    link = Link(source="*", target="*", latency=1e-6, bandwidth=1e11)
    requested = {"mesh": "none", "stages": 4, **constraints}
    return fxpart.compile(
        Wide(width), Cluster(name="four", devices=devices, links=(link,)),
        example_inputs=(torch.randn(rows, width),), loss=mean_square, constraints=requested,
    ).plan  # fmt: skip


@pytest.mark.slow
def test_a_split_backward_competes_where_it_pays() -> None:
    """The plan is the faster of both, and says so; tiny products keep whole backwards."""
    free = planned(256, 2048, microbatches=8)
    by_name = {
        name: planned(256, 2048, microbatches=8, schedule=name) for name in ("1f1b", "zb-h1")
    }
    assert free.schedule == "zb-h1"
    seconds = {name: plan.prediction.step_seconds for name, plan in by_name.items()}
    assert free.prediction.step_seconds == min(seconds.values()) == seconds["zb-h1"]
    assert free.certificate.status == "optimal" and "1f1b, zb-h1" in free.certificate.over
    assert planned(16, 64).schedule == "1f1b"


@pytest.mark.slow
def test_a_split_backward_needs_its_memory() -> None:
    """Where each stage cannot keep as many microbatches, the plan keeps whole backwards."""
    wide = planned(256, 2048, microbatches=8)
    assert [row.in_flight for row in wide.prediction.ranks] == [4, 4, 4, 4]
    whole = planned(256, 2048, microbatches=8, schedule="1f1b", recompute="none")
    most = max(row.tensors for row in whole.prediction.ranks)
    assert most < max(row.tensors for row in wide.prediction.ranks)
    short = planned(256, 2048, int(most * 1.01 / 0.92), microbatches=8, recompute="none")
    assert short.schedule == "1f1b"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zb-h1", "zb-v", "found"])
def test_each_schedule_pays_for_the_split(name: str) -> None:
    """Each of the eight deferred products costs its host seconds once, and memory is kept."""
    whole = planned(256, 2048, microbatches=8, schedule="1f1b").prediction.ranks
    plan = planned(256, 2048, microbatches=8, schedule=name)
    backward = [
        sum(row.backward_seconds for row in rows) for rows in (whole, plan.prediction.ranks)
    ]
    assert any("W" in action for rank in plan_schedule(plan).ranks for action in map(str, rank))
    assert backward[1] - backward[0] == pytest.approx(8 * SECONDS, rel=1e-6)
    each = [
        min(row.memory.activations / row.in_flight for row in rows)
        for rows in (whole, plan.prediction.ranks)
    ]
    assert name == "zb-v" or each[1] > 1.2 * each[0]  # of virtual stages each is smaller


@pytest.mark.slow
@pytest.mark.parametrize("name", ["found", "zb-v", "interleaved", "breadth-first"])
def test_unlike_devices_have_the_requested_schedule(name: str) -> None:
    """Replicated stages have no such schedule, so they do not compete."""
    device = Device(
        name="d0", kind="cpu", model="fast", host="h", memory=1 << 34,
        flops={"float32": 4e10}, bandwidth=1e10,
    )  # fmt: skip
    slow = {"name": "d1", "model": "slow", "flops": {"float32": 1e10}}
    cluster = Cluster(
        name="unlike",
        devices=(device, msgspec.structs.replace(device, **slow),
                 msgspec.structs.replace(device, name="d2")),
        links=(Link(source="*", target="*", latency=1e-6, bandwidth=1e9),),
    )  # fmt: skip
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))
    x = torch.randn(8, 16)
    plan = fxpart.compile(
        model, cluster, example_inputs=(x, x), loss=nn.functional.mse_loss,
        constraints={"mesh": "none", "stages": 2, "schedule": name}, check="off",
    ).plan  # fmt: skip
    assert plan.schedule == name and not plan.replicas
