"""Costs at microbatch sizes that were not priced, by straight lines through those that were."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from fxpart.solver.problem import PartitionProblem, Variant


def extrapolate_smaller_microbatches(problem: PartitionProblem) -> Iterator[Variant]:
    """Variants with 2, 4, 8, ... times the microbatches of the smallest there is.

    Their bytes and seconds lie on the line through the two smallest sizes known, or through zero:
    estimates, to suggest a size with.
    """
    known = sorted(problem.variants, key=lambda v: (v.microbatch_size, v.microbatches))
    one = known[0]
    other = next((v for v in known if v.microbatch_size > one.microbatch_size), None)
    batch, count = one.microbatch_size * one.microbatches, 2 * one.microbatches
    while count <= batch:
        size = ceil(batch / count)
        if size < one.microbatch_size:
            yield _scaled(one, other, size, count)
        count *= 2


def _scaled(one: Variant, other: Variant | None, size: int, count: int) -> Variant:
    share = size / one.microbatch_size

    def at(small: float, large: float) -> float:
        if other is None:
            return small * share
        slope = (large - small) / (other.microbatch_size - one.microbatch_size)
        return min(small, max(0.0, small - slope * (one.microbatch_size - size)))

    def whole(name: str) -> tuple[int, ...]:
        small, large = getattr(one, name), getattr(other or one, name)
        return tuple(ceil(at(a, b)) for a, b in zip(small, large, strict=True))

    def rows(name: str) -> tuple[tuple[float, ...], ...]:
        small, large = getattr(one, name), getattr(other or one, name)
        return tuple(
            tuple(at(a, b) for a, b in zip(x, y, strict=True))
            for x, y in zip(small, large, strict=True)
        )

    return Variant(
        microbatch_size=size,
        microbatches=count,
        forward=rows("forward"),
        backward=rows("backward"),
        activation=whole("activation"),
        workspace=whole("workspace"),
        value_bytes=whole("value_bytes"),
        collective=tuple(
            at(a, b) for a, b in zip(one.collective, (other or one).collective, strict=True)
        ),
    )
