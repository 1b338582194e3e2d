"""Build random arguments to run one op of a graph alone.

Shapes, dtypes and strides are those of the graph's fake values, so transposed operands stay
transposed. Integers are valid indices for their op, and masks have some True elements. Parallel
forms run on one mesh rank, see :mod:`fxpart.profiling.collective_ops`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from fxpart.compiler.collective_calls import (
    bind_fake_communicator,
    is_collective,
    is_random_shard,
    op_name,
    parse_random_call,
    unwrap_seeded_call,
)
from fxpart.compiler.node_annotation import MESH_KEY, MESH_RANK_KEY
from fxpart.compiler.tensor_sizes import expression
from fxpart.pricing.specs import Specs, annotation
from fxpart.profiling.collective_ops import bind_single_rank, form_of
from fxpart.rng import microbatch_key

if TYPE_CHECKING:
    from fxpart.pricing.variants import Sizes

# Ops with indices along a dim of the first tensor: positions of the dim and of the indices.
_ALONG = {
    **dict.fromkeys("gather index_select scatter scatter_add scatter_reduce".split(), (1, 2)),
    **dict.fromkeys("index_add index_copy index_fill index_reduce".split(), (1, 2)),
    "take_along_dim": (2, 1),
}
_LISTS = frozenset("index index_put _index_put_impl _unsafe_index _unsafe_index_put".split())
# Ops with indices at position 1 of rows (dim 0), or of classes (dim 1 of two dims).
_ROWS = frozenset("embedding embedding_bag _embedding_bag embedding_renorm".split())
_CLASSES = frozenset(
    "cross_entropy_loss nll_loss nll_loss_nd nll_loss2d nll_loss_forward multi_margin_loss".split()
)
# Ops with ends of row groups (mixture of experts): position of the ends.
_ENDS = {"fxpart.grouped_product": 2, "_grouped_mm": 2}
_BAGS = frozenset({"embedding_bag", "_embedding_bag"})
# Ops that need values between 0 and 1: probabilities, variances, arguments of logarithms.
_POSITIVE = frozenset(
    """bernoulli binary_cross_entropy multinomial log log2 log10 sqrt rsqrt pow batch_norm xlogy
    native_batch_norm kl_div logit""".split()
)

_TILE = 1 << 20  # Random elements of a tensor; longer tensors repeat them.


@dataclass(frozen=True)
class OpCall:
    """One call of an op: ``function(*args, **kwargs)``. wanted: tensors that need a gradient."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    wanted: tuple[torch.Tensor, ...]

    def __call__(self) -> Any:
        """Run the op."""
        return self.function(*self.args, **self.kwargs)

    @property
    def bytes(self) -> int:
        """The bytes of the argument tensors."""
        return bytes_of((self.args, self.kwargs))

    def copy(self) -> OpCall:
        """Return the same call on copied tensors."""
        made = {id(t): _copy(t) for t in tensors((self.args, self.kwargs))}
        args, kwargs = _replaced((self.args, self.kwargs), made)
        return OpCall(self.function, args, kwargs, tuple(made[id(t)] for t in self.wanted))


class UnmeasurableOpError(Exception):
    """An op that cannot be run alone; the message states the reason."""


