"""Position of a run in its data, and its restoration."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any

from fxpart.compat import skip_batches
from fxpart.errors import error
from fxpart.runtime.checkpointing import random_state

_INNER = ("sampler", "batch_sampler", "dataset")
_DEPTH = 4


class DataPosition:
    """The user's batches, epoch by epoch. epoch: the current one. used: batches used by updates.

    Each epoch is one iteration. A sampler, loader or data set with ``set_epoch`` receives the
    epoch. After :meth:`load` the next iteration begins behind the batches that were used: a loader
    with ``state_dict`` and ``load_state_dict`` restores its own position. For other data, the
    random state at the begin of the epoch is restored, so that order and augmentations are drawn
    again, and earlier batches are skipped: a DataLoader without workers does not load them, other
    data is read and dropped.
    """

    def __init__(self, given: Any, *, records: bool, check: bool = True) -> None:
        """Wrap the data.

        given: an iterable, or a function that returns one per epoch. records: record what
        :meth:`state` needs. check: reject data of another length within an epoch.
        """
        self._given = given
        self._records, self._check = records, check
        self.epoch = self.used = 0
        self._start: dict[str, Any] = {}
        self._source: Any = None
        self._saved: Mapping[str, Any] | None = None
        self._held: dict[str, Any] | None = None  # the state before batches were read ahead
        self._full = 0  # batches of the last complete epoch
        self._resumed = False  # in this epoch

    def __iter__(self) -> Iterator[Any]:
        """Return the remaining batches of this epoch."""
        saved, self._saved, self._held = self._saved, None, None
        is_partial = saved is not None and self.used > 0
        if saved is not None:
            random_state.restore_generator_states(
                saved["start"]["random"] if is_partial else saved["now"]["random"]
            )
        random = random_state.capture_generator_states() if self._records else {}
        self._source = self._make_source()
        parts = _parts(self._source)
        for part in parts.values():
            if hasattr(part, "set_epoch"):
                part.set_epoch(self.epoch)
        if saved is None:
            self._start = {"random": random, "parts": _states(parts)} if self._records else {}
            found: Iterator[Any] = iter(self._source)
            return found
        if self._has_ended(saved.get("size")):
            if is_partial:
                random_state.restore_generator_states(saved["now"]["random"])
            return iter(())
        return self._resume(saved, parts, random, is_partial=is_partial)

    def next_epoch(self) -> None:
        """Begin the next epoch; warn if the first one after a restoration has another length."""
        if self._resumed and self._full and self._full != self.used:
            warnings.warn(
                f"epoch {self.epoch} has {self.used} batches, and the one before the run was "
                f"resumed had {self._full}: the data has changed",
                stacklevel=4,
            )
        self._full, self._resumed, self._held = self.used, False, None
        self.epoch, self.used = self.epoch + 1, 0

    def pair(
        self, groups: Iterator[list[Any]], *, ahead: bool
    ) -> Iterator[tuple[list[Any], list[Any]]]:
        """Yield the batches of each update with those of the next one, read ahead; else with none.

        :meth:`state` is the one before they were read.
        """
        group = next(groups, None)
        while group is not None:
            self._held = self._describe_now() if ahead and self._records else None
            following = next(groups, None) if ahead else None
            yield group, following or []
            group = following if ahead else next(groups, None)

    def state(self) -> dict[str, Any]:
        """Return the state for :meth:`load`, as plain values, after an update."""
        now = self._held or self._describe_now()
        start = self._start or now
        return {
            "epoch": self.epoch, "used": self.used, "start": start, "now": now,
            "size": _measure(self._source), "full": self._full,
        }  # fmt: skip

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from this state in the next iteration."""
        self.epoch, self.used = state["epoch"], state["used"]
        self._saved = state
        self._start = dict(state["start"])
        self._full, self._resumed = state.get("full", 0), True

    # -- inner ----------------------------------------------------------------------------------

    def _describe_now(self) -> dict[str, Any]:
        return {
            "random": random_state.capture_generator_states(),
            "parts": _states(_parts(self._source)),
        }

    def _make_source(self) -> Iterable[Any]:
        given = self._given
        if callable(given) and not hasattr(given, "__iter__"):
            make: Callable[[], Iterable[Any]] = given
            return make()
        found: Iterable[Any] = given
        return found

    def _has_ended(self, before: Any) -> bool:
        """Compare the data's length and batch size; return whether the epoch had ended in other
        data.

        FXP109 for other data within an epoch, unless it is not checked.
        """
        now = _measure(self._source)
        changes = [
            f"{name} {now[name]} instead of {old}"
            for name, old in (before or {}).items()
            if old is not None and now.get(name) not in (None, old)
        ]
        ended = self.used > 0 and self.used == (before or {}).get("batches")
        if changes and self.used and self._check and not ended:
            raise error(
                "FXP109", where=f"the data, epoch {self.epoch}",
                why=f"it has {' and '.join(changes)}, so its first {self.used} batches are not "
                "those that were used",
                fix="use the data that the run began with or another folder; "
                "Checkpoints(check=False) continues anyway",
            )  # fmt: skip
        if changes:
            warnings.warn(f"the data has {' and '.join(changes)}", stacklevel=4)
        return ended and bool(changes)

    def _resume(
        self, saved: Mapping[str, Any], parts: dict[str, Any], random: Any, *, is_partial: bool
    ) -> Iterator[Any]:
        """Return the batches behind those that were used."""
        now = saved["now"]
        if _has_state(self._source):
            _restore({"": parts[""]}, now["parts"])
            found: Iterator[Any] = iter(self._source)
        else:
            _restore(parts, (saved["start"] if is_partial else now)["parts"])
            if not is_partial:
                self._start = {"random": random, "parts": _states(parts)}
            found = iter(self._source)
            if not is_partial:
                return found
            self._skip(found)
            # Batches that were not loaded have drawn no random numbers.
            _restore({k: p for k, p in parts.items() if "sampler" not in k}, now["parts"])
        if is_partial:
            random_state.restore_generator_states(now["random"])
        return found

    def _skip(self, batches: Iterator[Any]) -> None:
        found = skip_batches(batches, self.used)
        if found is None:
            found = sum(1 for _ in islice(batches, self.used))
        if found < self.used:
            raise error(
                "FXP518", where=f"the data, epoch {self.epoch}",
                why=f"{self.used} batches were used before, but there are only {found} now",
                fix="use the data that the run began with, or another folder",
            )  # fmt: skip


