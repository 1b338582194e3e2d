"""A run's part of this machine's memory: a folder in a file system that no disk is behind (tmpfs).

<root>/step-0000000120-1c9e0d42/rank-00002.safetensors     as the checkpoint on the disk has it
                               /manifest.json

It outlives the processes, not the machine. Two saves of the same step are told apart by the digest
of their manifests. Only its owner may look into it.
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
Held = dict[str, dict[str, int]]


def default_root(identity: str) -> Path:
    """Where a run's copies are on this machine. identity: the run's, which no other has."""
    here = _SHARED if os.access(_SHARED, os.W_OK) else Path(tempfile.gettempdir())
    return here / f"fxpart-{os.getuid()}-{identity}"


def folder_name(step: int, manifest: bytes) -> str:
    """The folder of a checkpoint with this manifest."""
    return f"{folder.step_name(step)}-{manifest_codec.digest(manifest).hexdigest()[:8]}"


def step_of(name: str) -> int:
    """The step of a folder's name; -1 for another name."""
    found = _FOLDER.fullmatch(name)
    return int(found[1]) if found else -1


class MemoryCheckpointStore:
    """The folder of one run on one machine, which its ranks there share; OSError."""

    def __init__(self, root: Path) -> None:
        """Make it; FileExistsError where somebody else has, or may look into it."""
        self.root = root
        root.parent.mkdir(parents=True, exist_ok=True)
        root.mkdir(mode=0o700, exist_ok=True)
        found = root.lstat()
        mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
        if not mine or stat.S_IMODE(found.st_mode) & 0o077:
            raise FileExistsError(0, f"{root} is not this user's alone")

    @property
    def free(self) -> int:
        """Bytes that still fit."""
        return shutil.disk_usage(self.root).free

    @contextmanager
    def filling(self, where: str, name: str) -> Iterator[BinaryIO]:
        """A file of a checkpoint, there under its name once it is whole. ValueError for no name."""
        if step_of(where) < 0 or not files.is_name(name):
            raise ValueError(f"{where[:40]!r}, {name[:40]!r}: no file of a checkpoint")
        place = self.root / where
        place.mkdir(mode=0o700, exist_ok=True)
        # Of its own: a machine's first rank and a partner's messenger may bring the same file.
        beside = place / f".{name}.{os.getpid()}-{threading.get_ident()}.new"
        with files.create_file(beside) as file:
            yield file
        beside.rename(place / name)

    def copy(self, path: Path, where: str) -> Path:
        """Copy a file into a checkpoint's folder; its path there."""
        with (
            files.open_for_reading(path) as (source, size),
            self.filling(where, path.name) as target,
        ):
            done = 0
            while done < size:
                got = os.sendfile(target.fileno(), source.fileno(), done, min(_CHUNK, size - done))
                if not got:
                    raise OSError(0, f"{path.name} has become shorter")
                done += got
        return self.root / where / path.name

    def held(self) -> Held:
        """The whole files of each checkpoint, with their bytes; none that goes at this moment."""
        found: Held = {}
        for place in self._folders():
            with suppress(FileNotFoundError):  # another rank of this machine gives it back
                found[place.name] = {
                    file.name: file.lstat().st_size
                    for file in place.iterdir()
                    if files.is_name(file.name) and stat.S_ISREG(file.lstat().st_mode)
                }
        return found

    def manifest(self, where: str) -> CheckpointManifest | None:
        """The manifest of a checkpoint, if it is here and whole."""
        try:
            with files.open_for_reading(self.root / where / NAME) as (file, size):
                data = files.read(file, min(size, manifest_codec.LARGEST))
            found = manifest_codec.decode(data)
        except (OSError, manifest_codec.CorruptManifestError):
            return None
        return found if folder_name(found.step, data) == where else None

    def drop(self, keep: Collection[str]) -> None:
        """Remove all checkpoints but some."""
        for place in self._folders():
            if place.name not in keep:
                shutil.rmtree(place, ignore_errors=True)

    def remove(self) -> None:
        """Give all of the memory back."""
        shutil.rmtree(self.root, ignore_errors=True)

    def _folders(self) -> list[Path]:
        try:
            return sorted(path for path in self.root.iterdir() if step_of(path.name) >= 0)
        except OSError:
            return []
