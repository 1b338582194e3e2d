"""An op as text: the key of its measurements in a profile, and what ops differing in size share."""

from __future__ import annotations

import json
from dataclasses import dataclass
from fractions import Fraction

from fxpart.costs import OpSpec, TensorSpec
from fxpart.files import from_json

# Where the op runs is said by the profile's setting, not by its key.
_PLACE = frozenset({"device", "pin_memory", "layout"})
# Ops whose arguments repeat the shape of their result, by position or name.
_SIZED = {
    **dict.fromkeys("view reshape _unsafe_view expand broadcast_to resize".split(), ("1", "size")),
    **dict.fromkeys("new_zeros new_ones new_empty new_full".split(), ("1", "size")),
    **dict.fromkeys("zeros ones empty full rand randn".split(), ("0", "size")),
    "arange": ("0", "1", "start", "end"),
    "unflatten": ("2", "sizes"),
    "randint": ("2", "size"),
}
_CUT = frozenset({"0", "1"})  # of a form: over which axes, and the size of the whole


def op_key(spec: OpSpec) -> str:
    """The op in canonical JSON: name, inputs, outputs, attributes, inputs that take a gradient.

    A tensor is [dtype, shape, layout], the layout left out where it is row-major. Shapes have to be
    numbers. Attributes that say where the op runs, or repeat the shape of its result, are left out.
    Equal for equal ops, whatever process made them.
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
    """Whether the op is a rank's part of an op that several share: (axes, size, its arguments...).

    Axes are names, or names for each of several factors; the size is the whole's.
    """
    axes = spec.attribute("0")
    names = axes[0] if isinstance(axes, tuple) and axes and isinstance(axes[0], tuple) else axes
    return isinstance(names, tuple) and bool(names) and all(isinstance(n, str) for n in names)


def parse_key(key: str) -> OpSpec:
    """The op that a key describes; ValueError, TypeError or KeyError where it is none."""
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
    """What ops have in common that differ in sizes alone; hashable.

    Of forms it leaves out what is cut into how many parts: they compute on their own part.
    """

    name: str
    tensors: tuple[tuple[str, int, str], ...]
    attributes: str
    gradients: tuple[int, ...]


def family(spec: OpSpec) -> tuple[OpSizeFamily, tuple[int, ...]]:
    """The op's family, and all its sizes in one row."""
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
    """Where two rows of sizes differ, and by which one factor: one = factor x other there.

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
    """An attribute as JSON knows it; sizes that are no numbers as text."""
    if isinstance(value, tuple | list):
        return [_plain(entry) for entry in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _frozen(value: object) -> object:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
