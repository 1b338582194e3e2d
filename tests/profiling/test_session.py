"""A model profiled: everything measured once, kept, and used by plans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from fxpart.costmodels.profile_store import (
    Calibration,
    ContentionProfile,
    Profile,
    StageMeasurement,
)
from zoo import ZOO

import fxpart
from fxpart.capture.workload import Workload
from fxpart.cluster.devices import CpuLoadImbalance
from fxpart.cluster.host_detection import cores
from fxpart.cluster.model import Cluster
from fxpart.plan.model import Plan
from fxpart.planner.prepared_model import PlanningArguments
from fxpart.profiling.contention import equivalent, measure_contention, summary
from fxpart.profiling.phases import Phases
from fxpart.profiling.runtime_overhead import overhead
from fxpart.profiling.session import ProfilingSession, get_measurement_environment, profile
from fxpart.profiling.stage_benchmark import microbatch
from fxpart.profiling.trial_selection import describe_plan


def one_rank() -> Cluster:
    """This host as one rank of one thread, so that what else runs here counts little."""
    return msgspec.structs.replace(LOCAL, name="one", devices=LOCAL.devices[:1])


LOCAL = Cluster.local(max(2, cores()))


def workload() -> Workload:
    built = ZOO["mlp"].build()
    return Workload(built.model, built.batch, built.loss, batch_size=built.batch_size)


@pytest.mark.slow
def test_the_second_time_nothing_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "model.profile"
    heard: list[str] = []
    first = profile(
        workload(),
        one_rank(),
        path,
        budget=900.0,
        date="2026-01-31",
        rehearse=False,
        progress=lambda what, done, of: heard.append(what),
    )
    assert first.ops > 0 and first.stages > 0 and first.left_out == ()
    assert first.calibration is not None and first.calibration.factors
    assert first.calibration.residuals
    assert first.contention is not None and first.contention.baseline > 50e6
    assert first.step_seconds > 0
    assert {"ops", "stages", "CPU contention"} <= set(heard)
    with Profile(path) as held:
        rows = list(held.rows())
        (place,) = held.settings()
        assert len(held.get("stages", place, StageMeasurement)) == 2 * first.stages
        assert len(held.get("calibrations", place, Calibration)) == 1
        assert len(held.get("crowding", place, ContentionProfile)) == 1
    again = profile(workload(), one_rank(), path, budget=900.0, rehearse=False)
    assert (again.ops, again.stages) == (0, 0)
    assert again.known_stages == first.stages + first.known_stages
    assert again.calibration == first.calibration and again.contention == first.contention
    with Profile(path) as held:
        assert list(held.rows()) == rows
    program = fxpart.compile(
        workload().model,
        one_rank(),
        example_inputs=workload().example,
        loss=workload().loss,
        cost_model=path,
    )
    assert "measured" in program.plan.provenance["compute"]
    assert "measured whole" in program.plan.provenance["choice"]
    assert again.step_seconds > 0


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp=2", "tp=2"])
def test_the_best_plan_is_known_as_a_whole(
    tmp_path: Path, mesh: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of several ranks, where plans are not run: those that it turns out to be, in turn."""
    monkeypatch.setattr(
        Phases, "_measure_contention", lambda self, left_out: None
    )  # takes its time
    cluster = msgspec.structs.replace(LOCAL, devices=LOCAL.devices[:2])
    path, asked = tmp_path / "model.profile", {"mesh": mesh}
    found = profile(workload(), cluster, path, budget=900.0, rehearse=False, constraints=asked)
    assert found.left_out == ()
    built = workload()
    program = fxpart.compile(
        built.model, cluster, example_inputs=built.example, loss=built.loss, cost_model=path,
        constraints=asked,
    )  # fmt: skip
    assert len(program.plan.stages[0].ranks) == 2
    assert "every stage measured whole" in program.plan.provenance["choice"]
    assert found.plan == describe_plan(program.plan) and found.plan.startswith(f"{mesh}, 1 stage, ")
    assert found.step_seconds == pytest.approx(program.plan.prediction.expected_seconds)


