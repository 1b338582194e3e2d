"""Experts as loops over the rows that their masks select, as users' models write them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import fxpart
from fxpart.capture import capture
from fxpart.errors import FxpartError

EXPERTS, CHOSEN, WIDTH = 3, 2, 4
Body = Callable[["Mixture", torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Mixture(nn.Module):
    """A router and experts. body: (model, rows [T, 4], chosen [T, 2], weights) -> rows [T, 4]."""

    def __init__(self, *bodies: Body) -> None:
        super().__init__()
        self.bodies = bodies
        self.embed = nn.Embedding(11, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.stacked = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))

    def forward(self, ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.embed(ids)).view(-1, WIDTH)
        weights, chosen = self.router(x).softmax(-1).topk(CHOSEN, -1)
        for body in self.bodies:
            x = x + body(self, x, chosen, weights)
        return (x.view(*ids.shape, WIDTH).sum(-1) - target).square().mean()


def expert(net: Mixture, e: int, rows: torch.Tensor) -> torch.Tensor:
    return functional.silu(net.experts[e](rows))


def assigned(net: Mixture, x: torch.Tensor, i: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    for e in range(EXPERTS):
        rows, slot = torch.where(i == e)
        y[rows] += expert(net, e, x[rows]) * w[rows, slot, None]
    return y


def by_one_hot(net: Mixture, x: torch.Tensor, i: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    mask = functional.one_hot(i, num_classes=EXPERTS).permute(2, 1, 0)
    for e in range(EXPERTS):
        slot, rows = torch.where(mask[e])
        found = expert(net, e, x[None, rows].reshape(-1, WIDTH)) * w[rows, slot, None]
        y.index_add_(0, rows, found.to(x.dtype))
    return y


def other_writes(net: Mixture, x: torch.Tensor, i: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    rows, slot = (i == 0).nonzero(as_tuple=True)
    found = expert(net, 0, x.index_select(0, rows)) * w[rows, slot].unsqueeze(-1)
    y = torch.zeros_like(x).index_put((rows,), found, accumulate=True)
    y = y.index_add(0, rows, found, alpha=2).scatter_add(0, rows[:, None].expand(-1, WIDTH), found)
    repeated = x.repeat_interleave(CHOSEN, dim=0)
    at = (i.flatten() == 1).nonzero().squeeze(-1)
    y = y + torch.zeros_like(repeated).index_copy(0, at, repeated[at] * 2).view(
        -1, CHOSEN, WIDTH
    ).sum(1)
    return y.index_add(0, at // CHOSEN, expert(net, 1, x[at // CHOSEN]))


def three_dims(net: Mixture, x: torch.Tensor, i: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x, i = x.view(-1, 2, WIDTH), i.view(-1, 2, CHOSEN)
    b, t, k = torch.where(i == 2)
    found = expert(net, 2, x[b, t]) * w.view(-1, 2, CHOSEN)[b, t, k].unsqueeze(-1)
    return torch.zeros_like(x).index_put((b, t), found, accumulate=True).flatten(0, 1)


def equal_rows(net: Mixture, x: torch.Tensor, i: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A row may be written twice, with the same values: both have its gradient."""
    y = torch.zeros_like(x)
    rows, _ = torch.where(i % 2 == 0)
    y[rows] = expert(net, 0, x[rows])
    return y


