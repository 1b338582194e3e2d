"""Registry: one table of named entries, extended by installed packages and by users.

Every closed set of fxpart (schedules, weight modes, cost models, rules, commands, ...) is one
`Registry`, and everything that depends on an entry reads the entry::

    SCHEDULES: Registry[ScheduleSpec] = Registry(
        "schedule", {"gpipe": ScheduleSpec(...)}, group="fxpart.schedules", check=check_spec
    )

    SCHEDULES["gpipe"]                              # KeyError for an unknown name
    SCHEDULES.lookup(name, where=f"schedule={name!r}")  # FXP109 that lists the known names
    SCHEDULES.register("eager", ScheduleSpec(...))  # FXP109 where the name is taken

A registry is a read-only mapping. Its order is the same in every process: built-in entries in the
order of the table, then all others sorted by name. This module imports neither torch nor OR-Tools.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar, cast

from fxpart.errors import FxpartError, error, quoted

Entry = TypeVar("Entry")


@dataclass(frozen=True)
class LazyEntry:
    """A built-in entry that is imported on first use: ``LazyEntry("package.module:attribute")``."""

    target: str

    def load(self) -> Any:
        """Import the module and return the attribute."""
        module, _, attribute = self.target.partition(":")
        return getattr(importlib.import_module(module), attribute)


class Registry(Mapping[str, Entry], Generic[Entry]):
    """A table of named entries of one kind.

    kind: what an entry is, for messages ("schedule", "cost model"). builtin: the entries of fxpart,
    in the order in which they are listed; a `LazyEntry` is imported on first use. group: the entry
    point group through which installed packages add entries, "" for none. An entry point's name is
    the entry's name, its object the entry; installed packages are searched when a name is not a
    built-in or registered one, or when all names are listed, and an entry is imported on first use.
    check: called with the name and the entry before an entry is registered or returned from an
    entry point; it raises an `FxpartError` for an object that is not a valid entry.
    """

    def __init__(
        self,
        kind: str,
        builtin: Mapping[str, Entry | LazyEntry],
        *,
        group: str = "",
        check: Callable[[str, Any], None] | None = None,
    ) -> None:
        self.kind = kind
        self.group = group
        self._builtin: dict[str, Entry | LazyEntry] = dict(builtin)
        self._registered: dict[str, Entry] = {}
        self._installed: dict[str, Entry | EntryPoint] | None = None
        self._check = check

    @property
    def builtin(self) -> tuple[str, ...]:
        """The names of the built-in entries."""
        return tuple(self._builtin)

    def __getitem__(self, name: str) -> Entry:
        if name in self._builtin:
            found = self._builtin[name]
            if isinstance(found, LazyEntry):
                found = self._builtin[name] = cast("Entry", found.load())
            return found
        if name in self._registered:
            return self._registered[name]
        installed = self._find_installed()
        entry = installed[name]
        if isinstance(entry, EntryPoint):
            entry = installed[name] = self._load(entry)
        return entry

    def __contains__(self, name: object) -> bool:
        """Return whether the name is known; nothing is imported for the answer."""
        return isinstance(name, str) and (
            name in self._builtin or name in self._registered or name in self._find_installed()
        )

    def __iter__(self) -> Iterator[str]:
        return iter((*self._builtin, *sorted({*self._registered, *self._find_installed()})))

    def __len__(self) -> int:
        return len(self._builtin) + len({*self._registered, *self._find_installed()})

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def lookup(self, name: object, *, where: str, code: str = "FXP109") -> Entry:
        """Return the entry of a name that a user gave.

        where: the argument, field or file in which the name was given. Raises an error of this code
        that lists the known names.
        """
        if isinstance(name, str) and name in self:
            return self[name]
        known = ", ".join(self)
        raise error(
            code,
            where=where,
            why=f"Unknown {self.kind} {quoted(name)}.",
            fix=f"Known names: {known}.",
        )

    def register(self, name: str, entry: Entry) -> Entry:
        """Add an entry for this process and return it.

        Registering the same object again under its name has no effect. Raises FXP109 for a name
        that is taken or is not a text, and whatever `check` raises.
        """
        where = f"register({quoted(name)})"
        if not isinstance(name, str) or not name or name != name.strip():
            raise error(
                "FXP109",
                where=where,
                why=f"The name of a {self.kind} is a text without spaces around it.",
                fix="Pass the name as text.",
            )
        if self._registered.get(name) is entry:
            return entry
        if name in self:
            raise self._taken(name, where)
        if self._check is not None:
            self._check(name, entry)
        self._registered[name] = entry
        return entry

    def unregister(self, name: str) -> None:
        """Remove an entry that `register` added; KeyError for any other name."""
        del self._registered[name]

    def _find_installed(self) -> dict[str, Entry | EntryPoint]:
        """Return the entries of installed packages by name, imported or not.

        Raises FXP109 where two packages add the same name, or one adds a built-in one.
        """
        if self._installed is None:
            found: dict[str, Entry | EntryPoint] = {}
            points = entry_points(group=self.group) if self.group else ()
            for point in sorted(points, key=lambda point: (point.name, point.value)):
                where = f"entry point {point.name} = {point.value} of the group {self.group}"
                earlier = found.get(point.name)
                if isinstance(earlier, EntryPoint) and earlier.value == point.value:
                    continue  # one package that is found in two folders
                if earlier is not None or point.name in self._builtin:
                    raise self._taken(point.name, where)
                found[point.name] = point
            self._installed = found
        return self._installed

    def _load(self, point: EntryPoint) -> Entry:
        """Import an entry of an installed package; FXP109 where that fails."""
        try:
            entry = point.load()
            if self._check is not None:
                self._check(point.name, entry)
        except FxpartError:
            raise
        except Exception as failure:
            raise error(
                "FXP109",
                where=f"entry point {point.name} = {point.value} of the group {self.group}",
                why=f"The {self.kind} cannot be imported: {type(failure).__name__}: {failure}",
                fix="Repair or uninstall the package that adds it.",
            ) from failure
        return cast("Entry", entry)

    def _taken(self, name: str, where: str) -> FxpartError:
        return error(
            "FXP109",
            where=where,
            why=f"A {self.kind} named {name!r} exists already.",
            fix=f"Give the {self.kind} another name.",
        )
