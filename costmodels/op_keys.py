"""Ops as text: the key of measurements in a profile, and families of ops of different sizes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from fractions import Fraction

from fxpart.costs import OpSpec, TensorSpec
from fxpart.files import from_json

# The device of the op is part of the profile's setting, not of the key.
_PLACE = frozenset({"device", "pin_memory", "layout"})
# Ops with arguments that repeat the shape of their result, by position or name.
_SIZED = {
    **dict.fromkeys("view reshape _unsafe_view expand broadcast_to resize".split(), ("1", "size")),
    **dict.fromkeys("new_zeros new_ones new_empty new_full".split(), ("1", "size")),
    **dict.fromkeys("zeros ones empty full rand randn".split(), ("0", "size")),
    "arange": ("0", "1", "start", "end"),
    "unflatten": ("2", "sizes"),
    "randint": ("2", "size"),
}
_CUT = frozenset({"0", "1"})  # of a form: the axes, and the size of the whole


def op_key(spec: OpSpec) -> str:
    """Return the op as canonical JSON: name, inputs, outputs, attributes, inputs with gradient.

    A tensor is [dtype, shape, layout], the layout left out where it is row-major. Shapes must be
    numbers. Attributes with the device, or that repeat the shape of the result, are left out. Equal
    for equal ops in every process.
    """
    known = (*_PLACE, *_SIZED.get(spec.key, ()))
    attributes = [[n, _plain(v)] for n, v in spec.attributes if n not in known]
    value = [
        spec.name,
        [_tensor(t) for t in spec.inputs],
        [_tensor(t) for t in spec.outputs],
        attributes,
        [i for i in range(len(spec.inputs)) if spec.needs(i)],
    ]
    return json.dumps(value, separators=(",", ":"))


def is_form(spec: OpSpec) -> bool:
    """Return whether the op is one rank's part of a sharded op: (axes, size, its arguments...).

    Axes are names, or names for each of several factors; the size is the whole's.
    """
    axes = spec.attribute("0")
    names = axes[0] if isinstance(axes, tuple) and axes and isinstance(axes[0], tuple) else axes
    return isinstance(names, tuple) and bool(names) and all(isinstance(n, str) for n in names)


def parse_key(key: str) -> OpSpec:
    """Parse a key; raises ValueError, TypeError or KeyError for an invalid one."""
    name, inputs, outputs, attributes, gradients = from_json(key)
    return OpSpec(
        name=str(name),
        inputs=tuple(map(_read, inputs)),
        outputs=tuple(map(_read, outputs)),
        attributes=tuple((str(n), _frozen(v)) for n, v in attributes),
        gradients=len(gradients),
        gradient_inputs=tuple(map(int, gradients)),
    )


@dataclass(frozen=True)
class OpSizeFamily:
    """The common properties of ops that differ only in sizes; hashable.

    Without the axes and sizes of forms: they compute on their own part.
    """

    name: str
    tensors: tuple[tuple[str, int, str], ...]
    attributes: str
    gradients: tuple[int, ...]


def family(spec: OpSpec) -> tuple[OpSizeFamily, tuple[int, ...]]:
    """Return the op's family, and all its sizes in one row."""
    both = (*spec.inputs, *spec.outputs)
    known = (*_PLACE, *_SIZED.get(spec.key, ()), *(_CUT if is_form(spec) else ()))
    attributes = [[n, _plain(v)] for n, v in spec.attributes if n not in known]
    found = OpSizeFamily(
        spec.name,
        tuple((t.dtype, len(t.shape), t.layout) for t in both),
        json.dumps([len(spec.inputs), attributes]),
        tuple(i for i in range(len(spec.inputs)) if spec.needs(i)),
    )
    return found, tuple(int(size) for t in both for size in t.shape)


def scale(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[frozenset[int], Fraction] | None:
    """Return where two rows of sizes differ, and the factor there: one = factor x other.

    None where several factors are needed, or a size is 0.
    """
    places = [i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
    if not places or any(other[i] == 0 or one[i] == 0 for i in places):
        return None
    factors = {Fraction(one[i], other[i]) for i in places}
    return (frozenset(places), factors.pop()) if len(factors) == 1 else None


def _tensor(tensor: TensorSpec) -> list[object]:
    shape = [int(size) for size in tensor.shape]
    return [tensor.dtype, shape, tensor.layout] if tensor.layout else [tensor.dtype, shape]


def _read(value: list[object]) -> TensorSpec:
    dtype, shape, *layout = value
    assert isinstance(shape, list)
    return TensorSpec(tuple(map(int, shape)), str(dtype), str(layout[0]) if layout else "")


def _plain(value: object) -> object:
    """Return an attribute as JSON; symbolic sizes as text."""
    if isinstance(value, tuple | list):
        return [_plain(entry) for entry in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _frozen(value: object) -> object:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
