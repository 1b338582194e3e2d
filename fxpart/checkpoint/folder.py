"""Folder of checkpoints: begin, complete by a rename, list and prune.

Names of incomplete checkpoints begin with a dot: they are never read, and removed by the next
:func:`prune`.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

from fxpart.checkpoint import files, manifest_codec
from fxpart.checkpoint.manifest import NAME, CheckpointManifest
from fxpart.checkpoint.reader import Checkpoint, Progress
from fxpart.checkpoint.signature import SIGNATURE, SigningKey
from fxpart.errors import FxpartError, Problem, error

_STEP = re.compile(r"step-(\d{10,18})")
_PARTIAL = re.compile(r"\.partial-g(\d{1,18})-step-(\d{10,18})")
_ASIDE = re.compile(r"\.(?:dropped|damaged)-step-(\d{10,18})(?:-\d+)?")
FEWEST = 2


def step_name(step: int) -> str:
    """Return the folder name, ``step-0000000120``."""
    return f"step-{step:010d}"


def step_of(path: Path) -> int:
    """Return the step of a checkpoint folder, or -1 for another name."""
    found = _STEP.fullmatch(path.name)
    return int(found[1]) if found else -1


def begin(root: Path, step: int, generation: int) -> Path:
    """Return the folder that the ranks write into, created by any of them. FXP513."""
    partial = root / f".partial-g{generation}-{step_name(step)}"
    with files.convert_save_errors(str(root)):
        partial.mkdir(parents=True, exist_ok=True)
        if partial.is_symlink():  # ranks would write to the link's target
            raise OSError(0, f"{partial.name} is a symbolic link")
    return partial


def commit(partial: Path, manifest: CheckpointManifest, key: SigningKey | None = None) -> Path:
    """Complete a checkpoint: write its manifest, then rename; return its folder. By one rank.

    All ranks' files must exist, which is checked. An intact checkpoint of the same step is kept and
    this one deleted; a damaged one is moved aside. key: signs the manifest. FXP513.
    """
    root = partial.parent
    final = root / step_name(manifest.step)
    with files.convert_save_errors(str(root)):
        data = _encode_manifest(manifest, root)
        with files.create_file(partial / NAME) as file:
            files.write(file, data)
        for path in partial.iterdir():  # rank manifests are merged into the manifest
            if path.name != NAME and path.name not in manifest.files:
                path.unlink()
        if key is not None:
            with files.create_file(partial / SIGNATURE) as file:
                files.write(file, key.sign(data))
        files.sync_folder(partial)
        _check_complete(partial)
        if final.is_dir():
            if _open(final, verify=True, key=key) is not None:
                shutil.rmtree(partial)
                return final
            _move_aside(final, "damaged")
        partial.rename(final)
        files.sync_folder(root)
    return final


def discard(partial: Path) -> None:
    """Remove an incomplete checkpoint, as far as possible."""
    shutil.rmtree(partial, ignore_errors=True)


def list_complete(root: Path) -> list[Path]:
    """Return the complete checkpoints, newest first, without checking for damage."""
    try:
        found = [path for path in root.iterdir() if step_of(path) >= 0 and path.is_dir()]
    except OSError:
        return []
    return sorted(found, key=step_of, reverse=True)


def find_checkpoints(path: Path) -> list[Path]:
    """Return the checkpoints at a path, newest first: itself, those in it, or a run's. FXP511."""
    if (path / NAME).exists():
        return [path]
    complete = list_complete(path) or list_complete(path / "checkpoints")
    if not complete:
        why = "there is no checkpoint" if path.is_dir() else "the folder does not exist"
        fix = "pass a run's folder, its checkpoints folder, or a checkpoint in it"
        raise error("FXP511", where=str(path), why=why, fix=fix)
    return complete


def newest(root: Path, *, verify: bool = True, progress: Progress | None = None) -> Checkpoint:
    """Return the newest intact checkpoint; ``skipped`` has the problems of newer ones.

    verify: compare all digests, not only sizes, headers and the manifest. FXP511 with every problem
    if there is none.
    """
    skipped: list[Problem] = []
    complete = list_complete(root)
    for path in complete:
        try:
            checkpoint = Checkpoint.open(path)
            problems = checkpoint.verify(progress) if verify else []
        except FxpartError as fault:
            problems = list(fault.problems)
        if not problems:
            return replace(checkpoint, skipped=tuple(skipped))
        skipped += problems
    why = (
        f"all {len(complete)} checkpoints are damaged"
        if len(complete) != 1
        else "the only one is damaged"
    )
    fix = f"run fxpart ckpt verify {root}, or use a new folder"
    none = Problem("FXP511", str(root), why if complete else "there is no checkpoint", fix)
    raise FxpartError([none, *skipped])


