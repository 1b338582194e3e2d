"""Find the tensors of a program's inputs in the user's batch, and describe what is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from fxpart.errors import Problem
from fxpart.program.spec import ConstantSpec, InputSpec
from fxpart.runtime.dtypes import torch_dtype

Path = tuple[str | int, ...]


class BatchInputFinder:
    """Finds the inputs of one program in batches."""

    def __init__(
        self,
        inputs: Sequence[InputSpec],
        constants: Sequence[ConstantSpec],
        needed: frozenset[str] | None,
    ) -> None:
        """needed: the inputs that batches must have; None: all."""
        self._inputs = tuple(inputs)
        self._needed = frozenset(i.name for i in inputs) if needed is None else needed
        self._constants = {c.path: c.value for c in constants}
        self._dtypes = {i.name: torch_dtype(i.dtype) for i in inputs}

    def find(self, batch: Any, problems: list[Problem]) -> dict[str, torch.Tensor]:
        """Return the tensors by input name; add every missing, unknown or wrong one to problems.

        Inputs that are not needed may be missing or None.
        """
        leaves = dict(flatten_batch((batch,) if isinstance(batch, torch.Tensor) else batch))
        tensors: dict[str, torch.Tensor] = {}
        for spec in self._inputs:
            if leaves.get(spec.path) is None and spec.name not in self._needed:
                leaves.pop(spec.path, None)
                continue
            if spec.path not in leaves:
                inner = [path for path in leaves if path[: len(spec.path)] == spec.path]
                for path in inner:
                    del leaves[path]
                why = "it is a list or dict, not a tensor" if inner else "it is missing"
                problems.append(make_problem(spec.path, why, describe_input(spec)))
                continue
            value = leaves.pop(spec.path)
            fault = self._find_fault(spec, value)
            fix = describe_input(spec)
            if not fault and value.requires_grad:
                fault = "it requires a gradient, which trainers do not return"
                fix = "detach it, or make what computes it a part of the model"
            if fault:
                problems.append(make_problem(spec.path, fault, fix))
            else:
                tensors[spec.name] = value
        for path, fixed in self._constants.items():
            # A partial batch need not include the constants.
            spare = len(tensors) < len(self._inputs)
            value = leaves.pop(path, fixed if fixed is None or spare else _MISSING)
            if type(value) is not type(fixed) or value != fixed:
                why = "it is missing" if value is _MISSING else f"it is {_format_value(value)}"
                fix = (
                    f"pass {_format_value(fixed)} as at capture, or capture again for another value"
                )
                problems.append(
                    make_problem(path, f"{why}, but was {_format_value(fixed)} at capture", fix)
                )
        for path, value in leaves.items():
            if value is not None:
                known = ", ".join(format_path(i.path) for i in self._inputs)
                problems.append(
                    make_problem(
                        path,
                        "the program has no such input",
                        f"remove it from the batch; the inputs are {known}",
                    )
                )
        return tensors

    def _find_fault(self, spec: InputSpec, value: Any) -> str | None:
        if not isinstance(value, torch.Tensor):
            return f"it is {_format_value(value)}, not a tensor"
        if value.layout != torch.strided:
            return f"it is a {str(value.layout)[6:]} tensor, not a dense one"
        if value.dtype != self._dtypes[spec.name]:
            return f"its dtype is {str(value.dtype)[6:]}, not {spec.dtype}"
        if value.dim() != len(spec.shape):
            return f"it has {value.dim()} dims, {tuple(value.shape)}, not {format_shape(spec)}"
        return None


_MISSING = object()  # Marks a path that the batch does not have.


def flatten_batch(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the tensors and plain values of a batch with their paths of keys and indices."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from flatten_batch(inner, (*path, key))
    elif isinstance(value, (tuple, list)):
        for index, inner in enumerate(value):
            yield from flatten_batch(inner, (*path, index))
    else:
        yield path, value


def make_problem(path: Path, why: str, fix: str) -> Problem:
    """Return a problem of one entry of the batch."""
    return Problem("FXP105", format_path(path), why, fix)


def format_path(path: Path) -> str:
    """Return the place of an entry, such as "batch['labels']"."""
    return "batch" + "".join(f"[{key!r}]" for key in path)


def describe_input(spec: InputSpec) -> str:
    """Return the advice to pass an input as it has to be."""
    return f"pass a {spec.dtype} tensor of shape {format_shape(spec)}"


def format_shape(spec: InputSpec) -> str:
    """Return the shape of an input, with symbols."""
    return "(" + ", ".join(map(str, spec.shape)) + ("," if len(spec.shape) == 1 else "") + ")"


def _format_value(value: Any) -> str:
    text = repr(value) if isinstance(value, (bool, int, float, str, type(None))) else ""
    return text[:60] or f"a {type(value).__name__}"


def get_rows(spec: InputSpec, tensors: Mapping[str, torch.Tensor]) -> int:
    """Return the size of an input along its batch dim."""
    assert spec.batch_dim is not None
    return tensors[spec.name].shape[spec.batch_dim]


def make_size_problem(specs: Sequence[InputSpec], tensors: Mapping[str, torch.Tensor]) -> Problem:
    """Return the problem of inputs that differ in their number of rows."""
    sizes = ", ".join(f"{format_path(s.path)} {get_rows(s, tensors)}" for s in specs)
    return Problem(
        "FXP105",
        "batch",
        f"its inputs differ in size along the batch dim: {sizes}",
        "pass the same number of rows in every input",
    )
