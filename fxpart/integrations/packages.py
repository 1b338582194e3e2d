"""The packages of other tools, which fxpart does not depend on."""

from __future__ import annotations

from importlib.util import find_spec

from fxpart.errors import error


def require_package(name: str, extra: str = "integrations") -> None:
    """Raise FXP601 if a package is not installed."""
    if find_spec(name) is None:
        raise error(
            "FXP601",
            where=f"fxpart.integrations: {name}",
            why="the package is not installed",
            fix=f"pip install 'fxpart[{extra}]'",
        )
