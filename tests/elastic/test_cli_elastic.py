"""The command line of elastic runs, as far as no ranks are started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_calls import TARGET, call

from fxpart.checkpoint.run_directory import RunDir
from fxpart.cli.elastic_run import RunPlanner, fixed, make_cache_key, run_supervised
from fxpart.cli.options import CommandLineRequest
from fxpart.elastic.rank_bounds import RankBounds
from fxpart.elastic.scale_request import lock_run
from fxpart.errors import FxpartError
from fxpart.plan.model import Plan


def request(target: str, **fields: object) -> CommandLineRequest:
    """What the command line makes of these options."""
    given: dict[str, object] = {
        "target": target, "cluster": "auto", "batch_size": None, "microbatches": None,
        "optimizer": None, "cost_model": "roofline", "constraint": (), "seed": 0,
    }  # fmt: skip
    return CommandLineRequest(**{**given, **fields})  # type: ignore[arg-type]


@pytest.fixture
def target(tmp_path: Path) -> str:
    (tmp_path / "nets.py").write_text(TARGET)
    return f"{tmp_path / 'nets.py'}:with_data"


def test_scale(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with lock_run(RunDir(tmp_path), RankBounds(2, 4)) as holder:
        holder.publish_ranks(4)
        out, _ = call(capsys, "scale", str(tmp_path), "3")
        assert "requested 3 ranks instead of 4" in out
        assert holder.read_request() == 3
        out, _ = call(capsys, "scale", str(tmp_path), "4", "--json")
        assert json.loads(out)["asked"] == 4 and json.loads(out)["ranks"] == 4
        _, err = call(capsys, "scale", str(tmp_path), "5", status=2)
        assert "FXP109" in err and "--nproc 2:4" in err
    _, err = call(capsys, "scale", str(tmp_path), "3", status=2)
    assert "no launcher is running it" in err
    call(capsys, "scale", str(tmp_path), "0", status=2)
    _, err = call(capsys, "scale", str(tmp_path / "none"), "3", status=2)
    assert "FXP520" in err


def test_options_go_from_one_command_line_to_the_next() -> None:
    whole = request(
        "a.py:net", microbatches=4, fix=("dp=2", "tp=1"), constraint=("x=-1",), transfer_dtype="bf",
        plan="p.json",
    )  # fmt: skip
    assert whole.arguments() == [
        "a.py:net", "--cluster=auto", "--microbatches=4", "--cost-model=roofline",
        "--constraint=x=-1", "--seed=0", "--fix=dp=2", "--fix=tp=1", "--transfer-dtype=bf",
        "--check=auto",
    ]  # fmt: skip


@pytest.mark.slow
def test_plans_made_in_advance_are_those_made_at_once(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunDir(tmp_path / "run")
    out, _ = call(
        capsys, "plan", target, "-m", "4", "--cost-model", "roofline", "--nproc", "2:4", "--run",
        str(folder.path),
    )  # fmt: skip
    assert str(folder.plans) in out
    asked = request(target, microbatches=4)
    planning = RunPlanner(asked, RankBounds(2, 4), folder)
    for ranks in (4, 3, 2):
        plan, found = planning.plan(ranks)
        assert found and plan.world == ranks
        assert (plan.batch_size, plan.microbatches) == (8, 4)
    # That of two ranks was planned again of the capture for four.
    whole = asked.on_ranks(2, "--nproc")
    assert plan.dumps() == whole.compile(whole.workload(), quiet=True).plan.dumps()
    plan.dump(folder.plan)
    other = RunPlanner(request(target, optimizer="adamw"), RankBounds(2, 4), folder)
    with pytest.raises(FxpartError, match="the run has optimizer 'sgd', but 'adamw' is requested"):
        other.plan(3)


@pytest.mark.slow
def test_what_cannot_be_elastic(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(tmp_path / "run")
    planning = RunPlanner(request(target, mode="async", microbatches=4), RankBounds(1, 2), run)
    plan, _ = planning.plan(2)
    assert plan.schedule == "async" and len(plan.stages) == 2
    plan.dump(run.plan)
    # One rank misses no update: its plan is a synchronous one.
    with pytest.raises(FxpartError, match="weights 'spectrain', but 'flush' is requested"):
        planning.plan(1)
    _, err = call(capsys, "plan", target, "--nproc", "2:4", status=2)
    assert "pass --run DIR, too" in err
    _, err = call(capsys, "plan", target, "--nproc", "4:2", "--run", str(run.path), status=2)
    assert "the minimum, 4, is above the maximum, 2" in err


def test_a_run_that_has_begun_keeps_its_batch(tmp_path: Path) -> None:
    import sample_plans

    run = RunDir(tmp_path)
    sample_plans.plan(4).dump(run.plan)
    assert fixed(request("a.py:net"), run).microbatches == 8
    asked = request("a.py:net", microbatches=4, batch_size=17)
    with pytest.raises(FxpartError) as caught:
        run_supervised(asked, RankBounds(2, 4), run, {}, 10, False)
    assert [p.where for p in caught.value.problems] == ["--batch-size 17", "--microbatches 4"]
    # Neither decides which plans are found: both are the run's.
    assert make_cache_key(asked) == make_cache_key(request("a.py:net"))


def test_a_plan_is_for_one_number(tmp_path: Path) -> None:
    import sample_plans

    path = tmp_path / "plan.json"
    sample_plans.plan(4).dump(path)
    whole = request("a.py:net", plan=str(path))
    with pytest.raises(FxpartError, match="a fixed number of ranks"):
        run_supervised(whole, RankBounds(2, 4), RunDir(tmp_path / "run"), {}, 10, False)
    planning = RunPlanner(whole, RankBounds(4, 4), RunDir(tmp_path / "run"))
    assert planning.plan(4) == (Plan.load(path), True)
    with pytest.raises(FxpartError, match="the plan is for 4 ranks"):
        planning.plan(3)
