"""Named tensors of a model's output, and the loss if the user gave none."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from fxpart.errors import FxpartError, error


def named_tensors(output: Any) -> dict[str, torch.Tensor]:
    """Return every tensor of ``output`` by name; None, numbers and cache objects are dropped.

    A single tensor is "output"; tuple items are "output_0", ...; dict keys and dataclass fields
    keep their names, and nesting joins with "_".
    """
    found: dict[str, torch.Tensor] = {}
    for name, tensor in _walk(output, ""):
        found[_unique(name, found)] = tensor
    return found


Form = Callable[[Mapping[str, Any]], Any]


def form_of(output: Any) -> Form:
    """Return a function that puts tensors, named by :func:`named_tensors`, into the structure.

    A missing tensor is None. Only types and plain values of the output itself are kept; a cache
    object is None.
    """
    return _form(output, "", {})


def _form(value: Any, name: str, taken: dict[str, None]) -> Form:
    """Build the form in the order of :func:`_walk`, so that names agree."""
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
    """Return an object of the type with these items; a plain dict if construction fails."""
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
    """Return the loss in the output, ``output.loss`` or ``output["loss"]``, or None."""
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
    """Return the outputs that may be the loss: name -> Python expression of ``out``.

    These are floating-point scalars with a gradient. The result is empty for an object with an
    empty loss field (a transformers model without labels), whose other scalars are parts of a loss.
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
    """Return the Python expression that selects a tensor from a structure; "" if it is missing."""
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
    """Return FXP106 for several possible losses; paths as of :func:`scalar_outputs`."""
    choices = " or ".join(f"loss=lambda out: {path}" for path in paths.values())
    return error("FXP106", where="the model's output", why=why, fix=f"pass {choices} to compile()")


def mean_square(
    outputs: Mapping[str, torch.Tensor], floating: frozenset[str] | None = None
) -> torch.Tensor:
    """Return the mean over all floating-point outputs of their mean squares, a scalar tensor.

    floating: names of the floating-point outputs, if known. The result replaces a loss in
    verification and prediction. Raise FXP106 without floating-point outputs.
    """
    names = [n for n, t in outputs.items() if floating is None and t.is_floating_point()]
    squares = [outputs[n].float().pow(2).mean() for n in floating or names]
    if not squares:
        raise error(
            "FXP106",
            where="the model's output",
            why="it has no .loss and no floating-point tensor",
            fix="pass loss=, a function of the output and the targets",
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
    """Yield key, value and name of each item of a container; nothing for other values."""
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
