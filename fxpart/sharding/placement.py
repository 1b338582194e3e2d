"""Placements of a tensor along one mesh axis. Text: ``"dp:S(0),tp:R"``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

from fxpart.errors import error
from fxpart.sharding.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Shard:
    """Sharded along ``dim`` like by torch.chunk. Text ``S(dim)``, or ``S(dim,outer)``.

    outer: the dim is seen as ``[outer, rest]`` and ``rest`` is sharded, so that each rank stores a
    piece of every one of the ``outer`` parts (a fused query-key-value weight: outer = 3). It counts
    in the dim as earlier mesh axes have sharded it. A symbolic size is text such as ``s0``, and
    counts in the whole dim.
    """

    dim: int
    outer: int | str = 1

    def __str__(self) -> str:
        """Return the text form."""
        return f"S({self.dim})" if self.outer == 1 else f"S({self.dim},{self.outer})"


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank of the axis stores the whole tensor. Text ``R``."""

    def __str__(self) -> str:
        """Return the text form."""
        return "R"


@dataclass(frozen=True, slots=True)
class Partial:
    """The tensor is the sum of the values of the axis's ranks. Text ``P``."""

    def __str__(self) -> str:
        """Return the text form."""
        return "P"


REPLICATE = Replicate()
PARTIAL = Partial()
Placement: TypeAlias = Shard | Replicate | Partial
Placements: TypeAlias = tuple[Placement | None, ...]  # one per mesh axis; None is undecided

_SHARD = re.compile(r"S\((\d{1,2})(?:,(\d{1,9}|(?:\d{1,9}\*)?[a-z]\w{0,19}))?\)\Z")


def parse_placement(text: str) -> Placement | None:
    """Parse one placement; ``?`` is undecided (None). Raise FXP109 for invalid text."""
    if text == "R":
        return REPLICATE
    if text == "P":
        return PARTIAL
    if text == "?":
        return None
    found = _SHARD.match(text)
    if found is None or found[2] in ("0", "1"):
        raise error(
            "FXP109",
            where=f"placement {text[:40]!r}",
            why="it is not S(dim), S(dim,outer), R, P or ?",
            fix='write it as "dp:S(0),tp:R"',
        )
    outer = found[2] or "1"
    return Shard(int(found[1]), int(outer) if outer.isdigit() else outer)


def parse_placements(text: str, mesh: Mesh) -> Placements:
    """Parse ``"dp:S(0),tp:R"`` in any axis order; other axes are undecided. Raise FXP109."""
    found: list[Placement | None] = [None] * len(mesh.axes)
    named: set[str] = set()
    for part in filter(None, (p.strip() for p in re.split(r",(?![^(]*\))", text))):
        axis, colon, placement = (p.strip() for p in part.partition(":"))
        if not colon or axis in named:
            raise error(
                "FXP109",
                where=f"placements {text[:80]!r}",
                why=f"{part[:40]!r} is not a new axis, a colon and a placement",
                fix='write them as "dp:S(0),tp:R"',
            )
        named.add(axis)
        found[mesh.index(axis)] = parse_placement(placement)
    return tuple(found)


def format_placements(placements: Placements, mesh: Mesh) -> str:
    """Return the text that :func:`parse_placements` reads; undecided axes are omitted."""
    return ",".join(
        f"{name}:{placement}"
        for name, placement in zip(mesh.names, placements, strict=True)
        if placement is not None
    )


def count_dim_parts(mesh: Mesh, placements: Placements, dim: int) -> int:
    """Return the number of equal parts of a dim: of its outer parts, each on every rank."""
    outer = 1
    for placement in placements:
        if isinstance(placement, Shard) and placement.dim == dim:
            assert isinstance(placement.outer, int), "rows are not part of a larger dim"
            outer = max(outer, placement.outer)
    return outer * count_dim_ranks(mesh, placements, dim)


def count_dim_ranks(mesh: Mesh, placements: Placements, dim: int) -> int:
    """Return the number of ranks that share a dim."""
    sizes = zip(placements, mesh.shape, strict=True)
    return prod(n for p, n in sizes if isinstance(p, Shard) and p.dim == dim)
