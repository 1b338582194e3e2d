"""Export of trained weights as a Hugging Face safetensors checkpoint, tensor by tensor.

model.safetensors                   or, if it would be too large,
model-00001-of-00002.safetensors    its shards, and
model.safetensors.index.json        the shard of each tensor
config.json                         of a transformers model, for from_pretrained
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fxpart.checkpoint import safetensors_header
from fxpart.checkpoint.dtypes import DTYPES
from fxpart.checkpoint.safetensors_index import INDEX, format_index, split_into_files
from fxpart.errors import error
from fxpart.runtime.dtypes import torch_dtype
from fxpart.runtime.state.model_state import ModelState
from fxpart.runtime.transport.agreement import agree, convert_transport_errors


@dataclass(frozen=True)
class _ExportedTensor:
    """A tensor of the checkpoint. file_name: its name there."""

    name: str
    file_name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Its size in the file."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def word(self) -> str:
        """Its dtype in the file; FXP603 if the format has none."""
        dtype = str(self.dtype).removeprefix("torch.")
        word = DTYPES[dtype][1]
        if word is None:
            why, fix = f"safetensors has no {dtype}", "convert it to another dtype"
            raise error("FXP603", where=self.file_name, why=why, fix=fix)
        return word


def save_pretrained(
    state: ModelState,
    unused: Mapping[str, torch.Tensor],
    directory: str | Path,
    *,
    names: Mapping[str, str],
    config: str,
    shard_bytes: int,
) -> tuple[Path, ...]:
    """Write the checkpoint of :meth:`.stateful_trainer.StatefulTrainer.save_pretrained`.

    Rank 0 receives one tensor at a time from its owners and writes it before the next. unused:
    state that no stage owns. names: in the files, where these differ. config: the
    text of config.json, empty for none.
    """
    kept = [
        _ExportedTensor(
            name, names.get(name, name), torch_dtype(entry.spec.dtype), entry.pieces.shape
        )
        for name, entry in state.saved()
    ]
    kept += [
        _ExportedTensor(name, names.get(name, name), tensor.dtype, tuple(tensor.shape))
        for name, tensor in unused.items()
    ]
    by_name = {each.file_name: each for each in kept}
    sizes = {name: each.bytes for name, each in by_name.items()}
    shards = split_into_files(sizes, shard_bytes)
    index = format_index(shards, sizes) if len(shards) > 1 else ""
    writes = 0 in state.transport.local
    target = Path(directory).absolute()
    fresh = agree(
        state.transport, "where weights are saved",
        lambda: (
            _make_temporary_folder(target) if all(e.word for e in kept) and writes else None,
            f"{target} {shard_bytes}",
        ),
    )  # fmt: skip
    failed: list[OSError] = []
    try:
        for file, members in shards.items():
            own = [by_name[name] for name in members]
            with convert_transport_errors(state.transport, "saving weights"):
                tensors = _iterate_tensors(state, unused, own)
                if fresh is None:
                    for _ in tensors:
                        pass
                else:
                    _write(fresh / file, own, tensors, failed)
        agree(
            state.transport, "saving weights",
            lambda: (fresh is None or _finish_folder(target, fresh, index, config, failed), ""),
        )  # fmt: skip
    finally:
        if fresh is not None:
            shutil.rmtree(fresh, ignore_errors=True)
    return tuple(target / name for name in _list_files(shards, config))


def _list_files(shards: Iterable[str], config: str) -> list[str]:
    found = list(shards)
    if len(found) > 1:
        found.append(INDEX)
    return [*found, "config.json"] if config else found


def _iterate_tensors(
    state: ModelState, unused: Mapping[str, torch.Tensor], members: Sequence[_ExportedTensor]
) -> Iterator[torch.Tensor | None]:
    """Yield the tensors in order on rank 0, None elsewhere; every rank must iterate over all."""
    for each in members:
        if each.name in unused:
            yield unused[each.name]
            continue
        entry = state.entries[each.name]
        yield state.gather({each.name: entry.owned()}, first_only=True).get(each.name)


def _write(
    path: Path,
    members: Sequence[_ExportedTensor],
    tensors: Iterator[torch.Tensor | None],
    failed: list[OSError],
) -> None:
    """Write one file; after an error, still receive the tensors that other ranks send."""
    entries = [(each.file_name, each.word, each.shape, each.bytes) for each in members]
    with _open_file(path, failed) as file:
        _write_bytes(file, safetensors_header.encode(entries, {"format": "pt"}), failed)
        for tensor in tensors:
            assert tensor is not None, "rank 0 receives every tensor"
            if tensor.numel():
                flat = tensor.detach().cpu().contiguous().reshape(-1)
                raw: Any = flat.view(torch.uint8).numpy()
                _write_bytes(file, memoryview(raw), failed)


@contextmanager
def _open_file(path: Path, failed: list[OSError]) -> Iterator[int]:
    """Open a new file, -1 if that fails; sync it to disk at the end."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except OSError as cause:
        failed.append(cause)
        yield -1
        return
    try:
        yield file
        os.fsync(file)
    except OSError as cause:
        failed.append(cause)
    finally:
        os.close(file)


def _write_bytes(file: int, data: bytes | memoryview, failed: list[OSError]) -> None:
    """Write all bytes, or add the error to the list; do nothing after an error."""
    rest = memoryview(data)
    try:
        while rest and not failed:
            rest = rest[os.write(file, rest) :]
    except OSError as cause:
        failed.append(cause)


def _make_temporary_folder(target: Path) -> Path:
    """Create a temporary folder beside the target."""
    try:
        if target.exists() and not target.is_dir():
            raise FileExistsError("it is not a folder")
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        fresh.chmod(0o755)
    except OSError as cause:
        raise _make_error(target, cause) from cause
    return fresh


def _finish_folder(
    target: Path,
    fresh: Path,
    index: str,
    config: str,
    failed: Sequence[OSError],
) -> bool:
    """Write index and configuration, and rename the temporary folder to the target."""
    try:
        if failed:
            raise failed[0]
        if index:
            (fresh / INDEX).write_text(index, encoding="utf-8")
        if config:
            (fresh / "config.json").write_text(config, encoding="utf-8")
        _replace_folder(target, fresh)
    except OSError as cause:
        raise _make_error(target, cause) from cause
    return True


def _replace_folder(target: Path, fresh: Path) -> None:
    """Replace the target; keep its files that are not weights, such as a tokenizer."""
    if not target.exists():
        fresh.rename(target)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    target.rename(old / "old")
    fresh.rename(target)
    for entry in (old / "old").iterdir():
        weights = entry.name.endswith((".safetensors", ".safetensors.index.json"))
        if not weights and not (target / entry.name).exists():
            entry.rename(target / entry.name)
    shutil.rmtree(old)


def _make_error(target: Path, cause: OSError) -> Exception:
    return error("FXP603", where=str(target), why=str(cause), fix="choose another folder")
