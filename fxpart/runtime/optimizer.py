"""One torch optimizer over the parameters of this process, from whatever the user gave."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fxpart.errors import FxpartError, error
from fxpart.optimizers import choose

_FIX = "give a torch.optim class, a functools.partial of one, or a function(params) -> optimizer"


def make_optimizer(given: Any, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer for ``parameters``.

    given: an Optimizer class, its name ("adamw"), a functools.partial or function of a parameter
    list, or an Optimizer instance, whose class and options are used again (its parameters are
    not). A rank without parameters gets one that does nothing. Raises FXP109 for anything else.
    """
    mine: list[nn.Parameter] = list(parameters)
    if not mine:
        # torch refuses an empty list; a parameter that never gets a gradient is never touched.
        mine = [nn.Parameter(torch.empty(0))]
    if isinstance(given, torch.optim.Optimizer):
        return _again(given, mine)
    factory = choose(given).make if isinstance(given, str) else given
    made = factory(mine) if callable(factory) else None
    if not isinstance(made, torch.optim.Optimizer):
        what = f"{given!r} is no optimizer" if made is None else f"it returned {made!r}"
        raise error("FXP109", where="optimizer", why=what, fix=_FIX)
    return made


def _again(given: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """A new optimizer of the same class with the instance's present options."""
    if len(given.param_groups) != 1:
        raise _not_again(
            given, f"it has {len(given.param_groups)} parameter groups, and which parameter is in "
            "which cannot be carried over"
        )  # fmt: skip
    group = given.param_groups[0]
    known = inspect.signature(type(given)).parameters
    options = {key: group[key] for key in given.defaults if key in known and key in group}
    try:
        return type(given)(parameters, **options)
    except (TypeError, ValueError) as cause:
        raise _not_again(given, str(cause)) from cause


def _not_again(given: torch.optim.Optimizer, why: str) -> FxpartError:
    return error("FXP109", where=f"optimizer {type(given).__name__}", why=why, fix=_FIX)
