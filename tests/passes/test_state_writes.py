"""Buffers and parameters that forward writes, where values are sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fxpart.passes import PREPARE, all_passes
from torch import nn
from torch.nn import functional

import fxpart
from fxpart.capture import capture
from fxpart.compiler import PassManager
from fxpart.compiler.effects import list_written_nodes, packet_name, state_written
from fxpart.errors import FxpartError
from tests.support.plain_training import ONE, batches_of, difference

TENSOR = {"mesh": "tp=2", "stages": 1}
BOTH = {"mesh": "dp=2,tp=2", "stages": 1}
ROWS, COLUMNS = {"inner.weight": "tp:S(0)"}, {"inner.weight": "tp:S(1)"}


class Chained(nn.Module):
    """Three writes in a row, writes through slices, and a counter of whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("history", torch.zeros(3, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(x)
        with torch.no_grad():
            mean = hidden.mean(0)
            self.count += 1
            self.count.mul_(2)
            self.mean.mul_(0.9).add_(mean, alpha=0.1)
            self.mean.lerp_(mean, 0.3)
            self.history[0] = self.mean
            self.history[1:].add_(mean)
            self.history[2].copy_(mean * mean).sqrt_().clamp_(max=2)
        scale = 1 + 0.01 * self.count.float()
        return torch.tanh(hidden - self.mean) * scale + self.history.sum(0)


class ReadBefore(nn.Module):
    """Buffers that are read before they are written, and read again."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("spread", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(x)
        centered = hidden - self.mean
        with torch.no_grad():
            self.mean.lerp_(hidden.mean(0), 0.5)
            self.spread.copy_(0.9 * self.spread + 0.1 * hidden.var(0, unbiased=False))
        return torch.tanh(centered) / self.spread.sqrt() + self.mean


class Clamped(nn.Module):
    """Weights that forward limits, and scales by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.inner.weight.clamp_(-0.2, 0.2)
            self.outer.weight[:2].mul_(0.9)
        return self.outer(torch.tanh(self.inner(x)))


def ids(x: torch.Tensor) -> torch.Tensor:
    return (x.abs() * 5).long() % 20


class Lookup(nn.Module):
    """kind: which of the lookups that limit the norms of the rows that they read."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.table = nn.Embedding(20, 8, max_norm=0.5)
        self.bag = nn.EmbeddingBag(20, 8, max_norm=0.4)
        self.rows = nn.Parameter(torch.randn(20, 8))
        self.outer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "bag":
            return self.outer(self.bag(ids(x)))
        if self.kind == "function":
            return self.outer(functional.embedding(ids(x), self.rows, max_norm=0.6).sum(1))
        return self.outer(self.table(ids(x)).sum(1))


class TiedLookup(nn.Module):
    """The table is the weight of a head, too."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.middle = nn.Embedding(20, 8, max_norm=0.5), nn.Linear(8, 8)
        self.head, self.outer = nn.Linear(8, 20, bias=False), nn.Linear(20, 8)
        self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.middle(self.table(ids(x)).sum(1)))
        return self.outer(self.head(hidden))


@pytest.mark.slow
@pytest.mark.parametrize("build", [Chained, ReadBefore, Clamped, TiedLookup])
def test_one_rank_gives_every_bit(build: type[nn.Module]) -> None:
    assert difference(build, batches_of((8, 8), (8, 8)), constraints=ONE) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("build", [Chained, ReadBefore])
@pytest.mark.parametrize("annotations", [{}, ROWS, COLUMNS], ids=["open", "rows", "columns"])
@pytest.mark.parametrize("constraints", [TENSOR, BOTH], ids=["tensor", "both"])
def test_written_buffers_are_whole_and_right(
    build: type[nn.Module], annotations: dict[str, str], constraints: dict[str, Any]
) -> None:
    devices = 4 if constraints is BOTH else 2
    off = difference(
        build, batches_of((8, 8), (8, 8)), devices=devices, constraints=constraints,
        annotations=annotations,
    )  # fmt: skip
    assert off < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("build", [Chained, Clamped, lambda: Lookup("table"), TiedLookup])
def test_state_is_right_under_every_zero_level(build: Any, zero: int) -> None:
    constraints = {"mesh": "dp=2", "stages": 1, "zero": zero}
    batches = batches_of((8, 8), (8, 8))
    assert difference(build, batches, devices=2, constraints=constraints) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["table", "bag", "function"])
@pytest.mark.parametrize("constraints", [TENSOR, BOTH], ids=["tensor", "both"])
def test_lookups_with_a_largest_norm(kind: str, constraints: dict[str, Any]) -> None:
    devices = 4 if constraints is BOTH else 2
    batches = batches_of((8, 8), (8, 8))
    off = difference(lambda: Lookup(kind), batches, devices=devices, constraints=constraints)
    assert off < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "annotations"),
    [
        (lambda: Lookup("table"), {"table.weight": "tp:S(0)"}),
        (lambda: Lookup("bag"), {"bag.weight": "tp:S(1)"}),
        (lambda: Lookup("function"), {"rows": "tp:S(1)"}),
        (TiedLookup, {"head.weight": "tp:S(0)"}),
        (Clamped, ROWS),
    ],
)
def test_annotations_of_what_is_written_whole_are_refused(
    build: Any, annotations: dict[str, str]
) -> None:
    model, batch = fxpart.annotate(build(), annotations), batches_of((8, 8), (8, 8))[0]
    with pytest.raises(FxpartError, match="FXP112"):
        fxpart.compile(
            model, "local:2", example_inputs=batch, loss=nn.MSELoss(), constraints=TENSOR
        )


