"""``fxpart postmortem``: find the rank that failed first in a run, and the reason."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from fxpart.cli import output
from fxpart.cli.options import json_option

if TYPE_CHECKING:
    from fxpart.diagnostics.postmortem import Postmortem

_SHOWN = 16  # Number of ranks whose last events are printed.


@click.command()
@click.argument("run_dir", type=click.Path())
@click.option(
    "--generation", type=click.IntRange(0), help="Generation of the run, by default the newest."
)
@click.option(
    "--last", type=click.IntRange(0, 65536), default=5, show_default=True,
    help="Number of last events of each rank to show.",
)  # fmt: skip
@json_option
def command(run_dir: str, generation: int | None, last: int, as_json: bool) -> None:
    """Show which rank of RUN_DIR failed first and why, and what each rank did and waited for.

    RUN_DIR is the folder of `fxpart train --run`. It is not changed.
    """
    from fxpart.diagnostics.postmortem import examine

    found = examine(run_dir, generation)
    if as_json:
        output.data(_data(found, last))
    else:
        output.text("\n".join([*_head(run_dir, found), *_ranks(found), *_events(found, last)]))


def _head(run: str, found: Postmortem) -> list[str]:
    from fxpart.diagnostics import postmortem_text

    many = len(found.ranks)
    lines = [
        f"{run}, generation {found.generation} of {found.generations[-1]}: "
        f"{many} rank{'' if many == 1 else 's'}",
        postmortem_text.headline(found),
    ]
    for rank in found.first[:1]:
        votes = found.votes.get(rank, 0)
        traces = found.ranks.get(rank)
        if traces is not None:
            lines.append(f"  last event  {postmortem_text.format_last_event(traces)}")
            lines.append(f"  at          {postmortem_text.moment(traces.time)}")
        lines.append(f"  reported by {votes} of {many} ranks")
    for traces in found.ranks.values():
        lines += [f"  not read    {problem}" for problem in traces.problems]
    return lines


def _ranks(found: Postmortem) -> list[str]:
    """Return a table with a row for each rank."""
    from fxpart.diagnostics import postmortem_text
    from fxpart.report.table import shortened, table

    heads = ("rank", "process", "seconds", "ended", "did last", "waited for")
    rows = []
    for rank, traces in found.ranks.items():
        process = traces.ring.process if traces.ring is not None else None
        if traces.failure is not None:
            process = traces.failure.process
        rows.append(
            (
                str(rank),
                "" if process is None else str(process),
                f"{(traces.time - found.since) / 1e9:+.3f}" if traces.time else "",
                postmortem_text.format_end(traces),
                shortened(postmortem_text.format_last_event(traces), 60),
                postmortem_text.format_awaited_rank(traces),
            )
        )
    return ["", *table(heads, ">>><<<", rows)]


def _events(found: Postmortem, last: int) -> list[str]:
    shown = found.timeline(last)
    if not shown:
        return []
    if len(found.ranks) > _SHOWN:
        near = {*found.first, *list(found.ranks)[:_SHOWN]}
        shown = [(rank, event) for rank, event in shown if rank in near]
    lines = ["", f"the last {last} events of each rank, in seconds from the failure"]
    for rank, event in shown:
        seconds = (event.nanoseconds - found.since) / 1e9
        lines.append(f"{seconds:+12.6f}  rank {rank:<4} {event.words}")
    return lines


def _data(found: Postmortem, last: int) -> dict[str, Any]:
    from fxpart.diagnostics import postmortem_text

    return {
        "generation": found.generation,
        "generations": found.generations,
        "first": found.first,
        "why": postmortem_text.headline(found),
        "since": found.since,
        "votes": {str(rank): count for rank, count in sorted(found.votes.items())},
        "ranks": [
            {
                "rank": rank,
                "how": traces.how,
                "ended": postmortem_text.format_end(traces),
                "last": postmortem_text.format_last_event(traces),
                "waited_for": postmortem_text.format_awaited_rank(traces),
                "time": traces.time,
                "failure": traces.failure,
                "not_read": traces.problems,
                "events": [
                    {
                        "time": event.nanoseconds, "step": event.step, "what": event.what,
                        "phase": event.phase, "stage": event.stage, "peer": event.peer,
                        "microbatch": event.microbatch,
                    }
                    for event in traces.newest(last)
                ],
            }
            for rank, traces in found.ranks.items()
        ],
    }  # fmt: skip
