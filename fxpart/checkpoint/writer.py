"""Writer of one rank's checkpoint file: streamed, with a digest of each tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from fxpart.checkpoint import dtypes, files, safetensors_header, value_codec
from fxpart.checkpoint.manifest import ManifestFile, ManifestPart, ManifestTensor, Ranges
from fxpart.checkpoint.manifest_codec import digest
from fxpart.checkpoint.regions import Bytes, TensorRegion
from fxpart.errors import error
from fxpart.files import from_json

PLAN = "plan.json"


@dataclass(frozen=True)
class CheckpointShard:
    """A rank's part of one tensor.

    key: see :class:`~fxpart.checkpoint.manifest.CheckpointManifest`. dtype: torch's name. shape: of
    the whole tensor. ranges, flat: see :class:`~fxpart.checkpoint.regions.TensorRegion`. data: the
    region's bytes, contiguous.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    ranges: tuple[Ranges, ...]
    flat: tuple[int, int] | None
    data: Bytes | memoryview | bytes

    @property
    def region(self) -> TensorRegion:
        """The region that it contains."""
        return TensorRegion(self.ranges, self.flat)


class RankManifest(msgspec.Struct, frozen=True):
    """Manifest of one rank's file.

    file: name. about: its entry in the manifest. tensors: by key, with this rank's parts only.
    values: plain values. more: further data for the rank that merges the manifests.
    """

    rank: int
    file: str
    about: ManifestFile
    tensors: dict[str, ManifestTensor]
    values: dict[str, Any] = {}
    more: dict[str, Any] = {}


def data_name(rank: int) -> str:
    """Return the data file's name, ``rank-00003.safetensors``."""
    return f"rank-{rank:05d}.safetensors"


def rank_manifest_name(rank: int) -> str:
    """Return ``rank-00003.json``, which exists once the rank's data is on disk."""
    return f"rank-{rank:05d}.json"


def write_rank(
    folder: Path,
    rank: int,
    pieces: Sequence[CheckpointShard],
    *,
    values: Mapping[str, Any] | None = None,
    more: Mapping[str, Any] | None = None,
) -> RankManifest:
    """Write ``rank-NNNNN.safetensors``, then atomically the rank's manifest.

    Nothing is copied; hashing and writing release the interpreter lock. values: of the same keys as
    tensors. more: see :class:`RankManifest`. FXP513 if it cannot be written; no file of this rank
    is left then.
    """
    # By decreasing element size, so that each tensor is aligned.
    pieces = sorted(pieces, key=lambda piece: -_element_bytes(piece))
    names = _make_unique_names(pieces)
    with files.convert_save_errors(f"{folder.parent}, rank {rank}"):
        (folder / rank_manifest_name(rank)).unlink(missing_ok=True)
        about, digests = _write(folder, rank, pieces, names)
        written = RankManifest(
            rank, data_name(rank), about, _tensors(data_name(rank), pieces, names, digests),
            dict(values or {}), dict(more or {}),
        )  # fmt: skip
        text = encode(written)
        beside = folder / f".{rank_manifest_name(rank)}.new"
        with files.create_file(beside, lasting=False) as file:
            files.write(file, text)
        beside.rename(folder / rank_manifest_name(rank))
    return written


def write_text(folder: Path, name: str, text: str) -> ManifestFile:
    """Write a text file, such as the plan; return its manifest entry. FXP513."""
    assert files.is_name(name) and not name.endswith(".safetensors"), name
    data = text.encode()
    with files.convert_save_errors(str(folder.parent)), files.create_file(folder / name) as file:
        files.write(file, data)
    return ManifestFile(len(data), digest(data).hexdigest())


def encode(written: RankManifest) -> bytes:
    """Return the JSON; FXP513 for unsupported values."""
    try:
        plain = msgspec.structs.replace(
            written,
            values=value_codec.to_json_value(written.values, "values"),
            more=value_codec.to_json_value(written.more, "more"),
        )
    except (TypeError, RecursionError) as cause:
        why = str(cause)
        fix = "use only numbers, strings, lists, tuples and dicts"
        raise error("FXP513", where=f"rank {written.rank}", why=why, fix=fix) from cause
    return msgspec.json.encode(plain)


def decode(data: bytes) -> RankManifest:
    """Decode what :func:`encode` made; msgspec.MsgspecError or ValueError if it is invalid."""
    found = from_json(data, RankManifest)
    buffer_, more = (
        value_codec.from_json_value(found.values),
        value_codec.from_json_value(found.more),
    )
    return msgspec.structs.replace(found, values=buffer_, more=more)


def _write(
    folder: Path, rank: int, pieces: Sequence[CheckpointShard], names: Sequence[str]
) -> tuple[ManifestFile, list[str]]:
    """Write the data file; return its entry, and the digest of each piece."""
    entries = []
    for name, piece in zip(names, pieces, strict=True):
        kind, sizes = dtypes.to_header_entry(piece.dtype, piece.region.sizes)
        entries.append((name, kind, sizes, piece.region.elements * _element_bytes(piece)))
    # Rank and step in the header reveal exchanged files.
    header = safetensors_header.encode(entries, {"rank": str(rank), "folder": folder.name})
    size, digests = len(header), []
    with files.create_file(folder / data_name(rank)) as file:
        files.write(file, header)
        for piece, (*_, length) in zip(pieces, entries, strict=True):
            # arrays implement the buffer protocol, which their type declares from 3.12 on
            buffer_: Any = piece.data
            data = memoryview(buffer_)
            data = data.cast("B") if data.nbytes else memoryview(b"")
            assert data.nbytes == length, f"{piece.key}: {data.nbytes} bytes, not {length}"
            running = digest()
            for at in range(0, length, files.CHUNK):
                running.update(data[at : at + files.CHUNK])
                files.write(file, data[at : at + files.CHUNK])
            digests.append(running.hexdigest())
            size += length
    return ManifestFile(size, digest(header).hexdigest()), digests


def _tensors(
    file: str, pieces: Sequence[CheckpointShard], names: Sequence[str], digests: Sequence[str]
) -> dict[str, ManifestTensor]:
    """Return the rank's share of the manifest's tensors."""
    found: dict[str, ManifestTensor] = {}
    for piece, name, part_digest in zip(pieces, names, digests, strict=True):
        part = ManifestPart(file, name, piece.ranges, part_digest, piece.flat)
        parts = found[piece.key].parts if piece.key in found else ()
        found[piece.key] = ManifestTensor(piece.dtype, piece.shape, (*parts, part))
    return found


def _make_unique_names(pieces: Sequence[CheckpointShard]) -> list[str]:
    """Return unique names in the file: the keys, with a number for repeated ones."""
    used: set[str] = {piece.key for piece in pieces}
    found, seen = [], set()
    for piece in pieces:
        name, count = piece.key, 1
        if piece.key in seen:
            while name in used:
                count += 1
                name = f"{piece.key}#{count}"
        seen.add(piece.key)
        used.add(name)
        found.append(name)
    return found


def _element_bytes(piece: CheckpointShard) -> int:
    """Return the bytes of an element; FXP513 for an unsupported dtype."""
    try:
        return dtypes.itemsize(piece.dtype)
    except KeyError as cause:
        why = f"its dtype, {piece.dtype}, is not supported in checkpoints"
        raise error("FXP513", where=piece.key, why=why, fix="remove it, or cast it") from cause
