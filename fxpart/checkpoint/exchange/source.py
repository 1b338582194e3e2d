"""What is converted: tensors by key, read one at a time, and what is no tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from fxpart.checkpoint import value_codec
from fxpart.checkpoint.dtypes import DTYPES, itemsize
from fxpart.checkpoint.regions import Bytes
from fxpart.errors import FxpartError, error
from fxpart.files import from_json
from fxpart.schedule.weight_modes import FLUSH

Box = tuple[tuple[int, int], ...]

MODEL = "model/"
OPTIMIZER = "optimizer/"
_FREE = ("values", "groups", "extra")
# safetensors' word -> torch's name.
NAMES = {word: name for name, (_, word) in DTYPES.items() if word is not None}


@dataclass(frozen=True)
class TensorType:
    """A tensor without its numbers: dtype as torch names it, and shape."""

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
    """What a checkpoint holds beside tensors: fields of its manifest, and the plan's text."""

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
    """A part of a tensor: the rank that holds it, and its range in each dim."""

    rank: int
    box: Box


class CheckpointSource(Protocol):
    """A checkpoint that can be read, in whatever format.

    rest: what is no tensor, as far as the format says it.
    """

    rest: CheckpointMetadata

    @property
    def tensors(self) -> Mapping[str, TensorType]:
        """Outlines by key as in a manifest ("model/NAME", ...), in the source's order."""

    def read(self, key: str) -> Bytes:
        """A whole tensor's bytes in row-major order, 1-d; FXP110 or FXP510 for a damaged file."""

    def layout(self, key: str) -> Sequence[RankShard]:
        """How the tensor lies over ranks; empty where that is not known, or is no grid of boxes."""


def as_view(data: Bytes) -> memoryview:
    """A 1-d array's bytes, to be written or filled."""
    plain: Any = data
    return memoryview(plain) if data.nbytes else memoryview(b"")


def name_of(key: str) -> str:
    """A model tensor's original name: ``model/h.0.weight`` -> ``h.0.weight``."""
    return key.removeprefix(MODEL)


def parameter_and_slot(key: str) -> tuple[str, str]:
    """``optimizer/h.0.weight/exp_avg`` -> ``h.0.weight``, ``exp_avg``."""
    name, _, slot = key.removeprefix(OPTIMIZER).rpartition("/")
    return name, slot


def parse_metadata(text: str | bytes, where: str) -> CheckpointMetadata:
    """What :func:`format_metadata` made; FXP110."""
    try:
        found = from_json(text, CheckpointMetadata)
        free = {name: value_codec.from_json_value(getattr(found, name)) for name in _FREE}
    except (msgspec.MsgspecError, RecursionError, ValueError) as cause:
        why = f"it does not say what is no tensor: {str(cause)[:200]}"
        raise make_foreign_file_error(where, why) from cause
    return msgspec.structs.replace(found, **free)


def format_metadata(rest: CheckpointMetadata) -> bytes:
    """JSON with sorted keys."""
    free = {name: value_codec.to_json_value(getattr(rest, name), name) for name in _FREE}
    plain = msgspec.structs.replace(rest, **free)
    return msgspec.json.format(msgspec.json.encode(plain, order="sorted"), indent=1) + b"\n"


def make_foreign_file_error(
    where: str, why: str, fix: str = "convert a whole copy of it"
) -> FxpartError:
    """A file of another tool that cannot be read."""
    return error("FXP110", where=where, why=why, fix=fix)
