"""Inexpensive check, before each step, of values that the program treats as constants."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextvars import ContextVar
from operator import is_
from typing import Any

import torch
from torch import nn

from fxpart.capture.captured_model import CapturedModel
from fxpart.compat import storage_identity
from fxpart.compiler.effects import state_written
from fxpart.errors import FxpartError, Problem
from fxpart.verification.gradient_hooks import refuse_gradient_hooks
from fxpart.verification.module_structure import ModuleStructureGuard
from fxpart.verification.mutable_object import MISSING, MutableObject
from fxpart.verification.object_values import ATOMS, equal
from fxpart.verification.reachable_code import ReachableCode, is_own_class
from fxpart.verification.reachable_state import SLOTS, ReachableState
from fxpart.verification.value_snapshot import is_array, is_generator, is_iterator, same, version

_FIX = (
    "pass the value to forward or loss as an input tensor with each batch, or compile again after "
    "the change"
)
# Attributes that a user may switch at any time, and that are no constants of the program.
SMALL, MOST_SMALL = 1024, 32  # size and number of tensors that are compared per step
LARGEST = 64  # maximum elements of a watched container
_SPECIAL = frozenset(("forward", *SLOTS))
_FREE = frozenset(("training", "use_cache", "gradient_checkpointing"))


class ConstantGuard:
    """Raise FXP113 if a value that the program treats as a constant has changed.

    Watched are numbers and tensors that forward or loss read from attributes, closures and globals,
    except those that they change themselves; added gradient hooks; and the modules' children, hooks
    and classes.
    """

    def __init__(self, state: ReachableState, code: ReachableCode, written: frozenset[Any]) -> None:
        """Record the watched values. written: storages that the program itself writes."""
        self.refuse: Callable[[], None] | None = None
        modules = [(h.path, h.owner) for h in state.holders if isinstance(h.owner, nn.Module)]
        self._structure = ModuleStructureGuard(modules, code.names)
        self.parameters: list[torch.Tensor] = []
        self._copied = 0
        changed = code.stored()
        found = [
            (holder.shown(key), value, holder.reader(key))
            for holder in state.holders
            for key, value in holder.content.items()
            if _is_watched(holder, key, value, code, changed, state.left_out)
        ]
        texts = code.texts
        found += [
            (holder.shown(key), MISSING, holder.reader(key))
            for holder in state.holders
            for key in _absent(holder, code, texts)
            if key not in changed
        ]
        self._paths = [path for path, _, _ in found]
        self._values = [value for _, value, _ in found]
        self._read = [read for _, _, read in found]
        kept = [
            m
            for m in state.memories
            if isinstance(m.owner, torch.Tensor)
            and m.value is not None
            and m.name not in changed
            and storage_identity(m.owner) not in written
        ]
        self._tensors: list[torch.Tensor] = [memory.owner for memory in kept]
        self._names = [memory.path for memory in kept]
        self._copies: list[torch.Tensor] = [memory.value for memory in kept]
        self._versions = [version(t) for t in self._tensors]
        # Writes through ``tensor.data`` do not increment the version, so small tensors are
        # compared.
        small = [i for i, t in enumerate(self._tensors) if t.numel() <= SMALL and t.is_cpu]
        self._small = small[:MOST_SMALL]

    @classmethod
    def of(cls, model: nn.Module, loss: Any, captured: CapturedModel) -> ConstantGuard:
        """Create a guard for the current state of a model and its loss."""
        code = ReachableCode.of(model, loss)
        names = {n for names in state_written(captured.graph.graph).values() for n in names}
        written = frozenset(storage_identity(captured.state[n]) for n in names & {*captured.state})
        made = cls(ReachableState.of(model, loss, code, copies=False), code, written)
        made.refuse = lambda: refuse_gradient_hooks(model, loss)
        roots = [root for root in (model, loss) if isinstance(root, nn.Module)]
        made.parameters = [p for root in roots for p in root.parameters()]
        return made

    def covered(self, state: Mapping[str, torch.Tensor]) -> frozenset[str]:
        """Return the names of the state whose tensors are watched here."""
        watched = {id(tensor) for tensor in self._tensors}
        return frozenset(name for name, tensor in state.items() if id(tensor) in watched)

    def __call__(self, update: Callable[[list[torch.Tensor]], bool] | None = None) -> int:
        """Check all values; takes microseconds if nothing changed.

        update: copies tensors written in place into the program, and returns whether it has all of
        them. Return the number of updates.
        """
        self._structure()
        now = [read() for read in self._read]
        if not all(map(is_, now, self._values)):
            self._compare(now)
        if [version(t) for t in self._tensors] != self._versions or not all(
            torch.equal(self._tensors[i], self._copies[i]) for i in self._small
        ):
            self._compare_tensors(update)
        hooked = [p for p in self.parameters if p._backward_hooks or p._post_accumulate_grad_hooks]
        if hooked and self.refuse is not None:
            self.refuse()
        return self._copied

    def _compare(self, now: list[Any]) -> None:
        problems = []
        for index, (before, after) in enumerate(zip(self._values, now, strict=True)):
            if before is after:
                continue
            if equal(before, after):
                if isinstance(after, (*ATOMS, torch.Tensor)):  # other objects may be mutable
                    self._values[index] = after
                continue
            was = f" from {before!r:.40} to {after!r:.40}" if isinstance(before, ATOMS) else ""
            problems.append(_problem(self._paths[index], was))
        if problems:
            raise FxpartError(problems)

    def _compare_tensors(self, update: Callable[[list[torch.Tensor]], bool] | None) -> None:
        problems, others = [], []
        for index, tensor in enumerate(self._tensors):
            if version(tensor) == self._versions[index] and index not in self._small:
                continue
            if not same(tensor, self._copies[index]):
                problems.append(_problem(self._names[index], " in place"))
                others.append(tensor)
        if problems and not (update is not None and update(others)):
            raise FxpartError(problems)
        self._versions = [version(t) for t in self._tensors]
        if problems:
            self._copied += 1
            for index, tensor in enumerate(self._tensors):
                if any(tensor is other for other in others):
                    self._copies[index] = tensor.detach().clone()


def _is_watched(
    holder: MutableObject,
    key: Any,
    value: Any,
    code: ReachableCode,
    changed: set[str],
    left_out: AbstractSet[int],
) -> bool:
    if key in _FREE or is_iterator(value) or is_generator(value) or is_array(value):
        return False
    name = holder.name if holder.sized else str(key)
    if name in changed or name.startswith("__"):
        return False
    if holder.sized and len(holder.content) > LARGEST:
        return False
    if name == "_buffers" and holder.sized:
        return id(value) not in left_out  # buffers of the loss are watched
    special = isinstance(holder.owner, nn.Module) and name in _SPECIAL
    if special or (holder.sized and name in SLOTS):
        return False  # checked by ModuleStructureGuard and as tensors
    if holder.sized and isinstance(holder.owner, dict) and str(key) in code.names:
        return True  # elements that are read as attributes
    return holder.is_scope or name in code.names or name in _names_of_layer(holder.owner)


def _names_of_layer(owner: Any) -> tuple[str, ...]:
    """Return the names in the forward of torch's own layers, which the reached code excludes."""
    if not isinstance(owner, nn.Module) or not type(owner).__module__.startswith("torch."):
        return ()
    code = getattr(type(owner).forward, "__code__", None)
    return () if code is None else code.co_names


