"""Pictures of a schedule: a text grid for the terminal and docstrings.

For SVG and HTML use the spans of the timeline itself (:meth:`Timeline.as_dict`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fxpart.schedule.action import Action, Schedule, StageEdge
from fxpart.schedule.dependence import Dependence, chain
from fxpart.schedule.lower import compute_times


def draw(schedule: Schedule, edges: Iterable[StageEdge] | None = None) -> str:
    """One line per rank, one column per tick: forward takes one, backward two, transfers none.

    ``F0`` forward of microbatch 0, ``B0``, ``I0``, ``W0`` backwards, ``==`` still the same action,
    ``.`` idle. With several stages on a rank the stage stands in front: ``2F0``. edges: the stage
    graph, a chain if not given. Lines carry no trailing space and the text no final newline.
    """
    wanted = chain(schedule.stages) if edges is None else tuple(edges)
    only = tuple(tuple(a.plain for a in r if a.kind.is_compute) for r in schedule.ranks)
    bare = replace(schedule, ranks=only)
    times = compute_times(bare, Dependence.of(bare, wanted))
    several = len(set(schedule.stage_rank)) < schedule.stages
    rows = [[(*times[a], _label(a, several)) for a in actions] for actions in only]
    width = max((len(label) for row in rows for *_, label in row), default=1)
    end = max((stop for row in rows for _, stop, _ in row), default=0)
    lines = []
    for rank, row in enumerate(rows):
        cells = ["."] * end
        for start, stop, label in row:
            cells[start:stop] = [label] + ["=" * width] * (stop - start - 1)
        lines.append(f"{rank} | " + " ".join(cell.ljust(width) for cell in cells).rstrip())
    return "\n".join(lines)


def _label(action: Action, several: bool) -> str:
    label = f"{action.kind.value}{action.microbatch}"
    return f"{action.stage}{label}" if several else label
