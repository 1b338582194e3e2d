"""Temporary memory of an optimizer step, measured on the optimizer's real class.

torch's optimizers loop over their weights (on CPUs; on GPUs they process lists of them at once,
whose temporaries are not counted here). Each iteration makes tensors of the weight's size, and
local names keep some of the previous iteration alive: AdamW makes a root and its quotient, and
keeps the quotient of the previous weight, so that two weights of a size need three times that size.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fxpart.compat import TorchDispatchMode
from fxpart.compat.optimizer_choice import OptimizerChoice, is_torch_class

_SIDE = 64  # rows and columns of the test weights
_LEAST = 0.5  # of a weight's size; smaller tensors (rows, columns, scalars) are ignored


@dataclass(frozen=True)
class OptimizerTemporaries:
    """In sizes of a weight: own while it is updated, carried over from the previous weight."""

    own: float
    carried: float

    def of(self, weight: int, before: int) -> int:
        """Return the bytes while a weight is updated after another of size ``before``."""
        return round(self.own * weight + self.carried * before)


UNKNOWN = OptimizerTemporaries(2.0, 1.0)  # AdamW's, for classes that cannot be measured
_TEMPORARIES: dict[Callable[..., torch.optim.Optimizer], OptimizerTemporaries] = {}


def temporaries(choice: OptimizerChoice) -> OptimizerTemporaries:
    """Return the temporaries of an optimizer's class, from steps of one and of two small weights.

    The optimizer is constructed by ``choice``, with real values. A choice of several optimizers has
    the largest of theirs.
    """
    if choice.parts:
        found = [temporaries(part) for _, part in choice.parts]
        return OptimizerTemporaries(max(f.own for f in found), max(f.carried for f in found))
    if not is_torch_class(choice):
        return _measured(choice.make)
    if choice.make not in _TEMPORARIES:
        _TEMPORARIES[choice.make] = _measured(choice.make)
    return _TEMPORARIES[choice.make]


def masks_rows(choice: OptimizerChoice) -> bool:
    """Return whether a step of a table with a sparse gradient calls ``sparse_mask``.

    That numbers all rows of the table. True for classes that cannot be stepped.
    """
    if choice.parts:
        return any(masks_rows(part) for _, part in choice.parts)
    if not is_torch_class(choice):
        return _masks_rows(choice.make)
    if choice.make not in _MASKS:
        _MASKS[choice.make] = _masks_rows(choice.make)
    return _MASKS[choice.make]


_MASKS: dict[Callable[..., torch.optim.Optimizer], bool] = {}


def _masks_rows(make: Callable[..., torch.optim.Optimizer]) -> bool:
    try:
        table = torch.nn.Parameter(torch.ones(_SIDE, _SIDE))
        with torch.random.fork_rng(devices=[]):
            optimizer = make([table])
            table.grad = torch.ones_like(table).to_sparse(1)
            with _LiveBytesMode() as live:
                optimizer.step()
    except Exception:  # a user's class may raise anything
        return True
    return "sparse_mask" in live.packets


def _measured(make: Callable[..., torch.optim.Optimizer]) -> OptimizerTemporaries:
    try:
        one, two = (_most(make, count) for count in (1, 2))
    except Exception:  # a user's class may raise anything
        return UNKNOWN
    return OptimizerTemporaries(one, max(0.0, two - one))


def _most(make: Callable[..., torch.optim.Optimizer], count: int) -> float:
    """Return the peak bytes of a step of ``count`` equal weights, in sizes of one."""
    with torch.random.fork_rng(devices=[]):
        weights = [torch.nn.Parameter(torch.ones(_SIDE, _SIDE)) for _ in range(count)]
        optimizer = make(weights)
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()  # creates the optimizer state
        with _LiveBytesMode() as live:
            optimizer.step()
    size = weights[0].nbytes
    return live.most / size if live.most >= _LEAST * size else 0.0


class _LiveBytesMode(TorchDispatchMode):
    """Counts the bytes of live tensors that were made within; ``most`` is the peak.

    packets: names of the ops that were called.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self.packets: set[str] = set()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.packets.add(func.__name__.partition(".")[0])
        given = {id(t) for t in (*args, *(kwargs or {}).values()) if isinstance(t, torch.Tensor)}
        if isinstance(out, torch.Tensor) and id(out) not in given and not out._is_view():
            size = out.untyped_storage().nbytes()
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(out, self._release, size)
        return out

    def _release(self, size: int) -> None:
        self.now -= size
