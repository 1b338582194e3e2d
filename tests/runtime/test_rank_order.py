"""Stages on any ranks: the numbers do not depend on which rank runs which stage and mesh rank."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hand_lanes import trainer
from lane_programs import assert_close, one_process, train
from ranks import Pool
from runtime_programs import train as train_chain
from sharded_ranks import as_seen, written
from sharded_ranks import train as train_exported
from torch import nn

import fxpart
from fxpart.api import Program
from fxpart.cluster.devices import Device, Link
from fxpart.cluster.model import Cluster
from fxpart.collectives.dtensor_conversion import device_mesh
from fxpart.compat.optimizer_choice import choose
from fxpart.errors import FxpartError
from fxpart.plan.model import Plan
from fxpart.runtime import InProcess
from fxpart.runtime.mesh.mesh_ranks import build_rank_table
from fxpart.sharding import Mesh
from fxpart.training.local_placement import get_gpu_index
from fxpart.verification.comparison import compare

Table = tuple[tuple[int, ...], ...]
TABLES: list[Table] = [((2, 3), (0, 1)), ((0, 2), (1, 3)), ((3, 0), (1, 2))]


def moved(plan: Plan, table: Table) -> Plan:
    """The plan with its stages on the ranks of the table."""
    new = {
        old: rank
        for stage, ranks in zip(plan.stages, table, strict=True)
        for old, rank in zip(stage.ranks, ranks, strict=True)
    }
    stages = tuple(
        msgspec.structs.replace(stage, ranks=ranks)
        for stage, ranks in zip(plan.stages, table, strict=True)
    )
    entries = tuple(
        msgspec.structs.replace(entry, ranks=tuple(sorted(new[r] for r in entry.ranks)))
        for entry in plan.prediction.ranks
    )
    entries = tuple(sorted(entries, key=lambda entry: entry.ranks))
    prediction = msgspec.structs.replace(plan.prediction, ranks=entries)
    return msgspec.structs.replace(plan, stages=stages, prediction=prediction).validate()


def program(mesh: str, table: Table) -> Program:
    """A small model on two stages of two ranks, or on four stages, placed by the table."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
    made = fxpart.compile(
        model, "local:4", example_inputs=(torch.randn(8, 8), torch.randn(8, 8)),
        loss=nn.functional.mse_loss, microbatches=4,
        constraints={"mesh": mesh, "stages": 2} if mesh else {"stages": 4},
    )  # fmt: skip
    assert len(made.plan.stages) == len(table)
    return dataclasses.replace(made, plan=moved(made.plan, table))


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("mesh", ["dp=2", "tp=2"])
def test_lanes_on_any_ranks_in_one_process(mesh: str, table: Table) -> None:
    for mine, expected in zip(train(mesh, {"ranks": table}), one_process(), strict=True):
        assert_close(mine, expected)


@pytest.mark.slow
@pytest.mark.parametrize("table", TABLES)
def test_lanes_on_any_ranks_over_gloo(pool: Pool, table: Table) -> None:
    for found in pool.run(train, "dp=2", {"ranks": table}, ranks=4):
        for mine, expected in zip(found, one_process(), strict=True):
            assert_close(mine, expected)


@pytest.mark.slow
def test_a_chain_on_any_ranks_over_gloo(pool: Pool) -> None:
    shapes = ((8, 4), (8, 4))
    expected = train_chain((1, 1, 1, 1), shapes, {}, {"tied": True})
    options = {"ranks": (2, 0, 3, 1)}
    found = pool.run(train_chain, (1, 1, 1, 1), shapes, options, {"tied": True}, ranks=4)
    assert found == [expected] * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "table"), [("dp=2", ((3, 0), (1, 2))), ("", ((2,), (0,), (3,), (1,)))]
)
def test_a_plan_on_any_ranks_verifies(mesh: str, table: Table) -> None:
    found = program(mesh, table).verify(steps=2)
    assert found.passed and found.ranks == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "table"), [("dp=2", ((3, 0), (1, 2))), ("", ((2,), (0,), (3,), (1,)))]
)
def test_an_exported_plan_on_any_ranks_over_gloo(
    pool: Pool, tmp_path: Path, mesh: str, table: Table
) -> None:
    made = program(mesh, table)
    made.export(tmp_path / "program")
    assert made.captured.example is not None
    given: Any = made.captured.example()
    base: Any = type("Given", (), {"program": made, "batch": given})
    weights, batch = written(base, tmp_path)
    first, *_ = pool.run(train_exported, str(tmp_path / "program"), weights, batch, ranks=4)
    assert compare(made, choose("adamw").make, given, as_seen(first)).passed


@pytest.mark.slow
def test_each_rank_has_the_program_of_its_stage(tmp_path: Path) -> None:
    table = ((3, 0), (1, 2))
    made = program("dp=2", table)
    made.export(tmp_path / "program")
    actions = made.schedule().ranks
    for stage, ranks in enumerate(table):
        for rank in ranks:
            text = (tmp_path / "program" / f"rank{rank}.txt").read_text()
            assert text.split() == [str(action) for action in actions[stage]]


def test_ranks_that_do_not_make_the_mesh_are_refused() -> None:
    assert build_rank_table((0, 2), 2) == ((0, 1), (2, 3))
    for wrong in (((0, 1), (1, 2)), ((0,), (1, 2)), ((0, 1, 2), (3, 4, 5))):
        with pytest.raises(FxpartError) as caught:
            build_rank_table(wrong, 2)
        assert caught.value.problems[0].code == "FXP109"
    with pytest.raises(FxpartError):
        trainer(InProcess(4), "dp=2", ranks=((0, 1), (2, 4)))


def test_a_device_mesh_of_falling_ranks_is_refused() -> None:
    with pytest.raises(FxpartError, match="torch sorts the ranks"):
        device_mesh(Mesh.parse("dp=2"), "cpu", (3, 0))


def test_a_gpu_is_the_planned_one_of_its_host() -> None:
    devices = tuple(
        Device(
            name=f"{host}/{i}", kind="gpu", model="x", host=host, memory=1 << 30,
            flops={"float32": 1e12}, bandwidth=1e11,
        )
        for host in ("a", "b") for i in range(3)
    )  # fmt: skip
    link = Link(source="*", target="*", latency=0.0, bandwidth=1e9)
    cluster = Cluster(name="six", devices=devices, links=(link,))
    plan: Any = msgspec.defstruct("Given", [("cluster", Any), ("devices", Any)])
    plan.device = Plan.device
    given = plan(cluster, (0, 2, 3, 4))
    assert [get_gpu_index(given, rank) for rank in range(4)] == [0, 2, 0, 1]
