"""Folders of safetensors files with original names: Hugging Face's, and torch's DCP in that form.

model.safetensors                   all, or
model-00001-of-00002.safetensors    a file of several, and
model.safetensors.index.json        which of them holds which tensor

torch.distributed.checkpoint's HuggingFaceStorageWriter and -Reader use the same files. Where ranks
have saved their own shards, each file's metadata says under DCP_SHARDING_INFO at which offsets of
the whole tensor its part lies, and the index is missing.
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
)
from fxpart.checkpoint.exchange.tensor_files import (
    SafetensorsLocation,
    read_header,
    read_place,
    write_file,
)
from fxpart.checkpoint.exchange.text_files import read_text
from fxpart.checkpoint.files import format_key
from fxpart.checkpoint.regions import Bytes
from fxpart.files import from_json

INDEX = "model.safetensors.index.json"
REST = "fxpart.json"
SHARDING = "DCP_SHARDING_INFO"
_VERSION = "DCP_VERSION"
_HUGE = 1 << 62


@dataclass(frozen=True)
class KeyPrefixes:
    """What stands before a name: of a model's tensor, and of an optimizer's.

    By default as ``{"model": model.state_dict(), "optimizer": {"state": {name: {slot: ...}}}}`` is
    flattened by torch.distributed.checkpoint.
    """

    model: str = "model."
    optimizer: str = "optimizer.state."

    def holds(self, key: str) -> bool:
        """Whether a key has such a name, and the name leads back to it."""
        kinds = (MODEL, OPTIMIZER) if self.optimizer else (MODEL,)
        return key.startswith(kinds) and self.key(self.name(key)) == key

    def name(self, key: str) -> str:
        """The name that stands for a checkpoint's key."""
        if key.startswith(MODEL):
            return self.model + name_of(key)
        return self.optimizer + ".".join(parameter_and_slot(key))

    def key(self, name: str) -> str | None:
        """The key that a name stands for; None where it has neither prefix."""
        if self.optimizer and name.startswith(self.optimizer):
            parameter, dot, slot = name.removeprefix(self.optimizer).rpartition(".")
            return f"{OPTIMIZER}{parameter}/{slot}" if dot else None
        return MODEL + name.removeprefix(self.model) if name.startswith(self.model) else None


BARE = KeyPrefixes("", "")


@dataclass(frozen=True)
class _TensorChunk:
    """A part of a tensor. offsets: where it begins in the whole."""

    place: SafetensorsLocation
    offsets: tuple[int, ...]


class SafetensorsFolder:
    """A folder of safetensors files as a source.

    Of files that the index lists, or of all that lie there. A tensor may be in parts over several
    files, as ranks save them. FXP110 where a file is damaged, a part is missing or two overlap, or
    a name has none of the prefixes.
    """

    def __init__(self, path: Path, prefixes: KeyPrefixes = BARE) -> None:
        """Read the headers."""
        files, listed = _files(path)
        chunks: dict[str, list[_TensorChunk]] = {}
        for file in files:
            places, metadata = read_header(file)
            offsets = _offsets(file, metadata, places)
            for name, place in places.items():
                if name in chunks and SHARDING not in metadata:
                    raise make_foreign_file_error(
                        str(file), f"{format_key(name)} is in another file too"
                    )
                chunks.setdefault(name, []).append(_TensorChunk(place, offsets[name]))
        if lost := [name for name in listed if name not in chunks]:
            why = f"it lists {len(lost)} tensors that are in no file, {format_key(lost[0])} for one"
            raise make_foreign_file_error(str(path / INDEX), why)
        self._chunks: dict[str, list[_TensorChunk]] = {}
        self.tensors: dict[str, TensorType] = {}
        strange = [name for name in chunks if prefixes.key(name) is None]
        if strange:
            why = f"{format_key(strange[0])} begins with neither {prefixes.model!r} nor "
            why += repr(prefixes.optimizer)
            fix = "give --model-prefix and --optimizer-prefix; '' where names have none"
            raise make_foreign_file_error(str(path), why, fix)
        for name, held in chunks.items():
            key = str(prefixes.key(name))
            self.tensors[key], self._chunks[key] = _whole(name, held)
        rest = path / REST
        self.rest = (
            parse_metadata(read_text(rest), str(rest)) if rest.exists() else CheckpointMetadata()
        )

    def read(self, key: str) -> Bytes:
        """The parts put together."""
        outline, chunks = self.tensors[key], self._chunks[key]
        if len(chunks) == 1:
            return read_place(chunks[0].place)
        form = f"V{outline.itemsize}"
        whole = np.empty(outline.shape, form)
        for chunk in chunks:
            shape = chunk.place.outline.shape
            where = tuple(
                slice(start, start + size) for start, size in zip(chunk.offsets, shape, strict=True)
            )
            whole[where] = read_place(chunk.place).view(form).reshape(shape)
        return whole.reshape(-1).view(np.uint8)

    def layout(self, key: str) -> Sequence[RankShard]:
        """Not known: files are no ranks."""
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
    """Write a new folder; the keys that the format does not hold, and that are left out.

    prefixes: of names; without one for the optimizer, the model alone is written. shards: with the
    index, the metadata and the rest that torch.distributed.checkpoint and we look for. config: a
    config.json to copy beside. file_bytes: most bytes of a file, above which there are several.
    """
    keys = {prefixes.name(key): key for key in source.tensors if prefixes.holds(key)}
    keys = {name: key for name, key in keys.items() if DTYPES[source.tensors[key].dtype][1]}
    kept = {name: source.tensors[key] for name, key in keys.items()}
    groups = _groups(kept, file_bytes)
    with new_folder(target) as fresh:
        index = {}
        for number, names in enumerate(groups, 1):
            file = f"model-{number:05}-of-{len(groups):05}.safetensors"
            if len(groups) == 1 and not shards:
                file = "model.safetensors"
            outlines = {name: kept[name] for name in names}
            metadata = {"format": "pt"}
            if shards:
                starts = {n: {"saved_offsets": [0] * len(o.shape)} for n, o in outlines.items()}
                metadata |= {SHARDING: json.dumps(starts), _VERSION: "1.0"}
            write_file(fresh / file, outlines, lambda name: source.read(keys[name]), metadata)
            index.update(dict.fromkeys(names, file))
        if len(groups) > 1 or shards:
            sizes = sum(outline.size for outline in kept.values())
            text = {"metadata": {"total_size": sizes}, "weight_map": index}
            (fresh / INDEX).write_text(json.dumps(text, indent=2, sort_keys=True) + "\n", "utf-8")
        if shards:
            (fresh / REST).write_bytes(format_metadata(source.rest))
        if config is not None:
            shutil.copyfile(config, fresh / "config.json")
    return [key for key in source.tensors if key not in keys.values()]


