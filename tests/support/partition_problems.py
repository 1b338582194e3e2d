"""Partition problems for the solver's tests: small random ones, and large ones like real models."""

from __future__ import annotations

import random

import msgspec

from fxpart.solver.problem import (
    BlockValue,
    DeviceLimit,
    PartitionProblem,
    Recomputation,
    Recompute,
    SplitBackward,
    Variant,
    Weight,
)

BATCHES = (((1, 1),), ((1, 4),), ((2, 2), (1, 4)), ((4, 1), (2, 2), (1, 4)))


def random_problem(seed: int, largest: int = 8) -> PartitionProblem:
    """Up to ``largest`` blocks on up to 4 unequal devices.

    Skips, ties, buffers, shared storages, fused blocks, tight memories, one or two schedules,
    equal and unequal costs. About one in ten is infeasible.
    """
    r = random.Random(seed)
    n = r.randint(1, largest)
    count, types, whole = r.randint(1, min(4, n)), r.randint(1, 2), r.random() < 0.5
    tight = r.random() < 0.5

    def cost() -> float:
        return float(r.randint(0, 5)) if whole else r.random() * 5

    def rows() -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(cost() for _ in range(n)) for _ in range(types))

    def sizes(length: int) -> tuple[int, ...]:
        return tuple(r.randint(0, 20) for _ in range(length))

    devices = tuple(
        DeviceLimit(
            name=f"d{k}",
            type=r.randrange(types),
            memory=r.randint(80, 400) if tight else 10**9,
            latency=r.choice([0.0, 0.1, r.random()]) if k else 0.0,
            inverse_bandwidth=r.choice([0.0, 0.01, r.random() * 0.05]) if k else 0.0,
        )
        for k in range(count)
    )
    values, duplicated = [], random.Random(seed)
    for _ in range(r.randint(0, 2 * n) if n > 1 else 0):
        producer = r.randrange(n - 1)
        later = range(producer + 1, n)
        consumers = r.sample(later, r.randint(1, min(3, len(later))))
        value = BlockValue(
            producer=producer,
            consumers=tuple(sorted(consumers)),
            gradient=r.random() < 0.7,
            saved=r.random() < 0.5,
        )
        if value.saved and not value.gradient and duplicated.random() < 0.7:
            value = msgspec.structs.replace(value, sent=False)
        values.append(value)
    weights = tuple(
        Weight(
            name=f"w{i}",
            blocks=tuple(sorted(r.sample(range(n), r.randint(1, min(3, n))))),
            weight=r.randint(0, 20),
            gradient=r.choice([0, r.randint(0, 20)]),
            optimizer=r.randint(0, 20),
            buffer=r.random() < 0.2,
            temporary=r.choice([0, r.randint(0, 60)]),
        )
        for i in range(r.randint(0, n + 2))
    )
    variants = tuple(
        Variant(
            microbatch_size=size,
            microbatches=m,
            forward=rows(),
            backward=rows(),
            activation=sizes(n),
            workspace=sizes(n),
            value_bytes=sizes(len(values)),
        )
        for size, m in r.choice(BATCHES)
    )
    return PartitionProblem(
        blocks=tuple(f"b{i}" for i in range(n)),
        devices=devices,
        values=tuple(values),
        weights=weights,
        variants=variants,
        step=rows(),
        no_cut_after=tuple(i for i in range(n) if r.random() < 0.15),
        schedules=r.choice([("1f1b",), ("gpipe",), ("gpipe", "1f1b"), ("1f1b", "gpipe")]),
        min_stages=r.randint(1, count) if r.random() < 0.3 else 1,
        max_stages=count,
        once=r.choice((0.0, 0.0, 0.25)),
        action=r.choice((0.0, 0.0, 0.375)),
    )


def with_zero_bubble(problem: PartitionProblem, seed: int) -> PartitionProblem:
    """The problem under ZB-H1, also or alone, for two of three seeds; splitting takes time."""
    r = random.Random(f"split {seed}")
    choices = (problem.schedules, ("zb-h1",), (*problem.schedules, "zb-h1"))
    variants = tuple(
        msgspec.structs.replace(
            one,
            split=SplitBackward(
                seconds=tuple(tuple(r.random() / 2 for _ in row) for row in one.backward),
                kept=tuple(r.randint(0, 2 * size) for size in one.activation),
            ),
        )
        for one in problem.variants
    )
    return msgspec.structs.replace(problem, schedules=choices[seed % 3], variants=variants)


