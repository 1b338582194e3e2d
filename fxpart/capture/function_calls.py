"""Ops in the place of torch.autograd.Function calls (:mod:`fxpart.compiler.function_ops`).

The calls of one run give the types of arguments and results. A trial run of each on the meta device
finds calls that no op can replace, and those that compute element by element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from fxpart.compat import (
    TorchDispatchMode,
    get_write_count,
    intercept_functions,
    storage_identity,
)
from fxpart.compiler.function_ops import define, is_applying

Call = tuple[type, tuple[Any, ...], Any]  # the class, the arguments of apply, the result
_SAME = frozenset(
    "alias clone copy_ detach empty empty_like expand full full_like lift_fresh new_full new_ones "
    "new_zeros ones ones_like reshape scalar_tensor view zeros zeros_like _to_copy "
    "_unsafe_view".split()
)  # without a tag, but each element of the result depends on the element at its place only
_TYPES: dict[type, str] = {
    bool: "bool", int: "SymInt", torch.SymInt: "SymInt", float: "float", str: "str",
    torch.dtype: "ScalarType", torch.device: "Device",
}  # fmt: skip


class NoFunctionOpError(Exception):
    """An op cannot replace a call; the message says why."""


@contextmanager
def recorded_functions(calls: list[Call]) -> Iterator[None]:
    """Append each call of a torch.autograd.Function, without those inside another's forward."""
    inside = False

    def record(kind: type, args: tuple[Any, ...]) -> Any:
        nonlocal inside
        if inside:
            return NotImplemented
        inside = True
        try:
            result = kind.apply(*args)  # type: ignore[attr-defined]
        finally:
            inside = False
        calls.append((kind, args, result))
        return result

    with intercept_functions(record):
        yield


