"""Joint problems of large language models by published formulas, for benchmarks.

FLOPs of a layer: 2 a parameter and token that works on it, and 4 * hidden * length a token for
attention (Narayanan et al., SC 2021). Activations a token and layer: (34 + 5 * heads * length /
hidden) * hidden bytes, 34 * hidden with selective recompute, 2 * hidden with full (Korthikanti et
al., 2022, with sequence parallelism). 2 bytes of weight, 4 of gradient, 12 of optimizer state a
parameter. Devices: an H100's and an A100's rates that are reached, not peaks. Illustrations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from joint_problems import ring

from fxpart.solver.joint.problem import (
    JointProblem,
    LinearCost,
    MicrobatchCost,
    ParallelLayout,
    ParallelOption,
    ParameterFootprint,
    Pool,
    StageBoundary,
    count_microbatch_rows,
)

HOST = 8
FLOPS = (4e14, 1.4e14)  # H100, A100
INSIDE = 3e11  # bytes a second and device between devices of a host
LINK = LinearCost(latency=1e-5, inverse=1 / 4e10)  # between hosts
STREAM = 2e12  # bytes a second of a device's own memory
RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class Shape:
    """A model. dense, experts: parameters of a layer; active: those that a token meets."""

    layers: int
    hidden: int
    heads: int
    length: int
    vocabulary: int
    batch: int
    dense: int
    experts: int = 0
    active: int = 0
    chosen: int = 0  # experts of a token

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.layers * (self.dense + self.experts) + 2 * self.vocabulary * self.hidden


MODELS = {
    "GPT-3 175B": Shape(96, 12288, 96, 2048, 50257, 1536, dense=12 * 12288**2),
    "Llama 70B": Shape(
        80, 8192, 64, 4096, 32000, 1024,
        dense=2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672,
    ),
    "1T mixture of experts": Shape(
        61, 7168, 64, 4096, 128000, 4096, dense=4 * 7168**2,
        experts=256 * 3 * 7168 * 3000, active=8 * 3 * 7168 * 3000, chosen=8,
    ),
}  # fmt: skip


def language_model(shape: Shape, devices: Sequence[int]) -> JointProblem:
    """Embedding, equal layers, head, on a pool of H100s and, with a second count, one of A100s."""
    pools = tuple(
        Pool(name=name, devices=n, memory=72 * 10**9, host=HOST, transfer=LINK)
        for name, n in zip(("H100", "A100"), devices, strict=False)
    )
    degrees = [(t, 1) for t in (1, 2, 4, 8)]
    if shape.experts:
        degrees += [(t, e) for t in (1, 2, 4, 8) for e in (8, 32, 64)]
    layouts = tuple(_layout(shape, t, e, len(pools)) for t, e in degrees)
    counts = [2**k for k in range(13)] + [3 * 2**k for k in range(12)]
    microbatches = tuple(sorted(m for m in counts if m <= shape.batch))
    options, works = list[ParallelOption](), dict[tuple[int, int, int, str], MicrobatchCost]()
    for p, pool in enumerate(pools):
        for index, (t, e) in enumerate(degrees):
            for data in (2**k for k in range(15)):
                if data % e or data * t > pool.devices or data > shape.batch:
                    continue
                for mode in RECOMPUTE:
                    options += _options(p, index, data, e, mode)
                    for m in microbatches:
                        rows = count_microbatch_rows(shape.batch, m, data)
                        key = p, index, rows, mode
                        if rows and key not in works:
                            works[key] = _work(shape, key, t, e)
    return JointProblem(
        blocks=("embedding", *(f"layers.{i}" for i in range(shape.layers)), "head"),
        kinds=(0, *[1] * shape.layers, 2),
        batch=shape.batch,
        pools=pools,
        layouts=layouts,
        works=tuple(works.values()),
        options=tuple(options),
        boundaries=tuple(
            StageBoundary(producer=b, consumers=(b + 1,), row_bytes=2 * shape.hidden * shape.length)
            for b in range(shape.layers + 1)
        ),
        microbatches=microbatches,
        max_stages=shape.layers + 2,
    )


def _layout(shape: Shape, tensor: int, expert: int, pools: int) -> ParallelLayout:
    table = shape.vocabulary * shape.hidden

    def state(sizes: tuple[int, int, int]) -> ParameterFootprint:
        own = [size // tensor for size in sizes]
        return ParameterFootprint(
            weight=tuple(2 * s for s in own),
            gradient=tuple(4 * s for s in own),
            optimizer=tuple(12 * s for s in own),
            step=tuple(tuple(30 * s / STREAM for s in own) for _ in range(pools)),
        )

    with_all = shape.experts if expert == 1 else 0
    return ParallelLayout(
        tensor=tensor,
        expert=expert,
        dense=state((table, shape.dense + with_all, table)),
        experts=state((0, shape.experts // expert, 0)) if expert > 1 else None,
        buffer=(0, 0, 0),
    )


def _options(pool: int, layout: int, data: int, expert: int, mode: str) -> list[ParallelOption]:
    """Without ZeRO and with level 1."""

    def lines(count: int, zero: int) -> tuple[LinearCost, LinearCost]:
        passes = 1.0 if zero else 2.0
        gather = ring(count, LINK.latency, LINK.inverse / 2, 1.0) if zero else LinearCost()
        return ring(count, LINK.latency, LINK.inverse, passes), gather  # weights: half the bytes

    made = []
    for zero in (0, 1) if data > 1 else (0,):
        reduce, gather = lines(data, zero)
        apart, gather_apart = (
            lines(data // expert, zero) if expert > 1 else (LinearCost(), LinearCost())
        )
        made.append(
            ParallelOption(
                pool=pool, layout=layout, data=data, zero=zero, recompute=mode,  # type: ignore[arg-type]
                reduce=reduce, gather=gather, reduce_experts=apart, gather_experts=gather_apart,
            )
        )  # fmt: skip
    return made


def _work(shape: Shape, key: tuple[int, int, int, str], tensor: int, expert: int) -> MicrobatchCost:
    """One microbatch of so many sequences on each replica."""
    pool, layout, rows, mode = key
    tokens = rows * shape.length
    flops = 2 * (shape.dense + shape.active) + 4 * shape.hidden * shape.length
    attention = 4 * shape.hidden * shape.length / flops
    sizes = 2 * shape.hidden * tokens
    sums = 2 * 2 * (tensor - 1) / tensor * sizes / INSIDE
    rate = INSIDE if expert * tensor <= HOST else 1 / LINK.inverse
    routed = 2 * shape.chosen * sizes / tensor * (expert - 1) / expert / rate
    moved = sums + routed
    ahead = (
        0.0,
        tokens * flops / FLOPS[pool] / tensor,
        tokens * 2 * shape.hidden * shape.vocabulary / FLOPS[pool] / tensor,
    )
    again = {"none": 0.0, "selective": attention, "full": 1.0}[mode]
    kept = {"none": 34 + 5 * shape.heads * shape.length / shape.hidden, "selective": 34, "full": 2}
    times = 2 + (mode == "full")
    return MicrobatchCost(
        pool=pool, layout=layout, rows=rows, recompute=mode,  # type: ignore[arg-type]
        forward=(ahead[0], ahead[1] + moved, ahead[2]),
        backward=(0.0, (2 + again) * ahead[1] + (times - 1) * moved, 2 * ahead[2]),
        collective=(0.0, times * moved, 0.0),
        activation=(
            0, int(kept[mode] * shape.hidden * tokens) // tensor,
            6 * shape.vocabulary * tokens // tensor,
        ),
        workspace=(0, int(kept["none"] * shape.hidden * tokens) // tensor * (mode == "full"), 0),
    )  # fmt: skip
