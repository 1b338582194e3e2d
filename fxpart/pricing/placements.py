"""Select the placements that annotations and propagation leave undecided.

As in Alpa: one strategy per op, its cost on the shapes of one rank, the cost of resharding on
edges, memory against a budget. See :mod:`fxpart.pricing.placement_builder` for the problem and
:mod:`fxpart.solver.placement.portfolio` for its solution.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import lcm, prod
from typing import TYPE_CHECKING

import msgspec
from torch import fx

from fxpart import costmodels
from fxpart.compat.optimizer_choice import choose, state_bytes
from fxpart.compat.optimizer_parts import ANY_PARTS, OptimizerParts
from fxpart.compiler import BLOCKS_KEY, MESH_KEY
from fxpart.costmodels.efficiency import update_bandwidth, update_launch
from fxpart.errors import error
from fxpart.pricing.device_groups import Rings, group_devices
from fxpart.pricing.device_limits import RESERVE
from fxpart.pricing.non_op_costs import NonOpCosts
from fxpart.pricing.placement_builder import PlacementProblemBuilder
from fxpart.pricing.placement_edges import ReshardCosts
from fxpart.pricing.placement_graph import find_fused_strategies, read_dataflow
from fxpart.pricing.placement_mapping import PlacementMapping, StateCosts
from fxpart.pricing.placement_options import OpFamilies, Strategy
from fxpart.pricing.placement_rows import solve_rows
from fxpart.pricing.sparse_gradients import touched_bytes
from fxpart.pricing.specs import Specs, annotation
from fxpart.pricing.variants import BatchSplit, Sizes, captured_rows
from fxpart.pricing.weights import trained_names
from fxpart.sharding import Mesh, Placements, Shard, format_placements
from fxpart.solver.placement.portfolio import PlacementSolution, evaluate
from fxpart.solver.remedies import format_byte_count
from fxpart.solver.work import work_seconds
from fxpart.units import plural

if TYPE_CHECKING:
    from fxpart.capture.captured_model import CapturedModel
    from fxpart.cluster.model import Cluster
    from fxpart.costs import CostModel

_AMPLE = 1e18  # bytes: no memory limit, so that the fastest choice is found


@dataclass(frozen=True)
class PlacementCertificate:
    """The certificate of a choice, over its strategies and this cost model.

    seconds: of a step on one stage with the whole graph. bound: lower bound of all choices. memory:
    bytes on a rank, against ``budget``. free: whether the best choice without a budget fits it.
    unruled: ops without a sharding rule, replicated. built, solved: CPU seconds to build and to
    solve the problem.
    """

    status: str
    seconds: float
    bound: float
    gap: float
    memory: float
    budget: float
    free: bool
    solver: str
    unruled: tuple[str, ...]
    built: float
    solved: float


@dataclass(frozen=True)
class StrategyAssignment:
    """The strategy of every op with tensors, the placements of every input and state, by node."""

    mesh: Mesh
    strategies: Mapping[str, Strategy]
    placements: Mapping[str, Placements]

    def text(self) -> str:
        """Return the form that the pass ``place`` reads: ``"addmm=b|n;input_ids=dp:S(0),tp:R"``."""
        ops = [f"{name}={'|'.join(strategy)}" for name, strategy in self.strategies.items()]
        values = [
            f"{name}={format_placements(placements, self.mesh)}"
            for name, placements in self.placements.items()
        ]
        return ";".join([*ops, *values])


def choose_placements(
    graph: fx.GraphModule,
    captured: CapturedModel,
    cluster: Cluster,
    *,
    mesh: Mesh | None = None,
    cost_model: str | CostModel = "auto",
    batch_size: int | None = None,
    microbatches: int = 1,
    optimizer: object = "adamw",
    in_flight: int = 1,
    stages: int = 1,
    budget: float | None = None,
    time_limit: float = 30.0,
    solver: str = "auto",
    only: Mapping[str, Strategy] | None = None,
    recompute: bool = False,
    zero: tuple[int, tuple[int, ...]] = (0, ()),
    divisible: OptimizerParts = ANY_PARTS,
) -> tuple[StrategyAssignment, PlacementCertificate]:
    """Select a placement along every undecided axis of a graph.

    graph: annotated and propagated (its blocks do not matter). mesh: that of the graph by default.
    batch_size: rows per step, by default those of the capture, in ``microbatches``; in_flight:
    number of them that are stored for their backward at once. stages: number of equal stages of the
    graph: the budget is multiplied by it. budget: bytes of a device, by default the smallest memory
    in the cluster, less a reserve. only: strategies of single ops, by node name. recompute:
    where nothing fits otherwise, stages recompute what only one block uses; the graph then has
    blocks. zero: the ZeRO level, which shards state over axes of the mesh, and these.
    divisible: how the optimizer allows to divide parameters. Raises FXP204 where nothing fits the
    budget, FXP205 where nothing was found in time, FXP403.
    """
    started = time.process_time()
    budget_ = _budget(cluster, budget) * stages
    insides: list[float | None] = [None]
    if recompute and graph.meta.get(BLOCKS_KEY):  # each stage has one block's tensors at a time
        insides.append(stages / len(graph.meta[BLOCKS_KEY]))
    for inside in insides:
        built = build(
            graph, captured, cluster, mesh=mesh, cost_model=cost_model, batch_size=batch_size,
            microbatches=microbatches, optimizer=optimizer, in_flight=in_flight, inside=inside,
            budget=budget_, only=only, zero=zero, divisible=divisible,
        )  # fmt: skip
        made = time.process_time()
        solution, free = _solve(built, time_limit, solver)
        if solution.status != "infeasible":
            break
    solved = time.process_time()
    if solution.choice is None:
        raise _nothing(solution, budget_, stages, time_limit)
    choice = solution.choice
    certificate = PlacementCertificate(
        status=solution.status,
        seconds=solution.seconds,
        bound=solution.bound,
        gap=solution.gap,
        memory=solution.bytes,
        budget=budget_,
        free=free,
        solver=solution.solver,
        unruled=built.unruled,
        built=made - started,
        solved=solved - made,
    )
    mesh_ = mesh if mesh is not None else graph.meta[MESH_KEY]
    return (
        StrategyAssignment(mesh_, built.strategies(choice), built.placements(choice)),
        certificate,
    )


def build(
    graph: fx.GraphModule,
    captured: CapturedModel,
    cluster: Cluster,
    *,
    mesh: Mesh | None = None,
    cost_model: str | CostModel = "auto",
    batch_size: int | None = None,
    microbatches: int = 1,
    optimizer: object = "adamw",
    in_flight: int = 1,
    inside: float | None = None,
    budget: float | None = None,
    only: Mapping[str, Strategy] | None = None,
    zero: tuple[int, tuple[int, ...]] = (0, ()),
    divisible: OptimizerParts = ANY_PARTS,
) -> PlacementMapping:
    """Return the placement problem of a graph, as :func:`choose_placements` solves it.

    inside: as for :func:`.placement_graph.read_dataflow`.
    """
    mesh_: Mesh = mesh if mesh is not None else graph.meta[MESH_KEY]
    model = costmodels.find(cost_model, cluster) if isinstance(cost_model, str) else cost_model
    device = group_devices(cluster, mesh_.size).devices[0]
    rings = Rings(cluster, mesh_)
    reshards = ReshardCosts(mesh_, model, rings, NonOpCosts.of(model, device).copying)
    trained = trained_names(captured) if captured.training else frozenset()
    specs = Specs(trained)
    rows = batch_size or captured.batch_size
    size = captured_rows(captured)
    if captured.symbolic:  # All ranks that share the rows of an input take equal parts of them.
        parts = _count_row_parts(graph.graph, captured, mesh_)
        size = parts * -(-rows // (microbatches * parts))
    sizes = Sizes(captured, BatchSplit(size, microbatches))
    families = OpFamilies(
        mesh_,
        model,
        device,
        reshards,
        sizes,
        specs,
        microbatches,
        _row_symbols(graph.graph, captured, mesh_),
    )
    flow = read_dataflow(graph.graph, specs, sizes, in_flight, inside)
    find_fused_strategies(flow, families)
    builder = PlacementProblemBuilder(
        mesh=mesh_,
        flow=flow,
        families=families,
        reshards=reshards,
        specs=specs,
        sizes=sizes,
        state=state_costs(captured, trained, optimizer, microbatches, graph.graph),
        microbatches=microbatches,
        bandwidth=update_bandwidth(device),
        launch=update_launch(device),
        zero=zero,
        divisible=divisible,
        only=only or {},
    )
    return builder.build(_budget(cluster, budget))


def _solve(
    built: PlacementMapping, time_limit: float, solver: str
) -> tuple[PlacementSolution, bool]:
    """Return the solution, and whether it is the best choice without a budget."""
    problem, deadline = built.problem, work_seconds() + time_limit
    ample = replace(built, problem=msgspec.structs.replace(problem, budget=_AMPLE))
    found = solve_rows(ample, time_limit=time_limit, solver=solver)
    if found.choice is not None and evaluate(problem, found.choice).feasible:
        return found, True
    left = max(time_limit / 2, deadline - work_seconds())
    return solve_rows(built, time_limit=left, solver=solver), False


def _row_symbols(graph: fx.Graph, captured: CapturedModel, mesh: Mesh) -> frozenset[str]:
    """Return the symbols of batch dims; none where an axis shards the rows of an input already.

    The batch then has to be divisible by that axis, and no choice requires more.
    """
    if _count_row_parts(graph, captured, mesh) > 1:
        return frozenset()
    dims = {spec.name: spec.batch_dim for spec in captured.inputs}
    return frozenset(s for s, (name, dim) in captured.symbols.items() if dims.get(name) == dim)


def _count_row_parts(graph: fx.Graph, captured: CapturedModel, mesh: Mesh) -> int:
    """Return the number of equal parts into which decided placements shard the rows of inputs."""
    dims = {spec.name: spec.batch_dim for spec in captured.inputs}
    found = 1
    for node in graph.find_nodes(op="placeholder"):
        known = annotation(node).sharding
        if known is None or (dim := dims.get(node.name)) is None:
            continue
        pairs = zip(known.results[0], mesh.shape, strict=True)
        found = lcm(found, prod(count for placed, count in pairs if placed == Shard(dim)))
    return found


def _budget(cluster: Cluster, given: float | None) -> float:
    if given is not None:
        return given
    return min(device.memory for device in cluster.devices) * (1 - RESERVE)


def state_costs(
    captured: CapturedModel,
    trained: frozenset[str],
    optimizer: object,
    microbatches: int,
    graph: fx.Graph,
) -> dict[str, StateCosts]:
    """Return the memory and optimizer traffic of parameters and buffers, per byte.

    The optimizer reads and writes weight and state and reads the gradient; with several
    microbatches gradients are read twice and written once for each of them. For a table with a
    sparse gradient these are the rows of a step. graph: whole, or one rank's.
    """
    touched = touched_bytes(graph)
    names = [name for name in captured.state if name in trained]
    shapes = [(tuple(captured.state[n].shape), captured.state[n].dtype) for n in names]
    sums = dict(zip(names, state_bytes(choose(optimizer), shapes, names), strict=True))
    found = {}
    for name, tensor in captured.state.items():
        size = max(1, tensor.numel() * tensor.element_size())
        state_per_byte = sums.get(name, 0) / size
        if name in trained:
            part = touched.get(name, size) / size
            accumulated = 3.0 * microbatches if microbatches > 1 else 0.0
            moved = min(1.0, part) * (2 + 2 * state_per_byte) + part * (1 + accumulated)
            found[name] = StateCosts(part, state_per_byte, moved, 1.0, True)
        else:
            found[name] = StateCosts(0.0, 0.0, 0.0, 0.0, False)
    return found


def _nothing(
    solution: PlacementSolution, budget: float, stages: int, time_limit: float
) -> Exception:
    """Return the error for a problem without a solution. budget: of all stages together."""
    if solution.status == "infeasible":
        each = f"{_in_gib(solution.least / stages)} on a device"
        average = f", as the average of {plural(stages, 'stage')}" if stages > 1 else ""
        return error(
            "FXP204",
            where="placements over the mesh",
            why=f"the smallest placement needs {each}{average}, but there are "
            f"{_in_gib(budget / stages)} on a device",
            fix="use a larger mesh, more stages, more microbatches or fewer annotations",
        )
    return error(
        "FXP205",
        where="placements over the mesh",
        why=f"no placement that fits was found in {time_limit:g} s",
        fix="use a longer time_limit",
    )


def _in_gib(size: float) -> str:
    """Return bytes in GiB, so that two sizes have one unit; small ones in their own unit."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 / 100 else format_byte_count(int(size))
