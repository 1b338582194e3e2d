"""Description of an exception of user code: its type, its text, and the user's file and line."""

from __future__ import annotations

import sysconfig
import traceback
from functools import cache
from pathlib import Path

_MOST_CHARS = 20_000
_ROOT = Path(__file__).resolve().parents[1]
_BESIDE = ("passes", "costmodels")  # installed in the package, beside it in the repository


def describe_exception(cause: BaseException) -> str:
    """Return ``ValueError: bad row (train.py, line 17)``.

    The place is the innermost line of the traceback outside of fxpart and installed packages;
    without one, it is omitted.
    """
    text = get_exception_text(cause)
    described = f"{type(cause).__name__}: {text}" if text else type(cause).__name__
    place = find_user_line(cause)
    return f"{described} ({place})" if place else described


def get_exception_text(cause: BaseException) -> str:
    """Return the text of an exception of any class; truncated if long.

    Characters without UTF-8 are escaped.
    """
    try:
        text = str(cause)
    except Exception as other:
        text = f"its text is not available: {type(other).__name__} in __str__"
    if len(text) > _MOST_CHARS:
        text = f"{text[:_MOST_CHARS]}... ({len(text)} characters)"
    return text.encode("utf-8", "backslashreplace").decode()


def find_user_line(cause: BaseException) -> str:
    """Return file and line of the user's code in a traceback, or ""."""
    try:
        frames = traceback.extract_tb(cause.__traceback__)
    except Exception:  # of a source that cannot be read
        return ""
    for frame in reversed(frames):
        if frame.filename.startswith("<") or _is_installed(frame.filename):
            continue
        return f"{frame.filename}, line {frame.lineno}"
    return ""


@cache
def _is_installed(name: str) -> bool:
    """Return whether a file belongs to fxpart, Python or an installed package."""
    path = Path(name)
    kinds = ("stdlib", "platstdlib", "purelib", "platlib")
    libraries = [Path(found) for kind in kinds if (found := sysconfig.get_path(kind))]
    own = [_ROOT, *(_ROOT.parent / folder for folder in _BESIDE)]
    return any(path.is_relative_to(folder) for folder in (*own, *libraries))
