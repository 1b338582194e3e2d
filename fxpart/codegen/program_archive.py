"""Files of an exported program.

plan.json: the plan, as given.
program.json: the ProgramSpec; program_lane<l>.json: that of mesh rank l, if it differs.
stage<k>.py: the module of stage k; stage<k>_lane<l>.py: that of mesh rank l, if it differs.
rank<r>.txt: the actions of rank r.
constants.safetensors: lifted constants and buffers that no checkpoint stores.
manifest.json: a SHA-256 digest of each of the files above.
manifest.sig: the signature of manifest.json, if it was exported with a key.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import safetensors.torch
import torch
from safetensors import SafetensorError

from fxpart.checkpoint.signature import SIGNATURE, KeySource, SigningKey
from fxpart.codegen.stage_loader import load_stage
from fxpart.errors import FxpartError, Problem, error, short
from fxpart.files import from_json, read_bytes
from fxpart.program.spec import ProgramSpec

MANIFEST = "manifest.json"
_PLAIN = re.compile(r"[a-z0-9_]+\.(py|json|txt|safetensors)")
_LARGEST = 1 << 24  # maximum bytes of a manifest
_LARGEST_FILE = 1 << 40  # maximum bytes of any other file


# Errors from files with correct digests but invalid content. torch and safetensors raise several
# types for an invalid header.
_UNFIT = (KeyError, msgspec.MsgspecError, SafetensorError, ValueError, TypeError, ArithmeticError,
          RuntimeError)  # fmt: skip


class ProgramManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The files of an exported program with their SHA-256 digests in hexadecimal."""

    format: Literal["fxpart-program"] = "fxpart-program"
    version: Literal[2] = 2
    files: dict[str, str]


@dataclass(frozen=True)
class ProgramArchive:
    """A loaded program: description, stage modules (on the meta device) and file contents.

    spec, modules: of mesh rank 0; modules by stage index, only those requested. actions: the text
    for each rank. files: the verified bytes of every file.
    """

    spec: ProgramSpec
    modules: dict[int, torch.nn.Module]
    plan: str
    actions: tuple[str, ...]
    constants: dict[str, torch.Tensor]
    files: Mapping[str, bytes]

    def mesh_rank_program(self, index: int) -> tuple[ProgramSpec, tuple[str, ...]]:
        """Return the program of a mesh rank and its stage sources; raise FXP505 if invalid."""
        own = self.files.get(name := f"program_lane{index}.json")
        try:
            spec = self.spec if own is None else from_json(own, ProgramSpec)
            stages = range(len(spec.stages))
            names = [(f"stage{i}_lane{index}.py", f"stage{i}.py") for i in stages]
            texts = [self.files.get(name, self.files[shared]) for name, shared in names]
            return spec, tuple(text.decode() for text in texts)
        except _UNFIT as cause:
            raise _changed(Path(name), f"its content is inconsistent: {cause}") from cause


def export(
    directory: str | Path,
    *,
    plan: str,
    spec: ProgramSpec,
    sources: Sequence[str],
    actions: Sequence[str],
    constants: Mapping[str, torch.Tensor] | None = None,
    mesh_ranks: Sequence[tuple[ProgramSpec, Sequence[str]]] = (),
    sign: KeySource = None,
) -> tuple[Path, ...]:
    """Write a program into a folder and return the files, with manifest and signature last.

    plan: the plan's text. sources: the module text of each stage. actions: the text for each rank.
    mesh_ranks: description and texts of the other mesh ranks, for stages on several ranks. The
    files are written to a temporary folder, which is then renamed, so that readers never see a mix
    of two programs. The same input gives the same bytes. sign: a file with a secret key, which
    signs the manifest. Raise FXP603 if the folder contains other files or cannot be written.
    """
    target, key = Path(directory).absolute(), SigningKey.load(sign)
    files = _contents(plan, spec, sources, actions, constants or {})
    for index, (own, texts) in enumerate(mesh_ranks, start=1):
        files.update(_mesh_rank_files(index, own, texts, spec, sources))
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    files[MANIFEST] = _json(ProgramManifest(files=digests))
    if key is not None:
        files[SIGNATURE] = key.sign(files[MANIFEST])
    try:
        _replace(target, files)
    except OSError as cause:
        raise error(
            "FXP603", where=str(directory), why=str(cause), fix="choose another folder"
        ) from cause
    return tuple(target / name for name in files)


