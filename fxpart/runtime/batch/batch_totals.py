"""Totals over the whole batch, such as the number of valid targets or the sum of a mask.

A loss that is a mean over such a number needs its value for the whole batch before the first
microbatch runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fxpart.program.spec import TotalsSpec, number_value
from fxpart.runtime.batch.device_copy import copy_to_device

Value = Callable[["_BatchValues"], Any]


class _BatchValues:
    """Values of one batch: tensors, sizes, and the results of the steps computed so far."""

    def __init__(self, inputs: Mapping[str, torch.Tensor], sizes: Mapping[str, int]) -> None:
        self.inputs, self.sizes = inputs, sizes
        self.values: list[Any] = []


class BatchTotals:
    """Computation of the totals of a program's batches.

    inputs: names of the inputs that it reads. names: names of the values it adds to microbatches.
    """

    def __init__(
        self,
        spec: TotalsSpec,
        symbols: Mapping[str, tuple[str, int]],
        values: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Prepare the computation.

        symbols: the input and dim that each symbol is read from. values: current values of
        constants that have changed since compilation, by name; read at each call.
        """
        self.inputs = frozenset(spec.inputs)
        self.names = frozenset((*spec.names, *spec.shares))
        self._spec, self._symbols = spec, symbols
        self._values = {} if values is None else values
        self._constants: dict[tuple[str, torch.device], torch.Tensor] = {}
        self._steps = [
            (
                _find_operation(step.target),
                [self._compile_argument(a) for a in step.args],
                {k: self._compile_argument(v) for k, v in step.kwargs.items()},
            )
            for step in spec.steps
        ]
        self._results = [self._compile_argument(r) for r in spec.results]

    def of(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the totals by name; empty if this process lacks one of the inputs."""
        if any(n not in tensors or tensors[n].device.type == "meta" for n in self.inputs):
            return {}
        sizes = {s: tensors[n].shape[d] for s, (n, d) in self._symbols.items() if n in tensors}
        batch = _BatchValues(tensors, sizes)
        with torch.no_grad():
            for target, args, kwargs in self._steps:
                given = {k: v(batch) for k, v in kwargs.items()}
                batch.values.append(target(*(a(batch) for a in args), **given))
            return {
                name: result(batch)
                for name, result in zip(self._spec.names, self._results, strict=True)
            }

    def shares(self, weight: float) -> dict[str, torch.Tensor]:
        """Return the microbatch's share of the batch's rows, in each dtype that is needed."""
        return {
            name: torch.tensor(weight, dtype=getattr(torch, dtype))
            for name, dtype in self._spec.shares.items()
        }

    def feed(
        self,
        tensors: Mapping[str, torch.Tensor],
        pieces: Sequence[dict[str, torch.Tensor]],
        weights: Sequence[float],
    ) -> dict[str, torch.Tensor]:
        """Add totals and shares to the inputs of each microbatch; return the totals by name."""
        totals = self.of(tensors)
        for piece, weight in zip(pieces, weights, strict=True):
            piece.update(totals)
            piece.update(self.shares(weight))
        return totals

    def _compile_argument(self, written: Any) -> Value:
        """Return a function that evaluates an argument from a batch's values."""
        if isinstance(written, (list, tuple)):
            items = [self._compile_argument(item) for item in written]
            return lambda batch: [item(batch) for item in items]
        if not isinstance(written, dict):
            return lambda batch: written
        ((kind, what),) = written.items()
        match kind:
            case "input":
                return lambda batch: batch.inputs[what]
            case "value":
                return lambda batch: batch.values[what]
            case "size":
                return lambda batch: number_value(what, batch.sizes)
            case "constant":
                return lambda batch: self._constant(what, batch)
            case "torch":
                return lambda batch: getattr(torch, what)
            case "device":
                return _get_device
        number = float(what)
        return lambda batch: number

    def _constant(self, name: str, batch: _BatchValues) -> torch.Tensor:
        device = _get_device(batch)
        if name in self._values:
            return copy_to_device(self._values[name], device)
        if (name, device) not in self._constants:
            spec = self._spec.constants[name]
            dtype = getattr(torch, spec.dtype)
            self._constants[name, device] = torch.tensor(spec.values, dtype=dtype, device=device)
        return self._constants[name, device]


def _get_device(batch: _BatchValues) -> torch.device:
    """Return the device of the batch."""
    return next((t.device for t in batch.inputs.values()), torch.device("cpu"))


def _find_operation(name: str) -> Callable[..., Any]:
    """Return the function of a name such as ``"aten.sum.default"``."""
    if name == "getitem":
        return lambda values, index: values[index]
    space, packet, overload = name.split(".")
    assert space == "aten", "totals are computed by aten operations"
    found: Callable[..., Any] = getattr(getattr(torch.ops.aten, packet), overload)
    return found
