"""Sharding of a prepared graph: annotate, propagate, select placements, apply ZeRO-3."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import msgspec
import torch
from torch import fx

from fxpart.annotations import annotations_of, load_annotations
from fxpart.annotations.entry_syntax import AnnotationKey, merge_annotations, read_placements
from fxpart.annotations.files import parse_annotations
from fxpart.annotations.graph_values import sharding
from fxpart.annotations.placement_origin import is_annotated, make_annotation_origin
from fxpart.codegen.mesh_programs.sharded_graph import ShardedGraph, place, propagate_annotations
from fxpart.compiler import MESH_KEY, PassManager
from fxpart.compiler.effects import list_written_nodes, state_written, view_chain
from fxpart.compiler.graph_edit import annotate, fork
from fxpart.compiler.node_annotation import NodeSharding
from fxpart.compiler.tensor_sizes import tensors
from fxpart.errors import FxpartError, Problem, error
from fxpart.passes import all_passes
from fxpart.passes.rules import layout, operands, rule_of
from fxpart.plan.constraint_table import DATA_AXES, DATA_AXIS
from fxpart.plan.model import Certificate
from fxpart.plan.offload import offloads_optimizer
from fxpart.planner.constraints import allowed_recompute
from fxpart.planner.context_parallelism import shard_sequences
from fxpart.planner.embedding_tables import get_resident_optimizer, shard_large_tables
from fxpart.planner.expert_parallelism import shard_experts
from fxpart.pricing.graph_costs import GraphCosts
from fxpart.pricing.placements import StrategyAssignment, choose_placements
from fxpart.sharding import REPLICATE, Mesh, Placements, Shard, format_placements
from fxpart.sharding.mesh import parse_axes

if TYPE_CHECKING:
    from fxpart.capture import CapturedModel
    from fxpart.costs import CostModel
    from fxpart.planner.request import PlanRequest
    from fxpart.solver.joint.problem import JointProblem

_KEPT = 64  # graphs of each kind that are kept for other devices and prices


def find_annotations(model: torch.nn.Module, request: PlanRequest) -> dict[str, str]:
    """Return the annotations of the model, of its DTensors and of the constraint."""
    return merge_annotations(annotations_of(model), parse_annotation_constraint(request))


def parse_annotation_constraint(request: PlanRequest) -> dict[str, str]:
    """Parse the constraint ``annotations``: a file, or text with a TOML table or JSON object."""
    given = str(request.constraints.get("annotations", ""))
    if not given:
        return {}
    if given.endswith((".toml", ".json")) and "\n" not in given:
        return load_annotations(given)
    return parse_annotations(given, ".json" if given.lstrip().startswith("{") else ".toml")


@dataclass(frozen=True)
class ShardingAssumptions:
    """Assumptions under which placements are selected, before stages are known.

    microbatches: per step, None if unknown. in_flight: average number of microbatches whose
    activations a stage stores for its backward.
    """

    microbatches: int | None
    stages: int
    in_flight: int = 1


@dataclass(frozen=True)
class SelectedPlacements:
    """The solver's placements. free: whether memory does not limit them."""

    chosen: StrategyAssignment
    certificate: Certificate
    free: bool

    def is_valid(self, selected: int, level: int) -> bool:
        """Return whether they are best under a ZeRO level, too, if selected under another one.

        A higher level needs less memory and has the same costs.
        """
        return level == selected or (self.free and level > selected)


