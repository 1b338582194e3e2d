"""Folders of safetensors files with original names: Hugging Face's and torch's DCP in that format.

model.safetensors                   all tensors, or
model-00001-of-00002.safetensors    one of several files, and
model.safetensors.index.json        the file of each tensor

torch.distributed.checkpoint's HuggingFaceStorageWriter and -Reader use the same files. If ranks
save their own shards, there is no index, and each file's metadata has the offsets of its parts in
the whole tensors under DCP_SHARDING_INFO.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fxpart.checkpoint.dtypes import DTYPES
from fxpart.checkpoint.exchange.atomic_output import new_folder
from fxpart.checkpoint.exchange.source import (
    MODEL,
    OPTIMIZER,
    CheckpointMetadata,
    CheckpointSource,
    RankShard,
    TensorType,
    format_metadata,
    make_foreign_file_error,
    name_of,
    parameter_and_slot,
    parse_metadata,
    read_text,
)
from fxpart.checkpoint.exchange.tensor_files import (
    SafetensorsLocation,
    read_header,
    read_place,
    write_file,
)
from fxpart.checkpoint.files import format_key
from fxpart.checkpoint.regions import Bytes
from fxpart.checkpoint.safetensors_index import INDEX, format_index, parse_index, split_into_files
from fxpart.files import from_json

REST = "fxpart.json"
SHARDING = "DCP_SHARDING_INFO"
_VERSION = "DCP_VERSION"
_HUGE = 1 << 62


@dataclass(frozen=True)
class KeyPrefixes:
    """Prefixes of names: of a model's tensor, and of an optimizer's.

    The defaults are those of ``{"model": model.state_dict(), "optimizer": {"state": {name: {slot:
    ...}}}}`` flattened by torch.distributed.checkpoint.
    """

    model: str = "model."
    optimizer: str = "optimizer.state."

    def holds(self, key: str) -> bool:
        """Return whether a key has a name that can be converted back to it."""
        kinds = (MODEL, OPTIMIZER) if self.optimizer else (MODEL,)
        return key.startswith(kinds) and self.key(self.name(key)) == key

    def name(self, key: str) -> str:
        """Return the name of a checkpoint's key."""
        if key.startswith(MODEL):
            return self.model + name_of(key)
        return self.optimizer + ".".join(parameter_and_slot(key))

    def key(self, name: str) -> str | None:
        """Return the key of a name; None if it has neither prefix."""
        if self.optimizer and name.startswith(self.optimizer):
            parameter, dot, slot = name.removeprefix(self.optimizer).rpartition(".")
            return f"{OPTIMIZER}{parameter}/{slot}" if dot else None
        return MODEL + name.removeprefix(self.model) if name.startswith(self.model) else None


BARE = KeyPrefixes("", "")


@dataclass(frozen=True)
class _TensorChunk:
    """A part of a tensor. offsets: of its first element in the whole."""

    place: SafetensorsLocation
    offsets: tuple[int, ...]


class SafetensorsFolder:
    """A folder of safetensors files as a source.

    The files are those in the index, or all. A tensor may be split over several files, as ranks
    save them. FXP110 if a file is damaged, a part is missing, two overlap, or a name has none of
    the prefixes.
    """

    def __init__(self, path: Path, prefixes: KeyPrefixes = BARE) -> None:
        """Read the headers."""
        files, indexed = _files(path)
        chunks: dict[str, list[_TensorChunk]] = {}
        for file in files:
            places, metadata = read_header(file)
            offsets = _offsets(file, metadata, places)
            for name, place in places.items():
                if name in chunks and SHARDING not in metadata:
                    raise make_foreign_file_error(
                        str(file), f"{format_key(name)} is also in another file"
                    )
                chunks.setdefault(name, []).append(_TensorChunk(place, offsets[name]))
        if missing := [name for name in indexed if name not in chunks]:
            why = f"it lists {len(missing)} tensors that are in no file, such as "
            why += format_key(missing[0])
            raise make_foreign_file_error(str(path / INDEX), why)
        self._chunks: dict[str, list[_TensorChunk]] = {}
        self.tensors: dict[str, TensorType] = {}
        unknown = [name for name in chunks if prefixes.key(name) is None]
        if unknown:
            why = f"{format_key(unknown[0])} begins with neither {prefixes.model!r} nor "
            why += repr(prefixes.optimizer)
            fix = "use --model-prefix and --optimizer-prefix; '' for names without a prefix"
            raise make_foreign_file_error(str(path), why, fix)
        for name, parts in chunks.items():
            key = str(prefixes.key(name))
            self.tensors[key], self._chunks[key] = _combine_parts(name, parts)
        rest = path / REST
        self.rest = (
            parse_metadata(read_text(rest), str(rest)) if rest.exists() else CheckpointMetadata()
        )

    def read(self, key: str) -> Bytes:
        """Concatenate the parts of a tensor."""
        tensor_type, chunks = self.tensors[key], self._chunks[key]
        if len(chunks) == 1:
            return read_place(chunks[0].place)
        form = f"V{tensor_type.itemsize}"
        whole = np.empty(tensor_type.shape, form)
        for chunk in chunks:
            shape = chunk.place.tensor_type.shape
            where = tuple(
                slice(start, start + size) for start, size in zip(chunk.offsets, shape, strict=True)
            )
            whole[where] = read_place(chunk.place).view(form).reshape(shape)
        return whole.reshape(-1).view(np.uint8)

    def layout(self, key: str) -> Sequence[RankShard]:
        """Return (): files do not correspond to ranks."""
        return ()


