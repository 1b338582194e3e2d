"""Plans run by real ranks before one is chosen, and which are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch.distributed as dist
from fxpart.costmodels.profile_store import ContentionProfile, Profile, TimeQuartiles, TrialRun
from fxpart.costmodels.roofline import Roofline
from zoo import ZOO

import fxpart
from fxpart.api import Program
from fxpart.capture.workload import Workload
from fxpart.cluster.model import Cluster, Device
from fxpart.costs import DeviceKnowledge
from fxpart.errors import FxpartError
from fxpart.plan.model import Plan
from fxpart.planner.prediction.plan_digest import plan_key
from fxpart.planner.refinement import plan_seconds, with_trial_run
from fxpart.profiling.session import profile
from fxpart.profiling.trial_processes import TrialProcesses
from fxpart.profiling.trial_rounds import LEAST, run_trial_rounds
from fxpart.profiling.trial_selection import describe_plan, is_named_optimizer
from fxpart.profiling.trial_worker import serve
from fxpart.report.explanation_text import explain
from fxpart.report.html import report_html


def workload() -> Workload:
    built = ZOO["mlp"].build()
    return Workload(built.model, built.batch, built.loss, batch_size=built.batch_size)


def compiled(**wishes: Any) -> Program:
    work = workload()
    return fxpart.compile(
        work.model, "local:2", example_inputs=work.example, loss=work.loss, constraints=wishes
    )


@pytest.mark.slow
def test_plans_of_one_and_of_two_ranks_are_run() -> None:
    programs = [compiled(mesh="none", stages=1), compiled(mesh="dp=2", stages=1),
                compiled(mesh="none", stages=2)]  # fmt: skip
    with TrialProcesses(2) as stage:
        found = [stage.run(p.plan, p.parts, steps=5, label="x") for p in programs]
    for program, one in zip(programs, found, strict=True):
        assert 0 < one.seconds.low <= one.seconds.seconds <= one.seconds.high < 10
        assert one.seconds.runs <= 5 and one.label == "x"
        assert one.model == program.plan.model.fingerprint
        assert one.predicted == program.plan.prediction.simulated_seconds
        assert len(one.peaks) == len(one.baselines) == len(one.cpu) == program.plan.world
        assert all(p >= b > 50e6 for p, b in zip(one.peaks, one.baselines, strict=True))


@pytest.mark.slow
def test_plans_that_are_held_train_in_turns() -> None:
    """Of one and of two ranks, each by processes of its own; then one of them runs another."""
    one, two = compiled(mesh="none", stages=1), compiled(mesh="none", stages=2)
    with TrialProcesses(2) as first, TrialProcesses(2) as second:
        players = [(program.plan, program.parts) for program in (one, two)]
        rounds = run_trial_rounds([first, second], players, most=4)
        assert len(rounds) == 4 and all(0 < taken < 10 for row in rounds for taken in row)
        assert len(run_trial_rounds([first, second], players[::-1], left=lambda: 0.0)) == LEAST
        assert all(taken > 0 for taken in second.train_further(2, warm=0))
        after = first.run(two.plan, two.parts, steps=4, label="x")
        assert len(after.cpu) == 2 and after.seconds.seconds > 0


def test_nobody_leaves_the_group_while_others_are_connecting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gloo's mesh fails where a rank that is connected closes before another is."""
    called: list[str] = []
    for name in ("barrier", "destroy_process_group"):
        monkeypatch.setattr(dist, name, lambda name=name: called.append(name))
    (tmp_path / "request-0.json").write_text("{}")
    assert serve(0, 2, {"folder": str(tmp_path)}) == {"done": 0}
    assert called == ["barrier", "destroy_process_group"]


@pytest.mark.slow
def test_a_rank_that_fails_is_told() -> None:
    program = compiled(mesh="none", stages=1)
    with TrialProcesses(1) as stage, pytest.raises(FxpartError, match="no optimizer|optimizer"):
        stage.run(program.plan, program.parts, optimizer="none such")


@pytest.mark.slow
def test_profiling_runs_the_plans_that_may_be_best(tmp_path: Path) -> None:
    """What compiling chooses with the profile has been run, and nothing known is faster."""
    path = tmp_path / "model.profile"
    heard: list[str] = []
    first = profile(
        workload(),
        "local:2",
        path,
        budget=900.0,
        microbatches=2,
        progress=lambda what, *_: heard.append(what),
    )
    assert first.trial_runs > 0 and first.left_out == () and "trial runs" in heard
    work = workload()
    program = fxpart.compile(
        work.model,
        "local:2",
        example_inputs=work.example,
        loss=work.loss,
        cost_model=path,
        microbatches=2,
    )
    found = program.plan.prediction
    with Profile(path) as held:
        known = held.get("rehearsals", held.settings()[0], TrialRun)
    assert found.rehearsed_seconds == min(one.seconds.seconds for one in known.values())
    assert known[plan_key(program.plan)].seconds.seconds == found.expected_seconds
    assert (
        first.plan == describe_plan(program.plan) and first.step_seconds == found.expected_seconds
    )
    again = profile(workload(), "local:2", path, budget=900.0, microbatches=2)
    assert (again.trial_runs, again.known_trial_runs) == (0, first.trial_runs)
    assert (again.ops, again.known_ops) == (0, first.ops + first.known_ops)
    assert again.plan == first.plan and again.seconds < 1.0
    path = tmp_path / "b.profile"
    without = profile(workload(), "local:2", path, budget=900.0, microbatches=2, rehearse=False)
    program = fxpart.compile(
        work.model, "local:2", example_inputs=work.example, loss=work.loss, cost_model=path,
        microbatches=2,
    )  # fmt: skip
    assert without.trial_runs == 0 and without.plan == describe_plan(program.plan)
    assert without.step_seconds == pytest.approx(program.plan.prediction.expected_seconds)


