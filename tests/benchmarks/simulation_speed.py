"""Seconds to simulate one step of 1F1B: ranks by themselves, and ranks that share hosts.

    python tests/benchmarks/simulation_speed.py

A chain of stages with unequal costs and transfers, lowered before. ``alone``: no rank shares a host
(what ``simulate`` does without contention); ``quick``: the same without a timeline; ``one_host``
and ``hosts``: all ranks on one host, or four to a host, with the runtime's windows, a step's
updates and transfers that count as half a rank. CPU seconds, medians over the rounds; ``times`` is
one_host over alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from record import parser, write

SHAPES = ((4, 64), (16, 64), (64, 128))
CURVE = (1.0, 1.0, 1.5, 2.0)


def measure(stages: int, microbatches: int, rounds: int) -> dict[str, float]:
    """Milliseconds of each way on one shape."""
    from fxpart.schedule.action import ActionKind
    from fxpart.schedule.builders import one_f_one_b
    from fxpart.schedule.dependence import chain
    from fxpart.schedule.fast_simulation import compute_last_backward_ends
    from fxpart.schedule.host_contention import HostContention
    from fxpart.schedule.lower import lower
    from fxpart.schedule.simulate import simulate

    edges = chain(stages)
    schedule = lower(one_f_one_b(stages, microbatches), edges)
    forward = [1.0 + 0.1 * (k % 3) for k in range(stages)]
    backward = [2 * seconds for seconds in forward]
    once = [3.0] * stages
    one = HostContention((0,) * stages, (CURVE,), (0.5,))
    hosts = -(-stages // 4)
    several = HostContention(tuple(k // 4 for k in range(stages)), (CURVE,) * hosts, (0.5,) * hosts)

    def transfer(_stage: int, _peer: int, _kind: ActionKind) -> float:
        return 0.1

    def crowded(contention: HostContention) -> Callable[[], object]:
        return lambda: simulate(
            schedule, edges, forward, backward, transfer,
            sends="runtime", contention=contention, once=once, join=True,
        )  # fmt: skip

    ways: dict[str, Callable[[], object]] = {
        "quick": lambda: compute_last_backward_ends(
            "1f1b", microbatches, edges, forward, backward,
            {(e.source, e.target): 0.1 for e in edges},
        ),
        "alone": lambda: simulate(schedule, edges, forward, backward, transfer),
        "one_host": crowded(one),
        "hosts": crowded(several),
    }  # fmt: skip
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            start = time.process_time()
            way()
            taken[name].append(time.process_time() - start)
    found = {name: statistics.median(times) for name, times in taken.items()}
    return {
        "actions": sum(len(actions) for actions in schedule.ranks),
        **{f"{name}_ms": round(seconds * 1e3, 2) for name, seconds in found.items()},
        "times": round(found["one_host"] / found["alone"], 2),
    }


def main() -> None:
    """Each shape."""
    options_parser = parser(__doc__)
    options_parser.add_argument("--rounds", type=int, default=5)
    options = options_parser.parse_args()
    write(
        "simulation_speed", {f"{p}x{m}": measure(p, m, options.rounds) for p, m in SHAPES}, options
    )


if __name__ == "__main__":
    main()
