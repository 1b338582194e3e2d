"""The mesh: the ranks of one stage as a grid with named axes."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from fxpart.errors import error

_AXIS = re.compile(r"[a-z][a-z0-9_]*\Z")
_SIZE = re.compile(r"(?=0*[1-9])[0-9]{1,6}")


@dataclass(frozen=True)
class Mesh:
    """Named axes with their sizes, major first; a mesh rank is a row-major coordinate index.

    The global rank of (stage, mesh rank) is ``stage * mesh.size + mesh_rank``.
    """

    axes: tuple[tuple[str, int], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Parse ``"dp=2,tp=4"``; empty text is a mesh of one rank. Raise FXP109 for
        invalid text.
        """
        axes: list[tuple[str, int]] = []
        for part in filter(None, (p.strip() for p in text.split(","))):
            name, _, size = (p.strip() for p in part.partition("="))
            fine = _AXIS.match(name) and _SIZE.fullmatch(size)
            if not fine or name in dict(axes):
                raise error(
                    "FXP109",
                    where=f"mesh {text[:80]!r}",
                    why=f"{part[:40]!r} is not a new axis name, = and a size above 0",
                    fix='write it as "dp=2,tp=4"',
                )
            axes.append((name, int(size)))
        return cls(tuple(axes))

    def __str__(self) -> str:
        """Return the text that :meth:`parse` reads."""
        return ",".join(f"{name}={size}" for name, size in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        """The axes' names, major first."""
        return tuple(name for name, _ in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """The axes' sizes, major first."""
        return tuple(size for _, size in self.axes)

    @property
    def size(self) -> int:
        """The number of mesh ranks."""
        return math.prod(self.shape)

    def count(self, *axes: str) -> int:
        """Return the number of ranks along these axes together; an axis that is missing has one."""
        return math.prod(size for name, size in self.axes if name in axes)

    def index(self, axis: str) -> int:
        """Return the position of an axis; raise FXP109 for an unknown one."""
        if axis not in self.names:
            raise error(
                "FXP109",
                where=f"axis {axis[:40]!r}",
                why=f"the mesh has {', '.join(self.names) or 'no axes'}",
                fix="use one of the mesh's axes, or add this axis to the mesh",
            )
        return self.names.index(axis)

    def coordinate(self, mesh_rank: int) -> tuple[int, ...]:
        """Return the coordinate of a mesh rank."""
        found: list[int] = []
        for size in reversed(self.shape):
            mesh_rank, place = divmod(mesh_rank, size)
            found.append(place)
        return tuple(reversed(found))

    def mesh_rank(self, coordinate: tuple[int, ...]) -> int:
        """Return the mesh rank at a coordinate."""
        mesh_rank = 0
        for place, size in zip(coordinate, self.shape, strict=True):
            mesh_rank = mesh_rank * size + place
        return mesh_rank

    def group(self, mesh_rank: int, axis: str) -> tuple[int, ...]:
        """Return the mesh ranks that differ from ``mesh_rank`` only on ``axis``, itself included,
        in order.
        """
        at, here = self.index(axis), self.coordinate(mesh_rank)
        return tuple(
            self.mesh_rank((*here[:at], place, *here[at + 1 :])) for place in range(self.shape[at])
        )


def parse_axes(text: str) -> tuple[str, ...]:
    """Return the axis names in a text such as "dp,cp"; none for an empty text."""
    return tuple(filter(None, (part.strip() for part in text.split(","))))