@dataclass
class ShardingCache:
    """Decisions about one model that are repeated: many meshes and assumptions share them.

    propagated, placed: graphs by mesh and annotations; those of ZeRO levels below 3 are the same.
    selected: placements, also by the devices, their prices and the assumptions, by ZeRO level.
    costs: of the graph itself. problems: of degrees, with the sources of their costs.
    """

    propagated: dict[object, fx.GraphModule] = field(default_factory=dict)
    placed: dict[object, ShardedGraph] = field(default_factory=dict)
    selected: dict[object, dict[int, SelectedPlacements]] = field(default_factory=dict)
    models: list[CostModel] = field(default_factory=list)
    costs: dict[object, GraphCosts] = field(default_factory=dict)
    problems: dict[object, tuple[JointProblem, dict[str, str]]] = field(default_factory=dict)

    def for_other_costs(self) -> ShardingCache:
        """Return a cache for other devices and prices that shares the newest graphs."""
        for graphs in (self.propagated, self.placed):
            for key in [*graphs][:-_KEPT]:
                graphs.pop(key, None)
        return ShardingCache(self.propagated, self.placed, costs=self.costs)

    def number(self, model: CostModel) -> int:
        """Return a number that identifies the cost model among those that were used."""
        found = next((i for i, one in enumerate(self.models) if one is model), None)
        if found is None:
            self.models.append(model)
        return len(self.models) - 1 if found is None else found


def shard_graph(
    graph: fx.GraphModule,
    captured: CapturedModel,
    request: PlanRequest,
    given: Mapping[str, str],
    expected: ShardingAssumptions,
    cache: ShardingCache | None = None,
) -> ShardedGraph:
    """Annotate, propagate and select placements. given: the user's annotations.

    cache: of this graph. Raise FXP111 and FXP112 for invalid or contradictory annotations, FXP204
    and FXP205 if no selection of placements is feasible.
    """
    cache = cache or ShardingCache()
    large = shard_large_tables(graph.graph, captured, request, given, DATA_AXIS, expected.stages)
    experts = shard_experts(graph.graph) if request.experts else {}
    sequences = shard_sequences(graph.graph, captured, request.mesh, given)
    rows = _merge_axes(_batch_cut(captured, request.mesh, given), sequences)
    seeds = merge_annotations(rows | large | experts, given)
    close = request.constraints.get("placements", "solver") == "annotated"

    def propagate(close: bool) -> fx.GraphModule:
        return propagate_annotations(
            graph, request.mesh, seeds, _names(graph, captured), close=close
        )

    key = (str(request.mesh), tuple(sorted(seeds.items())), close)

    def finish(choice: str, place: Callable[[], fx.GraphModule]) -> ShardedGraph:
        """Return the graph with these placements, made once."""
        full = (key, choice, request.zero_axis if request.zero == 3 else "")
        made = cache.placed.get(full)
        if made is None:
            made = cache.placed[full] = ShardedGraph(_finish(place(), captured, request), captured)
        _check_optimizer(made.whole, captured, request)
        return replace(made, zero=request.zero, zero_axis=request.zero_axis)

    whole = cache.propagated.get(key)
    if whole is None:
        whole = cache.propagated[key] = propagate(close)
    undecided = _open(whole)
    if not undecided:
        return finish("complete", lambda: fork(whole))
    devices = msgspec.json.encode(request.cluster)
    prices = (devices, cache.number(request.cost_model), expected)
    memory = allowed_recompute(request.constraints), offloads_optimizer(request.offload)
    known = cache.selected.setdefault((key, prices, memory), {})
    made = next((s for level, s in known.items() if s.is_valid(level, request.zero)), None)
    if made is None:
        made = _select_placements(whole, captured, request, expected, undecided)
        known[request.zero] = made
    certificate = made.certificate
    text = f"place{{choice={json.dumps(made.chosen.text())}}}"
    found = finish(text, lambda: PassManager(all_passes()).run(text, whole))
    if captured.batch_size % (found.multiple() * (expected.microbatches or 1)):
        # More shards than rows in the batch, so replicate what is undecided instead.
        return finish("replicated", lambda: propagate(close=True))
    return replace(found, certificate=certificate)


def _finish(whole: fx.GraphModule, captured: CapturedModel, request: PlanRequest) -> fx.GraphModule:
    """Return the graph with complete placements, after it changes them for writes and ZeRO-3."""
    _follow_writers(whole)
    if request.zero == 3:
        _store_in_parts(whole, captured, request)
    return whole


