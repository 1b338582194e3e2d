"""``fxpart simulate``: a plan's schedule in time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from fxpart.cli import output
from fxpart.cli.options import json_option
from fxpart.plan.model import Plan
from fxpart.planner.prediction.steady_state import steady_seconds
from fxpart.schedule.spec import ASYNC, GPIPE

if TYPE_CHECKING:
    from fxpart.schedule.multi_step import SimulatedSteps


@click.command()
@click.argument("plan", type=click.Path())
@click.option("--schedule", help=f"Another schedule in the plan's place, such as {GPIPE}.")
@click.option("--microbatches", "-m", type=click.IntRange(1, 65536), help="Another number.")
@click.option("--steps", "-n", type=click.IntRange(1, 1000), help="Several steps; 1 if not given.")
@click.option("--no-flush", is_flag=True, help="The next step follows at once (1F1B alone).")
@click.option(
    "--no-contention", is_flag=True, help="As if each rank had the cores of its host to itself."
)
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
    """Run PLAN's schedule by its predicted costs; no model is needed.

    Microbatches keep the size that the plan gives them, whatever their number here. An asynchronous
    plan runs as many minibatches as it takes to fill and to drain, and a few between.
    """
    from fxpart.report.timeline import plan_steps, stream_steps, streams

    loaded = Plan.load(plan)
    window = None
    if steps is None and streams(loaded, schedule):
        steps, *window = stream_steps(loaded, microbatches)
    found = plan_steps(
        loaded, schedule, microbatches, steps=steps or 1, flush=False if no_flush else None,
        contention=not no_contention,
    )  # fmt: skip
    steady = found.steady_seconds if window is None else steady_seconds(found.ends, *window)
    if trace is not None:
        from fxpart.cli.report import write

        write(trace, output.as_json(found.timeline.chrome_trace()))
        output.note(f"wrote {trace}")
    if as_json:
        output.data(
            {**found.timeline.as_dict(), "ends": list(found.ends), "steady_seconds": steady}
        )
        return 0
    for line in _lines(loaded, found, no_contention, steady):
        output.text(line)
    return 0


def _lines(plan: Plan, found: SimulatedSteps, alone: bool, steady: float) -> list[str]:
    """What a person reads. steady: seconds of a step once the pipeline is full."""
    from fxpart import units
    from fxpart.plan.number_ranges import text_of
    from fxpart.report.table import shortened

    timeline, count = found.timeline, len(found.ends)
    whole = timeline.step_seconds
    what = units.seconds(whole)
    if count > 1:
        when = "once the pipeline is full" if timeline.name == ASYNC else "after the first"
        what += f" for {count} steps, {units.seconds(steady)} each {when}"
    words = ["sums, optimizer and the runtime included"]
    hosts = plan.prediction.hosts
    if hosts and alone:
        words.append("each rank as if alone on its host")
    elif hosts:
        words.append(f"ranks that share {units.plural(len(hosts), 'host')} slow each other down")
    lines = [
        f"{timeline.name}: {what}, bubble {units.percent(timeline.bubble)} ({'; '.join(words)})"
    ]
    for stage, busy in zip(plan.stages, timeline.busy, strict=True):
        share = busy / whole if whole else 0.0
        ranks = f"rank {shortened(text_of(stage.ranks), 40)}"
        flying = units.plural(timeline.in_flight[stage.index], "microbatch")
        lines.append(
            f"  {ranks}: computes {units.seconds(busy)} ({units.percent(share)}), "
            f"{flying} in flight"
        )
    return lines