def by_number(net: Mixture, x: torch.Tensor, i: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    for e in range(EXPERTS):
        rows, slot = torch.where(i == e)
        if rows.numel() > 0:
            y.index_add_(0, rows, expert(net, e, x[rows]) * w[rows, slot, None])
    return y


def by_any(net: Mixture, x: torch.Tensor, i: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    for e in range(EXPERTS):
        mask = i == e
        if (mask.sum() if e else mask.any()) == 0:
            continue
        if not mask.any():
            continue
        rows = mask.any(-1).nonzero(as_tuple=False).squeeze(-1)
        slot = mask[rows].int().argmax(-1, keepdim=True)
        share = w.index_select(0, rows).gather(-1, slot).squeeze(-1)
        y.index_add_(0, rows, expert(net, e, x.index_select(0, rows)) * share.unsqueeze(-1))
    return y


def by_count(net: Mixture, x: torch.Tensor, i: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    counts = torch.bincount(i.flatten(), minlength=EXPERTS).tolist()
    for e in range(EXPERTS):
        if counts[e] == 0:
            continue
        rows, slot = torch.where(i == e)
        y[rows] += expert(net, e, x[rows]) * w[rows, slot, None]
    return y


def by_hits(net: Mixture, x: torch.Tensor, i: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    with torch.no_grad():
        mask = functional.one_hot(i, num_classes=EXPERTS + 1).permute(2, 1, 0)
        hits = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
    for e in hits:
        e = e[0]
        if e == EXPERTS:
            continue
        slot, rows = torch.where(mask[e])
        y.index_add_(0, rows, functional.linear(x[rows], net.stacked[e]) * w[rows, slot, None])
    return y


def by_modules(net: Mixture, x: torch.Tensor, i: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    mask = functional.one_hot(i, num_classes=EXPERTS).permute(2, 1, 0)
    for e in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
        slot, rows = torch.where(mask[e].squeeze(0))
        y.index_add_(0, rows, net.experts[e](x[rows]) * w[rows, slot, None])
    return y


def repeated(net: Mixture, x: torch.Tensor, i: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Rows may be selected twice, and the last one wins."""
    return assigned(net, x, i // 2, w)


def something_else(net: Mixture, x: torch.Tensor, i: torch.Tensor, w: torch.Tensor) -> Any:
    rows, _ = torch.where(i == 0)
    if rows.numel() == 0:
        return x * 2
    return torch.zeros_like(x).index_add(0, rows, x[rows])


def number_of_hits(net: Mixture, x: torch.Tensor, i: torch.Tensor, w: torch.Tensor) -> Any:
    y, hits = torch.zeros_like(x), 0
    for e in range(EXPERTS):
        rows, _ = torch.where(i == e)
        if rows.numel() > 0:
            y = y.index_add(0, rows, expert(net, e, x[rows]))
            hits += 1
    return y / max(hits, 1)


def a_single_hit(net: Mixture, x: torch.Tensor, i: torch.Tensor, w: torch.Tensor) -> Any:
    y, hits = torch.zeros_like(x), 0
    for e in range(5):
        rows, _ = torch.where(i == e)
        if rows.numel() > 0:
            y = y.index_add(0, rows, expert(net, e % EXPERTS, x[rows]))
            hits += 1
    return y * 2 if hits == 1 else y


def of_an_empty_mean(net: Mixture, x: torch.Tensor, i: torch.Tensor, w: torch.Tensor) -> Any:
    rows, _ = torch.where(i == 0)
    return x * (1 if rows.numel() == 0 else x[rows].mean())


def another_mask(net: Mixture, x: torch.Tensor, i: torch.Tensor, w: torch.Tensor) -> Any:
    rows, other = torch.where(i == 0)[0], torch.where(i == 1)[0]
    y = torch.zeros_like(x)
    return y if other.numel() == 0 else y.index_add(0, rows, x[rows])


def batch(rows: int, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    target = torch.randn(rows, 2, generator=made, dtype=torch.float64)
    return torch.randint(11, (rows, 2), generator=made), target


def model(*bodies: Body) -> Mixture:
    torch.manual_seed(0)
    return Mixture(*bodies).double()


def close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def gradients(loss: torch.Tensor, net: nn.Module) -> list[torch.Tensor]:
    found = torch.autograd.grad(loss, list(net.parameters()), allow_unused=True)
    pairs = zip(found, net.parameters(), strict=True)
    return [torch.zeros_like(p) if g is None else g for g, p in pairs]


@pytest.mark.filterwarnings("ignore:FXP113")
@pytest.mark.parametrize(
    "bodies",
    [
        pytest.param((assigned, by_one_hot, other_writes, three_dims), id="loops"),
        pytest.param((by_number, by_hits), id="branches"),
        pytest.param((by_any,), id="negated", marks=pytest.mark.long),
        pytest.param((by_count, by_modules), id="counts", marks=pytest.mark.long),
    ],
)
def test_numbers_are_those_of_the_loop(bodies: tuple[Body, ...]) -> None:
    net = model(*bodies)
    captured = capture(net, example_inputs=batch(4))
    for rows in (1, 9):  # with one row, an expert has no rows
        found, wanted = captured.graph(*batch(rows))[0], net(*batch(rows))
        close(found, wanted)
        close(gradients(found, net), gradients(wanted, net))


@pytest.mark.parametrize(
    ("body", "code"),
    [
        pytest.param(repeated, "FXP108", marks=pytest.mark.long),
        pytest.param(equal_rows, "FXP108", marks=pytest.mark.long),
        (something_else, "FXP103"),
        pytest.param(number_of_hits, "FXP103", marks=pytest.mark.long),
        pytest.param(a_single_hit, "FXP103", marks=pytest.mark.long),
        pytest.param(of_an_empty_mean, "FXP103", marks=pytest.mark.long),
        pytest.param(another_mask, "FXP103", marks=pytest.mark.long),
    ],
)
def test_what_may_differ_is_refused(body: Body, code: str) -> None:
    with pytest.raises(FxpartError, match=code):
        capture(model(body), example_inputs=batch(4))


@pytest.mark.long
@pytest.mark.parametrize(("bodies", "warned"), [((by_number,), True), ((by_hits, assigned), False)])
def test_training_on_two_stages(bodies: tuple[Body, ...], warned: bool) -> None:
    net = model(*bodies)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program = fxpart.compile(
            net, "local:2", example_inputs=batch(8), microbatches=2,
            constraints={"pp": 2, "dp": 1, "tp": 1},
        )  # fmt: skip
    assert any("forward skips weights" in str(each.message) for each in caught) == warned
    reasons = str(program.plan.equivalence.reasons)
    assert f"each of {2 * EXPERTS} masks" in reasons or f"each of {EXPERTS} masks" in reasons
    assert ("have zero gradients" in reasons) == warned
    plain = copy.deepcopy(net)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    with program.trainer(lambda parameters: torch.optim.SGD(parameters, lr=0.1)) as trainer:
        for step in range(2):
            optimizer.zero_grad()
            loss = plain(*batch(8, step))
            loss.backward()
            optimizer.step()
            close(trainer.step(batch(8, step)), loss)
        for name, weight in trainer.state_dict().items():
            close(weight, plain.state_dict()[name])
