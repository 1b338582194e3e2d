"""Bytes of a problem under offload to host memory, on devices with memory of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from fxpart.plan.offload import AHEAD, Offload, offloads_activations, offloads_optimizer
from fxpart.solver.joint.problem import JointProblem, MicrobatchCost, ParallelLayout
from fxpart.solver.problem import PartitionProblem, Variant, Weight

_WAITING = 2 * AHEAD  # in both directions
P = TypeVar("P", PartitionProblem, JointProblem)


def offload_weight(weight: Weight) -> Weight:
    """Return a parameter whose optimizer state is on the host, and which is updated there."""
    copied = weight.weight + weight.gradient
    return msgspec.structs.replace(
        weight,
        optimizer=0,
        temporary=0,
        host=copied + weight.optimizer + weight.temporary,
        copied=copied,
    )


def offload_variant(variant: Variant) -> Variant:
    """Return the bytes of a microbatch whose activations are on the host; seconds do not change."""
    return msgspec.structs.replace(
        variant,
        activation=(0,) * len(variant.activation),
        workspace=add_copies(variant.workspace, variant.activation, variant.largest),
        recompute=tuple(
            msgspec.structs.replace(
                mode,
                activation=(0,) * len(mode.activation),
                workspace=add_copies(mode.workspace, mode.activation, variant.largest),
            )
            for mode in variant.recompute
            if mode.mode != "selective"
        ),
        offloaded=variant.activation,
    )


def add_copies(
    workspace: Sequence[int], activation: Sequence[int], largest: int
) -> tuple[int, ...]:
    """Return the bytes while a block runs, with its activations and those being copied.

    largest: bytes of the largest tensor that autograd saves.
    """
    return tuple(w + a + _WAITING * largest for w, a in zip(workspace, activation, strict=True))


def with_offload(problem: P, offload: Offload) -> P:
    """Return the problem with the bytes of this offload. Its seconds are without offload."""
    if isinstance(problem, JointProblem):
        return _offload_joint(problem, offload)
    weights, variants, modes = problem.weights, problem.variants, problem.recompute
    if offloads_optimizer(offload):
        weights = tuple(offload_weight(w) if w.gradient else w for w in weights)
    if offloads_activations(offload):
        variants = tuple(map(offload_variant, variants))
        modes = tuple(mode for mode in modes if mode != "selective") or ("none",)
    return msgspec.structs.replace(problem, weights=weights, variants=variants, recompute=modes)


def _offload_joint(problem: JointProblem, offload: Offload) -> JointProblem:
    layouts, works, options = problem.layouts, problem.works, problem.options
    if offloads_optimizer(offload):
        layouts = tuple(map(_offload_layout, layouts))
    if offloads_activations(offload):
        options = tuple(o for o in options if o.recompute != "selective")
        works = tuple(_offload_work(w) for w in works if w.recompute != "selective")
    return msgspec.structs.replace(problem, layouts=layouts, works=works, options=options)


def _offload_layout(layout: ParallelLayout) -> ParallelLayout:
    states = [
        None
        if state is None
        else msgspec.structs.replace(state, optimizer=(0,) * len(state.optimizer))
        for state in (layout.dense, layout.experts)
    ]
    return msgspec.structs.replace(
        layout, dense=states[0], experts=states[1], tie_optimizer=(0,) * len(layout.tie_optimizer)
    )


def _offload_work(work: MicrobatchCost) -> MicrobatchCost:
    return msgspec.structs.replace(
        work,
        activation=(0,) * len(work.activation),
        workspace=add_copies(work.workspace, work.activation, work.largest),
    )
