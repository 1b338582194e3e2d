"""Reader of checkpoints; nothing is used before its digest is verified."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from fxpart.checkpoint import (
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
from fxpart.checkpoint.signature import SigningKey
from fxpart.checkpoint.writer import PLAN
from fxpart.errors import FxpartError, Problem, error

MOST = 100  # problems reported at once
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint with verified manifest, file sizes and headers.

    skipped: problems of newer checkpoints, set by :func:`~fxpart.checkpoint.folder.newest`.
    """

    path: Path
    manifest: CheckpointManifest
    entries: dict[str, dict[str, SafetensorsEntry]]
    skipped: tuple[Problem, ...] = ()

    @classmethod
    def open(cls, path: str | Path, key: SigningKey | None = None) -> Checkpoint:
        """Read the manifest and every header; FXP510 with all problems, tensors by name.

        Tensors are verified when they are read, or by :meth:`verify`. key: verifies the signature
        before the manifest is decoded; FXP524.
        """
        folder = Path(path)
        manifest = _read_manifest(folder, key)
        problems = list(islice(manifest_check.manifest_problems(manifest, folder), MOST))
        named = re.fullmatch(r"step-(\d{1,18})", folder.name)
        if named is not None and int(named[1]) != manifest.step:
            why = f"it is the manifest of step {manifest.step}"
            problems.append(files.make_damage_problem(folder, NAME, why))
        if problems:
            raise FxpartError(problems)
        entries: dict[str, dict[str, SafetensorsEntry]] = {}
        for name, entry in manifest.files.items():
            try:
                entries[name] = _read_header(folder / name, entry)
            except (OSError, ValueError) as cause:
                why = (isinstance(cause, OSError) and cause.strerror) or str(cause)
                problems.append(
                    files.make_damage_problem(folder, _describe_file(name, manifest), why)
                )
        problems = problems or list(
            islice(manifest_check.header_problems(manifest, folder, entries), MOST)
        )
        if problems:
            raise FxpartError(problems[:MOST])
        return cls(folder, manifest, entries)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.manifest.files.values())

    def tensor(self, key: str) -> ManifestTensor:
        """Return a tensor's manifest entry; FXP512 if there is none."""
        try:
            return self.manifest.tensors[key]
        except KeyError:
            why, fix = (
                f"the checkpoint does not contain {files.format_key(key)}",
                "use the model that the run began with",
            )
            raise error("FXP512", where=str(self.path), why=why, fix=fix) from None

    def read(
        self, key: str, wanted: TensorRegion | None = None, *, into: Bytes | None = None
    ) -> Bytes:
        """Return the bytes of a region (None: the whole) as [*wanted.sizes, bytes of an element].

        Every part that overlaps it is read once as a whole, one at a time, and verified before use.
        into: a contiguous array to fill, invalid if this raises. FXP510 with tensor and file.
        """
        tensor = self.tensor(key)
        wanted = make_full_region(tensor.shape) if wanted is None else wanted
        assert not wanted.fault(tensor.shape), f"{key}: {wanted.fault(tensor.shape)}"
        why = manifest_check.find_coverage_fault(tensor)
        if why:
            raise FxpartError(files.make_damage_problem(self.path, files.format_key(key), why))
        size = dtypes.itemsize(tensor.dtype)
        target: Bytes = np.empty((*wanted.sizes, size), np.uint8) if into is None else into
        assert target.shape == (*wanted.sizes, size), f"{key}: {target.shape}"
        for part in tensor.parts:
            stored = TensorRegion(part.ranges, part.flat)
            if stored == wanted:
                self._load(key, part, target)
                return target
            if overlap(wanted, stored):
                self._copy(key, part, wanted, target)
        return target

    def plan(self) -> str:
        """Return the text of the plan, or "" without one. FXP510."""
        if PLAN not in self.manifest.files:
            return ""
        try:
            with files.open_for_reading(self.path / PLAN) as (file, size):
                data = files.read(file, size)
            if manifest_codec.digest(data).hexdigest() == self.manifest.files[PLAN].header:
                return data.decode()
            why = "its digest does not match"
        except (OSError, ValueError) as cause:
            why = str(cause)
        raise FxpartError(files.make_damage_problem(self.path, PLAN, why))

    def verify(
        self, progress: Progress | None = None, *, share: tuple[int, int] = (0, 1)
    ) -> list[Problem]:
        """Verify every tensor; return the problems, with tensor and file.

        progress: receives bytes done and total bytes. share: (index, count) of processes that
        verify a checkpoint together; each reads about as many bytes.
        """
        found = []
        for key, tensor in self.manifest.tensors.items() if share[0] == 0 else ():
            why = manifest_check.find_coverage_fault(tensor)
            if why:
                found.append(files.make_damage_problem(self.path, files.format_key(key), why))
        own = list(self._list_share(*share))
        done, total = 0, sum(self._entry(part).size for _, part in own)
        buffer = np.empty(files.CHUNK, np.uint8)
        for key, part in own:
            try:
                self._load(key, part, buffer, keep=False)
            except FxpartError as fault:
                found += fault.problems
            done += self._entry(part).size
            if progress is not None:
                progress(done, total)
        return found

    def _list_share(self, which: int, count: int) -> Iterator[tuple[str, ManifestPart]]:
        """Yield the parts that one of several processes verifies, consecutive in file order."""
        parts = [(key, p) for key, t in self.manifest.tensors.items() for p in t.parts]
        parts.sort(key=lambda item: (item[1].file, self._entry(item[1]).start))
        total, done = sum(self._entry(part).size for _, part in parts), 0
        for key, part in parts:
            # By the middle of each part, so that each is assigned once.
            middle = done + self._entry(part).size / 2
            if min(int(middle * count / total) if total else 0, count - 1) == which:
                yield key, part
            done += self._entry(part).size

    def _entry(self, part: ManifestPart) -> SafetensorsEntry:
        return self.entries[part.file][part.name]

    def _copy(self, key: str, part: ManifestPart, wanted: TensorRegion, target: Bytes) -> None:
        """Read a part and copy its overlap with a region."""
        stored = TensorRegion(part.ranges, part.flat)
        source: Bytes = np.empty((*stored.sizes, target.shape[-1]), np.uint8)
        self._load(key, part, source)
        copy_overlap(target, wanted, source, stored)

    def _load(self, key: str, part: ManifestPart, target: Bytes, *, keep: bool = True) -> None:
        """Read a part and verify its digest; FXP510.

        target: filled if ``keep``, otherwise a buffer of CHUNK bytes.
        """
        buffer = target.reshape(-1)
        entry, running = self._entry(part), manifest_codec.digest()
        try:
            with files.open_for_reading(self.path / part.file) as (file, _):
                for at in range(entry.start, entry.stop, files.CHUNK):
                    start = at - entry.start if keep else 0
                    stored: Any = buffer[start : start + min(files.CHUNK, entry.stop - at)]
                    chunk = memoryview(stored)
                    files.fill(file, chunk, at)
                    running.update(chunk)
            why = "its digest does not match"
            if running.hexdigest() == part.digest:
                return
        except (OSError, ValueError) as cause:
            why = (isinstance(cause, OSError) and cause.strerror) or str(cause)
        raise FxpartError(
            files.make_damage_problem(self.path, manifest_check.format_place(key, part), why)
        )


