"""Which gradients a stage's lanes sum, and in which buckets: known before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fxpart.runtime.gradients import reduce_scatter

FIRST = 1 << 20  # bytes of the first bucket, so that something moves soon, as in PyTorch's DDP


@dataclass(frozen=True, eq=False)
class PartialGradient:
    """A gradient that is a sum over lanes.

    held: what the optimizer has in the parameter's place. axes: those of the sum. scattered: the
    axis over whose lanes the sum's pieces are spread, "" where all get all of it. bytes: of the
    lane that has the most.
    """

    parameter: torch.Tensor
    held: torch.Tensor
    axes: tuple[str, ...]
    scattered: str
    bytes: int


@dataclass(frozen=True, eq=False)
class GradientBucket:
    """Gradients that travel together.

    flags: terms of which each lane tells, behind the gradients, whether it has one. A gradient that
    a lane has not counts as zeros; one that no lane has stays away.
    """

    axes: tuple[str, ...]
    scattered: str
    terms: tuple[PartialGradient, ...]
    flags: tuple[PartialGradient, ...] = ()

    @property
    def bytes(self) -> int:
        """Of the lane that has the most."""
        return sum(term.bytes for term in self.terms)


def make_buckets(terms: Sequence[PartialGradient]) -> list[GradientBucket]:
    """Neighbours of a kind in buckets of at most 25 MiB; larger ones alone; equal on all lanes.

    terms: in the order in which they become final, as far as it is known.
    """
    done: list[GradientBucket] = []
    open_: dict[tuple[object, ...], list[PartialGradient]] = {}
    for term in terms:
        like = term.parameter
        key = (term.axes, term.scattered, like.dtype, like.device)
        group = open_.setdefault(key, [])
        limit = reduce_scatter.BUCKET if done else min(FIRST, reduce_scatter.BUCKET)
        if group and sum(each.bytes for each in group) + term.bytes > limit:
            done.append(_bucket(group))
            group = open_[key] = []
        group.append(term)
    done += [_bucket(group) for group in open_.values()]
    return _flagged(done, terms)


def _bucket(terms: Sequence[PartialGradient]) -> GradientBucket:
    first = terms[0]
    axes = (first.scattered,) if first.scattered else first.axes
    return GradientBucket(axes, first.scattered, tuple(terms))


def _flagged(done: list[GradientBucket], terms: Sequence[PartialGradient]) -> list[GradientBucket]:
    """The last bucket carries its axes' flags; those of other axes are buckets of their own."""
    groups: dict[tuple[str, ...], list[PartialGradient]] = {}
    for term in terms:
        groups.setdefault(term.axes, []).append(term)
    for axes, flags in groups.items():
        last = done[-1]
        fits = last.axes == axes and not (last.scattered or last.flags)
        if fits and last.bytes <= reduce_scatter.BUCKET:
            done[-1] = replace(last, flags=tuple(flags))
        else:
            done.append(GradientBucket(axes, "", (), tuple(flags)))
    return done
