"""Atomic creation of output files and folders."""

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
    """Yield a temporary folder beside the target, renamed to it at the end; FXP603.

    The target must not exist, or be an empty folder: existing files are never replaced.
    """
    target = target.absolute()
    with _make_temporary(target) as temporary:
        yield temporary
        if target.exists():
            target.rmdir()
        temporary.rename(target)


@contextmanager
def new_file(target: Path) -> Iterator[Path]:
    """Yield a temporary path for a file, renamed to the target at the end; FXP603."""
    target = target.absolute()
    with _make_temporary(target) as temporary:
        yield temporary / target.name
        (temporary / target.name).rename(target)


@contextmanager
def _make_temporary(target: Path) -> Iterator[Path]:
    temporary: Path | None = None
    try:
        if target.is_dir() and not any(target.iterdir()):
            pass
        elif target.exists() or target.is_symlink():
            raise FileExistsError("it already exists")
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        temporary.chmod(0o755)
        yield temporary
        files.sync_folder(target.parent)
    except OSError as cause:
        raise _make_error(target, cause) from cause
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def _make_error(target: Path, cause: OSError) -> FxpartError:
    why = cause.strerror or str(cause)
    return error("FXP603", where=str(target), why=why, fix="use a new name in a writable folder")
