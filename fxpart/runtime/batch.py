"""The user's batch: checked against the program, all faults at once, then cut into microbatches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxpart.errors import FxpartError, Problem
from fxpart.program import InputSpec, ProgramSpec
from fxpart.runtime.links import torch_dtype
from fxpart.runtime.shapes import Sizes, dim

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Cut:
    """A batch in microbatches.

    inputs: per microbatch the tensors by input name (views of the batch). sizes: per microbatch
    the size of each symbol. rows: per microbatch its share of the batch dim. weights: rows over
    their sum.
    """

    inputs: tuple[dict[str, torch.Tensor], ...]
    sizes: tuple[Sizes, ...]
    rows: tuple[int, ...]
    weights: tuple[float, ...]

    def describe(self) -> str:
        """Shapes and dtypes in text, for ranks to compare."""
        first = (f"{n}:{t.dtype}{tuple(t.shape)}" for n, t in self.inputs[0].items())
        return f"rows {list(self.rows)} " + " ".join(first)


class Reader:
    """Reads batches for one program."""

    def __init__(self, spec: ProgramSpec, multiple: int = 1) -> None:
        """spec: whose inputs, constants and symbols the batches must fit.

        multiple: the rows of each microbatch are a multiple of it, where they may vary.
        """
        self._inputs = spec.inputs if spec.sharding is None else spec.sharding.inputs
        self._symbols = spec.symbols
        self._multiple = multiple
        self._constants = {c.path: c.value for c in spec.constants}
        self._dtypes = {i.name: torch_dtype(i.dtype) for i in self._inputs}
        self._dims = {i.name: [dim(entry) for entry in i.shape] for i in self._inputs}

    def read(self, batch: Any, microbatches: int) -> Cut:
        """Check and cut; at most ``microbatches`` pieces, even as torch.tensor_split makes them.

        Raises FXP105 with every fault found: missing and unknown inputs, changed constants,
        dtypes, dims, sizes that contradict each other, an empty batch.
        """
        problems: list[Problem] = []
        tensors = self._find(batch, problems)
        if problems:
            raise FxpartError(problems)
        pieces, rows = self._cut(tensors, microbatches, problems)
        if problems:
            raise FxpartError(problems)
        sizes = self._measure(pieces, problems)
        if problems:
            raise FxpartError(problems)
        total = sum(rows)
        weights = tuple(n / total for n in rows)
        return Cut(tuple(pieces), tuple(sizes), tuple(rows), weights)

    # -- what the batch holds ----------------------------------------------------------------

    def _find(self, batch: Any, problems: list[Problem]) -> dict[str, torch.Tensor]:
        leaves = dict(flat((batch,) if isinstance(batch, torch.Tensor) else batch))
        tensors: dict[str, torch.Tensor] = {}
        for spec in self._inputs:
            if spec.path not in leaves:
                inner = [path for path in leaves if path[: len(spec.path)] == spec.path]
                for path in inner:
                    del leaves[path]
                why = "it is a list or dict, not a tensor" if inner else "it is missing"
                problems.append(_problem(spec.path, why, _kind(spec)))
                continue
            value = leaves.pop(spec.path)
            fault = self._fault(spec, value)
            if fault:
                problems.append(_problem(spec.path, fault, _kind(spec)))
            else:
                tensors[spec.name] = value
        for path, fixed in self._constants.items():
            value = leaves.pop(path, fixed if fixed is None else _MISSING)
            if type(value) is not type(fixed) or value != fixed:
                why = "it is missing" if value is _MISSING else f"it is {_show(value)}"
                fix = f"give {_show(fixed)} as at capture, or capture again for another value"
                problems.append(_problem(path, f"{why}, and was {_show(fixed)} at capture", fix))
        for path, value in leaves.items():
            if value is not None:
                known = ", ".join(_at(i.path) for i in self._inputs)
                problems.append(
                    _problem(
                        path, "the program has no such input", f"leave it out; inputs: {known}"
                    )
                )
        return tensors

    def _fault(self, spec: InputSpec, value: Any) -> str | None:
        if not isinstance(value, torch.Tensor):
            return f"it is {_show(value)}, not a tensor"
        if value.dtype != self._dtypes[spec.name]:
            return f"its dtype is {str(value.dtype)[6:]}, not {spec.dtype}"
        if value.dim() != len(spec.shape):
            return f"it has {value.dim()} dims, {tuple(value.shape)}, not {_shape(spec)}"
        return None

    # -- where it is cut -----------------------------------------------------------------------

    def _cut(
        self, tensors: dict[str, torch.Tensor], microbatches: int, problems: list[Problem]
    ) -> tuple[list[dict[str, torch.Tensor]], list[int]]:
        """The pieces, and how many rows each has (1 each if nothing is cut)."""
        cut = [spec for spec in self._inputs if spec.batch_dim is not None]
        if not cut:
            return [tensors], [1]
        fixed = [spec for spec in cut if isinstance(_entry(spec), int)]
        if fixed:
            rows = self._fixed_rows(fixed, tensors, problems)
        else:
            rows = self._even_rows(cut, tensors, microbatches, problems)
        if problems:
            return [], []
        pieces: list[dict[str, torch.Tensor]] = [{} for _ in rows]
        for spec in self._inputs:
            tensor = tensors[spec.name]
            if spec.batch_dim is None:
                parts: Sequence[torch.Tensor] = [tensor] * len(rows)
            else:
                lengths = self._lengths(spec, tensor, rows, problems)
                if lengths is None:
                    continue
                parts = torch.split(tensor, lengths, spec.batch_dim)
            for piece, part in zip(pieces, parts, strict=True):
                piece[spec.name] = part
        return pieces, rows

    def _fixed_rows(
        self, fixed: list[InputSpec], tensors: dict[str, torch.Tensor], problems: list[Problem]
    ) -> list[int]:
        """Captured at a fixed microbatch size: as many pieces of that size as there are."""
        counts: set[int] = set()
        for spec in fixed:
            unit, size = _entry(spec), _size(spec, tensors)
            assert isinstance(unit, int)
            if unit == 0 or size == 0 or size % unit:
                why = (
                    f"the program was captured at a fixed microbatch size of {unit}, "
                    f"and the batch has {size} along dim {spec.batch_dim}"
                )
                fix = (
                    f"give a multiple of {unit} (drop_last=True in a DataLoader drops a smaller "
                    "last batch), or capture with a symbolic batch dim"
                )
                problems.append(_problem(spec.path, why, fix))
            else:
                counts.add(size // unit)
        if len(counts) > 1:
            problems.append(_uneven(fixed, tensors))
        if problems:
            return []
        unit = _entry(fixed[0])
        assert isinstance(unit, int)
        return [unit] * counts.pop()

    def _even_rows(
        self,
        cut: list[InputSpec],
        tensors: dict[str, torch.Tensor],
        microbatches: int,
        problems: list[Problem],
    ) -> list[int]:
        """A symbolic batch: even pieces, fewer if there are fewer rows."""
        plain = [spec for spec in cut if str(_entry(spec)).isidentifier()] or cut
        sizes = {_size(spec, tensors) for spec in plain}
        if len(sizes) > 1:
            problems.append(_uneven(plain, tensors))
            return []
        rows = sizes.pop()
        if rows == 0:
            problems.append(
                _problem(plain[0].path, "the batch is empty", "leave empty batches out")
            )
            return []
        multiple = self._multiple
        if rows % multiple:
            why = f"the batch has {rows} rows, and {multiple} ranks take equal parts of each piece"
            fix = (
                f"give a multiple of {multiple} (drop_last=True in a DataLoader drops a smaller "
                "last batch)"
            )
            problems.append(_problem(plain[0].path, why, fix))
            return []
        units = rows // multiple
        count = min(microbatches, units)
        small, more = divmod(units, count)
        return [(small + 1) * multiple] * more + [small * multiple] * (count - more)

    def _lengths(
        self, spec: InputSpec, tensor: torch.Tensor, rows: list[int], problems: list[Problem]
    ) -> list[int] | None:
        """How long each piece of one input is: rows, or what its dim's expression makes of them."""
        assert spec.batch_dim is not None
        entry, size = _entry(spec), tensor.shape[spec.batch_dim]
        if isinstance(entry, int):
            return [entry] * len(rows)
        if entry.isidentifier():
            lengths = rows
        else:
            names = set(self._symbols)
            lengths = [self._dims[spec.name][spec.batch_dim](dict.fromkeys(names, n)) for n in rows]
        if sum(lengths) != size:
            why = f"it has {size} along dim {spec.batch_dim} ({entry}), not {sum(lengths)}"
            problems.append(_problem(spec.path, why, "give every input the same number of rows"))
            return None
        return lengths

    # -- symbols --------------------------------------------------------------------------------

    def _measure(
        self, pieces: list[dict[str, torch.Tensor]], problems: list[Problem]
    ) -> list[Sizes]:
        """Each microbatch's symbol sizes, checked against every dim; equal pieces once."""
        known: dict[tuple[int, ...], Sizes] = {}
        found: list[Sizes] = []
        for piece in pieces:
            values = tuple(piece[name].shape[at] for name, at in self._symbols.values())
            if values not in known:
                known[values] = dict(zip(self._symbols, values, strict=True))
                self._check_dims(piece, known[values], problems)
            found.append(known[values])
        return found

    def _check_dims(
        self, piece: dict[str, torch.Tensor], sizes: Sizes, problems: list[Problem]
    ) -> None:
        for spec in self._inputs:
            actual = piece[spec.name].shape
            for at, of in enumerate(self._dims[spec.name]):
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
                fix = "give sizes that agree" if same else "give that size, or capture again"
                problem = _problem(spec.path, why, fix)
                if problem not in problems:
                    problems.append(problem)


