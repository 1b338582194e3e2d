"""Managed ids under plans: the numbers of one process that gives the same rows to the same ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Pool
from sparse_models import OPTIMIZERS, ROWS, batch, made, model

from fxpart.errors import FxpartError
from fxpart.optim import ManagedIds

STEPS = 7


def managed() -> list[ManagedIds]:
    """Of both tables, with fewer rows than ids."""
    return [
        ManagedIds(
            f"{name}.weight", name, rows=ROWS[f"{name}.weight"], admit=2, evict=3, candidates=4,
            padding=3, std=0.5,
        )
        for name in ("bags", "ids")
    ]  # fmt: skip


def raw(seed: int) -> dict[str, torch.Tensor]:
    """Ids of a wide range, which come and go."""
    found = batch(seed)
    for name in ("bags", "ids"):
        ids = found[name] + 5 * (seed // 2)
        found[name] = torch.where(found[name] == 3, 3, ids * 10**15 + 7)
    return found


def alone(optimizer: str, steps: int = STEPS) -> dict[str, torch.Tensor]:
    """Plain torch."""
    plain, tables = model(), managed()
    weights = [plain.get_parameter(own.table) for own in tables]
    made = OPTIMIZERS[optimizer](weights)
    for step in range(steps):
        given = raw(step)
        for own, weight in zip(tables, weights, strict=True):
            found = own.assign(given[own.inputs[0]], step)
            own.reset_rows(found, weight, made)
            own.commit(found)
            given[own.inputs[0]] = found.rows
        for part in zip(*(t.chunk(4) for t in given.values()), strict=True):
            loss = plain(**dict(zip(given, part, strict=True)))["loss"]
            loss.backward(torch.full_like(loss, 0.25))
        made.step()
        made.zero_grad()
    return {own.table: w.detach() for own, w in zip(tables, weights, strict=True)}


def trained(way: str, optimizer: str, folder: Path | None = None) -> dict[str, torch.Tensor]:
    """With rows requested ahead; in the folder, a checkpoint is loaded after each step."""
    tables = managed()
    trainer = made(way, optimizer).trainer(managed_ids=tables)
    for step in range(STEPS):
        if step % 3:
            trainer.prefetch(raw(step + 1))
        trainer.step(raw(step))
        if step % 3:
            trainer.evaluate([raw(step + 3)])
        if folder is not None and step % 3 == 2:
            saved = trainer.save_checkpoint(folder)
            trainer.close()
            way = "stages" if way == "rows sent" else "rows sent"
            trainer = made(way, optimizer).trainer(managed_ids=managed())
            trainer.load_checkpoint(saved)
    found: dict[str, torch.Tensor] = trainer.state_dict()
    trainer.close()
    return found


def _check(found: dict[str, torch.Tensor], optimizer: str) -> None:
    for name, tensor in alone(optimizer).items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["rows sent", "data and rows", "stages"])
def test_tables_have_the_numbers_of_one_process(way: str) -> None:
    for optimizer in ("rowwise", "adagrad"):
        _check(trained(way, optimizer), optimizer)


@pytest.mark.slow
def test_checkpoints_have_the_ids(tmp_path: Path) -> None:
    """Under other plans, too; without ids, or with other ones, they are refused."""
    _check(trained("rows sent", "rowwise", tmp_path), "rowwise")
    program = made("stages", "rowwise")
    for other in ([], managed()[:1], [managed()[0], ManagedIds("ids.weight", "ids", rows=16)]):
        trainer = program.trainer(managed_ids=other)
        with pytest.raises(FxpartError, match="managed_ids") as caught:
            trainer.load_checkpoint(tmp_path)
        assert caught.value.problems[0].code == "FXP512"
        trainer.close()


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True])
def test_a_run_is_resumed_with_the_ids(tmp_path: Path, ahead: bool) -> None:
    """The batches that were read ahead are not counted before their step."""
    for stop in (3, STEPS):
        trainer = made("rows sent", "rowwise").trainer(managed_ids=managed())
        batches = [raw(step) for step in range(STEPS + 1)]
        trainer.fit(batches, steps=stop, checkpoints=tmp_path, prefetch=ahead)
        found = trainer.state_dict()
        trainer.close()
    _check(found, "rowwise")


@pytest.mark.slow
def test_tables_that_cannot_be_managed() -> None:
    for way, own, options, why in (
        ("stages", ManagedIds("bag.weight", "ids", rows=16), {}, "no trained parameter"),
        ("stages", ManagedIds("ids.weight", "ids", rows=17), {}, "its shape is"),
        ("stages", ManagedIds("ids.weight", "id", rows=16), {}, "the batch has no inputs"),
        ("stages", ManagedIds("ids.weight", "ids", rows=16), {"ema": 0.9}, "moving averages"),
        ("data, zero 1", ManagedIds("ids.weight", "ids", rows=16), {}, "ZeRO 1 and 2"),
    ):
        with pytest.raises(FxpartError, match=why) as caught:
            made(way, "adagrad").trainer(managed_ids=[own], **options)
        assert caught.value.problems[0].code == "FXP109"


def _gloo() -> Any:
    _check(trained("rows sent", "rowwise"), "rowwise")
    trainer = made("rows sent", "rowwise").trainer(managed_ids=managed())
    mine = raw(0)
    mine["ids"][0, 0] += trainer.rank
    with pytest.raises(FxpartError) as caught:
        trainer.step(mine)
    return caught.value.problems[0].code


@pytest.mark.slow
def test_gloo(pool: Pool) -> None:
    """Ids that differ between ranks are refused: each would map them to other rows."""
    assert pool.run(_gloo, ranks=2, timeout=150) == ["FXP501"] * 2