class Planned:
    """A run whose best plans are these, one after the other: as the profile grows, or as it is."""

    can_run_trials = False
    planned_for = front = None

    def __init__(self, *best: str, time_for: int = 99) -> None:
        self._best, self._known, self._time = iter(best), set[str](), time_for

    def best_plan(self) -> str:
        return next(self._best)

    def of_plans(self, plans: list[str], share: float, left_out: list[str]) -> tuple[int, int]:
        (plan,) = plans
        if plan in self._known:
            return 0, 1
        if share == 0.0 or len(self._known) == self._time:
            left_out.append("stages")
            return 0, 0
        self._known.add(plan)
        return 1, 0


@pytest.mark.parametrize(
    ("run", "timed", "best", "whole"),
    [
        (Planned("a", "a"), 1, "a", True),
        (Planned("a", "b", "b"), 2, "b", True),
        (Planned("a", "b", "a"), 2, "a", True),
        (Planned("a", time_for=0), 0, "a", False),
        (Planned("a", "b", time_for=1), 1, "b", False),
        (Planned("a", "b", "c", "d", "e", "a"), 5, "a", True),
        (Planned("a", "b", "c", "d", "e", "f"), 5, "f", False),
    ],
)
def test_the_best_is_looked_for_until_it_is_known(
    run: Any, timed: int, best: str, whole: bool
) -> None:
    left_out: list[str] = []
    made, _, found = Phases.of_best(run, left_out)
    assert (made, found) == (timed, best)
    assert left_out == ([] if whole else ["the stages of the best plan"])


@pytest.mark.slow
def test_of_unlike_devices_the_plan_for_all_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once each kind is known, though plans of one kind alone are run here."""
    first, second = LOCAL.devices[:2]
    devices = (first, msgspec.structs.replace(second, model="other-cpu"))
    unlike = msgspec.structs.replace(LOCAL, devices=devices)
    planned: list[Cluster] = []
    real = Phases.best_plan

    def best_plan(self: Phases) -> Plan:
        planned.append(self.planned_for.request.cluster)
        return real(self)

    monkeypatch.setattr(Phases, "best_plan", best_plan)
    for phase in ("_measure_contention", "_run_trials"):  # they take their time
        monkeypatch.setattr(Phases, phase, lambda self, left_out: None)
    asked = PlanningArguments(None, None, None, "roofline", {}, 0)
    made = ProfilingSession.of(workload(), unlike, asked)
    made.run(tmp_path / "model.profile", 900.0, place=0)
    assert planned == []
    made.run(tmp_path / "model.profile", 900.0, place=1)
    assert planned and set(map(len, (c.devices for c in planned))) == {2}


@pytest.mark.slow
def test_without_time_it_says_what_is_left_out(tmp_path: Path) -> None:
    cluster = msgspec.structs.replace(LOCAL, devices=LOCAL.devices[:2])
    path = tmp_path / "model.profile"
    found = profile(workload(), cluster, path, budget=1e-3)
    assert found.ops > 0 and found.stages == 0 and found.contention is None
    assert any("ops" in words for words in found.left_out)
    assert any("CPU contention of" in words for words in found.left_out)
    again = profile(workload(), cluster, path, budget=1e-3)
    assert (again.ops, again.known_ops, again.left_out) == (0, found.ops, found.left_out)
    more = profile(workload(), cluster, path, budget=4.0)
    assert more.known_ops >= found.ops and more.ops + more.stages > 0
    apart = profile(workload(), cluster, tmp_path / "b.profile", budget=1e-3, rehearse=False)
    assert {"stages of 1 of 1 plans", "the stages of the best plan"} < set(apart.left_out)
    built = workload()
    program = fxpart.compile(
        built.model, cluster, example_inputs=built.example, loss=built.loss,
        cost_model=tmp_path / "b.profile",
    )  # fmt: skip
    assert apart.plan == describe_plan(program.plan)


@pytest.mark.slow
def test_under_a_quota_seconds_are_the_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are kept apart, and what stages are predicted to take is not divided by the quota."""
    path, device = tmp_path / "model.profile", one_rank().devices[0]
    held = msgspec.structs.replace(device, quota=0.01)
    under = msgspec.structs.replace(one_rank(), devices=(held,))
    monkeypatch.setattr("fxpart.profiling.session.quota", lambda: 0.01)
    found = profile(workload(), under, path, budget=20.0, rehearse=False)
    assert found.contention is not None and found.contention.baseline > 50e6
    assert not found.contention.slowdown and not found.contention.wake
    monkeypatch.setattr("fxpart.profiling.session.quota", lambda: None)
    profile(workload(), one_rank(), path, budget=20.0, rehearse=False)
    with Profile(path) as kept:
        whole, mine = kept.settings()
        assert (whole.quota, mine.quota) == (0.0, 0.01)
        factors = [kept.get("calibrations", s, Calibration) for s in (whole, mine)]
    # A hundredth of a core: the factors of ops would be at their bound, 0.3, if they knew of it.
    for of in factors:
        (calibration,) = of.values()
        ops = {n: f for n, f in calibration.factors.items() if n.endswith(" forward")}
        assert max(f for name, f in ops.items() if not name.startswith("calls")) > 0.5


