"""Merge of the ranks' manifests into one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from fxpart.checkpoint import files, manifest_check, writer
from fxpart.checkpoint.manifest import CheckpointManifest, ManifestTensor
from fxpart.checkpoint.manifest_codec import LARGEST
from fxpart.checkpoint.writer import RankManifest
from fxpart.errors import FxpartError, Problem, error

# Errors of reading a rank's manifest, for any file content.
NOT_WRITTEN = (msgspec.MsgspecError, ValueError, OverflowError, RecursionError)


def list_missing_ranks(partial: Path, world: int) -> list[int]:
    """Return the ranks whose manifests are missing."""
    try:
        names_ = {path.name for path in partial.iterdir()}
    except OSError:
        names_ = set()
    return [rank for rank in range(world) if writer.rank_manifest_name(rank) not in names_]


def read_rank_manifests(partial: Path, world: int) -> list[RankManifest]:
    """Return every rank's manifest, in order; FXP513 if one is missing."""
    found = []
    for rank in range(world):
        where = f"{partial.parent}, rank {rank}"
        try:
            with files.open_for_reading(partial / writer.rank_manifest_name(rank)) as (file, size):
                found.append(_check_manifest(writer.decode(files.read(file, min(size, LARGEST)))))
        except (OSError, *NOT_WRITTEN) as cause:
            why = f"its manifest is not readable: {cause}"
            raise error(
                "FXP513", where=where, why=why, fix="see the messages of that rank"
            ) from cause
    return found


def _check_manifest(written: RankManifest) -> RankManifest:
    """Return a rank's manifest if it is valid; otherwise ValueError."""
    for key, tensor in written.tensors.items():
        if why := manifest_check.tensor_fault(tensor):
            raise ValueError(f"{files.format_key(key)}: {why}")
    return written


def merge(written: Sequence[RankManifest], **rest: Any) -> CheckpointManifest:
    """Merge the ranks' manifests. ``rest``: other fields, with ``files`` added to.

    FXP513 if ranks disagree about a tensor, or do not cover it exactly once together.
    """
    tensors: dict[str, ManifestTensor] = {}
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    for manifest in written:
        values |= manifest.values
        for key, tensor_ in manifest.tensors.items():
            known = tensors.setdefault(key, tensor_)
            if (known.dtype, known.shape) != (tensor_.dtype, tensor_.shape):
                why = (
                    f"it is {_format_type(tensor_)} there and {_format_type(known)} on another rank"
                )
                problems.append(
                    _make_problem(f"{files.format_key(key)} of rank {manifest.rank}", why)
                )
            elif known is not tensor_:
                tensors[key] = ManifestTensor(
                    tensor_.dtype, tensor_.shape, (*known.parts, *tensor_.parts)
                )
    for key, tensor in tensors.items():
        why = manifest_check.find_coverage_fault(tensor)
        if why:
            problems.append(_make_problem(files.format_key(key), why))
    if problems:
        raise FxpartError(problems)
    rest["files"] = _files(written) | dict(rest.get("files", {}))
    rest["values"] = values | dict(rest.get("values", {}))
    return CheckpointManifest(tensors=tensors, world=rest.pop("world", len(written)), **rest)


def _files(written: Iterable[RankManifest]) -> dict[str, Any]:
    return {manifest.file: manifest.about for manifest in written}


def _format_type(tensor: ManifestTensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _make_problem(where: str, why: str) -> Problem:
    return Problem("FXP513", where, why, "report this bug: the parts of a plan must fit together")
