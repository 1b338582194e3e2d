"""Sparse gradients travel as rows: the bits of one process, and never a dense table on the way."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Pool
from sparse_models import (
    OPTIMIZERS,
    ROWS,
    WAYS,
    Clicks,
    alone,
    batch,
    made,
    model,
    program,
    step_alone,
    trained,
)
from torch import nn

import fxpart
from fxpart.errors import FxpartError
from fxpart.runtime.embedding_tables.sparse_gradient_parts import (
    SparseGradientParts,
    merge_parts,
)

ROWS_READ = ("bags", "ids")  # inputs


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_tables_have_the_bits_of_one_process(way: str, again: bool) -> None:
    """A table that two stages read is summed in the order of one process, too."""
    for optimizer in OPTIMIZERS if not again else ["adagrad", "rowwise"]:
        if optimizer == "rowwise" and "zero" in way:  # its shards are not of whole rows
            with pytest.raises(FxpartError, match="updates only a part") as caught:
                made(way, optimizer, again=again).trainer()
            assert caught.value.code == "FXP109"
            continue
        found = trained(made(way, optimizer, again=again), range(4))
        want = alone(model(again=again), OPTIMIZERS[optimizer], range(4))
        for name in ROWS:
            # torch sums what came for a row in an order that depends on all rows of a table, and
            # a mesh rank has some: three parts or more of a row may be rounded differently
            # (and ZeRO's pieces are given sums, where SGD adds part by part)
            bits = not any(w in way for w in ("rows", "zero")) and not (again and "data" in way)
            near = {"rtol": 0.0, "atol": 0.0} if bits else {"rtol": 1e-6, "atol": 1e-7}
            torch.testing.assert_close(found[name], want[name], **near)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adagrad", "rowwise"])
def test_state_of_rows_is_saved_and_loaded_by_other_plans(tmp_path: Path, optimizer: str) -> None:
    """One number per row too: it is divided as the rows are, in checkpoints and state_dict."""
    want, plain = model(), None
    ways = ("rows sent", "stages", "data and rows", "rows", "rows sent, stages", "rows sent")
    saved: Path | None = None
    state: Any = None
    for number, way in enumerate(ways):
        trainer = made(way, optimizer).trainer()
        if number % 2 and saved is not None:
            trainer.load_checkpoint(saved)
        elif state is not None:
            trainer.load_state_dict(state[0])
            trainer.load_optimizer_state_dict(state[1])
        trainer.step(batch(number))
        saved = trainer.save_checkpoint(tmp_path / str(number))
        state = trainer.state_dict(), trainer.optimizer_state_dict()
        trainer.close()
        plain = plain or OPTIMIZERS[optimizer]([want.bags.weight, want.ids.weight])
        step_alone(want, plain, number)
        for name in ROWS:
            near = {"rtol": 1e-6, "atol": 1e-7, "msg": f"{name} {way}"}
            own = plain.state[want.get_parameter(name)]["sum"]
            torch.testing.assert_close(state[0][name], want.get_parameter(name).detach(), **near)
            torch.testing.assert_close(state[1]["state"][name]["sum"], own, **near)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
def test_a_recomputed_lookup_receives_no_row_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, recompute: bool
) -> None:
    """With the bits of rows that are received each time; new weights are received anew."""
    found = []
    for cached in (True, False):
        if not cached:
            monkeypatch.setattr("fxpart.runtime.engine.cache_rows", lambda modules: nullcontext())
        ranks, cuts, constraints = WAYS["rows sent"]
        trainer = program(
            "rowwise",
            ranks,
            cuts,
            (*constraints, ("recompute", "full" if recompute else "none")),
            trained=True,
        ).trainer()
        losses = [trainer.step(batch(0)).item()]
        received = trainer.last_lookups
        trainer.load_state_dict({n: t + 1 for n, t in trainer.state_dict().items()})
        trainer.load_checkpoint(trainer.save_checkpoint(tmp_path / str(cached)))
        losses += [trainer.evaluate([batch(0)])["loss"], trainer.step(batch(0)).item()]
        assert losses[1] == losses[2] != losses[0] and trainer.last_lookups == received
        found.append((losses, trainer.state_dict()))
        given, looked = batch(0), [0, 0]
        for rank in range(2):
            own = [
                {n: given[n].chunk(4)[k].chunk(2)[rank].reshape(-1).tolist() for n in ROWS_READ}
                for k in range(4)
            ]
            for n in ROWS_READ:
                parts = [[i for i in part[n] if n == "ids" or i != 3] for part in own]
                each = [set(chain(*parts))] if cached and recompute else map(set, parts)
                looked[0] += (1 + recompute) * sum(map(len, parts))
                looked[1] += (1 + (recompute and not cached)) * sum(map(len, each))
        assert received == tuple(looked)
        trainer.close()
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[0][1][name], t) for name, t in found[1][1].items())


@pytest.mark.slow
def test_two_ranks() -> None:
    found = trained(made("data", "sgd"), range(3))
    want = alone(model(), OPTIMIZERS["sgd"], range(3))
    assert all(torch.equal(found[name], want[name]) for name in ROWS)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"mode": "mean"}, {"weighted": True}, {"padding": None}])
@pytest.mark.parametrize("way", ["data", "rows", "data and rows", "rows sent"])
def test_kinds_of_bags(way: str, options: dict[str, Any]) -> None:
    found = trained(made(way, "adagrad", **options), range(3))
    want = alone(model(**options), OPTIMIZERS["adagrad"], range(3))
    for name in ROWS:
        torch.testing.assert_close(found[name], want[name], rtol=1e-6, atol=1e-7)


def _clip(made: Clicks, norm: float | None, value: float | None) -> None:
    for p in made.parameters():
        if p.grad is not None:
            p.grad = p.grad.coalesce() if p.grad.is_sparse else p.grad
    numbers = [p.grad._values() if p.grad.is_sparse else p.grad
               for p in made.parameters() if p.grad is not None]  # fmt: skip
    if norm is not None:
        total = torch.linalg.vector_norm(
            torch.stack([torch.linalg.vector_norm(n) for n in numbers])
        )
        for n in numbers:
            n.mul_(torch.clamp(norm / (total + 1e-6), max=1.0))
    if value is not None:
        for n in numbers:
            n.clamp_(-value, value)


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"clip_norm": 0.05}, {"clip_value": 0.01}])
@pytest.mark.parametrize("way", ["stages", "data", "data, zero 2", "rows sent"])
def test_clipping(way: str, how: dict[str, float]) -> None:
    found = trained(made(way, "adagrad"), range(3), **how)
    change = partial(_clip, norm=how.get("clip_norm"), value=how.get("clip_value"))
    want = alone(model(), OPTIMIZERS["adagrad"], range(3), change)
    for name in ROWS:
        torch.testing.assert_close(found[name], want[name], rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_gradients_add_up_over_batches() -> None:
    trainer = made("data and stages", "sgd", again=True).trainer()
    for seed in range(3):
        trainer.backward(batch(seed))
    whole = model(again=True)
    for seed in range(3):
        given = batch(seed)
        for part in zip(*(t.chunk(4) for t in given.values()), strict=True):
            loss = whole(**dict(zip(given, part, strict=True)))["loss"]
            loss.backward(torch.full_like(loss, 0.25))
    for batches, when in ((1, "before the update"), (3, "after it")):
        found = {name: gradient * batches for name, gradient in trainer.gradients().items()}
        for name, p in whole.named_parameters():
            if p.grad is not None:
                torch.testing.assert_close(found[name], p.grad.to_dense(), msg=f"{name} {when}")
        trainer.update()
    trainer.close()


@pytest.mark.slow
def test_all_is_trained_beside_tables() -> None:
    """Dense numbers within 1e-6, of which rounding may differ."""
    for way in ("data", "rows sent", "data and rows"):
        found = made(way, "adagrad", trained=True, dtype=torch.float64).verify(steps=3)
        assert found.passed and found.largest < 1e-12


def _gloo(way: str, again: bool) -> list[Any]:
    found = trained(made(way, "adagrad", again=again), range(3))
    return [found[name].tolist() for name in ROWS]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "again"),
    [
        ("data", False),
        ("rows sent", False),
        ("rows sent, stages", False),
        ("stages", True),
        ("data and stages", True),
    ],
)
def test_gloo(pool: Pool, way: str, again: bool) -> None:
    want = alone(model(again=again), OPTIMIZERS["adagrad"], range(3))
    for found in pool.run(_gloo, way, again, ranks=WAYS[way][0], timeout=150):
        for numbers, name in zip(found, ROWS, strict=True):
            if "rows sent" in way or (again and "data" in way):
                torch.testing.assert_close(torch.tensor(numbers), want[name], rtol=1e-6, atol=1e-7)
            else:
                assert numbers == want[name].tolist()


@pytest.mark.slow
def test_an_optimizer_that_takes_no_sparse_gradient_is_refused_at_once() -> None:
    with pytest.raises(FxpartError, match="SparseAdam") as caught:
        made("data", "adamw").trainer()
    assert {p.code for p in caught.value.problems} == {"FXP109"}


def test_an_optimizer_instance_for_sparse_gradients_is_refused_by_compile() -> None:
    """The gradient of a table that is also the output layer is dense."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(9, 4, sparse=True)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(self.table(ids).mean(1), self.table.weight)

    model = Tied()
    with pytest.raises(FxpartError, match="its gradient is dense") as caught:
        fxpart.compile(
            model, "local:1", example_inputs=(torch.randint(9, (4, 3)), torch.randint(9, (4,))),
            loss=nn.functional.cross_entropy,
            optimizer=torch.optim.SparseAdam(model.parameters()),
        )  # fmt: skip
    assert caught.value.code == "FXP109"
    assert "table.weight" in str(caught.value)