def _read_manifest(folder: Path, key: SigningKey | None) -> CheckpointManifest:
    """Decode the manifest; FXP510, FXP524."""
    try:
        with files.open_for_reading(folder / NAME) as (file, size):
            if size > manifest_codec.LARGEST:
                raise manifest_codec.CorruptManifestError(f"its size is {size} bytes")
            data = files.read(file, size)
        if key is not None:
            key.check(folder, data)
        return manifest_codec.decode(data)
    except (OSError, manifest_codec.CorruptManifestError) as cause:
        why = cause.strerror if isinstance(cause, OSError) else ""
        why = why or str(cause)
        raise FxpartError(files.make_damage_problem(folder, NAME, why)) from cause


def _read_header(path: Path, entry: ManifestFile) -> dict[str, SafetensorsEntry]:
    """Return the tensors in a file, after checking its size; only the digest of other files."""
    with files.open_for_reading(path) as (file, size):
        if size != entry.size:
            raise ValueError(f"its size is {size} bytes, not {entry.size}")
        safetensors = path.name.endswith(".safetensors")
        if safetensors:
            data = safetensors_header.read(file, size)
        else:
            data = files.read(file, min(size, safetensors_header.LARGEST))
    if manifest_codec.digest(data).hexdigest() != entry.header:
        raise ValueError("the digest of its header does not match")
    return safetensors_header.decode(data, size) if safetensors else {}


def _describe_file(name: str, manifest: CheckpointManifest) -> str:
    """Return a file and the tensors in it, for messages."""
    keys = [k for k, t in manifest.tensors.items() if any(p.file == name for p in t.parts)]
    if not keys:
        return name
    more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
    return f"{files.format_key(keys[0])}{more} in {name}"