_MISSING = object()  # a value that no batch holds


def flat(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The tensors and plain values of a batch with the keys and positions that lead to them."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from flat(inner, (*path, key))
    elif isinstance(value, (tuple, list)):
        for index, inner in enumerate(value):
            yield from flat(inner, (*path, index))
    else:
        yield path, value


def _entry(spec: InputSpec) -> int | str:
    assert spec.batch_dim is not None
    return spec.shape[spec.batch_dim]


def _size(spec: InputSpec, tensors: Mapping[str, torch.Tensor]) -> int:
    assert spec.batch_dim is not None
    return tensors[spec.name].shape[spec.batch_dim]


def _uneven(specs: Sequence[InputSpec], tensors: Mapping[str, torch.Tensor]) -> Problem:
    sizes = ", ".join(f"{_at(s.path)} {_size(s, tensors)}" for s in specs)
    return Problem(
        "FXP105",
        "batch",
        f"its inputs differ in size along the batch dim: {sizes}",
        "give every input the same number of rows",
    )


def _problem(path: Path, why: str, fix: str) -> Problem:
    return Problem("FXP105", _at(path), why, fix)


def _at(path: Path) -> str:
    return "batch" + "".join(f"[{key!r}]" for key in path)


def _kind(spec: InputSpec) -> str:
    return f"give a {spec.dtype} tensor of shape {_shape(spec)}"


def _shape(spec: InputSpec) -> str:
    return "(" + ", ".join(map(str, spec.shape)) + ("," if len(spec.shape) == 1 else "") + ")"


def _show(value: Any) -> str:
    text = repr(value) if isinstance(value, (bool, int, float, str, type(None))) else ""
    return text[:60] or f"a {type(value).__name__}"
