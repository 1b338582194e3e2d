"""Analyze how each value of a microbatch relates to the batch, using the sharding rules.

A microbatch is to the batch like a shard under data parallelism, except that microbatches run one
after another. The rules of data parallelism therefore also apply to rows, sums and means. Where
they would need communication, rows of different microbatches are coupled.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import sympy
import torch
from torch import fx, nn

from fxpart.annotations.graph_values import find_producer
from fxpart.compiler import RNG_KEY
from fxpart.compiler.effects import argument, is_op, is_random, op_of, packet_name, state_written
from fxpart.compiler.tensor_sizes import expression, tensors
from fxpart.sharding import Mesh, Shard

from ..propagation.axis_rules import AxisRule, GraphRules
from ..rules import operands
from ..rules.pointwise import is_pointwise
from .loss_ops import LossOp, loss_of
from .transfer_function import TransferCall, place_of, transfer
from .value_kinds import FIXED, MEAN, BatchRelation, ValueKind, make_coupled_kind, rows

AXIS = Mesh((("batch", 1),))
# A graph with static sizes: names of nodes whose arguments depend on the batch size.
NUMBERS_KEY = "fxpart_batch_numbers"
# A graph with one row, where rows look like broadcast dims: the same graph with more rows.
LARGER_KEY = "fxpart_larger_batch"
LARGEST_CONSTANT = 1 << 16  # largest buffer, in elements, that batch totals may read

_UNIFORM = frozenset(
    f"aten.{name}"
    for name in (
        "zeros ones full empty new_zeros new_ones new_full new_empty rand randn randint"
    ).split()
)
# Random ops without a sharding rule, as what they draw depends on values; rows are independent.
_DRAWN_BY_ROW = frozenset({"aten.multinomial", "aten.poisson", "aten.binomial"})
_QUOTIENTS = frozenset({"aten.div", "aten.divide", "aten.true_divide"})
_REPEATED = frozenset({"aten.expand", "aten.expand_as", "aten.repeat"})
_ARITHMETIC = frozenset(
    f"aten.{name}"
    for name in (
        "add sub rsub mul div true_divide multiply subtract divide pow floor_divide"
    ).split()
)


@dataclass
class ObjectiveAnalysis:
    """The kind of every tensor of a graph.

    kinds: per node, one for each result tensor. conversions: (node, operand) pairs whose sum must
    become a mean before the node reads it. losses: losses whose mean over counted targets becomes a
    sum and a batch total. sizes: (node, operand) pairs that compute with the batch size. writers:
    nodes that write state, with the state's names.
    """

    graph: fx.Graph
    kinds: dict[fx.Node, tuple[ValueKind, ...]] = field(default_factory=dict)
    conversions: dict[tuple[fx.Node, fx.Node], None] = field(default_factory=dict)
    losses: dict[fx.Node, LossOp] = field(default_factory=dict)
    sizes: dict[tuple[fx.Node, Any], None] = field(default_factory=dict)
    writers: dict[fx.Node, tuple[str, ...]] = field(default_factory=dict)

    def kind(self, node: fx.Node) -> ValueKind:
        """Return the kind of a node; of several tensors, a coupled one first."""
        found = self.kinds.get(node, (FIXED,))
        return next((k for k in found if k.coupled), found[0] if found else FIXED)

    @property
    def loss(self) -> fx.Node | None:
        """The node of the loss; None without a loss."""
        given = self.graph.output_node().args[0]
        loss = given[0] if isinstance(given, (tuple, list)) and given else None
        return loss if isinstance(loss, fx.Node) else None


def analyze(
    module: fx.GraphModule, batch_dims: Mapping[str, int | None], *, accept: bool = False
) -> ObjectiveAnalysis:
    """Return the kinds of all values of a prepared graph.

    batch_dims: of each input, by name. accept: values that couple rows are computed per microbatch
    and count as a mean over rows.
    """
    larger = module.meta.get(LARGER_KEY)
    if larger is None:
        return _ObjectiveAnalyzer(module, batch_dims, accept).run()
    return transfer_analysis(_ObjectiveAnalyzer(larger, batch_dims, accept).run(), module.graph)


def transfer_analysis(found: ObjectiveAnalysis, graph: fx.Graph) -> ObjectiveAnalysis:
    """Transfer an analysis to another graph with the same nodes by name.

    A node that exists only in the other graph counts as coupling rows.
    """
    nodes = {node.name: node for node in graph.nodes}
    pairs = ((n, nodes[n.name]) for n in found.graph.nodes if n.name in nodes)
    there = {n: m for n, m in pairs if (n.op, n.target) == (m.op, m.target)}

    def of(kind: ValueKind) -> ValueKind:
        return kind if kind.cause is None else replace(kind, cause=there.get(kind.cause))

    def both(pair: tuple[fx.Node, Any]) -> tuple[fx.Node, Any] | None:
        node, operand = pair
        other = there.get(operand) if isinstance(operand, fx.Node) else operand
        return None if node not in there or other is None else (there[node], other)

    made = ObjectiveAnalysis(graph)
    made.kinds = {there[n]: tuple(map(of, kinds)) for n, kinds in found.kinds.items() if n in there}
    for node in graph.nodes:
        held = tensors(node.meta.get("val")) if node.op == "call_function" else []
        if held and node not in made.kinds:
            made.kinds[node] = (make_coupled_kind(node),) * len(held)
    made.conversions = {pair: None for pair in map(both, found.conversions) if pair}
    made.losses = {there[n]: loss for n, loss in found.losses.items() if n in there}
    made.sizes = {pair: None for pair in map(both, found.sizes) if pair}
    made.writers = state_written(graph)
    return made


class _ObjectiveAnalyzer:
    """One pass over the nodes in order."""

    def __init__(
        self, module: fx.GraphModule, batch_dims: Mapping[str, int | None], accept: bool
    ) -> None:
        self.module, self.dims, self.accept = module, batch_dims, accept
        self.found = ObjectiveAnalysis(module.graph)
        self.rules = GraphRules(AXIS)
        self.symbols: set[sympy.Symbol] = set()
        self.sizes: set[int] = set()  # of the batch dims, for a graph with static sizes
        self.numbers: frozenset[str] = module.meta.get(NUMBERS_KEY, frozenset())
        written = state_written(module.graph)
        self.found.writers = written
        self.changed = {name for names in written.values() for name in names}

    def run(self) -> ObjectiveAnalysis:
        """Analyze all nodes."""
        for node in self.module.graph.nodes:
            if node.op == "placeholder":
                self.found.kinds[node] = (self._input(node),)
            elif node.op == "get_attr":
                self.found.kinds[node] = (FIXED.of(self._is_constant(str(node.target))),)
            elif node.op == "call_function" and tensors(node.meta.get("val")):
                self.found.kinds[node] = self._settled(node, self._call(node))
        return self.found

    def _input(self, node: fx.Node) -> ValueKind:
        dim = self.dims.get(node.name)
        value = node.meta.get("val")
        if node.name == RNG_KEY or not isinstance(value, torch.Tensor):
            return FIXED
        if dim is None:
            return FIXED.of(True)
        size = value.shape[dim]
        self.symbols |= _symbols(size)
        if isinstance(size, int):
            self.sizes.add(size)
        return rows(Shard(dim)).of(True)

    def _is_constant(self, name: str) -> bool:
        """Return whether state is small and never changes in training, such as a class weight."""
        value = attrgetter(name)(self.module)
        fixed = not isinstance(value, nn.Parameter) and not value.requires_grad
        return fixed and name not in self.changed and value.numel() <= LARGEST_CONSTANT

    def _settled(self, node: fx.Node, kinds: tuple[ValueKind, ...]) -> tuple[ValueKind, ...]:
        """Return kinds as other nodes see them; values from inputs alone are batch totals."""
        sources = [a for a in node.all_input_nodes if a in self.found.kinds]
        known = [k for a in sources for k in self.found.kinds[a]]
        own = all(k.from_inputs for k in known) and not is_random(node)
        if own and node in self.found.writers:
            own = False
        if node.name in self.numbers:
            own = False  # its constants are those of a microbatch
        total = any(k.total for k in known)
        settled = []
        for kind, tensor in zip(kinds, tensors(node.meta["val"]), strict=True):
            if self.accept and kind.coupled and not own and not self._grows(tensor):
                settled.append(MEAN)
            elif not own:
                settled.append(kind.of(False))
            elif kind.relation in (BatchRelation.ROWS, BatchRelation.INDEX):
                settled.append(kind.of(True))
            elif kind.relation is BatchRelation.FIXED:
                settled.append(replace(kind, from_inputs=True, total=total or kind.total))
            elif self._grows(tensor):
                settled.append(kind.of(True))
            else:
                settled.append(ValueKind(BatchRelation.FIXED, from_inputs=True, total=True))
        return tuple(settled)

    def _grows(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's shape depends on the rows of the batch, or may."""
        return any(self._of_batch(size) or _unbacked(size) for size in tensor.shape)

    def _of_batch(self, value: Any) -> bool:
        """Return whether a size or the node of a size depends on the rows of the batch."""
        if isinstance(value, fx.Node):
            value = value.meta.get("val")
        return bool(_symbols(value) & self.symbols)

    def _scales(self, size: Any) -> bool:
        """Return whether a size grows with the rows of the batch."""
        if self.symbols:
            return self._of_batch(size)
        return isinstance(size, int) and any(size % rows == 0 for rows in self.sizes)

    def _call(self, node: fx.Node) -> tuple[ValueKind, ...]:
        count = len(tensors(node.meta["val"]))
        if node.target is operator.getitem:
            source, index = find_producer(node)
            given = self.found.kinds.get(source, ())
            single = len(given) > index and count == 1
            return (given[index],) if single else (make_coupled_kind(node),) * count
        if not is_op(op_of(node)):
            known = [k for a in operands(node) for k in self.found.kinds[a]]
            plain = all(k.relation is BatchRelation.FIXED for k in known)
            return (FIXED if plain else make_coupled_kind(node),) * count
        name = packet_name(op_of(node))
        if name in _UNIFORM or (name == "aten.normal" and not operands(node)):
            return (self._uniform(node),) * count
        loss = loss_of(node, self.found.kind)
        if loss is not None:
            if loss.kind.relation is BatchRelation.SUM and loss.counted:
                self.found.losses[node] = loss
            return (loss.kind,) * count
        return self._ruled(node, name, count)

    def _uniform(self, node: fx.Node) -> ValueKind:
        """Return the kind of a constant or random tensor: rows if a dim grows with the batch."""
        (tensor,) = tensors(node.meta["val"])
        grows = [d for d, size in enumerate(tensor.shape) if self._of_batch(size)]
        if not grows:
            return ValueKind(BatchRelation.FIXED, uniform=not self.symbols)
        outer = _outer(tensor.shape[grows[0]], self.symbols)
        return (
            rows(Shard(grows[0], outer)) if len(grows) == 1 and outer else make_coupled_kind(node)
        )

    def _ruled(self, node: fx.Node, name: str, count: int) -> tuple[ValueKind, ...]:
        given = operands(node)
        known = [self.found.kind(a) for a in given]
        bad = next((k for k in known if k.coupled), None)
        if bad is not None:
            return (bad,) * count
        if not given:
            return (self._from_sizes(node),) * count
        if name in _DRAWN_BY_ROW and _first_dims(given, known, name == "aten.multinomial"):
            return (rows(Shard(0)),) * count
        sized = [a for a in _numbers(node) if self._of_batch(a)]
        if not sized and node.name in self.numbers and name in _ARITHMETIC:
            mean = known[0].relation is BatchRelation.SUM and len(known) == 1 and name in _QUOTIENTS
            return (MEAN if mean else make_coupled_kind(node),) * count
        if sized and name.removesuffix("_") in _ARITHMETIC:
            return self._with_size(node, name, known, sized, count)
        if (sized or node.name in self.numbers) and is_pointwise(op_of(node)):
            return (make_coupled_kind(node),) * count  # its elements depend on the batch size
        ruled = self.rules.of(node)
        made = transfer(
            TransferCall(node, name, given, known, ruled, count, self._scales, self.accept)
        )
        for operand in made.conversions:
            self.found.conversions[node, operand] = None
        return self._expanded(node, ruled, made.kinds)

    def _from_sizes(self, node: fx.Node) -> ValueKind:
        """Return the kind of a tensor computed from sizes: row indices (arange), or fixed."""
        (tensor,) = tensors(node.meta["val"])[:1]
        if packet_name(op_of(node)) == "aten.arange" and self._of_batch(tensor.shape[0]):
            return ValueKind(BatchRelation.INDEX, Shard(0), from_inputs=True, cause=node)
        if packet_name(op_of(node)) == "aten.arange" and node.name in self.numbers:
            return ValueKind(BatchRelation.INDEX, Shard(0), from_inputs=True, cause=node)
        depends = any(self._of_batch(a) for a in _numbers(node)) or self._grows(tensor)
        depends = depends or node.name in self.numbers
        return make_coupled_kind(node) if depends else FIXED

    def _with_size(
        self, node: fx.Node, name: str, known: list[ValueKind], sized: list[Any], count: int
    ) -> tuple[ValueKind, ...]:
        """Return the kinds of arithmetic with the batch size; a sum divided by it is a mean."""
        (kind, *others) = known
        alone = (
            not others and len(sized) == 1 and getattr(node.target, "_overloadname", "") == "Tensor"
        )
        if alone and kind.relation is BatchRelation.SUM and name in _QUOTIENTS:
            rounded = argument(node, "rounding_mode") is not None
            if not rounded and _proportional(sized[0], self.symbols):
                return (MEAN,) * count
        if len(sized) != 1 or not alone:
            return (make_coupled_kind(node),) * count
        ruled = self.rules.of(node)
        made = transfer(
            TransferCall(node, name, operands(node), known, ruled, count, self._scales, self.accept)
        )
        self.found.sizes[node, sized[0]] = None
        for operand in made.conversions:
            self.found.conversions[node, operand] = None
        return made.kinds

    def _expanded(
        self, node: fx.Node, ruled: AxisRule | None, kinds: tuple[ValueKind, ...]
    ) -> tuple[ValueKind, ...]:
        """Mark fixed values that are expanded to the batch size as equal rows."""
        found = []
        for index, (kind, tensor) in enumerate(zip(kinds, tensors(node.meta["val"]), strict=True)):
            grows = [d for d, size in enumerate(tensor.shape) if self._of_batch(size)]
            if kind.relation is not BatchRelation.FIXED or not grows:
                repeated = not self.symbols and packet_name(op_of(node)) in _REPEATED
                found.append(replace(kind, uniform=True) if repeated else kind)
                continue
            place = None if ruled is None or len(grows) > 1 else self._cut(ruled, index, grows[0])
            found.append(make_coupled_kind(node) if place is None else rows(place))
        return tuple(found)

    def _cut(self, ruled: AxisRule, index: int, dim: int) -> Shard | None:
        """Return the position of rows in a result if no operand has rows."""
        rule = ruled.rule
        for factor in rule.results[index][dim]:
            if not self._of_batch(rule.sizes[factor]) or factor in rule.whole:
                continue
            part = (factor, 1)
            if all(place_of(dims, part, rule) is None for dims in rule.operands):
                return place_of(rule.results[index], part, rule)
        return None


