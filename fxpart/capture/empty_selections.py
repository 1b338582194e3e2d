"""Branches on whether a mask selects anything, such as ``if rows.numel() == 0: continue``.

Calls on selected rows are computed with all rows, so forward is traced as if every mask selects
some. :mod:`fxpart.capture.branch_proof` then proves that the other branch computes the same.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fxpart.capture.source_locations import is_users, shorten_path
from fxpart.compat import answer_data_dependent

_LARGEST = 1 << 62  # a linear condition that is the same for 1 and this is so in between


@dataclass(frozen=True)
class Branch:
    """A decision of one trace: whether a number of data is zero, or an element of a loop.

    symbol: of the number, or of the number of elements. line: of the user's code. element: of the
    loop ``for e in mask.nonzero()``; None for a branch. empty: how it was decided.
    """

    symbol: str
    line: str
    element: int | None
    empty: bool


class Branches(TorchFunctionMode):
    """Decides branches of one trace, and records them.

    is_empty: from (line, element) of a branch to whether it is decided as if nothing is selected.
    negated: lines whose number is zero if something is selected.
    """

    def __init__(
        self,
        is_empty: Callable[[str, int | None], bool] = lambda line, element: False,
        negated: frozenset[str] = frozenset(),
        *,
        decides: bool = True,
    ) -> None:
        """Start without decisions. decides: whether to decide branches at all."""
        super().__init__()
        self.decides = decides
        self.is_empty, self.negated = is_empty, negated
        self.begin()

    def begin(self) -> None:
        """Forget the decisions of an earlier trace."""
        self.found: list[Branch] = []
        self._zero: dict[str, bool] = {}
        self._loops: dict[int, tuple[torch.Tensor, int]] = {}  # by id: itself, most elements

    @contextmanager
    def decided(self) -> Iterator[None]:
        """Decide the branches of a trace."""
        self.begin()
        if not self.decides:
            yield
            return
        with self, answer_data_dependent(self._answer):
            yield

    def _answer(
        self, condition: Any, symbol: Any, least: int | None, largest: int | None
    ) -> bool | None:
        """Return the truth of a condition that depends only on whether the number is zero."""
        difference = condition.lhs - condition.rhs
        linear = difference.is_polynomial(symbol) and difference.diff(symbol).is_number
        if not linear or (least or 0) > 0:
            return None
        most = _LARGEST if largest is None else min(largest, _LARGEST)
        zero, one, many = (bool(condition.subs(symbol, n)) for n in (0, 1, most))
        if zero == one or one != many:
            return None
        name = str(symbol)
        if name not in self._zero:
            line = _users_line()
            empty = self.is_empty(line, None)
            self._zero[name] = empty != (line in self.negated)
            self.found.append(Branch(name, line, None, empty))
        return zero if self._zero[name] else one

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one call; a loop over the True values of a mask [n] runs over all n."""
        if func in _LOOPS and args and id(args[0]) in self._loops and args[1:] in ((), (0,)):
            return self._elements(func, args[0])
        found = func(*args, **(kwargs or {}))
        if func in _NONZERO and args and isinstance(args[0], torch.Tensor) and args[0].dim() == 1:
            size = args[0].shape[0]
            parts = found if isinstance(found, tuple) else (found,)
            if isinstance(size, int) and len(parts) == 1:
                self._loops[id(parts[0])] = parts[0], size
        elif func in _READS:
            _keep_defined(found)
        elif (
            func in _VIEWS and args and id(args[0]) in self._loops and _is_column(func, args, found)
        ):
            self._loops[id(found)] = found, self._loops[id(args[0])][1]
        return found

    def _elements(self, func: Any, loop: torch.Tensor) -> Any:
        """Return the elements that are not decided to be left out."""
        _, size = self._loops[id(loop)]
        symbol, line = str(loop.shape[0]), _users_line()
        kept = []
        for element in range(size):
            empty = self.is_empty(line, element)
            self.found.append(Branch(symbol, line, element, empty))
            if not empty:
                kept.append(element)
        if func is torch.Tensor.tolist:
            return [[e] for e in kept] if loop.dim() == 2 else kept
        return tuple(torch.tensor([e] if loop.dim() == 2 else e) for e in kept)


def _is_column(func: Any, args: Any, found: torch.Tensor) -> bool:
    """Return whether a call returns all elements of a loop [n, 1] as [n]."""
    item = func is torch.Tensor.__getitem__
    return found.dim() == 1 and (not item or args[1] == (slice(None), 0))


def _keep_defined(found: Any) -> None:
    """Keep the calls that read numbers in the graph, which drops those that no call uses."""
    for each in found if isinstance(found, list) else [found]:
        if isinstance(each, torch.SymInt):
            torch._check(each > -(1 << 62))


def _users_line() -> str:
    """Return the innermost line of the user's code."""
    for frame in reversed(traceback.extract_stack()):
        if is_users(frame.filename):
            return f"{shorten_path(frame.filename)}:{frame.lineno}: {frame.line}"
    return ""


_NONZERO = frozenset({torch.nonzero, torch.Tensor.nonzero, torch.argwhere, torch.where})
_LOOPS = frozenset({torch.Tensor.unbind, torch.unbind, torch.Tensor.tolist})
_READS = frozenset({torch.Tensor.tolist, torch.Tensor.item})
_VIEWS = frozenset(
    {torch.Tensor.squeeze, torch.squeeze, torch.Tensor.flatten, torch.flatten, torch.Tensor.view,
     torch.Tensor.reshape, torch.Tensor.__getitem__}
)  # fmt: skip
