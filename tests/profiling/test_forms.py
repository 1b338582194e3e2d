"""Ops that use collectives inside, measured on one rank, and found again when plans are priced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from fxpart.costmodels import ProfileCostModel, find, op_key
from fxpart.costmodels.op_keys import is_form
from fxpart.costmodels.op_time_estimator import BEYOND
from fxpart.costmodels.profile_store import Profile, TimeQuartiles
from fxpart.passes import PREPARE, all_passes
from sharded_graphs import propagated
from torch import fx, nn
from torch.nn import functional
from zoo import ZOO
from zoo_graphs import captured as captured_zoo
from zoo_graphs import prepared

from fxpart import collectives
from fxpart.capture import CapturedModel, capture
from fxpart.capture.workload import Workload
from fxpart.cluster.model import Cluster
from fxpart.codegen.mesh_programs.sharded_graph import ShardedGraph
from fxpart.collectives import Communicator, InProcessHub
from fxpart.compiler import PassManager
from fxpart.compiler.collective_calls import is_collective
from fxpart.planner.prepared_model import PlanningArguments, PreparedModel, prepare_model
from fxpart.planner.request import make_request
from fxpart.pricing.collective_traffic import is_plain
from fxpart.pricing.partition import price
from fxpart.pricing.specs import Specs, annotation
from fxpart.pricing.stage_parallelism import StageParallelism
from fxpart.pricing.variants import BatchSplit, Sizes, captured_rows
from fxpart.pricing.weights import trained_names
from fxpart.profiling.collective_ops import IdenticalRanksCommunicator, form_of
from fxpart.profiling.op_arguments import OpArguments, OpCall, UnmeasurableOpError, tensors
from fxpart.profiling.ops import measure
from fxpart.profiling.replica_graph import ReplicaGraph, replica
from fxpart.profiling.session import get_measurement_environment, profile
from fxpart.sharding import Mesh

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
ROWS, WORDS, WIDTH = 8, 12, 6
Graphs = tuple[ShardedGraph, CapturedModel]


class Convolutions(nn.Module):
    """Two equal layers with BatchNorm, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        layers = [m for _ in range(2) for m in (nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3))]
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x).mean((2, 3)))


class Words(nn.Module):
    """A table of words, and which word it was."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(x))


class Bags(nn.Module):
    """Bags of two words."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(WORDS, WIDTH, mode="sum")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x).tanh()


class Mixture(nn.Module):
    """Four experts, two for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, WIDTH, 10))
        self.down = nn.Parameter(torch.randn(4, 10, WIDTH))
        self.gate = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, index = self.gate(x).softmax(-1).topk(2, -1)
        return torch.ops.fxpart.experts(
            x, index, weights, self.up, self.down, None, None, "relu %0", "whole", True, "loop"
        )


def words(rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, WORDS, (rows,)), torch.randint(0, WORDS, (rows,))


def pictures() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(ROWS, 3, 8, 8), torch.randint(0, 4, (ROWS,))


DATA = {"input:*": "dp:S(0)"}
TABLES = {"table.weight": "tp:S(0)", "head.weight": "tp:S(0)", "head.bias": "tp:S(0)"}
BIG = ("gpt2", "mixtral", "recommender", "resnet50", "unet")  # of the zoo
EXPERTS = {"up": "dp:S(0)", "down": "dp:S(0)"}
# name -> model, batch, loss, mesh, annotations, the forms in the local graph
CASES: dict[str, tuple[Any, Any, Any, str, Mapping[str, str], set[str]]] = {
    "rows": (
        Convolutions, pictures, functional.cross_entropy, "dp=2", DATA,
        {"batch_norm_rows", "cross_entropy_rows"},
    ),
    "words": (
        Words, words, functional.cross_entropy, "tp=2", TABLES,
        {"embedding_rows", "cross_entropy_classes"},
    ),
    "both": (
        Words, words, functional.cross_entropy, "dp=2,tp=2", DATA | TABLES,
        {"embedding_rows", "cross_entropy_rows_classes"},
    ),
    "bags": (
        Bags, lambda: (torch.randint(0, WORDS, (ROWS, 2)), torch.randn(ROWS, WIDTH)),
        functional.mse_loss, "tp=2", TABLES, {"embedding_bag_rows"},
    ),
    "experts": (
        Mixture, lambda: (torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)),
        functional.mse_loss, "dp=2", DATA | EXPERTS, {"experts_dispatched", "mse_loss_rows"},
    ),
    "own experts": (
        Mixture, lambda: (torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)),
        functional.mse_loss, "dp=2", EXPERTS, {"experts_cut"},
    ),
}  # fmt: skip


@cache
def sharded(name: str, mesh: str = "") -> Graphs:
    """A case's graph over its mesh, or another."""
    model, batch, loss, usual, seeds, _ = CASES[name]
    held = capture(model(), batch(), loss=loss)
    graph = PassManager(all_passes()).run(PREPARE, held.graph)
    present = {str(n.target) for n in graph.graph.find_nodes(op="get_attr")}
    given = {k: v for k, v in seeds.items() if k.startswith("input") or k in present}
    return ShardedGraph(propagated(graph, mesh or usual, given, close=True), held), held


