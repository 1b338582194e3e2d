"""lower: local graphs run on all mesh ranks equal the graph; collectives are those of
Megatron-LM."""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from fxpart.passes import PREPARE, all_passes
from fxpart.passes.annotate import AnnotatePass
from fxpart.passes.lower import LowerPass
from fxpart.passes.propagate import PropagatePass
from hypothesis import given, settings
from hypothesis import strategies as st
from local_runs import Outcome, by_hand, check, lower_all
from random_sharded import Maker, shard_at_random
from torch import fx, nn

from fxpart.capture import CapturedModel, capture
from fxpart.compiler import MESH_KEY, PassManager
from fxpart.compiler.collective_calls import is_collective
from fxpart.compiler.graph_edit import annotation
from fxpart.compiler.graph_json import graph_from_json, graph_to_json
from fxpart.compiler.node_annotation import PARTIAL_KEY
from fxpart.errors import FxpartError
from fxpart.sharding import Mesh

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
ROWS, TOKENS, WIDTH, HEADS = 4, 6, 8, 4
SIZE = 8  # bytes of a float64
MEGATRON = {
    "q.weight": "tp:S(0)", "k.weight": "tp:S(0)", "v.weight": "tp:S(0)", "out.weight": "tp:S(1)",
    "up.weight": "tp:S(0)", "up.bias": "tp:S(0)", "down.weight": "tp:S(1)",
}  # fmt: skip


class Layer(nn.Module):
    """A transformer layer as Megatron-LM splits it."""

    def __init__(self, inner: int = 16) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, _ = x.shape
        normed = self.first(x)
        q, k, v = (
            layer(normed).view(rows, tokens, HEADS, -1).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, tokens, WIDTH))
        return x + self.down(torch.relu(self.up(self.second(x))))


class Model(nn.Module):
    """Two layers and a loss that every element counts in."""

    def __init__(self, inner: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(inner), Layer(inner)])
        self.end = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.end(x)


def squares(output: torch.Tensor) -> torch.Tensor:
    return (output * output * output).sum()


@cache
def model(inner: int = 16) -> tuple[CapturedModel, fx.GraphModule]:
    """The captured model in float64, and its prepared graph."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = Model(inner).double()
    found = capture(made, (numbers(ROWS, TOKENS, WIDTH),), loss=squares)
    return found, PassManager(all_passes()).run(PREPARE, found.graph)


def numbers(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def sharded(graph: fx.GraphModule, mesh: str, seeds: dict[str, str]) -> fx.GraphModule:
    return PassManager(all_passes()).run(
        [AnnotatePass(mesh, json.dumps(seeds)), PropagatePass()], graph
    )


def everywhere(seeds: dict[str, str]) -> dict[str, str]:
    return {f"layers.*.{name}": text for name, text in seeds.items()}


SEQUENCE = {
    **everywhere(MEGATRON),
    "module:layers.*.first": "tp:S(1)",
    "module:layers.*.second": "tp:S(1)",
    "module:end": "tp:S(1)",
}


def ran(mesh: str, seeds: dict[str, str], inner: int = 16) -> tuple[list[fx.GraphModule], Outcome]:
    """Annotate, propagate, lower, run and compare."""
    found, graph = model(inner)
    rows = numbers(ROWS, TOKENS, WIDTH)
    return check(sharded(graph, mesh, seeds), found.state, [rows])


def kinds(graph: fx.GraphModule) -> Counter[str]:
    """How often each collective stands in a graph."""
    return Counter(n.target.__name__ for n in graph.graph.nodes if is_collective(n.target))


@pytest.mark.slow
def test_tensor_parallel_is_megatron() -> None:
    """Two all-reduces forward and two backward in each layer, of rows * tokens * width elements."""
    mesh_ranks, outcome = ran("tp=2", everywhere(MEGATRON))
    assert kinds(mesh_ranks[0])["all_reduce"] == 2 * 2
    assert kinds(mesh_ranks[0])["enter"] == 2 * 2  # each an all-reduce backward
    assert outcome.calls == {("all_reduce", "tp"): 2 * 4}
    assert outcome.bytes == {("all_reduce", "tp"): 2 * 4 * ROWS * TOKENS * WIDTH * SIZE}
    assert mesh_ranks[0].meta[PARTIAL_KEY] == {}


@pytest.mark.slow
def test_sequence_parallel_is_megatron() -> None:
    """All-gather and reduce-scatter in place of each all-reduce: the same bytes."""
    mesh_ranks, outcome = ran("tp=2", SEQUENCE)
    found = kinds(mesh_ranks[0])
    assert found["all_gather"] == found["reduce_scatter"] == 2 * 2
    pairs = 2 * 4  # forward and backward, two in each layer
    whole = ROWS * TOKENS * WIDTH * SIZE
    assert outcome.calls == {
        ("all_gather", "tp"): pairs, ("reduce_scatter", "tp"): pairs, ("all_reduce", "tp"): 1,
    }  # fmt: skip
    assert outcome.bytes == {
        ("all_gather", "tp"): pairs * whole, ("reduce_scatter", "tp"): pairs * whole,
        ("all_reduce", "tp"): SIZE,  # the loss
    }  # fmt: skip
    norms = {n for n, axes in mesh_ranks[0].meta[PARTIAL_KEY].items() if axes == ("tp",)}
    assert {"layers.0.first.weight", "layers.1.second.bias", "end.weight"} <= norms
    assert "layers.0.q.weight" not in norms


@pytest.mark.slow
def test_data_parallel_talks_at_the_end_only() -> None:
    """One all-reduce of the loss; every parameter's gradient is a sum still to be made."""
    mesh_ranks, outcome = ran("dp=2", {"input:x": "dp:S(0)"})
    assert outcome.calls == {("all_reduce", "dp"): 1}
    found, _ = model()
    assert mesh_ranks[0].meta[PARTIAL_KEY] == dict.fromkeys(found.parameters, ("dp",))


