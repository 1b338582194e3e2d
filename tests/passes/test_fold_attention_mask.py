"""Causal masks become a flag, open ones vanish, and only those; repeated keys are grouped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fxpart.passes import PREPARE, all_passes
from stage_runs import assigned, check_equal
from torch import fx, nn
from torch.nn import functional

from fxpart.capture import capture
from fxpart.compiler import PassManager
from fxpart.compiler.effects import argument, packet_name

Mask = Callable[[torch.Tensor], torch.Tensor]


class Attention(nn.Module):
    """Attention of 4 heads over 2 groups, with a mask made inside."""

    def __init__(self, mask: Mask, width: int = 8) -> None:
        super().__init__()
        self.mask = mask
        self.embed = nn.Embedding(16, width)  # the length of tokens is a symbol
        self.project = nn.Linear(width, 4 * width + 2 * 2 * width)
        self.bias = nn.Parameter(torch.zeros(1))
        self.width = width

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        rows, length, width = x.shape
        q, k, v = self.project(x).split([4 * width, 2 * width, 2 * width], -1)
        q = q.view(rows, length, 4, width).transpose(1, 2)
        k, v = (
            t.view(rows, length, 2, width)
            .transpose(1, 2)[:, :, None]
            .expand(rows, 2, 2, length, width)
            .reshape(rows, 4, length, width)
            for t in (k, v)
        )
        made = functional.scaled_dot_product_attention(q, k, v, self.mask(x))
        return made.square().mean() + 0 * self.bias.sum()


def comparison(x: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(x.shape[1])
    return (positions[None, :] <= positions[:, None]).expand(x.shape[0], 1, -1, -1)


def triangle(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()


def additive(x: torch.Tensor) -> torch.Tensor:
    return torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)


def window(x: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(x.shape[1])
    apart = positions[:, None] - positions[None, :]
    return (apart >= 0) & (apart < 100)


def sized_window(x: torch.Tensor) -> torch.Tensor:
    """The constant is in a size: ``min(length, 100)``."""
    positions = torch.arange(x.shape[1])
    apart = positions[:, None] - positions[None, :]
    return (apart >= 0) & (apart < torch.sym_min(x.shape[1], 100))


def blocks(x: torch.Tensor) -> torch.Tensor:
    """Blocks of 100: no constant is above 10."""
    positions = torch.arange(x.shape[1])
    same = positions[:, None] // 10 // 10 == positions[None, :] // 10 // 10
    return triangle(x) & same


def shifted_window(x: torch.Tensor) -> torch.Tensor:
    """A window of 200 by four constants of 50."""
    positions = torch.arange(x.shape[1])
    apart = positions[:, None] - positions[None, :]
    return (apart >= 0) & (apart - 50 - 50 - 50 < 50)


def float_window(x: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(x.shape[1]).float()
    apart = positions[:, None] - positions[None, :]
    return (apart >= 0) & (apart < 99.5)


def by_row(x: torch.Tensor) -> torch.Tensor:
    """Rows of the batch from 64 on see everything."""
    late = torch.arange(x.shape[0])[:, None, None, None] >= 64
    return triangle(x) | late


def strict(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(1)


def padded(x: torch.Tensor) -> torch.Tensor:
    return triangle(x) & (x[:, None, None, :, 0] > -1e9)


def whole(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)


def positive(x: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(x.shape[1]) + 0
    return (positions[None, None, :, None] >= 0).expand(x.shape[0], -1, x.shape[1], x.shape[1])


def zero(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(x.shape[0], 1, 1, x.shape[1])


def late(x: torch.Tensor) -> torch.Tensor:
    """Hides the keys from position 100 on."""
    return (torch.arange(x.shape[1]) < 100).expand(x.shape[1], -1)


def prepared(model: nn.Module, precision: str = "fp32") -> tuple[fx.GraphModule, fx.Node]:
    x = torch.randint(16, (4, 6), generator=torch.Generator().manual_seed(1))
    graph = PassManager(all_passes()).run(PREPARE, capture(model, (x,), precision=precision).graph)
    (node,) = [n for n in graph.graph.nodes if "scaled_dot_product" in str(n.target)]
    return graph, node


@pytest.mark.slow
@pytest.mark.parametrize("mask", [comparison, triangle, additive])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_causal_masks_become_a_flag(mask: Mask, precision: str) -> None:
    graph, node = prepared(Attention(mask), precision)
    assert argument(node, "attn_mask") is None and argument(node, "is_causal") is True
    assert argument(node, "enable_gqa") is True
    assert [argument(node, n).meta["val"].shape[1] for n in ("query", "key")] == [4, 2]
    names = {packet_name(n.target) for n in graph.graph.nodes}
    assert not names & {"aten.arange", "aten.tril", "aten.triu", "aten.expand", "aten.le"}
    query = argument(node, "query").meta["val"]
    assert query.dtype == argument(node, "key").meta["val"].dtype == node.meta["val"].dtype


@pytest.mark.slow
@pytest.mark.parametrize("mask", [whole, positive, zero])
def test_masks_that_hide_nothing_vanish(mask: Mask) -> None:
    graph, node = prepared(Attention(mask))
    assert argument(node, "attn_mask") is None and not argument(node, "is_causal")
    assert argument(node, "enable_gqa") is True
    names = {packet_name(n.target) for n in graph.graph.nodes}
    assert not names & {"aten.arange", "aten.ones", "aten.zeros", "aten.ge", "aten.expand"}


class Biased(nn.Module):
    """Cross attention of 2 heads with a learned bias, hidden where a mask says so."""

    def __init__(self, mask: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.mask = mask
        self.table, self.embed = nn.Embedding(64, 2), nn.Embedding(16, 8)

    def forward(self, ids: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        q, k = (
            self.embed(x).view(x.shape[0], x.shape[1], 2, 4).transpose(1, 2) for x in (ids, others)
        )
        apart = torch.arange(ids.shape[1])[:, None] - torch.arange(others.shape[1])[None, :]
        bias = self.table(apart.clamp(-31, 31) + 31).permute(2, 0, 1)[None]
        hidden = torch.where(self.mask(ids, others), bias, torch.finfo(torch.float32).min)
        made = functional.scaled_dot_product_attention(q, k, k, hidden.contiguous())
        return made.square().mean()


def shown(ids: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    seen = torch.arange(others.shape[1])[None, None, None, :] >= 0
    return seen.expand(ids.shape[0], 1, ids.shape[1], -1)


def partly_shown(ids: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    seen = torch.arange(others.shape[1])[None, None, None, :] < 77
    return seen.expand(ids.shape[0], 1, ids.shape[1], -1)


@pytest.mark.slow
@pytest.mark.parametrize(("mask", "kept"), [(shown, 0), (partly_shown, 1)])
def test_a_bias_is_hidden_only_where_a_key_is(mask: Any, kept: int) -> None:
    draw = torch.Generator().manual_seed(1)
    ids, others = (torch.randint(16, (4, n), generator=draw) for n in (6, 9))
    torch.manual_seed(0)
    model = Biased(mask)
    captured = capture(model, (ids, others))
    graph = PassManager(all_passes()).run(PREPARE, captured.graph)
    assert len([n for n in graph.graph.nodes if packet_name(n.target) == "aten.where"]) == kept
    stages = check_equal(captured, assigned(graph, (0,)), [ids, others])
    loss = stages.run([ids, others], 0)[stages.spec.loss]
    assert torch.equal(loss, model(ids, others))


@pytest.mark.slow
@pytest.mark.parametrize(
    "mask",
    [
        window, sized_window, blocks, shifted_window, float_window, by_row, strict, padded, late,
    ],
)  # fmt: skip
def test_other_masks_stay(mask: Mask) -> None:
    _, node = prepared(Attention(mask))
    assert argument(node, "attn_mask") is not None and not argument(node, "is_causal")
    assert not argument(node, "enable_gqa")


def test_the_window_is_beyond_the_example() -> None:
    """The window of 100 equals a causal mask at the example's length of 6."""
    x = torch.randn(4, 6, 8)
    assert torch.equal(window(x), triangle(x))


@pytest.mark.slow
def test_trains_the_same_bits() -> None:
    import fxpart

    x = torch.randint(16, (4, 6), generator=torch.Generator().manual_seed(1))
    model = Attention(comparison)
    program = fxpart.compile(model, "local:1", example_inputs=(x,), constraints={"stages": 1})
    assert "None, 0.0, True" in program.sources[0]
    assert program.verify().passed