def local(made: Graphs, rows: int = 4, mesh_rank: int = 0) -> tuple[fx.GraphModule, Specs, Sizes]:
    """A mesh rank's graph with what says what its ops are at so many rows of its own."""
    whole, held = made
    size = rows if held.symbolic else captured_rows(held)
    sizes = Sizes(held, BatchSplit(size, 1), StageParallelism.of(whole).parts)
    return whole.local(mesh_rank), Specs(trained_names(held)), sizes


def forms(graph: fx.GraphModule) -> list[fx.Node]:
    return [n for n in graph.graph.nodes if n.op == "call_function" and form_of(n) is not None]


def assert_runs(node: fx.Node, call: OpCall, specs: Specs, sizes: Sizes) -> None:
    """Forward and backward: the shapes that the graph says, and no value that is none."""
    spec = specs.op(node)
    assert spec is not None
    op = sizes.op(spec)
    found = list(tensors(call()))
    assert [tuple(t.shape) for t in found] == [t.shape for t in op.outputs], node
    assert len(call.wanted) == op.gradients, node
    outputs = [t for t in found if t.requires_grad]
    given = [torch.randn_like(t) for t in outputs]
    made = torch.autograd.grad(outputs, call.wanted, given, allow_unused=True) if outputs else ()
    for tensor in (*found, *(t for t in made if t is not None)):
        assert not tensor.is_floating_point() or tensor.isfinite().all(), node


@pytest.mark.parametrize("name", CASES)
def test_forms_run_alone(name: str) -> None:
    graph, specs, sizes = local(sharded(name))
    assert {n.target.__name__ for n in forms(graph)} == CASES[name][-1]  # type: ignore[union-attr]
    arguments = OpArguments(graph, specs, sizes, CPU)
    for node in forms(graph):
        call = arguments.call(node)
        assert_runs(node, call, specs, sizes)
        assert_runs(node, call.copy(), specs, sizes)  # measured again and again


def test_what_only_moves_stays_unmeasured() -> None:
    graph, specs, sizes = local(sharded("rows"))
    arguments = OpArguments(graph, specs, sizes, CPU)
    plain = [n for n in graph.graph.nodes if is_collective(n.target) and is_plain(n)]
    assert plain
    for node in plain:
        with pytest.raises(UnmeasurableOpError, match="moves a tensor"):
            arguments.call(node)


def test_alone_a_form_computes_what_equal_lanes_do() -> None:
    """Against mesh ranks that run as threads and hold the same tensors: forward and gradients."""
    graph, specs, sizes = local(sharded("rows"))
    mesh, arguments = Mesh.parse("dp=2"), OpArguments(graph, specs, sizes, CPU)
    for node in forms(graph):
        call = arguments.call(node)

        def once(
            comm: Communicator, node: fx.Node = node, call: OpCall = call
        ) -> list[torch.Tensor]:
            mine = call.copy()
            result = node.target(comm, *mine.args, **mine.kwargs)  # type: ignore[operator]
            grown = torch.autograd.grad(result, mine.wanted, torch.ones_like(result))
            return [result.detach(), *grown, *(t for t in mine.args if isinstance(t, torch.Tensor))]

        for real in InProcessHub(mesh, timeout=20).run(once):
            for a, b in zip(once(IdenticalRanksCommunicator(mesh, 0)), real, strict=True):
                torch.testing.assert_close(a, b)


