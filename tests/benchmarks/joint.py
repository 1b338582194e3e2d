"""What it costs to plan GPT-3 and larger models jointly, and how good the plans are proven to be.

    python tests/benchmarks/joint.py

Problems by formula (tests/support/joint_problems.py): growth with layers and with devices, on one
pool and on two; the same with uniform degrees; and a model of 200 blocks no two of which are alike.
CPU seconds (median of several runs), the step time of the plan, its proven gap, and the gap of what
there is after one second.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

from record import parser, write

LAYERS = (24, 48, 96, 192)
DEVICES = ([128], [1024], [4096], [16384], [512, 512], [1024, 1024], [8192, 8192])


def unlike(blocks: int, devices: list[int]) -> Any:
    """Blocks of random costs, about 30 options a pool."""
    from joint_problems import make

    from fxpart.solver.joint.problem import LinearCost, Pool

    rng = random.Random(blocks)
    degrees = [
        (p, data, tensor, zero, recompute)
        for p, count in enumerate(devices)
        for tensor in (1, 2)
        for data in (1, 2, 3, 4, 6, 8)
        for zero in ((0, 1) if data > 1 else (0,))
        for recompute in ("none", "full")
        if tensor * data <= count
    ]
    return make(
        forward=[
            [rng.uniform(1e-5, 1e-3) * (1 + p) for _ in range(blocks)] for p in range(len(devices))
        ],
        kinds=range(blocks),
        batch=256,
        microbatches=(1, 2, 4, 8, 16, 32, 64),
        pools=[
            Pool(name=f"gpu{p}", devices=count, memory=16 * 10**9, host=8,
                 transfer=LinearCost(latency=1e-5, inverse=1 / 2e10))
            for p, count in enumerate(devices)
        ],
        degrees=degrees,
        weight=[rng.randint(10**5, 5 * 10**7) for _ in range(blocks)],
        activation=[rng.randint(10**5, 3 * 10**7) for _ in range(blocks)],
        workspace=[10**6] * blocks,
        row_bytes=10**6,
        overhead=1e-5,
        collective=1e-5,
        max_stages=blocks,
    )  # fmt: skip


def figures(problem: Any, runs: int, **about: Any) -> dict[str, Any]:
    """Seconds, gaps and the plan's shape."""
    from fxpart.solver.joint.portfolio import solve

    taken, wall = [], []
    for _ in range(runs):
        start, begun = time.process_time(), time.perf_counter()
        found = solve(problem, time_limit=300)
        taken.append(time.process_time() - start)
        wall.append(time.perf_counter() - begun)
    early = solve(problem, time_limit=1)
    assert found.choice is not None
    return {
        **about,
        "blocks": len(problem.blocks),
        "options": len(problem.options),
        "cpu_seconds": round(statistics.median(taken), 2),
        "wall_seconds": round(statistics.median(wall), 2),
        "step_seconds": round(found.objective, 5),
        "status": found.status,
        "gap": round(1 - found.bound / found.objective, 9),
        "stages": len(found.choice.options),
        "microbatches": found.choice.microbatches,
        "one_second": {
            "step_seconds": round(early.objective, 5),
            "gap": round(1 - early.bound / early.objective, 4),
        },
    }


def main() -> None:
    """Every size."""
    options_parser = parser(__doc__)
    options_parser.add_argument("--runs", type=int, default=3)
    options = options_parser.parse_args()
    from joint_problems import transformer
    from msgspec.structs import replace

    made = []
    for layers in LAYERS:
        for devices in DEVICES if layers == 96 else ([1024], [1024, 1024], [8192, 8192]):
            problem = transformer(layers, devices)
            made.append(figures(problem, options.runs, layers=layers, devices=devices))
    for devices in ([1024], [512, 512]):
        problem = replace(transformer(96, devices), uniform=True)
        made.append(figures(problem, options.runs, layers=96, devices=devices, uniform=True))
    for devices in ([16], [8, 8]):
        problem = unlike(200, devices)
        made.append(figures(problem, options.runs, unlike_blocks=200, devices=devices))
    write("joint", made, options)


if __name__ == "__main__":
    main()
