"""What the ranks have written, put together to one manifest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from fxpart.checkpoint import coverage, files, manifest_check, writer
from fxpart.checkpoint.manifest import CheckpointManifest, ManifestTensor
from fxpart.checkpoint.manifest_codec import LARGEST
from fxpart.checkpoint.writer import RankManifest
from fxpart.errors import FxpartError, Problem, error

# What reading a rank's word can end in, whatever is in the file.
NOT_WRITTEN = (msgspec.MsgspecError, ValueError, OverflowError, RecursionError)


def list_missing_ranks(partial: Path, world: int) -> list[int]:
    """The ranks that have not said that they are done."""
    try:
        there = {path.name for path in partial.iterdir()}
    except OSError:
        there = set()
    return [rank for rank in range(world) if writer.rank_manifest_name(rank) not in there]


def read_rank_manifests(partial: Path, world: int) -> list[RankManifest]:
    """What every rank has written, in order; FXP513 where one has not."""
    found = []
    for rank in range(world):
        where = f"{partial.parent}, rank {rank}"
        try:
            with files.open_for_reading(partial / writer.rank_manifest_name(rank)) as (file, size):
                found.append(_checked(writer.decode(files.read(file, min(size, LARGEST)))))
        except (OSError, *NOT_WRITTEN) as cause:
            why = f"it has not finished its file: {cause}"
            raise error("FXP513", where=where, why=why, fix="see what that rank says") from cause
    return found


def _checked(written: RankManifest) -> RankManifest:
    """What a rank has written, if it can be; ValueError."""
    for key, tensor in written.tensors.items():
        if why := manifest_check.tensor_fault(tensor):
            raise ValueError(f"{files.format_key(key)}: {why}")
    return written


def merge(written: Sequence[RankManifest], **rest: Any) -> CheckpointManifest:
    """The manifest of what ranks have written; ``rest``: its other fields, ``files`` added to.

    FXP513 where ranks disagree about a tensor, or together do not hold each of its elements once.
    """
    tensors: dict[str, ManifestTensor] = {}
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    for each in written:
        values |= each.values
        for key, mine in each.tensors.items():
            known = tensors.setdefault(key, mine)
            if (known.dtype, known.shape) != (mine.dtype, mine.shape):
                why = f"it is {_kind(mine)} there and {_kind(known)} on a rank before"
                problems.append(_problem(f"{files.format_key(key)} of rank {each.rank}", why))
            elif known is not mine:
                tensors[key] = ManifestTensor(mine.dtype, mine.shape, (*known.parts, *mine.parts))
    for key, tensor in tensors.items():
        why = coverage.find_coverage_fault(tensor)
        if why:
            problems.append(_problem(files.format_key(key), why))
    if problems:
        raise FxpartError(problems)
    rest["files"] = _files(written) | dict(rest.get("files", {}))
    rest["values"] = values | dict(rest.get("values", {}))
    return CheckpointManifest(tensors=tensors, world=rest.pop("world", len(written)), **rest)


def _files(written: Iterable[RankManifest]) -> dict[str, Any]:
    return {each.file: each.about for each in written}


def _kind(tensor: ManifestTensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _problem(where: str, why: str) -> Problem:
    return Problem("FXP513", where, why, "report it: parts of a plan have to fit together")