def filling(schedule: str, microbatches: int, stages: int) -> float:
    """The part of the time through all stages that fills the pipeline, in other words.

    Under ZB-H1 the forwards of a third on the way in, and on the way back as much for each stage
    that has no microbatch to defer.
    """
    if schedule != "zb-h1" or stages == 1:
        return 1.0
    deferred = min(microbatches - 1, stages - 1)
    return (1 + (stages - 1 - deferred) / (stages - 1)) / 3


def transformer(
    *,
    layers: int,
    hidden: int,
    devices: int,
    pieces: int = 2,
    vocabulary: int = 50257,
    sequence: int = 2048,
    batch: int = 512,
    sizes: tuple[int, ...] = (1, 2, 4, 8, 16),
    memory: int = 80 * 2**30,
    host: int = 8,
    kinds: int = 1,
    noise: float = 0.0,
) -> PartitionProblem:
    """A decoder with tied embedding and head, ``pieces`` blocks a layer.

    host: devices on each host. kinds: device types, alternating by host, each slower than the
    last. noise: relative, of costs.
    """
    r = random.Random(1)
    names = ["embed", *(f"layers.{i}.{p}" for i in range(layers) for p in range(pieces))]
    names += ["norm", "head"]
    n, table = len(names), vocabulary * hidden
    layer = [4 * hidden**2, *[8 * hidden**2 // (pieces - 1)] * (pieces - 1)]
    parameters = [table, *layer * layers, 2 * hidden, 0]
    slow, fast = (2e-5, 1 / 5e10), (5e-6, 1 / 4e11)
    links = [(0.0, 0.0), *(fast if k < host else slow for k in range(1, devices))]
    weights = [
        Weight(
            name=f"w{b}.{q}",
            blocks=(0, n - 1) if b == 0 else (b,),
            weight=2 * p // 6,
            gradient=2 * p // 6,
            optimizer=12 * p // 6,
        )
        for b, p in enumerate(parameters)
        if p
        for q in range(6)
    ]
    # each block's result goes to the next; the mask goes from the first block to every layer
    values = [BlockValue(producer=b, consumers=(b + 1,), gradient=True) for b in range(n - 1)]
    values.append(BlockValue(producer=0, consumers=tuple(range(1, n - 2)), gradient=False))
    variants = []
    for size in sizes:
        used = [0, *parameters[1 : n - 1], table]
        one = [2 * p * size * sequence / 4e14 * (1 + noise * r.random()) + 2e-5 for p in used]
        state = 2 * hidden * sequence * size
        variants.append(
            Variant(
                microbatch_size=size,
                microbatches=batch // size,
                forward=tuple(tuple(x * (1 + k) for x in one) for k in range(kinds)),
                backward=tuple(tuple(2 * x * (1 + k) for x in one) for k in range(kinds)),
                activation=(6 * state,) * n,
                workspace=(4 * state,) * n,
                value_bytes=(*(state,) * (n - 1), 8 * sequence * size),
            )
        )
    return PartitionProblem(
        blocks=tuple(names),
        devices=tuple(
            DeviceLimit(
                name=f"host{k // host}/gpu:{k % host}",
                type=k // host % kinds,
                memory=memory,
                latency=latency,
                inverse_bandwidth=inverse,
            )
            for k, (latency, inverse) in enumerate(links)
        ),
        values=tuple(values),
        weights=tuple(weights),
        variants=tuple(variants),
        step=tuple(tuple(p * 16 / 2e12 * (1 + k) for p in parameters) for k in range(kinds)),
        schedules=("1f1b", "gpipe"),
        min_stages=1,
        max_stages=min(devices, n),
    )


def with_random_recompute(problem: PartitionProblem, seed: int) -> PartitionProblem:
    """Return the problem with larger activations, costs of recomputation, and some modes."""
    r = random.Random(seed)
    modes: tuple[Recompute, ...] = ("none", "selective", "full")

    def recomputation(mode: Recompute, variant: Variant) -> Recomputation:
        assert mode != "none", "it has no costs"
        share = 0.5 if mode == "selective" else 1.0
        return Recomputation(
            mode=mode,
            seconds=tuple(tuple(share * f for f in row) for row in variant.forward),
            activation=tuple(r.randint(0, size // 2) for size in variant.activation),
            workspace=tuple(size + r.randint(0, 20) for size in variant.workspace),
            collective=tuple(share / 4 * f for f in variant.forward[0]),
        )

    variants = [
        msgspec.structs.replace(one, activation=tuple(4 * size for size in one.activation))
        for one in problem.variants
    ]
    return msgspec.structs.replace(
        problem,
        variants=tuple(
            msgspec.structs.replace(
                one, recompute=tuple(recomputation(mode, one) for mode in modes[1:])
            )
            for one in variants
        ),
        recompute=r.choice((modes, modes, ("none", "full"), ("selective", "full"), ("full",))),
    )
