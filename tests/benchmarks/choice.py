"""Is the chosen plan the fastest? All plans of 2 and of 4 local ranks, the best and some others.

    python tests/benchmarks/choice.py            (--models gpt2 for some; --dry for a try)

Links are measured (``fxpart cluster bench``), and each model is profiled (``fxpart profile``, which
runs the plans that may be best). Then every mesh, number of stages, number of microbatches and
schedule that fits is predicted; the ten that are predicted best and ten others, drawn at random,
run over gloo on this machine, in two turns, and the five fastest and the chosen one in two more, so
that a disturbance does not decide. regret: how much longer the plan that ``fxpart.compile`` chooses
takes than the fastest of all that ran. correlation: Spearman's, of what was expected and measured;
simulated: the same without what the profile had run.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from record import parser, write

if TYPE_CHECKING:
    from fxpart.api import Program
    from fxpart.cluster import Cluster
    from fxpart.measuring.rehearsals import Rehearsals

MODELS = ("gpt2", "resnet50", "t5", "recommender")
RANKS = (2, 4)
MESHES = {
    2: ("none", "dp=2", "tp=2"),
    4: ("none", "dp=2", "tp=2", "dp=4", "tp=4", "dp=2,tp=2"),
}
COUNTS = (1, 2, 4, 8)
SCHEDULES = ("1f1b", "gpipe")
_TURNS = 2
_LINKS = 20.0  # seconds in which the links of a cluster are measured
_NEAR = 5  # plans that run again


def of_model(
    name: str, cluster: Cluster, options: argparse.Namespace, bench: Rehearsals, path: Path
) -> dict[str, Any]:
    """One model on so many ranks: what was chosen, what was fastest, and all that ran."""
    import cpu_models

    import fxpart

    work = cpu_models.build(name)
    given = "example_kwargs" if isinstance(work.example, dict) else "example_inputs"
    example: Any = {given: work.example}
    ranks = len(cluster.devices)
    chosen = fxpart.compile(work.model, cluster, loss=work.loss, cost_model=path, **example)
    every = plans(chosen, ranks, path)
    say(f"{name}, {ranks} ranks: {len(every)} plans; chosen {words(chosen)}")
    order = sorted(every, key=lambda w: seconds(every[w]))
    draw = random.Random(0)
    rest = order[options.each :]
    taken = [*order[: options.each], *draw.sample(rest, min(options.each, len(rest)))]
    every[words(chosen)] = chosen
    labels = list(dict.fromkeys([words(chosen), *taken]))
    found: dict[str, list[float]] = {label: [] for label in labels}
    for turn in range(_TURNS):
        run(bench, every, labels[:: 1 if turn % 2 else -1], found, options.steps)
    best = sorted(labels, key=lambda label: statistics.median(found[label]))[:_NEAR]
    for turn in range(_TURNS):
        again = list(dict.fromkeys([labels[0], *best]))
        run(bench, every, again[:: 1 if turn % 2 else -1], found, options.steps)
    rows = []
    for label in labels:
        prediction = every[label].plan.prediction
        rows.append(
            {
                "plan": label,
                "predicted": prediction.expected_seconds,
                "simulated": prediction.simulated_seconds,
                "rehearsed": bool(prediction.rehearsed_seconds),
                "measured": statistics.median(found[label]),
            }
        )
        say(f"  {label}: {seconds(every[label]):.4f} s, {rows[-1]['measured']:.4f} s")
    fastest = min(rows, key=lambda row: float(row["measured"]))
    return {
        "model": name,
        "ranks": ranks,
        "plans": len(every),
        "chosen": rows[0]["plan"],
        "fastest": fastest["plan"],
        "regret": float(rows[0]["measured"]) / float(fastest["measured"]) - 1,
        "correlation": spearman(column(rows, "predicted"), column(rows, "measured")),
        "simulated": spearman(column(rows, "simulated"), column(rows, "measured")),
        "rows": rows,
    }


def run(
    bench: Rehearsals,
    every: dict[str, Program],
    labels: Sequence[str],
    found: dict[str, list[float]],
    steps: int,
) -> None:
    """One turn of these plans: the median step of each is added to what was found."""
    for label in labels:
        program = every[label]
        one = bench.run(program.plan, program.parts, steps=steps, optimizer="adamw")
        found[label].append(one.seconds.seconds)


def column(rows: Sequence[dict[str, Any]], name: str) -> list[float]:
    """A figure of all rows."""
    return [float(row[name]) for row in rows]


def plans(program: Program, ranks: int, path: Path) -> dict[str, Program]:
    """Every plan of at most so many ranks by its words; what does not fit is left out."""
    from fxpart.errors import FxpartError
    from fxpart.sharding import Mesh

    found: dict[str, Program] = {}
    for mesh, count, schedule in product(MESHES[ranks], COUNTS, SCHEDULES):
        lanes = 1 if mesh == "none" else Mesh.parse(mesh).size
        for stages in range(1, ranks // lanes + 1):
            if stages == 1 and schedule != SCHEDULES[0]:
                continue  # one stage has one schedule
            wish: dict[str, int | float | str | bool] = {
                "mesh": mesh, "stages": stages, "schedule": schedule,
            }  # fmt: skip
            try:
                made = program.replan(
                    program.plan.cluster, microbatches=count, constraints=wish, cost_model=path
                )
            except FxpartError:
                continue
            found.setdefault(words(made), made)
    return found


def words(program: Program) -> str:
    """A plan in words."""
    plan = program.plan
    first = plan.stages[0]
    mesh = f"dp={first.data_parallel}, tp={first.tensor_parallel}, "
    schedule = f", {plan.schedule}" if len(plan.stages) > 1 else ""
    zero = f", ZeRO {first.zero}" if first.zero else ""
    return f"{mesh}{len(plan.stages)} stages, {plan.microbatches} microbatches{schedule}{zero}"


def seconds(program: Program) -> float:
    """The step as it is expected."""
    return program.plan.prediction.expected_seconds


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """The correlation of ranks (of values that are all different)."""
    n = len(first)
    if n < 2:
        return 1.0
    places = [sorted(range(n), key=lambda i, row=row: row[i]) for row in (first, second)]
    at = [{index: place for place, index in enumerate(order)} for order in places]
    apart = sum((at[0][i] - at[1][i]) ** 2 for i in range(n))
    return 1 - 6 * apart / (n * (n * n - 1))


def say(text: str) -> None:
    """How far it is."""
    sys.stderr.write(text + "\n")


def main() -> None:
    """All models on 2 and 4 ranks, or those named."""
    made = parser(__doc__)
    made.add_argument("--models", default=",".join(MODELS))
    made.add_argument("--ranks", default=",".join(map(str, RANKS)))
    made.add_argument("--each", type=int, default=10, help="best predicted, and random")
    made.add_argument("--steps", type=int, default=5)
    made.add_argument("--budget", type=float, default=60.0, help="seconds for each profile")
    options = made.parse_args()

    import cpu_models
    import torch

    from fxpart.cluster import Cluster
    from fxpart.measuring.bench import bench as measure_links
    from fxpart.measuring.rehearsals import Rehearsals
    from fxpart.measuring.session import profile

    torch.set_num_threads(1)
    figures = []
    counts = sorted(map(int, options.ranks.split(",")), reverse=True)
    local = [Cluster.parse(f"local:{ranks}") for ranks in counts]
    clusters = [measure_links(found, budget=_LINKS).cluster for found in local]
    with Rehearsals(counts[0]) as bench, tempfile.TemporaryDirectory(prefix="fxpart-") as folder:
        for name in options.models.split(","):
            path = Path(folder) / f"{name}.profile"
            for cluster in clusters:
                # The larger number first: how ranks slow each other down then serves both.
                profile(cpu_models.build(name), cluster, path, budget=options.budget)
                figures.append(of_model(name, cluster, options, bench, path))
                write("choice", figures, options)  # it takes long, and may be stopped


if __name__ == "__main__":
    main()
