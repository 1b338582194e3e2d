"""In-memory checkpoints of a run on this host: a folder on a tmpfs file system.

<root>/step-0000000120-1c9e0d42/rank-00002.safetensors     like the checkpoint on disk
                               /manifest.json

The folder survives the processes, but not a restart of the host. Saves of the same step differ in
the digest of their manifests. Only the owner can read the folder.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from fxpart.checkpoint import files, folder, manifest_codec
from fxpart.checkpoint.manifest import NAME, CheckpointManifest

_FOLDER = re.compile(r"step-(\d{10,18})-[0-9a-f]{8}")
_CHUNK = 1 << 22  # bytes
_SHARED = Path("/dev/shm")
FileSizes = dict[str, dict[str, int]]


def default_root(identity: str) -> Path:
    """Return the folder of a run's replicas on this host. identity: unique to the run."""
    here = _SHARED if os.access(_SHARED, os.W_OK) else Path(tempfile.gettempdir())
    return here / f"fxpart-{os.getuid()}-{identity}"


def folder_name(step: int, manifest: bytes) -> str:
    """Return the folder name of a checkpoint with this manifest."""
    return f"{folder.step_name(step)}-{manifest_codec.digest(manifest).hexdigest()[:8]}"


def step_of(name: str) -> int:
    """Return the step of a folder name, or -1 for other names."""
    found = _FOLDER.fullmatch(name)
    return int(found[1]) if found else -1


class MemoryCheckpointStore:
    """Folder of one run on one host, shared by its ranks there. Methods raise OSError."""

    def __init__(self, root: Path) -> None:
        """Create the folder; FileExistsError if another user owns it or can read it."""
        self.root = root
        root.parent.mkdir(parents=True, exist_ok=True)
        root.mkdir(mode=0o700, exist_ok=True)
        found = root.lstat()
        is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
        if not is_own or stat.S_IMODE(found.st_mode) & 0o077:
            raise FileExistsError(0, f"{root} is not private to this user")

    @property
    def free(self) -> int:
        """Free bytes."""
        return shutil.disk_usage(self.root).free

    @contextmanager
    def create(self, where: str, name: str) -> Iterator[BinaryIO]:
        """Open a new file of a checkpoint, renamed when complete. ValueError for invalid names."""
        if step_of(where) < 0 or not files.is_name(name):
            raise ValueError(f"{where[:40]!r}, {name[:40]!r}: not the name of a checkpoint file")
        place = self.root / where
        place.mkdir(mode=0o700, exist_ok=True)
        # Unique per thread: the first rank and a receiver thread may write the same file.
        beside = place / f".{name}.{os.getpid()}-{threading.get_ident()}.new"
        with files.create_file(beside) as file:
            yield file
        beside.rename(place / name)

    def copy(self, path: Path, where: str) -> Path:
        """Copy a file into the folder of a checkpoint; return its path there."""
        with (
            files.open_for_reading(path) as (source, size),
            self.create(where, path.name) as target,
        ):
            done = 0
            while done < size:
                got = os.sendfile(target.fileno(), source.fileno(), done, min(_CHUNK, size - done))
                if not got:
                    raise OSError(0, f"{path.name} was truncated while it was copied")
                done += got
        return self.root / where / path.name

    def inventory(self) -> FileSizes:
        """Return the sizes of the complete files by checkpoint, without those being deleted."""
        found: FileSizes = {}
        for place in self._folders():
            with suppress(FileNotFoundError):  # another rank of this host is deleting it
                found[place.name] = {
                    file.name: file.lstat().st_size
                    for file in place.iterdir()
                    if files.is_name(file.name) and stat.S_ISREG(file.lstat().st_mode)
                }
        return found

    def manifest(self, where: str) -> CheckpointManifest | None:
        """Return the manifest of a checkpoint, or None if it is missing or incomplete."""
        try:
            with files.open_for_reading(self.root / where / NAME) as (file, size):
                data = files.read(file, min(size, manifest_codec.LARGEST))
            found = manifest_codec.decode(data)
        except (OSError, manifest_codec.CorruptManifestError):
            return None
        return found if folder_name(found.step, data) == where else None

    def drop(self, keep: Collection[str]) -> None:
        """Delete all checkpoints except some."""
        for place in self._folders():
            if place.name not in keep:
                shutil.rmtree(place, ignore_errors=True)

    def remove(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.root, ignore_errors=True)

    def _folders(self) -> list[Path]:
        try:
            return sorted(path for path in self.root.iterdir() if step_of(path.name) >= 0)
        except OSError:
            return []
