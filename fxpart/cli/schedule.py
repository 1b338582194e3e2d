"""``fxpart schedule``: look at schedules, prove them safe, run them in time, take them over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from fxpart.cli import output, schedule_source
from fxpart.cli.options import json_option
from fxpart.cli.schedule_source import ScheduleSource, source_options
from fxpart.schedule.action import Schedule
from fxpart.schedule.text import draw

if TYPE_CHECKING:
    from fxpart.schedule.action import Schedule
    from fxpart.schedule.timeline import Timeline


SENDS = ("overlapped", "buffered", "rendezvous", "runtime", "shared")


@click.group()
def command() -> None:
    """Look at schedules, prove them safe, run them in time, take them over.

    SOURCE is a file (fxpart's text, or the CSV of torch.distributed.pipelining) or the name of a
    schedule, such as 1f1b, that --stages and --microbatches complete. Each verb takes --json.
    `fxpart explain schedules` says what is in a file.
    """


@command.command()
@source_options
@click.option("--text", "as_text", is_flag=True, help="As fxpart's text instead of a picture.")
@click.option("--csv", "as_csv", is_flag=True, help="As CSV for torch.distributed.pipelining.")
@json_option
def show(as_text: bool, as_csv: bool, as_json: bool, **given: Any) -> int:
    """Draw a schedule, or write it as text.

    A line per rank; a forward takes one column, a backward two.
    F0 is the forward of microbatch 0, B0 its backward, I0 and W0 the two halves of one; with
    several stages on a rank the stage stands in front: 2F0. With --weights a table follows: what
    the mode means for each stage of a full pipeline.
    """
    from fxpart.schedule.text import to_text
    from fxpart.schedule.torch_csv import to_torch_csv

    source = ScheduleSource(**given)
    with schedule_source.report_schedule_errors(as_json):
        schedule, edges = source.load()
    if as_json:
        from fxpart.cli import weight_versions

        data = schedule_source.as_data(schedule, edges) | {"ranks": schedule_source.lists(schedule)}
        output.data(data | weight_versions.as_data(schedule, source))
    elif as_csv:
        output.text(to_torch_csv(schedule).replace("\r\n", "\n").rstrip("\n"))
    elif as_text:
        output.text(to_text(schedule).rstrip("\n"))
    else:
        with schedule_source.report_schedule_errors(as_json):
            schedule_source.check_schedule_shape(schedule, edges)
            picture = draw(schedule, edges)
        output.text(picture)
        from fxpart.cli import weight_versions

        for line in weight_versions.lines(schedule, source):
            output.text(line)
    return 0


@command.command()
@source_options
@click.option("--memory", help="Microbatches that may be in flight: one number, or by stage 4,3,2.")
@json_option
def validate(memory: str | None, as_json: bool, **given: Any) -> int:
    """Prove a schedule safe, or list every fault.

    A schedule without transfers gets them first. What a stage may keep in flight is what its
    builder promises, where it has a builder's name, or --memory.
    """
    from fxpart.schedule.files import edges_text
    from fxpart.schedule.simulate import simulate

    source = ScheduleSource(**given)
    with schedule_source.report_schedule_errors(as_json):
        schedule, edges = source.load()
        bare = not schedule.is_lowered
        made = schedule_source.add_transfers(schedule, edges)
        limits = (
            None if memory is None else schedule_source.numbers("--memory", memory, made.stages)
        )
        whole = None if limits is None else [int(limit) for limit in limits]
        schedule_source.verify_schedule(made, edges, source, whole)
    timeline = simulate(made, edges, [1.0] * made.stages, [2.0] * made.stages)
    if as_json:
        found = {"valid": True, "in_flight": timeline.in_flight, "bubble": timeline.bubble}
        output.data(schedule_source.as_data(made, edges) | found | {"transfers_added": bare})
        return 0
    from fxpart import units

    flying = ", ".join(str(count) for count in timeline.in_flight)
    added = " (transfers added)" if bare else ""
    bubble = units.percent(timeline.bubble)
    for line in (
        f"{schedule_source.title(made)}: valid{added}",
        f"  stage graph {edges_text(edges) or 'without edges'}",
        "  each computation once, after what it needs, sums in the order of microbatches",
        "  each transfer sent and received once; no rank stands still when sends wait for receives",
        *schedule_source.read_weights(source, made),
        f"  in flight at most, by stage: {flying}",
        f"  bubble {bubble} where a forward takes 1, a backward 2 and a transfer nothing",
    ):
        output.text(line)
    return 0


@command.command()
@source_options
@click.option("--forward", default="1", show_default=True, help="Seconds; one for all, or 1,2,1.")
@click.option("--backward", default="2", show_default=True, help="The same, of a whole backward.")
@click.option(
    "--weight", help="Of these, seconds of W where a backward is split; half if not given."
)
@click.option("--transfer", default="0", show_default=True, help="Of what each stage sends.")
@click.option("--sends", type=click.Choice(SENDS), default="overlapped", show_default=True)
@click.option("--trace", type=click.Path(), help="Write a trace for Chrome or Perfetto.")
@json_option
def simulate(
    forward: str, backward: str, weight: str | None, transfer: str, sends: Any,
    trace: str | None, as_json: bool, **given: Any,
) -> int:  # fmt: skip
    """Run a schedule in time: step, bubble, ranks.

    --sends: overlapped (receives are posted ahead), buffered (a receive holds its rank),
    rendezvous (both ranks stop for a transfer), runtime (as fxpart's runtime over gloo), shared (as
    it does between ranks of one machine: a sender copies by itself). With --weights of a stream:
    seconds of an update once the pipeline is full, and with a flush after each.
    """
    from fxpart.cli import weight_versions
    from fxpart.schedule.simulate import simulate as simulated

    source = ScheduleSource(**given)
    with schedule_source.report_schedule_errors(as_json):
        count = source.load()[0].stages
    ahead = schedule_source.numbers("--forward", forward, count)
    back = schedule_source.numbers("--backward", backward, count)
    late = (
        [b / 2 for b in back]
        if weight is None
        else schedule_source.numbers("--weight", weight, count)
    )
    halves = [(b - w, w) for b, w in zip(back, late, strict=True)]
    moved = schedule_source.numbers("--transfer", transfer, count)
    with schedule_source.report_schedule_errors(as_json):
        schedule, edges = source.load(ahead, back)
        made = schedule_source.add_transfers(schedule, edges, ahead, back, halves)
        schedule_source.verify_schedule(made, edges, source, [made.microbatches] * count)
    transfers = (lambda stage, peer, kind: moved[stage]) if any(moved) else None
    found = simulated(made, edges, ahead, back, transfers, split=halves, sends=sends)
    pace = weight_versions.pace(made, source, edges, ahead, back, transfers, sends)
    if trace is not None:
        from fxpart.cli.report import write

        write(trace, output.as_json(found.chrome_trace()))
        output.note(f"wrote {trace}")
    if as_json:
        output.data(found.as_dict() | ({} if pace is None else pace.as_dict()))
        return 0
    for line in (*_timed(made, found), *([] if pace is None else [pace.line()])):
        output.text(line)
    return 0


@command.command("import")
@click.argument("file", type=click.Path())
@click.option("-o", "--output", "path", type=click.Path(), help="Write it: .csv is torch's form.")
@click.option("--name", help="A name for the schedule; a CSV has none.")
@json_option
def import_(file: str, path: str | None, name: str | None, as_json: bool) -> int:
    """Convert torch's CSV to text, or back.

    Without -o the other form is printed. What torch's form cannot say is an error: transfers that
    skip a stage, weight versions, copies of stages.
    """
    from fxpart.schedule.files import (
        contents,
        implied_edges,
        is_text,
        parse_schedule,
        serialize_for_path,
    )

    given = contents(file)
    schedule = parse_schedule(given, name)
    text = serialize_for_path(schedule, path or ("other.csv" if is_text(given) else "other.txt"))
    if path is not None:
        from fxpart.cli.report import write

        write(path, text)
        output.note(f"wrote {path}: {schedule_source.title(schedule)}")
    if as_json:
        data = schedule_source.as_data(schedule, implied_edges(schedule))
        output.data(data | {"ranks": schedule_source.lists(schedule), "output": path})
    elif path is None:
        output.text(text.replace("\r\n", "\n").rstrip("\n"))
    return 0


def _timed(schedule: Schedule, found: Timeline) -> list[str]:
    """What a person reads of a simulation."""
    from fxpart import units

    step = found.step_seconds
    bubble = units.percent(found.bubble)
    lines = [
        f"{schedule_source.title(schedule)}",
        f"  step {units.seconds(step)}, bubble {bubble}",
    ]
    for rank, busy in enumerate(found.busy):
        mine = [k for k, at in enumerate(schedule.stage_rank) if at == rank]
        share = units.percent(busy / step if step else 0.0)
        flying = ", ".join(f"{found.in_flight[k]} of stage {k}" for k in mine)
        lines.append(
            f"  rank {rank}: computes {units.seconds(busy)} ({share}); in flight {flying or 'none'}"
        )
    return lines
