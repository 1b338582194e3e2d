"""Local sizes of a sharded factor, for the sharded forms of ops.

A form is called as ``form(mesh, axes, size, *the op's arguments on local operands)``. ``axes`` are
the mesh axes that shard the factor, major first; ``size`` is the factor's global size. A form for
several factors (``"n c"``) gets tuples: ``form(mesh, (axes of n, axes of c), (size of n, size of
c), ...)``. The gradient of a Partial or Replicate result is replicated; the gradient of a Replicate
operand is Partial.
"""

from __future__ import annotations

from typing import TypeAlias

import torch

from fxpart.collectives.communicator import Communicator, Size
from fxpart.collectives.shard_buffer import lengths
from fxpart.errors import FxpartError, error

Axes: TypeAlias = tuple[str, ...]
MEAN, SUM = 1, 2  # reduction constants of ATen


def make_unsupported_form_error(form: str, why: str) -> FxpartError:
    """Return FXP108 for an unsupported form, which its rule should not select."""
    return error(
        "FXP108",
        where=form,
        why=why,
        fix="annotate this operand as replicated along the axis, so that the op is not sharded",
    )


def spans(mesh: Communicator, axes: Axes, size: Size) -> list[tuple[Size, Size]]:
    """Return start and length of every rank's share, in order; each axis divides the remainder."""
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
    """Return start and length of this rank's share of a factor."""
    return spans(mesh, axes, size)[mesh.place(axes)]


def share(
    mesh: Communicator, axes: Axes | tuple[Axes, ...], size: Size | tuple[Size, ...]
) -> float:
    """Return this rank's fraction of one factor, or of several."""
    if isinstance(size, tuple):
        part = 1.0
        for some, each in zip(axes, size, strict=True):
            part *= share(mesh, some, each)  # type: ignore[arg-type]
        return part
    length = span(mesh, axes, size)[1]  # type: ignore[arg-type]
    if isinstance(size, torch.SymInt):  # shares of symbolic sizes are equal
        return 1 / len(spans(mesh, axes, size))  # type: ignore[arg-type]
    return length / size if size else 1.0