def _check_optimizer(graph: fx.GraphModule, captured: CapturedModel, request: PlanRequest) -> None:
    """Raise FXP109 if ranks would update parts of a parameter that is only updated whole."""
    parts, mesh = request.divisible, request.mesh
    zero = parse_axes(request.zero_axis) if request.zero else ()
    cut: dict[str, list[str]] = {}
    for node in graph.graph.find_nodes(op="get_attr"):
        name, known = str(node.target), sharding(node)
        if name not in parts.whole or known is None:
            continue
        pairs = [*zip(mesh.names, known.results[0], strict=True)]
        dims = [placed.dim for _, placed in pairs if isinstance(placed, Shard)]
        free = [axis for axis, p in pairs if axis in zero and not isinstance(p, Shard)]
        if mesh.count(*free) > 1 or not all(parts.may_shard(name, dim) for dim in dims):
            cut.setdefault(parts.whole[name], []).append(name)
    for kind, names in cut.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise error(
            "FXP109",
            where=f"optimizer {kind}, mesh {mesh}" + (f", zero={request.zero}" * bool(zero)),
            why=f"each rank updates only a part of {names[0]}{more}, and a part is updated "
            "differently from the whole",
            fix="shard neither these parameters nor the optimizer state, or use an optimizer that "
            "updates each element independently",
        )


def _follow_writers(graph: fx.GraphModule) -> None:
    """Place written state the way the writing op takes it, so that the op writes the state itself.

    Writes through views (``detach``) and writes of ops without a sharding rule are done in full on
    every rank. Raise FXP112 if an annotation of the state conflicts.
    """
    mesh = graph.meta[MESH_KEY]
    problems = []
    for writer in state_written(graph.graph):
        for target in list_written_nodes(writer):
            state, *between = reversed(list(view_chain(target)))
            if state.op != "get_attr" or sharding(state) is None:
                continue
            if between:
                _replicate([*between, writer], mesh)
            wanted = _required_placements(writer, target, mesh)
            known = sharding(state)
            if known is None or known.results[0] == wanted:
                continue
            if any(map(is_annotated, known.origins)):
                text = format_placements(wanted, mesh)
                why = f"{writer.name} writes it as {text}, but its annotation differs"
                fix = "remove the annotation"
                problems.append(Problem("FXP112", str(state.target), why, fix))
            origin = dict.fromkeys(range(len(wanted)), f"'{writer.name}' writes it")
            for node in graph.graph.find_nodes(op="get_attr", target=state.target):
                place(node, wanted, origin)
    if problems:
        raise FxpartError(problems)


def _replicate(nodes: Sequence[fx.Node], mesh: Mesh) -> None:
    """Replicate ops on every rank."""
    whole: Placements = (REPLICATE,) * len(mesh.axes)
    for node in nodes:
        count = len(tensors(node.meta.get("val")))
        known = NodeSharding(("",) * len(mesh.axes), (whole,) * count)
        annotate(node, sharding=known)


def _required_placements(writer: fx.Node, target: fx.Node, mesh: Mesh) -> Placements:
    """Return the placements in which an op takes an operand that it writes."""
    known, rule = sharding(writer), rule_of(writer)
    if known is None or rule is None:
        return (REPLICATE,) * len(mesh.axes)
    made = layout(rule, [s or "" for s in known.strategy], mesh)
    return made.operands[operands(writer).index(target)] if made else (REPLICATE,) * len(mesh.axes)


def _open(graph: fx.GraphModule) -> int:
    """Count the ops, inputs and parameters with an undecided axis."""
    known = [k for node in graph.graph.nodes if (k := sharding(node)) is not None]
    return sum(None in k.strategy or any(None in r for r in k.results) for k in known)


