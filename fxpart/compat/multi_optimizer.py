"""Several optimizers as one, each for the parameters that a name pattern matches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch

from fxpart.errors import FxpartError, Problem


class MultiOptimizer(torch.optim.Optimizer):
    """Optimizers that step together, as one for schedulers, checkpoints and hooks.

    Their groups are concatenated in ``param_groups``, and all state is in one ``state``. each: the
    optimizers. names: the parameter names of each.
    """

    def __init__(
        self,
        each: Sequence[torch.optim.Optimizer],
        names: Sequence[Sequence[str]] = (),
    ) -> None:
        """each: optimizers of disjoint parameters."""
        self.each = list(each)
        self.names = [tuple(n) for n in names] or [()] * len(self.each)
        self._counts = [len(one.param_groups) for one in self.each]
        groups = [group for one in self.each for group in one.param_groups]
        super().__init__(groups, {})
        self.param_groups = groups  # shared dicts, so that options apply to the optimizers
        state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        for one in self.each:
            state.update(one.state)
        self.state = state
        self._give()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group during construction only; later the owner would be ambiguous."""
        if "each" in vars(self) and not isinstance(vars(self).get("state"), defaultdict):
            raise TypeError("add_param_group: add the parameters to one of the optimizers instead")
        self.param_groups.append(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore groups and state, and pass each optimizer its own."""
        super().__setstate__(state)
        if "each" in vars(self):
            self._give(add_options=True)

    def __getstate__(self) -> dict[str, Any]:
        """Return all attributes, including the optimizers."""
        return dict(vars(self))

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step every optimizer; the closure is called once before."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for one in self.each:
            one.step()
        return loss

    def _give(self, *, add_options: bool = False) -> None:
        at = 0
        for one, count in zip(self.each, self._counts, strict=True):
            held = {"state": self.state, "param_groups": self.param_groups[at : at + count]}
            if add_options:  # its class may add options of newer versions
                one.__setstate__(held)
            else:
                one.__dict__.update(held)
            at += count


def members(patterns: Iterable[str], names: Sequence[str]) -> list[list[str]]:
    """Return the names that each pattern matches first; raise FXP109 with every problem.

    Every name must match a pattern, and every pattern must match a name.
    """
    problems: list[Problem] = []
    found: list[list[str]] = []
    left, given = list(names), list(patterns)
    for pattern in given:
        mine = [name for name in left if fnmatchcase(name, pattern)]
        if not mine:
            why = "no trainable parameter matches it, or earlier patterns match all that do"
            problems.append(Problem("FXP109", f"optimizer[{pattern!r}]", why, _some(names)))
        left = [name for name in left if name not in set(mine)]
        found.append(mine)
    if left:
        shown = ", ".join(left[:4]) + (f" and {len(left) - 4} more" if len(left) > 4 else "")
        fix = 'add a last pattern "*" for all other parameters'
        problems.append(Problem("FXP109", "optimizer", f"no pattern matches {shown}", fix))
    if problems:
        raise FxpartError(problems)
    return found


class NamedOptimizerFactory:
    """Creates a :class:`MultiOptimizer` of named parameters. named: it takes (name,
    tensor) pairs.
    """

    named = True

    def __init__(self, makes: Mapping[str, Callable[[Any], torch.optim.Optimizer]]) -> None:
        """makes: factory of an optimizer of a list of parameters, by name pattern."""
        self.makes = dict(makes)

    def __call__(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> MultiOptimizer:
        """parameters: names with tensors. Raise FXP109 like :func:`members`, and for bare
        tensors.
        """
        given = list(parameters)
        if any(isinstance(each, torch.Tensor) for each in given):
            why = "optimizers chosen by name patterns received parameters without names"
            raise FxpartError([Problem("FXP109", "optimizer", why, "use one optimizer for all")])
        table = dict(given)
        found = members(self.makes, list(table))
        each = [
            make([table[name] for name in mine])
            for make, mine in zip(self.makes.values(), found, strict=True)
        ]
        return MultiOptimizer(each, found)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"names are {', '.join(names[:4]) or 'none'}{more}"
