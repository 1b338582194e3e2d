"""The packages of other tools, which fxpart does not depend on."""

from __future__ import annotations

from importlib.util import find_spec

from fxpart.errors import error


def require_methods(owner: type, names: tuple[str, ...], package: str) -> None:
    """Raise FXP601 if a class of a package lacks methods that an adapter overrides."""
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        raise error(
            "FXP601",
            where=f"fxpart.integrations: {package}",
            why=f"its {owner.__name__} has no {', '.join(missing)}: the version is too old or too "
            "new",
            fix="pip install --upgrade 'fxpart[integrations]'",
        )


def require_package(name: str, extra: str = "integrations") -> None:
    """Raise FXP601 if a package is not installed."""
    if find_spec(name) is None:
        raise error(
            "FXP601",
            where=f"fxpart.integrations: {name}",
            why="the package is not installed",
            fix=f"pip install 'fxpart[{extra}]'",
        )
