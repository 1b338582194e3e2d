"""Joint problems for tests: small random ones for brute force, and models by formula."""

from __future__ import annotations

import random
from collections.abc import Sequence

from msgspec.structs import replace

from fxpart.schedule.weight_modes import MODES
from fxpart.solver.joint.problem import (
    JointProblem,
    JointTiedParameter,
    LinearCost,
    MicrobatchCost,
    ParallelLayout,
    ParallelOption,
    ParameterFootprint,
    Pool,
    StageBoundary,
    StagePin,
    count_microbatch_rows,
)

STREAMS = tuple(name for name, mode in MODES.items() if not mode.flush)


def ring(count: int, latency: float, inverse: float, passes: float = 2.0) -> LinearCost:
    """A ring's all-reduce (2 passes), or reduce-scatter or all-gather (1), in bytes of the whole.

    Thakur, Rabenseifner, Gropp 2005: passes * (n-1) * (latency + bytes / n * inverse).
    """
    if count == 1:
        return LinearCost()
    return LinearCost(
        latency=passes * (count - 1) * latency, inverse=passes * (count - 1) / count * inverse
    )


def make(
    *,
    forward: Sequence[Sequence[float]],
    kinds: Sequence[int],
    batch: int,
    microbatches: Sequence[int],
    pools: Sequence[Pool],
    degrees: Sequence[tuple[int, int, int, int, str]],
    weight: Sequence[int],
    activation: Sequence[int],
    workspace: Sequence[int],
    row_bytes: int,
    overhead: float = 0.0,
    collective: float = 0.0,
    boundaries: Sequence[StageBoundary] | None = None,
    ties: Sequence[JointTiedParameter] = (),
    tie_bytes: int = 0,
    **fields: object,
) -> JointProblem:
    """A problem from a few numbers: time divides by the tensor degree, plus what that costs.

    forward: seconds a row, [pool][kind]; backward is twice that. degrees: (pool, data, tensor,
    zero, recompute). weight, activation (a row), workspace: bytes by kind. overhead: seconds that
    each block costs however small; collective: seconds a row and block that each further tensor
    rank costs. Gradients weigh as weights, optimizer state twice as much.
    """
    tensors = sorted({tensor for _, _, tensor, _, _ in degrees})
    layouts = tuple(
        ParallelLayout(
            tensor=t,
            dense=ParameterFootprint(
                weight=tuple(w // t for w in weight),
                gradient=tuple(w // t for w in weight),
                optimizer=tuple(2 * w // t for w in weight),
                step=tuple(tuple(1e-9 * w / t for w in weight) for _ in pools),
            ),
            buffer=tuple(0 for _ in weight),
            tie_weight=tuple(tie_bytes // t for _ in ties),
            tie_gradient=tuple(tie_bytes // t for _ in ties),
            tie_optimizer=tuple(2 * tie_bytes // t for _ in ties),
        )
        for t in tensors
    )
    options, works = [], {}
    for pool, data, tensor, zero, recompute in degrees:
        layout = tensors.index(tensor)
        line = pools[pool].transfer
        passes = 1.0 if zero else 2.0
        options.append(
            ParallelOption(
                pool=pool, layout=layout, data=data, zero=zero, recompute=recompute,  # type: ignore[arg-type]
                reduce=ring(data, line.latency, line.inverse, passes),
                gather=ring(data, line.latency, line.inverse, 1.0) if zero else LinearCost(),
            )
        )  # fmt: skip
        for m in microbatches:
            rows = count_microbatch_rows(batch, m, data)
            if rows:
                extra = collective * rows * (tensor - 1)
                ahead = [f * rows / tensor + overhead + extra for f in forward[pool]]
                again = {"none": 0.0, "selective": 0.3, "full": 1.0}[recompute]
                kept = {"none": 1.0, "selective": 0.5, "full": 0.1}[recompute]
                works[pool, layout, rows, recompute] = MicrobatchCost(
                    pool=pool, layout=layout, rows=rows, recompute=recompute,  # type: ignore[arg-type]
                    forward=tuple(ahead),
                    backward=tuple((2 + again) * a for a in ahead),
                    collective=tuple(3 * extra for _ in ahead),
                    activation=tuple(int(kept * a * rows) // tensor for a in activation),
                    workspace=tuple(w * rows for w in workspace),
                )  # fmt: skip
    if boundaries is None:
        boundaries = [
            StageBoundary(producer=b, consumers=(b + 1,), row_bytes=row_bytes)
            for b in range(len(kinds) - 1)
        ]
    return JointProblem(
        blocks=tuple(f"b{i}" for i in range(len(kinds))),
        kinds=tuple(kinds),
        batch=batch,
        pools=tuple(pools),
        layouts=layouts,
        works=tuple(works.values()),
        options=tuple(options),
        boundaries=tuple(boundaries),
        ties=tuple(ties),
        microbatches=tuple(microbatches),
        **fields,  # type: ignore[arg-type]
    )


def random_problem(seed: int) -> JointProblem:
    """A small problem with every feature somewhere: 2-6 blocks, 1-2 pools of 1-6 devices."""
    rng = random.Random(seed)
    blocks, pools = rng.randint(2, 6), rng.choice((1, 1, 2))
    kinds_count = rng.randint(1, min(3, blocks))
    kinds = [min(k, kinds_count - 1) for k in range(kinds_count)]
    kinds += [rng.randrange(kinds_count) for _ in range(blocks - kinds_count)]
    rng.shuffle(kinds)
    batch = rng.choice((4, 8, 12))
    memory = rng.choice((400, 900, 2000, 10**6))
    places = [
        Pool(
            name=f"type{p}", devices=rng.randint(1, 6), memory=int(memory * rng.uniform(0.6, 1.4)),
            host=rng.choice((1, 2, 4)),
            transfer=LinearCost(latency=rng.choice((0.0, 0.3)), inverse=rng.choice((0.0, 0.01))),
        )
        for p in range(pools)
    ]  # fmt: skip
    every = [
        (p, data, tensor, zero, recompute)
        for p in range(pools)
        for data in (1, 2, 3)
        for tensor in (1, 2)
        for zero in ((0, 1, 2, 3) if data > 1 else (0,))
        for recompute in ("none", "selective", "full")
        if data * tensor <= places[p].devices
    ]
    degrees = sorted(rng.sample(every, min(len(every), rng.randint(1, 6))))
    boundaries = [
        StageBoundary(
            producer=b,
            consumers=tuple(sorted({b + 1, rng.randrange(b + 1, blocks)})),
            row_bytes=rng.randint(0, 20), fixed_bytes=rng.choice((0, 5)),
            gradient=rng.random() < 0.8, saved=rng.random() < 0.7, sent=b % 3 < 2,
        )
        for b in range(blocks - 1)
    ]  # fmt: skip
    ties = [JointTiedParameter(name="t", blocks=(0, blocks - 1))] if rng.random() < 0.3 else []
    problem = make(
        forward=[[rng.uniform(0.1, 3) for _ in range(kinds_count)] for _ in range(pools)],
        kinds=kinds,
        batch=batch,
        microbatches=sorted(rng.sample((1, 2, 3, 4), rng.randint(1, 2))),
        pools=places,
        degrees=degrees,
        weight=[rng.randint(0, 100) for _ in range(kinds_count)],
        activation=[rng.randint(0, 60) for _ in range(kinds_count)],
        workspace=[rng.randint(0, 10) for _ in range(kinds_count)],
        row_bytes=0,
        overhead=rng.choice((0.0, 0.1)),
        collective=rng.choice((0.0, 0.05)),
        boundaries=boundaries,
        ties=ties,
        tie_bytes=rng.randint(1, 60),
        schedules=tuple(
            rng.choice((("1f1b",), ("gpipe", "1f1b"), ("1f1b", "zb-h1"), ("async",), ("gpipe",)))
        ),
        max_stages=rng.randint(1, blocks),
        no_cut_after=tuple(b for b in range(blocks - 1) if rng.random() < 0.1),
        uniform=rng.random() < 0.3,
    )
    return with_weights(problem, seed)


def with_weights(problem: JointProblem, seed: int) -> JointProblem:
    """The same with one of the weight modes that do not drain."""
    if seed % 3 == 1:  # gradients some of which are rows
        layouts = tuple(
            replace(x, dense=replace(x.dense, unsent=tuple(g // 3 for g in x.dense.gradient)))
            for x in problem.layouts
        )
        problem = replace(problem, layouts=layouts)
    return replace(problem, weights=STREAMS[seed % len(STREAMS)])


def rich_problem(seed: int) -> JointProblem:
    """Random, with more of everything: pins, wished cuts, experts, interleaved, 3 pools."""
    rng = random.Random(seed + 2**20)
    problem = random_problem(seed)
    n, pools = len(problem.blocks), rng.choice((1, 2, 3))
    kinds, batch = max(problem.kinds) + 1, rng.choice((6, 8, 12, 16))
    places = [
        Pool(
            name=f"type{p}", devices=rng.randint(1, 9 // pools),
            memory=rng.choice((500, 1000, 2000, 4000, 10**6)),
            transfer=LinearCost(latency=rng.choice((0.0, 0.2)), inverse=rng.choice((0.0, 0.01))),
        )
        for p in range(pools)
    ]  # fmt: skip
    every = [
        (p, data, tensor, zero, recompute)
        for p in range(pools)
        for data in (1, 2, 3, 4)
        for tensor in (1, 2, 3)
        for zero in ((0, 1, 2, 3) if data > 1 else (0, 3))
        for recompute in ("none", "full")
        if data * tensor <= places[p].devices
    ]
    first = rng.randrange(n)
    stages = rng.choice((1, 2, n, n))
    problem = make(
        forward=[[rng.uniform(0.1, 3) for _ in range(kinds)] for _ in range(pools)],
        kinds=problem.kinds,
        batch=batch,
        microbatches=sorted(rng.sample((1, 2, 3, 4, 6), rng.randint(1, 3))),
        pools=places,
        degrees=sorted(rng.sample(every, min(len(every), rng.randint(1, 7)))),
        weight=[rng.randint(0, 100) for _ in range(kinds)],
        activation=[rng.randint(0, 60) for _ in range(kinds)],
        workspace=[rng.randint(0, 10) for _ in range(kinds)],
        row_bytes=0,
        overhead=rng.choice((0.0, 0.1)),
        collective=rng.choice((0.0, 0.05)),
        boundaries=problem.boundaries,
        ties=problem.ties,
        tie_bytes=rng.randint(1, 60),
        schedules=tuple(
            rng.choice((("1f1b",), ("interleaved",), ("gpipe", "zb-h1"), ("async", "interleaved")))
        ),
        virtual=rng.choice(((2,), (2, 3))),
        min_stages=rng.randint(1, stages),
        max_stages=stages,
        no_cut_after=problem.no_cut_after,
        cut_after=(rng.randrange(n - 1),) if rng.random() < 0.2 else (),
        pins=tuple(
            StagePin(first=first, last=rng.randint(first, min(n - 1, first + 1)), stage=stage)
            for stage in rng.sample((-2, -1, 0, 1, 2), rng.choice((0, 0, 0, 0, 1, 1, 2)))
        ),
        uniform=rng.random() < 0.3,
    )
    return with_weights(_with_experts(problem, rng), seed)


def _with_experts(problem: JointProblem, rng: random.Random) -> JointProblem:
    """Some layouts get experts on two replicas, where all their options have an even number."""
    kinds, layouts = max(problem.kinds) + 1, []
    for index, layout in enumerate(problem.layouts):
        data = [o.data for o in problem.options if o.layout == index]
        if rng.random() < 0.5 and all(d % 2 == 0 for d in data):
            sizes = [tuple(rng.randint(0, 80) for _ in range(kinds)) for _ in range(3)]
            steps = tuple(tuple(rng.uniform(0, 0.2) for _ in range(kinds)) for _ in problem.pools)
            state = ParameterFootprint(
                weight=sizes[0],
                gradient=sizes[1],
                optimizer=sizes[2],
                step=steps,
                unsent=tuple(size // 2 for size in sizes[1]) if index % 2 else (),
            )
            layout = replace(layout, expert=2, experts=state)
        layouts.append(layout)
    line = LinearCost(latency=rng.choice((0.0, 0.1)), inverse=rng.choice((0.0, 0.01)))
    options = tuple(
        replace(o, reduce_experts=line, gather_experts=line) if layouts[o.layout].experts else o
        for o in problem.options
    )
    return replace(problem, layouts=tuple(layouts), options=options)


def transformer(
    layers: int,
    devices: Sequence[int],
    *,
    hidden: int = 12288,
    length: int = 2048,
    vocabulary: int = 50257,
    batch: int = 1536,
    host: int = 8,
    memory: int = 72 * 10**9,
    flops: Sequence[float] = (4e14, 1.4e14),
) -> JointProblem:
    """A GPT by formula on one pool or two: embedding, ``layers`` equal layers, head.

    24 * hidden^2 + 4 * hidden * length FLOPs a token and layer forward (Narayanan et al. 2021,
    appendix); 34 * hidden bytes of activations a token (Korthikanti et al. 2022, with selective
    recompute). Illustrations, not predictions.
    """
    token = 24 * hidden**2 + 4 * hidden * length
    pools = [
        Pool(name=f"gpu{p}", devices=n, memory=memory, host=host,
             transfer=LinearCost(latency=1e-5, inverse=1 / 2.5e10))
        for p, n in enumerate(devices)
    ]  # fmt: skip
    work = [0.0, float(token), float(2 * hidden * vocabulary)]
    degrees = [
        (p, data, tensor, zero, recompute)
        for p, n in enumerate(devices)
        for tensor in (1, 2, 4, 8)
        for data in (2**k for k in range(15))
        for zero in ((0, 1) if data > 1 else (0,))
        for recompute in ("none", "selective", "full")
        if tensor * data <= n and data <= batch
    ]
    return make(
        forward=[[w * length / flops[p] for w in work] for p in range(len(devices))],
        kinds=[0, *[1] * layers, 2],
        batch=batch,
        microbatches=[m for m in (2**k for k in range(12)) if m <= batch]
        + [m for m in (3 * 2**k for k in range(10)) if m <= batch],
        pools=pools,
        degrees=degrees,
        weight=[2 * vocabulary * hidden, 2 * 12 * hidden**2, 2 * vocabulary * hidden],
        activation=[2 * hidden * length, 34 * hidden * length, 4 * vocabulary * length],
        workspace=[0, 0, 0],
        row_bytes=2 * hidden * length,
        overhead=2e-5,
        collective=2 * 2 * hidden * length / 3e11,
        max_stages=layers + 2,
    )
