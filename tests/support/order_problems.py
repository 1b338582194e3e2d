"""Random heterogeneous placements: unequal devices, links between pairs, few blocks."""

from __future__ import annotations

from random import Random

import msgspec
from partition_problems import random_problem, with_zero_bubble

from fxpart.solver.assignment.device_order import DeviceLinks
from fxpart.solver.problem import DeviceLimit, PartitionProblem, Variant


def random_orders(seed: int) -> tuple[PartitionProblem, DeviceLinks]:
    """Up to 7 blocks and 5 devices, each with its own speed, memory and links.

    Some devices are copies of others. A few are infeasible.
    """
    rng = Random(seed)
    problem = random_problem(seed, largest=7)
    n = rng.randint(1, 5)
    speeds = [rng.choice((0.5, 1.0, rng.uniform(0.3, 3.0))) for _ in range(n)]
    memories = [rng.choice((200, 10**9, rng.randint(100, 500))) for _ in range(n)]
    near = rng.choice((0.0, 0.01, 0.1))
    latency = [[rng.choice((0.0, 0.2)) for _ in range(n)] for _ in range(n)]
    inverse = [[rng.choice((near, rng.uniform(0, 0.2))) for _ in range(n)] for _ in range(n)]
    if rng.random() < 0.3:  # the last devices are copies of one, over one link
        few = rng.randint(0, n - 1)
        for a in range(n):
            for b in range(n):
                latency[a][b] = latency[min(a, few)][min(b, few)]
                inverse[a][b] = inverse[min(a, few)][min(b, few)]
        speeds[few:] = [speeds[few]] * (n - few)
        memories[few:] = [memories[few]] * (n - few)
    kinds = sorted(set(speeds))
    devices = tuple(
        DeviceLimit(
            name=f"d{k}", type=kinds.index(speeds[k]), memory=memories[k], latency=0.0,
            inverse_bandwidth=0.0,
        )
        for k in range(n)
    )  # fmt: skip
    most = min(n, len(problem.blocks))
    made = msgspec.structs.replace(
        problem,
        devices=devices,
        variants=tuple(_variant(v, kinds) for v in problem.variants),
        step=_rows(problem.step[0], kinds),
        min_stages=min(problem.min_stages, most),
        max_stages=most,
    )
    made = with_zero_bubble(made, seed)
    return made, DeviceLinks(latency=tuple(map(tuple, latency)), inverse=tuple(map(tuple, inverse)))


def _rows(row: tuple[float, ...], kinds: list[float]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(x * kind for x in row) for kind in kinds)


def _variant(variant: Variant, kinds: list[float]) -> Variant:
    return msgspec.structs.replace(
        variant,
        forward=_rows(variant.forward[0], kinds),
        backward=_rows(variant.backward[0], kinds),
    )
