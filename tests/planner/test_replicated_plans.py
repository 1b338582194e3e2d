"""Plans whose stages have copies of unequal speed: kept in files, trained with one's numbers."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from ranks import Pool
from torch import nn

import fxpart
from fxpart.codegen.generated_program import replicate_program_stages
from fxpart.errors import FxpartError
from fxpart.plan.model import Plan
from fxpart.plan.schedule import plan_schedule
from fxpart.planner.prediction.stage_replicas import StageReplicas, plan_replicas
from fxpart.report.explanation_text import explain
from fxpart.sharding import Mesh
from fxpart.training.trainer_factory import load_trainer

pytestmark = pytest.mark.slow

FAST, SLOW, HEAD = 1.0, 0.5, 1.0  # microbatches a second


class Model(nn.Module):
    """A few layers with a skip and BatchNorm-free, so that the numbers are one process's.

    One parameter is used without a gradient, so that weight decay does not change it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.still = nn.Parameter(torch.ones(8))
        self.first = nn.Linear(6, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x = torch.tanh(self.first(x)) * self.still.detach()
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x + first)


def batch(rows: int = 12, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 6, generator=generator)
    return x, torch.randint(0, 3, (rows,), generator=generator)


def model() -> Model:
    torch.manual_seed(0)
    return Model()


@cache
def plan(
    turns: tuple[int, ...] = (0, 0, 1), schedule: str = "1f1b", mesh: str = "none", zero: int = 0,
    stages: int = 2,
) -> Plan:  # fmt: skip
    """Stages of which the first has two replicas, on a rank or mesh each; the second is slower."""
    size = 1 if mesh == "none" else Mesh.parse(mesh).size
    cut = {f"layers.{layer}.weight": f"tp:S({layer % 2})" for layer in range(4)}
    sharded = {"annotations": json.dumps({"annotations": cut})} if "tp" in mesh else {}
    chain = fxpart.compile(
        model(), f"local:{(stages + 1) * size}", example_inputs=batch(),
        loss=nn.functional.cross_entropy, microbatches=6,
        constraints={
            "mesh": mesh, "stages": stages, "granularity": "op", "schedule": schedule, **sharded,
            **({"zero": zero} if zero else {}),
        },
    ).plan  # fmt: skip
    rows = {row.stage: row for row in chain.prediction.ranks}
    slower = msgspec.structs.replace(
        rows[0], forward_seconds=2 * rows[0].forward_seconds,
        backward_seconds=2 * rows[0].backward_seconds,
    )  # fmt: skip
    groups = [StageReplicas(tuple(range(2 * size)), turns, (rows[0], slower))]
    if stages == 2:
        groups.append(StageReplicas(tuple(range(2 * size, 3 * size)), (0,), (rows[1],)))
    return plan_replicas(chain, groups, 0.0)


def program(given: Plan) -> fxpart.api.Program:
    return fxpart.compile(
        model(), given.cluster, plan=given, example_inputs=batch(),
        loss=nn.functional.cross_entropy,
    )  # fmt: skip


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9, weight_decay=0.01)  # type: ignore[arg-type]


@cache
def alone() -> tuple[list[float], dict[str, torch.Tensor]]:
    """Four steps without fxpart, the last with fewer rows."""
    net = model()
    optimizer = sgd(net.parameters())
    losses = []
    for step, rows in enumerate((12, 12, 12, 4)):
        x, y = batch(rows, step)
        loss = nn.functional.cross_entropy(net(x), y)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses, {k: v.detach() for k, v in net.state_dict().items()}


def trained(given: Plan) -> tuple[list[float], dict[str, torch.Tensor], float]:
    trainer = program(given).trainer(sgd)
    losses = [float(trainer.step(batch(n, s))) for s, n in enumerate((12, 12, 12, 4))]
    found = losses, dict(trainer.state_dict()), float(trainer.eval_step(batch(10, 9)))
    trainer.close()
    return found


def check(found: tuple[list[float], dict[str, torch.Tensor], float]) -> None:
    losses, state = alone()
    assert found[0] == pytest.approx(losses, rel=1e-6)
    assert found[1].keys() == state.keys()
    for name, value in state.items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-5, atol=1e-6)
    net = model()
    net.load_state_dict(state)
    x, y = batch(10, 9)
    assert found[2] == pytest.approx(nn.functional.cross_entropy(net(x), y).item(), rel=1e-5)


def test_what_the_plan_says() -> None:
    given = plan()
    assert given.problems() == ()
    assert given.replicas == ((0, 0, 1),) and given.mesh == {"pipeline": 2}
    assert [s.ranks for s in given.stages] == [(0,), (1,), (2,)]
    assert [r.microbatches for r in given.prediction.ranks] == [4, 2, 0]
    schedule = plan_schedule(given)
    assert [schedule.list_microbatches(k) for k in (0, 1)] == [(0, 1, 3, 4), (2, 5)]
    assert given.firsts == (0, 2)
    assert Plan.loads(given.dumps()) == given


