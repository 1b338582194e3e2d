"""Predicted and measured step time and process peak: 6 models, 7 plans each, real processes.

    python tests/benchmarks/accuracy.py          (--models gpt2,vit for some; --dry for a try)

The links are measured once (``fxpart cluster bench``, 60 s), and each model is profiled once
(``fxpart profile --no-rehearse``, 60 s), for up to 4 ranks of one thread. The plans are fixed
beforehand and none of the calibration's making: 1 to 4 ranks, GPipe and 1F1B, several numbers of
microbatches, two replicas, stages that recompute their activations. Predictions are made before
anything of them is run; then all plans run on this machine in fresh processes, one after the other
and that in several turns, so that no plan has one moment of the machine to itself, and the median
of the turns' median steps is compared. Run it on an idle machine; the load that was found is kept
with each row. A shared machine changes its pace between the profile and the runs: beside the errors
as they came (``time``) there are those at equal pace (``paced``), by training steps of plain torch
in one process, or two at once, that are timed during the profile and before and after each run
(``pace.py``). ``--keep FILE`` keeps
links and models' rows there as they come, and goes on from what is in it: one run in several parts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from record import parser, write

if TYPE_CHECKING:
    from fxpart.costmodels.profile_store import TrialRun

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
    ({"dp": 1, "tp": 1, "stages": 2, "schedule": "1f1b", "recompute": "full"}, 4),
)


def of_model(name: str, cluster: Any, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one model: profile, predict all plans, then measure them."""
    import cpu_models
    from pace import Pace, at

    from fxpart.errors import FxpartError
    from fxpart.profiling.session import profile

    work = cpu_models.build(name)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="fxpart-") as folder, ExitStack() as held:
        path = Path(folder) / "model.profile"
        pace = held.enter_context(Pace(name))
        pace.now_and_then()
        found = profile(
            work, cluster, path, budget=options.budget, rehearse=False, progress=pace.now_and_then
        )
        base = {count: [*taken, pace.sample(count)] for count, taken in pace.samples.items()}
        say(f"{name}: profiled in {found.seconds:.0f} s, stages within {found.median_error:.1%}")
        programs = []
        for constraints, count in PLANS[: options.plans]:
            try:
                program = planned(work, cluster, path, constraints, count)
            except FxpartError as fault:
                say(f"{name} {words(constraints, count)}: {fault.problems[0].why}")
                continue
            programs.append((words(constraints, count), program))
        runs: dict[str, list[TrialRun]] = {label: [] for label, _ in programs}
        paced: dict[str, list[float]] = {label: [] for label, _ in programs}
        for _ in range(options.turns):
            for label, program in programs:
                beside = min(2, program.plan.world)
                before = pace.sample(beside)
                runs[label].append(run(program, options))
                taken = runs[label][-1].seconds.seconds
                paced[label].append(at(base[beside], taken, (before, pace.sample(beside))))
        for label, program in programs:
            rows.append(row(name, label, program.plan, runs[label]))
            rows[-1] |= at_equal_pace(rows[-1]["predicted"], paced[label])
            told = [f"{rows[-1][key]:.4f} s" for key in ("predicted", "measured", "paced")]
            say(f"{name} {label}: {', '.join(told)}")
    return rows


def planned(
    work: Any, cluster: Any, path: Path, constraints: dict[str, Any], microbatches: int
) -> Any:
    """A program with its predictions."""
    import fxpart

    given = "example_kwargs" if isinstance(work.example, dict) else "example_inputs"
    asked: Any = {
        "loss": work.loss, "microbatches": microbatches, "cost_model": path, given: work.example,
    }  # fmt: skip
    return fxpart.compile(work.model, cluster, constraints=constraints, **asked)


def run(program: Any, options: argparse.Namespace) -> TrialRun:
    """The plan, run once in processes of its own."""
    from fxpart.profiling.trial_processes import TrialProcesses

    with TrialProcesses(program.plan.world) as bench:
        return bench.run(program.plan, program.parts, steps=options.steps)


def row(model: str, label: str, plan: Any, runs: list[TrialRun]) -> dict[str, Any]:
    """A plan's figures: seconds of a step, and bytes of its largest process in the first run."""
    measured = runs[0]
    taken = [one.seconds.seconds for one in runs]
    middle = statistics.median(taken)
    needs = {rank: each.resident for each in plan.prediction.ranks for rank in each.ranks}
    thought = [needs[rank] for rank in range(plan.world)]
    fullest = max(range(plan.world), key=lambda rank: measured.peaks[rank])
    return {
        "model": model,
        "plan": label,
        "ranks": plan.world,
        "predicted": plan.prediction.simulated_seconds,
        "measured": middle,
        "runs": taken,
        "load": os.getloadavg()[0],
        "cpu": measured.cpu,
        "error": plan.prediction.simulated_seconds / middle - 1,
        "spread": max(one.seconds.high for one in runs) / min(o.seconds.low for o in runs) - 1,
        "stages": plan.provenance.get("choice", ""),
        "predicted_bytes": thought[fullest],
        "measured_bytes": measured.peaks[fullest],
        "bytes_error": thought[fullest] / measured.peaks[fullest] - 1 if thought[fullest] else None,
    }


def at_equal_pace(predicted: float, paced: list[float]) -> dict[str, Any]:
    """The same of runs as long as they would have been at the pace of the profile."""
    middle = statistics.median(paced)
    return {"paced": middle, "paced_runs": paced, "paced_error": predicted / middle - 1}


def words(constraints: dict[str, int | float | str | bool], microbatches: int) -> str:
    """A plan in words: "2 stages, 4 microbatches, 1f1b"."""
    mesh = constraints.get("mesh", "none")
    first = [] if mesh == "none" else [str(mesh)]
    last = [str(constraints[key]) for key in ("schedule",) if key in constraints]
    last += [f"recompute {mode}" for key, mode in constraints.items() if key == "recompute"]
    stages = f"{constraints['stages']} stages"
    return ", ".join([*first, stages, f"{microbatches} microbatches", *last])


def summary(rows: list[dict[str, Any]], name: str) -> dict[str, float]:
    """The median and the worst absolute error, and the most that is too low."""
    errors = [row[name] for row in rows if row[name] is not None]
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
    made.add_argument("--steps", type=int, default=7)
    made.add_argument("--turns", type=int, default=3, help="runs of each plan")
    made.add_argument("--keep", default="", help="a file of rows to go on from")
    made.add_argument("--budget", type=float, default=60.0, help="seconds for each profile")
    options = made.parse_args()

    import msgspec
    import torch

    from fxpart.cluster.model import Cluster
    from fxpart.profiling.cluster_benchmark import bench as measure_links

    torch.set_num_threads(1)
    kept = Path(options.keep) if options.keep else None
    state: dict[str, Any] = json.loads(kept.read_text()) if kept and kept.exists() else {"rows": []}
    if "cluster" not in state:
        say("measuring links")
        found = measure_links(Cluster.parse(CLUSTER), budget=options.budget).cluster
        state["cluster"] = msgspec.to_builtins(found)
    cluster = msgspec.convert(state["cluster"], Cluster)
    rows: list[dict[str, Any]] = state["rows"]
    done = {row["model"] for row in rows}
    for name in options.models.split(","):
        if name not in done:
            rows += of_model(name, cluster, options)
        if kept:
            kept.write_text(json.dumps(state))
    figures = {
        "rows": rows,
        "time": summary(rows, "error"),
        "paced": summary(rows, "paced_error"),
        "memory": summary(rows, "bytes_error"),
    }
    options.keep = bool(kept)
    write("accuracy", figures, options)


if __name__ == "__main__":
    main()
