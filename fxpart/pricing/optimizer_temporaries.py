"""What an optimizer holds for a moment beside its state: measured on its real class.

torch's optimizers go through their weights in a loop (on CPUs; on GPUs they take lists of them at
once, whose temporaries are not counted here). Each turn makes tensors of the weight's size, and
the names of the loop still hold some of the turn before: AdamW makes a root and its quotient, and
keeps the quotient of the weight before, so that two weights of a size need three times that size.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fxpart.compat import TorchDispatchMode
from fxpart.compat.optimizer_choice import OptimizerChoice

_SIDE = 64  # of the weights that are stepped
_LEAST = 0.5  # of a weight; what is smaller (rows and columns of it, numbers) is nothing


@dataclass(frozen=True)
class OptimizerTemporaries:
    """In sizes of a weight: own while it is updated, carried of the one that was updated before."""

    own: float
    carried: float

    def of(self, weight: int, before: int) -> int:
        """Bytes while a weight of so many is updated, after another."""
        return round(self.own * weight + self.carried * before)


UNKNOWN = OptimizerTemporaries(2.0, 1.0)  # AdamW's, where a class cannot be stepped alone


def temporaries(choice: OptimizerChoice) -> OptimizerTemporaries:
    """Of an optimizer's class, from steps of one and of two small weights.

    What is stepped is the optimizer as ``choice`` makes it, with real values. A choice of several
    has the largest of theirs.
    """
    if choice.parts:
        found = [temporaries(part) for _, part in choice.parts]
        return OptimizerTemporaries(max(f.own for f in found), max(f.carried for f in found))
    return _measured(choice.make)


def _measured(make: Callable[..., torch.optim.Optimizer]) -> OptimizerTemporaries:
    try:
        one, two = (_most(make, count) for count in (1, 2))
    except Exception:  # a class of the user's may raise anything; its state is asked for elsewhere
        return UNKNOWN
    return OptimizerTemporaries(one, max(0.0, two - one))


def _most(make: Callable[..., torch.optim.Optimizer], count: int) -> float:
    """The most that a step of so many equal weights holds at once, in sizes of one."""
    with torch.random.fork_rng(devices=[]):
        weights = [torch.nn.Parameter(torch.ones(_SIDE, _SIDE)) for _ in range(count)]
        optimizer = make(weights)
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()  # its state is there from here on
        with _LiveBytesMode() as live:
            optimizer.step()
    size = weights[0].nbytes
    return live.most / size if live.most >= _LEAST * size else 0.0


class _LiveBytesMode(TorchDispatchMode):
    """Bytes of the tensors that were made within and are still held; ``most`` at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {id(t) for t in (*args, *(kwargs or {}).values()) if isinstance(t, torch.Tensor)}
        if isinstance(out, torch.Tensor) and id(out) not in given and not out._is_view():
            size = out.untyped_storage().nbytes()
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(out, self._gone, size)
        return out

    def _gone(self, size: int) -> None:
        self.now -= size
