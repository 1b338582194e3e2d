"""Is the chosen plan the fastest? All plans of 2 and of 4 local ranks, the best and some others.

    python tests/benchmarks/choice.py            (--models gpt2 --ranks 2 for some; --dry for a try)

Links are measured (``fxpart cluster bench``), and each model is profiled (``fxpart profile``, which
runs the plans that may be best). Then every mesh, number of stages, number of microbatches and
schedule that fits is predicted; the ten that are predicted best and ten others, drawn at random,
run over gloo on this machine, in two turns. Runs of one plan a few seconds apart differ by more
than the best plans do, so the chosen plan and the four fastest others then train in turns of a few
steps, each held by ranks of its own (``fxpart.profiling.trial_rounds``), and are compared within
each of twelve rounds. With one microbatch GPipe and 1F1B are the same order, and one of them is
left out. regret: how much longer the plan that ``fxpart.compile`` chooses takes than the fastest in
these rounds, by the median round. correlation: Spearman's, of what was expected and measured;
simulated: the same without what the profile had run. With --keep, links and profiles stay in a
folder for the next run, and with --go-on the models and numbers of ranks that earlier runs have
kept are not repeated.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pace import compared
from record import parser, read, write

if TYPE_CHECKING:
    from fxpart.api import Program
    from fxpart.cluster.model import Cluster
    from fxpart.profiling.trial_processes import TrialProcesses

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
_NEAR = 4  # plans that the chosen one is compared with in rounds
_ROUNDS = 12


@dataclass
class Case:
    """A model on so many ranks. every: all plans by their words; labels: those that run."""

    name: str
    ranks: int
    chosen: str
    every: dict[str, Program]
    labels: list[str]


def predicted(name: str, cluster: Cluster, path: Path, each: int) -> Case:
    """What compiling chooses with the profile, and all plans; nothing of it has run here."""
    import cpu_models

    import fxpart

    work = cpu_models.build(name)
    given = "example_kwargs" if isinstance(work.example, dict) else "example_inputs"
    example: Any = {given: work.example}
    ranks = len(cluster.devices)
    program = fxpart.compile(work.model, cluster, loss=work.loss, cost_model=path, **example)
    every = plans(program, ranks, path)
    chosen = words(program)
    say(f"{name}, {ranks} ranks: {len(every)} plans; chosen {chosen}")
    order = sorted(every, key=lambda w: seconds(every[w]))
    rest = order[each:]
    taken = [*order[:each], *random.Random(0).sample(rest, min(each, len(rest)))]
    every[chosen] = program
    return Case(name, ranks, chosen, every, list(dict.fromkeys([chosen, *taken])))


def measured(case: Case, steps: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """By plan the median step of each of its turns; and of the finalists, that of each round."""
    from fxpart.profiling.trial_processes import TrialProcesses
    from fxpart.profiling.trial_rounds import run_trial_rounds

    found: dict[str, list[float]] = {label: [] for label in case.labels}
    with TrialProcesses(case.ranks) as bench:
        for turn in range(_TURNS):
            run(bench, case.every, case.labels[:: 1 if turn % 2 else -1], found, steps)
    best = sorted(found, key=lambda label: typical(found[label]))
    labels = [case.chosen, *[label for label in best if label != case.chosen][:_NEAR]]
    players = [(case.every[label].plan, case.every[label].parts) for label in labels]
    with ExitStack() as held:
        benches = [held.enter_context(TrialProcesses(plan.world)) for plan, _ in players]
        rounds = run_trial_rounds(benches, players, most=_ROUNDS, optimizer="adamw")
    return found, dict(zip(labels, map(list, zip(*rounds, strict=True)), strict=True))


def figures_of(
    case: Case, found: dict[str, list[float]], rounds: dict[str, list[float]]
) -> dict[str, Any]:
    """What was chosen, what was fastest, and all that ran."""
    rows: list[dict[str, Any]] = []
    taken = seconds_of(found, rounds)
    for label in case.labels:
        prediction = case.every[label].plan.prediction
        rows.append(
            {
                "plan": label,
                "predicted": prediction.expected_seconds,
                "simulated": prediction.simulated_seconds,
                "rehearsed": bool(prediction.rehearsed_seconds),
                "measured": taken[label],
                "turns": found[label],
                "rounds": rounds.get(label, []),
            }
        )
        say(f"  {label}: {rows[-1]['predicted']:.4f} s, {rows[-1]['measured']:.4f} s")
    fastest = min(rounds, key=lambda label: taken[label])
    return {
        "model": case.name,
        "ranks": case.ranks,
        "plans": len(case.every),
        "chosen": case.chosen,
        "fastest": fastest,
        "regret": taken[case.chosen] / taken[fastest] - 1,
        "correlation": spearman(column(rows, "predicted"), column(rows, "measured")),
        "simulated": spearman(column(rows, "simulated"), column(rows, "measured")),
        "rows": rows,
    }


def seconds_of(found: dict[str, list[float]], rounds: dict[str, list[float]]) -> dict[str, float]:
    """By plan the typical turn; of finalists as they compare in rounds, at the level of turns."""
    taken = {label: typical(turns) for label, turns in found.items()}
    level = statistics.geometric_mean(taken[label] for label in rounds)
    return taken | compared(rounds, level)


def run(
    bench: TrialProcesses,
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


def typical(turns: Sequence[float]) -> float:
    """The median turn: what else the machine does makes single ones longer, or shorter."""
    return statistics.median(turns)


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
            if 1 in (stages, count) and schedule != SCHEDULES[0]:
                continue  # one stage has one schedule, and one microbatch one order
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
    """The correlation of ranks; equal values share the mean of theirs."""
    ranks = [_ranks(row) for row in (first, second)]
    if any(len(set(row)) < 2 for row in ranks):
        return 1.0
    return statistics.correlation(*ranks)


def _ranks(row: Sequence[float]) -> list[float]:
    return [sum(b < a for b in row) + (sum(b == a for b in row) - 1) / 2 for a in row]


def say(text: str) -> None:
    """How far it is."""
    sys.stderr.write(text + "\n")


def links(ranks: int, folder: Path) -> Cluster:
    """So many ranks of this host with their links as measured, now or before."""
    from fxpart.cluster.model import Cluster
    from fxpart.profiling.cluster_benchmark import bench

    path = folder / f"links-{ranks}.json"
    if path.exists():
        return Cluster.load(path)
    found = bench(Cluster.parse(f"local:{ranks}"), budget=_LINKS).cluster
    found.dump(path)
    return found


def profiled(name: str, cluster: Cluster, path: Path, budget: float) -> None:
    """Profile a model; what is there already is not measured again."""
    import cpu_models

    from fxpart.profiling.session import profile

    found = profile(cpu_models.build(name), cluster, path, budget=budget)
    ranks = len(cluster.devices)
    say(f"{name}, {ranks} ranks: {found.trial_runs} plans run in {found.seconds:.0f} s")


def main() -> None:
    """All models on 2 and 4 ranks, or those named."""
    made = parser(__doc__)
    made.add_argument("--models", default=",".join(MODELS))
    made.add_argument("--ranks", default=",".join(map(str, RANKS)))
    made.add_argument("--each", type=int, default=10, help="best predicted, and random")
    made.add_argument("--steps", type=int, default=5)
    made.add_argument("--budget", type=float, default=180.0, help="seconds for each profile")
    made.add_argument("--keep", default="", help="folder for links and profiles")
    made.add_argument("--go-on", action="store_true")
    options = made.parse_args()

    import torch

    torch.set_num_threads(1)
    figures = read("choice")["figures"] if options.go_on else []
    had = {(row["model"], row["ranks"]) for row in figures}
    counts = sorted(map(int, options.ranks.split(",")), reverse=True)
    with tempfile.TemporaryDirectory(prefix="fxpart-") as fresh:
        folder = Path(options.keep or fresh)
        folder.mkdir(exist_ok=True)
        clusters = {ranks: links(ranks, folder) for ranks in counts}
        for name in options.models.split(","):
            path = folder / f"{name}.profile"
            for ranks in counts:
                if (name, ranks) in had:
                    continue
                # The larger number first: how ranks slow each other down then serves both.
                profiled(name, clusters[ranks], path, options.budget)
                case = predicted(name, clusters[ranks], path, options.each)
                figures.append(figures_of(case, *measured(case, options.steps)))
                write("choice", figures, options)  # it takes long, and may be stopped


if __name__ == "__main__":
    main()
