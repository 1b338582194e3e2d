"""Random placement problems, small enough to enumerate, and clusters for them."""

from __future__ import annotations

from random import Random

from fxpart.solver.assignment.problem import (
    AssignmentProblem,
    AssignmentStage,
    InterconnectDomain,
    LinearCost,
    RingCollective,
    StageFlow,
)


def random_topology(seed: int, lanes: int = 6) -> AssignmentProblem:
    """Up to ``lanes`` lanes in one or two pools on up to four places of up to three classes."""
    rng = Random(seed)
    pools, kinds = rng.choice((1, 1, 2)), rng.randint(1, 3)
    groups: list[AssignmentStage] = []
    left = lanes
    while left and len(groups) < 5 and (not groups or rng.random() < 0.9):
        data, tensor = rng.choice(((1, 1), (1, 2), (2, 1), (1, 3), (2, 2), (3, 1)))
        if data * tensor > left:
            data = tensor = 1
        left -= data * tensor
        groups.append(_group(rng, rng.randrange(pools), data, tensor))
    flows = [_flow(rng, a, b) for b in range(len(groups)) for a in range(b) if _linked(rng, a, b)]
    need = [sum(g.mesh_ranks for g in groups if g.pool == k) for k in range(pools)]
    places, hosts = [], rng.randint(1, 3)
    while len(places) < 4 and (len(places) < 2 or min(need) > 0 or rng.random() < 0.5):
        devices = [rng.randint(0, 3) for _ in range(pools)]
        need = [n - d for n, d in zip(need, devices, strict=True)]
        places.append((rng.randrange(hosts), rng.randrange(kinds), devices))
    places[-1][2][:] = [d + max(n, 0) for d, n in zip(places[-1][2], need, strict=True)]
    return AssignmentProblem(
        groups=tuple(groups),
        flows=tuple(flows),
        places=tuple(InterconnectDomain(host=h, kind=k, devices=tuple(d)) for h, k, d in places),
        inside=tuple(_line(rng, 1.0) for _ in range(kinds)),
        between=tuple(tuple(_line(rng, 8.0) for _ in range(kinds)) for _ in range(kinds)),
        uplinks=tuple(rng.choice((0.0, 0.0, rng.uniform(0, 4))) for _ in range(hosts)),
        microbatches=rng.randint(1, 8),
        fill=rng.choice((1.0, 0.5)),
    )


def _linked(rng: Random, a: int, b: int) -> bool:
    return a == b - 1 or rng.random() < 0.2


def _group(rng: Random, pool: int, data: int, tensor: int) -> AssignmentStage:
    return AssignmentStage(
        pool=pool,
        data=data,
        tensor=tensor,
        seconds=rng.uniform(0, 5),
        once=rng.uniform(0, 5),
        exchange=RingCollective(size=rng.uniform(0, 4), messages=rng.randint(0, 3)),
        reduce=RingCollective(size=rng.uniform(0, 4), messages=rng.randint(0, 3)),
    )


def _flow(rng: Random, source: int, target: int) -> StageFlow:
    return StageFlow(
        source=source,
        target=target,
        size=rng.choice((0.0, 1.0, rng.uniform(0, 4))),
        messages=rng.randint(1, 3),
        back=rng.random() < 0.5,
        step=rng.random() < 0.2,
    )


def _line(rng: Random, scale: float) -> LinearCost:
    return LinearCost(latency=rng.choice((0.0, 0.1)), inverse=rng.uniform(0.1, 1.0) * scale)
