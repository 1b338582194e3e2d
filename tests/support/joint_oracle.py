"""Small joint problems with wishes and experts, for comparison with every choice."""

from __future__ import annotations

import random
from collections.abc import Iterator

from joint_problems import random_problem
from msgspec.structs import replace

from fxpart.solver.joint.enumeration import count
from fxpart.solver.joint.problem import (
    JointProblem,
    ParameterFootprint,
    StagePin,
    count_microbatch_rows,
)


def wished_problem(seed: int) -> JointProblem:
    """A random problem, often with pins, cuts, many stages, experts or hybrid sharding."""
    problem, rng = random_problem(seed), random.Random(f"wishes {seed}")
    n, changes = len(problem.blocks), dict[str, object]()
    if rng.random() < 0.3:
        first = rng.randrange(n)
        pin = StagePin(
            first=first, last=rng.randint(first, n - 1), stage=rng.choice((0, 1, -1, -2))
        )
        changes["pins"] = (pin,)
    if rng.random() < 0.2:
        changes["cut_after"] = (rng.randrange(n - 1),)
    if rng.random() < 0.3:
        changes["min_stages"] = rng.randint(1, problem.max_stages)
    even = tuple(o for o in problem.options if o.data % 2 == 0)
    if rng.random() < 0.5:
        changes |= _with_hybrid_sharding(problem, rng)
    elif even and rng.random() < 0.5:
        changes["options"] = tuple(
            replace(o, reduce_experts=o.gather, gather_experts=o.gather) for o in even
        )
        changes["layouts"] = tuple(
            replace(
                layout,
                expert=2,
                experts=ParameterFootprint(
                    weight=layout.dense.gradient,
                    gradient=layout.dense.weight,
                    optimizer=layout.dense.weight,
                    step=layout.dense.step,
                ),
            )
            for layout in problem.layouts
        )
    return replace(problem, **changes)


def _with_hybrid_sharding(problem: JointProblem, rng: random.Random) -> dict[str, object]:
    """Options with ZeRO over two of four replicas, for each with ZeRO over two replicas."""
    works = {(w.pool, w.layout, w.rows, w.recompute): w for w in problem.works}
    options = list(problem.options)
    for one in problem.options:
        tensor = problem.layouts[one.layout].tensor
        if one.data != 2 or not one.zero or 4 * tensor > problem.pools[one.pool].devices:
            continue
        reduce = replace(one.reduce, inverse=one.reduce.inverse * rng.uniform(0.8, 2.0))
        options.append(replace(one, data=4, shard_degree=2, reduce=reduce))
        for m in problem.microbatches:
            old, rows = (count_microbatch_rows(problem.batch, m, data) for data in (2, 4))
            like = works.get((one.pool, one.layout, old, one.recompute))
            if rows and like is not None:
                key = (one.pool, one.layout, rows, one.recompute)
                forward = tuple(seconds * rows / old for seconds in like.forward)
                works.setdefault(key, replace(like, rows=rows, forward=forward))
    return {"options": tuple(options), "works": tuple(works.values())}


def small_problems(number: int, most: int = 5000) -> Iterator[tuple[int, JointProblem]]:
    """So many problems, half of them with wishes, of at most ``most`` choices, with their seeds."""
    seed = found = 0
    while found < number:
        problem = wished_problem(seed) if seed % 2 else random_problem(seed)
        if count(problem) <= most:
            found += 1
            yield seed, problem
        seed += 1
