"""Rows that a mask selects: all rows are computed, and the numbers are those of the selection."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import fxpart
from fxpart.capture import capture
from fxpart.errors import FxpartError

CLASSES = 5
Body = Callable[["Net", torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Net(nn.Module):
    """Hidden states h [b, 4, 6] of tokens, of which a mask [b, 4] selects some, and a loss."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body
        self.embed = nn.Embedding(11, 6)
        self.mix = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, target: torch.Tensor) -> Any:
        h = torch.tanh(self.mix(self.embed(ids)))
        return self.body(self, h, labels >= 0, labels, target)


def batch(rows: int = 6) -> tuple[torch.Tensor, ...]:
    made = torch.Generator().manual_seed(3)
    ids = torch.randint(11, (rows, 4), generator=made)
    labels = torch.randint(CLASSES, (rows, 4), generator=made)
    chosen = torch.rand(rows, 4, generator=made) < 0.4
    chosen[0, 0] = True
    target = torch.randn(rows, 4, generator=made).masked_fill(~chosen, torch.nan)
    return ids, torch.where(chosen, labels, -100), target


def assign(net: Net, h: torch.Tensor, m: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
    to = to.clone()
    to[m] = net.norm(h[m]).exp()
    return to


def doubled(h: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    h = h * 1
    h[m] *= 2
    return h


def kept_copy(h: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    h = h * 1
    rows, places = h[m], (h.detach() > 0).double()[m]
    h.mul_(3)
    return rows.pow(2).sum() + h[m].sum() + places.mean()


def inverted(h: torch.Tensor, m: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    m = m.clone()
    chosen = y[m].double()
    m.logical_not_()
    return h.mean() * (chosen.sum() + y[m].double().mean())


def unequal_masks(h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    y = y.clone()
    first = h[y >= 0]
    y.sub_(1)
    return (first.sum(0) * h[y >= 0].mean(0)).sum()


def by_places(net: Net, h: torch.Tensor, m: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Select by indices."""
    at = m.flatten().nonzero().squeeze(-1)
    return functional.cross_entropy(net.head(h.flatten(0, 1)[at]), y.flatten()[at])


def known_targets(h: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    known = ~t.isnan()
    some, more = h > 0, h > 0
    several = (h[some] * h.detach()[more]).mean()
    same_size = functional.mse_loss(h[known & (h > 0)], t[~t.isnan() & (h > 0)])
    return functional.mse_loss(h[~t.isnan()], t[~t.isnan()]) + several + same_size


cross_entropy = functional.cross_entropy
BODIES: dict[str, Body] = {
    "cross_entropy": lambda n, h, m, y, t: cross_entropy(n.head(h)[m], y[m]),
    "head_of_rows": lambda n, h, m, y, t: cross_entropy(n.head(n.norm(h[m])), y[m]),
    "options": lambda n, h, m, y, t: cross_entropy(
        n.head(h[m]), y[m], torch.arange(1.0, 6.0).double(), label_smoothing=0.1
    ),
    "sum_by_count": lambda n, h, m, y, t: (
        cross_entropy(n.head(h)[m], y[m], reduction="sum") / m.sum()
    ),
    "each_row": lambda n, h, m, y, t: (
        cross_entropy(n.head(h)[m], y[m], reduction="none") * h[m].sum(-1).sigmoid()
    ).mean(),
    "nll": lambda n, h, m, y, t: functional.nll_loss(n.head(h[m]).log_softmax(-1), y[m]),
    "losses_of_rows": lambda n, h, m, y, t: cross_entropy(
        n.head(h).flatten(0, 1), y.flatten().clamp(min=0), reduction="none"
    )[m.flatten()].mean(),
    "masked_select": lambda n, h, m, y, t: torch.masked_select(h.sum(-1), m).mean(),
    "missing_targets": lambda n, h, m, y, t: known_targets(h.sum(-1), t),
    "difference": lambda n, h, m, y, t: (h.sum(-1)[m] - t[m]).abs().sum() / m.sum(),
    "ratio": lambda n, h, m, y, t: (h.sum(-1)[m] / t[m]).pow(2).log1p().mean(),
    "smooth": lambda n, h, m, y, t: functional.smooth_l1_loss(h.mean(-1)[m], t[m], beta=0.3),
    "binary": lambda n, h, m, y, t: functional.binary_cross_entropy_with_logits(
        n.head(h)[m], functional.one_hot(y.clamp(min=0), CLASSES)[m].double()
    ),
    "rows_in_shape": lambda n, h, m, y, t: h[m].pow(2).sum() / h[m].shape[0],
    "elements": lambda n, h, m, y, t: h[m].view(-1).abs().mean() + h[m].flatten().sum(),
    "reshaped": lambda n, h, m, y, t: (
        h[m].view(-1, 2, 3).amax(-1).softmax(-1)[:, 0].sum()
        + h[m].reshape(h[m].shape[0], 3, 2).transpose(1, 2).norm(dim=-1).mean()
    ),
    "columns": lambda n, h, m, y, t: h[torch.where(m)].mean() + h[m.nonzero(as_tuple=True)].sum(),
    "places": lambda n, h, m, y, t: by_places(n, h, m, y),
    "mean_of_rows": lambda n, h, m, y, t: (h[m].mean(0) * h[m].sum(0)).sum(),
    "twice": lambda n, h, m, y, t: h[m][h[m].sum(-1) > 0].mean(),
    "embedded": lambda n, h, m, y, t: (n.embed(y[m]) * h[m]).sum(-1).mean(),
    "parts": lambda n, h, m, y, t: torch.cat([a * b for a, b in [h[m].chunk(2, -1)]], -1).mean(),
    "assigned": lambda n, h, m, y, t: assign(n, h, m, torch.zeros_like(h)).mean(),
    "assigned_to_itself": lambda n, h, m, y, t: assign(n, h, m, h).mean(),
    "doubled": lambda n, h, m, y, t: doubled(h, m).pow(2).mean(),
    "kept_copy": lambda n, h, m, y, t: kept_copy(h, m),
    "inverted": lambda n, h, m, y, t: inverted(h, m, y),
    "unequal_masks": lambda n, h, m, y, t: unequal_masks(h, y),
}
REFUSED: dict[str, Body] = {
    "broadcast_mask": lambda n, h, m, y, t: torch.masked_select(h[0, :, :4], m[0]).sum(),
    "median": lambda n, h, m, y, t: h[m].median(),
    "other_mask": lambda n, h, m, y, t: (
        h[m].sum(-1) + (h[y >= 1].sum(-1) > 9).sum() * h[m & (m == m)].sum(-1)
    ).sum(),
    "sorted": lambda n, h, m, y, t: h[m].sum(-1).sort().values[0],
    "product_of_rows": lambda n, h, m, y, t: (h[m] @ h[m].T).mean(),
    "dropped": lambda n, h, m, y, t: functional.dropout(h[m], 0.5).mean(),
    "deviation": lambda n, h, m, y, t: h[m].std(),
}
LONG = ("broadcast_mask", "sorted", "product_of_rows", "deviation", "other_mask")


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def gradients(loss: torch.Tensor, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    pairs = zip(found, parameters, strict=True)
    return [torch.zeros_like(p) if g is None else g for g, p in pairs]


@pytest.mark.parametrize("start", range(0, len(BODIES), 5))
def test_numbers_are_those_of_the_selected_rows(start: int) -> None:
    torch.manual_seed(0)
    some = list(BODIES.values())[start : start + 5]

    def body(net: Net, *given: torch.Tensor) -> torch.Tensor:
        return sum((one(net, *given) for one in some), torch.zeros(()))

    net = Net(body).double()
    ids, labels, target = batch()
    captured = capture(net, example_inputs=(ids, labels, target.double()))
    other = batch(9)
    given = (other[0], other[1], other[2].double())
    parameters = list(net.parameters())
    found, wanted = captured.graph(*given)[0], net(*given)
    close(found, wanted)
    for ours, theirs in zip(
        gradients(found, parameters), gradients(wanted, parameters), strict=True
    ):
        close(ours, theirs)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.long) if n in LONG else n for n in REFUSED]
)
def test_other_calls_are_refused(name: str) -> None:
    with pytest.raises(FxpartError, match="FXP108"):
        capture(Net(REFUSED[name]), example_inputs=batch())


def test_training_on_two_stages() -> None:
    torch.manual_seed(0)
    net = Net(BODIES["head_of_rows"]).double()
    given = (*batch()[:2], batch()[2].double())
    program = fxpart.compile(
        net,
        "local:2",
        example_inputs=given,
        microbatches=3,
        constraints={"pp": 2, "dp": 1, "tp": 1},
    )
    assert "a mask" in str(program.plan.equivalence.reasons)
    plain = copy.deepcopy(net)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    with program.trainer(lambda parameters: torch.optim.SGD(parameters, lr=0.1)) as trainer:
        for _ in range(3):
            optimizer.zero_grad()
            loss = plain(*given)
            loss.backward()
            optimizer.step()
            close(trainer.step(given), loss)
        for name, weight in trainer.state_dict().items():
            close(weight, plain.state_dict()[name])


@pytest.mark.long
def test_masks_that_may_differ_have_advice() -> None:
    def body(net: Net, h: torch.Tensor, m: torch.Tensor, y: torch.Tensor, t: torch.Tensor) -> Any:
        return functional.mse_loss(h.sum(-1)[m], t[~t.isnan()])

    with pytest.raises(FxpartError, match="compute the mask once"):
        capture(Net(body), example_inputs=batch())
