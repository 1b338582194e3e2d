"""A checkpoint, read: nothing in it is used before its digest is compared."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from fxpart.checkpoint import (
    coverage,
    dtypes,
    files,
    manifest_check,
    manifest_codec,
    safetensors_header,
)
from fxpart.checkpoint.manifest import (
    NAME,
    CheckpointManifest,
    ManifestFile,
    ManifestPart,
    ManifestTensor,
)
from fxpart.checkpoint.regions import (
    Bytes,
    TensorRegion,
    copy_overlap,
    make_full_region,
    overlap,
)
from fxpart.checkpoint.safetensors_header import SafetensorsEntry
from fxpart.checkpoint.writer import PLAN
from fxpart.errors import FxpartError, Problem, error

MOST = 100  # problems told at once
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of which manifest, sizes and headers are as they were written.

    skipped: what was wrong with newer ones, where it was found by
    :func:`~fxpart.checkpoint.folder.newest`.
    """

    path: Path
    manifest: CheckpointManifest
    places: dict[str, dict[str, SafetensorsEntry]]
    skipped: tuple[Problem, ...] = ()

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Read the manifest and every header; FXP510 with all that is wrong, tensors by name.

        What is in the tensors is compared when they are read, or by :meth:`verify`.
        """
        folder = Path(path)
        manifest = _manifest(folder)
        problems = list(islice(manifest_check.manifest_problems(manifest, folder), MOST))
        named = re.fullmatch(r"step-(\d{1,18})", folder.name)
        if named is not None and int(named[1]) != manifest.step:
            why = f"it is of step {manifest.step}"
            problems.append(files.make_damage_problem(folder, NAME, why))
        if problems:
            raise FxpartError(problems)
        places: dict[str, dict[str, SafetensorsEntry]] = {}
        for name, entry in manifest.files.items():
            try:
                places[name] = _header(folder / name, entry)
            except (OSError, ValueError) as cause:
                why = (isinstance(cause, OSError) and cause.strerror) or str(cause)
                problems.append(files.make_damage_problem(folder, _concerned(name, manifest), why))
        problems = problems or list(
            islice(manifest_check.header_problems(manifest, folder, places), MOST)
        )
        if problems:
            raise FxpartError(problems[:MOST])
        return cls(folder, manifest, places)

    @property
    def size(self) -> int:
        """Bytes of all its files."""
        return sum(entry.size for entry in self.manifest.files.values())

    def tensor(self, key: str) -> ManifestTensor:
        """What the manifest says of a tensor; FXP512 where it has none of that key."""
        try:
            return self.manifest.tensors[key]
        except KeyError:
            why, fix = (
                f"it does not hold {files.format_key(key)}",
                "the model that the run began with",
            )
            raise error("FXP512", where=str(self.path), why=why, fix=fix) from None

    def read(
        self, key: str, wanted: TensorRegion | None = None, *, into: Bytes | None = None
    ) -> Bytes:
        """The bytes of a region (None: the whole): [*wanted.sizes, bytes of an element].

        Every part that holds something of it is read once and whole, one at a time, and its digest
        compared before it is used. into: a contiguous array that is filled, of which nothing is to
        be used where this raises. FXP510 with tensor and file.
        """
        tensor = self.tensor(key)
        wanted = make_full_region(tensor.shape) if wanted is None else wanted
        assert not wanted.fault(tensor.shape), f"{key}: {wanted.fault(tensor.shape)}"
        why = coverage.find_coverage_fault(tensor)
        if why:
            raise FxpartError(files.make_damage_problem(self.path, files.format_key(key), why))
        size = dtypes.itemsize(tensor.dtype)
        target: Bytes = np.empty((*wanted.sizes, size), np.uint8) if into is None else into
        assert target.shape == (*wanted.sizes, size), f"{key}: {target.shape}"
        for part in tensor.parts:
            held = TensorRegion(part.ranges, part.flat)
            if held == wanted:
                self._load(key, part, target)
                return target
            if overlap(wanted, held):
                self._copy(key, part, wanted, target)
        return target

    def plan(self) -> str:
        """The text of the plan that it was trained by; "" where it holds none. FXP510."""
        if PLAN not in self.manifest.files:
            return ""
        try:
            with files.open_for_reading(self.path / PLAN) as (file, size):
                data = files.read(file, size)
            if manifest_codec.digest(data).hexdigest() == self.manifest.files[PLAN].header:
                return data.decode()
            why = "its bytes are not those that were written"
        except (OSError, ValueError) as cause:
            why = str(cause)
        raise FxpartError(files.make_damage_problem(self.path, PLAN, why))

    def verify(
        self, progress: Progress | None = None, *, share: tuple[int, int] = (0, 1)
    ) -> list[Problem]:
        """Compare every tensor's digest; what is wrong, tensor and file by name.

        progress: told bytes done and bytes in all. share: (which, of how many), where several
        processes compare a checkpoint together; each takes a like number of bytes.
        """
        found = []
        for key, tensor in self.manifest.tensors.items() if share[0] == 0 else ():
            why = coverage.find_coverage_fault(tensor)
            if why:
                found.append(files.make_damage_problem(self.path, files.format_key(key), why))
        mine = list(self._share(*share))
        done, total = 0, sum(self._place(part).size for _, part in mine)
        buffer = np.empty(files.CHUNK, np.uint8)
        for key, part in mine:
            try:
                self._load(key, part, buffer, keep=False)
            except FxpartError as fault:
                found += fault.problems
            done += self._place(part).size
            if progress is not None:
                progress(done, total)
        return found

    def _share(self, which: int, of: int) -> Iterator[tuple[str, ManifestPart]]:
        """The parts that one of several processes compares: neighbours, in the order of files."""
        parts = [(key, p) for key, t in self.manifest.tensors.items() for p in t.parts]
        parts.sort(key=lambda item: (item[1].file, self._place(item[1]).start))
        total, done = sum(self._place(part).size for _, part in parts), 0
        for key, part in parts:
            # By where its middle lies, so that each is somebody's.
            middle = done + self._place(part).size / 2
            if min(int(middle * of / total) if total else 0, of - 1) == which:
                yield key, part
            done += self._place(part).size

    def _place(self, part: ManifestPart) -> SafetensorsEntry:
        return self.places[part.file][part.name]

    def _copy(self, key: str, part: ManifestPart, wanted: TensorRegion, target: Bytes) -> None:
        """Read a part and copy what it holds of a region."""
        held = TensorRegion(part.ranges, part.flat)
        source: Bytes = np.empty((*held.sizes, target.shape[-1]), np.uint8)
        self._load(key, part, source)
        copy_overlap(target, wanted, source, held)

    def _load(self, key: str, part: ManifestPart, target: Bytes, *, keep: bool = True) -> None:
        """Read a part and compare its digest; FXP510.

        target: what it fills; where it is not kept, room for CHUNK bytes.
        """
        buffer = target.reshape(-1)
        place, running = self._place(part), manifest_codec.digest()
        try:
            with files.open_for_reading(self.path / part.file) as (file, _):
                for at in range(place.start, place.stop, files.CHUNK):
                    start = at - place.start if keep else 0
                    held: Any = buffer[start : start + min(files.CHUNK, place.stop - at)]
                    chunk = memoryview(held)
                    files.fill(file, chunk, at)
                    running.update(chunk)
            why = "its bytes are not those that were written"
            if running.hexdigest() == part.digest:
                return
        except (OSError, ValueError) as cause:
            why = (isinstance(cause, OSError) and cause.strerror) or str(cause)
        raise FxpartError(
            files.make_damage_problem(self.path, manifest_check.place(key, part), why)
        )


def _manifest(folder: Path) -> CheckpointManifest:
    """The decoded manifest; FXP510."""
    try:
        with files.open_for_reading(folder / NAME) as (file, size):
            if size > manifest_codec.LARGEST:
                raise manifest_codec.CorruptManifestError(f"it has {size} bytes")
            data = files.read(file, size)
        return manifest_codec.decode(data)
    except (OSError, manifest_codec.CorruptManifestError) as cause:
        why = cause.strerror if isinstance(cause, OSError) else ""
        why = why or str(cause)
        raise FxpartError(files.make_damage_problem(folder, NAME, why)) from cause


def _header(path: Path, entry: ManifestFile) -> dict[str, SafetensorsEntry]:
    """The tensors of a file as large as its entry says; of another file only its digest."""
    with files.open_for_reading(path) as (file, size):
        if size != entry.size:
            raise ValueError(f"it has {size} bytes, not {entry.size}")
        safetensors = path.name.endswith(".safetensors")
        first = files.read(file, 8) if safetensors else b""
        length = int.from_bytes(first, "little") if safetensors else size
        if length > min(safetensors_header.LARGEST, size - len(first)):
            raise ValueError("its header is not that which was written")
        data = first + files.read(file, length)
    if manifest_codec.digest(data).hexdigest() != entry.header:
        raise ValueError("its header is not that which was written")
    return safetensors_header.decode(data, size) if safetensors else {}


def _concerned(name: str, manifest: CheckpointManifest) -> str:
    """A file, and the tensors that are lost with it."""
    keys = [k for k, t in manifest.tensors.items() if any(p.file == name for p in t.parts)]
    if not keys:
        return name
    more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
    return f"{files.format_key(keys[0])}{more} in {name}"