def _absent(holder: MutableObject, code: ReachableCode, texts: set[str]) -> Iterator[Any]:
    """Yield names that an object lacks and that code would find first if it had them.

    These are names that override class attributes, and keys and attributes that the user's code
    names in string constants.
    """
    owner = holder.owner
    if holder.sized:
        if isinstance(owner, dict) and holder.name in code.names and len(owner) <= LARGEST:
            if code.fills(holder.name):
                return
            yield from sorted(code.constants.difference(map(str, holder.content)))
        return
    if holder.is_scope or isinstance(owner, (type, ContextVar)):
        return
    own = is_own_class(type(owner))
    if texts and (own or not isinstance(owner, nn.Module)):
        yield from sorted(texts.difference(dir(type(owner)), holder.content))
    if own:
        for kind in type(owner).__mro__:
            if is_own_class(kind):
                names = (n for n, v in vars(kind).items() if isinstance(v, (*ATOMS, torch.Tensor)))
                yield from (n for n in names if n in code.names and n not in holder.content
                            and not n.startswith("__"))  # fmt: skip


def _problem(path: str, was: str) -> Problem:
    shown = path or "a value that forward or loss reads"
    why = f"it was changed{was} after compile(), but the program treats it as a constant"
    return Problem("FXP113", shown, why, _FIX)