class OpArguments:
    """Builds reproducible calls of a graph's nodes at given sizes on a device."""

    def __init__(
        self, graph: fx.GraphModule, specs: Specs, sizes: Sizes, device: torch.device
    ) -> None:
        """graph: with blocks, whole or of one mesh rank."""
        self._specs, self._sizes, self._device = specs, sizes, device
        self._mesh, self._mesh_rank = graph.meta.get(MESH_KEY), graph.meta.get(MESH_RANK_KEY, 0)
        self._generator = torch.Generator(device).manual_seed(0)

    def call(self, node: fx.Node) -> OpCall:
        """Return a new call of the node's op; UnmeasurableOpError if it cannot be run alone."""
        function: Any = node.target
        if is_collective(function):
            assert self._mesh is not None, "a local graph has its mesh"
            if is_random_shard(function):
                function = bind_fake_communicator(function, self._mesh, self._mesh_rank)
            elif form_of(node) is not None:
                function = bind_single_rank(function, self._mesh, self._mesh_rank)
            else:
                raise UnmeasurableOpError("the op only moves a tensor")
        elif not callable(function):
            raise UnmeasurableOpError("the target is not a function")
        maker = _ArgumentBuilder(self, node)
        args = tuple(maker(value, (i,)) for i, value in enumerate(node.args))
        kwargs = {name: maker(value, (name,)) for name, value in node.kwargs.items()}
        return OpCall(function, args, kwargs, tuple(maker.wanted))

    def tensor(self, fake: torch.Tensor, highest: int, positive: bool) -> torch.Tensor:
        """Return random values with the fake tensor's shape, strides and dtype.

        highest: exclusive bound of integers, which are at least 0; if 0, they are at least 1, as
        they may be divisors.
        """
        shape = [self.number(size) for size in fake.shape]
        strides = [self.number(stride) for stride in fake.stride()]
        length = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        flat = self._flat(length if 0 not in shape else 1, fake.dtype, highest, positive)
        return flat.as_strided(shape, strides)

    def number(self, size: int | torch.SymInt) -> int:
        """Return the number of a symbolic size."""
        return self._sizes.number(expression(size))

    def _flat(self, length: int, dtype: torch.dtype, highest: int, positive: bool) -> torch.Tensor:
        made: dict[str, Any] = {"generator": self._generator, "device": self._device}
        if dtype == torch.bool:
            mask = torch.rand(length, **made) < 0.75
            mask[0] = True
            return mask
        if dtype.is_floating_point or dtype.is_complex:
            fill = torch.rand if positive else torch.randn
            kind = dtype if dtype.itemsize > 1 else torch.float32
            tile = fill(min(length, _TILE), dtype=kind, **made).to(dtype)
            return tile.repeat(-(-length // _TILE))[:length] if length > _TILE else tile
        low, high = (0, highest) if highest else (1, 3)
        found = torch.randint(low, high, (length,), dtype=dtype, **made)
        found[0] = low  # At least one index is in the first shard of rows or classes.
        return found


class _ArgumentBuilder:
    """Builds the arguments of one call, with valid integer indices and gradient flags."""

    def __init__(self, of: OpArguments, node: fx.Node) -> None:
        self._of = of
        target, self._args, self._kwargs = unwrap_seeded_call(node)
        self._key = op_name(target).removeprefix("aten.").split(".")[0].rstrip("_")
        schema = getattr(target, "_schema", None)
        self._names = [a.name for a in schema.arguments] if schema is not None else []
        self._form = form_of(node)
        if self._form is not None:
            self._key, self._args = self._form.op, self._form.args
            self._names = list(self._form.names)
        random = parse_random_call(node)
        self._seed = random[0] if random is not None else None
        self._has_backward = annotation(node).requires_grad
        self.wanted: list[torch.Tensor] = []

    def __call__(self, value: Any, place: tuple[int | str, ...]) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(self(entry, (*place, i)) for i, entry in enumerate(value))
        if isinstance(value, torch.SymInt):
            return self._of.number(value)
        if not isinstance(value, fx.Node):
            return value
        if value is self._seed:
            return microbatch_key(0, 0, 0)
        needs_gradient = self._has_backward and self._of._specs.requires_grad(value)
        return self._made(value.meta.get("val"), place, needs_gradient)

    def _made(self, found: Any, place: tuple[int | str, ...], needs_gradient: bool) -> Any:
        if isinstance(found, tuple | list):
            return type(found)(self._made(entry, place, needs_gradient) for entry in found)
        if isinstance(found, torch.SymInt):
            return self._of.number(found)
        if not isinstance(found, torch.Tensor):
            return found
        if special := self._special(found, place):
            return special[0]
        tensor = self._of.tensor(found, self._highest(place), self._key in _POSITIVE)
        if needs_gradient and (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
            tensor.requires_grad_()
            self.wanted.append(tensor)
        return tensor

    def _special(self, fake: torch.Tensor, place: tuple[int | str, ...]) -> list[torch.Tensor]:
        """Return ascending integers if required: starts of bags or ends of row groups."""
        position = self._position(place)
        begins = self._key in _BAGS and position == 2
        if not begins and not (self._key in _ENDS and _ENDS[self._key] == position):
            return []
        count = self._of.number(fake.shape[0])
        total = self._number(self._args[1 if begins else 0], 0)
        each = torch.arange(count, device=self._of._device) * (total // max(1, count))
        ends = each if begins else torch.cat([each[1:], each.new_full((min(1, count),), total)])
        return [ends.to(fake.dtype)]

    def _highest(self, place: tuple[int | str, ...]) -> int:
        """Return the exclusive bound of an integer tensor's values; 0 if there is none."""
        key, position, first = self._key, self._position(place), self._args[:1]
        if not first or not isinstance(first[0], fx.Node):
            return 0
        if position == 1 and self._form is not None and self._form.whole is not None:
            return self._count(self._form.whole)
        if key in _ROWS and position == 1:
            return self._number(first[0], 0)
        if key in _LISTS and position == 1:
            return self._number(first[0], int(place[-1]))
        if key in _CLASSES and position == 1:
            return self._number(first[0], min(1, first[0].meta["val"].dim() - 1))
        if key in _ALONG and position == _ALONG[key][1]:
            dim = self._given(_ALONG[key][0])
            return self._number(first[0], dim) if isinstance(dim, int) else self._all(first[0])
        if key == "take" and position == 1:
            return self._all(first[0])
        if key == "one_hot" and position == 0:
            classes = self._given(1)
            return classes if isinstance(classes, int) and classes > 0 else 2
        if key == "fxpart.experts" and position == 1:
            return self._number(self._args[3], 0)
        return 0

    def _position(self, place: tuple[int | str, ...]) -> int:
        first = place[0]
        if isinstance(first, int):
            return first if self._form is None else first - self._form.before
        return self._names.index(first) if first in self._names else -1

    def _given(self, position: int) -> Any:
        if position < len(self._args):
            return self._args[position]
        name = self._names[position] if position < len(self._names) else ""
        return self._kwargs.get(name)

    def _count(self, size: Any) -> int:
        return self._of.number(size.meta["val"] if isinstance(size, fx.Node) else size)

    def _number(self, source: fx.Node, dim: int) -> int:
        return self._of.number(source.meta["val"].shape[dim])

    def _all(self, source: fx.Node) -> int:
        total = 1
        for size in source.meta["val"].shape:
            total *= self._of.number(size)
        return total


def bytes_of(value: Any) -> int:
    """Return the storage bytes of all tensors in a nested value."""
    return sum(t.untyped_storage().nbytes() for t in tensors(value))


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the tensor with equal strides."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    flat = tensor.detach().as_strided((size,), (1,), 0).clone()
    found = flat.as_strided(tensor.shape, tensor.stride())
    return found.requires_grad_(tensor.requires_grad)


def _replaced(value: Any, made: Mapping[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return made[id(value)]
    if isinstance(value, tuple | list):
        return type(value)(_replaced(entry, made) for entry in value)
    if isinstance(value, dict):
        return {name: _replaced(entry, made) for name, entry in value.items()}
    return value


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for entry in value:
            yield from tensors(entry)
    elif isinstance(value, dict):
        for entry in value.values():
            yield from tensors(entry)