def _parts(source: Any) -> dict[str, Any]:
    """Return the parts of the data by attribute path; "" is the data itself."""
    found: dict[str, Any] = {}
    queue = [("", source)] if source is not None else []
    while queue:
        path, value = queue.pop(0)
        if any(value is other for other in found.values()):
            continue
        found[path] = value
        if path.count(".") < _DEPTH:
            for name in _INNER:
                inner = getattr(value, name, None)
                if inner is not None and not isinstance(inner, (list, tuple, int, str)):
                    queue.append((f"{path}.{name}", inner))
    return found


def _measure(source: Any) -> dict[str, int | None]:
    """Return the number of batches and the batch size of a loader, as far as it tells them."""
    found: dict[str, int | None] = {"batches": None, "batch_size": None}
    with suppress(Exception):  # of the user's object
        found["batches"] = len(source)
    size = getattr(source, "batch_size", None)
    found["batch_size"] = size if isinstance(size, int) else None
    return found


def _has_state(source: Any) -> bool:
    """Return whether the loader stores its own position."""
    return hasattr(source, "state_dict") and hasattr(source, "load_state_dict")


def _states(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of each part that has one, and of generators among its attributes."""
    found: dict[str, Any] = {}
    for path, part in parts.items():
        if _has_state(part):
            found[path] = part.state_dict()
        for name, generator in _generators(part):
            found[f"{path}:{name}"] = random_state.get_generator_state(generator)
    return found


def _restore(parts: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    for path, part in parts.items():
        if path in states and _has_state(part):
            part.load_state_dict(states[path])
        for name, generator in _generators(part):
            if f"{path}:{name}" in states:
                random_state.set_state(generator, states[f"{path}:{name}"])


def _generators(part: Any) -> list[tuple[str, Any]]:
    own = vars(part) if hasattr(part, "__dict__") else {}
    return [(name, value) for name, value in own.items() if random_state.is_generator(value)]