@pytest.mark.parametrize(("left", "kept"), [(None, 0.0), (1.0, 0.0), (1.5, 0.0), (0.45, 0.45)])
def test_a_quota_counts_where_it_holds_threads_back(
    left: float | None, kept: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fxpart.profiling.session.quota", lambda: left)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = get_measurement_environment("cpu")
    finally:
        torch.set_num_threads(before)
    assert found.quota == kept and found.share == (kept or 1.0)
    assert ("limited to" in found.describe()) == bool(kept)


@pytest.mark.slow
def test_contention_of_several_processes() -> None:
    built = ZOO["mlp"].build()
    program = fxpart.compile(
        built.model, "local:1", example_inputs=built.batch, loss=built.loss, microbatches=1
    )
    values, _, _ = microbatch(program.captured, program.spec, 1)
    found = measure_contention(
        program.spec, program.sources[0], program.captured.state, values, 2,
        seconds=0.1, timeout=120.0,
    )  # fmt: skip
    assert len(found.slowdown) == 2 and found.slowdown[0] == 1.0 <= found.slowdown[1]
    assert 0 <= found.transfer <= 2 and found.baseline > 50e6


def test_what_processes_answer_is_summed_up() -> None:
    uneven = CpuLoadImbalance(cores=2, seconds=0.008, fallen=0.5, risen=0.125)
    same = {
        "wake": [0.0, 0.002], "meet": [0.001, 0.003], "overhead": 0.25,
        "uneven": msgspec.structs.asdict(uneven),
    }  # fmt: skip
    rows = [
        {"busy": [0.1, 0.12, 0.2], "beside": 0.11, "baseline": 100, **same},
        {"busy": [0.0, 0.12, 0.4], "beside": 0.0, "baseline": 102, **same},
        {"busy": [0.0, 0.0, 0.4], "beside": 0.0, "baseline": 101, **same},
    ]
    found = summary(rows, 3)
    # Of three on two cores one has a core to itself for a while: 10 rounds a second in all.
    assert found.slowdown == pytest.approx((1.0, 1.2, 3.0))
    assert found.transfer == pytest.approx(1 / 2)
    assert found.baseline == 101 and found.wake == (0.0, 0.002)
    assert found.meet == (0.001, 0.003) and found.overhead == 0.25
    assert found.uneven == uneven
    alone = [{**rows[0], "wake": [], "meet": [], "uneven": None}]
    assert summary(alone, 1) == ContentionProfile(slowdown=(1.0,), baseline=100, overhead=0.25)
    rest = {"beside": 0.0, "baseline": 1, "wake": [], "meet": [], "overhead": 0.0, "uneven": None}
    noise = [{"busy": [0.1, 0.09], **rest}] * 2
    assert summary(noise, 2).slowdown == (1.0, 1.0)


@pytest.mark.parametrize(
    ("slowdown", "found", "count"),
    [
        ((1.0, 1.2, 2.0), 1.0, 0.0),
        ((1.0, 1.2, 2.0), 1.1, 0.5),
        ((1.0, 1.2, 2.0), 1.6, 1.5),
        ((1.0, 1.2, 2.0), 9.0, 2.0),
        ((1.0, 1.0, 2.0), 1.5, 1.5),
        ((1.0, 1.5), 9.0, 1.0),
        ((1.0,), 9.0, 0.0),
        ((1.0, 1.2), 0.8, 0.0),
    ],
)
def test_a_transfer_counts_as_ranks(
    slowdown: tuple[float, ...], found: float, count: float
) -> None:
    assert equivalent(slowdown, found) == pytest.approx(count)


def test_the_runtime_takes_some_time_of_its_own() -> None:
    found = overhead(torch.device("cpu"))
    assert 0 <= found.action < 0.1 and 0 <= found.step < 0.1
