"""Values of another engine's configuration, checked as they are read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fxpart.errors import error, quoted

_INTEGER = re.compile(r"-?[0-9]{1,15}")


class ConfigurationValues:
    """Options by name, with their texts or numbers; FXP407 names an option with a wrong value."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values, self._where = values, where

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def raw(self, name: str) -> Any:
        """Return the value as it was parsed; None where it is not given."""
        return self._values.get(name)

    def text(self, name: str, default: str = "") -> str:
        """Return a text; of a list with one text that text."""
        value = self._values.get(name, default)
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        if not isinstance(value, str):
            raise self._wrong(name, value, "a text")
        return value

    def number(self, name: str, default: int | None = None, least: int = 1) -> int | None:
        """Return an integer of at least ``least``."""
        if name not in self._values:
            return default
        value = self._values[name]
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        if isinstance(value, str) and _INTEGER.fullmatch(value):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self._wrong(name, value, f"an integer of at least {least}")
        return value

    def count(self, name: str) -> int:
        """Return a degree: an integer of at least 1, which is the default."""
        found = self.number(name, 1)
        assert found is not None
        return found

    def flag(self, name: str) -> bool:
        """Return whether a switch is given, and not with a value that means no."""
        value = self._values.get(name, False)
        if isinstance(value, list):
            value = value[0] if value else True
        return str(value).lower() in ("true", "1", "yes")

    def _wrong(self, name: str, value: object, expected: str) -> Exception:
        return error(
            "FXP407",
            where=f"{self._where}: {name}",
            why=f"The value {quoted(value)} is not {expected}.",
            fix="Correct the option, or leave it out for the engine's default.",
        )
