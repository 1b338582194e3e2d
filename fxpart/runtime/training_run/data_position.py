"""Where a run is in its data, and how the next one comes to the same place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from fxpart.compat import skip_batches
from fxpart.errors import error
from fxpart.runtime.training_run import generator_state

_INNER = ("sampler", "batch_sampler", "dataset")
_DEPTH = 4


class DataPosition:
    """The user's batches, epoch by epoch. epoch: this one; used: its batches that updates used.

    It is gone through once for each epoch. A sampler, loader or data set with ``set_epoch`` is told
    each epoch. After :meth:`load` the next pass begins behind the batches that were used then: a
    loader with ``state_dict`` and ``load_state_dict`` goes there by itself; for others the random
    state in which the epoch began is put back, so that its order and its augmentations are drawn
    again, and the batches before are passed over: a DataLoader without workers does not load them,
    other data is read and dropped.
    """

    def __init__(self, given: Any, *, keeps: bool) -> None:
        """given: an iterable, or a function that returns one for each epoch.

        keeps: keep what :meth:`state` needs.
        """
        self._given = given
        self._keeps = keeps
        self.epoch = self.used = 0
        self._start: dict[str, Any] = {}
        self._source: Any = None
        self._then: Mapping[str, Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        """This epoch's batches, from where they are to go on."""
        then, self._then = self._then, None
        begun = then is not None and self.used > 0
        if then is not None:
            generator_state.restore_generator_states(
                then["start"]["random"] if begun else then["now"]["random"]
            )
        random = generator_state.capture_generator_states() if self._keeps else {}
        self._source = self._made()
        parts = _parts(self._source)
        for part in parts.values():
            if hasattr(part, "set_epoch"):
                part.set_epoch(self.epoch)
        if then is None:
            self._start = {"random": random, "parts": _states(parts)} if self._keeps else {}
            found: Iterator[Any] = iter(self._source)
            return found
        return self._again(then, parts, random, begun=begun)

    def next_epoch(self) -> None:
        """All its batches were used."""
        self.epoch, self.used = self.epoch + 1, 0

    def state(self) -> dict[str, Any]:
        """What :meth:`load` needs, as plain values, where the last batch that was given is used."""
        now = {
            "random": generator_state.capture_generator_states(),
            "parts": _states(_parts(self._source)),
        }
        start = self._start or now
        return {"epoch": self.epoch, "used": self.used, "start": start, "now": now}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from there with the next pass."""
        self.epoch, self.used = state["epoch"], state["used"]
        self._then = state
        self._start = dict(state["start"])

    # -- inner ----------------------------------------------------------------------------------

    def _made(self) -> Iterable[Any]:
        given = self._given
        if callable(given) and not hasattr(given, "__iter__"):
            make: Callable[[], Iterable[Any]] = given
            return make()
        found: Iterable[Any] = given
        return found

    def _again(
        self, then: Mapping[str, Any], parts: dict[str, Any], random: Any, *, begun: bool
    ) -> Iterator[Any]:
        """Behind the batches that were used."""
        now = then["now"]
        if _by_itself(self._source):
            _restore({"": parts[""]}, now["parts"])
            found: Iterator[Any] = iter(self._source)
        else:
            _restore(parts, (then["start"] if begun else now)["parts"])
            if not begun:
                self._start = {"random": random, "parts": _states(parts)}
            found = iter(self._source)
            if not begun:
                return found
            self._pass_over(found)
            # What was not loaded has drawn nothing.
            _restore({k: p for k, p in parts.items() if "sampler" not in k}, now["parts"])
        if begun:
            generator_state.restore_generator_states(now["random"])
        return found

    def _pass_over(self, batches: Iterator[Any]) -> None:
        found = skip_batches(batches, self.used)
        if found is None:
            found = sum(1 for _ in islice(batches, self.used))
        if found < self.used:
            raise error(
                "FXP518", where=f"the data, epoch {self.epoch}",
                why=f"{self.used} batches of it were used before, and it has {found} now",
                fix="the data that the run began with, or another folder",
            )  # fmt: skip


def _parts(source: Any) -> dict[str, Any]:
    """What the data is made of, by its path of attributes; "" is the data itself."""
    found: dict[str, Any] = {}
    todo = [("", source)] if source is not None else []
    while todo:
        path, value = todo.pop(0)
        if any(value is other for other in found.values()):
            continue
        found[path] = value
        if path.count(".") < _DEPTH:
            for name in _INNER:
                inner = getattr(value, name, None)
                if inner is not None and not isinstance(inner, (list, tuple, int, str)):
                    todo.append((f"{path}.{name}", inner))
    return found


def _by_itself(source: Any) -> bool:
    """Whether the loader knows its own place."""
    return hasattr(source, "state_dict") and hasattr(source, "load_state_dict")


def _states(parts: Mapping[str, Any]) -> dict[str, Any]:
    """The state of each part that has one, and of generators that are its attributes."""
    found: dict[str, Any] = {}
    for path, part in parts.items():
        if _by_itself(part):
            found[path] = part.state_dict()
        for name, generator in _generators(part):
            found[f"{path}:{name}"] = generator_state.get_generator_state(generator)
    return found


def _restore(parts: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    for path, part in parts.items():
        if path in states and _by_itself(part):
            part.load_state_dict(states[path])
        for name, generator in _generators(part):
            if f"{path}:{name}" in states:
                generator_state.set_state(generator, states[f"{path}:{name}"])


def _generators(part: Any) -> list[tuple[str, Any]]:
    own = vars(part) if hasattr(part, "__dict__") else {}
    return [(name, value) for name, value in own.items() if generator_state.is_generator(value)]
