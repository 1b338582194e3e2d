"""Bytes of gradients that are there twice while they are summed over the ranks of a stage.

The runtime packs gradients into buckets (:mod:`fxpart.runtime.gradients.buckets`): those of a
bucket and the bucket itself are there at once until it is full. A gradient that travels alone is
not copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fxpart.solver.replicated_chain.gradient_reduction import PIECE as BUCKET

if TYPE_CHECKING:
    from fxpart.pricing.stage_parallelism import StageParallelism
    from fxpart.solver.problem import Weight

FIRST = 1 << 20  # of the first one


def largest_bucket(weights: Sequence[Weight], sharing: StageParallelism) -> int:
    """Bytes of the largest bucket that is a copy of gradients; 0 where none are summed.

    weights: as they are without ZeRO, in the order of their blocks, which is that of their use. A
    stage packs its own gradients alone; none of its buckets is larger than 25 MiB or a gradient.
    """
    kinds: dict[tuple[str, ...], list[int]] = {}
    for weight in reversed(weights):
        axes = sharing.partial.get(weight.name, ())
        axes = tuple(a for a in axes if sharing.mesh.shape[sharing.mesh.index(a)] > 1)
        if weight.gradient and axes:
            kinds.setdefault(axes, []).append(weight.gradient)
    return max(map(_largest, kinds.values()), default=0)


def _largest(sizes: Sequence[int]) -> int:
    """Of buckets of neighbours; one of a single gradient is the gradient itself.

    But for the last one: it carries flags behind its gradients, up to 25 MiB.
    """
    found, held, count, limit = 0, 0, 0, FIRST
    for size in sizes:
        if count and held + size > limit:
            found, limit = max(found, held if count > 1 else 0), BUCKET
            held = count = 0
        held, count = held + size, count + 1
    return max(found, held if count > 1 or held <= BUCKET else 0)
