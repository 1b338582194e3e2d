"""Buckets in which gradients are packed for their reduction over the ranks of a stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fxpart.pricing.stage_parallelism import StageParallelism
from fxpart.solver.problem import Weight
from fxpart.solver.replicated_chain.gradient_reduction import PIECE as BUCKET

FIRST = 1 << 20  # bytes of the first bucket


@dataclass(frozen=True)
class PackedGradients:
    """Gradients of a stage that are reduced together.

    sizes: their bytes by name of the parameter. copied: whether they are packed into new memory.
    each: whether each backward reduces its own (ZeRO 2), so that a rank keeps parts of them only;
    else the last backward of a step does.
    """

    sizes: Mapping[str, int]
    copied: bool
    each: bool = False

    @property
    def packed(self) -> int:
        """Return the bytes of the packed gradients; 0 where they are not copied."""
        return sum(self.sizes.values()) if self.copied else 0


def list_buckets(
    weights: Sequence[Weight], sharing: StageParallelism, *, shared_memory: bool = False
) -> list[PackedGradients]:
    """Return the buckets of one stage in the order in which they are sent.

    weights: those that no other stage has, in the order in which the forward uses them.
    shared_memory: whether ranks exchange tensors through it, where two need no packing to add them.
    """
    done: list[tuple[int, bool, list[Weight]]] = []
    open_: dict[tuple[object, ...], tuple[int, bool, list[Weight]]] = {}
    for weight in reversed(weights):
        axes, zero = sharing.list_summed_axes(weight.name), sharing.select_zero_axes(weight)
        if not weight.gradient or weight.sparse or not axes or not {*zero} <= {*axes}:
            continue  # equal on all ranks, or taken in parts at the end of the step
        each = bool(zero) and sharing.zero == 2
        fewest = 1 if zero else 2  # gradients that are packed
        if not zero and shared_memory and sharing.mesh.count(*axes) == 2:
            fewest = len(weights) + 1
        limit = BUCKET if done or each else FIRST
        entry = open_.setdefault((axes, zero), (fewest, each, []))
        if entry[2] and sum(w.weight for w in entry[2]) + weight.weight > limit:
            done.append(entry)
            entry = open_[axes, zero] = (fewest, each, [])
        entry[2].append(weight)
    done += open_.values()
    # flags follow the last gradients
    return [
        PackedGradients(
            {w.name: w.weight for w in group}, len(group) + (index == len(done) - 1) >= fewest, each
        )
        for index, (fewest, each, group) in enumerate(done)
    ]


def largest_bucket(weights: Sequence[Weight], sharing: StageParallelism) -> int:
    """Return the bytes of the largest gradient bucket; 0 where no gradients are reduced.

    weights: as without ZeRO, in the order of their blocks, which is that of their use. A stage
    packs only its own gradients; none of its buckets is larger than 25 MiB or one gradient. The
    runtime packs gradients into buckets (:mod:`fxpart.runtime.gradients.buckets`): those of a
    bucket and the bucket itself are resident together until it is full. A gradient that is reduced
    alone is not copied.
    """
    kinds: dict[tuple[str, ...], list[int]] = {}
    for weight in reversed(weights):
        axes = sharing.list_summed_axes(weight.name)
        if weight.gradient and axes:
            kinds.setdefault(axes, []).append(weight.gradient)
    return max(map(_largest, kinds.values()), default=0)


def _largest(sizes: Sequence[int]) -> int:
    """Return the largest bucket of adjacent gradients; a bucket of one gradient is not a copy.

    Except the last one: it has flags behind its gradients, up to 25 MiB.
    """
    found, filled, count, limit = 0, 0, 0, FIRST
    for size in sizes:
        if count and filled + size > limit:
            found, limit = max(found, filled if count > 1 else 0), BUCKET
            filled = count = 0
        filled, count = filled + size, count + 1
    return max(found, filled if count > 1 or filled <= BUCKET else 0)
