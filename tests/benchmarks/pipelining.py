"""fxpart's trainer against torch.distributed.pipelining: same stages, schedule, microbatches.

    python tests/benchmarks/pipelining.py            (starts itself under torchrun, 2 and 4 ranks)
    python tests/benchmarks/pipelining.py --quick    (fewer rounds, 2 ranks)

Ranks are processes of one thread over gloo on CPUs. GPT-like and ResNet-like models are cut by
fxpart; both runtimes run the very same stage modules in the same processes, in turn, without an
optimizer; what else the machine does changes within seconds, so that only neighbours in time are
compared, and the median of their ratios counts. Beside that: how far a step is above the schedule's
ideal (fxpart's simulator with the stage times that were recorded in the very same steps, transfers
free), what an action takes beside its computation where stages are tiny, and the module that fxpart
emits for one rank against the user's own in eager. Stages with much to send and little to compute
are a group of their own ("transfers"), each with what its transfers are of torch's step.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pipelining_models import FAMILIES, TINY, TRANSFERS, Case, batch_of, model_of
from pipelining_rounds import Rounds, Stages, alternate, ratio, timed
from pipelining_transfers import Wires, chosen, rows, with_shares
from record import parser, read, write

SCHEDULES = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B"}
TINY_MICROBATCHES = 32


class Pair:
    """One case on all ranks: fxpart's trainers and torch's schedules on the same modules."""

    def __init__(self, case: Case, ranks: int, microbatches: int) -> None:
        import torch
        import torch.distributed.pipelining as pipelining

        import fxpart
        from fxpart.interop.torch_pipeline import PipelineStages
        from fxpart.runtime import Trainer, connect

        torch.manual_seed(0)
        self.batch = batch_of(case, microbatches)
        self.program = fxpart.compile(
            model_of(case, ranks), f"local:{ranks}", example_kwargs=self.batch,
            microbatches=microbatches, constraints={"mesh": "none", "stages": ranks},
        )  # fmt: skip
        transport = connect(ranks)
        self.rank = transport.local[0]
        # One set of modules for both runtimes and all schedules, not copies.
        modules = self.program.trainer().parts.mesh_ranks[0].modules
        spec = self.program.spec
        self.trainers = {
            name: Trainer(
                spec, modules, ranks=range(ranks), transport=transport,
                microbatches=microbatches, schedule=name,
            )
            for name in SCHEDULES
        }  # fmt: skip
        self.stages = PipelineStages(
            spec, modules, ranks=range(ranks), microbatches=microbatches, batch=self.batch,
            device=torch.device("cpu"),
        )  # fmt: skip
        self.schedules = {
            name: getattr(pipelining, kind)(self.stages[0], **self.stages.options)
            for name, kind in SCHEDULES.items()
        }
        self.parameters = [p for module in modules.values() for p in module.parameters()]

    def fxpart(self, name: str) -> Callable[[], None]:
        """A step of fxpart's trainer."""
        trainer = self.trainers[name]

        def step() -> None:
            trainer.backward(self.batch)
            trainer.zero_grad()

        return step

    def torch(self, name: str) -> Callable[[], None]:
        """A step of torch's schedule."""
        schedule, stages = self.schedules[name], self.stages

        def step() -> None:
            schedule.step(**stages.feed(self.batch), return_outputs=False)
            for parameter in self.parameters:
                parameter.grad = None

        return step

    def recorded(self, name: str, steps: int) -> tuple[float, Stages]:
        """Seconds per step, and of each stage the median of its forwards and of its backwards."""
        from fxpart.schedule.action import ActionKind, parse

        with self.trainers[name].record() as recorder:
            taken = timed(self.fxpart(name), steps)
        found: dict[tuple[int, ActionKind], list[float]] = {}
        for span in recorder.recording.spans:
            if span.track == "compute":
                action = parse(span.name)
                found.setdefault((action.stage, action.kind), []).append(span.end - span.start)
        count = len(self.program.spec.stages)
        forward = [statistics.median(found[stage, ActionKind.F]) for stage in range(count)]
        return taken, (forward, [statistics.median(found[k, ActionKind.B]) for k in range(count)])

    def ideal(self, name: str, seconds: Stages) -> float:
        """The schedule's step with these stage times and free transfers."""
        from fxpart.schedule.simulate import simulate

        schedule, edges = self.schedule(name)
        return simulate(schedule, edges, *seconds).step_seconds

    def schedule(self, name: str) -> tuple[Any, Any]:
        """The actions that the trainer runs, and the edges between stages."""
        from fxpart.program.edges import find_stage_edges
        from fxpart.schedule.make import make

        spec, count = self.program.spec, len(self.program.spec.stages)
        found = find_stage_edges(spec)
        return make(name, range(count), self.trainers[name].microbatches, found), found

    def crossing(self) -> list[float]:
        """MB that a microbatch carries over each boundary."""
        from fxpart.interop.chain_stage import make_meta_tensors

        sizes = []
        symbols = self.stages._read(self.batch).sizes[0]
        for stage in self.stages.spec.stages[:-1]:
            taken = self.stages.spec.stages[stage.index + 1]
            values = [v for v, s in zip(taken.inputs, taken.sources, strict=True) if s >= 0]
            sizes.append(
                sum(t.numel() * t.element_size() for t in make_meta_tensors(values, symbols)) / 1e6
            )
        return [round(size, 3) for size in sizes]


