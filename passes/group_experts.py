"""Group the ops of each sparse mixture of experts into a single op."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxpart.collectives.experts import GROUPED, HALVES, LOOP, PAIRS, WHOLE
from fxpart.compiler.effects import argument, is_random, packet_name
from fxpart.compiler.graph_edit import add_call, fake_mode, value
from fxpart.compiler.node_annotation import Level

_PRODUCTS = {
    "transformers.grouped_mm_fallback": LOOP,
    "fxpart.grouped_product": LOOP,
    "aten._grouped_mm": GROUPED,
}
_RESHAPES = ("aten.reshape", "aten.view", "aten.flatten", "aten._unsafe_view")


@dataclass(frozen=True)
class GroupExpertsPass:
    """Replace each mixture of experts by one call of ``torch.ops.fxpart.experts``.

    A mixture is recognized by its computation: (token, expert) pairs sorted by expert, gathered
    rows, a grouped product, pointwise ops, a second grouped product, routing weights, the inverse
    permutation, and a sum over the k choices (transformers' grouped experts). Router, top-k and
    router losses are unchanged. Results are bit-identical. A graph that differs in any way is left
    unchanged.
    """

    name: ClassVar[str] = "group_experts"
    requires: ClassVar[Level] = Level.CAPTURED
    ensures: ClassVar[Level] = Level.CAPTURED

    def run(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        """Try each grouped product as the second product of a mixture."""
        graph = graph_module.graph
        position = {node: index for index, node in enumerate(graph.nodes)}
        for node in list(graph.nodes):
            if not _calls(node, *_PRODUCTS):
                continue
            found = _ExpertMixture(node, position)
            try:
                arguments = found.read()
            except _NotAMixtureError:
                continue
            with graph.inserting_before(found.result):
                new = add_call(
                    graph,
                    torch.ops.fxpart.experts.default,
                    arguments,
                    like=found.result,
                    mode=fake_mode(graph),
                    known=value(found.result),
                )
            found.result.replace_all_uses_with(new)
            for old in sorted(found.region, key=position.__getitem__, reverse=True):
                if not old.users:
                    graph.erase_node(old)
        return graph_module


class _NotAMixtureError(Exception):
    """Raised if the ops do not clearly form a mixture of experts."""


class _ExpertMixture:
    """The ops around a second grouped product; ``region`` collects the ops to replace."""

    def __init__(self, down: fx.Node, position: dict[fx.Node, int]) -> None:
        self.down, self.position = down, position
        self.region: set[fx.Node] = {down}
        self.result = down

    def read(self) -> tuple[Any, ...]:
        """Return the arguments of the grouped op; raise _NotAMixtureError without a match."""
        inner, down, ends = _factors(self.down)
        self._routing(ends, _shape(down)[0])
        out, down_bias = self._biased(self.down, _single(self.down))
        gate = self._result(out)
        first, bias, parts, body = self._body(inner)
        rows, up, first_ends = _factors(first)
        _check(first_ends is ends and _same_product(first, self.down))
        hidden = self._gathered(rows)
        matrices, plain = self._matrices(up, down)
        self._closed()
        product = _PRODUCTS[packet_name(self.down.target)]
        return (hidden, self.index, gate, *matrices, bias, down_bias, body, parts, plain, product)

    def _take(self, node: Any, *names: str) -> fx.Node:
        """Check that the node calls one of these ops, and add it to the region."""
        _check(_calls(node, *names))
        self.region.add(node)
        return node  # type: ignore[no-any-return]

    def _lookup(self, node: Any) -> tuple[fx.Node, Any]:
        """Return the source and the rows of ``source[rows]``."""
        source, rows = self._take(node, "aten.index").args
        _check(isinstance(source, fx.Node) and isinstance(rows, list | tuple) and len(rows) == 1)
        return source, rows[0]  # type: ignore[return-value, index]

    def _flat(self, node: Any) -> fx.Node:
        """Return the [T, k] value before flattening."""
        source = self._take(node, *_RESHAPES).args[0]
        _check(len(_shape(node)) == 1 and len(_shape(source)) == 2)
        return source  # type: ignore[return-value]

    def _routing(self, ends: Any, number: Any) -> None:
        """Match the routing, backwards from the group ends to the choices."""
        sums = self._take(ends, "aten.cumsum")
        _check(argument(sums, "dim") in (0, -1) and argument(sums, "dtype") == torch.int32)
        counts = self._take(sums.args[0], "aten.histc")
        low, high, bins = (argument(counts, name) for name in ("min", "max", "bins"))
        _check(bins == number and low == 0 and high == number - 1)
        cast = self._take(counts.args[0], "aten.to", "aten._to_copy")
        _check(value(cast).dtype in (torch.float32, torch.int32))
        self.sorted = cast.args[0]
        _check(_is_item(self.sorted, 0))
        self.region.add(self.sorted)  # type: ignore[arg-type]
        self.sort = self._take(self.sorted.args[0], "aten.sort")  # type: ignore[union-attr]
        _check(argument(self.sort, "descending") is False and argument(self.sort, "dim") in (-1, 0))
        _check(len(self.sort.args) < 4 and not argument(self.sort, "stable", False))
        self.index = self._flat(self.sort.args[0])
        self.chosen = _shape(self.index)[1]
        _check(value(self.index).dtype == torch.int64 and isinstance(self.chosen, int))

    def _order(self, node: Any) -> None:
        """Check that the node is the permutation that sorts the choices."""
        _check(_is_item(node, 1) and node.args[0] is self.sort)
        self.region.add(node)

    def _biased(self, product: fx.Node, user: Any) -> tuple[fx.Node, fx.Node | None]:
        """Return the product with its experts' bias if ``user`` adds it, and the bias."""
        if not _calls(user, "aten.add") or argument(user, "alpha") != 1:
            return product, None
        bias, rows = self._lookup(_other(user, product))
        _check(rows is self.sorted and _shape(bias) == (_ends(product), _shape(product)[1]))
        return self._take(user), bias

    def _result(self, out: fx.Node) -> fx.Node:
        """Match weights, token order and sum after the second product; return the weights."""
        weighed = self._take(_single(out), "aten.mul")
        column = self._take(_other(weighed, out), "aten.unsqueeze")
        _check(column.args[1] in (-1, 1))
        flat, order = self._lookup(column.args[0])
        self._order(order)
        gate = self._flat(flat)
        _check(_shape(gate) == _shape(self.index))
        restored = _single(weighed)
        source, back = self._lookup(restored)
        _check(source is weighed)
        self._inverse(back)
        folded = self._take(_single(restored), *_RESHAPES)
        _check(_shape(folded) == (*_shape(self.index), _shape(out)[1]))
        self.result = self._take(_single(folded), "aten.sum")
        _check(list(argument(self.result, "dim") or []) in ([1], [-2]))
        _check(not argument(self.result, "keepdim") and argument(self.result, "dtype") is None)
        return gate

    def _inverse(self, back: Any) -> None:
        """Match ``empty_like(order)[order] = arange(len(order))``."""
        put = self._take(back, "aten.index_put")
        base, rows, numbers = put.args[:3]
        _check(isinstance(rows, list | tuple) and len(rows) == 1)
        self._order(rows[0])  # type: ignore[index]
        _check(not argument(put, "accumulate") and _calls(numbers, "aten.arange"))
        _check(len(numbers.args) == 1)  # type: ignore[union-attr]
        _check(_shape(base) == _shape(rows[0]) == _shape(numbers))  # type: ignore[index]
        self.region.add(self._take(numbers))
        self.region.add(self._take(base))

    def _body(self, end: Any) -> tuple[fx.Node, fx.Node | None, str, str]:
        """Return the first product, its bias, its column split, and the ops before the second."""
        inside: set[fx.Node] = set()
        starts: dict[fx.Node, tuple[int, str, fx.Node]] = {}
        stack = [end]
        while stack:
            node = stack.pop()
            if node in inside or node in starts:
                continue
            part = self._part(node)
            if part is not None:
                starts[node] = part
                continue
            _check(_pointwise(node))
            inside.add(node)
            stack.extend(node.all_input_nodes)
        kinds = {(kind, source) for _, kind, source in starts.values()}
        _check(len(kinds) == 1 and len({number for number, *_ in starts.values()}) == len(starts))
        ((kind, source),) = kinds
        _check(end in inside or kind == WHOLE)
        text = self._text(inside, {node: number for node, (number, *_) in starts.items()}, kind)
        self.region |= inside | set(starts)
        first, bias = source, None
        if not _calls(source, *_PRODUCTS):
            products = [n for n in source.all_input_nodes if _calls(n, *_PRODUCTS)]
            _check(len(products) == 1 and _single(products[0]) is source)
            first = products[0]
            _, bias = self._biased(first, source)
            _check(bias is not None)
        self.region.add(first)
        return first, bias, kind, text

    def _text(self, inside: set[fx.Node], numbers: dict[fx.Node, int], kind: str) -> str:
        """Format the pointwise ops for :func:`fxpart.collectives.experts.statements`."""
        lines = []
        for node in sorted(inside, key=self.position.__getitem__):
            lines.append(_statement(node, numbers))
            numbers[node] = len(lines) + (0 if kind == WHOLE else 1)
        return "; ".join(lines)

    def _part(self, node: Any) -> tuple[int, str, fx.Node] | None:
        """Return which part of a first product the node is, how it is split, and the product."""
        if _is_item(node, 0) or _is_item(node, 1):
            halves = self._take(node.args[0], "aten.chunk")
            _check(argument(halves, "chunks") == 2 and argument(halves, "dim") in (-1, 1))
            return node.args[1], HALVES, halves.args[0]  # type: ignore[return-value]
        if _calls(node, "aten.slice"):
            _check(argument(node, "dim") in (-1, 1) and argument(node, "step") == 2)
            start, end = argument(node, "start"), argument(node, "end")
            whole = _shape(node.args[0])[1]
            _check(start in (0, 1) and isinstance(whole, int))
            _check(end is None or bool(end >= whole))
            return start, PAIRS, node.args[0]
        if _calls(node, *_PRODUCTS) or (
            _calls(node, "aten.add") and any(_calls(n, *_PRODUCTS) for n in node.all_input_nodes)
        ):
            return 0, WHOLE, node
        return None

    def _gathered(self, rows: Any) -> fx.Node:
        """Return the tokens of ``tokens[order // k]``."""
        hidden, tokens = self._lookup(rows)
        divided = self._take(tokens, "aten.floor_divide")
        _check(divided.args[1] == self.chosen)
        self._order(divided.args[0])
        _check(len(_shape(hidden)) == 2 and _shape(hidden)[0] == _shape(self.index)[0])
        _check(_shape(hidden)[1] == _shape(self.down)[1])
        return hidden

    def _matrices(self, up: Any, down: Any) -> tuple[tuple[fx.Node, fx.Node], bool]:
        """Return the weights as stored, and whether the products use them untransposed."""
        if all(_calls(n, "aten.transpose") and _turned(n) for n in (up, down)):
            self.region |= {up, down}
            return (up.args[0], down.args[0]), False
        return (up, down), True

    def _closed(self) -> None:
        """Check that no differentiable value but the result leaves the region."""
        for node in self.region - {self.result}:
            held = value(node)
            if not _turned(node) and any(user not in self.region for user in node.users):
                whole = isinstance(held, torch.Tensor) and not held.is_floating_point()
                _check(whole or node is self.sort)


def _check(fact: bool) -> None:
    """Raise _NotAMixtureError unless the condition holds."""
    if not fact:
        raise _NotAMixtureError


def _calls(node: Any, *names: str) -> bool:
    """Return whether the node is a call (of one of these ops)."""
    called = isinstance(node, fx.Node) and node.op == "call_function"
    return called and (not names or packet_name(node.target) in names)


def _is_item(node: Any, index: int) -> bool:
    """Return whether the node takes item ``index`` of a tuple."""
    taken = _calls(node) and node.target is operator.getitem
    return taken and isinstance(node.args[0], fx.Node) and node.args[1] == index


def _shape(node: Any) -> tuple[int | str, ...]:
    """Return sizes as numbers, symbolic ones as text."""
    held = value(node)
    _check(isinstance(held, torch.Tensor))
    return tuple(size if isinstance(size, int) else str(size) for size in held.shape)


def _single(node: fx.Node) -> Any:
    """Return the only user; None if there are several."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def _other(call: fx.Node, one: fx.Node) -> Any:
    """Return the other operand of a call with two operands."""
    _check(len(call.args) == 2 and any(a is one for a in call.args))
    return call.args[1] if call.args[0] is one else call.args[0]


def _factors(product: fx.Node) -> tuple[Any, Any, Any]:
    """Return rows, weight and group ends of a plain grouped product."""
    extra = (*product.args[3:], *(v for k, v in product.kwargs.items() if k not in _ENDS))
    _check(all(given is None for given in extra))
    ends = product.args[2] if len(product.args) > 2 else None
    ends = next((product.kwargs[k] for k in _ENDS if k in product.kwargs), ends)
    _check(len(product.args) >= 2 and len(_shape(product.args[1])) == 3)
    return product.args[0], product.args[1], ends


_ENDS = ("offs", "ends")


def _ends(product: fx.Node) -> int | str:
    """Return the number of experts of a product."""
    return _shape(_factors(product)[1])[0]


def _same_product(one: fx.Node, other: fx.Node) -> bool:
    """Return whether two products use the same implementation."""
    return _PRODUCTS[packet_name(one.target)] == _PRODUCTS[packet_name(other.target)]


def _turned(node: fx.Node) -> bool:
    """Return whether the node swaps the last two dims of a weight."""
    if not _calls(node, "aten.transpose") or len(_shape(node)) != 3:
        return False
    return {dim % 3 for dim in node.args[1:] if isinstance(dim, int)} == {1, 2}


def _pointwise(node: Any) -> bool:
    """Return whether the op is pointwise, with only tensors and numbers as arguments."""
    if not _calls(node) or not packet_name(node.target).startswith("aten."):
        return False
    return torch.Tag.pointwise in node.target.tags and not is_random(node)


def _statement(node: fx.Node, numbers: dict[fx.Node, int]) -> str:
    """Return one op as a statement."""
    words = [packet_name(node.target).removeprefix("aten.") + "." + node.target._overloadname]  # type: ignore[union-attr]
    for given in node.args:
        words.append(f"%{numbers[given]}" if isinstance(given, fx.Node) else _literal(given))
    for key, given in node.kwargs.items():
        _check(not isinstance(given, fx.Node))
        words.append(f"{key}={_literal(given)}")
    return " ".join(words)


def _literal(given: Any) -> str:
    """Return a number, None or word as text that can be parsed again."""
    fine = given is None or isinstance(given, bool | int)
    fine = fine or (isinstance(given, float) and math.isfinite(given))
    _check(fine or (isinstance(given, str) and given.isidentifier()))
    return repr(given)
