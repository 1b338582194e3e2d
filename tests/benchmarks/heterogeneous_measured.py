"""Plans for ranks of unlike speed and memory, run: beside homogeneous ones, and as predicted.

    python tests/benchmarks/heterogeneous_measured.py    (as root on Linux; --models gpt2 for some)

Ranks are processes that control groups hold to quotas of a core; on other machines nothing is run,
and the result says why. Links are measured (``fxpart cluster bench``) and each model is profiled
(``fxpart profile --no-rehearse``) on a whole core, and then under each of the quotas, again where
the machine did not keep its pace meanwhile (held_profiles.py). Then, for each cluster, the stages
that its plans put on each quota are measured too, in turns (held_stages.py), and it is planned
again by all that is known.
Between ranks of one host the sender copies, so that under a quota transfers take longer as well.
For each cluster the plan that the planner chooses runs, and so do homogeneous ones on as many
devices: the best pipeline for equal devices, its stages each where it does best; equal shares of
the batch; and the best plan of each kind of device alone. Throughput of the chosen plan over each
of these is compared with what the predictions say. Predictions are made before anything runs. All
plans of a cluster are held by ranks of their own and train in turns of a few steps; they are
compared within each of these rounds, and the median round counts.
``--keep FOLDER`` keeps links, profiles and rows there as they come, and goes on from what it holds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import namespaces
import quotas
from choice import links
from held_profiles import profile_held
from held_stages import measure_stages
from heterogeneous_clusters import (
    CLUSTERS,
    TABLE_CLUSTERS,
    Kinds,
    cluster_of,
    kinds_of,
    nominal,
)
from pace import compared
from record import ROOT, parser, write

if TYPE_CHECKING:
    from fxpart.costmodels.profile_store import TrialRun

    from fxpart.api import Program
    from fxpart.cluster.model import Cluster
    from fxpart.plan.model import Plan

RANKS = 4  # for which links are measured and models profiled
WHOLE = "chosen"
_BOUND = 0.15
_PASSES = 3  # that measure stages of plans, at most: others may be chosen then
MODELS = ("gpt2", "recommender")
ALL = CLUSTERS | TABLE_CLUSTERS


def workload(name: str) -> Any:
    """A model that trains, and a batch: of cpu_models.py, or the example's recommender."""
    import cpu_models
    import torch

    if name == "gpt2":
        torch.manual_seed(0)
        return cpu_models.gpt2(_ROWS)
    if name == "tables":
        return cpu_models.large_tables()
    sys.path.append(str(ROOT / "examples"))
    import recommender
    from torch.nn import functional

    from fxpart.capture.workload import Workload

    with tempfile.TemporaryDirectory() as folder:
        log = recommender.write_logs(Path(folder) / "log.npy", _CLICKS)
        batch = next(recommender.batches(log, _CLICKS))
    loss = functional.binary_cross_entropy_with_logits
    return Workload(recommender.model(), batch, loss=loss, optimizer="adagrad")


_ROWS = 12  # of a batch of GPT-2: equal shares for 2, 3 and 4 ranks
_CLICKS = 4608  # rows of a batch of the recommender


def plans(program: Program, cluster: Cluster, kinds: Kinds, path: Path) -> dict[str, Program]:
    """The chosen plan and the homogeneous ones, predicted; one that does not fit is left out."""
    from fxpart.errors import FxpartError

    count = len(cluster.devices)
    asked: dict[str, Callable[[], Program]] = {
        WHOLE: lambda: program.replan(cluster, cost_model=path),
        "equal stages": lambda: equal_stages(program, cluster, path),
        "equal shares": lambda: program.replan(
            cluster, constraints={"mesh": f"dp={count}", "stages": 1}, cost_model=path
        ),
    }
    for part in kinds_of(cluster):
        words = f"{len(part.devices)} of {nominal(part.devices[0], kinds):g} cores"
        asked[words] = lambda part=part: program.replan(  # type: ignore[misc]
            part, constraints={"copies": "none"}, cost_model=path
        )
    found = {}
    for words, make in asked.items():
        try:
            found[words] = make()
        except FxpartError as fault:
            say(f"  {words}: {fault.problems[0].code} {fault.problems[0].why}")
    return found


def same(made: dict[str, Program]) -> list[str]:
    """Those that are the chosen plan: the same stages and steps on the same devices."""

    def decided(plan: Plan) -> tuple[object, ...]:
        places = tuple(plan.device(rank).name for rank in range(plan.world))
        return words_of(plan), places

    mine = decided(made[WHOLE].plan)
    return [label for label, one in made.items() if label != WHOLE and decided(one.plan) == mine]