def _contents(
    plan: str,
    spec: ProgramSpec,
    sources: Sequence[str],
    actions: Sequence[str],
    constants: Mapping[str, torch.Tensor],
) -> dict[str, bytes]:
    assert len(sources) == len(spec.stages), "one text for each stage"
    files = {"plan.json": plan.encode(), "program.json": _json(spec)}
    files.update((f"stage{i}.py", text.encode()) for i, text in enumerate(sources))
    files.update((f"rank{i}.txt", text.encode()) for i, text in enumerate(actions))
    if constants:
        # Clone, because safetensors rejects tensors that share memory.
        tensors = {n: constants[n].detach().cpu().contiguous().clone() for n in sorted(constants)}
        files["constants.safetensors"] = safetensors.torch.save(tensors)
    return files


def _mesh_rank_files(
    index: int,
    spec: ProgramSpec,
    sources: Sequence[str],
    first: ProgramSpec,
    shared: Sequence[str],
) -> dict[str, bytes]:
    """Return the files in which a mesh rank differs from rank 0."""
    pairs = enumerate(zip(sources, shared, strict=True))
    files = {f"stage{i}_lane{index}.py": a.encode() for i, (a, b) in pairs if a != b}
    if spec != first:
        files[f"program_lane{index}.json"] = _json(spec)
    return files


def _json(value: msgspec.Struct) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value, order="sorted"), indent=1) + b"\n"


def _replace(target: Path, files: Mapping[str, bytes]) -> None:
    """Write a new folder, then rename it to the target."""
    if target == Path.cwd():
        raise FileExistsError("it is the current folder, which cannot be replaced")
    if target.exists() and not _ours(target):
        raise FileExistsError(f"{target.name} contains files that are not an exported program")
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        fresh.chmod(0o755)
        for name, data in files.items():
            with open(fresh / name, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        if target.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
            target.rename(old / "old")
            fresh.rename(target)
            shutil.rmtree(old)
        else:
            fresh.rename(target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _ours(target: Path) -> bool:
    """Return whether a folder may be replaced: it is empty or contains only an exported program."""
    if not target.is_dir() or target.is_symlink():
        return False
    names = {entry.name for entry in target.iterdir()} - {"__pycache__", SIGNATURE}
    return not names or (MANIFEST in names and all(_PLAIN.fullmatch(name) for name in names))


def load_exported(
    directory: str | Path,
    *,
    stages: Iterable[int] | None = None,
    device: str | torch.device = "cpu",
    sign: KeySource = None,
) -> ProgramArchive:
    """Load an exported program. ``stages``: the modules to load, all by default.

    All digests are verified before anything is executed, and exactly the verified bytes are used.
    Raise FXP505 with each file that is missing or changed. sign: a file with a secret key; FXP524
    if it has not signed the program.
    """
    folder = Path(directory)
    files = _verified(folder, SigningKey.load(sign))
    try:
        spec = from_json(files["program.json"], ProgramSpec)
        constants = safetensors.torch.load(files.get("constants.safetensors", _EMPTY))
        wanted = range(len(spec.stages)) if stages is None else stages
        texts = {index: files[f"stage{index}.py"].decode() for index in wanted}
        plan = files["plan.json"].decode()
        count = sum(1 for name in files if re.fullmatch(r"rank\d+\.txt", name))
        actions = tuple(files[f"rank{rank}.txt"].decode() for rank in range(count))
    except _UNFIT as cause:
        raise _changed(folder, f"its content is inconsistent: {cause}") from cause
    modules = {i: load_stage(text, spec.stages[i], device) for i, text in texts.items()}
    return ProgramArchive(spec, modules, plan, actions, constants, files)


_EMPTY = safetensors.torch.save({})


def _verified(folder: Path, key: SigningKey | None) -> dict[str, bytes]:
    """Return the bytes of every file of the manifest, after checking its digest."""
    path = folder / MANIFEST
    try:
        data = read_bytes(path, _LARGEST)
        if key is not None:
            key.check(folder, data)
        manifest = from_json(data, ProgramManifest)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as cause:
        raise _changed(folder, f"{MANIFEST} cannot be read: {cause}") from cause
    files: dict[str, bytes] = {}
    problems: list[Problem] = []
    for name, digest in manifest.files.items():
        if not _PLAIN.fullmatch(name):
            problems.extend(_changed(folder, f"{short(name)!a} is not a program file").problems)
            continue
        try:
            files[name] = read_bytes(folder / name, _LARGEST_FILE)
        except OSError as cause:
            problems.extend(_changed(folder / name, cause.strerror or str(cause)).problems)
            continue
        if hashlib.sha256(files[name]).hexdigest() != digest:
            why = "its content does not match the manifest"
            problems.extend(_changed(folder / name, why).problems)
    if problems:
        raise FxpartError(problems)
    return files


def _changed(path: Path, why: str) -> FxpartError:
    return error("FXP505", where=str(path), why=why, fix="export the program again")
