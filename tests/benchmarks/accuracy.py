"""Predicted and measured step time and process peak: 6 models, 6 plans each, real processes.

    python tests/benchmarks/accuracy.py          (--models gpt2,vit for some; --dry for a try)

The links are measured once (``fxpart cluster bench``, 60 s), and each model is profiled once
(``fxpart profile --no-rehearse``, 60 s), for up to 4 ranks of one thread. The plans are fixed
beforehand and none of the calibration's making: 1 to 4 ranks, GPipe and 1F1B, several numbers of
microbatches, two replicas. Predictions are made before anything of them is run; then each plan runs
over gloo on this machine, in fresh processes, and the median step is compared.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from record import parser, write

if TYPE_CHECKING:
    from fxpart.profile import Rehearsal

CLUSTER = "local:4"
MODELS = ("gpt2", "llama", "bert", "vit", "resnet50", "recommender")
# What is fixed of each plan, and its microbatches; the planner chooses the rest.
PLANS: tuple[tuple[dict[str, int | float | str | bool], int], ...] = (
    ({"mesh": "none", "stages": 1}, 2),
    ({"mesh": "none", "stages": 2, "schedule": "1f1b"}, 4),
    ({"mesh": "none", "stages": 2, "schedule": "gpipe"}, 2),
    ({"mesh": "none", "stages": 3, "schedule": "1f1b"}, 8),
    ({"mesh": "none", "stages": 4, "schedule": "gpipe"}, 4),
    ({"mesh": "dp=2", "stages": 1}, 1),
)


def of_model(name: str, cluster: Any, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one model: profile, predict all plans, then measure them."""
    import cpu_models

    import fxpart
    from fxpart.errors import FxpartError
    from fxpart.measuring.rehearsals import Rehearsals
    from fxpart.measuring.session import profile
    from fxpart.profile import Crowding

    work = cpu_models.build(name)
    given = "example_kwargs" if isinstance(work.example, dict) else "example_inputs"
    example: Any = {given: work.example}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="fxpart-") as folder:
        path = Path(folder) / "model.profile"
        found = profile(work, cluster, path, budget=options.budget, rehearse=False)
        say(f"{name}: profiled in {found.seconds:.0f} s, stages within {found.median_error:.1%}")
        programs = []
        for constraints, count in PLANS[: options.plans]:
            try:
                program = fxpart.compile(
                    work.model, cluster, loss=work.loss, microbatches=count, cost_model=path,
                    constraints=constraints, **example,
                )  # fmt: skip
            except FxpartError as fault:
                say(f"{name} {words(constraints, count)}: {fault.problems[0].why}")
                continue
            programs.append((words(constraints, count), program))
        crowding = found.crowding or Crowding()
        for label, program in programs:
            with Rehearsals(program.plan.world) as bench:
                measured = bench.run(program.plan, program.parts, steps=options.steps)
            rows.append(row(name, label, program.plan, crowding, measured))
            say(f"{name} {label}: {rows[-1]['predicted']:.4f} s, {measured.seconds.seconds:.4f} s")
    return rows


def row(model: str, label: str, plan: Any, crowding: Any, measured: Rehearsal) -> dict[str, Any]:
    """A plan's figures: seconds of a step, and bytes of its largest process."""
    needs = {rank: process(e.memory, crowding) for e in plan.prediction.ranks for rank in e.ranks}
    thought = [needs[rank] for rank in range(plan.world)]
    fullest = max(range(plan.world), key=lambda rank: measured.peaks[rank])
    return {
        "model": model,
        "plan": label,
        "ranks": plan.world,
        "predicted": plan.prediction.simulated_seconds,
        "measured": measured.seconds.seconds,
        "cpu": measured.cpu,
        "error": plan.prediction.simulated_seconds / measured.seconds.seconds - 1,
        "spread": measured.seconds.high / measured.seconds.low - 1,
        "stages": plan.provenance.get("choice", ""),
        "predicted_bytes": thought[fullest],
        "measured_bytes": measured.peaks[fullest],
        "bytes_error": thought[fullest] / measured.peaks[fullest] - 1,
    }


def process(memory: Any, crowding: Any) -> float:
    """Bytes of a rank's process at its peak: what it has anyway, its weights, what training makes.

    The last with what the allocator loses, as it was measured on the whole model in one process.
    """
    made = memory.total - memory.weights
    return float(crowding.baseline + memory.weights + made * (1 + crowding.overhead))


def words(constraints: dict[str, int | float | str | bool], microbatches: int) -> str:
    """A plan in words: "2 stages, 4 microbatches, 1f1b"."""
    mesh = "" if constraints["mesh"] == "none" else f"{constraints['mesh']}, "
    schedule = f", {constraints['schedule']}" if "schedule" in constraints else ""
    return f"{mesh}{constraints['stages']} stages, {microbatches} microbatches{schedule}"


def summary(rows: list[dict[str, Any]], name: str) -> dict[str, float]:
    """The median and the worst absolute error, and the most that is too low."""
    errors = [row[name] for row in rows]
    return {
        "median": statistics.median(map(abs, errors)),
        "worst": max(map(abs, errors)),
        "under": max(0.0, -min(errors)),
    }


def say(text: str) -> None:
    """How far it is."""
    sys.stderr.write(text + "\n")


def main() -> None:
    """All models, or those named."""
    made = parser(__doc__)
    made.add_argument("--models", default=",".join(MODELS))
    made.add_argument("--plans", type=int, default=len(PLANS))
    made.add_argument("--steps", type=int, default=9)
    made.add_argument("--budget", type=float, default=60.0, help="seconds for each profile")
    options = made.parse_args()

    import torch

    from fxpart.cluster import Cluster
    from fxpart.measuring.bench import bench as measure_links

    torch.set_num_threads(1)
    say("measuring links")
    cluster = measure_links(Cluster.parse(CLUSTER), budget=options.budget).cluster
    rows = []
    for name in options.models.split(","):
        rows += of_model(name, cluster, options)
    figures = {
        "rows": rows,
        "time": summary(rows, "error"),
        "memory": summary(rows, "bytes_error"),
    }
    write("accuracy", figures, options)


if __name__ == "__main__":
    main()
