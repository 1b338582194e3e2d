"""Validate the user's batch against the program and split it into microbatches."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fxpart.errors import FxpartError, Problem
from fxpart.program.spec import InputSpec, ProgramSpec
from fxpart.runtime.batch.batch_inputs import (
    BatchInputFinder,
    describe_input,
    format_shape,
    get_rows,
    make_problem,
    make_size_problem,
)
from fxpart.runtime.batch.batch_totals import BatchTotals
from fxpart.runtime.batch.device_copy import copy_to_device
from fxpart.runtime.batch.row_repetition import count_repeats, repeat_rows, split_rows
from fxpart.runtime.batch.symbolic_shapes import (
    Sizes,
    find_symbol_sources,
    find_symbols,
    make_dim_function,
)
from fxpart.runtime.dtypes import torch_dtype

Shape = tuple[str, tuple[int, ...]]  # dtype and sizes


@dataclass(frozen=True)
class MicrobatchSplit:
    """A batch in microbatches.

    inputs: per microbatch the tensors by input name (views of the batch; meta tensors where this
    process has none). sizes: per microbatch the size of each symbol. rows: rows of each microbatch
    along the batch dim. weights: rows divided by their sum. local: the rows of this mesh rank, if
    only they were given; ``inputs`` are meta tensors then. repeats: how often the rows of each
    microbatch are repeated in ``inputs`` (:mod:`fxpart.runtime.batch.row_repetition`). totals:
    numbers of the whole batch, such as the number of valid targets, by the stage input that takes
    them; also in ``inputs``.
    """

    inputs: tuple[dict[str, torch.Tensor], ...]
    sizes: tuple[Sizes, ...]
    rows: tuple[int, ...]
    weights: tuple[float, ...]
    repeats: tuple[int, ...]
    local: Mapping[str, torch.Tensor] | None = None
    totals: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def repeated(self) -> bool:
        """Return whether any rows are repeated."""
        return max(self.repeats) > 1

    def taken(self, names: Collection[str], device: torch.device) -> list[dict[str, torch.Tensor]]:
        """Return per microbatch the inputs of these names, on the device."""
        return [
            {n: copy_to_device(t, device) for n, t in piece.items() if n in names}
            for piece in self.inputs
        ]


@dataclass(frozen=True)
class LocalBatch:
    """The part of a batch that a process was given.

    tensors: by input name. shapes: dtype and shape of each input in the global batch. absent: names
    of inputs that were not given and are not needed. local: ``tensors`` have only this mesh rank's
    rows.
    """

    tensors: dict[str, torch.Tensor]
    shapes: dict[str, Shape]
    absent: tuple[str, ...]
    local: bool = False


class BatchReader:
    """Reader of batches for one program."""

    def __init__(
        self,
        spec: ProgramSpec,
        multiple: int = 1,
        needed: frozenset[str] | None = None,
        constants: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Build a reader for the inputs, constants and symbols of ``spec``.

        multiple: the rows of each microbatch are a multiple of it, repeated if necessary, where the
        batch dim is symbolic. needed: the inputs that batches must have, by default all. constants:
        of totals, as for :class:`~fxpart.runtime.batch.batch_totals.BatchTotals`.
        """
        self._inputs = spec.inputs if spec.sharding is None else spec.sharding.inputs
        self._symbols = spec.symbols
        values = [v for stage in spec.stages for v in (*stage.inputs, *stage.outputs)]
        read = find_symbols(entry for value in values for entry in value.shape)
        self._read = frozenset(spec.symbols if spec.totals is not None else read)
        self.totals = (
            None if spec.totals is None else BatchTotals(spec.totals, spec.symbols, constants)
        )
        self._multiple = multiple
        self._finder = BatchInputFinder(self._inputs, spec.constants, needed)
        self._dims = {i.name: [make_dim_function(entry) for entry in i.shape] for i in self._inputs}

    def read(self, batch: Any, microbatches: int) -> MicrobatchSplit:
        """Validate and split a complete batch, as :meth:`look` and :meth:`cut` do."""
        return self.cut(self.look(batch), microbatches)

    def look(self, batch: Any) -> LocalBatch:
        """Return the tensors of the batch; FXP105 with every missing, unknown or wrong input.

        Inputs that are not needed may be missing or None.
        """
        problems: list[Problem] = []
        tensors = self._finder.find(batch, problems)
        _raise_any(problems)
        shapes = {n: (str(t.dtype)[6:], tuple(t.shape)) for n, t in tensors.items()}
        return LocalBatch(
            tensors, shapes, tuple(i.name for i in self._inputs if i.name not in tensors)
        )

    def cut(
        self,
        seen: LocalBatch,
        microbatches: int,
        others: Mapping[str, Shape] | None = None,
    ) -> MicrobatchSplit:
        """Split into at most ``microbatches`` pieces, as even as torch.tensor_split makes them.

        others: dtypes and shapes of inputs that only other processes have. Raises FXP105 with every
        problem found, such as contradictory sizes or an empty batch.
        """
        known = {**(others or {}), **seen.shapes}
        tensors = {
            spec.name: seen.tensors[spec.name]
            if spec.name in seen.tensors and not seen.local
            else torch.empty(known[spec.name][1], dtype=torch_dtype(spec.dtype), device="meta")
            for spec in self._inputs
            if spec.name in known
        }
        self._check_sources(tensors)
        pieces, rows = self._split(tensors, microbatches)
        repeats = self._repeat(pieces, rows)
        sizes = self._measure_symbols(pieces)
        total = sum(rows)
        weights = tuple(n / total for n in rows)
        local = seen.tensors if seen.local else None
        totals = {}
        if self.totals is not None:
            shares = [weight * count for weight, count in zip(weights, repeats, strict=True)]
            totals = self.totals.feed(tensors, pieces, shares)
        return MicrobatchSplit(
            tuple(pieces), tuple(sizes), tuple(rows), weights, repeats, local, totals
        )

    def _check_sources(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Check that some rank has every input that a symbol of the program is read from."""
        problems = []
        known = (
            {}
            if self.totals is not None
            else find_symbol_sources(self._symbols, self._inputs, tensors)
        )
        unknown = {n for s, (n, _) in self._symbols.items() if s in self._read and s not in known}
        for spec in self._inputs:
            sized = spec.name in unknown
            rows = spec.batch_dim is not None and not any(
                i.batch_dim is not None and i.name in tensors for i in self._inputs
            )
            if spec.name not in tensors and (sized or rows):
                why = "no rank was given this input, and symbolic sizes are read from it"
                fix = f"on at least one rank, {describe_input(spec)}"
                problems.append(make_problem(spec.path, why, fix))
        _raise_any(problems)

    def _split(
        self, tensors: dict[str, torch.Tensor], microbatches: int
    ) -> tuple[list[dict[str, torch.Tensor]], list[int]]:
        """Return the pieces and the rows of each (one of 1 row if no input has a batch dim)."""
        here = [spec for spec in self._inputs if spec.name in tensors]
        cut = [spec for spec in here if spec.batch_dim is not None]
        if not cut:
            return [tensors], [1]
        fixed = [spec for spec in cut if isinstance(_get_batch_entry(spec), int)]
        if fixed:
            rows = self._count_fixed_rows(fixed, tensors, microbatches)
        else:
            rows = self._count_even_rows(cut, tensors, microbatches)
        problems: list[Problem] = []
        pieces: list[dict[str, torch.Tensor]] = [{} for _ in rows]
        for spec in here:
            tensor = tensors[spec.name]
            if spec.batch_dim is None:
                parts: Sequence[torch.Tensor] = [tensor] * len(rows)
            else:
                lengths = self._compute_lengths(spec, tensor, rows, problems)
                if lengths is None:
                    continue
                parts = torch.split(tensor, lengths, spec.batch_dim)
            for piece, part in zip(pieces, parts, strict=True):
                piece[spec.name] = part
        _raise_any(problems)
        return pieces, rows

    def _count_fixed_rows(
        self,
        fixed: list[InputSpec],
        tensors: dict[str, torch.Tensor],
        microbatches: int,
    ) -> list[int]:
        """Return the rows of each piece of a program captured at a fixed microbatch size.

        A program of one microbatch takes exactly its batch size: its graph was not rewritten for
        parts of a batch.
        """
        counts, problems = set[int](), list[Problem]()
        for spec in fixed:
            unit, size = _get_batch_entry(spec), get_rows(spec, tensors)
            assert isinstance(unit, int)
            if unit == 0 or size == 0 or size % unit:
                why = (
                    f"the program was captured at a fixed microbatch size of {unit}, "
                    f"and the batch has {size} along dim {spec.batch_dim}"
                )
                fix = (
                    f"pass a multiple of {unit} rows (drop_last=True in a DataLoader drops a "
                    "smaller last batch), or capture with a symbolic batch dim"
                )
                problems.append(make_problem(spec.path, why, fix))
            elif size > unit and microbatches == 1:
                why = (
                    f"the program was captured at a fixed batch size of {unit} for one microbatch, "
                    f"and the batch has {size} along dim {spec.batch_dim}"
                )
                fix = f"pass batches of {unit}, or compile with microbatches=2 or more"
                problems.append(make_problem(spec.path, why, fix))
            else:
                counts.add(size // unit)
        if len(counts) > 1:
            problems.append(make_size_problem(fixed, tensors))
        _raise_any(problems)
        unit = _get_batch_entry(fixed[0])
        assert isinstance(unit, int)
        return [unit] * counts.pop()

    def _count_even_rows(
        self,
        cut: list[InputSpec],
        tensors: dict[str, torch.Tensor],
        microbatches: int,
    ) -> list[int]:
        """Return even pieces of a symbolic batch; fewer pieces if there are fewer rows."""
        plain = [spec for spec in cut if str(_get_batch_entry(spec)).isidentifier()] or cut
        sizes = {get_rows(spec, tensors) for spec in plain}
        if len(sizes) > 1:
            raise FxpartError(make_size_problem(plain, tensors))
        rows = sizes.pop()
        if rows == 0:
            why, fix = "the batch is empty", "skip empty batches"
            raise FxpartError(make_problem(plain[0].path, why, fix))
        return list(split_rows(rows, self._multiple, microbatches))

    def _repeat(self, pieces: list[dict[str, torch.Tensor]], rows: list[int]) -> tuple[int, ...]:
        """Repeat in place rows of pieces that ``multiple`` does not divide; return the counts."""
        cut = [spec for spec in self._inputs if spec.batch_dim is not None]
        if not cut or any(isinstance(_get_batch_entry(spec), int) for spec in cut):
            return (1,) * len(rows)
        repeats = tuple(count_repeats(m, self._multiple) for m in rows)
        if max(repeats) == 1:
            return repeats
        problems = []
        for spec in self._find_unrepeatable(cut):
            why = (
                f"its shape {format_shape(spec)} does not have the {sum(rows)} rows of the batch "
                f"in one dim alone, and {self._multiple} ranks take equal parts of each microbatch"
            )
            fix = (
                f"pass a multiple of {self._multiple} rows (drop_last=True in a DataLoader drops a "
                "smaller last batch)"
            )
            problems.append(make_problem(spec.path, why, fix))
        _raise_any(problems)
        for piece, count in zip(pieces, repeats, strict=True):
            for spec in cut if count > 1 else ():
                if spec.name in piece:
                    assert spec.batch_dim is not None
                    piece[spec.name] = repeat_rows(piece[spec.name], count, spec.batch_dim)
        return repeats

    def _find_unrepeatable(self, cut: Sequence[InputSpec]) -> Iterator[InputSpec]:
        """Yield inputs whose batch size is not exactly one dim of the shape."""
        symbols = {
            str(_get_batch_entry(spec))
            for spec in cut
            if str(_get_batch_entry(spec)).isidentifier()
        }
        for spec in self._inputs:
            others = [e for at, e in enumerate(spec.shape) if at != spec.batch_dim]
            words = {word for e in others for word in re.findall(r"\w+", str(e))}
            if words & symbols or (spec in cut and str(_get_batch_entry(spec)) not in symbols):
                yield spec

    def _compute_lengths(
        self, spec: InputSpec, tensor: torch.Tensor, rows: list[int], problems: list[Problem]
    ) -> list[int] | None:
        """Return the length of each piece of one input: rows, or its dim's expression of them."""
        assert spec.batch_dim is not None
        entry, size = _get_batch_entry(spec), tensor.shape[spec.batch_dim]
        if isinstance(entry, int):
            return [entry] * len(rows)
        if entry.isidentifier():
            lengths = rows
        else:
            names = set(self._symbols)
            lengths = [self._dims[spec.name][spec.batch_dim](dict.fromkeys(names, n)) for n in rows]
        if sum(lengths) != size:
            why = f"it has {size} along dim {spec.batch_dim} ({entry}), not {sum(lengths)}"
            problems.append(
                make_problem(spec.path, why, "pass the same number of rows in every input")
            )
            return None
        return lengths

    def _measure_symbols(self, pieces: list[dict[str, torch.Tensor]]) -> list[Sizes]:
        """Return the symbol sizes of each microbatch, checked against every dim.

        Pieces of equal sizes are checked once.
        """
        problems: list[Problem] = []
        known: dict[tuple[int, ...], Sizes] = {}
        found: list[Sizes] = []
        read = find_symbol_sources(self._symbols, self._inputs, pieces[0]) if pieces else {}
        for piece in pieces:
            values = tuple(piece[name].shape[at] for name, at in read.values())
            if values not in known:
                known[values] = dict(zip(read, values, strict=True))
                self._check_dims(piece, known[values], problems)
            found.append(known[values])
        _raise_any(problems)
        return found

    def _check_dims(
        self, piece: dict[str, torch.Tensor], sizes: Sizes, problems: list[Problem]
    ) -> None:
        missing = self._symbols.keys() - sizes.keys()  # Symbols of inputs that were not given.
        for spec in self._inputs:
            if spec.name not in piece:
                continue
            actual = piece[spec.name].shape
            for at, of in enumerate(self._dims[spec.name]):
                if missing and find_symbols([spec.shape[at]]) & missing:
                    continue
                try:
                    expected = of(sizes)
                except FxpartError as fault:
                    problems.extend(fault.problems)
                    continue
                if actual[at] == expected:
                    continue
                entry = spec.shape[at]
                same = "" if isinstance(entry, int) else f" ({entry}, as in other inputs)"
                why = f"dim {at} is {actual[at]}, not {expected}{same}"
                fix = "pass sizes that agree" if same else "pass that size, or capture again"
                problem = make_problem(spec.path, why, fix)
                if problem not in problems:
                    problems.append(problem)


def _raise_any(problems: Sequence[Problem]) -> None:
    if problems:
        raise FxpartError(problems)


def _get_batch_entry(spec: InputSpec) -> int | str:
    assert spec.batch_dim is not None
    return spec.shape[spec.batch_dim]
