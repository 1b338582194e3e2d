"""Export of trained weights as a Hugging Face safetensors checkpoint, tensor by tensor.

model.safetensors                   or, if it would be too large,
model-00001-of-00002.safetensors    its shards, and
model.safetensors.index.json        the shard of each tensor
config.json                         of a transformers model, for from_pretrained
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fxpart.errors import error
from fxpart.runtime.dtypes import torch_dtype
from fxpart.runtime.state.model_state import ModelState
from fxpart.runtime.transport.agreement import agree, convert_transport_errors

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
    torch.bool: "BOOL",
}  # fmt: skip


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
    shards = _split_into_shards(kept, shard_bytes)
    writes = 0 in state.transport.local
    target = Path(directory).absolute()
    fresh = agree(
        state.transport, "where weights are saved",
        lambda: (_make_temporary_folder(target) if writes else None, f"{target} {shard_bytes}"),
    )  # fmt: skip
    failed: list[OSError] = []
    try:
        for file, members in shards.items():
            with convert_transport_errors(state.transport, "saving weights"):
                tensors = _iterate_tensors(state, unused, members)
                if fresh is None:
                    for _ in tensors:
                        pass
                else:
                    _write(fresh / file, members, tensors, failed)
        agree(
            state.transport, "saving weights",
            lambda: (fresh is None or _finish_folder(target, fresh, shards, config, failed), ""),
        )  # fmt: skip
    finally:
        if fresh is not None:
            shutil.rmtree(fresh, ignore_errors=True)
    return tuple(target / name for name in _list_files(shards, config))


def _split_into_shards(
    kept: Sequence[_ExportedTensor], largest: int
) -> dict[str, list[_ExportedTensor]]:
    """Return the tensors of each file, in order; a tensor above the limit gets its own file."""
    groups: list[list[_ExportedTensor]] = [[]]
    size = 0
    for each in kept:
        if groups[-1] and size + each.bytes > largest:
            groups.append([])
            size = 0
        groups[-1].append(each)
        size += each.bytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    count = len(groups)
    return {
        f"model-{number:05}-of-{count:05}.safetensors": group
        for number, group in enumerate(groups, 1)
    }


def _list_files(shards: Mapping[str, Sequence[_ExportedTensor]], config: str) -> list[str]:
    found = list(shards)
    if len(shards) > 1:
        found.append("model.safetensors.index.json")
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
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for each in members:
        offsets = [start, start + each.bytes]
        header[each.file_name] = {
            "dtype": _NAMES[each.dtype], "shape": list(each.shape), "data_offsets": offsets,
        }  # fmt: skip
        start += each.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with _open_file(path, failed) as file:
        _write_bytes(file, len(text).to_bytes(8, "little") + text, failed)
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
    shards: Mapping[str, Sequence[_ExportedTensor]],
    config: str,
    failed: Sequence[OSError],
) -> bool:
    """Write index and configuration, and rename the temporary folder to the target."""
    try:
        if failed:
            raise failed[0]
        if len(shards) > 1:
            members = [(each, file) for file, group in shards.items() for each in group]
            index = {
                "metadata": {"total_size": sum(each.bytes for each, _ in members)},
                "weight_map": {each.file_name: file for each, file in members},
            }
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (fresh / "model.safetensors.index.json").write_text(text, encoding="utf-8")
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
