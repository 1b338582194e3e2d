"""Op specs of an annotated graph's nodes: the input of cost models."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch import fx

from fxpart.collectives.random_ops import DRAWN_IN_PARTS
from fxpart.compat import has_unbacked_symbols, size_hint
from fxpart.compiler import KEY, NodeAnnotation
from fxpart.compiler.collective_calls import (
    CASTS,
    is_random_shard,
    op_name,
    unwrap_seeded_call,
)
from fxpart.compiler.effects import op_of, packet_name
from fxpart.compiler.tensor_sizes import expression, tensors
from fxpart.costmodels.partial_draws import WHOLE
from fxpart.costmodels.tensor_sizes import sum_sizes, tensor_bytes
from fxpart.costs import OpSpec, TensorSpec
from fxpart.passes.rules import origin

if TYPE_CHECKING:
    from fxpart.costs import Size


_LAYOUT = frozenset({"contiguous", "reshape", "reshape_as", "flatten"})
_NOTHING = NodeAnnotation()


def annotation(node: fx.Node) -> NodeAnnotation:
    """Return fxpart's annotation of the node; an empty one where there is none."""
    found: NodeAnnotation = node.meta.get(KEY, _NOTHING)
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


class Specs:
    """Op specs of one graph; tensors are described once, equal specs are one object.

    trained: names of the state with a gradient.
    """

    def __init__(self, trained: Iterable[str]) -> None:
        """Create it; nothing is described before it is needed."""
        self._trained = frozenset(trained)
        self._tensors: dict[fx.Node, tuple[TensorSpec, ...]] = {}
        self._known: dict[OpSpec, OpSpec] = {}
        self._layouts: dict[tuple[tuple[Size, ...], tuple[Size, ...]], str] = {}
        self._shares: dict[fx.Node, Size] = {}

    def tensors(self, node: fx.Node) -> tuple[TensorSpec, ...]:
        """Return the tensors of the node's value."""
        if node not in self._tensors:
            self._tensors[node] = tuple(map(self._tensor, tensors(node.meta.get("val"))))
        return self._tensors[node]

    def _tensor(self, tensor: torch.Tensor) -> TensorSpec:
        shape = tuple(map(expression, tensor.shape))
        strides = tuple(map(_stride, tensor.stride()))
        if (shape, strides) not in self._layouts:
            hints = tuple(map(size_hint, tensor.stride())) if _hinted(tensor) else ()
            self._layouts[shape, strides] = layout(shape, strides, hints)
        return TensorSpec(shape, dtype_name(tensor.dtype), self._layouts[shape, strides])

    def share(self, node: fx.Node) -> Size:
        """Return the fraction of an op's operands and results on a rank, 1 if none is sharded."""
        if node not in self._shares:
            values = (node, *node.all_input_nodes)
            cut = sum_sizes(tensor_bytes(t) for value in values for t in self.tensors(value))
            whole = sum_sizes(
                expression(t.numel()) * t.element_size()
                for value in values
                for t in tensors(value.meta.get("val"))
            )
            self._shares[node] = 1 if whole in (cut, 0) else sympy.sympify(cut) / whole
        return self._shares[node]

    def requires_grad(self, node: fx.Node) -> bool:
        """Return whether the node's value, or the parameter that it names, takes a gradient."""
        if node.op == "get_attr":
            return node.target in self._trained
        return annotation(node).requires_grad

    def op(self, node: fx.Node) -> OpSpec | None:
        """Return the node's op; None for state, inputs, sizes and getitem."""
        if node.op != "call_function":
            return None
        target, args, kwargs = unwrap_seeded_call(node)
        outputs = self.tensors(node)
        if target is operator.getitem or not (outputs or node.meta.get("val") is None):
            return None
        nodes = list(_nodes((args, kwargs)))
        specs: list[TensorSpec] = []
        wanted: list[int] = []
        requires_grad = annotation(node).requires_grad
        for entry in nodes:
            for tensor in self.tensors(entry):
                if requires_grad and self.requires_grad(entry) and _floats(tensor):
                    wanted.append(len(specs))
                specs.append(tensor)
        spec = OpSpec(
            name=op_name(target),
            inputs=tuple(specs),
            outputs=outputs,
            attributes=(
                *_attributes(args, kwargs),
                *self._copies(target, nodes, node),
                *_drawn(node),
            ),
            gradients=len(wanted),
            gradient_inputs=tuple(wanted),
        )
        return self._known.setdefault(spec, spec)

    def _copies(
        self, target: object, nodes: list[fx.Node], node: fx.Node
    ) -> tuple[tuple[str, object], ...]:
        """Return whether an op that may return a view copies, where fake tensors determine it."""
        key = op_name(target).removeprefix("aten.").split(".")[0]
        if key not in _LAYOUT and key not in CASTS:
            return ()
        source, result = nodes[0].meta.get("val"), node.meta.get("val")
        if not isinstance(source, torch.Tensor) or not isinstance(result, torch.Tensor):
            return ()
        if key in CASTS:
            return (("copies", source.dtype != result.dtype or source.device != result.device),)
        return (("copies", not is_contiguous(source) and is_contiguous(result)),)


def is_contiguous(tensor: torch.Tensor) -> bool:
    """Return whether the strides are row-major, from the expressions alone."""
    return _row_major(map(expression, tensor.shape), map(_stride, tensor.stride()))


def _row_major(shape: Iterable[Size], strides: Iterable[Size]) -> bool:
    step: Size = 1
    for length, have in zip(reversed(tuple(shape)), reversed(tuple(strides)), strict=True):
        if length != 1 and have != step and sympy.expand(have - step) != 0:
            return False
        step = step * length
    return True