def write_folder(
    target: Path,
    source: CheckpointSource,
    *,
    prefixes: KeyPrefixes = BARE,
    shards: bool = False,
    config: Path | None = None,
    file_bytes: int = 5_000_000_000,
) -> list[str]:
    """Write a new folder; return the keys that the format does not support.

    prefixes: of names; without an optimizer prefix only the model is written. shards: write the
    index and metadata of torch.distributed.checkpoint, and fxpart's metadata. config: config.json
    to copy. file_bytes: largest size of a file; larger checkpoints are split.
    """
    keys = {prefixes.name(key): key for key in source.tensors if prefixes.holds(key)}
    keys = {name: key for name, key in keys.items() if DTYPES[source.tensors[key].dtype][1]}
    kept = {name: source.tensors[key] for name, key in keys.items()}
    sizes = {name: tensor_type.size for name, tensor_type in kept.items()}
    files = split_into_files(sizes, file_bytes, numbered=shards)
    with new_folder(target) as fresh:
        for file, names in files.items():
            tensor_types = {name: kept[name] for name in names}
            metadata = {"format": "pt"}
            if shards:
                starts = {n: {"saved_offsets": [0] * len(o.shape)} for n, o in tensor_types.items()}
                metadata |= {SHARDING: json.dumps(starts), _VERSION: "1.0"}
            write_file(fresh / file, tensor_types, lambda name: source.read(keys[name]), metadata)
        if len(files) > 1 or shards:
            (fresh / INDEX).write_text(format_index(files, sizes), "utf-8")
        if shards:
            (fresh / REST).write_bytes(format_metadata(source.rest))
        if config is not None:
            shutil.copyfile(config, fresh / "config.json")
    return [key for key in source.tensors if key not in keys.values()]


def is_sharded(path: Path) -> bool:
    """Return whether a file has part offsets, like those of torch.distributed.checkpoint."""
    file = next(iter(sorted(path.glob("*.safetensors"))), None)
    return file is not None and SHARDING in read_header(file)[1]


def _files(path: Path) -> tuple[list[Path], list[str]]:
    """Return the files of a folder, or the single file, and the tensors listed in an index."""
    if not path.is_dir():
        return [path], []
    index, indexed = path / INDEX, list[str]()
    files = sorted(path.glob("*.safetensors"))
    if index.exists():
        try:
            places = parse_index(read_text(index))
        except ValueError as cause:
            raise make_foreign_file_error(
                str(index), f"it is not a checkpoint index: {cause}"
            ) from cause
        indexed, files = list(places), sorted(path / name for name in set(places.values()))
    if not files:
        raise make_foreign_file_error(
            str(path), "the folder has no .safetensors file", "use another folder"
        )
    return files, indexed


def _offsets(
    file: Path, metadata: Mapping[str, str], places: Mapping[str, SafetensorsLocation]
) -> dict[str, tuple[int, ...]]:
    """Return the offsets of each tensor's part; zeros without metadata."""
    if SHARDING not in metadata:
        return {name: (0,) * len(place.tensor_type.shape) for name, place in places.items()}
    try:
        given: Any = from_json(metadata[SHARDING])
        found = {name: tuple(given[name]["saved_offsets"]) for name in places}
        for name, place in places.items():
            valid = len(found[name]) == len(place.tensor_type.shape)
            if not valid or any(type(n) is not int or not 0 <= n < _HUGE for n in found[name]):
                raise ValueError(f"{format_key(name)} has no valid offset")
    except (ValueError, KeyError, TypeError, RecursionError) as cause:
        raise make_foreign_file_error(
            str(file), f"{SHARDING} does not match its tensors: {cause}"
        ) from cause
    return found


def _combine_parts(
    name: str, chunks: Sequence[_TensorChunk]
) -> tuple[TensorType, list[_TensorChunk]]:
    """Return the whole tensor's type and its distinct parts."""
    distinct = list({(c.offsets, c.place.tensor_type.shape): c for c in chunks}.values())
    first = distinct[0].place
    where = f"{format_key(name)} in {first.file}"
    if any(
        c.place.tensor_type.dtype != first.tensor_type.dtype
        or len(c.offsets) != len(distinct[0].offsets)
        for c in distinct
    ):
        raise make_foreign_file_error(where, "its parts differ in dtype or number of dims")
    ends = [
        [start + size for start, size in zip(c.offsets, c.place.tensor_type.shape, strict=True)]
        for c in distinct
    ]
    shape = tuple(max(column) for column in zip(*ends, strict=True))
    volume = sum(math.prod(c.place.tensor_type.shape) for c in distinct)
    if volume != math.prod(shape) or _overlap(distinct):
        why = f"its {len(distinct)} parts contain {volume} of {math.prod(shape)} elements"
        raise make_foreign_file_error(where, f"{why}, or overlap", "use the files of all ranks")
    return TensorType(first.tensor_type.dtype, shape), distinct


def _overlap(chunks: Sequence[_TensorChunk]) -> bool:
    """Return whether two parts overlap, by a sweep along the first dim."""
    boxes = sorted(
        tuple(
            (start, start + size)
            for start, size in zip(c.offsets, c.place.tensor_type.shape, strict=True)
        )
        for c in chunks
        if math.prod(c.place.tensor_type.shape)
    )
    open_: list[tuple[tuple[int, int], ...]] = []
    for box in boxes:
        if not box:
            return len(boxes) > 1
        open_ = [other for other in open_ if other[0][1] > box[0][0]]
        for other in open_:
            if all(a < d and c < b for (a, b), (c, d) in zip(box, other, strict=True)):
                return True
        open_.append(box)
    return False
