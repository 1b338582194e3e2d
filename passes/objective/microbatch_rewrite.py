"""Rewrite a graph so that its microbatch losses add up to the loss of the whole batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpart.compiler import MESH_KEY
from fxpart.compiler.effects import argument
from fxpart.compiler.graph_edit import add_call, annotate, annotation, fake_mode, fork
from fxpart.compiler.node_annotation import KEY, NodeAnnotation, NodeSharding
from fxpart.sharding import REPLICATE, Mesh, Shard

from ..rules.schema_call import with_argument
from .analysis import ObjectiveAnalysis, transfer_analysis
from .loss_ops import SUM_OF, count_of
from .total_inputs import TotalInputs, TotalsGraph
from .value_kinds import BatchRelation

OBJECTIVE_KEY = "fxpart_objective"  # a divided graph: its TotalInputs
ADDED_KEY = "fxpart_objective_nodes"  # a divided graph: names of added nodes
_HALF = (torch.float16, torch.bfloat16)
_ATEN = torch.ops.aten


@dataclass(frozen=True)
class MicrobatchRewrite:
    """module: the rewritten graph. totals: its added inputs; None if nothing had to change."""

    module: fx.GraphModule
    totals: TotalInputs | None


def divide(module: fx.GraphModule, analysis: ObjectiveAnalysis) -> MicrobatchRewrite:
    """Return the graph for microbatches, whose losses are weighted by their rows and summed.

    analysis: of the module's graph, with ``accept``: values that couple rows are computed per
    microbatch. A graph whose loss is a mean over rows is unchanged.
    """
    if not _MicrobatchRewriter.needed(analysis):
        return MicrobatchRewrite(module, None)
    made = fork(module)
    assert [n.name for n in made.graph.nodes] == [n.name for n in module.graph.nodes]
    change = _MicrobatchRewriter(made, transfer_analysis(analysis, made.graph))
    totals = change.run()
    made.graph.lint()
    made.meta[OBJECTIVE_KEY] = totals
    before = {node.name for node in module.graph.nodes}
    made.meta[ADDED_KEY] = frozenset(n.name for n in made.graph.nodes) - before
    made.recompile()
    return MicrobatchRewrite(made, totals)


class _MicrobatchRewriter:
    """Rewrites one graph."""

    def __init__(self, module: fx.GraphModule, analysis: ObjectiveAnalysis) -> None:
        self.module, self.graph, self.found = module, module.graph, analysis
        self.mode = fake_mode(module.graph)
        self.totals = TotalsGraph(self.mode)
        self.fed: dict[tuple[fx.Node, Any], fx.Node] = {}
        self.outputs: list[tuple[str, fx.Node]] = []
        self.shares: dict[torch.dtype, fx.Node] = {}
        mesh = module.meta.get(MESH_KEY)
        self.axes = len(mesh.axes) if isinstance(mesh, Mesh) else None
        self.last = list(module.graph.find_nodes(op="placeholder"))[-1]

    @staticmethod
    def needed(found: ObjectiveAnalysis) -> bool:
        """Return whether any value that the loss needs has to change."""
        live = live_nodes(found)
        loss = found.loss
        return (
            (loss is not None and found.kind(loss).relation is BatchRelation.SUM)
            or any(n in live for n in found.losses)
            or any(n in live for n, _ in (*found.conversions, *found.sizes))
            or any(True for _ in total_reads(found, live))
        )

    def run(self) -> TotalInputs:
        """Apply all changes; return the added inputs."""
        live, loss = live_nodes(self.found), self.found.loss
        reads = list(total_reads(self.found, live))
        for user, total in reads:
            user.replace_input_with(total, self._total(total))
        for node, size in self.found.sizes:
            if node in live:
                self._replace_size(node, size)
        ends: dict[fx.Node, fx.Node] = {}
        for node in self.found.losses:
            if node in live:
                ends[node] = self._counted(node)
        for node, operand in self.found.conversions:
            if node in live:
                source = ends.get(operand, operand)
                node.replace_input_with(source, self._mean(source))
        if loss is not None and self.found.kind(loss).relation is BatchRelation.SUM:
            source = ends.get(loss, loss)
            self._return(self._mean(source))
        elif loss is not None and self.found.kind(loss).total:
            self._return(self._total(loss))
        self.totals.graph.output(tuple(node for _, node in self.outputs))
        names = tuple(name for name, _ in self.outputs)
        shares = tuple((n.name, str(d).removeprefix("torch.")) for d, n in self.shares.items())
        return TotalInputs(self.totals.graph, names, shares, self.module)

    def _total(self, node: fx.Node) -> fx.Node:
        """Return the graph input for a total."""
        if (node, None) not in self.fed:
            self.fed[node, None] = self._feed(self.totals.copied(node))
        return self.fed[node, None]

    def _feed(self, output: fx.Node) -> fx.Node:
        made = self._placeholder(f"batch_total_{len(self.outputs)}", output.meta["val"])
        self.outputs.append((made.name, output))
        self.totals.note(made, output)
        return made

    def _placeholder(self, name: str, value: Any) -> fx.Node:
        with self.graph.inserting_after(self.last):
            made = self.graph.placeholder(name)
        self.last = made
        made.meta = {"val": value, KEY: NodeAnnotation()}
        if self.axes is not None:
            whole = (REPLICATE,) * self.axes
            annotate(made, sharding=NodeSharding(("",) * self.axes, (whole,), ("",) * self.axes))
        return made

    # -- the graph ------------------------------------------------------------------------------

    def _replace_size(self, node: fx.Node, size: Any) -> None:
        """Replace the batch size in a computation by that of the whole batch."""
        key = (node, size)
        if key not in self.fed:
            given = self.totals.copied(size) if isinstance(size, fx.Node) else size
            output = self.totals.add(node)(_ATEN.scalar_tensor.default, (given,))
            dtype = node.meta["val"].dtype
            if dtype.is_floating_point or dtype.is_complex:
                dtype = torch.float64 if dtype is torch.float64 else torch.float32
            self.fed[key] = self._feed(self.totals.add(node)(_ATEN.to.dtype, (output, dtype)))
        fed = self.fed[key]
        node.args = tuple(fed if a is size else a for a in node.args)

    def _counted(self, node: fx.Node) -> fx.Node:
        """Replace a mean over counted targets by a sum divided by their batch total."""
        dtype = node.meta["val"].dtype
        wide = torch.float32 if dtype in _HALF else dtype
        count = count_of(self.totals.graph, node, self.totals.copied, self.totals.add(node))
        count = self.totals.add(node)(_ATEN.to.dtype, (count, wide))
        fed = self._feed(count)
        if dtype in _HALF:
            logits = argument(node, "self")
            with self.graph.inserting_before(node):
                node.replace_input_with(logits, self._pointwise(_ATEN.to.dtype, logits, wide))
        node.args, node.kwargs = with_argument(
            node, (node.args, dict(node.kwargs)), "reduction", SUM_OF
        )
        users = list(node.users)
        with self.graph.inserting_after(node):
            made = self._pointwise(_ATEN.div.Tensor, node, fed)
        if dtype in _HALF:
            with self.graph.inserting_after(made):
                made = self._pointwise(_ATEN.to.dtype, made, dtype)
        for user in users:
            user.replace_input_with(node, made)
        return made

    def _mean(self, source: fx.Node) -> fx.Node:
        """Divide a sum by the microbatch's fraction of the rows."""
        dtype = source.meta["val"].dtype
        if dtype not in self.shares:
            with self.mode:
                value = torch.empty((), dtype=dtype)
            name = "batch_share" if not self.shares else f"batch_share_{len(self.shares)}"
            self.shares[dtype] = self._placeholder(name, value)
        with self.graph.inserting_after(source):
            return self._pointwise(_ATEN.div.Tensor, source, self.shares[dtype])

    def _pointwise(self, target: Any, source: fx.Node, other: Any) -> fx.Node:
        """Add an op on one tensor of the graph, with the same placements."""
        made = add_call(self.graph, target, (source, other), like=source, mode=self.mode)
        known = annotation(source).sharding
        if known is None or self.axes is None:
            return made
        (placed, *_) = known.results
        strategy = []
        for place in placed:
            if isinstance(place, Shard):
                inner = f"/{place.outer}" if place.outer != 1 else ""
                strategy.append(f"d{place.dim}{inner}")
            else:
                strategy.append("" if place in (None, REPLICATE) else "+0")
        annotate(made, sharding=NodeSharding(tuple(strategy), (placed,), known.origins))
        return made

    def _return(self, loss: fx.Node) -> None:
        output = self.graph.output_node()
        (returned,) = output.args
        assert isinstance(returned, tuple), "a captured graph returns the loss and its outputs"
        output.args = ((loss, *returned[1:]),)


def live_nodes(found: ObjectiveAnalysis) -> set[fx.Node]:
    """Return the nodes that the loss or written state needs."""
    return needed_for(n for n in (found.loss, *found.writers) if n is not None)


def needed_for(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the nodes and all nodes that they are computed from."""
    todo, found = list(nodes), set()
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += node.all_input_nodes
    return found


def total_reads(found: ObjectiveAnalysis, live: set[fx.Node]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield (node, total) pairs where a microbatch value is computed with a batch total."""
    for node in found.graph.nodes:
        if node not in live or node.op != "call_function":
            continue
        own = found.kinds.get(node)
        if own is None or all(k.total for k in own):
            continue
        for operand in node.all_input_nodes:
            if operand in found.kinds and found.kind(operand).total:
                yield node, operand
