"""Folders with PaddlePaddle's converter dictionaries, and each rank's arrays beside them.

model_dist0.pdattr.json     {name: {"process_shape", "process_group", "dims_mapping"}} of rank 0
model_dist0.pdparams.npz    its parts of parameters and buffers, by name
model_dist0.pdopt.npz       its parts of optimizer state, by NAME/SLOT
fxpart.json                 what is no tensor: step, options of the optimizer

Named as PaddlePaddle's own files, which are pickles and are not read: JSON and NumPy arrays are
what both sides can open without running anything.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from fxpart.checkpoint.exchange.atomic_output import new_folder
from fxpart.checkpoint.exchange.npz import NpzArrays, holds, write_arrays
from fxpart.checkpoint.exchange.paddle import (
    PaddleStrategy,
    make_single_rank_strategy,
    strategy_of,
)
from fxpart.checkpoint.exchange.source import (
    MODEL,
    OPTIMIZER,
    CheckpointMetadata,
    CheckpointSource,
    RankShard,
    TensorType,
    format_metadata,
    make_foreign_file_error,
    parameter_and_slot,
    parse_metadata,
)
from fxpart.checkpoint.exchange.text_files import read_text
from fxpart.checkpoint.files import format_key
from fxpart.checkpoint.regions import Bytes
from fxpart.files import from_json

REST = "fxpart.json"
_ATTRIBUTES = ".pdattr.json"
_FILE = re.compile(r"(.*)_dist(\d{1,7})\.pdattr\.json", re.DOTALL)
_KINDS = {MODEL: ".pdparams.npz", OPTIMIZER: ".pdopt.npz"}
Strategies = dict[str, PaddleStrategy]


class PaddleFolder:
    """Such a folder as a source: whole tensors, put together by their dictionaries; FXP110."""

    def __init__(self, path: Path) -> None:
        """Read all dictionaries and the arrays' headers."""
        stem, ranks = _ranks(path)
        found: dict[str, PaddleStrategy] = {}
        self._arrays: dict[tuple[str, int], NpzArrays] = {}
        for rank, file in ranks.items():
            for name, strategy in read_strategies(file).items():
                if found.setdefault(name, strategy) != strategy:
                    raise make_foreign_file_error(
                        str(file), f"{format_key(name)} is cut otherwise on another rank"
                    )
            for kind, end in _KINDS.items():
                arrays = path / f"{stem}_dist{rank}{end}"
                if arrays.exists():
                    self._arrays[kind, rank] = NpzArrays(arrays)
        self._strategies: dict[str, tuple[str, PaddleStrategy]] = {}
        self.tensors: dict[str, TensorType] = {}
        for name, strategy in found.items():
            self._add(path, name, strategy)
        strange = {n for a in self._arrays.values() for n in a.outlines} - set(found)
        if strange:
            raise make_foreign_file_error(
                str(path), f"{format_key(min(strange))} has no dictionary"
            )
        rest = path / REST
        self.rest = (
            parse_metadata(read_text(rest), str(rest)) if rest.exists() else CheckpointMetadata()
        )

    def read(self, key: str) -> Bytes:
        """The parts of all ranks put together; of copies, the first one's."""
        kind = MODEL if key.startswith(MODEL) else OPTIMIZER
        name, strategy = self._strategies[key]
        outline = self.tensors[key]
        whole = np.empty(outline.shape, f"V{outline.itemsize}")
        needed = set(strategy.holders())
        for held in strategy.boxes(outline.shape):
            if held.rank in needed:
                part = self._arrays[kind, held.rank].read(name)
                where = tuple(slice(*bounds) for bounds in held.box)
                whole[where] = part.view(whole.dtype).reshape([b - a for a, b in held.box])
        return whole.reshape(-1).view(np.uint8)

    def layout(self, key: str) -> Sequence[RankShard]:
        """As the dictionary says, each number once."""
        _, strategy = self._strategies[key]
        needed = set(strategy.holders())
        return [h for h in strategy.boxes(self.tensors[key].shape) if h.rank in needed]

    def _add(self, path: Path, name: str, strategy: PaddleStrategy) -> None:
        """One tensor, whose parts must be there and equal in shape."""
        where = f"{path}, {format_key(name)}"
        parts = {at: a.outlines[name] for at, a in self._arrays.items() if name in a.outlines}
        if len({kind for kind, _ in parts}) != 1:
            raise make_foreign_file_error(
                where, "no rank has an array of it, or both files have one"
            )
        (kind, _), first = next(iter(parts.items()))
        if why := strategy.fault(len(first.shape)):
            raise make_foreign_file_error(where, why, "the dictionary that it was cut by")
        lost = [rank for rank in strategy.holders() if (kind, rank) not in parts]
        if lost:
            raise make_foreign_file_error(
                where, f"ranks {lost[:8]} lack it", "give the files of all ranks"
            )
        if any(part != first for part in parts.values()):
            raise make_foreign_file_error(where, "its parts have several shapes or dtypes")
        shape = tuple(s * n for s, n in zip(first.shape, strategy.cuts(), strict=True))
        self.tensors[kind + name] = TensorType(first.dtype, shape)
        self._strategies[kind + name] = (name, strategy)


