"""Attention masks that sizes decide: a flag or none instead of a tensor, and grouped heads."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import sympy
import torch
from torch import fx

from fxpart.compat import disable_guards, python_dispatcher
from fxpart.compiler.effects import argument, packet_name, remove_dead_nodes
from fxpart.compiler.graph_edit import add_call, fake_mode, value
from fxpart.compiler.node_annotation import Level
from fxpart.compiler.tensor_sizes import expression

_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
_CHOICES = (torch.ops.aten.where.self, torch.ops.aten.where.ScalarOther)
_LENGTHS = (2, 3, 5, 8)  # for a length that is a symbol
_MOST_ELEMENTS = 1 << 24  # of a mask that is computed for comparison
_MANY_NODES = 200
# Ops that are linear in positions and constants, compare, or only move elements: where a mask of
# them changes its form, a sum of its constants is reached. Products are only with booleans.
_LINEAR = frozenset(
    f"aten.{name}"
    for name in (
        "arange", "ones", "zeros", "full", "new_ones", "new_zeros", "new_full", "ones_like",
        "zeros_like", "full_like", "scalar_tensor", "lift_fresh_copy", "add", "sub", "rsub", "neg",
        "diff", "cumsum", "eq", "ne", "lt", "le", "gt", "ge", "__and__", "__or__", "bitwise_and",
        "bitwise_or", "bitwise_not", "logical_and", "logical_or", "logical_not", "where",
        "masked_fill", "tril", "triu", "mul", "to", "_to_copy", "clone", "contiguous", "detach",
        "alias", "expand", "repeat", "view", "reshape", "_unsafe_view", "unsqueeze", "squeeze",
        "transpose", "t", "permute", "slice", "select", "index", "type_as",
    )
)  # fmt: skip
_WIDEST_HEAD = 256
Size: TypeAlias = "int | sympy.Expr"
Form: TypeAlias = "Literal['causal', 'open', '']"  # '': any other


@dataclass(frozen=True)
class FoldAttentionMaskPass:
    """Replace causal masks by ``is_causal``, leave out open masks, and do not repeat keys.

    Tracing makes some models build the mask [batch, 1, length, length] that they leave out
    otherwise. Without it, attention runs in a fused kernel, and no mask is computed per microbatch
    or sent between stages. A mask is decided if it is computed from sizes alone by ops of
    ``_LINEAR``. It is causal if it equals the lower triangle, and open if it hides nothing, for
    several sizes up to more than the sum of all constants in its computation, such as the width of
    a window. A bias that an open mask would hide is used as it is. Repeated keys and values are
    read in place where the mask is gone, as fused kernels can.
    """

    name: ClassVar[str] = "fold_attention_mask"
    requires: ClassVar[Level] = Level.CAPTURED
    ensures: ClassVar[Level] = Level.CAPTURED

    def run(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        """Fold the masks of all attention ops."""
        graph = graph_module.graph
        known: dict[tuple[fx.Node, Size, Size], Form] = {}

        def form(mask: fx.Node, rows: Any, columns: Any) -> Form:
            key = (mask, expression(rows), expression(columns))
            if key not in known:
                known[key] = _find_form(*key)
            return known[key]

        folded, results = False, dict[object, torch.Tensor]()
        for node in graph.find_nodes(op="call_function", target=_ATTENTION):
            mask = argument(node, "attn_mask")
            if not isinstance(mask, fx.Node) or argument(node, "is_causal"):
                continue
            rows, columns = (value(argument(node, n)).shape[-2] for n in ("query", "key"))
            found = form(mask, rows, columns)
            if found:
                _drop_mask(node, fake_mode(graph), results, is_causal=found == "causal")
                folded = True
            elif (choice := _find_choice(mask)) is not None:
                if form(choice.args[0], rows, columns) == "open":  # type: ignore[arg-type]
                    folded = _use_bias(node, mask, choice, fake_mode(graph)) or folded
        if folded:
            remove_dead_nodes(graph)
        return graph_module


# -- which keys does a mask hide? -----------------------------------------------------------------


def _find_form(mask: fx.Node, rows: Size, columns: Size) -> Form:
    """Return whether a mask is the lower triangle, or hides nothing, whatever the sizes are."""
    nodes = _computation(mask)
    if nodes is None:
        return ""
    sizes = [node for node in nodes if not _is_tensor(node)]
    symbols: set[sympy.Symbol] = set().union(*(_symbols(value(n)) for n in sizes))
    lengths: list[sympy.Symbol] = sorted(_free_symbols(rows) | _free_symbols(columns), key=str)
    others = symbols - set(lengths)
    most = math.ceil(sum(c for c in _constants(nodes) if c not in (rows, columns))) + 3
    largest = dict.fromkeys(lengths, max(most, *_LENGTHS))
    area = _number(rows, largest) * _number(columns, largest)
    if len(lengths) > 2 or area * (most if others else 1) > _MOST_ELEMENTS:
        return ""
    forms: set[Form] = {"open", "causal"} if rows == columns else {"open"}
    for trial in itertools.product((*_LENGTHS, most), repeat=len(lengths)):
        for other in (1, most) if others else (1,):
            chosen = dict(zip(lengths, trial, strict=True)) | dict.fromkeys(others, other)
            found = _evaluate(nodes, chosen)
            forms &= _describe(found, _number(rows, chosen)) if found is not None else set()
            if not forms:
                return ""
    return "open" if "open" in forms else "causal"


def _computation(mask: fx.Node) -> list[fx.Node] | None:
    """Return the nodes that compute a mask in order; None if it depends on more than sizes."""
    found: set[fx.Node] = set()
    todo = [mask]
    while todo:
        node = todo.pop()
        if node in found:
            continue
        found.add(node)
        if not _is_tensor(node):
            continue  # a size: its value is an expression
        if packet_name(node.target) not in _LINEAR or len(found) > _MANY_NODES:
            return None
        masks = any(getattr(value(n), "dtype", None) == torch.bool for n in node.all_input_nodes)
        if packet_name(node.target) == "aten.mul" and not masks:
            return None
        todo += node.all_input_nodes
    return [node for node in mask.graph.nodes if node in found]


def _is_tensor(node: fx.Node) -> bool:
    return not isinstance(value(node), (int, float, torch.SymInt, torch.SymFloat, torch.SymBool))


def _symbols(size: Any) -> set[sympy.Symbol]:
    return set(size.node.expr.free_symbols) if isinstance(size, torch.SymInt) else set()


def _free_symbols(size: Size) -> set[sympy.Symbol]:
    return set(size.free_symbols) if isinstance(size, sympy.Expr) else set()


def _constants(nodes: list[fx.Node]) -> Iterator[float]:
    """Yield the sizes of all numbers in arguments of the ops and in expressions of sizes.

    Without ends of slices and values that hide elements.
    """
    for node in nodes:
        if not _is_tensor(node):
            size = expression(value(node)) if isinstance(value(node), (int, torch.SymInt)) else 0
            numbers = size.atoms(sympy.Rational) if isinstance(size, sympy.Expr) else {size}
            yield from (float(max(abs(n.p), n.q)) for n in map(sympy.Rational, numbers))
            continue
        todo = [*node.args, *node.kwargs.values()]
        while todo:
            item = todo.pop()
            if isinstance(item, (list, tuple)):
                todo += item
            elif isinstance(item, (int, float)) and not isinstance(item, bool):
                hides = isinstance(item, float) and abs(item) > _MOST_ELEMENTS
                if item != sys.maxsize and not hides:
                    yield float(abs(item))


def _number(size: Any, chosen: Mapping[sympy.Symbol, int]) -> int:
    """Return a size for chosen values of its symbols."""
    known = expression(size) if isinstance(size, (int, torch.SymInt, sympy.Expr)) else size
    return int(known.subs(chosen)) if isinstance(known, sympy.Expr) else int(known)


def _evaluate(nodes: list[fx.Node], chosen: Mapping[sympy.Symbol, int]) -> torch.Tensor | None:
    """Compute a mask on the CPU for chosen sizes; None if it cannot be computed."""
    values: dict[fx.Node, Any] = {}
    try:
        with torch.no_grad():
            for node in nodes:
                if not _is_tensor(node):
                    values[node] = _number(value(node), chosen)
                    continue
                args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
                if kwargs.get("device") is not None:
                    kwargs = {**kwargs, "device": "cpu"}
                target: Any = node.target
                values[node] = target(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None
    found = values[nodes[-1]]
    return found if isinstance(found, torch.Tensor) else None


def _describe(mask: torch.Tensor, length: int) -> set[Form]:
    """Return all forms of a mask; exactly the keys up to each query count in a causal one."""
    if mask.dtype == torch.bool:
        seen = mask
    elif mask.is_floating_point():
        seen = mask == 0
        if not bool((seen | (mask <= torch.finfo(mask.dtype).min)).all()):
            return set()
    else:
        return set()
    forms: set[Form] = {"open"} if bool(seen.all()) else set()
    if mask.shape[-2:] == (length, length):
        wanted = torch.ones(length, length, dtype=torch.bool).tril()
        forms |= {"causal"} if bool((seen == wanted).all()) else set()
    return forms


# -- attention without the mask -------------------------------------------------------------------


def _find_choice(mask: fx.Node) -> fx.Node | None:
    """Return the ``where`` that hides elements of a mask with values, such as position biases."""
    node: Any = mask
    if packet_name(node.target) == "aten.contiguous":
        node = node.args[0]
    return node if isinstance(node, fx.Node) and node.target in _CHOICES else None


def _use_bias(node: fx.Node, mask: fx.Node, choice: fx.Node, mode: Any) -> bool:
    """Use the values of a mask that hides none of them; return whether this is possible.

    A mask may have fewer rows of the batch than the attention, so they are not repeated.
    """
    bias: Any = choice.args[1]
    x = value(bias) if isinstance(bias, fx.Node) else None
    if not isinstance(x, torch.Tensor) or x.dtype != value(choice).dtype or x.dim() < 2:
        return False
    if mask is not choice:
        with node.graph.inserting_before(node):
            bias = add_call(node.graph, mask.target, (bias,), like=mask, mode=mode)
    node.replace_input_with(mask, bias)
    return True


def _drop_mask(
    node: fx.Node, mode: Any, results: dict[object, torch.Tensor], *, is_causal: bool
) -> None:
    """Replace the mask by ``is_causal``, and repeated keys and values by the original ones.

    results: of equal calls, whose sizes and strides torch computes once.
    """
    query, key, values = (argument(node, name) for name in ("query", "key", "value"))
    kwargs = {k: v for k, v in node.kwargs.items() if k in ("scale", "enable_gqa")}
    if not kwargs.get("enable_gqa") and _has_fused_kernel(key, values):
        sources = _ungrouped(key), _ungrouped(values)
        if sources[0] is not None and sources[1] is not None:
            with node.graph.inserting_before(node):
                key = _converted_like(sources[0], key, mode)
                values = _converted_like(sources[1], values, mode)
            kwargs["enable_gqa"] = True
    node.args = (query, key, values, None, argument(node, "dropout_p"), is_causal)
    node.kwargs = kwargs
    given = fx.node.map_arg((node.args, kwargs), value)
    called = (*map(_layout, given[0]), *sorted(given[1].items()))
    with mode, disable_guards(mode), python_dispatcher(mode), torch.no_grad():
        if called not in results:
            results[called] = _ATTENTION(*given[0], **given[1])
        known = results[called]
        node.meta["val"] = torch.empty_like(known)


def _layout(argument: Any) -> object:
    """Return dtype, sizes and strides of a tensor; any other argument as it is."""
    if not isinstance(argument, torch.Tensor):
        return argument
    lengths = (*argument.shape, *argument.stride())
    return (argument.dtype, argument.device, *map(expression, lengths))


def _has_fused_kernel(key: fx.Node, values: fx.Node) -> bool:
    """Return whether fused kernels accept the sizes of heads with grouped keys."""
    sizes = (_sizes(key)[-1], _sizes(values)[-1])
    return sizes[0] == sizes[1] and isinstance(sizes[0], int) and sizes[0] <= _WIDEST_HEAD


def _converted_like(source: fx.Node, before: fx.Node, mode: Any) -> fx.Node:
    """Return the node in the dtype of what it replaces."""
    dtype = value(before).dtype
    if value(source).dtype == dtype:
        return source
    to = torch.ops.aten.to.dtype
    return add_call(source.graph, to, (source, dtype), like=before, mode=mode)


def _ungrouped(node: fx.Node) -> fx.Node | None:
    """Return the keys [batch, groups, ...] that a node repeats to [batch, heads, ...].

    A conversion after the repetition, as autocast adds it, is skipped.
    """
    if packet_name(node.target) == "aten.to":
        node = node.args[0]  # type: ignore[assignment]
    if packet_name(node.target) not in ("aten.reshape", "aten.view", "aten._unsafe_view"):
        return None
    expanded = node.args[0]
    if not isinstance(expanded, fx.Node) or packet_name(expanded.target) != "aten.expand":
        return None
    source: Any = expanded.args[0]
    wide, flat = _sizes(expanded), _sizes(node)
    if len(wide) != 5 or len(flat) != 4 or flat != [wide[0], wide[1] * wide[2], *wide[3:]]:
        return None
    while packet_name(source.target) == "aten.slice" and _sizes(source) == _sizes(source.args[0]):
        source = source.args[0]
    if packet_name(source.target) != "aten.unsqueeze" or source.args[1] != 2:
        return None
    inner = source.args[0]
    return inner if _sizes(inner) == [*wide[:2], *wide[3:]] else None


def _sizes(node: fx.Node) -> list[Any]:
    return [expression(size) for size in value(node).shape]
