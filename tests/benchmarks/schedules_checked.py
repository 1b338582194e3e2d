"""Random schedules, whole and damaged, in the eyes of verifier, simulator and brute force.

    python tests/benchmarks/schedules_checked.py [--count 10000] [--seed 0] [--processes 2]

Stage graphs of 2 to 16 stages and 1 to 64 microbatches: chains, skips, branches, virtual stages,
copies of stages, split backwards, computations and transfers in random orders. Each is verified and
simulated, then damaged in two ways. A disagreement ends the run with the schedule as text.
Written down: how many there were of each sort, and of each damage how many were wrong for all, and
how many right for all.
"""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from record import parser, write


def checked(count: int, seed: int) -> Counter[str]:
    """So many, counted by sort; see tests/support/schedule_agreement.py."""
    from schedule_agreement import many

    return many(count, seed)


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("--count", type=int, default=10_000)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--processes", type=int, default=2)
    given = options.parse_args()
    parts, begun = 20, time.perf_counter()
    sizes = [given.count // parts + (k < given.count % parts) for k in range(parts)]
    seeds = [given.seed * parts + k for k in range(parts)]
    with ProcessPoolExecutor(given.processes) as pool:
        found = sum(pool.map(checked, sizes, seeds), Counter[str]())
    seconds = round(time.perf_counter() - begun, 1)
    figures = {"schedules": given.count, "seconds": seconds, "seen": dict(sorted(found.items()))}
    write("schedules_checked", figures, given)
