"""Create one torch optimizer over this process's parameters from the user's specification."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from fxpart.accelerator import is_accelerator
from fxpart.compat.multi_optimizer import MultiOptimizer, members
from fxpart.compat.optimizer_choice import choose
from fxpart.errors import FxpartError, error
from fxpart.runtime.optimizer.parameter_groups import Groups, ParameterGroup, assign_groups
from fxpart.runtime.optimizer.user_optimizer import UserOptimizer
from fxpart.schedule.weight_modes import PRESCRIBED_OPTIONS, WeightMode

_FUSED = (torch.optim.Adam, torch.optim.AdamW)
_FIX = "pass a torch.optim class, a functools.partial of one, or a function(params) -> optimizer"


def make_optimizer(
    given: Any,
    parameters: Sequence[nn.Parameter],
    groups: Sequence[dict[str, Any]] = (),
    names: Sequence[str] = (),
) -> torch.optim.Optimizer:
    """Return the optimizer for ``parameters``.

    given: an Optimizer class, its name ("adamw"), a functools.partial or function of a parameter
    list, or an Optimizer instance, whose class and options are used (but not its parameters); a
    mapping of patterns to these, with a group for each (:func:`make_parameter_groups`); or a
    :class:`~fxpart.runtime.optimizer.user_optimizer.UserOptimizer`, which needs the parameters'
    ``names`` and is copied without its state. A rank without parameters gets an optimizer that does
    nothing. groups: the same parameters in groups, possibly empty
    (:func:`~fxpart.runtime.optimizer.parameter_groups.make_local_groups`). Raises FXP109 for
    anything else, and FXP115 if the class or function raises.
    """
    if isinstance(given, UserOptimizer):
        return given.over_named(list(zip(names, parameters, strict=True)))
    if isinstance(given, Mapping):
        assert len(groups) == len(given), "there must be one group per optimizer"
        return MultiOptimizer([
            make_optimizer(one, group["params"], [group])
            for one, group in zip(given.values(), groups, strict=True)
        ])  # fmt: skip
    mine: list[Any] = list(groups or parameters)
    if isinstance(given, torch.optim.Optimizer):
        return _make_from_instance(given, mine or [nn.Parameter(torch.empty(0))])
    factory = choose(given).make if isinstance(given, str) else given
    made = _call_factory(factory, mine) if callable(factory) else None
    if not isinstance(made, torch.optim.Optimizer):
        what = f"{given!r} is not an optimizer" if made is None else f"it returned {made!r}"
        raise error("FXP109", where="optimizer", why=what, fix=_FIX)
    _check_parameters(made, mine)
    return made


def _check_parameters(made: torch.optim.Optimizer, given: Sequence[Any]) -> None:
    """Raise FXP115 if a function has created the optimizer of other parameters than its own.

    Without this check it would update the user's module, or nothing, but not what ranks train.
    """
    own = {id(p) for each in given for p in (each["params"] if isinstance(each, dict) else [each])}
    every = [p for group in made.param_groups for p in group["params"] if p.numel()]
    foreign = sum(id(p) not in own for p in every)
    if foreign:
        raise error(
            "FXP115",
            where=f"optimizer {type(made).__name__}",
            why=f"{foreign} of its {len(every)} parameters are not those that the function that "
            "creates it was called with; the trainer updates parameters of its own",
            fix="use the function's argument: lambda parameters: AdamW(parameters)",
        )


def check_selection(
    given: Any,
    whole: Iterable[tuple[str, torch.Tensor]],
    mine: Iterable[tuple[str, torch.Tensor]],
    optimizers: Iterable[torch.optim.Optimizer],
) -> None:
    """Raise FXP115 for a function that groups a rank's parameters otherwise than the model's.

    It may select by dims or dtype, but by position or number of elements only where a rank has the
    same list. whole: meta tensors of all trainable parameters, by name, on which it is called; a
    function that fails on them is not checked. mine: those that it was called with.
    """
    function = given
    while isinstance(function, partial):
        function = function.func
    if not inspect.isroutine(function) or isinstance(given, UserOptimizer):
        return
    named = list(whole)
    try:
        expected = _number_groups(given([tensor for _, tensor in named]))
    except Exception:  # User code may raise any exception.
        return
    groups = {name: expected.get(id(tensor)) for name, tensor in named}
    found: dict[int, int] = {}
    for each in optimizers:
        found |= _number_groups(each)
    for name, tensor in mine:
        if found.get(id(tensor)) != groups[name]:
            raise error(
                "FXP115",
                where=f"optimizer, parameter {name}",
                why="the function that creates the optimizer selects or groups it differently "
                "among a rank's parts of parameters than among the model's parameters",
                fix="pass an optimizer instance of model.parameters(), or groups= by name",
            )


def _number_groups(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """Return the group of each parameter, by identity."""
    return {id(p): n for n, group in enumerate(optimizer.param_groups) for p in group["params"]}


def use_fused_kernels(optimizer: torch.optim.Optimizer) -> None:
    """Select torch's fused kernel on GPUs if the user selected no implementation.

    It updates all tensors of a group in one pass over memory, where the default takes several. Of
    ``Adam`` and ``AdamW`` only; options that the fused kernel does not support keep the default.
    """
    each = optimizer.each if isinstance(optimizer, MultiOptimizer) else (optimizer,)
    for one in each:
        for group in one.param_groups if type(one) in _FUSED else ():
            unset = group["fused"] is None and group["foreach"] is None
            plain = not (group["differentiable"] or isinstance(group["lr"], torch.Tensor))
            parameters = group["params"]
            if unset and plain and parameters and all(is_accelerator(p.device) for p in parameters):
                group["fused"] = all(p.is_floating_point() for p in parameters) or None


def make_parameter_groups(
    given: Any,
    groups: Groups | None,
    shapes: Mapping[str, tuple[int, ...]],
    names: Mapping[str, str] = MappingProxyType({}),
) -> tuple[ParameterGroup, ...]:
    """Return the groups of the whole model: the user's, or one per optimizer of a mapping.

    shapes: of the whole trainable parameters. names: the model's own names where these differ.
    FXP109 for invalid groups or mappings.
    """
    if isinstance(given, UserOptimizer):
        if groups is not None:
            raise error(
                "FXP109", where="groups", why="the optimizer instance has its own groups",
                fix="leave groups= out, or pass the optimizer's class",
            )  # fmt: skip
        return given.groups(shapes)
    back = {names.get(name, name): name for name in shapes}
    if not isinstance(given, Mapping):
        own = {name: shapes[main] for name, main in back.items()}
        assigned = () if groups is None else assign_groups(groups, own)
        return tuple(ParameterGroup(g.options, tuple(back[n] for n in g.names)) for g in assigned)
    if groups is not None:
        raise error(
            "FXP109", where="groups", why="the optimizers are already given by name patterns",
            fix="use one pattern per group, with functools.partial(AdamW, lr=...)",
        )  # fmt: skip
    return tuple(
        ParameterGroup({"name": pattern}, tuple(back[name] for name in found))
        for pattern, found in zip(given, members(given, list(back)), strict=True)
    )


def describe_groups(optimizer: torch.optim.Optimizer) -> str:
    """Return the options of each group as text, for comparison between ranks."""
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


def _make_from_instance(
    given: torch.optim.Optimizer, parameters: list[Any]
) -> torch.optim.Optimizer:
    """Create an optimizer of the same class with the instance's current options."""
    if len(given.param_groups) != 1:
        raise _make_instance_error(
            given, f"it has {len(given.param_groups)} parameter groups, whose assignment of "
            "parameters cannot be copied"
        )  # fmt: skip
    group = given.param_groups[0]
    known = inspect.signature(type(given)).parameters
    options = {key: group[key] for key in given.defaults if key in known and key in group}
    try:
        return type(given)(parameters, **options)
    except (TypeError, ValueError) as cause:
        raise _make_instance_error(given, str(cause)) from cause