@pytest.mark.slow
def test_data_and_tensor_parallel() -> None:
    """Each axis as by itself, on half the rows."""
    mesh_ranks, outcome = ran("dp=2,tp=2", {"input:x": "dp:S(0)", **everywhere(MEGATRON)})
    assert outcome.calls == {("all_reduce", "tp"): 2 * 4, ("all_reduce", "dp"): 1}
    assert outcome.bytes[("all_reduce", "tp")] == 2 * 4 * ROWS * TOKENS * WIDTH * SIZE // 2
    assert len(mesh_ranks) == 4


@pytest.mark.slow
@pytest.mark.parametrize("mesh_ranks", [2, 4])
def test_uneven(mesh_ranks: int) -> None:
    """An inner width that the mesh ranks cannot share evenly."""
    seeds = everywhere({k: v for k, v in MEGATRON.items() if k.startswith(("up", "down"))})
    found, outcome = ran(f"tp={mesh_ranks}", seeds, inner=11)
    widths = [
        next(n for n in g.graph.nodes if n.name == "layers_0_up_weight").meta["val"].shape[0]
        for g in found
    ]
    assert sum(widths) == 11 and len(set(widths)) > 1
    assert outcome.calls == {("all_reduce", "tp"): 2 * 2}


class Shared(nn.Module):
    """A weight that a cut op and a whole one use, through a chain of weights alone."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(numbers(WIDTH))
        self.big = nn.Parameter(numbers(12, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.tanh(self.scale)
        y = (x * scale) @ self.big.t()
        return y.sum() + ((x + scale) ** 2).sum()


def test_a_parameter_of_whole_and_cut_users() -> None:
    """``leave`` where the gradient is whole; the sum waits for the end of the step."""
    with torch.random.fork_rng(devices=[]):
        found = capture(Shared(), (numbers(ROWS, WIDTH),), loss=lambda total: total)
    graph = PassManager(all_passes()).run(PREPARE, found.graph)
    names = {str(n.target).split(".")[1]: n.name for n in graph.graph.nodes if n.op[:4] == "call"}
    strategies = {names["mul"]: ("d0",)}
    mesh_ranks, outcome = check(
        by_hand(graph, "a=2", {"x": "a:S(0)"}, strategies), found.state, [numbers(ROWS, WIDTH)]
    )
    assert mesh_ranks[0].meta[PARTIAL_KEY] == {"scale": ("a",)}
    assert kinds(mesh_ranks[0])["leave"] == 1
    assert kinds(mesh_ranks[0])["enter"] == 0
    assert outcome.gradients.keys() == {"scale", "big"}


@pytest.mark.slow
def test_blocks_and_names_stay() -> None:
    """Inserted nodes belong to the block of the op that they serve; no name is lost."""
    _, graph = model()
    local = lower_all(sharded(graph, "tp=2", everywhere(MEGATRON)))[0]
    names = {n.name for n in local.graph.nodes}
    assert {n.name for n in graph.graph.nodes if annotation(n).block is not None} <= names
    for node in local.graph.nodes:
        if is_collective(node.target) and node.target.__name__ == "enter":
            blocks = [annotation(u).block for u in node.users]
            assert annotation(node).block == min(b for b in blocks if b is not None)


@pytest.mark.slow
def test_saved_bytes_are_local() -> None:
    """What autograd keeps of the inner activations is a mesh rank's share."""
    _, graph = model()
    local = lower_all(sharded(graph, "tp=2", everywhere(MEGATRON)))[0]

    def kept(module: fx.GraphModule, name: str) -> Any:
        node = next(n for n in module.graph.nodes if n.name == name)
        return sum(s.size for s in annotation(node).saved)

    relu = next(n.name for n in graph.graph.nodes if "relu" in str(n.target))
    assert kept(graph, relu) == 2 * kept(local, relu)