def test_results_are_those_of_lanes_that_give_the_same() -> None:
    mesh, x = Mesh.parse("a=3"), torch.arange(6.0)

    def all_kinds(comm: Communicator) -> list[torch.Tensor]:
        return [
            comm.all_reduce(x, "a"),
            comm.all_reduce(x, "a", "max"),
            *comm.all_gather(x, "a"),
            comm.reduce_scatter(x.split(2), "a"),
            *comm.all_to_all(x.split(2), "a"),
        ]

    for mesh_rank, real in enumerate(InProcessHub(mesh, timeout=20).run(all_kinds)):
        for a, b in zip(all_kinds(IdenticalRanksCommunicator(mesh, mesh_rank)), real, strict=True):
            assert torch.equal(a, b)
    empty = collectives.FakeCommunicator(mesh, 0).all_to_all([x[:0]] * 3, "a", [(2,)] * 3)
    alone = IdenticalRanksCommunicator(mesh, 0).all_to_all([x[:0]] * 3, "a", [(2,)] * 3)
    assert [t.shape for t in alone] == [t.shape for t in empty]
    assert all(not t.any() for t in alone)


@pytest.mark.parametrize("name", CASES)
def test_keys_are_of_local_shapes(name: str) -> None:
    """Equal for every mesh rank and for equal layers; another mesh at equal rows is another key."""
    made = sharded(name)
    keys = [_keys(local(made, mesh_rank=mesh_rank)) for mesh_rank in range(made[0].mesh.size)]
    assert all(k == keys[0] for k in keys)
    if name == "rows":
        assert len(keys[0]) == 2  # both norms are one op
        wider = _keys(local(sharded(name, "dp=4")))
        assert not wider & keys[0] and len(wider) == len(keys[0])


def _keys(made: tuple[fx.GraphModule, Specs, Sizes]) -> set[str]:
    graph, specs, sizes = made
    found = [specs.op(n) for n in forms(graph)]
    assert all(op is not None and is_form(op) for op in found)
    return {op_key(sizes.op(op)) for op in found if op is not None}


def test_other_ops_are_no_forms() -> None:
    specs = Specs(trained_names(captured_zoo("mlp")))
    found = [specs.op(n) for n in prepared("mlp").graph.nodes]
    assert not any(is_form(op) for op in found if op is not None)


@cache
def _two() -> PreparedModel:
    asked = PlanningArguments(ROWS, None, None, "roofline", {}, 0)
    options = {"loss": functional.cross_entropy, "batch_dims": None}
    return prepare_model(Convolutions(), Cluster.local(2), None, (pictures(), None), asked, options)


def front(devices: int = 2, **constraints: str) -> PreparedModel:
    """The convolutions on so many devices, as asked; captured once."""
    wanted = make_request(Cluster.local(devices), None, "roofline", constraints, 0)
    return replace(_two(), request=wanted)


def shared(made: PreparedModel) -> ReplicaGraph:
    found = replica(made)
    assert found is not None
    return found


def test_what_was_measured_is_what_prices_are_of(tmp_path: Path) -> None:
    """Every op of a replica, forms included, forward and backward; another mesh extrapolates."""
    made = front()
    one = shared(made)
    path, here = tmp_path / "a.profile", get_measurement_environment("cpu")
    (at,) = one.sizes([ROWS])
    with Profile(path, create=True) as held:
        found = measure(one.graph, made.captured, [at], held, here, 10.0)
        assert found.measured and not found.left and not found.skipped
    cluster = Cluster.local(2)
    model = find(path, cluster)
    assert isinstance(model, ProfileCostModel)
    specs, device = Specs(trained_names(made.captured)), cluster.devices[0]
    assert len(forms(one.graph)) == 3
    for node in one.graph.graph.nodes:
        op = specs.op(node) if annotation(node).block is not None else None
        if op is None or (is_collective(node.target) and is_plain(node)):
            continue
        for backward in (False, True):
            cost = model.op(at.op(op), device, backward)
            assert cost.source == "measured", node
            if form_of(node) is not None:
                # Less the time of any backward: of a small op nothing may be left.
                assert cost.seconds >= 0 if backward else cost.seconds > 0
                other = tuple((n, 4 * ROWS if n == "1" else v) for n, v in at.op(op).attributes)
                wider = model.op(replace(at.op(op), attributes=other), device, backward)
                assert wider.source == BEYOND and wider.seconds == cost.seconds


