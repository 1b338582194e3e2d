"""Manifest of a checkpoint: one JSON file beside the ranks' safetensors files."""

from __future__ import annotations

from typing import Any

import msgspec

from fxpart.schedule.weight_modes import FLUSH

FORMAT = "fxpart-checkpoint"
VERSION = 1
NAME = "manifest.json"
FINITE = "finite"  # key of ``extra``: False if the saved state may have NaN or infinity

Ranges = tuple[tuple[int, int], ...]


class ManifestPart(msgspec.Struct, frozen=True):
    """Part of a tensor, in one file.

    file: name in the folder. name: of the tensor in that file. ranges: stored ranges [start, stop)
    per dim of the whole tensor, ascending, concatenated in the part. flat: if given, only this
    range [start, stop) of the row-major elements of these; the part is then 1-d. digest: SHA-256 of
    its bytes, in hex.
    """

    file: str
    name: str
    ranges: tuple[Ranges, ...]
    digest: str
    flat: tuple[int, int] | None = None


class ManifestTensor(msgspec.Struct, frozen=True):
    """A whole tensor: torch's dtype name ("float32"), shape, and parts that cover it exactly
    once.
    """

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[ManifestPart, ...]


class ManifestFile(msgspec.Struct, frozen=True):
    """A file: its size in bytes, and the digest of its header (including the length field)."""

    size: int
    header: str


class CheckpointManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The whole checkpoint.

    step: updates done. calls: batches begun, which seed random ops. seed: of random ops.
    fingerprint: of the model's graph. plan: digest of the plan file. world: ranks that wrote.
    generation: of the run. files: by name. tensors: by key, "model/NAME", "optimizer/NAME/SLOT",
    "ema/NAME/average", "predictor/NAME/SLOT", "random/RANK/KIND"; NAME is the tensor's original
    qualified name. values: plain values of the same keys. groups: the optimizer's parameter groups,
    {options..., "params": names}. weights: the weight mode. extra: data of the run: data position,
    scheduler, callbacks. digest: SHA-256 of the manifest's own canonical JSON with digest "".
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

    @property
    def is_finite(self) -> bool:
        """Whether the run had finite losses and gradients when it was saved, as far as known."""
        return self.extra.get(FINITE) is not False