def test_lane_outside_the_mesh() -> None:
    _, graph = model()
    with pytest.raises(FxpartError, match="FXP109"):
        PassManager(all_passes()).run([LowerPass(mesh_rank="2")], sharded(graph, "tp=2", {}))


@pytest.mark.slow
def test_graphs_travel_as_text() -> None:
    """A reproducer's graph: shardings of the whole one, collectives of the local one."""
    _, graph = model()
    whole = sharded(graph, "tp=2", SEQUENCE)
    local = lower_all(whole)[0]
    again = graph_from_json(json.loads(json.dumps(graph_to_json(whole))))
    assert [annotation(n).sharding for n in again.graph.nodes] == [
        annotation(n).sharding for n in whole.graph.nodes
    ]
    assert plain(lower_all(again)[0]) == plain(local)
    twice = graph_from_json(json.loads(json.dumps(graph_to_json(local))))
    assert plain(twice) == plain(local)
    assert twice.meta[PARTIAL_KEY] == local.meta[PARTIAL_KEY]


@pytest.mark.parametrize("name", ["tensor", "sequence"])
def test_golden_texts(name: str) -> None:
    """One mesh rank's graph of a layer, as text."""
    _, graph = model()
    seeds = SEQUENCE if name == "sequence" else everywhere(MEGATRON)
    local = lower_all(sharded(graph, "tp=2", seeds))[0]
    text = "\n".join(map(line, local.graph.nodes)) + "\n"
    path = GOLDEN / f"lowered_{name}_parallel.txt"
    assert text == path.read_text(), f"{path.name} is out of date"


def plain(graph: fx.GraphModule) -> list[str]:
    """The text of a graph, whatever its symbol is called."""
    return [re.sub(r"'s\d+'", "'s'", line(node)) for node in graph.graph.nodes]


def line(node: fx.Node) -> str:
    """A node: block, name, call, shape."""
    held = node.meta.get("val")
    shape = f": {[str(s) for s in held.shape]}" if isinstance(held, torch.Tensor) else ""
    called = getattr(node.target, "__name__", str(node.target))
    block = annotation(node).block if node.op == "call_function" else None
    given = "" if node.op in ("placeholder", "get_attr") else f"{node.args}".replace(",)", ")")
    given += f" {dict(node.kwargs)}" if node.kwargs else ""
    return f"{'' if block is None else block:>2} {node.name}{shape} = {called}{given}"


MESHES = ("a=2", "a=3", "a=2,b=2", "a=4", "a=3,b=2")


def random_program(seed: int, mesh: str) -> None:
    """A random graph with random shardings, run on all mesh ranks against the graph itself."""
    random = Random(seed)
    maker = Maker(random)
    graph = maker.make(random.randint(4, 14))
    shard_at_random(graph, Mesh.parse(mesh), random)
    assert graph.meta[MESH_KEY].size > 1
    check(graph, maker.state, maker.inputs, key=seed, rtol=1e-8)


@pytest.mark.slow
@settings(max_examples=20)
@given(st.integers(0, 10**6), st.sampled_from(MESHES))
def test_random_programs(seed: int, mesh: str) -> None:
    """Forward and gradients in float64, in every sharding that the rules allow."""
    random_program(seed, mesh)


@pytest.mark.slow
@settings(max_examples=60)
@given(st.integers(0, 10**6), st.sampled_from(MESHES))
def test_many_random_programs(seed: int, mesh: str) -> None:
    """The same, longer."""
    random_program(seed, mesh)