def _make_instance_error(given: torch.optim.Optimizer, why: str) -> FxpartError:
    return error("FXP109", where=f"optimizer {type(given).__name__}", why=why, fix=_FIX)


def _call_factory(factory: Any, mine: list[Any]) -> Any:
    """Call the factory with a rank's parameters, which may be too few for it.

    torch rejects an empty list, Muon accepts only matrices, and a function that selects parameters
    may find none. In these cases an empty parameter of one or two dims is added, which never gets a
    gradient and is therefore never updated.
    """
    fillers = [[nn.Parameter(torch.empty(0))], [nn.Parameter(torch.empty(0, 0))]]
    fillers.append([made for each in fillers for made in each])
    grouped = any(isinstance(each, dict) for each in mine)
    attempts = [mine] if mine else []
    attempts += [
        [{**each, "params": [*each["params"], *more]} for each in mine] if grouped else mine + more
        for more in fillers
    ]
    first: Exception | None = None
    for attempt in attempts:
        try:
            return factory(attempt)
        except FxpartError:
            raise
        except Exception as cause:  # User code may raise any exception.
            first = first or cause
    assert first is not None, "at least one attempt was made"
    name = getattr(factory, "__name__", type(factory).__name__)
    raise error(
        "FXP115",
        where=f"optimizer {name}",
        why=f"a rank has {len(mine)} of the model's parameters or groups, for which it raises "
        f"{type(first).__name__}: {first}",
        fix="use an optimizer that accepts any of the model's parameters, or several by pattern: "
        '{"*.weight": Muon, "*": AdamW}',
    ) from first


def make_default_optimizer(mode: WeightMode | None, otherwise: Any = "adamw") -> Any:
    """Return the optimizer of training without a given one: the mode's, or ``otherwise``."""
    if mode is None or not mode.optimizer:
        return otherwise
    return partial(choose(mode.optimizer).make, **PRESCRIBED_OPTIONS.get(mode.optimizer, {}))
