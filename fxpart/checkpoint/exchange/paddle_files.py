"""Folders with PaddlePaddle's converter dictionaries and each rank's arrays.

model_dist0.pdattr.json     {name: {"process_shape", "process_group", "dims_mapping"}} of rank 0
model_dist0.pdparams.npz    shards of parameters and buffers, by name
model_dist0.pdopt.npz       shards of optimizer state, by NAME/SLOT
fxpart.json                 metadata: step, options of the optimizer

The names are those of PaddlePaddle's own files, which are pickles and are not supported. JSON and
NumPy arrays can be read by both sides without executing code.
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
    read_text,
)
from fxpart.checkpoint.files import format_key
from fxpart.checkpoint.regions import Bytes
from fxpart.files import from_json

REST = "fxpart.json"
_ATTRIBUTES = ".pdattr.json"
_FILE = re.compile(r"(.*)_dist(\d{1,7})\.pdattr\.json", re.DOTALL)
_KINDS = {MODEL: ".pdparams.npz", OPTIMIZER: ".pdopt.npz"}
Strategies = dict[str, PaddleStrategy]


class PaddleFolder:
    """A folder of this format as a source of whole tensors; FXP110."""

    def __init__(self, path: Path) -> None:
        """Read all dictionaries and the arrays' headers."""
        stem, ranks = _list_ranks(path)
        found: dict[str, PaddleStrategy] = {}
        self._arrays: dict[tuple[str, int], NpzArrays] = {}
        for rank, file in ranks.items():
            for name, strategy in read_strategies(file).items():
                if found.setdefault(name, strategy) != strategy:
                    raise make_foreign_file_error(
                        str(file), f"the strategy of {format_key(name)} differs between ranks"
                    )
            for kind, end in _KINDS.items():
                arrays = path / f"{stem}_dist{rank}{end}"
                if arrays.exists():
                    self._arrays[kind, rank] = NpzArrays(arrays)
        self._strategies: dict[str, tuple[str, PaddleStrategy]] = {}
        self.tensors: dict[str, TensorType] = {}
        for name, strategy in found.items():
            self._add(path, name, strategy)
        unknown = {n for a in self._arrays.values() for n in a.tensor_types} - set(found)
        if unknown:
            raise make_foreign_file_error(
                str(path), f"{format_key(min(unknown))} has no converter dictionary"
            )
        rest = path / REST
        self.rest = (
            parse_metadata(read_text(rest), str(rest)) if rest.exists() else CheckpointMetadata()
        )

    def read(self, key: str) -> Bytes:
        """Concatenate the shards of all ranks, using the first of replicas."""
        kind = MODEL if key.startswith(MODEL) else OPTIMIZER
        name, strategy = self._strategies[key]
        tensor_type = self.tensors[key]
        whole = np.empty(tensor_type.shape, f"V{tensor_type.itemsize}")
        needed = set(strategy.find_first_replicas())
        for shard in strategy.make_shards(tensor_type.shape):
            if shard.rank in needed:
                part = self._arrays[kind, shard.rank].read(name)
                where = tuple(slice(*bounds) for bounds in shard.box)
                whole[where] = part.view(whole.dtype).reshape([b - a for a, b in shard.box])
        return whole.reshape(-1).view(np.uint8)

    def layout(self, key: str) -> Sequence[RankShard]:
        """Return the layout of the dictionary, without replicas."""
        _, strategy = self._strategies[key]
        needed = set(strategy.find_first_replicas())
        return [h for h in strategy.make_shards(self.tensors[key].shape) if h.rank in needed]

    def _add(self, path: Path, name: str, strategy: PaddleStrategy) -> None:
        """Add one tensor; its shards must exist and have equal shapes."""
        where = f"{path}, {format_key(name)}"
        parts = {
            at: a.tensor_types[name] for at, a in self._arrays.items() if name in a.tensor_types
        }
        if len({kind for kind, _ in parts}) != 1:
            raise make_foreign_file_error(where, "it is in no rank's arrays, or in both files")
        (kind, _), first = next(iter(parts.items()))
        if why := strategy.fault(len(first.shape)):
            raise make_foreign_file_error(where, why, "use the converter dictionary of the tensor")
        missing = [rank for rank in strategy.find_first_replicas() if (kind, rank) not in parts]
        if missing:
            raise make_foreign_file_error(
                where, f"it is missing on ranks {missing[:8]}", "use the files of all ranks"
            )
        if any(part != first for part in parts.values()):
            raise make_foreign_file_error(where, "its parts differ in shape or dtype")
        shape = tuple(s * n for s, n in zip(first.shape, strategy.count_shards(), strict=True))
        self.tensors[kind + name] = TensorType(first.dtype, shape)
        self._strategies[kind + name] = (name, strategy)


