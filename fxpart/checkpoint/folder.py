"""The folder of checkpoints: one begun, made complete by a rename, found again, dropped.

What is not complete has a name that begins with a dot: it is never looked at, and goes with the
next :func:`prune`.
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
from fxpart.errors import FxpartError, Problem, error

_STEP = re.compile(r"step-(\d{10,18})")
_PARTIAL = re.compile(r"\.partial-g(\d{1,18})-step-(\d{10,18})")
_ASIDE = re.compile(r"\.(?:dropped|damaged)-step-(\d{10,18})(?:-\d+)?")
FEWEST = 2


def step_name(step: int) -> str:
    """``step-0000000120``."""
    return f"step-{step:010d}"


def step_of(path: Path) -> int:
    """The step of a checkpoint by its folder's name; -1 for another name."""
    found = _STEP.fullmatch(path.name)
    return int(found[1]) if found else -1


def begin(root: Path, step: int, generation: int) -> Path:
    """The folder that the ranks write into; any may make it. FXP513."""
    partial = root / f".partial-g{generation}-{step_name(step)}"
    with files.convert_save_errors(str(root)):
        partial.mkdir(parents=True, exist_ok=True)
        if partial.is_symlink():  # ranks would write wherever it leads
            raise OSError(0, f"{partial.name} is a link")
    return partial


def commit(partial: Path, manifest: CheckpointManifest) -> Path:
    """Make a checkpoint complete: its manifest, then one rename; its folder. By one rank.

    All ranks' files have to be there, which is looked at. Where the step has a checkpoint that is
    whole, that stays and this is dropped; one that is damaged is moved out of the way. FXP513.
    """
    root = partial.parent
    final = root / step_name(manifest.step)
    with files.convert_save_errors(str(root)):
        data = _encoded(manifest, root)
        with files.create_file(partial / NAME) as file:
            files.write(file, data)
        for path in partial.iterdir():  # what ranks told each other is in the manifest now
            if path.name != NAME and path.name not in manifest.files:
                path.unlink()
        files.sync_folder(partial)
        _check(partial)
        if final.is_dir():
            if _is_whole(final):
                shutil.rmtree(partial)
                return final
            _aside(final, "damaged")
        partial.rename(final)
        files.sync_folder(root)
    return final


def discard(partial: Path) -> None:
    """Remove a checkpoint that will not be completed, as far as it can be removed."""
    shutil.rmtree(partial, ignore_errors=True)


def list_complete(root: Path) -> list[Path]:
    """The complete checkpoints, newest first; whether they are whole is not asked."""
    try:
        found = [path for path in root.iterdir() if step_of(path) >= 0 and path.is_dir()]
    except OSError:
        return []
    return sorted(found, key=step_of, reverse=True)


def find_checkpoints(path: Path) -> list[Path]:
    """The checkpoints that a path means, newest first: itself, those in it, or a run's. FXP511."""
    if (path / NAME).exists():
        return [path]
    there = list_complete(path) or list_complete(path / "checkpoints")
    if not there:
        why = "there is none" if path.is_dir() else "there is no such folder"
        fix = "give a run's folder, its checkpoints folder, or one of those in it"
        raise error("FXP511", where=str(path), why=why, fix=fix)
    return there


def newest(root: Path, *, verify: bool = True, progress: Progress | None = None) -> Checkpoint:
    """The newest checkpoint that is whole; its ``skipped`` says what is wrong with newer ones.

    verify: compare every tensor, not sizes, headers and manifest alone. FXP511 where there is none,
    with every problem.
    """
    skipped: list[Problem] = []
    there = list_complete(root)
    for path in there:
        try:
            checkpoint = Checkpoint.open(path)
            problems = checkpoint.verify(progress) if verify else []
        except FxpartError as fault:
            problems = list(fault.problems)
        if not problems:
            return replace(checkpoint, skipped=tuple(skipped))
        skipped += problems
    why = (
        f"{len(there)} checkpoints, each damaged" if len(there) != 1 else "the only one is damaged"
    )
    fix = f"fxpart ckpt verify {root}; or begin in a new folder"
    none = Problem("FXP511", str(root), why if there else "there is none", fix)
    raise FxpartError([none, *skipped])