def test_a_priced_mesh_is_measured(tmp_path: Path) -> None:
    """The planner's own way to these numbers: no other source than measurements and links."""
    made = front()
    whole = sharded("rows")[0]
    one, path = shared(made), tmp_path / "a.profile"
    with Profile(path, create=True) as held:
        measure(
            one.graph,
            made.captured,
            one.sizes([ROWS]),
            held,
            get_measurement_environment("cpu"),
            10.0,
        )
    _, provenance = price(
        whole.local(0), made.captured, Cluster.local(2), cost_model=str(path), batch_size=ROWS,
        microbatches=1, sharing=StageParallelism.of(whole),
    )  # fmt: skip
    assert set(provenance["compute"].split("; ")) == {"alpha-beta", "measured"}


def test_fewer_rows_are_other_microbatches(tmp_path: Path) -> None:
    """Ops of a replica that are no forms are those of the whole graph at its share of the rows."""
    made, here = front(), get_measurement_environment("cpu")
    one = shared(made)
    whole = Sizes(made.captured, BatchSplit(ROWS // 2, 1))
    with Profile(tmp_path / "a.profile", create=True) as held:
        measure(made.graph, made.captured, [whole], held, here, 10.0)
        before = set(held.get("ops", here, TimeQuartiles))
        measure(one.graph, made.captured, one.sizes([ROWS]), held, here, 10.0)
        fresh = set(held.get("ops", here, TimeQuartiles)) - before
    names = {key.split('"')[1] for key in fresh}
    assert names == {"aten.batch_norm_rows", "aten.cross_entropy_rows"}


def test_replicas_share_equal_parts_or_are_none() -> None:
    assert shared(front()).ranks == 2
    assert shared(front(mesh="dp=2")).ranks == 2
    four = shared(front(4))
    rows = next(n for n in four.graph.graph.nodes if n.name == "x")
    size = Specs(()).tensors(rows)[0].shape[0]
    assert [at.number(size) for at in four.sizes([8, 7, 2, 1])] == [2, 1, 4]  # of 4, and of 2
    for none in (front(1), front(3), front(mesh="none"), front(mesh="tp=2")):
        assert replica(none) is None


@pytest.mark.slow
def test_a_session_measures_replicas(tmp_path: Path) -> None:
    path = tmp_path / "model.profile"
    workload = Workload(Convolutions(), pictures(), functional.cross_entropy, batch_size=ROWS)
    profile(workload, Cluster.local(2), path, budget=900.0, rehearse=False)
    with Profile(path) as held:
        (place,) = held.settings()
        keys = held.get("ops", place, TimeQuartiles)
    for name in ("batch_norm_rows", "cross_entropy_rows"):
        ends = {key.rpartition(" ")[2] for key in keys if f'"aten.{name}"' in key}
        assert ends == {"forward", "backward"}


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in BIG if ZOO[n].available])
@pytest.mark.parametrize("mesh", ["dp=2", "dp=2,tp=2"])
def test_forms_of_the_zoo_run_alone(name: str, mesh: str) -> None:
    """With a cut batch, and with every matrix that can be cut by rows."""
    graph, held = prepared(name), captured_zoo(name)
    seeds = {
        f"input:{i.name}": f"dp:S({i.batch_dim})" for i in held.inputs if i.batch_dim is not None
    }
    for node in graph.graph.find_nodes(op="get_attr") if "tp" in mesh else ():
        if node.meta["val"].dim() == 2 and node.meta["val"].shape[0] % 2 == 0:
            seeds[str(node.target)] = "tp:S(0)"
    made = ShardedGraph(propagated(graph, mesh, seeds, close=True), held), held
    mesh_rank, specs, sizes = local(made, rows=2)
    arguments = OpArguments(mesh_rank, specs, sizes, CPU)
    distinct = {specs.op(node): node for node in forms(mesh_rank)}
    assert distinct
    for node in distinct.values():
        assert_runs(node, arguments.call(node), specs, sizes)