@pytest.mark.slow
def test_followed_buffers_are_written_once_at_the_end() -> None:
    captured = capture(Chained(), batches_of((8, 8), (8, 8))[0], loss=nn.MSELoss())
    graph = PassManager(all_passes()).run(PREPARE, captured.graph).graph
    writers = state_written(graph)
    assert sorted(names for names in writers.values()) == [("count",), ("history",), ("mean",)]
    for writer in writers:
        assert packet_name(writer.target) == "aten.copy_"
        assert list_written_nodes(writer)[0].op == "get_attr"


@pytest.mark.slow
def test_single_writes_stay_as_they_are() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.steps.add_(1)
            return self.norm(self.inner(x))

    captured = capture(Counting(), batches_of((8, 8), (8, 8))[0], loss=nn.MSELoss())
    graph = PassManager(all_passes()).run(PREPARE, captured.graph).graph
    found = {packet_name(writer.target) for writer in state_written(graph)}
    assert found == {"aten.add_", "aten.batch_norm"}


def test_a_gradient_into_a_followed_buffer_is_refused() -> None:
    class Careless(Chained):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.inner(x)
            self.mean.mul_(0.9).add_(hidden.mean(0))
            return hidden - self.mean

    captured = capture(Careless(), batches_of((8, 8), (8, 8))[0], loss=nn.MSELoss())
    with pytest.raises(FxpartError, match=r"(?s)FXP108.*mean"):
        PassManager(all_passes()).run(PREPARE, captured.graph)


class Routed(nn.Module):
    """Experts that are chosen by score; kind: how their tokens are counted."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.gate = kind, nn.Linear(8, 4)
        self.up = nn.Parameter(0.3 * torch.randn(4, 8, 8))
        self.register_buffer("bias", torch.zeros(4))

    def counts(self, chosen: torch.Tensor) -> torch.Tensor:
        if self.kind == "scatter":
            ones = torch.ones(chosen.numel())
            return torch.zeros(4).scatter_add(0, chosen.flatten(), ones)
        if self.kind == "one_hot":
            return functional.one_hot(chosen.flatten(), 4).cumsum(0)[-1].float()
        if self.kind == "searchsorted":
            ordered = chosen.flatten().sort().values
            edges = torch.searchsorted(ordered, torch.arange(5))
            return edges.diff().float()
        return torch.bincount(chosen.flatten(), minlength=4).float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        score = self.gate(x).sigmoid()
        chosen = (score + self.bias).topk(2, -1).indices
        order = chosen.flatten().argsort(stable=True)
        count = self.counts(chosen)
        weight, experts = score.gather(1, chosen).flatten()[order], self.up[chosen.flatten()[order]]
        with torch.no_grad():
            self.bias.add_(torch.sign(count.mean() - count), alpha=0.01)
        out = torch.bmm(x[order // 2][:, None], experts)[:, 0] * weight[:, None]
        return x + torch.zeros_like(x).index_add(0, order // 2, out)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bincount", "scatter", "one_hot", "searchsorted"])
@pytest.mark.parametrize(
    "annotations",
    [{"up": "tp:S(0)", "gate.weight": "tp:S(0)"}, {"up": "tp:S(1)", "gate.weight": "tp:S(1)"}],
    ids=["experts", "columns"],
)
def test_routing_by_order_on_replicas_and_tensor_ranks(
    kind: str, annotations: dict[str, str]
) -> None:
    off = difference(
        lambda: Routed(kind), batches_of((8, 8), (8, 8), 2), devices=4, constraints=BOTH,
        annotations=annotations,
    )  # fmt: skip
    assert off < 1e-6


@pytest.mark.slow
def test_sizes_that_depend_on_data_are_refused_in_every_way_of_tracing() -> None:
    class Picked(Routed):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            best, out = self.gate(x).argmax(-1), torch.zeros_like(x)
            for expert in range(4):
                index = torch.where(best == expert)[0]
                out = out.index_add(0, index, x[index] @ self.up[expert])
            return out

    with pytest.raises(FxpartError, match="FXP108"):
        capture(Picked(""), batches_of((8, 8), (8, 8))[0], loss=nn.MSELoss())


class Still(nn.Module):
    """Writes that change nothing in the first step: statistics of zeros, a limit, a zero step."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8, bias=False)
        self.norm = nn.BatchNorm1d(8)
        self.decayed = nn.Parameter(torch.randn(8))
        self.seen = nn.Buffer(torch.zeros(8))
        self.outer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.decayed.mul_(1 - 0.01 * x.abs().mean())
            self.seen.mul_(2).add_(x.mean(0))
        hidden = self.norm(self.inner(x)).clamp_(max=0.5 + x.detach().abs().max())
        return torch.tanh(self.outer(torch.tanh(hidden * self.decayed) + self.seen))


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("devices", [1, 2])
def test_state_is_written_once_under_recomputation(mode: str, devices: int) -> None:
    (x, y), *later = batches_of((8, 8), (8, 8))
    constraints = {"mesh": "none", "stages": devices, "recompute": mode}
    batches = [(0 * x, y), *later]
    assert difference(Still, batches, devices=devices, constraints=constraints) == 0.0
