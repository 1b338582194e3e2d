"""Detection of changes to the user's module while a trainer has copies of its weights.

The trainer cannot read weights from the module, because it has trained its own. Changes are
rejected at the next step. Freezing a parameter is supported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from operator import attrgetter, is_not
from types import MappingProxyType
from typing import Any

import torch

from fxpart.errors import FxpartError, Problem

Slots = Mapping[str, tuple[MutableMapping[str, Any], str]]

_VERSION, _FLAG = attrgetter("_version"), attrgetter("requires_grad")
_SAMPLE = 64  # Elements of a parameter per comparison.
_EACH_STEP = 16  # Parameters compared per step.
_SHOWN = 3


class ModuleWatch:
    """Compares the module's tensors with those at the creation of the trainer.

    Each call detects replaced tensors, writes that autograd counts, and changes of
    ``requires_grad``. Writes through ``.data`` are detected by comparing some elements of 16
    parameters per call. names: of tensors in messages, where they differ.
    """

    names: Mapping[str, str] = MappingProxyType({})

    def __init__(self, slots: Slots, parameters: Iterable[str], *, values: bool) -> None:
        """slots: where the modules store their tensors. parameters: names of the parameters.

        values: whether the trainer's weights come from the module, so that writes matter.
        """
        found = {name: place.get(key) for name, (place, key) in slots.items()}
        self._tensors = {n: t for n, t in found.items() if isinstance(t, torch.Tensor)}
        self._slots = {name: slots[name] for name in self._tensors}
        own = set(parameters)
        self._parameters = [name for name in self._tensors if name in own]
        self._flags = {name: self._tensors[name].requires_grad for name in self._parameters}
        self._values = values
        self._frozen: frozenset[str] = frozenset()
        self._returned: dict[str, torch.Tensor] = {}
        self.accept()

    def note_returned(self, state: Mapping[str, torch.Tensor]) -> None:
        """Record the trainer's state that was returned, and may be loaded into the module."""
        self._returned = {
            name: _sample(tensor).clone()
            for name, tensor in state.items()
            if name in self._tensors and type(tensor) is torch.Tensor and _is_sampled(tensor)
        }

    def _is_returned(self, name: str, now: Any) -> bool:
        """Return whether the module's tensor has the values that the trainer returned last."""
        known = self._returned.get(name)
        if known is None or not isinstance(now, torch.Tensor) or not _is_sampled(now):
            return False
        return _equal(_sample(now), known)

    def accept(self) -> None:
        """Accept the module's current tensors, as after loading state into the trainer."""
        for name, (place, key) in self._slots.items():
            now = place.get(key)
            if isinstance(now, torch.Tensor):
                self._tensors[name] = now
        self._places = list(self._slots.values())
        self._live = list(self._tensors.values())
        self._counted = [t for t in self._live if self._values and not t.is_inference()]
        self._versions = list(map(_VERSION, self._counted))
        self._trained = [self._tensors[name] for name in self._parameters]
        self._known: list[bool] = []  # The next call compares the flags.
        others = set(self._tensors) - set(self._parameters)
        self._buffers = {n: self._tensors[n].detach().clone() for n in others if self._values}
        self._samples = [
            (name, self._tensors[name].data_ptr(), _sample(self._tensors[name]))
            for name in self._parameters
            if self._values and _is_sampled(self._tensors[name])
        ]
        self._turns = [
            self._samples[at : at + _EACH_STEP] for at in range(0, len(self._samples), _EACH_STEP)
        ]
        self._numbers = [torch.cat([view for _, _, view in these]) for these in self._turns]
        self._turn = 0

    def frozen(self) -> frozenset[str]:
        """Return the names of parameters that were frozen since the trainer was created.

        Raises FXP113 if weights of the module were changed, FXP109 if a parameter without gradients
        is now to be trained.
        """
        live = [place.get(key) for place, key in self._places]
        replaced = any(map(is_not, live, self._live))
        if replaced or list(map(_VERSION, self._counted)) != self._versions:
            self._compare(live)
        if self._samples:
            self._compare_sample()
        flags = list(map(_FLAG, self._trained))
        if flags != self._known:
            self._known = flags
            self._frozen = self._find_frozen(flags)
        return self._frozen

    def _find_frozen(self, flags: list[bool]) -> frozenset[str]:
        now = dict(zip(self._parameters, flags, strict=True))
        free = [name for name, flag in now.items() if flag and not self._flags[name]]
        if free:
            self._known.clear()  # Compare the flags again at the next call.
            raise FxpartError(
                Problem(
                    "FXP109", f"parameter {name}",
                    "it had requires_grad=False when the trainer was created, and has True now",
                    "compile again: the gradients that stages exchange depend on it",
                )
                for name in free
            )  # fmt: skip
        return frozenset(name for name, flag in now.items() if not flag and self._flags[name])

    def _compare(self, live: list[Any]) -> None:
        """Raise FXP113 for tensors that were replaced or written with other values."""
        versions = dict(zip(map(id, self._counted), self._versions, strict=True))
        changed: list[str] = []
        for name, before, now in zip(self._tensors, self._live, live, strict=True):
            counted = versions.get(id(before))
            if now is before and (counted is None or counted == before._version):
                continue
            known = self._buffers.get(name)
            same = known is not None and isinstance(now, torch.Tensor) and _equal(now, known)
            if self._values and not same and not self._is_returned(name, now):
                changed.append(name)
        if changed:
            raise self._make_changed_error(changed)
        self.accept()

    def _compare_sample(self) -> None:
        """Compare some elements of some parameters, in rotation."""
        these, numbers = self._turns[self._turn], self._numbers[self._turn]
        self._turn = (self._turn + 1) % len(self._turns)
        moved = [name for name, at, _ in these if self._tensors[name].data_ptr() != at]
        if moved:
            raise self._make_changed_error(moved)
        if torch.equal(torch.cat([view for _, _, view in these]), numbers):
            return
        parts = numbers.split([len(view) for _, _, view in these])
        pairs = zip(these, parts, strict=True)
        changed = [name for (name, _, view), part in pairs if not _equal(view.to(part.dtype), part)]
        other = [name for name in changed if not self._is_returned(name, self._tensors[name])]
        if other:
            raise self._make_changed_error(other)
        self.accept()

    def _make_changed_error(self, changed: list[str]) -> FxpartError:
        shown = ", ".join(self.names.get(name, name) for name in changed[:_SHOWN])
        more = f" and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
        return FxpartError(Problem(
            "FXP113",
            f"the module's {shown}{more}",
            "the module was changed after the trainer was created; the trainer has its own weights "
            "and does not see the change",
            "modify trainer.state_dict() and pass it to trainer.load_state_dict(), or change the "
            "module before program.trainer()",
        ))  # fmt: skip


def _is_sampled(tensor: torch.Tensor) -> bool:
    plain = tensor.device.type == "cpu" and tensor.layout == torch.strided
    return (
        plain and tensor.dtype.is_floating_point and tensor.is_contiguous() and tensor.numel() > 0
    )


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of some evenly spaced elements."""
    line = tensor.detach().view(-1)
    return line[:: max(1, line.numel() // _SAMPLE)][:_SAMPLE]


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        return False
    if one.device.type == "meta" or torch.equal(one.detach(), other.detach()):
        return True
    floats = one.dtype.is_floating_point or one.dtype.is_complex
    return floats and torch.allclose(one.detach(), other.detach(), 0.0, 0.0, equal_nan=True)