def _first_dims(given: list[fx.Node], known: list[ValueKind], matrices: bool) -> bool:
    """Return whether operands of one rank, 2 or more of ``matrices``, have rows along dim 0."""
    places = {(k.relation, k.place) for k in known}
    ranks = {a.meta["val"].dim() for a in given}
    return places == {(BatchRelation.ROWS, Shard(0))} and len(ranks) == 1 and min(ranks) > matrices


def _symbols(value: Any) -> set[sympy.Symbol]:
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return set(value.node.expr.free_symbols)
    return set()


def _unbacked(size: Any) -> bool:
    return any(str(s).startswith(("u", "zuf")) for s in _symbols(size))


def _numbers(node: fx.Node) -> list[Any]:
    """Return the size arguments of a call: nodes of sizes and symbolic integers."""
    found: list[Any] = []

    def visit(value: Any) -> None:
        if isinstance(value, (list, tuple)):
            for item in value:
                visit(item)
        elif isinstance(value, fx.Node):
            if not tensors(value.meta.get("val")):
                found.append(value)
        elif isinstance(value, torch.SymInt | torch.SymFloat):
            found.append(value)

    visit(node.args)
    visit(tuple(node.kwargs.values()))
    return found


def _expression(value: Any) -> Any:
    if isinstance(value, fx.Node):
        value = value.meta.get("val")
    if isinstance(value, torch.SymFloat):
        return value.node.expr
    return expression(value)


def _proportional(value: Any, symbols: set[sympy.Symbol]) -> bool:
    """Return whether a number is the batch size times a factor independent of it."""
    found = sympy.sympify(_expression(value))
    for symbol in found.free_symbols & symbols:
        return not sympy.simplify(found / symbol).free_symbols & symbols
    return False


def _outer(size: Any, symbols: set[sympy.Symbol]) -> int:
    """Return the number of parts before the rows in a dim of this size; 0 if unknown."""
    return 1 if _proportional(size, symbols) else 0