def is_sharded(path: Path) -> bool:
    """Whether a file of a folder says where its parts lie, as torch.distributed.checkpoint does."""
    file = next(iter(sorted(path.glob("*.safetensors"))), None)
    return file is not None and SHARDING in read_header(file)[1]


def _files(path: Path) -> tuple[list[Path], list[str]]:
    """The files of a folder, or the one file; and the tensors that an index lists."""
    if not path.is_dir():
        return [path], []
    index, listed = path / INDEX, list[str]()
    files = sorted(path.glob("*.safetensors"))
    if index.exists():
        try:
            found: Any = from_json(read_text(index))["weight_map"]
            listed, names = list(found), sorted(set(found.values()))
            if any(Path(name).name != name for name in names):
                raise ValueError("it names a file that is not beside it")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as cause:
            raise make_foreign_file_error(
                str(index), f"it is no index of a checkpoint: {cause}"
            ) from cause
        files = [path / name for name in names]
    if not files:
        raise make_foreign_file_error(
            str(path), "the folder has no .safetensors file", "give another folder"
        )
    return files, listed


def _offsets(
    file: Path, metadata: Mapping[str, str], places: Mapping[str, SafetensorsLocation]
) -> dict[str, tuple[int, ...]]:
    """Where the part of each tensor begins; at the beginning where the file says nothing."""
    if SHARDING not in metadata:
        return {name: (0,) * len(place.outline.shape) for name, place in places.items()}
    try:
        given: Any = from_json(metadata[SHARDING])
        found = {name: tuple(given[name]["saved_offsets"]) for name in places}
        for name, place in places.items():
            right = len(found[name]) == len(place.outline.shape)
            if not right or any(type(n) is not int or not 0 <= n < _HUGE for n in found[name]):
                raise ValueError(f"{format_key(name)} has no place in the whole")
    except (ValueError, KeyError, TypeError, RecursionError) as cause:
        raise make_foreign_file_error(
            str(file), f"{SHARDING} does not fit its tensors: {cause}"
        ) from cause
    return found


def _whole(name: str, chunks: Sequence[_TensorChunk]) -> tuple[TensorType, list[_TensorChunk]]:
    """The whole tensor's outline and the parts that hold it once, ties by rank dropped."""
    once = list({(c.offsets, c.place.outline.shape): c for c in chunks}.values())
    first = once[0].place
    where = f"{format_key(name)} in {first.file}"
    if any(
        c.place.outline.dtype != first.outline.dtype or len(c.offsets) != len(once[0].offsets)
        for c in once
    ):
        raise make_foreign_file_error(where, "its parts are of several dtypes or numbers of dims")
    ends = [
        [start + size for start, size in zip(c.offsets, c.place.outline.shape, strict=True)]
        for c in once
    ]
    shape = tuple(max(column) for column in zip(*ends, strict=True))
    volume = sum(math.prod(c.place.outline.shape) for c in once)
    if volume != math.prod(shape) or _overlap(once):
        why = f"its {len(once)} parts hold {volume} of {math.prod(shape)} numbers"
        raise make_foreign_file_error(where, f"{why}, or one twice", "give the files of all ranks")
    return TensorType(first.outline.dtype, shape), once


def _overlap(chunks: Sequence[_TensorChunk]) -> bool:
    """Whether two parts share a number: by a sweep along the first dim."""
    boxes = sorted(
        tuple(
            (start, start + size)
            for start, size in zip(c.offsets, c.place.outline.shape, strict=True)
        )
        for c in chunks
        if math.prod(c.place.outline.shape)
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


def _groups(kept: Mapping[str, TensorType], largest: int) -> list[list[str]]:
    """The names of each file; a tensor above the limit has a file of its own."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, outline in kept.items():
        if groups[-1] and size + outline.size > largest:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += outline.size
    return groups
