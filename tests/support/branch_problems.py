"""Partition problems with parallel branches, for tests: made by hand and at random."""

from __future__ import annotations

import random

import msgspec
from partition_problems import random_problem

from fxpart.solver.problem import BlockValue, DeviceLimit, PartitionProblem, Variant


def branches_and_trunk(
    branches: int,
    length: int,
    trunk: int,
    *,
    stages: int,
    microbatches: int,
    memory: int = 10**9,
    backward: float = 0.0,
    seconds: float = 1.0,
) -> PartitionProblem:
    """``branches`` runs of ``length`` blocks that end in one run of ``trunk`` blocks.

    Each block takes ``seconds`` for forward and backward together (the backward's share is
    ``backward``), and one byte of activations; transfers are free.
    """
    values = []
    for k in range(branches):
        first = k * length
        values += [(b, b + 1) for b in range(first, first + length - 1)]
        values.append((first + length - 1, branches * length))
    n = branches * length + trunk
    values += [(b, b + 1) for b in range(branches * length, n - 1)]
    return PartitionProblem(
        blocks=tuple(
            [f"branch{k}.{i}" for k in range(branches) for i in range(length)]
            + [f"trunk.{i}" for i in range(trunk)]
        ),
        devices=tuple(
            DeviceLimit(name=f"d{k}", type=0, memory=memory, latency=0.0, inverse_bandwidth=0.0)
            for k in range(stages)
        ),
        values=tuple(BlockValue(producer=a, consumers=(b,), gradient=True) for a, b in values),
        weights=(),
        variants=(
            Variant(
                microbatch_size=1,
                microbatches=microbatches,
                forward=((seconds * (1 - backward),) * n,),
                backward=((seconds * backward,) * n,),
                activation=(1,) * n,
                workspace=(0,) * n,
                value_bytes=(0,) * len(values),
            ),
        ),
        step=((0.0,) * n,),
        schedules=("1f1b",),
        min_stages=1,
        max_stages=stages,
    )


def random_branches(seed: int, largest: int = 6) -> PartitionProblem:
    """A random problem whose blocks read from one or two earlier ones, or from none."""
    r = random.Random(seed)
    base = random_problem(seed, largest)
    n = len(base.blocks)
    readers: dict[int, list[int]] = {}
    for b in range(1, n):
        for a in sorted(r.sample(range(b), min(b, r.choice([0, 1, 1, 1, 2])))):
            readers.setdefault(a, []).append(b)
    values = tuple(
        BlockValue(
            producer=a,
            consumers=tuple(found),
            gradient=r.random() < 0.7,
            saved=r.random() < 0.5,
        )
        for a, found in sorted(readers.items())
    )
    return msgspec.structs.replace(
        base,
        values=values,
        variants=tuple(
            msgspec.structs.replace(v, value_bytes=tuple(r.randint(0, 20) for _ in values))
            for v in base.variants
        ),
    )
