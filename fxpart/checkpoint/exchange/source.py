"""Interface of conversion sources: tensors by key, read one at a time, and metadata."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from fxpart.checkpoint import files, value_codec
from fxpart.checkpoint.dtypes import itemsize
from fxpart.checkpoint.regions import Bytes
from fxpart.errors import FxpartError, error
from fxpart.files import from_json
from fxpart.schedule.weight_modes import FLUSH

Box = tuple[tuple[int, int], ...]

MODEL = "model/"
OPTIMIZER = "optimizer/"
_PLAIN_FIELDS = ("values", "groups", "extra")


@dataclass(frozen=True)
class TensorType:
    """Dtype (torch's name) and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return itemsize(self.dtype)

    @property
    def size(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.itemsize


class CheckpointMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of a checkpoint beside tensors: manifest fields, and the plan's text."""

    step: int = 0
    calls: int = 0
    seed: int = 0
    fingerprint: str = ""
    plan: str = ""
    plan_text: str = ""
    weights: str = FLUSH
    values: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    extra: dict[str, Any] = {}


@dataclass(frozen=True)
class RankShard:
    """Part of a tensor: its rank, and its range in each dim."""

    rank: int
    box: Box


class CheckpointSource(Protocol):
    """A readable checkpoint of any format.

    rest: metadata, as far as the format has it.
    """

    rest: CheckpointMetadata

    @property
    def tensors(self) -> Mapping[str, TensorType]:
        """Tensor types by manifest key ("model/NAME", ...), in the source's order."""

    def read(self, key: str) -> Bytes:
        """Return a tensor's bytes in row-major order, 1-d; FXP110 or FXP510 for a damaged file."""

    def layout(self, key: str) -> Sequence[RankShard]:
        """Return the tensor's layout over ranks; empty if unknown, or not made of boxes."""


def as_view(data: Bytes) -> memoryview:
    """Return a 1-d array's bytes as a memoryview."""
    plain: Any = data
    return memoryview(plain) if data.nbytes else memoryview(b"")


def name_of(key: str) -> str:
    """Return a model tensor's original name: ``model/h.0.weight`` -> ``h.0.weight``."""
    return key.removeprefix(MODEL)


def parameter_and_slot(key: str) -> tuple[str, str]:
    """Split ``optimizer/h.0.weight/exp_avg`` into ``h.0.weight``, ``exp_avg``."""
    name, _, slot = key.removeprefix(OPTIMIZER).rpartition("/")
    return name, slot


def parse_metadata(text: str | bytes, where: str) -> CheckpointMetadata:
    """Parse what :func:`format_metadata` made; FXP110."""
    try:
        found = from_json(text, CheckpointMetadata)
        plain_fields = {
            name: value_codec.from_json_value(getattr(found, name)) for name in _PLAIN_FIELDS
        }
    except (msgspec.MsgspecError, RecursionError, ValueError) as cause:
        why = f"its metadata is invalid: {str(cause)[:200]}"
        raise make_foreign_file_error(where, why) from cause
    return msgspec.structs.replace(found, **plain_fields)


def format_metadata(rest: CheckpointMetadata) -> bytes:
    """Return JSON with sorted keys."""
    plain_fields = {
        name: value_codec.to_json_value(getattr(rest, name), name) for name in _PLAIN_FIELDS
    }
    plain = msgspec.structs.replace(rest, **plain_fields)
    return msgspec.json.format(msgspec.json.encode(plain, order="sorted"), indent=1) + b"\n"


def make_foreign_file_error(
    where: str, why: str, fix: str = "use a complete copy of the file"
) -> FxpartError:
    """Return the error of an unreadable file of another tool."""
    return error("FXP110", where=where, why=why, fix=fix)


_LARGEST = 100_000_000  # bytes


def read_text(path: Path) -> str:
    """Return a file's text; FXP110 if it is not UTF-8 or too long."""
    try:
        with files.open_for_reading(Path(os.path.realpath(path))) as (file, size):
            if size > _LARGEST:
                raise ValueError(f"its size is {size} bytes")
            return files.read(file, size).decode("utf-8")
    except (OSError, ValueError) as cause:
        raise make_foreign_file_error(str(path), f"it cannot be read: {cause}") from cause
