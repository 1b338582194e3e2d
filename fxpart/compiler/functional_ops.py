"""Functional forms of in-place and out= ops, found by torch's naming and schemas."""

from __future__ import annotations

from typing import Any

import torch

from fxpart.compat import operation_schema
from fxpart.compiler.effects import packet_name

# Ops that change a tensor object's shape or gradient, not its storage.
METADATA_OPS = frozenset(
    f"aten.{name}"
    for name in (
        "detach_",
        "squeeze_",
        "unsqueeze_",
        "t_",
        "transpose_",
        "swapaxes_",
        "swapdims_",
        "as_strided_",
    )
)

# Ops whose functional form has no derivative, while the in-place form has a zero gradient.
FILLING = frozenset({"aten.bernoulli_", "aten.normal_"})

# Ops whose functional form does not follow from the name; "" means that there is none.
_IRREGULAR = {
    "aten.normal_": "normal_functional",
    "aten.rrelu_with_noise_": "",
    "aten.set_": "",
    "aten.resize_": "",
    "aten.resize_as_": "",
    "aten.requires_grad_": "",
    "aten.copy_": "",
}


def functional_form(target: Any) -> Any:
    """Return the op that returns what ``target`` would write; None if there is none.

    ``add_.Tensor`` -> ``add.Tensor``; ``add.out`` -> ``add.Tensor``; ``zero_`` -> ``fill.Scalar``,
    whose gradient is a tensor of zeros like that of ``zero_``. The caller adds the value 0.
    """
    schema = operation_schema(target)
    if schema is None:
        return None
    name = packet_name(target)
    if name == "aten.zero_":
        return torch.ops.aten.fill.Scalar
    plain = _IRREGULAR.get(name, name.removeprefix("aten.").removesuffix("_"))
    packet = getattr(torch.ops.aten, plain, None) if plain else None
    if packet is None:
        return None
    wanted = [str(a.type) for a in schema.arguments if not a.is_out]
    for overload in sorted(
        packet.overloads(), key=lambda o: o != (schema.overload_name or "default")
    ):
        candidate = getattr(packet, overload)
        arguments = operation_schema(candidate).arguments
        writes = any(a.alias_info is not None and a.alias_info.is_write for a in arguments)
        if not writes and [str(a.type) for a in arguments] == wanted:
            return candidate
    return None


def missing_defaults(
    target: Any, form: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """Return the defaults of ``target`` that a call leaves out and its functional form requires."""
    pairs = zip(
        operation_schema(target).arguments[len(args) :],
        operation_schema(form).arguments[len(args) :],
        strict=False,
    )
    return tuple(
        mine.default_value
        for mine, other in pairs
        if mine.has_default_value()
        and not other.has_default_value()
        and not other.kwarg_only
        and other.name not in kwargs
    )