class Model(Roofline):
    """A cost model with a trial run of one plan."""

    def __init__(self, key: str, seconds: float) -> None:
        super().__init__()
        timing = TimeQuartiles(seconds, seconds, seconds, 5)
        self._runs = {key: TrialRun(seconds=timing, label="", model="", predicted=0.0)}

    def knowledge(self, device: Device) -> DeviceKnowledge:
        """Return the trial run."""
        return DeviceKnowledge(contention=ContentionProfile(), trial_runs=self._runs)


@pytest.mark.slow
def test_what_was_run_stands_for_what_was_simulated() -> None:
    plan, other = compiled(mesh="none", stages=1).plan, compiled(mesh="none", stages=2).plan
    assert plan_key(plan) == plan_key(compiled(mesh="none", stages=1).plan) != plan_key(other)
    again = msgspec.structs.replace(plan.prediction, simulated_seconds=9.0)
    assert plan_key(msgspec.structs.replace(plan, prediction=again)) == plan_key(plan)
    model = Model(plan_key(plan), 0.125)
    assert with_trial_run(plan, model).prediction.rehearsed_seconds == 0.125
    assert plan_seconds(with_trial_run(plan, model), model) == 0.125
    assert with_trial_run(other, model) == other
    assert plan_seconds(other, model) == other.prediction.simulated_seconds
    text = with_trial_run(plan, model).dumps()
    assert fxpart.Plan.loads(text).prediction.rehearsed_seconds == 0.125
    told = explain(with_trial_run(plan, model))
    words = "step       125 ms predicted (measured in a trial run)"
    assert words in told and "trial run)" not in explain(plan)
    assert f"{plan.batch_size / 0.125:,.3g} samples/s" in told
    assert "<dt>step time</dt><dd>125 ms</dd>" in report_html(with_trial_run(plan, model))


def test_optimizers_that_other_processes_can_make() -> None:
    import torch

    assert is_named_optimizer("adamw") and is_named_optimizer(torch.optim.SGD)
    assert not is_named_optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.1))


@pytest.mark.slow
def test_elsewhere_nothing_is_rehearsed(tmp_path: Path) -> None:
    """The cluster's other devices are on another host: only what one rank needs is measured."""
    local = Cluster.local(2)
    far = msgspec.structs.replace(local.devices[1], name="far", host="other")
    slow = {"source": "*", "target": "*", "bandwidth": 1e5}  # too slow for any other plan
    links = (msgspec.structs.replace(local.links[0], **slow),)
    apart = msgspec.structs.replace(local, devices=(local.devices[0], far), links=links)
    found = profile(workload(), apart, tmp_path / "a.profile", budget=1e-3)
    assert found.trial_runs == 0 and "of one rank" in found.plan


def test_batches_travel_whole(tmp_path: Path) -> None:
    """Tensors and plain values, nested; read back as dicts that lead to the same leaves."""
    import torch

    from fxpart.profiling.trial_worker import load_batch, save_batch
    from fxpart.runtime.batch.batch_inputs import flatten_batch

    x = torch.arange(6.0).view(2, 3)
    for batch in (x, (x, {"a": [x + 1, 3, None], "b": True}), {"ids": x.long(), "again": x.t()}):
        save_batch(batch, tmp_path)
        mine = dict(flatten_batch((batch,) if isinstance(batch, torch.Tensor) else batch))
        theirs = dict(flatten_batch(load_batch(tmp_path)))
        assert mine.keys() == theirs.keys()
        for path, value in mine.items():
            if isinstance(value, torch.Tensor):
                assert value.dtype == theirs[path].dtype and torch.equal(value, theirs[path])
            else:
                assert theirs[path] is value or theirs[path] == value


@pytest.mark.slow
def test_a_plan_that_cannot_be_run_is_left_out_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are run by new processes, and one of them is chosen."""
    real = TrialProcesses.run

    def run(self: TrialProcesses, plan: Plan, parts: Any, **options: Any) -> TrialRun:
        alone = len(plan.stages) == 1 and plan.world == 1
        return real(self, plan, parts, **options, **({"optimizer": "none such"} if alone else {}))

    monkeypatch.setattr(TrialProcesses, "run", run)
    found = profile(workload(), "local:2", tmp_path / "a.profile", budget=900.0, microbatches=2)
    told = [words_ for words_ in found.left_out if words_.startswith("trial run")]
    assert told and all("1 stage" in words_ for words_ in told)
    with Profile(tmp_path / "a.profile") as held:
        known = held.get("rehearsals", held.settings()[0], TrialRun)
    assert len(known) == found.trial_runs
    again = profile(workload(), "local:2", tmp_path / "a.profile", budget=900.0, microbatches=2)
    assert again.left_out  # nothing has settled
