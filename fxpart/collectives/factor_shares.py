"""How much of a cut factor a lane holds: for the local forms of ops.

A form is called ``form(mesh, axes, size, *the op's arguments on local operands)``. ``axes`` are the
mesh axes that cut the factor, major first; ``size`` is the whole factor's. A form for several
factors (``"n c"``) gets a tuple of both: ``form(mesh, (axes of n, axes of c), (size of n, size of
c), ...)``. A gradient that comes to a Partial or Replicate result is whole on every lane; a
Replicate operand's gradient is left Partial.
"""

from __future__ import annotations

from typing import TypeAlias

import torch

from fxpart.collectives.communicator import Communicator, Size
from fxpart.collectives.shard_buffer import lengths
from fxpart.errors import FxpartError, error

Axes: TypeAlias = tuple[str, ...]
MEAN, SUM = 1, 2  # reduction, as ATen counts


def make_unsupported_form_error(form: str, why: str) -> FxpartError:
    """FXP108: an op that has no such form; its rule should not have chosen it."""
    return error(
        "FXP108",
        where=form,
        why=why,
        fix="annotate this operand as replicated along the axis, so that the op runs whole",
    )


def spans(mesh: Communicator, axes: Axes, size: Size) -> list[tuple[Size, Size]]:
    """Start and length of every lane's share, in order of place; each axis cuts what is left."""
    found: list[tuple[Size, Size]] = [(0, size)]
    for axis in axes:
        cut: list[tuple[Size, Size]] = []
        for start, length in found:
            for piece in lengths(length, mesh.size(axis)):
                cut.append((start, piece))
                start = start + piece
        found = cut
    return found


def span(mesh: Communicator, axes: Axes, size: Size) -> tuple[Size, Size]:
    """Start and length of this lane's share of a factor."""
    return spans(mesh, axes, size)[mesh.place(axes)]


def share(
    mesh: Communicator, axes: Axes | tuple[Axes, ...], size: Size | tuple[Size, ...]
) -> float:
    """The part of the whole that this lane holds: of one factor, or of several."""
    if isinstance(size, tuple):
        part = 1.0
        for some, each in zip(axes, size, strict=True):
            part *= share(mesh, some, each)  # type: ignore[arg-type]
        return part
    length = span(mesh, axes, size)[1]  # type: ignore[arg-type]
    if isinstance(size, torch.SymInt):  # shares of symbolic sizes are equal
        return 1 / len(spans(mesh, axes, size))  # type: ignore[arg-type]
    return length / size if size else 1.0