def write_paddle(
    target: Path, source: CheckpointSource, *,
    strategies: Mapping[str, PaddleStrategy] | None = None,
    stem: str = "model",
) -> list[str]:  # fmt: skip
    """Write a new folder; the keys that the format does not hold, and that are left out.

    strategies: by name how each tensor is to be cut, as :func:`read_strategies` gives them. A
    tensor that they do not name is cut as it lies over ranks now, or is whole on rank 0 where that
    is no even grid. FXP110 for a strategy that does not fit.
    """
    kept = {
        key: outline
        for key, outline in source.tensors.items()
        if key.startswith(tuple(_KINDS)) and holds(outline.dtype)
    }
    chosen = {key: _strategy(source, key, strategies or {}) for key in kept}
    boxes = {key: {h.rank: h.box for h in s.boxes(kept[key].shape)} for key, s in chosen.items()}
    ranks = sorted({rank for held in boxes.values() for rank in held} | {0})
    with new_folder(target) as fresh:
        for rank in ranks:
            mine = [key for key in kept if rank in boxes[key]]
            begin = f"{stem}_dist{rank}"
            text = msgspec.json.encode({_name(key): chosen[key] for key in mine}, order="sorted")
            (fresh / f"{begin}{_ATTRIBUTES}").write_bytes(msgspec.json.format(text, indent=1))
            for kind, end in _KINDS.items():
                keys = {_name(key): key for key in mine if key.startswith(kind)}
                parts = {name: _part(kept[key], boxes[key][rank]) for name, key in keys.items()}
                read = partial(_cut, source, keys, {n: boxes[k][rank] for n, k in keys.items()})
                write_arrays(fresh / f"{begin}{end}", parts, read)
        (fresh / REST).write_bytes(format_metadata(source.rest))
    return [key for key in source.tensors if key not in kept]


def read_strategies(path: Path) -> Strategies:
    """A JSON file of converter dictionaries by tensor name; FXP110."""
    try:
        return from_json(read_text(path), Strategies)
    except (msgspec.MsgspecError, RecursionError) as cause:
        raise make_foreign_file_error(
            str(path), f"it holds no converter dictionaries: {str(cause)[:200]}"
        ) from cause


def is_paddle(path: Path) -> bool:
    """Whether a folder is one of these."""
    return any(_FILE.fullmatch(file.name) for file in path.glob(f"*{_ATTRIBUTES}"))


def _ranks(path: Path) -> tuple[str, dict[int, Path]]:
    """The stem of the files' names, and the dictionaries of each rank."""
    found: dict[int, Path] = {}
    stems = set()
    try:
        for file in sorted(path.glob(f"*{_ATTRIBUTES}")):
            match = _FILE.fullmatch(file.name)
            if match:
                stems.add(match[1])
                found[int(match[2])] = file
    except OSError as cause:
        raise make_foreign_file_error(str(path), f"it cannot be read: {cause}") from cause
    if len(stems) != 1:
        why = f"there are files of {len(stems)} models named *_dist0{_ATTRIBUTES}"
        raise make_foreign_file_error(str(path), why, "give a folder with one")
    return stems.pop(), dict(sorted(found.items()))


def _strategy(
    source: CheckpointSource, key: str, given: Mapping[str, PaddleStrategy]
) -> PaddleStrategy:
    """How a tensor is to be cut; what an optimizer keeps, as its parameter if of that shape."""
    shape, name = source.tensors[key].shape, _name(key)
    found = given.get(name)
    if found is None and key.startswith(OPTIMIZER):
        parameter, _ = parameter_and_slot(key)
        outline = source.tensors.get(MODEL + parameter)
        found = given.get(parameter) if outline is not None and outline.shape == shape else None
    if found is None:
        return strategy_of(shape, source.layout(key)) or make_single_rank_strategy(0, len(shape))
    if why := found.fault(len(shape)):
        raise make_foreign_file_error(name, why, "another strategy for it")
    return found


def _name(key: str) -> str:
    """``model/NAME`` -> NAME, ``optimizer/NAME/SLOT`` -> NAME/SLOT."""
    return key.removeprefix(MODEL) if key.startswith(MODEL) else key.removeprefix(OPTIMIZER)


def _part(outline: TensorType, box: Sequence[tuple[int, int]]) -> TensorType:
    return TensorType(outline.dtype, tuple(stop - start for start, stop in box))


def _cut(
    source: CheckpointSource,
    keys: Mapping[str, str],
    boxes: Mapping[str, Sequence[tuple[int, int]]],
    name: str,
) -> Bytes:
    """A rank's part of a tensor."""
    key = keys[name]
    outline = source.tensors[key]
    whole = source.read(key).view(f"V{outline.itemsize}").reshape(outline.shape)
    part = whole[tuple(slice(*bounds) for bounds in boxes[name])]
    return np.ascontiguousarray(part).reshape(-1).view(np.uint8)
