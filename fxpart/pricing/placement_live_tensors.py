"""Memory peaks of the forward: tensors that autograd does not save, by moment."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from fxpart.compiler.collective_calls import op_name, unwrap_seeded_call
from fxpart.costmodels.memory_traffic import VIEWS
from fxpart.costmodels.tensor_sizes import tensor_bytes
from fxpart.passes.rules import operands
from fxpart.pricing.placement_graph import GraphDataflow, TensorValue
from fxpart.pricing.specs import Specs, annotation
from fxpart.pricing.variants import Sizes

POINTS = 8  # number of moments that count: those with the most bytes on an unsharded rank


def find_memory_peaks(
    flow: GraphDataflow, specs: Specs, sizes: Sizes
) -> tuple[tuple[TensorValue, ...], ...]:
    """Return the values alive at the memory peaks of the forward, besides saved tensors.

    A value lives from the op that makes it to the last that uses it or a view of it. A moment whose
    values are all alive at another one does not count.
    """
    bases = _bases(flow)
    kept = {saved.source for op in flow.ops for saved in annotation(op).saved}
    last: dict[TensorValue, int] = {}
    made: dict[TensorValue, int] = {}
    order = {op: time for time, op in enumerate(flow.ops)}
    for op, time in order.items():
        for index in range(len(specs.tensors(op))):
            value = TensorValue(op, index)
            base = bases.get(value, value)
            users = (order[user] for user, _ in flow.users.get(value, ()))
            last[base] = max(last.get(base, time), time, *users)
            if base == value:
                made[value] = time
    size = {
        value: sizes.number(tensor_bytes(specs.tensors(value.node)[value.index]))
        for value in made
        if value.node.name not in kept
    }
    starts: dict[int, list[TensorValue]] = {}
    for value in size:
        starts.setdefault(made[value], []).append(value)
    alive: list[TensorValue] = []
    found: list[tuple[int, int, tuple[TensorValue, ...]]] = []
    for time in range(len(flow.ops)):
        alive = [v for v in alive if last[v] >= time] + starts.get(time, [])
        if starts.get(time):
            found.append((-sum(size[v] for v in alive), time, tuple(alive)))
    return _fullest(found)


def _bases(flow: GraphDataflow) -> Mapping[TensorValue, TensorValue]:
    """Return for each view the value that owns its memory."""
    found: dict[TensorValue, TensorValue] = {}
    for op in flow.ops:
        if not _is_view(op):
            continue
        source = flow.value.get(operands(op)[0])
        if source is None or source.node.op != "call_function":
            continue
        for index in range(len(list(op.meta["val"])) if isinstance(op.meta["val"], list) else 1):
            found[TensorValue(op, index)] = found.get(source, source)
    return found


def _is_view(op: fx.Node) -> bool:
    target, _, _ = unwrap_seeded_call(op)
    return op_name(target).split(".")[1] in VIEWS and bool(operands(op))


def _fullest(
    moments: list[tuple[int, int, tuple[TensorValue, ...]]],
) -> tuple[tuple[TensorValue, ...], ...]:
    """Return the first POINTS of the sorted moments, without subsets of others."""
    chosen: list[tuple[TensorValue, ...]] = []
    for _, _, alive in sorted(moments, key=lambda m: m[:2]):
        if len(chosen) == POINTS:
            break
        if not any(set(alive) <= set(other) for other in chosen):
            chosen.append(alive)
    return tuple(chosen)
