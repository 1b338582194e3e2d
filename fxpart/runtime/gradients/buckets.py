"""Partial gradients of a stage and their buckets, determined before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fxpart.runtime.gradients import reduce_scatter
from fxpart.sharding.mesh import parse_axes

# Bytes of the first bucket; small, so that communication starts early, as in PyTorch's DDP.
FIRST = 1 << 20


@dataclass(frozen=True, eq=False)
class PartialGradient:
    """A gradient that must be summed over mesh ranks.

    shard: the optimizer's tensor for the parameter. axes: mesh axes of the sum. scattered: the axes
    along which the sum is reduce-scattered, "" for an all-reduce. bytes: the maximum over the mesh
    ranks.
    """

    parameter: torch.Tensor
    shard: torch.Tensor
    axes: tuple[str, ...]
    scattered: str
    bytes: int


@dataclass(frozen=True, eq=False)
class GradientBucket:
    """Gradients that are reduced together.

    flags: terms for which each mesh rank sends, after the gradients, whether it has one. A missing
    gradient counts as zeros; if no mesh rank has it, the gradient stays None.
    """

    axes: tuple[str, ...]
    scattered: str
    terms: tuple[PartialGradient, ...]
    flags: tuple[PartialGradient, ...] = ()

    @property
    def bytes(self) -> int:
        """The maximum over the mesh ranks."""
        return sum(term.bytes for term in self.terms)


def make_buckets(terms: Sequence[PartialGradient]) -> list[GradientBucket]:
    """Put adjacent terms of a kind into buckets of at most 25 MiB, equal on all mesh ranks.

    A larger term gets its own bucket. terms: in the expected order in which they become final.
    """
    done: list[GradientBucket] = []
    open_: dict[tuple[object, ...], list[PartialGradient]] = {}
    for term in terms:
        like = term.parameter
        key = (term.axes, term.scattered, like.dtype, like.device)
        group = open_.setdefault(key, [])
        limit = reduce_scatter.BUCKET if done else min(FIRST, reduce_scatter.BUCKET)
        if group and sum(each.bytes for each in group) + term.bytes > limit:
            done.append(_make_bucket(group))
            group = open_[key] = []
        group.append(term)
    done += [_make_bucket(group) for group in open_.values()]
    return _add_flags(done, terms)


def _make_bucket(terms: Sequence[PartialGradient]) -> GradientBucket:
    first = terms[0]
    axes = parse_axes(first.scattered) or first.axes
    return GradientBucket(axes, first.scattered, tuple(terms))


def _add_flags(
    done: list[GradientBucket], terms: Sequence[PartialGradient]
) -> list[GradientBucket]:
    """Add the flags to the last bucket; flags of other axes become buckets of their own."""
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
