"""Coverage of a graph by sharding rules: ops by count and by FLOPs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import fx

from fxpart.capture.captured_model import CapturedModel
from fxpart.compiler.tensor_sizes import expression, hint, tensors
from fxpart.costmodels.op_work import flops
from fxpart.costmodels.tensor_sizes import floating_dtype
from fxpart.costs import OpSpec, TensorSpec
from fxpart.passes.rules import ShardingRule, rule_of
from fxpart.plan.throughput import ModelWork
from fxpart.pricing.specs import Specs

if TYPE_CHECKING:
    from fxpart.costs import Size

CUTS, WHOLE, NONE = "cuts", "whole", "none"  # whether an op's rule can shard


@dataclass(frozen=True)
class OpCoverage:
    """The calls of one op: count, forward FLOPs at the example sizes, and rules.

    cuts, whole: calls whose rule has a factor that can be sharded, and calls whose rule has none.
    The other calls have no rule. flops_cut: FLOPs of the calls that can be sharded.
    """

    op: str
    calls: int
    cuts: int
    whole: int
    flops: int
    flops_cut: int


@dataclass(frozen=True)
class Coverage:
    """Ops of some graphs, those with the most FLOPs first."""

    ops: tuple[OpCoverage, ...]

    @property
    def calls(self) -> int:
        """Return the number of calls that return tensors."""
        return sum(op.calls for op in self.ops)

    @property
    def ruled(self) -> int:
        """Return the number of calls with a rule."""
        return sum(op.cuts + op.whole for op in self.ops)

    @property
    def cut(self) -> int:
        """Return the number of calls with a rule that can shard something."""
        return sum(op.cuts for op in self.ops)

    @property
    def flops(self) -> int:
        """Return the FLOPs of all forwards."""
        return sum(op.flops for op in self.ops)

    @property
    def flops_cut(self) -> int:
        """Return the FLOPs of the forwards that can be sharded."""
        return sum(op.flops_cut for op in self.ops)


def coverage(graphs: Iterable[fx.Graph]) -> Coverage:
    """Return the coverage of prepared graphs, at the sizes of their examples."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0, 0])
    for graph in graphs:
        for node, spec in _ops_at_example(graph):
            kind = kind_of(rule_of(node))
            work = int(flops(spec))
            entry = counts[spec.name]
            for i, more in enumerate((1, kind == CUTS, kind == WHOLE, work, work * (kind == CUTS))):
                entry[i] += more
    rows = (OpCoverage(name, *entry) for name, entry in counts.items())
    return Coverage(tuple(sorted(rows, key=lambda op: (-op.flops, -op.calls, op.op))))


def count_model_work(captured: CapturedModel, graph: fx.Graph) -> ModelWork:
    """Count the model FLOPs of one sample: three times those of the forward.

    A backward counts twice its forward, whatever it recomputes; see
    :class:`fxpart.plan.throughput.Throughput` for the source. The graph is counted at the sizes of
    the example.
    """
    rows = 1
    for item in captured.inputs:
        if item.batch_dim is not None:
            size = item.shape[item.batch_dim]
            rows = size if isinstance(size, int) else captured.hints.get(size, 1)
            break
    forward: dict[str, int] = defaultdict(int)
    for _, spec in _ops_at_example(graph):
        forward[floating_dtype((*spec.inputs, *spec.outputs))] += int(flops(spec))
    dtype = max(forward, key=lambda name: forward[name], default="float32")
    return ModelWork(3 * sum(forward.values()) / max(rows, 1), dict(captured.hints), dtype)


def kind_of(rule: ShardingRule | None) -> str:
    """Return whether a rule can shard, only replicates, or is missing."""
    if rule is None:
        return NONE
    return CUTS if any(f not in rule.whole for f in rule.factors) else WHOLE


def _ops_at_example(graph: fx.Graph) -> Iterator[tuple[fx.Node, OpSpec]]:
    """Yield the ops that return tensors, at the sizes of the example."""
    known = _hints(graph)
    numbers: dict[Size, int] = {}
    specs = Specs(())

    def number(size: Size) -> int:
        if isinstance(size, int):
            return size
        if size not in numbers:
            numbers[size] = int(size.subs(known))
        return numbers[size]

    def evaluate(found: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(tuple(map(number, t.shape)), t.dtype) for t in found)

    for node in graph.nodes:
        op = specs.op(node)
        if op is not None and tensors(node.meta.get("val")):
            yield node, OpSpec(op.name, evaluate(op.inputs), evaluate(op.outputs), op.attributes)


def _hints(graph: fx.Graph) -> dict[object, int]:
    """Return each symbol's size in the example, read from the inputs."""
    found: dict[object, int] = {}
    for node in graph.nodes:
        if node.op != "placeholder":
            continue
        for tensor in tensors(node.meta.get("val")):
            for size in tensor.shape:
                if isinstance(size, torch.SymInt):
                    symbol = expression(size)
                    if getattr(symbol, "is_Symbol", False):
                        found[symbol] = hint(size)
    return found