def equal_stages(program: Program, cluster: Cluster, path: Path) -> Program:
    """The best pipeline of one rank a stage for as many devices of the mean speed, on these."""
    from msgspec.structs import replace

    count = len(cluster.devices)
    mean = sum(d.quota for d in cluster.devices if isinstance(d.quota, float)) / count
    least = min(device.memory for device in cluster.devices)
    alike = tuple(
        replace(
            d, quota=mean, bandwidth=d.bandwidth * mean / d.share, memory=least,
            flops={kind: rate * mean / d.share for kind, rate in d.flops.items()},
        )
        for d in cluster.devices
    )  # fmt: skip
    wish: dict[str, int | float | str | bool] = {"dp": 1, "tp": 1, "stages": count}
    plan = program.replan(replace(cluster, devices=alike), constraints=wish, cost_model=path).plan
    wish["schedule"] = plan.schedule
    wish["stage"] = ";".join(f"#{s.first}-{s.last}={s.index}" for s in plan.stages)
    made = program.replan(
        cluster, microbatches=plan.microbatches, constraints=wish, cost_model=path
    )
    assert [s.spans for s in made.plan.stages] == [s.spans for s in plan.stages], "as wished for"
    return made


def run_all(
    made: dict[str, Program], kinds: Kinds, options: argparse.Namespace
) -> tuple[dict[str, TrialRun], dict[str, list[float]]]:
    """A run of each plan under its devices' quotas, in processes of its own, and its rounds."""
    from fxpart.profiling.trial_rounds import run_trial_rounds

    with contextlib.ExitStack() as stack:
        benches = {label: stack.enter_context(held(p.plan, kinds)) for label, p in made.items()}
        runs = {
            label: benches[label].run(one.plan, one.parts, steps=options.steps)
            for label, one in made.items()
        }
        players = [(one.plan, one.parts) for one in made.values()]
        rounds = run_trial_rounds(list(benches.values()), players, most=options.rounds)
    return runs, dict(zip(made, map(list, zip(*rounds, strict=True)), strict=True))


def held(plan: Plan, kinds: Kinds) -> Any:
    """Ranks under the quotas of the plan's devices, that wait for it."""
    devices = [plan.device(rank) for rank in range(plan.world)]
    names = sorted({device.host for device in devices})
    hosts = [names.index(device.host) for device in devices]
    return quotas.held([nominal(d, kinds) for d in devices], hosts, kinds.megabits)


def measured(
    plan: Plan, kinds: Kinds, run: TrialRun, seconds: float, rounds: list[float]
) -> dict[str, Any]:
    """A plan's row; peaks are of its run, in fresh processes."""
    devices = [plan.device(rank) for rank in range(plan.world)]
    limits = [device.memory for device in devices]
    return {
        "how": words_of(plan),
        "quotas": [nominal(device, kinds) for device in devices],
        "predicted": plan.prediction.simulated_seconds,
        "measured": seconds,
        "rounds": rounds,
        "error": plan.prediction.simulated_seconds / seconds - 1,
        "cpu": run.cpu,
        "peaks_over_memory": max(p / m for p, m in zip(run.peaks, limits, strict=True)),
    }


def words_of(plan: Any) -> str:
    """How ranks of a stage share it, blocks of each, whose copies take how many microbatches."""
    taken = {rank: row.microbatches for row in plan.prediction.ranks for rank in row.ranks}
    stages = []
    for stage in plan.stages:
        turns = f", {taken[stage.ranks[0]]} microbatches" if taken[stage.ranks[0]] else ""
        ranks = " ".join(map(str, stage.ranks))
        stages.append(f"{stage.first}-{stage.last} on {ranks}{turns}")
    shared = plan.sharding
    mesh = f"{shared.mesh}{f', zero {shared.zero}' if shared.zero else ''}, " if shared else ""
    return f"{mesh}{plan.microbatches} microbatches, {plan.schedule}: {'; '.join(stages)}"


