"""Divide a batch between the model and the loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from fxpart.capture.flat_batch import BatchSlot, FlatBatch
from fxpart.errors import FxpartError, error

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class CallArguments:
    """The calls ``model(*args, **kwargs)`` and ``loss(output, *targets, **named_targets)``.

    Each item is a tree with :class:`~fxpart.capture.flat_batch.BatchSlot` leaves.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    targets: tuple[Any, ...]
    named_targets: dict[str, Any]


@dataclass(frozen=True)
class _CallableParameters:
    """Parameters of a callable: positional names, number of required ones, keywords and stars."""

    names: tuple[str, ...]
    required: int
    keywords: frozenset[str]
    star: bool
    double_star: bool


def takes(function: Callable[..., Any], *, skip: int = 0) -> _CallableParameters:
    """Return a callable's or module's parameters after the first ``skip``; stars if unknown."""
    target = function.forward if isinstance(function, nn.Module) else function
    try:
        parameters = list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError):
        return _CallableParameters((), 0, frozenset(), True, True)
    plain = [p for p in parameters if p.kind in _POSITIONAL][skip:]
    return _CallableParameters(
        names=tuple(p.name for p in plain),
        required=sum(p.default is p.empty for p in plain),
        keywords=frozenset(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
        | {p.name for p in plain if p.kind is p.POSITIONAL_OR_KEYWORD},
        star=any(p.kind is p.VAR_POSITIONAL for p in parameters),
        double_star=any(p.kind is p.VAR_KEYWORD for p in parameters),
    )


def split_batch_arguments(
    model: nn.Module, loss: Callable[..., Any] | None, parts: FlatBatch, *, has_kwargs: bool
) -> CallArguments:
    """Divide a batch between model and loss.

    has_kwargs: whether the last item of a tuple batch contains keyword arguments. With a loss, the
    last positional items are its targets, as many as it requires. Keyword items that the model does
    not take go to the loss by name, or by position if the names differ. Raise FXP109 if the loss
    does not get its required arguments.
    """
    tree = parts.tree
    if isinstance(tree, dict):
        args: tuple[Any, ...] = ()
        kwargs = dict(tree)
    elif has_kwargs:
        args, kwargs = tuple(tree[:-1]), dict(tree[-1])
    else:
        args, kwargs = tuple(tree), {}
    if loss is None:
        return CallArguments(args, kwargs, (), {})
    model_takes, loss_takes = takes(model), takes(loss, skip=1)
    kwargs, spare = _split_keywords(kwargs, model_takes, loss_takes)
    named = {k: v for k, v in spare.items() if k in loss_takes.keywords}
    loose = tuple(v for k, v in spare.items() if k not in named)
    free = [n for n in loss_takes.names if n not in named]
    room = len(args) + len(loose) if loss_takes.star else len(free)
    required = sum(n in free for n in loss_takes.names[: loss_takes.required])
    surplus = 0 if model_takes.star else len(args) - len(model_takes.names)
    count = max(required - len(loose), min(surplus, room - len(loose)), 0)
    if count > len(args) or count + len(loose) > room:
        raise _unserved(loss_takes, named, len(args), loose)
    cut = len(args) - count
    return CallArguments(args[:cut], kwargs, (*args[cut:], *loose), named)


def _split_keywords(
    kwargs: Mapping[str, Any], model: _CallableParameters, loss: _CallableParameters
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return keyword items for the model, and the remaining ones for the loss."""
    mine = {k: v for k, v in kwargs.items() if k in model.keywords}
    rest = {k: v for k, v in kwargs.items() if k not in model.keywords}
    if not model.double_star:
        return mine, rest
    # A model with **kwargs takes anything: the loss gets only the names it declares, or all items
    # if their number matches exactly.
    named = {k: v for k, v in rest.items() if k in loss.keywords}
    if not named and rest and len(rest) == loss.required:
        return mine, rest
    return {**mine, **{k: v for k, v in rest.items() if k not in named}}, named


def _unserved(
    loss: _CallableParameters, named: Mapping[str, Any], have: int, loose: tuple[Any, ...]
) -> FxpartError:
    needed = [n for n in loss.names[: loss.required] if n not in named]
    return error(
        "FXP109",
        where="loss",
        why=f"it requires {', '.join(needed)} after the output, but the batch has only "
        f"{have} positional and {len(loose)} unused keyword items",
        fix="put the targets at the end of the batch tuple, or in the dict under the loss's "
        "parameter names",
    )


def input_names(
    parts: FlatBatch, call: CallArguments, model: nn.Module, loss: Callable[..., Any] | None
) -> tuple[str, ...]:
    """Return a name for each tensor of the batch: its parameter, plus the path inside it."""
    names = [""] * len(parts.tensors)

    def name(tree: Any, prefix: str) -> None:
        if isinstance(tree, BatchSlot):
            names[tree.index] = prefix
        elif isinstance(tree, dict):
            for key, item in tree.items():
                name(item, f"{prefix}_{key}")
        elif isinstance(tree, (tuple, list)):
            for i, item in enumerate(tree):
                name(item, f"{prefix}_{i}")

    parameters = takes(model).names
    for i, tree in enumerate(call.args):
        name(tree, parameters[i] if i < len(parameters) else f"input_{i}")
    for key, tree in call.kwargs.items():
        name(tree, key)
    if loss is not None:
        wanted = [n for n in takes(loss, skip=1).names if n not in call.named_targets]
        for i, tree in enumerate(call.targets):
            name(tree, wanted[i] if i < len(wanted) else f"target_{i}")
        for key, tree in call.named_targets.items():
            name(tree, key)
    return tuple(names)