def _select_placements(
    graph: fx.GraphModule,
    captured: CapturedModel,
    request: PlanRequest,
    expected: ShardingAssumptions,
    undecided: int,
) -> SelectedPlacements:
    """Return the solver's placements, and their certificate for the plan."""
    axes = tuple(map(request.mesh.index, parse_axes(request.zero_axis)))
    found, proof = choose_placements(
        graph,
        captured,
        request.cluster,
        cost_model=request.cost_model,
        microbatches=expected.microbatches or 1,
        optimizer=get_resident_optimizer(request),
        in_flight=expected.in_flight,
        stages=expected.stages,
        time_limit=float(request.constraints.get("time_limit", 30.0)),
        recompute="full" in allowed_recompute(request.constraints),
        zero=(request.zero, axes),
        divisible=request.divisible,
    )
    status = proof.status
    assert status in ("optimal", "within gap", "best found"), status
    certificate = Certificate(
        status=status,  # type: ignore[arg-type]
        objective=proof.seconds,
        lower_bound=min(proof.bound, proof.seconds),
        gap=proof.gap,
        solver=proof.solver,
        over=f"placements of {undecided} ops and values without annotations, for one stage",
    )
    return SelectedPlacements(found, certificate, proof.free)


def _names(graph: fx.GraphModule, captured: CapturedModel) -> dict[str, str]:
    """Map other names of state to the graph's names; "" for state that the graph does not use."""
    used = {str(node.target) for node in graph.graph.find_nodes(op="get_attr")}
    return {**{name: "" for name in captured.state if name not in used}, **captured.aliases}


def _batch_cut(captured: CapturedModel, mesh: Mesh, given: Mapping[str, str]) -> dict[str, str]:
    """Shard the batch dim of every input over the data axes unless an annotation places it."""
    found = {}
    for item in captured.inputs:
        key = f"input:{item.name}"
        axes = [a for a in DATA_AXES if a in mesh.names and not _is_placed(given, key, a)]
        if item.batch_dim is not None and axes:
            found[key] = ",".join(f"{axis}:S({item.batch_dim})" for axis in axes)
    return found


def _merge_axes(first: dict[str, str], second: dict[str, str]) -> dict[str, str]:
    """Return the annotations of both, which are for different axes."""
    shared = {key: f"{first[key]},{second[key]}" for key in first.keys() & second.keys()}
    return first | second | shared


def _is_placed(given: Mapping[str, str], name: str, axis: str) -> bool:
    """Return whether an annotation places an input on an axis."""
    for text, placements in given.items():
        key = AnnotationKey.parse(text)
        if key.kind == "input" and key.matches(name.removeprefix("input:")):
            if axis in read_placements(placements):
                return True
    return False


def _store_in_parts(graph: fx.GraphModule, captured: CapturedModel, request: PlanRequest) -> None:
    """Shard parameters over the ZeRO axis (ZeRO-3); they are gathered where they are used.

    The first unsharded dim with an even division is sharded, else the first dim unevenly. A
    parameter stays unchanged if it is too small, annotated on the axis, or written by the forward.
    """
    mesh, at = request.mesh, request.mesh.index(request.zero_axis)
    parts, parameters = mesh.shape[at], frozenset(captured.parameters)
    written_names = {name for names in state_written(graph.graph).values() for name in names}
    for node in graph.graph.find_nodes(op="get_attr"):
        known = sharding(node)
        if known is None or str(node.target) not in parameters - written_names:
            continue
        if at < len(known.origins) and is_annotated(known.origins[at]):
            continue
        placed, shape = known.results[0], tuple(node.meta["val"].shape)
        allowed = [d for d in range(len(shape)) if request.divisible.may_shard(str(node.target), d)]
        dim = _dim_to_cut(shape, placed, parts, allowed)
        if dim is not None:
            now = (*placed[:at], Shard(dim), *placed[at + 1 :])
            place(node, now, {at: make_annotation_origin("zero=3")})


def _dim_to_cut(
    shape: tuple[int, ...], placed: Placements, parts: int, allowed: Sequence[int]
) -> int | None:
    cut = {p.dim for p in placed if isinstance(p, Shard)}
    free = [dim for dim in allowed if dim not in cut]
    even = [dim for dim in free if shape[dim] % parts == 0 and shape[dim]]
    if even:
        return even[0]
    return 0 if 0 in free and shape[0] >= parts else None
