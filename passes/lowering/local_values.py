"""Local values: fake tensors of one mesh rank, computed by running ops on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from fxpart.compat import (
    disable_guards,
    has_unbacked_symbols,
    python_dispatcher,
    silence_fake_errors,
)
from fxpart.compiler.collective_calls import (
    bind_fake_communicator,
    is_collective,
    is_random_shard,
)
from fxpart.compiler.graph_edit import describe_node, fake_mode, value
from fxpart.compiler.observation_cache import get_observations, is_reusable_size
from fxpart.compiler.size_symbols import UnsupportedExpressionError, expression, fold
from fxpart.compiler.tensor_sizes import tensors
from fxpart.errors import error
from fxpart.rng import seeded
from fxpart.sharding import Mesh


class FakeCallRunner:
    """Runs calls of one mesh rank on fake tensors; equal calls of all graphs run once."""

    def __init__(self, graph: fx.Graph, mesh: Mesh, mesh_rank: int) -> None:
        """graph: the global graph, for its fake mode and symbols."""
        self.mode = fake_mode(graph)
        self.mesh, self.mesh_rank = mesh, mesh_rank
        self._alike: dict[Hashable, torch.Tensor] = {}
        self._results: dict[Hashable, Any] = {}
        self._known = get_observations(self.mode)
        self._symbols: dict[sympy.Symbol, torch.SymInt] = {}
        for node in graph.nodes:
            for size in _sizes(value(node)):
                if (expr := expression(size)).is_Symbol:
                    self._symbols.setdefault(expr, size)

    def symint(self, size: int | sympy.Expr) -> int | torch.SymInt:
        """Return an integer expression in the graph's symbols as a SymInt."""
        if isinstance(size, int):
            return size
        found: int | torch.SymInt = fold(size, self._symbols.__getitem__, apply)
        return found

    def empty(self, shape: Sequence[int | torch.SymInt], like: torch.Tensor) -> torch.Tensor:
        """Return a contiguous fake tensor of another shape."""
        with self.mode, disable_guards(self.mode):
            return torch.empty(shape, dtype=like.dtype, device=like.device)

    def decided_by_data(self, node: fx.Node) -> bool:
        """Return whether a value, or a size of it, is known only at run time.

        This includes sizes that later ops of the global graph determined, since the op alone does
        not.
        """
        held = value(node)
        dynamic = torch.Tag.dynamic_output_shape in getattr(node.target, "tags", ())
        return dynamic or any(map(has_unbacked_symbols, [held, *tensors(held)]))

    def value(self, node: fx.Node, whole: Any = None) -> Any:
        """Return the result of a call on the values of its arguments; equal calls run once.

        whole: the value in the global graph; sizes that are symbolic there must stay symbolic.
        """
        args, kwargs = fx.node.map_arg((_unnumbered(node), dict(node.kwargs)), value)
        ranks = (self.mesh, self.mesh_rank) if is_collective(node.target) else ()
        signature = ("result", node.target, ranks, *map(_record, (args, kwargs, whole)))
        if signature not in self._results:
            found = self._find_known(signature)
            if found is None:
                found = self._run(node, args, kwargs, whole)
                if _is_reusable(found, signature):
                    self._known[signature] = _record(found)
            self._results[signature] = self._shared(found)
        return self._results[signature]

    def _find_known(self, signature: Hashable) -> Any:
        """Return the result of an equal call of another graph; None if there is none."""
        if signature not in self._known:
            return None
        try:
            return self._restore(self._known[signature])
        except (KeyError, UnsupportedExpressionError):  # a size that no value here has alone
            return None

    def _restore(self, record: Any) -> Any:
        """Return the value of a record; tensors like those that are known."""
        kind, *parts = record
        if kind == "tensor":
            shape, strides, dtype, device = parts
            key = ((*shape, *strides), dtype, device)
            if key not in self._alike:
                sizes = [[self.symint(size) for size in each] for each in (shape, strides)]
                with self.mode, disable_guards(self.mode):
                    self._alike[key] = torch.empty_strided(*sizes, dtype=dtype, device=device)
            return self._alike[key]
        if kind == "size":
            return self.symint(parts[0])
        return {"list": list, "tuple": tuple}[kind](map(self._restore, parts))

    def alike(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the first tensor seen with the same shape, strides, dtype and device."""
        sizes = tuple(map(expression, (*tensor.shape, *tensor.stride())))
        return self._alike.setdefault((sizes, tensor.dtype, tensor.device), tensor)

    def _shared(self, held: Any) -> Any:
        if isinstance(held, torch.Tensor):
            return self.alike(held)
        if isinstance(held, (list, tuple)):
            return type(held)(self._shared(part) for part in held)
        return held

    def _run(self, node: fx.Node, args: Any, kwargs: Any, whole: Any) -> Any:
        target: Any = node.target
        if is_collective(target):
            target = bind_fake_communicator(target, self.mesh, self.mesh_rank)
        with self.mode, disable_guards(self.mode), torch.no_grad():
            try:
                with silence_fake_errors():
                    found = target(*args, **kwargs)
                if _settled(found, whole):
                    raise RuntimeError("it treats dynamic sizes as constants")
                return found
            except RuntimeError as first:
                try:
                    with python_dispatcher(self.mode):
                        found = target(*args, **kwargs)
                    if _settled(found, whole):
                        found = None if kwargs else _slice_by_arguments(target, args, whole)
                    if found is None:
                        raise first
                    return found
                except RuntimeError:
                    raise error(
                        "FXP108",
                        where=describe_node(node),
                        why=f"it fails on the local shapes of a rank: {str(first).splitlines()[0]}",
                        fix="annotate its operands as replicated, or remove this axis of the mesh",
                    ) from first


def _slice_by_arguments(target: Any, args: Any, whole: Any) -> torch.Tensor | None:
    """Return a slice whose length is the difference of its ends; None for another call.

    The fake op takes the length of the whole dim where the end equals it at capture, such as that
    of a model's position ids for its longest sequences.
    """
    if target is not torch.ops.aten.slice.Tensor or len(args) != 4:
        return None
    tensor, dim, start, end = args[0], args[1], args[2] or 0, args[3]
    wanted = sympy.sympify(expression(whole.shape[dim]))
    if not isinstance(end, torch.SymInt) or not isinstance(start, int) or start < 0:
        return None
    if not isinstance(tensor.shape[dim], int) or not wanted.is_polynomial():
        return None
    sizes, strides = [*tensor.shape], tensor.stride()
    sizes[dim] = end - start
    offset = tensor.storage_offset() + start * strides[dim]
    found: torch.Tensor = tensor.as_strided(sizes, strides, offset)
    return found


def _settled(found: Any, whole: Any) -> bool:
    """Return whether a result has constants in place of sizes that are symbolic globally.

    Data-dependent sizes may be constants, because a later op of the global graph determined them.
    """
    return any(
        isinstance(size, int) and not sympy.sympify(expression(wanted)).is_number
        for here, there in zip(tensors(found), tensors(whole), strict=False)
        if not has_unbacked_symbols(there)
        for size, wanted in zip(here.shape, there.shape, strict=False)
    )


def _unnumbered(node: fx.Node) -> tuple[Any, ...]:
    """Return the arguments, with the index of a random call replaced by 0."""
    args = list(node.args)
    if node.target is seeded:
        args[1] = 0
    elif is_random_shard(node.target):
        args[3] = 0
    return tuple(args)


def _record(item: Any) -> tuple[Any, ...]:
    """Return what an abstract value is, equal for equal values of all graphs."""
    if isinstance(item, torch.Tensor):
        shape, strides = (tuple(map(expression, each)) for each in (item.shape, item.stride()))
        return ("tensor", shape, strides, item.dtype, item.device)
    if isinstance(item, (list, tuple)):
        return ("list" if isinstance(item, list) else "tuple", *map(_record, item))
    if isinstance(item, dict):
        return ("dict", *((name, _record(part)) for name, part in item.items()))
    if isinstance(item, torch.SymInt) or type(item) is int:
        return ("size", expression(item))
    return (type(item).__name__, str(item))


def _is_reusable(held: Any, signature: Hashable) -> bool:
    """Return whether a result is equal in any graph: tensors and sizes of known symbols."""
    return _is_plain(held) and is_reusable_size([_record(held)], signature)


def _is_plain(held: Any) -> bool:
    """Return whether a result has only tensors and symbolic sizes; numbers may be of data."""
    if isinstance(held, torch.Tensor):
        return held.layout is torch.strided
    if type(held) in (list, tuple):
        return all(map(_is_plain, held))
    return isinstance(held, torch.SymInt)


def _sizes(held: Any) -> list[torch.SymInt]:
    """Return the symbolic sizes in a value."""
    if isinstance(held, torch.SymInt):
        return [held]
    every: list[Any] = [s for t in tensors(held) for s in t.shape]
    return [s for s in every if isinstance(s, torch.SymInt)]


def map_tensors(held: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the same nesting with each tensor replaced."""
    if isinstance(held, torch.Tensor):
        return function(held)
    if isinstance(held, (list, tuple)):
        return type(held)(map_tensors(part, function) for part in held)
    return held


def same(size: int | torch.SymInt, wanted: int | sympy.Expr) -> bool:
    """Return whether two sizes are equal, or may be equal if that is unknown."""
    found = expression(size)
    if found == wanted:
        return True
    difference = sympy.simplify(found - wanted)
    return not difference.is_number or bool(difference == 0)


def apply(function: Any, left: Any, right: Any) -> Any:
    """Apply a function to symbolic integers without a guard on which is larger."""
    return _SYMBOLIC.get(function, function)(left, right)


_SYMBOLIC: dict[Any, Any] = {max: torch.sym_max, min: torch.sym_min}
