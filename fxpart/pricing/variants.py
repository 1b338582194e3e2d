"""The candidate microbatch sizes, and the values of the graph's symbols at each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import sympy

from fxpart.costs import OpSpec, TensorSpec
from fxpart.errors import error

if TYPE_CHECKING:
    from fxpart.capture.captured_model import CapturedModel
    from fxpart.costs import Size

MAX_VARIANTS = 16


@dataclass(frozen=True)
class BatchSplit:
    """A batch in ``microbatches`` of at most ``size`` rows (as by torch.tensor_split)."""

    size: int
    microbatches: int


def splits(batch: int, stages: int, *, limit: int = MAX_VARIANTS) -> tuple[BatchSplit, ...]:
    """Return the splits to try, by falling size; of equal size the one with fewest microbatches.

    Where there are more than ``limit``: first divisors and multiples of ``stages`` that are powers
    of two apart, then other divisors, then all others; one microbatch and single rows always.
    """
    best: dict[int, int] = {}
    for count in range(1, batch + 1) if batch <= 4096 else _counts(batch, stages):
        best.setdefault(-(-batch // count), count)
    found = [BatchSplit(size, count) for size, count in best.items()]

    def rank(split: BatchSplit) -> tuple[bool, bool, bool, int]:
        count = split.microbatches
        doubled = any(count % base == 0 and _power(count // base) for base in (1, stages))
        ends = split.size == 1 or count == 1
        return (not ends, not doubled, batch % count != 0, count)

    chosen = sorted(found, key=rank)[:limit]
    return tuple(sorted(chosen, key=lambda split: -split.size))


def _counts(batch: int, stages: int) -> list[int]:
    """Return candidates for a large batch: powers of two, their stage multiples, divisors."""
    powers = [1 << k for k in range(batch.bit_length())]
    divisors = [d for d in range(1, int(batch**0.5) + 1) if batch % d == 0]
    counts = {*powers, *(p * stages for p in powers), *divisors, *(batch // d for d in divisors)}
    return sorted(c for c in counts if 1 <= c <= batch)


def _power(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def variants(
    captured: CapturedModel, batch: int, microbatches: int | None, stages: int
) -> tuple[BatchSplit, ...]:
    """Return the splits to price: all, the one with ``microbatches``, or that of the capture.

    Raises FXP105 where the batch cannot be split so.
    """
    if batch < 1 or (microbatches is not None and not 1 <= microbatches <= batch):
        raise error(
            "FXP105",
            where=f"batch of {batch}, {microbatches or 'any number of'} microbatches",
            why="every microbatch needs at least one row",
            fix="use a larger batch or fewer microbatches",
        )
    if captured.symbolic:
        if microbatches is None:
            return splits(batch, stages)
        return (BatchSplit(-(-batch // microbatches), microbatches),)
    size = captured_rows(captured)
    if batch % size or (microbatches is not None and batch // size != microbatches):
        requested = "" if microbatches is None else f" in {microbatches} microbatches"
        raise error(
            "FXP105",
            where=f"batch of {batch}{requested}",
            why=f"the model could only be captured with a fixed batch, here of {size} rows",
            fix=f"capture at the desired microbatch size, or use a batch that {size} divides",
        )
    return (BatchSplit(size, batch // size),)


def captured_rows(captured: CapturedModel) -> int:
    """Return the rows of the batch of a graph that was captured with a fixed batch."""
    rows = (s.shape[s.batch_dim] for s in captured.inputs if s.batch_dim is not None)
    return next((size for size in rows if isinstance(size, int)), captured.batch_size)


class Sizes:
    """Sizes as numbers at one microbatch size; every expression is evaluated once."""

    def __init__(
        self, captured: CapturedModel, split: BatchSplit, parts: Mapping[str, int] | None = None
    ) -> None:
        """Set batch symbols to the microbatch size, others to their size at capture.

        parts: by symbol the number of parts into which ranks shard the dim that it is read from.
        """
        dims = {spec.name: spec.batch_dim for spec in captured.inputs}
        given = parts or {}
        self._values: dict[str, int] = {
            symbol: -(-size // given.get(symbol, 1)) for symbol, size in captured.hints.items()
        }
        for symbol, (name, dim) in captured.symbols.items():
            if dims.get(name) == dim and captured.symbolic:
                self._values[symbol] = split.size
        self._default = split.size
        self._numbers: dict[Size, int] = {}
        self._ops: dict[OpSpec, OpSpec] = {}
        self.unknown: set[str] = set()

    def number(self, size: Size) -> int:
        """Return a size as a number; symbols only known at run time count as microbatch size."""
        if isinstance(size, int):
            return size
        if size not in self._numbers:
            self._numbers[size] = self._evaluate(size)
        return self._numbers[size]

    def op(self, op: OpSpec) -> OpSpec:
        """Return the op with sizes as numbers."""
        if op not in self._ops:
            self._ops[op] = OpSpec(
                op.name,
                self._tensors(op.inputs),
                self._tensors(op.outputs),
                tuple((name, self._plain(value)) for name, value in op.attributes),
                op.gradients,
                op.gradient_inputs,
            )
        return self._ops[op]

    def _tensors(self, tensors: Iterable[TensorSpec]) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(tuple(map(self.number, t.shape)), t.dtype, t.layout) for t in tensors
        )

    def _plain(self, value: object) -> object:
        """Return an attribute with its sizes as numbers."""
        if isinstance(value, tuple):
            return tuple(map(self._plain, value))
        return self.number(value) if isinstance(value, sympy.Expr) else value

    def _evaluate(self, size: sympy.Expr) -> int:
        given: Mapping[sympy.Symbol, sympy.Integer] = {
            symbol: sympy.Integer(self._values.get(str(symbol), self._default))
            for symbol in size.free_symbols
        }
        self.unknown |= {str(s) for s in size.free_symbols if str(s) not in self._values}
        return max(0, int(size.xreplace(given)))
