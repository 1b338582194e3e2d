"""What a model returns, reduced to named tensors; and the loss where the user gave none."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from fxpart.errors import FxpartError, error


def named_tensors(output: Any) -> dict[str, torch.Tensor]:
    """Every tensor of ``output`` by name; None, numbers and cache objects are dropped.

    A single tensor is "output"; tuple items are "output_0", ...; dict keys and dataclass fields
    keep their names, and nesting joins with "_".
    """
    found: dict[str, torch.Tensor] = {}
    for name, tensor in _walk(output, ""):
        found[_unique(name, found)] = tensor
    return found


Form = Callable[[Mapping[str, Any]], Any]


def form_of(output: Any) -> Form:
    """What puts tensors by name, as :func:`named_tensors` names them, into the output's structure.

    A tensor that is not given is None. Of the output itself only types and plain values are kept;
    a cache object is None.
    """
    return _form(output, "", {})


def _form(value: Any, name: str, taken: dict[str, None]) -> Form:
    """In the order of :func:`_walk`, so that names come out alike."""
    if isinstance(value, (torch.Tensor, fx.Proxy)):
        own = _unique(name or "output", taken)
        taken[own] = None
        return lambda found: found.get(own)
    parts = list(_parts(value, name))
    if parts:
        made = [(key, _form(item, inner, taken)) for key, item, inner in parts]
        kind = type(value)
        return lambda found: _rebuilt(kind, [(key, part(found)) for key, part in made])
    plain = isinstance(value, (bool, int, float, str, type(None), tuple, list, dict))
    return lambda found: value if plain else None


def _rebuilt(kind: type, items: list[tuple[Any, Any]]) -> Any:
    """An object of the type with these items; a plain dict where the type cannot be made so."""
    if issubclass(kind, (tuple, list)):
        values = [value for _, value in items]
        return kind(*values) if hasattr(kind, "_fields") else kind(values)
    if kind is dict:
        return dict(items)
    try:
        return kind(**dict(items))
    except TypeError:
        return dict(items)


def _unique(name: str, taken: Mapping[str, Any]) -> str:
    unique, count = name, 1
    while unique in taken:
        unique, count = f"{name}_{count}", count + 1
    return unique


def own_loss(output: Any) -> torch.Tensor | None:
    """The loss that the output itself carries, ``output.loss`` or ``output["loss"]``, or None."""
    if isinstance(output, fx.Proxy):
        return None  # any attribute of a proxy exists
    if isinstance(output, Mapping):
        loss = output.get("loss")
    else:
        loss = getattr(output, "loss", None)
    if isinstance(loss, fx.Proxy):
        return loss  # type: ignore[return-value]
    return loss if isinstance(loss, torch.Tensor) and loss.numel() == 1 else None


def scalar_outputs(output: Any) -> dict[str, str]:
    """The outputs that may be the loss: name -> the expression that takes it from ``out``.

    These are floating scalars with a gradient. None of an object that has a field for its loss,
    which is empty (a transformers model without labels): its other scalars are parts of a loss.
    """
    if isinstance(output, fx.Proxy) or getattr(output, "loss", output) is None:
        return {}
    if isinstance(output, Mapping) and "loss" in output:
        return {}
    found: dict[str, torch.Tensor] = {}
    paths: dict[str, str] = {}
    for name, tensor in _walk(output, ""):
        unique = _unique(name, found)
        found[unique] = tensor
        if tensor.dim() == 0 and tensor.is_floating_point() and tensor.requires_grad:
            paths[unique] = _expression(output, tensor, "out")
    return paths


def _expression(value: Any, wanted: torch.Tensor, before: str) -> str:
    """The Python expression that takes a tensor out of a structure; "" where it is not there."""
    if value is wanted:
        return before
    for key, item, _ in _parts(value, ""):
        attribute = not isinstance(value, (Mapping, tuple, list))
        inner = f"{before}.{key}" if attribute else f"{before}[{key!r}]"
        found = _expression(item, wanted, inner)
        if found:
            return found
    return ""


def ambiguous_loss(paths: Mapping[str, str], why: str) -> FxpartError:
    """FXP106 for outputs of which any may be the loss; paths as of :func:`scalar_outputs`."""
    choices = " or ".join(f"loss=lambda out: {path}" for path in paths.values())
    return error("FXP106", where="the model's output", why=why, fix=f"give compile() {choices}")


def mean_square(
    outputs: Mapping[str, torch.Tensor], floating: frozenset[str] | None = None
) -> torch.Tensor:
    """The mean over all floating outputs of each one's mean square: a scalar float tensor.

    floating: which outputs float, where that is known already. It stands in for a loss in
    verification and prediction. FXP106 when nothing floats.
    """
    names = [n for n, t in outputs.items() if floating is None and t.is_floating_point()]
    squares = [outputs[n].float().pow(2).mean() for n in floating or names]
    if not squares:
        raise error(
            "FXP106",
            where="the model's output",
            why="it has no .loss and no floating-point tensor",
            fix="give loss=, a function of the output and the targets",
        )
    total = squares[0]
    for square in squares[1:]:
        total = total + square
    return total / len(squares)


def _walk(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, (torch.Tensor, fx.Proxy)):
        yield name or "output", value  # type: ignore[misc]
    for _, item, inner in _parts(value, name):
        yield from _walk(item, inner)


def _parts(value: Any, name: str) -> Iterator[tuple[Any, Any, str]]:
    """Key, value and name of each item of a container; nothing for anything else."""
    if isinstance(value, (torch.Tensor, fx.Proxy)):
        return
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield key, item, _join(name, str(key))
    elif isinstance(value, (tuple, list)):
        fields = getattr(value, "_fields", None)
        for i, item in enumerate(value):
            key = fields[i] if fields else f"{i}" if name else f"output_{i}"
            yield i, item, _join(name, key)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for part in dataclasses.fields(value):
            yield part.name, getattr(value, part.name), _join(name, part.name)


def _join(prefix: str, key: str) -> str:
    return f"{prefix}_{key}" if prefix else key
