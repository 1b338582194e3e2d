"""Conversion from any format to any other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

import msgspec

from fxpart.checkpoint.exchange import huggingface, native, paddle_files, single_file
from fxpart.checkpoint.exchange.huggingface import BARE, KeyPrefixes
from fxpart.checkpoint.exchange.paddle import PaddleStrategy
from fxpart.checkpoint.exchange.source import (
    MODEL,
    CheckpointSource,
    RankShard,
    TensorType,
    make_foreign_file_error,
)
from fxpart.checkpoint.regions import Bytes
from fxpart.checkpoint.signature import SigningKey
from fxpart.errors import error

Format = Literal["fxpart", "hf", "dcp", "paddle", "whole"]
FORMATS: tuple[Format, ...] = get_args(Format)
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class ConversionOptions:
    """Options of formats.

    model_only: only parameters and persistent buffers. prefixes: of names in torch's distributed
    checkpoints. strategies: PaddlePaddle sharding by tensor name. config: config.json to copy
    beside Hugging Face files. file_bytes: largest size of such a file. key: verifies an fxpart
    source, and signs an fxpart target.
    """

    model_only: bool = False
    prefixes: KeyPrefixes = field(default_factory=KeyPrefixes)
    strategies: Mapping[str, PaddleStrategy] = field(default_factory=dict)
    config: Path | None = None
    file_bytes: int = 5_000_000_000
    key: SigningKey | None = None


@dataclass(frozen=True)
class ConversionResult:
    """Result of a conversion. path: output. left_out: keys that the format does not support."""

    path: Path
    source: Format
    target: Format
    tensors: int
    bytes: int
    left_out: tuple[str, ...]


def convert(
    source: Path,
    target: Path,
    to: Format,
    *,
    form: Format | None = None,
    options: ConversionOptions | None = None,
    progress: Progress | None = None,
) -> ConversionResult:
    """Convert a checkpoint at ``source`` to ``target``, with one tensor in memory at a time.

    form: format of the source; detected if None. progress: receives bytes done and total bytes.
    Raises FXP510 and FXP511 for a damaged fxpart checkpoint, FXP110 for an unreadable foreign file,
    FXP603 if the target exists or cannot be written, FXP524 if the key has not signed the source.
    """
    options = options or ConversionOptions()
    form = form or detect(source)
    if options.key is not None and "fxpart" not in (form, to):
        why = f"The formats {form} and {to} have no signature."
        raise error("FXP109", where=f"--sign {options.key.path}", why=why, fix="Omit it.")
    read = _ProgressSource(_open_source(source, form, options), options.model_only, progress)
    if not read.tensors:
        raise make_foreign_file_error(str(source), "it contains no tensor", "use another source")
    path, left_out = target, []
    if to == "fxpart":
        path = native.write_native(target, read, options.key)
    elif to == "whole":
        left_out = single_file.write_whole(target, read)
    elif to == "paddle":
        left_out = paddle_files.write_paddle(target, read, strategies=options.strategies)
    else:
        shards = to == "dcp"
        left_out = huggingface.write_folder(
            target, read, prefixes=options.prefixes if shards else BARE, shards=shards,
            config=options.config, file_bytes=options.file_bytes,
        )  # fmt: skip
    kept = {key: outline for key, outline in read.tensors.items() if key not in set(left_out)}
    size = sum(outline.size for outline in kept.values())
    return ConversionResult(path, form, to, len(kept), size, (*left_out, *read.left_out))


def detect(path: Path) -> Format:
    """Return the format at a path; FXP110 if it is unknown."""
    if path.is_file():
        return "whole" if single_file.is_whole(path) else "hf"
    if native.is_native(path):
        return "fxpart"
    if paddle_files.is_paddle(path):
        return "paddle"
    if any(path.glob("*.safetensors")):
        return "dcp" if huggingface.is_sharded(path) else "hf"
    why, fix = "the path does not exist", "pass a file or folder"
    if path.is_dir():
        why = "its files have no known format"
        fix = (
            "use checkpoints, .safetensors files or *_dist0.pdattr.json; pickles are not supported"
        )
    elif path.exists():
        why = "it is neither a folder nor a regular file"
    raise make_foreign_file_error(str(path), why, fix)


def _open_source(path: Path, form: Format, options: ConversionOptions) -> CheckpointSource:
    if form == "fxpart":
        return native.NativeCheckpointSource(path, options.key)
    if form == "whole":
        return single_file.SingleFileCheckpoint(path)
    if form == "paddle":
        return paddle_files.PaddleFolder(path)
    return huggingface.SafetensorsFolder(path, options.prefixes if form == "dcp" else BARE)


class _ProgressSource:
    """A source that reports progress, optionally restricted to the model."""

    def __init__(
        self, source: CheckpointSource, model_only: bool, progress: Progress | None
    ) -> None:
        self._source = source
        self._progress = progress
        keys = [key for key in source.tensors if key.startswith(MODEL) or not model_only]
        self.tensors: Mapping[str, TensorType] = {key: source.tensors[key] for key in keys}
        self.rest = source.rest
        if model_only:
            self.rest = msgspec.structs.replace(source.rest, values={}, groups=[])
        self.left_out = [key for key in source.tensors if key not in self.tensors]
        self._read: set[str] = set()
        self._done = 0

    def read(self, key: str) -> Bytes:
        data = self._source.read(key)
        if self._progress is not None and key not in self._read:
            self._read.add(key)
            self._done += data.nbytes
            self._progress(self._done, sum(outline.size for outline in self.tensors.values()))
        return data

    def layout(self, key: str) -> Sequence[RankShard]:
        return self._source.layout(key)
