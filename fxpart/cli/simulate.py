"""``fxpart simulate``: a plan's schedule in time."""

from __future__ import annotations

import click

from fxpart.cli import output
from fxpart.cli.options import json_option
from fxpart.plan import Plan


@click.command()
@click.argument("plan", type=click.Path())
@click.option("--schedule", help="Another schedule in the plan's place, such as gpipe.")
@click.option("--microbatches", "-m", type=click.IntRange(1, 65536), help="Another number.")
@click.option("--trace", type=click.Path(), help="Write a trace for Chrome or Perfetto.")
@json_option
def command(
    plan: str, schedule: str | None, microbatches: int | None, trace: str | None, as_json: bool
) -> int:
    """Run PLAN's schedule by its predicted costs; no model is needed."""
    from fxpart.plan_io.runs import text_of
    from fxpart.report import units
    from fxpart.report.table import shortened
    from fxpart.report.timeline import plan_timeline

    loaded = Plan.load(plan)
    timeline = plan_timeline(loaded, schedule, microbatches)
    if trace is not None:
        from fxpart.cli.report import write

        write(trace, output.as_json(timeline.chrome_trace()))
        output.note(f"wrote {trace}")
    if as_json:
        output.data(timeline.as_dict())
        return 0
    step = timeline.step_seconds
    output.text(
        f"{timeline.name}: {units.seconds(step)}, bubble {units.percent(timeline.bubble)} "
        "(without gradient sums and optimizer)"
    )
    for stage, busy in zip(loaded.stages, timeline.busy, strict=True):
        share = busy / step if step else 0.0
        flying = [timeline.in_flight[stage.index]]
        ranks = f"rank {shortened(text_of(stage.ranks), 40)}"
        output.text(
            f"  {ranks}: computes {units.seconds(busy)} ({units.percent(share)}), "
            f"{units.plural(max(flying, default=0), 'microbatch')} in flight"
        )
    return 0