def prune(
    root: Path,
    keep: int = FEWEST,
    *,
    generation: int = 0,
    step: int | None = None,
    verify: bool = False,
    dry: bool = False,
    key: SigningKey | None = None,
) -> list[Path]:
    """Remove all but the newest ``keep`` readable checkpoints, and remains of earlier generations.

    The newest one with finite state is kept, too. Damaged ones do not count; those newer than the
    oldest kept one stay for inspection. Return the removed folders. step: of the checkpoint just
    saved; later ones do not count, because the run has resumed before them. verify: compare all
    digests of those that count. dry: remove nothing. key: those that it has not signed count as
    damaged. FXP513 if removal fails.
    """
    assert keep >= FEWEST, f"at least {FEWEST} are kept"
    dropped: list[Path] = []
    with files.convert_save_errors(str(root)):
        kept, finite = 0, False
        for path in list_complete(root):
            if kept >= keep:
                # Of a run whose state is not finite any more, the last finite one is kept, too.
                last = None if finite else _open(path, verify=verify, key=key)
                if last is not None and last.manifest.is_finite:
                    finite = True
                else:
                    dropped.append(path)
            elif step is not None and step_of(path) > step:
                continue
            elif (found := _open(path, verify=verify, key=key)) is not None:
                kept += 1
                finite = finite or found.manifest.is_finite
        leftovers = _list_leftovers(root, generation)
        if dry:
            return dropped + leftovers
        for path in dropped:
            # Renamed first, so that a partly removed one never looks complete.
            _remove(_move_aside(path, "dropped"))
        for path in leftovers:
            _remove(path)
        if dropped or leftovers:
            files.sync_folder(root)
    return dropped + leftovers


def list_unfinished(root: Path) -> list[Path]:
    """Return the incomplete checkpoints of any generation."""
    try:
        return sorted(path for path in root.iterdir() if _PARTIAL.fullmatch(path.name))
    except OSError:
        return []


def _list_leftovers(root: Path, generation: int) -> list[Path]:
    """Return incomplete ones of earlier generations, and those moved aside before the oldest
    kept.
    """
    steps = [step_of(path) for path in list_complete(root)]
    found = []
    for path in root.iterdir():
        partial, moved = _PARTIAL.fullmatch(path.name), _ASIDE.fullmatch(path.name)
        is_old = partial is not None and int(partial[1]) < generation
        if moved is not None:
            is_old = path.name.startswith(".dropped") or int(moved[1]) < min(steps, default=0)
        if is_old:
            found.append(path)
    return found


def _move_aside(path: Path, label: str) -> Path:
    """Rename a checkpoint to a name that is never read."""
    for number in range(1, 1000):
        target = path.with_name(f".{label}-{path.name}-{number}")
        if not os.path.lexists(target):
            return path.rename(target)
    raise OSError(0, f"there are too many {label} copies of {path.name}")


def _remove(path: Path) -> None:
    """Remove a folder, or a link itself."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)


def set_aside(path: Path) -> None:
    """Rename a checkpoint so that it is never restored; it stays for inspection. FXP513."""
    with files.convert_save_errors(str(path.parent)):
        _move_aside(path, "damaged")


def _open(path: Path, *, verify: bool, key: SigningKey | None) -> Checkpoint | None:
    """Return a readable checkpoint; verify: compare all digests."""
    try:
        found = Checkpoint.open(path, key)
        return None if verify and found.verify() else found
    except FxpartError:
        return None


def _check_complete(partial: Path) -> None:
    """Check that a checkpoint can be opened; FXP513 if a rank's file is missing or not visible."""
    try:
        Checkpoint.open(partial)
    except FxpartError as fault:
        first = fault.problems[0]
        fix = "use a folder that all ranks share"
        raise error("FXP513", where=first.where, why=first.why, fix=fix) from fault


def _encode_manifest(manifest: CheckpointManifest, root: Path) -> bytes:
    """Return the manifest's bytes; FXP513 for values that JSON cannot represent."""
    try:
        return manifest_codec.encode(manifest)
    except (TypeError, ValueError, RecursionError, OverflowError) as cause:
        fix = "use only numbers, strings, lists, tuples and dicts in extra data"
        raise error("FXP513", where=str(root), why=str(cause), fix=fix) from cause
