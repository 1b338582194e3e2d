"""What is priced inside stages is what lanes do: collectives and copies, counted as they come."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fxpart
from fxpart.collectives.shard_buffer import lengths, pack, spread, take, unpack
from fxpart.pricing import graph_costs
from fxpart.pricing.collective_traffic import (
    CollectiveTransfer,
    NodeTraffic,
    compute_node_traffic,
    copies,
)

_NAMES = {
    ("partial", "replicate"): "all_reduce",
    ("shard(0)", "replicate"): "all_gather",
    ("partial", "shard(0)"): "reduce_scatter",
    ("shard(0)", "shard(1)"): "all_to_all",
}


class Clicks(nn.Module):
    """Tables that are read in bags: their offsets are numbers that every lane takes its part of."""

    def __init__(self, tables: int = 3) -> None:
        super().__init__()
        made = (nn.EmbeddingBag(30, 8, mode="sum", sparse=True) for _ in range(tables))
        self.tables = nn.ModuleList(made)
        self.top = nn.Linear(8 * tables, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        bags = [table(ids[:, k : k + 1]) for k, table in enumerate(self.tables)]
        found: torch.Tensor = self.top(torch.cat(bags, 1))[:, 0]
        return found


def clicks() -> tuple[nn.Module, Any, Any]:
    example = (torch.randint(0, 30, (8, 3)), torch.rand(8).round())
    return Clicks(), example, nn.functional.binary_cross_entropy_with_logits


def layers() -> tuple[nn.Module, Any, Any]:
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8), nn.Dropout(0.1))
    return model, (torch.randn(8, 8), torch.randn(8, 8)), nn.functional.mse_loss


# The first product's outputs are cut, and so the second's inputs: sums there, forward and backward.
CUT = {"0.weight": "tp:S(0)", "0.bias": "tp:S(0)"}
# Parameters lie in parts and rows are cut: all parameters are gathered, and those of the second
# product for its backward again; the first product's input takes no gradient.
HELD = {
    "0.weight": "tp:S(1)",
    "2.weight": "tp:S(1)",
    "input:input_1": "tp:S(0)",
    "input:target": "tp:S(0)",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made", "mesh", "cut"),
    [
        (clicks, "dp=2", {}),
        (layers, "dp=2", {}),
        (layers, "tp=2", CUT),
        (layers, "dp=2,tp=2", CUT),
        (layers, "tp=2", HELD),
    ],
)
def test_collectives_that_are_priced_are_those_that_start(
    made: Any, mesh: str, cut: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By kind, of a microbatch's forward and backward. Sums of a step are not among them."""
    priced: list[CollectiveTransfer] = []

    def record(*args: Any) -> NodeTraffic:
        found = compute_node_traffic(*args)
        priced.extend((*found.forward, *found.backward))
        return found

    monkeypatch.setattr(graph_costs, "compute_node_traffic", record)
    torch.manual_seed(0)
    model, example, loss = made()
    wishes = {"mesh": mesh, "stages": 1} | (
        {"annotations": json.dumps({"annotations": cut})} if cut else {}
    )
    program = fxpart.compile(
        model, f"local:{4 if ',' in mesh else 2}", example_inputs=example, loss=loss,
        microbatches=2, optimizer="adagrad", constraints=wishes,
    )  # fmt: skip
    wanted = Counter(_NAMES[move.source, move.target] for move in priced)
    trainer = program.trainer()
    trainer.step(example)
    with trainer.record() as recorder:
        trainer.step(example)
    trainer.close()
    spans = list(recorder.recording.of("collective"))
    for rank in range(program.plan.world):
        found = Counter(span.name for span in spans if span.rank == rank)
        # of two microbatches, and of each its start and the wait for its end
        assert found == {name: 4 * count for name, count in wanted.items()}
    if cut is HELD:
        assert (wanted["all_gather"], wanted["reduce_scatter"]) == (3, 2)
    else:
        assert wanted["all_reduce"] == {"dp=2": 1, "tp=2": 2, "dp=2,tp=2": 3}[mesh]


class Copied(TorchDispatchMode):
    """Counts bytes that copies read and write, and that zeros are written to."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func.name().split("::")[1].split(".")[0]
        if name in ("copy_", "clone"):
            self.bytes += 2 * found.nbytes
        elif name in ("zeros", "new_zeros", "zero_"):
            self.bytes += found.nbytes
        return found


@settings(deadline=None, max_examples=60)
@given(
    lanes=st.integers(2, 4), dim=st.integers(0, 2), outer=st.sampled_from([1, 2]),
    sizes=st.lists(st.sampled_from([1, 2, 3]), min_size=3, max_size=3),
    kind=st.sampled_from(["all_gather", "reduce_scatter", "slice_shard"]),
    gradient=st.sampled_from(["R", "P"]),
)  # fmt: skip
def test_copies_that_are_priced_are_those_that_are_made(
    lanes: int, dim: int, outer: int, sizes: list[int], kind: str, gradient: str
) -> None:
    """Around transfers, on the lane in the middle, forward and backward."""
    gradient = "R" if kind == "reduce_scatter" else gradient
    shape = [size * outer * lanes if d == dim else size for d, size in enumerate(sizes)]
    whole, piece = torch.rand(shape), lengths(shape[dim], lanes, outer)[1] * outer
    small = torch.rand([piece if d == dim else size for d, size in enumerate(shape)])
    flat = torch.rand(whole.numel())

    def gathered() -> object:
        return unpack(flat, shape, dim, outer, lanes)

    def scattered() -> object:
        return pack(whole, dim, outer, lanes)

    def cut() -> object:
        return take(whole, dim, outer, lanes, 1)

    def around() -> object:
        return spread(small, dim, outer, lanes, 1, shape[dim])

    done = {
        ("all_gather", "R"): (gathered, cut), ("all_gather", "P"): (gathered, scattered),
        ("reduce_scatter", "R"): (scattered, gathered),
        ("slice_shard", "R"): (cut, gathered), ("slice_shard", "P"): (cut, around),
    }  # fmt: skip
    made = []
    for work in done[kind, gradient]:
        with Copied() as copied:
            work()
        made.append(copied.bytes)
    held = {"dim": dim, "outer": outer}
    assert copies(kind, gradient, held, shape, whole.nbytes, lanes) == tuple(made)


@pytest.mark.parametrize(
    ("source", "target"), [((0, 1), (1, 1)), ((1, 1), (2, 1)), ((1, 2), (0, 1))]
)
def test_an_exchange_copies_where_pieces_do_not_lie_together(
    source: tuple[int, int], target: tuple[int, int]
) -> None:
    lanes, shape = 2, [4, 4, 4]
    local = torch.rand([size // lanes if d == source[0] else size for d, size in enumerate(shape)])
    after = [size // lanes if d == target[0] else size for d, size in enumerate(shape)]
    with Copied() as copied:
        flat, _ = pack(local, *target, lanes)
        unpack(flat, after, *source, lanes)
    held = {
        "source": source[0], "source_outer": source[1], "target": target[0],
        "target_outer": target[1],
    }  # fmt: skip
    assert copies("all_to_all", "R", held, after, 4 * 64, lanes) == (copied.bytes,) * 2