def measure(case: Case, ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    """One case: throughput of both, and fxpart's distance from the ideal."""
    pair = Pair(case, ranks, 2 * ranks)
    found: dict[str, Any] = {"boundary_mb": max(pair.crossing())}
    for name in SCHEDULES:
        rounds = Rounds(pair, name, options.seconds, options.rounds)
        ideals = [pair.ideal(name, stages) for stages in rounds.stages]
        whole = [[f + b for f, b in zip(*stages, strict=True)] for stages in rounds.stages]
        found[name] = {
            "step_ms": {n: round(ms, 2) for n, ms in rounds.step(1e-3).items()},
            "throughput_over_torch": rounds.over(),
            "unsure": rounds.unsure(),
            "ideal_ms": round(1e3 * statistics.median(ideals), 2),
            "above_ideal": round(ratio(rounds.taken["recorded"], ideals) - 1, 4),
            "torch_above_ideal": round(ratio(rounds.taken["torch"][: len(ideals)], ideals) - 1, 4),
            "stage_ms": [
                round(1e3 * statistics.median(times), 2) for times in zip(*whole, strict=True)
            ],
        }
    return found


def overhead(ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    """Tiny stages: microseconds that an action takes beside the computations of its rank."""
    pair = Pair(TINY, ranks, TINY_MICROBATCHES)
    found: dict[str, Any] = {}
    for name in SCHEDULES:
        rounds = Rounds(pair, name, options.seconds / 2, options.rounds)
        schedule, _ = pair.schedule(name)
        # The rank with most to do: what others wait for it is theirs, not overhead.
        busiest = max(range(ranks), key=lambda rank: len(schedule.ranks[rank]))
        actions = len(schedule.ranks[busiest])
        busy = [TINY_MICROBATCHES * (f[busiest] + b[busiest]) for f, b in rounds.stages]
        # Ranks that share cores cannot all compute at once: that is no overhead either.
        cores = len(os.sched_getaffinity(0))
        whole = [TINY_MICROBATCHES * (sum(f) + sum(b)) / cores for f, b in rounds.stages]
        shared = [max(times) for times in zip(busy, whole, strict=True)]
        found[name] = {
            "step_us": {n: round(us) for n, us in rounds.step(1e-6).items()},
            "actions": actions,
            "us_per_action": _beside(rounds, busy, actions),
            "us_per_action_shared_cores": _beside(rounds, shared, actions),
            "throughput_over_torch": rounds.over(),
        }
    return found


def _beside(rounds: Rounds, computing: list[float], actions: int) -> dict[str, float]:
    """Microseconds of an action beside so many seconds of computation a step, round by round."""
    return {
        name: round(
            1e6 * statistics.median(t - c for t, c in zip(taken, computing, strict=True)) / actions,
            1,
        )
        for name in ("fxpart", "torch")
        for taken in [rounds.taken[name][: len(computing)]]
    }


def emitted(case: Case, options: argparse.Namespace) -> dict[str, float]:
    """The module that fxpart emits for one rank over the user's own, forward and backward."""
    import torch

    import fxpart

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, batch = model_of(case, 2).train(), batch_of(case, 1)
    program = fxpart.compile(
        model, "local:1", example_kwargs=batch, microbatches=1, constraints={"mesh": "none"}
    )
    trainer = program.trainer()
    module = trainer.parts.mesh_ranks[0].modules[0]
    inputs = [batch[value.name] for value in program.spec.stages[0].inputs]

    def run(step: Callable[[], torch.Tensor], own: torch.nn.Module, count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            step().backward()
            for parameter in own.parameters():
                parameter.grad = None
        return (time.perf_counter() - start) / count

    def eager() -> float:
        return run(lambda: model(**batch)["loss"], model, count)

    def ours() -> float:
        return run(lambda: module(0, *inputs)[0], module, count)

    count = 2
    eager(), ours()
    count = max(1, min(200, round(options.seconds / 2 / eager())))
    taken = alternate({"emitted": ours, "eager": eager}, 2 * options.rounds)
    trainer.close()
    return {
        "emitted_ms": round(1e3 * statistics.median(taken["emitted"]), 2),
        "eager_ms": round(1e3 * statistics.median(taken["eager"]), 2),
        "emitted_over_eager": ratio(taken["emitted"], taken["eager"]),
    }


def summary(figures: Mapping[str, Any]) -> dict[str, Any]:
    """What must hold, over all cases."""
    cases = [
        {"boundary": case["boundary_mb"], **case[schedule]}
        for world in figures["ranks"].values()
        for family in world["cases"].values()
        for case in family.values()
        for schedule in SCHEDULES
    ]
    over = [case["throughput_over_torch"] for case in cases]
    large = [c["throughput_over_torch"] for c in cases if c["boundary"] >= 8]
    slow = [case["above_ideal"] for case in cases if min(case["stage_ms"]) >= 20]
    worlds = figures["ranks"].values()
    tiny = [world["tiny"][s]["us_per_action"]["fxpart"] for world in worlds for s in SCHEDULES]
    sent = list(rows(figures["ranks"]))
    eager = [c["emitted_over_eager"] for f in figures["emitted"].values() for c in f.values()]
    return {
        "throughput_over_torch": {
            "least": min(over),
            "least_before": min((r for c in cases for r in c.get("earlier", ())), default=None),
            "geometric_mean": mean(over),
        },
        "throughput_over_torch_8mb": {"least": min(large), "geometric_mean": mean(large)}
        if large else None,
        "throughput_over_torch_transfers": {
            "least": min(over for over, _ in sent),
            "geometric_mean": mean([over for over, _ in sent]),
            "share_of_torch": [min(share for _, share in sent), max(share for _, share in sent)],
        }
        if sent
        else None,
        "above_ideal_20ms_most": max(slow, default=None),
        "us_per_action_most": max(tiny),
        "emitted_over_eager_most": max(eager, default=None),
    }  # fmt: skip


def mean(values: list[float]) -> float:
    """The geometric mean."""
    return round(math.exp(statistics.fmean(map(math.log, values))), 3)


def on_ranks(options: argparse.Namespace) -> None:
    """Under torchrun: all cases; rank 0 writes them to the file given."""
    import torch
    import torch.distributed as dist

    from fxpart.runtime import connect

    torch.set_num_threads(1)
    ranks = int(os.environ["WORLD_SIZE"])
    connect(ranks)
    found: dict[str, Any] = {"cases": {}, "transfers": {}}
    for family, size, case in chosen(FAMILIES, "cases", options):
        taken = measure(case, ranks, options)
        found["cases"].setdefault(family, {})[size] = taken
        tell(ranks, family, size, taken)
    wires = Wires(ranks)
    options.seconds /= 2  # their steps are short
    for family, size, case in chosen(TRANSFERS, "transfers", options):
        taken = with_shares(measure(case, ranks, options), wires, 2 * ranks)
        found["transfers"].setdefault(family, {})[size] = taken
        tell(ranks, family, size, taken)
    wires.close()
    options.seconds *= 2
    if {"", "tiny"} & set(options.only.split(",")):
        found["tiny"] = overhead(ranks, options)
    if dist.get_rank() == 0:
        Path(options.output).write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()


def tell(ranks: int, family: str, size: str, taken: Mapping[str, Any]) -> None:
    """A line a case, while the others run."""
    if int(os.environ["RANK"]) == 0:
        over = ", ".join(f"{n} {taken[n]['throughput_over_torch']:.3f}" for n in SCHEDULES)
        print(f"{ranks} ranks, {family} {size}: {over} of torch's throughput", file=sys.stderr)


def merged(kept: dict[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """What was kept, with what is new in its place; ratios keep those that they had before."""
    if "throughput_over_torch" in kept and "throughput_over_torch" in new:
        earlier = [*kept.get("earlier", []), kept["throughput_over_torch"]]
        return {**new, "earlier": earlier}
    for name, value in new.items():
        inner = isinstance(value, Mapping) and isinstance(kept.get(name), dict)
        kept[name] = merged(kept[name], value) if inner else value
    return kept


def main() -> None:
    """Start the ranks, then compare the emitted module in this process."""
    own = parser(__doc__)
    own.add_argument("--quick", action="store_true", help="fewer and shorter rounds, 2 ranks")
    own.add_argument("--rounds", type=int, default=9)
    own.add_argument("--seconds", type=float, default=1.0, help="of each block, about")
    own.add_argument(
        "--only", default="", help='such as "gpt,resnet large,tiny"; the others stay as kept'
    )
    own.add_argument("--ranks", default="2,4", help="how many; the others stay as kept")
    own.add_argument("--output", default="", help=argparse.SUPPRESS)
    options = own.parse_args()
    if "RANK" in os.environ:
        on_ranks(options)
        return
    if options.quick:
        options.rounds, options.seconds = 3, 0.3
    figures: dict[str, Any] = {"ranks": {}}
    for ranks in (2,) if options.quick else map(int, options.ranks.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "figures.json"
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command += ["--nproc-per-node", str(ranks), __file__, "--output", str(output)]
            command += ["--rounds", str(options.rounds), "--seconds", str(options.seconds)]
            command += ["--only", options.only]
            found = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
            if found.returncode:
                raise SystemExit(found.returncode)
            figures["ranks"][str(ranks)] = json.loads(output.read_text(encoding="utf-8"))
    figures["emitted"] = {family: {} for family in FAMILIES}
    for family, size, case in chosen(FAMILIES, "emitted", options):
        figures["emitted"][family][size] = emitted(case, options)
    if options.only or options.ranks != "2,4":
        figures = merged(read("pipelining")["figures"], figures)
    figures["summary"] = summary(figures)
    del options.output
    write("pipelining", figures, options)


if __name__ == "__main__":
    main()
