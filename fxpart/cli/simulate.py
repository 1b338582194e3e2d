"""``fxpart simulate``: simulate a plan's schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from fxpart.cli import output
from fxpart.cli.options import json_option
from fxpart.plan.model import Plan
from fxpart.planner.prediction.steady_state import compute_steady_seconds
from fxpart.schedule.spec import ASYNC, GPIPE

if TYPE_CHECKING:
    from fxpart.schedule.multi_step import SimulatedSteps


@click.command()
@click.argument("plan", type=click.Path())
@click.option("--schedule", help=f"Simulate another schedule, such as {GPIPE}.")
@click.option("--microbatches", "-m", type=click.IntRange(1, 65536), help="Number of microbatches.")
@click.option("--steps", "-n", type=click.IntRange(1, 1000), help="Number of steps, by default 1.")
@click.option("--no-flush", is_flag=True, help="Start the next step without a flush (1F1B only).")
@click.option("--no-contention", is_flag=True, help="Simulate without CPU contention.")
@click.option("--trace", type=click.Path(), help="Write a trace for Chrome or Perfetto.")
@json_option
def command(
    plan: str,
    schedule: str | None,
    microbatches: int | None,
    steps: int | None,
    no_flush: bool,
    no_contention: bool,
    trace: str | None,
    as_json: bool,
) -> int:
    """Simulate PLAN's schedule under its predicted costs, without the model.

    Microbatches keep the size of the plan. An asynchronous plan runs for as many minibatches as
    fill the pipeline, and a few more.
    """
    from fxpart.planner.prediction.plan_timeline import (
        get_steady_window,
        plan_steps,
        runs_without_flushes,
    )

    loaded = Plan.load(plan)
    window = None
    if steps is None and runs_without_flushes(loaded, schedule):
        steps, *window = get_steady_window(loaded, microbatches)
    found = plan_steps(
        loaded, schedule, microbatches, steps=steps or 1, flush=False if no_flush else None,
        contention=not no_contention,
    )  # fmt: skip
    steady = found.steady_seconds if window is None else compute_steady_seconds(found.ends, *window)
    if trace is not None:
        from fxpart.cli.report import write

        write(trace, output.as_json(found.timeline.chrome_trace()))
        output.note(f"wrote {trace}")
    if as_json:
        output.data(
            {
                **{
                    {"step_seconds": "simulated_seconds"}.get(name, name): value
                    for name, value in found.timeline.as_dict().items()
                },
                "ends": list(found.ends),
                "steady_seconds": steady,
                "step_time": loaded.prediction.expected_seconds,
            }
        )
        return 0
    for line in _lines(loaded, found, no_contention, steady):
        output.text(line)
    return 0


def _lines(plan: Plan, found: SimulatedSteps, alone: bool, steady: float) -> list[str]:
    """Return the text. steady: seconds of a step once the pipeline is full."""
    from fxpart import units
    from fxpart.plan.number_ranges import format_numbers
    from fxpart.report.table import shortened

    timeline, count = found.timeline, len(found.ends)
    whole = timeline.step_seconds
    what = units.seconds(whole)
    if count > 1:
        when = "once the pipeline is full" if timeline.name == ASYNC else "after the first"
        what += f" for {count} steps, {units.seconds(steady)} each {when}"
    notes = ["gradient reduction, optimizer step and runtime overhead included"]
    hosts = plan.prediction.hosts
    if hosts and alone:
        notes.append("without CPU contention")
    elif hosts:
        notes.append(f"with CPU contention on {units.plural(len(hosts), 'host')}")
    lines = [
        f"plan: step time {units.seconds(plan.prediction.expected_seconds)} predicted",
        f"{timeline.name}: simulated {what}, pipeline bubble {units.percent(timeline.bubble)} "
        f"({'; '.join(notes)})",
    ]
    for stage, busy in zip(plan.stages, timeline.busy, strict=True):
        share = busy / whole if whole else 0.0
        ranks = f"rank {shortened(format_numbers(stage.ranks), 40)}"
        in_flight = units.plural(timeline.in_flight[stage.index], "microbatch")
        lines.append(
            f"  {ranks}: computes {units.seconds(busy)} ({units.percent(share)}), "
            f"{in_flight} in flight"
        )
    return lines
