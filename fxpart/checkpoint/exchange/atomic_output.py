"""A target that appears whole or not at all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fxpart.checkpoint import files
from fxpart.errors import FxpartError, error


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A fresh folder beside the target, which gets its name at the end; FXP603.

    The target must not be there yet, or be an empty folder: nobody's files are replaced.
    """
    target = target.absolute()
    with _beside(target) as fresh:
        yield fresh
        if target.exists():
            target.rmdir()
        fresh.rename(target)


@contextmanager
def new_file(target: Path) -> Iterator[Path]:
    """A path beside the target for a file that gets its name at the end; FXP603."""
    target = target.absolute()
    with _beside(target) as fresh:
        yield fresh / target.name
        (fresh / target.name).rename(target)


@contextmanager
def _beside(target: Path) -> Iterator[Path]:
    fresh: Path | None = None
    try:
        if target.is_dir() and not any(target.iterdir()):
            pass
        elif target.exists() or target.is_symlink():
            raise FileExistsError("it is there already")
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        fresh.chmod(0o755)
        yield fresh
        files.sync_folder(target.parent)
    except OSError as cause:
        raise _fault(target, cause) from cause
    finally:
        if fresh is not None:
            shutil.rmtree(fresh, ignore_errors=True)


def _fault(target: Path, cause: OSError) -> FxpartError:
    why = cause.strerror or str(cause)
    return error("FXP603", where=str(target), why=why, fix="give a new name in a writable folder")
