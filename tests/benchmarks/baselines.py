"""How much longer a step takes with what others would choose, on the same costs.

    python tests/benchmarks/baselines.py

Each rule of oracles.joint_baselines, and the planner, on 200 random problems
(tests/support/joint_problems.py), on the uneven cases of the tests (tests/support/joint_uneven.py)
and on large language models (tests/support/joint_models.py). A ratio is the rule's step time over
the planner's; null where no choice of the rule's family fits, and absent where the rule was not
run. 1 - bound / step time is the planner's gap.
"""

from __future__ import annotations

import statistics
import time
from itertools import product
from typing import Any

from record import parser, write

SEEDS = 200
MODELS = ("GPT-3 175B", "Llama 70B", "1T mixture of experts")
# One type, H100, and two, with A100. The trillion does not fit in 128.
DEVICES = ((128,), (1024,), (16384,), (64, 64), (512, 512), (8192, 8192))
SLOWEST = {"PipeDream": 2048}  # devices beyond which a rule's own search takes many minutes


def compare(problem: Any, *, skip: tuple[str, ...] = ()) -> dict[str, Any]:
    """The planner's step time and gap, and each rule's ratio and CPU seconds."""
    from oracles.joint_baselines import BASELINES

    from fxpart.solver.joint.objective import evaluate
    from fxpart.solver.joint.portfolio import solve

    start = time.process_time()
    found = solve(problem, time_limit=60)
    row: dict[str, Any] = {
        "step_seconds": found.objective if found.choice else None,
        "gap": round(1 - found.bound / found.objective, 6) if found.choice else None,
        "planner_cpu_seconds": round(time.process_time() - start, 2),
        "ratios": {},
        "cpu_seconds": {},
    }
    for baseline in BASELINES:
        if baseline.name in skip or found.choice is None:
            continue
        start = time.process_time()
        choice = baseline.rule(problem)
        row["cpu_seconds"][baseline.name] = round(time.process_time() - start, 2)
        if choice is None:
            row["ratios"][baseline.name] = None
            continue
        judged = evaluate(problem, choice)
        assert judged.feasible, baseline.name
        ratio = judged.seconds / found.objective
        assert ratio >= 1 - 1e-9, (baseline.name, ratio)
        row["ratios"][baseline.name] = round(ratio, 4)
    return row


def drawn() -> dict[str, Any]:
    """All random problems together: how often a rule finds a plan, and how good it is."""
    from joint_problems import random_problem
    from oracles.joint_baselines import BASELINES

    rows = [compare(random_problem(seed)) for seed in range(SEEDS)]
    feasible = [row for row in rows if row["step_seconds"] is not None]
    rules = {}
    for baseline in BASELINES:
        ratios = [r for row in feasible if (r := row["ratios"][baseline.name]) is not None]
        rules[baseline.name] = {
            "source": baseline.source,
            "plans": len(ratios),
            "as_good": sum(r <= 1.0 for r in ratios),
            "median_ratio": round(statistics.median(ratios), 4),
            "mean_ratio": round(statistics.fmean(ratios), 4),
            "largest_ratio": max(ratios),
        }
    return {"problems": len(rows), "feasible": len(feasible), "rules": rules}


def main() -> None:
    """Random problems, uneven cases, models."""
    options_parser = parser(__doc__)
    options_parser.add_argument("--largest", type=int, default=16384, help="devices")
    options = options_parser.parse_args()
    from joint_models import MODELS as SHAPES
    from joint_models import language_model
    from joint_uneven import cases

    models = []
    for name, devices in product(MODELS, DEVICES):
        if sum(devices) <= options.largest:
            skip = tuple(rule for rule, most in SLOWEST.items() if sum(devices) > most)
            row = compare(language_model(SHAPES[name], devices), skip=skip)
            models.append({"model": name, "devices": list(devices), **row})
    figures = {
        "random": drawn(),
        "uneven": {name: compare(problem) for name, problem in cases().items()},
        "models": models,
    }
    write("baselines", figures, options)


if __name__ == "__main__":
    main()
