"""Row-wise sharding of large embedding tables over the data axis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import fx

from fxpart.annotations.entry_syntax import AnnotationKey, read_placements
from fxpart.compat.optimizer_choice import choose, state_bytes
from fxpart.compiler.graph_edit import value
from fxpart.compiler.sparse_lookups import sparse_lookup, sparse_tables
from fxpart.passes.rules import rule_of
from fxpart.plan.offload import offloads_optimizer
from fxpart.pricing.device_limits import RESERVE
from fxpart.pricing.weights import trained_names

if TYPE_CHECKING:
    from fxpart.capture import CapturedModel
    from fxpart.planner.request import PlanRequest

_SHARE = 0.5  # fraction of a device's memory; activations use the other half


def shard_large_tables(
    graph: fx.Graph,
    captured: CapturedModel,
    request: PlanRequest,
    given: Mapping[str, str],
    axis: str,
    stages: int,
) -> dict[str, str]:
    """Return annotations that shard tables with sparse gradients over the data axis, largest first.

    Tables are sharded until parameters and optimizer state need at most half of the smallest
    device. given: the user's annotations, which have priority. stages: number of stages that share
    the parameters.
    """
    mesh = request.mesh
    if axis not in mesh.names or request.zero == 3 or not (tables := _tables(graph, axis, given)):
        return {}
    names = [name for name in captured.state if name in trained_names(captured)]
    shapes = [(tuple(captured.state[n].shape), captured.state[n].dtype) for n in names]
    optimizer = choose(get_resident_optimizer(request))
    sizes = dict(zip(names, state_bytes(optimizer, shapes, names), strict=True))
    for name, tensor in captured.state.items():
        sizes[name] = sizes.get(name, 0) + tensor.numel() * tensor.element_size()
    parts = mesh.shape[mesh.index(axis)]
    limit = min(d.memory for d in request.cluster.devices) * (1 - RESERVE) * _SHARE * stages
    total, found = float(sum(sizes.values())), {}
    for name in sorted(tables, key=lambda name: (-sizes[name], name)):
        if total <= limit:
            break
        found[name] = f"{axis}:S(0)"
        total -= sizes[name] * (1 - 1 / parts)
    return found


def get_resident_optimizer(request: PlanRequest) -> Any:
    """Return the optimizer as far as its state is in the devices' memory."""
    return "sgd" if offloads_optimizer(request.offload) else request.optimizer


def _tables(graph: fx.Graph, axis: str, given: Mapping[str, str]) -> list[str]:
    """Return tables whose lookups can be sharded by batch and rows, and that have no annotation."""
    able = set(sparse_tables(graph))
    for node in graph.nodes:
        looked = sparse_lookup(node)
        if looked is not None and str(looked[0].target) in able:
            rule = rule_of(node)
            rows = int(value(looked[0]).shape[0])
            if rule is None or not rule.together or rows < 2:
                able.discard(str(looked[0].target))
    for text, placements in given.items():
        key = AnnotationKey.parse(text)
        if key.kind == "state" and axis in read_placements(placements):
            able = {name for name in able if not key.matches(name)}
    return sorted(able)