def test_what_the_plan_of_a_mesh_says() -> None:
    given = plan(mesh="tp=2")
    assert given.problems() == given.runnable == ()
    assert given.replicas == ((0, 0, 1),) and given.mesh == {"pipeline": 2, "tp": 2}
    assert [s.ranks for s in given.stages] == [(0, 1), (2, 3), (4, 5)]
    assert [r.microbatches for r in given.prediction.ranks] == [4, 2, 0]
    assert Plan.loads(given.dumps()) == given
    assert "Replicas (the stages of a row have the same blocks" in explain(given)
    assert "2 stages with 2 + 1 replicas x tp2\n" in str(given)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("turns", [(0, 0, 1), (0, 1), (1, 0, 1, 0, 0)])
def test_the_numbers_of_one_process(turns: tuple[int, ...], schedule: str) -> None:
    check(trained(plan(turns, schedule)))


MESHES = [("tp=2", 0), ("dp=2", 1), ("dp=2", 2), ("tp=2,dp=2", 3)]


@pytest.mark.parametrize(("mesh", "zero"), MESHES)
def test_the_numbers_of_one_process_on_meshes(mesh: str, zero: int) -> None:
    check(trained(plan(mesh=mesh, zero=zero)))


@pytest.mark.parametrize(("mesh", "zero"), [("none", 0), *MESHES])
def test_verify_and_predict(mesh: str, zero: int, tmp_path: Path) -> None:
    """A checkpoint is loaded by the exported program, and under another layout."""
    found = program(plan(mesh=mesh, zero=zero))
    assert found.verify(steps=2).passed
    trainer = found.trainer(sgd)
    x, _ = batch(7, 5)
    torch.testing.assert_close(trainer.predict((x,)), model()(x), rtol=1e-5, atol=1e-6)
    folder = trainer.save_checkpoint(tmp_path / "run")
    before = trainer.state_dict()
    losses = [float(trainer.step(batch(12, 3)))]
    found.export(tmp_path / "program")
    weights = model().state_dict()
    for other in (
        trainer, load_trainer(tmp_path / "program", sgd, weights=weights),
        program(plan(mesh="dp=2", zero=1, stages=1)).trainer(sgd),
    ):  # fmt: skip
        other.load_checkpoint(folder)
        assert all(torch.equal(before[k], v) for k, v in other.state_dict().items())
        losses.append(float(other.step(batch(12, 3))))
        other.close()
    assert losses == pytest.approx(losses[:1] * 4, rel=1e-6)


def test_replicas_of_a_stage_that_writes_state_are_refused() -> None:
    """Each would have the running statistics of its own microbatches."""
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    with pytest.warns(UserWarning, match="FXP114"):
        made = fxpart.compile(
            net, "local:1", example_inputs=batch(), loss=nn.functional.cross_entropy,
            microbatches=4, batch_coupling="per-microbatch", check="off",
            constraints={"mesh": "none", "stages": 1},
        )  # fmt: skip
    with pytest.raises(FxpartError, match="FXP109(.|\n)*1.running_mean(.|\n)*write to this state"):
        replicate_program_stages(made, [(0, 1)])


def test_what_replicas_of_meshes_do_not_support() -> None:
    found = program(plan(mesh="tp=2"))
    with pytest.raises(FxpartError, match=r"FXP109(.|\n)*stages on several ranks"):
        found.trainer(sgd, routing="queue", staleness=1)
    with pytest.raises(FxpartError, match=r"FXP109(.|\n)*replicated stages with round-robin"):
        found.trainer(sgd, weight_mode="stash")


def test_an_unequal_plan_is_faster_where_a_rank_is_slow() -> None:
    """Two thirds of the work for the rank that is twice as fast."""
    assert plan((0, 0, 1)).prediction.step_seconds < plan((0, 1)).prediction.step_seconds


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"replicas": ((0, 1), (1, 2))}, "stage 1 is in two groups"),
        ({"replicas": ((0, 2),)}, "the replicas have different blocks"),
        ({"replicas": ((1, 0),)}, "the first one in front"),
        ({"replicas": ((0, 9),)}, "there are only 3 stages"),
        ({"schedule": "zb-h1"}, "does not support replicated stages"),
        ({"mesh": {"pipeline": 3}}, "the number of groups"),
        ({"replicas": ()}, "block 0 is on the previous stage"),
    ],
)
def test_faults(change: dict[str, object], why: str) -> None:
    wrong = msgspec.structs.replace(plan(), **change)
    with pytest.raises(FxpartError, match=why):
        wrong.validate()


def test_faults_of_meshes() -> None:
    given = plan(mesh="tp=2")
    for change, why in (
        ({"stages": (given.stages[0], *plan().stages[1:])}, "the same number of ranks"),
        ({"mesh": {"pipeline": 2}}, "stages and sharding.mesh yield"),
    ):
        with pytest.raises(FxpartError, match=why):
            msgspec.structs.replace(given, **change).validate()


def _over_gloo(text: str) -> tuple[list[float], dict[str, object], float]:
    losses, state, evaluated = trained(Plan.loads(text))
    return losses, {name: value.tolist() for name, value in state.items()}, evaluated


@pytest.mark.parametrize("layout", [{}, {"mesh": "tp=2", "stages": 1, "turns": (0, 1)}])
def test_over_gloo(pool: Pool, layout: dict[str, Any]) -> None:
    given = plan(**layout)
    for losses, state, evaluated in pool.run(_over_gloo, given.dumps(), ranks=given.world):
        check((losses, {name: torch.tensor(value) for name, value in state.items()}, evaluated))
