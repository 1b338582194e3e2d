"""Predicted and measured peaks of ranks' processes: accuracy.py's models and plans, no timing.

    python tests/benchmarks/memory.py          (--models gpt2,vit for some; --dry for a try)

What a process of this host takes beside its tensors is measured once for each model, on one process
that trains the whole of it (``fxpart profile`` does the same); what tensors take the plan says.
Then each plan runs in fresh processes for some steps, and every rank's highest resident set is
compared with that. One plan of each model is planned again for devices that have just the memory
for it, and for ones that have a little less. Nothing is timed: the machine need not be idle. A
model takes about two minutes; ``--keep FOLDER`` keeps what each plan came to, and goes on there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from accuracy import MODELS, PLANS, words
from record import parser, write

MIB = 2**20


_TIGHT = 2  # the place in PLANS of the plan that is planned for devices that it just fits


@dataclass
class Weighing:
    """The cost model that needs no measurement, which knows this host's processes as well."""

    found: Any
    base: Any = field(default=None)

    def __post_init__(self) -> None:
        """By default the best that needs no measurement."""
        from fxpart import costmodels

        self.base = self.base or costmodels.find("auto")

    def knowledge(self, device: Any) -> Any:
        """Return what the base model knows, with the contention that was measured."""
        return replace(self.base.knowledge(device), contention=self.found)

    def for_model(self, fingerprint: str) -> Weighing:
        """Return the model for a captured model, with the same contention."""
        return replace(self, base=self.base.for_model(fingerprint))

    def for_part(self, cluster: Any) -> Weighing:
        """Return the model for some devices, with the same contention."""
        return replace(self, base=self.base.for_part(cluster))

    def __getattr__(self, name: str) -> Any:
        """Everything else is the other one's."""
        return getattr(self.base, name)


def of_model(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One model: plan by plan every rank's row, and what a plan that just fits comes to."""
    import cpu_models
    from fxpart.costmodels.profile_store import ContentionProfile

    work = cpu_models.build(name)
    file = Path(options.keep) / f"{name}.json" if options.keep else None
    kept: dict[str, Any] = {"done": [], "rows": [], "tight": {}}
    if file is not None and file.exists():
        kept = json.loads(file.read_text(encoding="utf-8"))

    def keep() -> None:
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(kept), encoding="utf-8")

    if "growth" not in kept:
        found = growth_of(work)
        kept["growth"] = [found.baseline, found.overhead]
        keep()
    baseline, overhead = kept["growth"]
    growth = ContentionProfile(baseline=int(baseline), overhead=overhead)
    say(f"{name}: {growth.baseline / MIB:.0f} MiB beside tensors, {growth.overhead:.1%} of them")
    for place, (constraints, count) in enumerate(PLANS):
        label = words(constraints, count)
        if label in kept["done"] or "recompute" in constraints:  # that is another planner's
            continue
        planned = partial(compiled, work, constraints=constraints, count=count)
        rows, tight = of_plan(partial(planned, model=Weighing(growth)), options, place == _TIGHT)
        kept["rows"] += [{"model": name, "plan": label, **one} for one in rows]
        kept["tight"] = {"model": name, "plan": label, **tight} if tight else kept["tight"]
        kept["done"].append(label)
        keep()
        for one in kept["rows"][-len(rows) :] if rows else ():
            say_row(one)
    return kept