def prune(
    root: Path,
    keep: int = FEWEST,
    *,
    generation: int = 0,
    step: int | None = None,
    verify: bool = False,
    dry: bool = False,
) -> list[Path]:
    """Remove all but the newest ``keep`` that open, and what earlier generations left unfinished.

    Damaged ones do not count; those newer than the oldest that is kept stay to be looked at. The
    folders removed. step: of the one just saved; later ones do not count either, since the run has
    gone back behind them. verify: those that count are compared byte by byte. dry: nothing is
    removed. FXP513 where something cannot be removed.
    """
    assert keep >= FEWEST, f"at least {FEWEST} are kept"
    dropped: list[Path] = []
    with files.convert_save_errors(str(root)):
        kept = 0
        for path in list_complete(root):
            if kept >= keep:
                dropped.append(path)
            elif step is not None and step_of(path) > step:
                continue
            elif (_is_whole if verify else _opens)(path):
                kept += 1
        leftover = _leftover(root, generation)
        if dry:
            return dropped + leftover
        for path in dropped:
            # Renamed first: one that is removed half is never taken for a complete one.
            _remove(_aside(path, "dropped"))
        for path in leftover:
            _remove(path)
        if dropped or leftover:
            files.sync_folder(root)
    return dropped + leftover


def list_unfinished(root: Path) -> list[Path]:
    """What saves have begun and not completed, of any generation."""
    try:
        return sorted(path for path in root.iterdir() if _PARTIAL.fullmatch(path.name))
    except OSError:
        return []


def _leftover(root: Path, generation: int) -> list[Path]:
    """Unfinished ones of earlier generations, and what was moved aside before the oldest kept."""
    steps = [step_of(path) for path in list_complete(root)]
    found = []
    for path in root.iterdir():
        partial, aside = _PARTIAL.fullmatch(path.name), _ASIDE.fullmatch(path.name)
        old = partial is not None and int(partial[1]) < generation
        if aside is not None:
            old = path.name.startswith(".dropped") or int(aside[1]) < min(steps, default=0)
        if old:
            found.append(path)
    return found


def _aside(path: Path, word: str) -> Path:
    """Give a checkpoint a name that is never looked at."""
    for number in range(1, 1000):
        target = path.with_name(f".{word}-{path.name}-{number}")
        if not os.path.lexists(target):
            return path.rename(target)
    raise OSError(0, f"there are too many {word} ones of {path.name}")


def _remove(path: Path) -> None:
    """Remove a folder; of a link only the link."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)


def _opens(path: Path) -> bool:
    try:
        Checkpoint.open(path)
    except FxpartError:
        return False
    return True


def _is_whole(path: Path) -> bool:
    try:
        return not Checkpoint.open(path).verify()
    except FxpartError:
        return False


def _check(partial: Path) -> None:
    """What is about to be complete opens; FXP513 where a rank's file has gone, or is not seen."""
    try:
        Checkpoint.open(partial)
    except FxpartError as fault:
        first = fault.problems[0]
        fix = "a folder that all ranks share"
        raise error("FXP513", where=first.where, why=first.why, fix=fix) from fault


def _encoded(manifest: CheckpointManifest, root: Path) -> bytes:
    """The manifest's bytes; FXP513 for what JSON cannot hold."""
    try:
        return manifest_codec.encode(manifest)
    except (TypeError, ValueError, RecursionError, OverflowError) as cause:
        fix = "what a run adds has to be numbers, texts, lists, tuples and dicts"
        raise error("FXP513", where=str(root), why=str(cause), fix=fix) from cause
