"""What gloo's threads take from ranks with few cores each: as they come, and as batch threads.

    python tests/benchmarks/gloo_threads.py          (--dry for a try)

Ranks make gloo's threads batch threads (``fxpart/compat/gloo_threads.py``). Here each plan is held
by ranks of this machine, which train it in rounds of a few steps; from round to round the threads
are given the policy that they had, and the other one again. Compared are a round and the one beside
it. Three plans have many small collectives in a step (batch statistics, layers that two ranks
share), one has few large ones, and one has none.
"""

from __future__ import annotations

import os
import statistics
import sys
from pathlib import Path
from typing import Any

from record import parser, write

PLANS = (
    ("resnet50", {"mesh": "dp=2", "stages": 1}, 1),
    ("resnet50", {"mesh": "dp=4", "stages": 1}, 1),
    ("gpt2", {"mesh": "tp=2", "stages": 1}, 1),
    ("gpt2", {"mesh": "dp=2", "stages": 1}, 1),
    ("gpt2", {"mesh": "none", "stages": 2}, 4),
)
POLICIES = ("other", "batch")


def row(name: str, constraints: dict[str, Any], microbatches: int, rounds: int) -> dict[str, Any]:
    """One plan's rounds with either policy."""
    import cpu_models

    import fxpart
    from fxpart.profiling.trial_processes import TrialProcesses

    work = cpu_models.build(name)
    given = "example_kwargs" if isinstance(work.example, dict) else "example_inputs"
    example: Any = {given: work.example}
    program = fxpart.compile(
        work.model, "local:4", loss=work.loss, microbatches=microbatches, constraints=constraints,
        **example,
    )  # fmt: skip
    taken: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    with TrialProcesses(program.plan.world) as bench:
        bench.hold(program.plan, program.parts, optimizer="adamw")
        threads = of_gloo()
        assert threads, "the ranks have threads of gloo"
        for turn in range(rounds):
            for policy in POLICIES[:: 1 if turn % 2 else -1]:
                give(threads, policy)
                taken[policy].append(statistics.median(bench.go_on(5)))
    ratios = [a / b for a, b in zip(*taken.values(), strict=True)]
    mesh = constraints["mesh"]
    found = {
        "model": name,
        "plan": f"{constraints['stages']} stages, {microbatches} microbatches"
        if mesh == "none"
        else str(mesh),
        "ranks": program.plan.world,
        "seconds": {policy: statistics.median(each) for policy, each in taken.items()},
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }
    sys.stderr.write(f"{name} {found['plan']}: {found['seconds']}, {found['ratio']:.2f}\n")
    return found


def of_gloo() -> list[int]:
    """The numbers of gloo's threads in the processes that this one has started."""
    started: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        parent = int(status.read_text(encoding="utf-8").rpartition(")")[2].split()[1])
        started.setdefault(parent, []).append(int(status.parent.name))
    found, to_ask = [], [os.getpid()]
    for process in to_ask:
        to_ask += started.get(process, ())
        for thread in Path(f"/proc/{process}/task").iterdir():
            if (thread / "comm").read_text(encoding="utf-8").startswith("gloo_tcp"):
                found.append(int(thread.name))
    return found


def give(threads: list[int], policy: str) -> None:
    """A policy for all of them."""
    number = {"other": os.SCHED_OTHER, "batch": os.SCHED_BATCH}[policy]
    for thread in threads:
        os.sched_setscheduler(thread, number, os.sched_param(0))


def main() -> None:
    """All plans."""
    made = parser(__doc__)
    made.add_argument("--rounds", type=int, default=9)
    options = made.parse_args()

    import torch

    torch.set_num_threads(1)
    write("gloo_threads", {"rows": [row(*plan, options.rounds) for plan in PLANS]}, options)


if __name__ == "__main__":
    main()