def test_parts_are_put_in_the_order_of_microbatches() -> None:
    def part(lengths: list[int], first: int) -> SparseGradientParts:
        ids = torch.arange(first, first + sum(lengths))
        return SparseGradientParts(tuple(lengths), ids, ids.unsqueeze(1).float())

    found = merge_parts([((0, 1, 2), part([1, 0, 2], 0)), ((0, 1, 2), part([2, 1, 1], 10))])
    assert found.ids.tolist() == [0, 10, 11, 12, 1, 2, 13]
    assert found.lengths == (3, 1, 3)
    assert found.values.squeeze(1).tolist() == found.ids.tolist()


def test_parts_are_added_as_autograd_adds_them() -> None:
    """Which merges rows as if they were sorted: how they came is seen in the result."""
    table, given = torch.randn(9, 2, requires_grad=True), []
    for ids in ([5, 1, 5], [5, 0], [7, 1, 1, 2]):
        rows = torch.nn.functional.embedding(torch.tensor(ids), table, sparse=True)
        weights = torch.randn(len(ids), 2)
        (rows * weights).sum().backward()
        given.append(torch.sparse_coo_tensor(torch.tensor([ids]), weights, (9, 2)))
    found = SparseGradientParts.of(given).gradient(table)
    assert table.grad is not None and found._nnz() == table.grad._nnz()
    assert torch.equal(found._indices(), table.grad._indices())
    assert torch.equal(found._values(), table.grad._values())


class Lookup(nn.Module):
    """A table of one column, of which a mesh rank's shard may receive a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 1, sparse=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids).square().mean()


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad])
def test_a_shard_with_one_row_is_updated_within_its_bounds(zero: int, optimizer: Any) -> None:
    """torch adds a gradient of one element to a view at twice its storage offset."""
    torch.manual_seed(0)
    model = Lookup()
    whole, ids = Lookup(), torch.tensor([5, 5, 5, 5])
    whole.load_state_dict(model.state_dict())
    program = fxpart.compile(
        model, "local:2", example_kwargs={"ids": ids}, microbatches=1, check="off",
        optimizer=partial(optimizer, lr=0.1),
        constraints={"mesh": "dp=2", "stages": 1, "zero": zero},
    )  # fmt: skip
    trainer, plain = program.trainer(), optimizer(whole.parameters(), lr=0.1)
    for _ in range(3):
        trainer.step({"ids": ids})
        plain.zero_grad()
        whole(ids).backward()
        plain.step()
    torch.testing.assert_close(trainer.state_dict()["table.weight"], whole.table.weight.detach())
    trainer.close()
