"""One torch optimizer over the parameters of this process, from whatever the user gave."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fxpart.compat.several import Several, members
from fxpart.errors import FxpartError, error
from fxpart.optimizers import choose
from fxpart.runtime.groups import Group, Groups, assign

_FIX = "give a torch.optim class, a functools.partial of one, or a function(params) -> optimizer"


def make_optimizer(
    given: Any,
    parameters: Sequence[nn.Parameter],
    groups: Sequence[dict[str, Any]] = (),
) -> torch.optim.Optimizer:
    """The optimizer for ``parameters``.

    given: an Optimizer class, its name ("adamw"), a functools.partial or function of a parameter
    list, or an Optimizer instance, whose class and options are used again (its parameters are
    not); or a mapping of patterns to such, with a group for each (:func:`groups_of`). A rank
    without parameters gets one that does nothing. groups: the same parameters in groups, of which
    some may be empty (:func:`~fxpart.runtime.groups.own`). Raises
    FXP109 for anything else.
    """
    if isinstance(given, Mapping):
        assert len(groups) == len(given), "a group of parameters for each optimizer"
        return Several([
            make_optimizer(one, group["params"], [group])
            for one, group in zip(given.values(), groups, strict=True)
        ])  # fmt: skip
    mine: list[Any] = list(groups or parameters)
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


def groups_of(
    given: Any, groups: Groups | None, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[Group, ...]:
    """The parameter groups of the whole model: the user's, or one for each of several optimizers.

    shapes: of the whole trainable parameters. FXP109 for faults of either.
    """
    if not isinstance(given, Mapping):
        return () if groups is None else assign(groups, shapes)
    if groups is not None:
        raise error(
            "FXP109", where="groups", why="the optimizer is given by names already",
            fix="a pattern of its own for each group, with functools.partial(AdamW, lr=...)",
        )  # fmt: skip
    return tuple(
        Group({"name": pattern}, tuple(names))
        for pattern, names in zip(given, members(given, list(shapes)), strict=True)
    )


def describe_groups(optimizer: torch.optim.Optimizer) -> str:
    """The options of each group in text, for ranks to compare."""
    return "\n".join(
        " ".join(
            f"{key}={_text(value)}"
            for key, value in sorted(group.items())
            if key not in ("params", "param_names")
        )
        for group in optimizer.param_groups
    )


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    plain = (bool, int, float, str, tuple, list, type(None))
    return repr(value) if isinstance(value, plain) else type(value).__name__


def _again(given: torch.optim.Optimizer, parameters: list[Any]) -> torch.optim.Optimizer:
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


# Each number of a parameter is updated by its own gradient and state alone.
_ELEMENTWISE = (
    "SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD",
    "Rprop", "SparseAdam",
)  # fmt: skip


def check_elementwise(
    optimizer: torch.optim.Optimizer, cut: Sequence[str], groups: Sequence[Group] = ()
) -> None:
    """FXP109 if parameters are cut and the optimizer may not be run on parts of them.

    cut: names of parameters of which a lane updates a part only. groups: those of the whole model,
    where the optimizer is several. An optimizer of the user's own
    says with a class attribute ``elementwise = True`` that it may.
    """
    kind = type(optimizer)
    if isinstance(optimizer, Several):
        for one, group in zip(optimizer.each, groups, strict=True):
            check_elementwise(one, [name for name in cut if name in group.names])
        return
    if not cut or getattr(kind, "elementwise", False):
        return
    if any(kind is getattr(torch.optim, name, None) for name in _ELEMENTWISE):
        return
    shown = ", ".join(cut[:3]) + (f" and {len(cut) - 3} more" if len(cut) > 3 else "")
    raise error(
        "FXP109",
        where=f"optimizer {kind.__name__}",
        why=f"each rank updates only a part of {shown}, and it is not known to work number by "
        "number (Adafactor, LBFGS and Muon look at whole matrices)",
        fix=f"use one of {', '.join(_ELEMENTWISE)}; shard neither these parameters nor the "
        "optimizer's state; or set elementwise = True in the class of an optimizer that does",
    )
