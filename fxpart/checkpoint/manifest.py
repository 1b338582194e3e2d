"""What a checkpoint holds: one JSON file beside the ranks' safetensors files."""

from __future__ import annotations

from typing import Any

import msgspec

from fxpart.schedule.weight_modes import FLUSH

FORMAT = "fxpart-checkpoint"
VERSION = 1
NAME = "manifest.json"

Ranges = tuple[tuple[int, int], ...]


class ManifestPart(msgspec.Struct, frozen=True):
    """A part of a tensor, in one file.

    file: its name in the folder. name: of the tensor in that file. ranges: per dim of the whole
    tensor the ranges [start, stop) that the part holds, ascending, one after another in the part.
    flat: where given, of the elements of that (row-major) only those from the first number to
    before the second; the part is 1-d then. digest: SHA-256 of its bytes, in hex.
    """

    file: str
    name: str
    ranges: tuple[Ranges, ...]
    digest: str
    flat: tuple[int, int] | None = None


class ManifestTensor(msgspec.Struct, frozen=True):
    """A whole tensor: dtype as torch names it ("float32"), shape, and parts that cover it once."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[ManifestPart, ...]


class ManifestFile(msgspec.Struct, frozen=True):
    """A file: its bytes, and the digest of its header (length field included)."""

    size: int
    header: str


class CheckpointManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The whole checkpoint.

    step: updates done. calls: batches begun, which random ops are seeded by. seed: theirs.
    fingerprint: of the model's graph. plan: the digest of the plan, and the file beside that holds
    it. world: ranks that wrote. generation: in which. files: by name. tensors: by key,
    "model/NAME", "optimizer/NAME/SLOT", "predictor/NAME/SLOT", "random/RANK/KIND"; NAME is the
    tensor's original qualified name. values: what is no tensor of the same keys. groups: the
    optimizer's parameter groups, {options..., "params": names}. weights: the weight mode. extra:
    what the run adds: data position, scheduler, callbacks. digest: SHA-256 of the manifest's own
    canonical JSON with digest "".
    """

    format: str = FORMAT
    version: int = VERSION
    step: int
    calls: int
    seed: int
    fingerprint: str
    plan: str
    world: int
    generation: int
    weights: str = FLUSH
    files: dict[str, ManifestFile]
    tensors: dict[str, ManifestTensor]
    values: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    extra: dict[str, Any] = {}
    digest: str = ""
