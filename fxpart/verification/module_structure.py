"""Check that modules are unchanged: children, hooks, classes and forwards."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from torch import nn

from fxpart.compat import global_module_hooks, unwrapped
from fxpart.errors import FxpartError, Problem

_HOOKS = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}
_IN_ORDER = (nn.Sequential, nn.ModuleList, nn.ModuleDict)  # containers that run all children
_FIX = "change the module before compile(), or compile again after the change"


class ModuleStructureGuard:
    """Raise FXP113 if a module's children, hooks, forward or class have changed."""

    def __init__(self, modules: Sequence[tuple[str, nn.Module]], names: Collection[str]) -> None:
        """modules: with their paths. names: names in the reachable code.

        New children whose names no code mentions have no effect.
        """
        self._paths = [path for path, _ in modules]
        self._modules = [module for _, module in modules]
        self._names = names
        self._spaces = [vars(module) for module in self._modules]
        self._children = [space["_modules"] for space in self._spaces]
        self._before = [dict(children) for children in self._children]
        hooks = [
            (at, slot, space[slot])
            for at, space in enumerate(self._spaces)
            for slot in _HOOKS
            if slot in space
        ]
        self._hooked = [(at, slot) for at, slot, _ in hooks]
        self._hooks = [hooks for _, _, hooks in hooks]
        self._everywhere = global_module_hooks()
        self._kinds = list(map(type, self._modules))
        self._classes = list(dict.fromkeys(self._kinds))
        self._accept()

    def _accept(self) -> None:
        self._known = self._now()

    def _now(self) -> tuple[list[Any], ...]:
        return (
            [tuple(children.values()) for children in self._children],
            list(map(tuple, self._hooks)),
            [space.get("forward") for space in self._spaces],
            list(map(type, self._modules)),
            [getattr(kind, "forward", None) for kind in self._classes],
            list(map(tuple, self._everywhere)),
        )

    def __call__(self) -> None:
        """Check all modules; takes a few hundred nanoseconds per module."""
        now = self._now()
        if now == self._known:
            return
        problems = [Problem("FXP113", where, why, _FIX) for where, why in self._problems(now)]
        if problems:
            raise FxpartError(problems)
        self._accept()

    def _problems(self, now: tuple[list[Any], ...]) -> Iterator[tuple[str, str]]:
        children, hooks, forwards, kinds, classes, everywhere = now
        for at, (before, after) in enumerate(zip(self._known[0], children, strict=True)):
            if before != after:
                yield from self._swapped(at)
        for place, before, after in zip(self._hooked, self._known[1], hooks, strict=True):
            if before != after:
                at, slot = place
                done = "a" if set(after) - set(before) else "its"
                verb = "was added" if done == "a" else "was removed"
                yield self._where(at), f"{done} {_HOOKS[slot]} {verb}, {_UNSEEN}"
        for at, (before, after) in enumerate(zip(self._known[2], forwards, strict=True)):
            if before is not after:
                yield self._where(at), f"its forward was replaced, {_UNSEEN}"
        for at, (before, after) in enumerate(zip(self._known[3], kinds, strict=True)):
            if before is not after:
                why = f"its class changed from {before.__name__} to {after.__name__}, {_UNSEEN}"
                yield self._where(at), why
        for kind, before, after in zip(self._classes, self._known[4], classes, strict=True):
            if before is not after:
                yield f"class {kind.__name__}", f"its forward was replaced, {_UNSEEN}"
        if everywhere != self._known[5]:
            yield "all modules", f"global module hooks were added or removed, {_UNSEEN}"

    def _swapped(self, at: int) -> Iterator[tuple[str, str]]:
        before, after = self._before[at], self._children[at]
        ordered = isinstance(self._modules[at], _IN_ORDER)
        for name in dict.fromkeys((*before, *after)):
            old, new = before.get(name), after.get(name)
            if unwrapped(new) is unwrapped(old):
                continue
            if name not in before and not (ordered or name in self._names):
                continue
            path = f"{self._paths[at]}.{name}" if self._paths[at] else name
            if name not in before:
                yield f"module {path}", f"it was added after compile(), {_UNSEEN}"
            elif name not in after:
                yield f"module {path}", f"it was removed after compile(), {_UNSEEN}"
            else:
                what = f"{type(old).__name__} was replaced by {type(new).__name__}"
                yield f"module {path}", f"{what} after compile(), {_UNSEEN}"
        if ordered and list(before) != list(after) and set(before) == set(after):
            yield self._where(at), f"the order of its modules changed, {_UNSEEN}"

    def _where(self, at: int) -> str:
        return f"module {self._paths[at] or type(self._modules[at]).__name__}"


_UNSEEN = "which the captured program does not include"