def _stride(stride: int | torch.SymInt) -> Size:
    """Return a stride as an expression; torch's Min(32, 32*s0) becomes 32, as sizes are >= 1."""
    found = expression(stride)
    if isinstance(found, int) or not any(map(_is_least, sympy.preorder_traversal(found))):
        return found
    result = found.replace(_is_least, lambda least: _least(least.args))
    return int(result) if result.is_number else result


def _is_least(part: sympy.Basic) -> bool:
    return bool(part.func.__name__ == "Min")  # sympy's, or torch's own


def _least(numbers: Sequence[sympy.Expr]) -> sympy.Expr:
    """Return the number that is at most every other for all sizes, or their minimum."""
    for one in numbers:
        if all(_never_more(one, other) for other in numbers):
            return one
    return sympy.Min(*numbers)


def _never_more(one: sympy.Expr, other: sympy.Expr) -> bool:
    more = sympy.expand((other - one).xreplace({s: s + 1 for s in (other - one).free_symbols}))
    return all(factor >= 0 for factor in more.as_coefficients_dict().values())


def layout(shape: tuple[Size, ...], strides: tuple[Size, ...], hints: tuple[int, ...]) -> str:
    """Return the memory layout of a tensor, as :class:`fxpart.costs.TensorSpec` encodes it.

    hints: the strides as numbers, to order dims by; empty where they are not known, and then the
    tensor counts as row-major.
    """
    if len(hints) != len(shape) or _row_major(shape, strides):
        return ""
    dims = [d for d, size in enumerate(shape) if size != 1]
    parts = [f"~{d}" for d in dims if strides[d] == 0]
    step: Size = 1
    inner = []
    for d in sorted((d for d in dims if strides[d] != 0), key=lambda d: (hints[d], -d)):
        longer = sympy.Integer(1)
        if strides[d] != step:
            longer = sympy.cancel(sympy.sympify(strides[d]) / step)
        inner.append(str(d) if longer == 1 else f"{d}x{longer if longer.is_number else '*'}")
        step = strides[d] * shape[d]
    return ".".join([*parts, *reversed(inner)])


def _hinted(tensor: torch.Tensor) -> bool:
    """Return whether every stride has a hint: data-dependent sizes have none."""
    return not has_unbacked_symbols(tensor)


def _floats(tensor: TensorSpec) -> bool:
    return tensor.dtype.startswith(("float", "bfloat", "complex"))


def _nodes(value: object) -> Iterator[fx.Node]:
    """Yield the nodes among arguments, in order, with repetitions."""
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, tuple | list):
        for entry in value:
            yield from _nodes(entry)
    elif isinstance(value, dict):
        for entry in value.values():
            yield from _nodes(entry)


def _attributes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[str, object], ...]:
    """Return the arguments without tensors, by position or name."""
    named = [*((str(i), a) for i, a in enumerate(args)), *sorted(kwargs.items())]
    found = []
    for name, argument in named:
        value = _plain(argument)
        if value is not _TENSOR and value is not None:
            found.append((name, value))
    return tuple(found)


def _drawn(node: fx.Node) -> tuple[tuple[str, object], ...]:
    """Return the whole shape for a rank's part of random numbers if all are generated.

    A rank computes what dropout keeps for its part only.
    """
    if not is_random_shard(node.target) or packet_name(op_of(node)) in DRAWN_IN_PARTS:
        return ()
    return ((WHOLE, _plain(node.args[0])),)


_TENSOR = object()


def _plain(value: object) -> object:
    """Return an argument as a hashable value; the mark _TENSOR where it is or contains a tensor."""
    if isinstance(value, fx.Node):
        inner = value.meta.get("val")
        if isinstance(inner, int | torch.SymInt) and not isinstance(inner, bool):
            return expression(inner)
        return _TENSOR
    if isinstance(value, tuple | list):
        entries = tuple(_plain(entry) for entry in value)
        return _TENSOR if _TENSOR in entries else entries
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.SymInt):
        return expression(value)
    return str(value)


class OpSignatures:
    """A signature for each op of one graph; equal ops have equal ones."""

    def __init__(self) -> None:
        """Create it; nothing is read before it is needed."""
        self._tensors: dict[int, tuple[torch.Tensor, Hashable]] = {}
        self._numbers: dict[Hashable, int] = {}
        self._known: dict[fx.Node, int] = {}

    def __call__(self, node: fx.Node) -> int:
        """Return a number, the same for equal ops."""
        if node not in self._known:
            key = (
                node.target,
                self._of(node.args),
                self._of(tuple(node.kwargs.items())),
                self._of(node.meta.get("val")),
                origin(node),
            )
            self._known[node] = self._numbers.setdefault(key, len(self._numbers))
        return self._known[node]

    def _of(self, value: Any) -> Hashable:
        if isinstance(value, fx.Node):
            return "node", self._of(value.meta.get("val"))
        if isinstance(value, torch.Tensor):
            return self._shape(value)
        if isinstance(value, (list, tuple)):
            return tuple(map(self._of, value))
        if isinstance(value, dict):
            return tuple((k, self._of(v)) for k, v in value.items())
        if isinstance(value, torch.SymInt):
            return "symbol", expression(value)
        if isinstance(value, (bool, int, float, str, type(None))):
            return type(value).__name__, value
        return type(value).__name__, str(value)

    def _shape(self, tensor: torch.Tensor) -> Hashable:
        """Return shape and dtype, cached because reading those of a fake tensor is slow."""
        if id(tensor) not in self._tensors:
            sizes = tuple(s if isinstance(s, int) else expression(s) for s in tensor.shape)
            self._tensors[id(tensor)] = (tensor, (tensor.dtype, sizes))
        return self._tensors[id(tensor)][1]