def row(name: str, words: str, program: Program, base: Cluster, folder: Path, options: Any) -> Any:
    """One model on one cluster."""
    from msgspec.structs import replace

    kinds, path = ALL[words], folder / f"{name}.profile"
    alone = replace(base, devices=base.devices[:1])
    need = program.replan(alone, cost_model=path).plan.prediction.ranks[0]
    cluster = cluster_of(words, kinds, base, need)
    made = plans(program, cluster, kinds, path)
    for _ in range(_PASSES):
        before = {words_of(one.plan) for one in made.values()}
        say("  stages of its plans under each quota")
        measure_stages(name, [one.plan for one in made.values()], base, path)
        made = plans(program, cluster, kinds, path)
        if {words_of(one.plan) for one in made.values()} <= before:
            break
    again = same(made)
    for label in again:
        say(f"  {label}: is the chosen plan")
        del made[label]
    rows: dict[str, Any] = {}
    runs, rounds = run_all(made, kinds, options)
    taken = compared(rounds)
    for label, one in made.items():
        rows[label] = measured(one.plan, kinds, runs[label], taken[label], rounds[label])
        seconds = f"{rows[label]['predicted']:.4f} s, {rows[label]['measured']:.4f} s"
        say(f"  {label}: {seconds} ({rows[label]['how']})")
    over = {}
    for label, one in rows.items():
        if label != WHOLE:
            predicted, found = (one[k] / rows[WHOLE][k] for k in ("predicted", "measured"))
            over[label] = {
                "predicted": predicted, "measured": found, "error": predicted / found - 1,
            }  # fmt: skip
    return {
        "model": name,
        "cluster": words,
        "quotas": kinds.quotas,
        "memory": [device.memory for device in cluster.devices],
        "kinds": made[WHOLE].plan.provenance.get("kinds", ""),
        "load": os.getloadavg()[0],
        "plans": rows,
        "over": over,
        "chosen_is": again,
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How far ratios and steps were off, and how often the chosen plan was the fastest."""
    over = [one for row in rows for one in row["over"].values()]
    steps = [abs(one["error"]) for row in rows for one in row["plans"].values()]
    ratios = [abs(one["error"]) for one in over]
    best = [over_best(row)[1] for row in rows]
    return {
        "ratios": len(ratios),
        "ratio_median_error": statistics.median(ratios),
        "ratio_worst_error": max(ratios),
        "ratios_within_bound": sum(error <= _BOUND for error in ratios),
        "step_median_error": statistics.median(steps),
        "step_worst_error": max(steps),
        "over_best_homogeneous": {"least": min(best), "median": statistics.median(best)},
    }


def over_best(row: dict[str, Any]) -> tuple[str, float]:
    """The best homogeneous plan, and the chosen plan's throughput over its; 1 where it is that."""
    over = {label: float(one["measured"]) for label, one in row["over"].items()}
    over |= dict.fromkeys(row["chosen_is"], 1.0)
    return min(over.items(), key=lambda item: item[1])


def say(text: str) -> None:
    """How far it is."""
    sys.stderr.write(text + "\n")


def of_model(name: str, folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one model, those of earlier runs as they were kept."""
    import fxpart
    from fxpart.profiling.session import profile

    kept = folder / f"{name}.json"
    rows: list[dict[str, Any]] = json.loads(kept.read_text()) if kept.exists() else []
    left = [w for w in options.clusters.split(";") if w not in {row["cluster"] for row in rows}]
    if not left:
        return rows
    base, path, work = links(RANKS, folder), folder / f"{name}.profile", workload(name)
    profile(work, base, path, budget=options.budget, rehearse=False)
    wanted = sorted({q for words in left for q in ALL[words].quotas}, reverse=True)
    tries = profile_held(name, wanted, base, path, options.budget, say)
    given = "example_kwargs" if isinstance(work.example, dict) else "example_inputs"
    example: Any = {given: work.example}
    program = fxpart.compile(
        work.model, base, loss=work.loss, optimizer=work.optimizer or "adamw", cost_model=path,
        **example,
    )  # fmt: skip
    for words in left:
        say(f"{name}, {words}")
        rows.append(row(name, words, program, base, folder, options) | {"profiles": tries})
        kept.write_text(json.dumps(rows))
    return rows


def figures(
    text: str | None, models: Sequence[str], clusters: Sequence[str]
) -> tuple[dict[str, Any], argparse.Namespace]:
    """Of all models on all clusters, or those named by options, and these. text: its help."""
    made = parser(text)
    made.add_argument("--models", default=",".join(models))
    made.add_argument("--clusters", default=";".join(clusters))
    made.add_argument("--steps", type=int, default=9)
    made.add_argument("--rounds", type=int, default=15, help="of steps of all plans")
    made.add_argument("--budget", type=float, default=60.0, help="seconds for each profile")
    made.add_argument("--keep", default="", help="folder for links, profiles and rows")
    options = made.parse_args()

    lacks = next(filter(None, (quotas.missing(ALL[words].quotas) for words in clusters)), "")
    lacks = lacks or namespaces.missing()
    if lacks:
        say(f"skipped: {lacks}")
        return {"rows": [], "skipped": lacks}, options

    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="fxpart-") as fresh, namespaces.interruptible():
        folder = Path(options.keep or fresh)
        folder.mkdir(exist_ok=True)
        rows = [
            found for name in options.models.split(",") for found in of_model(name, folder, options)
        ]
    return {"rows": rows, **summary(rows)}, options


if __name__ == "__main__":
    write("heterogeneous_measured", *figures(__doc__, MODELS, tuple(CLUSTERS)))
