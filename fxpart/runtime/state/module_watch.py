"""Whether the user's module is changed while a trainer has copies of its weights.

The trainer cannot take a weight from the module, as its own was trained since. Changes that are
seen by the next step are refused. Freezing a parameter takes effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from operator import attrgetter, is_not
from typing import Any

import torch

from fxpart.errors import FxpartError, Problem

Slots = Mapping[str, tuple[MutableMapping[str, Any], str]]

_VERSION, _FLAG = attrgetter("_version"), attrgetter("requires_grad")
_SAMPLE = 64  # numbers of a parameter that are compared at a time
_EACH_STEP = 16  # parameters of which some numbers are compared in one step
_SHOWN = 3


class ModuleWatch:
    """Compares the module's tensors with what they were when the trainer was made.

    Replaced tensors, writes that autograd counts and ``requires_grad`` are seen at the next call;
    writes through ``.data`` by some numbers of each parameter, of 16 parameters a call.
    """

    def __init__(self, slots: Slots, parameters: Iterable[str], *, values: bool) -> None:
        """slots: where the modules store their tensors. parameters: names of those that are.

        values: whether the trainer's weights are those of the module, so that writes matter.
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
        """Remember the trainer's state that a caller got, which may be loaded into the module."""
        self._returned = {
            name: _sample(tensor).clone()
            for name, tensor in state.items()
            if name in self._tensors and type(tensor) is torch.Tensor and _is_sampled(tensor)
        }

    def _is_returned(self, name: str, now: Any) -> bool:
        """Whether the module's tensor has the numbers that the trainer returned last."""
        known = self._returned.get(name)
        if known is None or not isinstance(now, torch.Tensor) or not _is_sampled(now):
            return False
        return _equal(_sample(now), known)

    def accept(self) -> None:
        """Take what the module has now as known, as after loading state into the trainer."""
        for name, (place, key) in self._slots.items():
            now = place.get(key)
            if isinstance(now, torch.Tensor):
                self._tensors[name] = now
        self._places = list(self._slots.values())
        self._live = list(self._tensors.values())
        self._counted = [t for t in self._live if self._values and not t.is_inference()]
        self._versions = list(map(_VERSION, self._counted))
        self._trained = [self._tensors[name] for name in self._parameters]
        self._known: list[bool] = []  # flags are looked at with the next call
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
        """Return the names of parameters that were frozen since the trainer was made.

        Raises FXP113 where weights of the module were changed, FXP109 where a parameter that had no
        gradient is to be trained now.
        """
        live = [place.get(key) for place, key in self._places]
        replaced = any(map(is_not, live, self._live))
        if replaced or list(map(_VERSION, self._counted)) != self._versions:
            self._compare(live)
        if self._samples:
            self._compare_some()
        flags = list(map(_FLAG, self._trained))
        if flags != self._known:
            self._known = flags
            self._frozen = self._flagged(flags)
        return self._frozen

    def _flagged(self, flags: list[bool]) -> frozenset[str]:
        now = dict(zip(self._parameters, flags, strict=True))
        free = [name for name, flag in now.items() if flag and not self._flags[name]]
        if free:
            self._known.clear()  # flags are looked at again
            raise FxpartError(
                Problem(
                    "FXP109", f"parameter {name}",
                    "it had requires_grad=False when the trainer was made, and has True now",
                    "compile again: what flows back between the stages depends on it",
                )
                for name in free
            )  # fmt: skip
        return frozenset(name for name, flag in now.items() if not flag and self._flags[name])

    def _compare(self, live: list[Any]) -> None:
        """A tensor was replaced or written to: refuse it, unless its numbers are the same."""
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
            raise _changed(changed)
        self.accept()

    def _compare_some(self) -> None:
        """Compare some numbers of some parameters, in turn."""
        these, numbers = self._turns[self._turn], self._numbers[self._turn]
        self._turn = (self._turn + 1) % len(self._turns)
        moved = [name for name, at, _ in these if self._tensors[name].data_ptr() != at]
        if moved:
            raise _changed(moved)
        if torch.equal(torch.cat([view for _, _, view in these]), numbers):
            return
        parts = numbers.split([len(view) for _, _, view in these])
        pairs = zip(these, parts, strict=True)
        changed = [name for (name, _, view), part in pairs if not _equal(view.to(part.dtype), part)]
        other = [name for name in changed if not self._is_returned(name, self._tensors[name])]
        if other:
            raise _changed(other)
        self.accept()


def _is_sampled(tensor: torch.Tensor) -> bool:
    plain = tensor.device.type == "cpu" and tensor.layout == torch.strided
    return (
        plain and tensor.dtype.is_floating_point and tensor.is_contiguous() and tensor.numel() > 0
    )


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """A view of some of its numbers, evenly spread."""
    line = tensor.detach().view(-1)
    return line[:: max(1, line.numel() // _SAMPLE)][:_SAMPLE]


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        return False
    if one.device.type == "meta" or torch.equal(one.detach(), other.detach()):
        return True
    floats = one.dtype.is_floating_point or one.dtype.is_complex
    return floats and torch.allclose(one.detach(), other.detach(), 0.0, 0.0, equal_nan=True)


def _changed(names: list[str]) -> FxpartError:
    shown = ", ".join(names[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return FxpartError(Problem(
        "FXP113",
        f"the module's {shown}{more}",
        "the module was changed after the trainer was made, which has weights of its own and has "
        "not seen the change",
        "change what trainer.state_dict() gives and trainer.load_state_dict() it; or change the "
        "module before program.trainer()",
    ))  # fmt: skip
