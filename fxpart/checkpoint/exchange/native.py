"""fxpart checkpoints as a source and as a target."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from fxpart.checkpoint import folder
from fxpart.checkpoint.exchange.source import (
    CheckpointMetadata,
    CheckpointSource,
    RankShard,
    TensorType,
)
from fxpart.checkpoint.manifest_merge import merge
from fxpart.checkpoint.reader import Checkpoint
from fxpart.checkpoint.regions import Bytes, make_full_region
from fxpart.checkpoint.signature import SigningKey
from fxpart.checkpoint.writer import PLAN, CheckpointShard, write_rank, write_text
from fxpart.errors import error

_RANK = re.compile(r"rank-(\d{1,9})\.safetensors")
_FIELDS = ("step", "calls", "seed", "fingerprint", "plan", "weights", "values", "groups", "extra")
_GROUP = 256_000_000  # bytes of an output file, which are in memory at once


class NativeCheckpointSource:
    """A checkpoint as a source; of a run's folder, the newest one. FXP510, FXP511, FXP524."""

    def __init__(self, path: Path, key: SigningKey | None = None) -> None:
        """Open it. key: verifies its signature."""
        self.checkpoint = Checkpoint.open(folder.find_checkpoints(path)[0], key)
        manifest = self.checkpoint.manifest
        fields = {name: getattr(manifest, name) for name in _FIELDS}
        self.rest = CheckpointMetadata(**fields, plan_text=self.checkpoint.plan())
        self.tensors = {k: TensorType(t.dtype, t.shape) for k, t in manifest.tensors.items()}

    def read(self, key: str) -> Bytes:
        """Concatenate the verified parts of a tensor."""
        return self.checkpoint.read(key).reshape(-1)

    def layout(self, key: str) -> Sequence[RankShard]:
        """Return the parts of the ranks that wrote it."""
        found = []
        for part in self.checkpoint.manifest.tensors[key].parts:
            rank = _RANK.fullmatch(part.file)
            if rank is None or part.flat is not None or any(len(dim) != 1 for dim in part.ranges):
                return ()
            found.append(RankShard(int(rank[1]), tuple(dim[0] for dim in part.ranges)))
        return found


def write_native(root: Path, source: CheckpointSource, key: SigningKey | None = None) -> Path:
    """Write a checkpoint into a folder of checkpoints; return its folder.

    Any plan's ranks can load it. key: signs it. FXP603 if the folder has a checkpoint of that step,
    FXP513 if it cannot be written.
    """
    rest = source.rest
    final = root / folder.step_name(rest.step)
    if final.exists():
        why, fix = "there is a checkpoint of that step", "use another folder"
        raise error("FXP603", where=str(final), why=why, fix=fix)
    partial = folder.begin(root, rest.step, 0)
    try:
        written = [
            write_rank(partial, number, pieces) for number, pieces in enumerate(_pieces(source))
        ]
        files = {PLAN: write_text(partial, PLAN, rest.plan_text)} if rest.plan_text else {}
        fields = {name: getattr(rest, name) for name in _FIELDS}
        manifest = merge(written, **fields, generation=0, files=files)
        return folder.commit(partial, manifest, key)
    except BaseException:
        folder.discard(partial)
        raise


def is_native(path: Path) -> bool:
    """Return whether there is an fxpart checkpoint at a path."""
    return (path / "manifest.json").exists() or bool(
        folder.list_complete(path) or folder.list_complete(path / "checkpoints")
    )


def _pieces(source: CheckpointSource) -> Iterator[list[CheckpointShard]]:
    """Group whole tensors into files of limited size."""
    found: list[CheckpointShard] = []
    size_ = 0
    for key, tensor_type in source.tensors.items():
        if found and size_ + tensor_type.size > _GROUP:
            yield found
            found, size_ = [], 0
        region = make_full_region(tensor_type.shape)
        data = source.read(key)
        found.append(
            CheckpointShard(key, tensor_type.dtype, tensor_type.shape, region.ranges, None, data)
        )
        size_ += tensor_type.size
    yield found