@dataclass
class FunctionOps:
    """The ops that replace calls of some classes, by class and schema.

    complete: whether all calls ran on the meta device, where they used only their arguments.
    """

    kinds: Sequence[type]
    ops: dict[tuple[type, str], Any] = field(default_factory=dict)
    complete: bool = True

    @classmethod
    def of(cls, kinds: Sequence[type], calls: Sequence[Call]) -> FunctionOps:
        """Define an op for each kind of call; raise NoFunctionOpError if one cannot be replaced."""
        made = cls(kinds)
        for kind, args, result in calls:
            if kind not in kinds:
                continue
            schema = _schema(kind, args, result)
            if (kind, schema) not in made.ops:
                pointwise, complete = _try_out(kind, args)
                made.complete &= complete
                made.ops[kind, schema] = define(kind, schema, pointwise=pointwise)
        return made

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Call the ops instead of the functions; calls of other kinds run as they are."""
        with intercept_functions(self._replace):
            yield

    def _replace(self, kind: type, args: tuple[Any, ...]) -> Any:
        if kind not in self.kinds or is_applying():
            return NotImplemented
        with suppress(NoFunctionOpError):
            start = f"({_arguments(kind, args)}) ->"
            for (other, schema), op in self.ops.items():
                if other is kind and schema.startswith(start):
                    return op(*args)
        return NotImplemented


def _schema(kind: type, args: tuple[Any, ...], result: Any) -> str:
    """Return the schema of a call, without a name."""
    results = result if isinstance(result, tuple) else (result,)
    if not results or not all(isinstance(t, torch.Tensor) for t in results):
        raise NoFunctionOpError("it returns other objects than tensors")
    text = ", ".join(["Tensor"] * len(results))
    return f"({_arguments(kind, args)}) -> {f'({text})' if isinstance(result, tuple) else text}"


def _arguments(kind: type, args: tuple[Any, ...]) -> str:
    return ", ".join(f"{_type(kind, i, value)} a{i}" for i, value in enumerate(args))


def _type(kind: type, position: int, value: Any) -> str:
    """Return the type of an argument in a schema."""
    if value is None:
        return "Tensor?"
    if isinstance(value, torch.Tensor):
        return "Tensor"
    if isinstance(value, list | tuple) and value:
        of = {_type(kind, position, item) for item in value}
        if len(of) == 1 and of <= {"SymInt", "float", "bool", "Tensor"}:
            return f"{of.pop()}[]"
    found = _TYPES.get(type(value))
    if found is None:
        raise NoFunctionOpError(
            f"argument {position} of {kind.__name__}.apply is a {type(value).__name__}, not a "
            "tensor, number or text"
        )
    return found


def _try_out(kind: type, args: tuple[Any, ...]) -> tuple[bool, bool]:
    """Run a call and its backward on the meta device: whether it is pointwise, and ran to its end.

    It is pointwise if all tensors have one shape and every op keeps elements apart, with numbers
    that do not depend on the shape. Raise NoFunctionOpError if it draws random numbers, writes its
    arguments, or uses other tensors.
    """
    found = []
    for larger in (False, True):
        record = _ElementwiseRecord()
        given = [_meta(value, larger=larger) for value in args]
        before = [get_write_count(t) for t in given if isinstance(t, torch.Tensor)]
        with suppress(*_FAILURES), record:
            _run(kind, given, record)
            record.complete = True
        if not record.closed:
            raise NoFunctionOpError("it uses tensors that are not its arguments")
        if record.random:
            raise NoFunctionOpError("it draws random numbers")
        if before != [get_write_count(t) for t in given if isinstance(t, torch.Tensor)]:
            raise NoFunctionOpError("it writes its arguments in place")
        found.append(record)
    small, large = found
    pointwise = small.pointwise and large.pointwise and small.numbers == large.numbers
    return pointwise, small.complete


_FAILURES = (RuntimeError, TypeError, ValueError, NotImplementedError, AttributeError, IndexError)


def _run(kind: type, given: list[Any], record: _ElementwiseRecord) -> None:
    record.begin([t for t in given if isinstance(t, torch.Tensor)])
    with torch.enable_grad():
        result = kind.apply(*given)  # type: ignore[attr-defined]
        results = result if isinstance(result, tuple) else (result,)
        trained = [t for t in results if t.requires_grad]
        gradients = [torch.empty_like(t) for t in trained]
        record.begin([*results, *gradients])
        wanted = [t for t in given if isinstance(t, torch.Tensor) and t.requires_grad]
        torch.autograd.grad(trained, wanted, gradients, allow_unused=True)


def _meta(value: Any, *, larger: bool) -> Any:
    """Return an argument without data; larger: with twice as many rows in each dim."""
    if isinstance(value, torch.Tensor):
        shape = [2 * int(size) if larger else int(size) for size in value.shape]
        trained = value.is_floating_point() or value.is_complex()
        return torch.empty(shape, dtype=value.dtype, device="meta", requires_grad=trained)
    if isinstance(value, list | tuple):
        return type(value)(_meta(item, larger=larger) for item in value)
    return int(value) if isinstance(value, torch.SymInt) else value


class _ElementwiseRecord(TorchDispatchMode):
    """Records whether all ops keep the elements of tensors of one shape apart.

    numbers: the ops with their arguments that are numbers.
    """

    def __init__(self) -> None:
        """Start without a shape."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.shape: torch.Size | None = None
        self.known: dict[Any, torch.Tensor] = {}  # by storage; kept, so that no id is used twice
        self.numbers: list[tuple[Any, ...]] = []
        self.random = False
        self.apart = True
        self.closed = True
        self.complete = False

    @property
    def pointwise(self) -> bool:
        """Whether the calls in between were pointwise, to the end."""
        return self.complete and self.apart and self.shape is not None

    def begin(self, given: Sequence[torch.Tensor]) -> None:
        """Add tensors from outside."""
        for tensor in given:
            self._add(tensor, outside=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Check one op."""
        given = [*args, *(kwargs or {}).values()]
        plain = func.overloadpacket.__name__
        if plain != "lift_fresh":  # of a constant that forward makes
            self.closed &= all(storage_identity(t) in self.known for t in _flat(given))
        result = func(*args, **(kwargs or {}))
        self.random |= torch.Tag.nondeterministic_seeded in func.tags
        if torch.Tag.pointwise in func.tags or plain in _SAME:
            numbers = [v for v in given if isinstance(v, bool | int | float | complex)]
            self.numbers.append((plain, *numbers))
        elif not self._is_masked_write(plain, args):
            self.apart = False
        for tensor in _flat(result if isinstance(result, list | tuple) else [result]):
            self._add(tensor, outside=False)
        return result

    def _is_masked_write(self, plain: str, args: Sequence[Any]) -> bool:
        """Return whether an op writes one number where a mask of the same shape is True."""
        if plain not in ("index_put", "index_put_", "_index_put_impl_") or len(args) < 3:
            return False
        places, values = args[1], args[2]
        return (
            len(places) == 1
            and isinstance(places[0], torch.Tensor)
            and places[0].dtype == torch.bool
            and places[0].shape == self.shape
            and values.dim() == 0
        )

    def _add(self, tensor: torch.Tensor, *, outside: bool) -> None:
        self.known[storage_identity(tensor)] = tensor
        if self.shape is None and outside and tensor.dim():
            self.shape = tensor.shape
        if tensor.shape != self.shape and (outside or tensor.dim()):
            self.apart = False


def _flat(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _flat(value)


def find_calls(run: Callable[[], Any]) -> list[Call]:
    """Return the calls of one run."""
    calls: list[Call] = []
    with recorded_functions(calls):
        run()
    return calls
