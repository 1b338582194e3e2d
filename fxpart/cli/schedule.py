"""``fxpart schedule``: show, validate, simulate and convert schedules."""

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
    """Show, validate, simulate and convert schedules.

    SOURCE is a file (fxpart's text, or the CSV of torch.distributed.pipelining) or the name of a
    schedule, such as 1f1b, with --stages and --microbatches. Each verb takes --json.
    `fxpart explain schedules` describes the files.
    """


@command.command()
@source_options
@click.option(
    "--text", "as_text", is_flag=True, help="Print fxpart's text format instead of a drawing."
)
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV for torch.distributed.pipelining.")
@json_option
def show(as_text: bool, as_csv: bool, as_json: bool, **given: Any) -> int:
    """Draw a schedule, or print it as text.

    There is a line per rank; a forward takes one column, a backward two. F0 is the forward of
    microbatch 0, B0 its backward, I0 and W0 its two halves; with several stages on a rank, the
    stage precedes it: 2F0. With --weights, a table shows the weight versions of each stage of a
    full pipeline.
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
@click.option("--memory", help="Maximum of microbatches in flight: one number, or by stage 4,3,2.")
@json_option
def validate(memory: str | None, as_json: bool, **given: Any) -> int:
    """Check that a schedule is safe, or list all problems.

    Transfers are added to a schedule without them. The limit of microbatches in flight is that of
    the schedule's builder, or --memory.
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

    in_flight = ", ".join(str(count) for count in timeline.in_flight)
    added = " (transfers added)" if bare else ""
    bubble = units.percent(timeline.bubble)
    for line in (
        f"{schedule_source.title(made)}: valid{added}",
        f"  stage graph {edges_text(edges) or 'without edges'}",
        "  each computation occurs once, after its inputs; gradients add up in microbatch order",
        "  each transfer is sent and received once; no deadlock if sends wait for receives",
        *schedule_source.read_weights(source, made),
        f"  microbatches in flight at most, by stage: {in_flight}",
        f"  bubble {bubble} if a forward takes 1, a backward 2 and a transfer 0",
    ):
        output.text(line)
    return 0


@command.command()
@source_options
@click.option(
    "--forward",
    default="1",
    show_default=True,
    help="Seconds of a forward; one number, or by stage 1,2,1.",
)
@click.option(
    "--backward", default="2", show_default=True, help="Seconds of a whole backward, likewise."
)
@click.option("--weight", help="Seconds of W in a split backward, by default half of the backward.")
@click.option(
    "--transfer", default="0", show_default=True, help="Seconds of each stage's transfers."
)
@click.option("--sends", type=click.Choice(SENDS), default="overlapped", show_default=True)
@click.option("--trace", type=click.Path(), help="Write a trace for Chrome or Perfetto.")
@json_option
def simulate(
    forward: str, backward: str, weight: str | None, transfer: str, sends: Any,
    trace: str | None, as_json: bool, **given: Any,
) -> int:  # fmt: skip
    """Simulate a schedule: step time, pipeline bubble and ranks.

    --sends: overlapped (receives are posted early), buffered (a receive blocks its rank),
    rendezvous (a transfer blocks both ranks), runtime (as fxpart's runtime over gloo), shared (as
    fxpart's runtime within a machine: the sender copies). With --weights of an asynchronous mode:
    seconds of an update once the pipeline is full, and with a flush after each update.
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
@click.option(
    "-o", "--output", "path", type=click.Path(), help="Output file; .csv is torch's format."
)
@click.option("--name", help="Name of the schedule, which a CSV does not have.")
@json_option
def import_(file: str, path: str | None, name: str | None, as_json: bool) -> int:
    """Convert torch's CSV to fxpart's text, or back.

    Without -o, the result is printed. Transfers that skip a stage, weight versions and replicas
    cannot be represented in torch's format and are errors.
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
    """Return a simulation as lines of text."""
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
        in_flight = ", ".join(f"{found.in_flight[k]} of stage {k}" for k in mine)
        lines.append(
            f"  rank {rank}: computes {units.seconds(busy)} ({share}); "
            f"in flight {in_flight or 'none'}"
        )
    return lines