def of_plan(
    planned: Any, options: argparse.Namespace, tight: bool
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows of one plan's ranks. tight: also what it comes to where it just fits."""
    from fxpart.errors import FxpartError
    from fxpart.profiling.trial_processes import TrialProcesses

    try:
        program = planned("local:4")
    except FxpartError as fault:
        say(fault.problems[0].why)
        return [], {}
    with TrialProcesses(program.plan.world) as bench:
        measured = bench.run(program.plan, program.parts, steps=options.steps)
    rows = [row(rank, entry, measured) for rank, entry in ranks_of(program.plan)]
    return rows, at_limit(program.plan, planned, measured) if tight else {}


def compiled(work: Any, cluster: Any, constraints: Any, count: int, model: Any = "auto") -> Any:
    """A program by a plan of the wanted kind."""
    import fxpart

    given = "example_kwargs" if isinstance(work.example, dict) else "example_inputs"
    example: Any = {given: work.example}
    return fxpart.compile(
        work.model, cluster, loss=work.loss, microbatches=count, constraints=constraints,
        cost_model=model, batch_coupling="per-microbatch", **example,
    )  # fmt: skip


def growth_of(work: Any) -> Any:
    """What a process takes that trains the whole model, beside its tensors."""
    from fxpart.profiling.contention import measure_process_memory
    from fxpart.profiling.stage_benchmark import microbatch

    whole = compiled(work, "local:1", {"mesh": "none", "stages": 1}, 2)
    values, _, _ = microbatch(whole.captured, whole.spec, 2)
    return measure_process_memory(whole.spec, whole.sources[0], whole.captured.state, values)


def at_limit(plan: Any, planned: Any, measured: Any) -> dict[str, Any]:
    """Whether devices on which the plan just fits are said to be enough, and smaller ones not.

    And whether the processes that were measured keep within that memory.
    """
    import msgspec

    from fxpart.cluster.model import Cluster
    from fxpart.errors import FxpartError
    from fxpart.pricing.device_limits import VARIES

    def fits(memory: int) -> bool:
        whole = Cluster.parse("local:4")
        devices = tuple(msgspec.structs.replace(d, memory=memory) for d in whole.devices)
        try:
            planned(msgspec.structs.replace(whole, devices=devices))
        except FxpartError:
            return False
        return True

    # what is predicted lies above the middle of equal runs, which the limit is for
    middle = max(entry.resident for entry in plan.prediction.ranks) / (1 + VARIES / 2)
    most = int(middle / (1 - VARIES))
    return {
        "memory": most,
        "fits": fits(most + MIB),
        "less_fits": fits(most - 8 * MIB),
        "measured": max(measured.peaks),
    }


def ranks_of(plan: Any) -> list[tuple[int, Any]]:
    """Each rank with its prediction."""
    return sorted((rank, entry) for entry in plan.prediction.ranks for rank in entry.ranks)


def row(rank: int, entry: Any, measured: Any) -> dict[str, Any]:
    """One rank's figures, in bytes."""
    assert entry.process, "the plan knows what a process takes beside its tensors"
    peak = measured.peaks[rank]
    return {
        "ranks": len(measured.peaks),
        "rank": rank,
        "tensors": entry.tensors,
        "process": entry.process,
        "allocator": entry.allocator,
        "predicted": entry.resident,
        "measured": peak,
        "error": entry.resident / peak - 1,
    }


def fullest(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each plan the rank whose process was the largest."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for one in rows:
        key = one["model"], one["plan"]
        if key not in found or one["measured"] > found[key]["measured"]:
            found[key] = one
    return list(found.values())


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The median and the worst absolute error, and the most that is too low."""
    errors = [one["error"] for one in rows]
    return {
        "rows": len(rows),
        "median": statistics.median(map(abs, errors)),
        "worst": max(map(abs, errors)),
        "under": max(0.0, -min(errors)),
    }


def say(text: str) -> None:
    """How far it is."""
    sys.stderr.write(text + "\n")


def say_row(one: dict[str, Any]) -> None:
    """One line for a person, on the way."""
    say(
        f"{one['model']:11s} {one['plan']:38s} rank {one['rank']}: tensors "
        f"{one['tensors'] / MIB:6.1f}, predicted {one['predicted'] / MIB:6.1f} MiB, measured "
        f"{one['measured'] / MIB:6.1f}: {one['error']:+.1%}"
    )


def main() -> None:
    """All models, or those named."""
    made = parser(__doc__)
    made.add_argument("--models", default=",".join(MODELS))
    made.add_argument("--steps", type=int, default=9)
    made.add_argument("--keep", default="", help="a folder for what each plan came to")
    options = made.parse_args()

    import torch

    torch.set_num_threads(1)
    models = [of_model(name, options) for name in options.models.split(",")]
    rows = [one for model in models for one in model["rows"]]
    figures = {
        "rows": rows,
        "limits": [model["tight"] for model in models],
        "every rank": summary(rows),
        "fullest": summary(fullest(rows)),
    }
    write("memory", figures, options)


if __name__ == "__main__":
    main()
