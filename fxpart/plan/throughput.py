"""Throughput of a plan: samples/s, tokens/s, model FLOP/s and MFU at its step time."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING

import msgspec

from fxpart.cluster.presets import architecture_data

if TYPE_CHECKING:
    from fxpart.plan.model import Plan, PlanInput

_INTEGERS = ("int64", "int32", "int16", "uint8")
NO_FLOPS = "an earlier version of fxpart made the plan; plan again to count the model's FLOPs"


class ModelWork(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a model computes in training, counted from its captured graph.

    flops: model FLOPs of one sample, or of one microbatch if no input has a batch dim. sizes: the
    example's size of each symbolic dim. dtype: in which most of the FLOPs are computed.
    """

    flops: float
    sizes: dict[str, int] = {}
    dtype: str = "float32"


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan processes per second at its step time; None where a figure is not known.

    samples_per_second: ``batch_size / step_time``. tokens_per_second: samples/s times the sequence
    length, for models whose first input is an integer tensor of shape [batch, sequence].
    model_flops: of one step. tflops_per_device: ``model_flops / step_time / ranks / 1e12``. mfu:
    model FLOPs utilization, ``model_flops / (step_time * sum of the devices' peak FLOP/s)``, with
    the peaks of the model's dtype, or of float8 under fp8. notes: why a figure is not known, and a
    warning where the MFU is above all published ones of such devices, as sentences.

    Model FLOPs are those of the forward and twice as many for the backward; recomputation does not
    count. Source: A. Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways" (2022),
    appendix B; D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters
    Using Megatron-LM" (2021), section 5.1, which counts recomputation too.
    """

    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    model_flops: float | None = None
    tflops_per_device: float | None = None
    mfu: float | None = None
    notes: tuple[str, ...] = ()


class RowFigures(msgspec.Struct, frozen=True):
    """What one row of a batch costs, to convert measured steps; None where not known.

    tokens: per row. mfu_seconds: the step time per row at which the MFU is 1.
    """

    tokens: float | None = None
    mfu_seconds: float | None = None


def compute_row_figures(plan: Plan) -> RowFigures:
    """Return the tokens and the ideal seconds of one row of the plan's batch."""
    found = compute_throughput(plan)
    seconds, rate = plan.prediction.expected_seconds, found.samples_per_second
    tokens = None if not rate or found.tokens_per_second is None else found.tokens_per_second / rate
    ideal = None if found.mfu is None else found.mfu * seconds / plan.batch_size
    return RowFigures(tokens, ideal)


def compute_throughput(plan: Plan) -> Throughput:
    """Return the throughput of a plan."""
    seconds, work = plan.prediction.expected_seconds, plan.model.work
    if not seconds:
        return Throughput()
    notes: list[str] = []
    length = _sequence_length(plan, {} if work is None else work.sizes, notes)
    rate = plan.batch_size / seconds
    found = Throughput(
        samples_per_second=rate, tokens_per_second=None if length is None else rate * length
    )
    if length is None and not notes:  # no tokens: MFU is a figure of models with tokens
        return found
    if work is None:
        return msgspec.structs.replace(found, notes=(*notes, f"MFU is not known: {NO_FLOPS}."))
    peak = _peak(plan, work, notes)
    has_rows = any(item.batch_dim is not None for item in plan.model.inputs)
    flops = work.flops * (plan.batch_size if has_rows else plan.microbatches)
    mfu = None if peak is None else flops / (seconds * peak)
    if mfu is not None:
        notes += _warn_above_published(plan, mfu)
    return msgspec.structs.replace(
        found,
        model_flops=flops,
        tflops_per_device=flops / seconds / plan.world / 1e12,
        mfu=mfu,
        notes=tuple(notes),
    )


def _warn_above_published(plan: Plan, mfu: float) -> list[str]:
    """Return a warning if the MFU is above all published ones of the plan's devices."""
    models = {plan.device(rank).model for rank in range(plan.world)}
    known = [data for data in map(architecture_data, sorted(models)) if data is not None]
    if len(known) < len(models) or not all("mfu" in data for data in known):
        return []
    best = max(known, key=lambda data: float(data["mfu"]))
    if mfu <= best["mfu"]:
        return []
    return [
        f"Warning: the predicted MFU of {mfu:.0%} is above the highest published for GPUs of the "
        f"{best['name']} architecture, {best['mfu']:.0%}. Expect a longer step time."
    ]


def _sequence_length(plan: Plan, sizes: Mapping[str, int], notes: list[str]) -> int | None:
    """Return the tokens of one sample; None for a model without tokens or of unknown length."""
    inputs = plan.model.inputs
    if not inputs or not _has_tokens(inputs[0]):
        return None
    first = inputs[0]
    dims = [d for i, d in enumerate(first.shape) if i != first.batch_dim]
    known = [d if isinstance(d, int) else sizes.get(d) for d in dims]
    if None in known:
        notes.append(
            f"tokens/s is not known: the sequence length of {first.name} is the symbol {dims[0]}."
        )
        return None
    return prod(d for d in known if d is not None)


def _has_tokens(item: PlanInput) -> bool:
    """Return whether an input is an integer tensor of shape [batch, sequence]."""
    return item.dtype in _INTEGERS and item.batch_dim is not None and len(item.shape) == 2


def _peak(plan: Plan, work: ModelWork, notes: list[str]) -> float | None:
    """Return the sum of the peak FLOP/s of the plan's devices in the dtype of its products."""
    dtype = "float8" if plan.precision == "fp8" else work.dtype
    devices = [plan.device(rank) for rank in range(plan.world)]
    unknown = sorted({device.model for device in devices if not device.flops.get(dtype)})
    if unknown:
        notes.append(f"MFU is not known: {', '.join(unknown)} has no peak FLOP/s for {dtype}.")
        return None
    return sum(device.flops[dtype] for device in devices)