def write_paddle(
    target: Path, source: CheckpointSource, *,
    strategies: Mapping[str, PaddleStrategy] | None = None,
    stem: str = "model",
) -> list[str]:  # fmt: skip
    """Write a new folder; return the keys that the format does not support.

    strategies: sharding by tensor name, as from :func:`read_strategies`. Other tensors keep their
    current layout over ranks, or are whole on rank 0 if that is not an even grid. FXP110 for a
    strategy that does not fit.
    """
    kept = {
        key: tensor_type
        for key, tensor_type in source.tensors.items()
        if key.startswith(tuple(_KINDS)) and holds(tensor_type.dtype)
    }
    chosen = {key: _choose_strategy(source, key, strategies or {}) for key in kept}
    make_shards = {
        key: {h.rank: h.box for h in s.make_shards(kept[key].shape)} for key, s in chosen.items()
    }
    ranks = sorted({rank for shard in make_shards.values() for rank in shard} | {0})
    with new_folder(target) as fresh:
        for rank in ranks:
            mine = [key for key in kept if rank in make_shards[key]]
            begin = f"{stem}_dist{rank}"
            text = msgspec.json.encode({_name(key): chosen[key] for key in mine}, order="sorted")
            (fresh / f"{begin}{_ATTRIBUTES}").write_bytes(msgspec.json.format(text, indent=1))
            for kind, end in _KINDS.items():
                keys = {_name(key): key for key in mine if key.startswith(kind)}
                parts = {
                    name: _part_type(kept[key], make_shards[key][rank])
                    for name, key in keys.items()
                }
                read = partial(
                    _read_part, source, keys, {n: make_shards[k][rank] for n, k in keys.items()}
                )
                write_arrays(fresh / f"{begin}{end}", parts, read)
        (fresh / REST).write_bytes(format_metadata(source.rest))
    return [key for key in source.tensors if key not in kept]


def read_strategies(path: Path) -> Strategies:
    """Read a JSON file of converter dictionaries by tensor name; FXP110."""
    try:
        return from_json(read_text(path), Strategies)
    except (msgspec.MsgspecError, RecursionError) as cause:
        raise make_foreign_file_error(
            str(path), f"it contains no converter dictionaries: {str(cause)[:200]}"
        ) from cause


def is_paddle(path: Path) -> bool:
    """Return whether a folder has this format."""
    return any(_FILE.fullmatch(file.name) for file in path.glob(f"*{_ATTRIBUTES}"))


def _list_ranks(path: Path) -> tuple[str, dict[int, Path]]:
    """Return the stem of the file names, and the dictionaries of each rank."""
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
        why = f"there are files *_dist0{_ATTRIBUTES} of {len(stems)} models"
        raise make_foreign_file_error(str(path), why, "use a folder with one model")
    return stems.pop(), dict(sorted(found.items()))


def _choose_strategy(
    source: CheckpointSource, key: str, given: Mapping[str, PaddleStrategy]
) -> PaddleStrategy:
    """Return a tensor's strategy; an optimizer slot uses its parameter's if the shapes match."""
    shape, name = source.tensors[key].shape, _name(key)
    found = given.get(name)
    if found is None and key.startswith(OPTIMIZER):
        parameter, _ = parameter_and_slot(key)
        tensor_type = source.tensors.get(MODEL + parameter)
        found = (
            given.get(parameter) if tensor_type is not None and tensor_type.shape == shape else None
        )
    if found is None:
        return strategy_of(shape, source.layout(key)) or make_single_rank_strategy(0, len(shape))
    if why := found.fault(len(shape)):
        raise make_foreign_file_error(name, why, "use another strategy for it")
    return found


def _name(key: str) -> str:
    """Convert ``model/NAME`` to NAME, ``optimizer/NAME/SLOT`` to NAME/SLOT."""
    return key.removeprefix(MODEL) if key.startswith(MODEL) else key.removeprefix(OPTIMIZER)


def _part_type(tensor_type: TensorType, box: Sequence[tuple[int, int]]) -> TensorType:
    return TensorType(tensor_type.dtype, tuple(stop - start for start, stop in box))


def _read_part(
    source: CheckpointSource,
    keys: Mapping[str, str],
    make_shards: Mapping[str, Sequence[tuple[int, int]]],
    name: str,
) -> Bytes:
    """Return a rank's part of a tensor."""
    key = keys[name]
    tensor_type = source.tensors[key]
    whole = source.read(key).view(f"V{tensor_type.itemsize}").reshape(tensor_type.shape)
    part = whole[tuple(slice(*bounds) for bounds in make_shards[name])]
    return np.ascontiguousarray(part).reshape(-1).view(np.uint8)
