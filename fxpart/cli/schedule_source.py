"""Load and list the schedules of ``fxpart schedule``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fxpart.cli import output
from fxpart.errors import EXIT_INPUT, FxpartError, error
from fxpart.schedule.weight_modes import FLUSH, SPECTRAIN, STASH

if TYPE_CHECKING:
    from fxpart.schedule.action import Schedule, StageEdge

MOST = 1 << 20  # Stages times microbatches of a built schedule.
Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass(frozen=True)
class ScheduleSource:
    """Source of a schedule: a file, or a name and sizes. weights, every: its weight versions."""

    source: str
    stages: int | None
    microbatches: int | None
    virtual: int | None
    replicas: str | None
    edges: str | None
    weights: str | None = None
    every: int | None = None

    def load(
        self, forward: Sequence[float] | None = None, backward: Sequence[float] | None = None
    ) -> tuple[Schedule, tuple[StageEdge, ...]]:
        """Return the schedule and its stage graph; a named schedule has transfers.

        forward, backward: seconds of each stage, if known. Raises FXP109 for invalid options,
        FXP301 and FXP303 for a file that is not a schedule.
        """
        from fxpart.schedule.files import implied_edges, load, parse_edges
        from fxpart.schedule.spec import find_built, list_built

        if self.every is not None and self.weights is None:
            why = "--every requires --weights"
            fix = "pass --weights, too, such as --weights stash"
            raise error("FXP109", where=f"--every {self.every}", why=why, fix=fix)
        if find_built(self.source) is not None:
            return self._built(forward, backward)
        own = ("stages", "microbatches", "virtual", "replicas")
        given = [name for name in own if getattr(self, name) is not None]
        if given:
            why = f"{self.source} is a file and not a schedule's name"
            fix = f"omit it, or use one of {', '.join(list_built())}"
            raise error("FXP109", where=f"--{given[0]}", why=why, fix=fix)
        found = load(self.source)
        return found, implied_edges(found) if self.edges is None else parse_edges(self.edges)

    def _built(
        self, forward: Sequence[float] | None, backward: Sequence[float] | None
    ) -> tuple[Schedule, tuple[StageEdge, ...]]:
        from fxpart.schedule.action import Schedule
        from fxpart.schedule.files import implied_edges, parse_edges
        from fxpart.schedule.make import make

        if self.stages is None or self.microbatches is None:
            why = f"{self.source} needs numbers of stages and microbatches"
            fix = "pass --stages and --microbatches"
            raise error("FXP109", where=self.source, why=why, fix=fix)
        if self.stages * self.microbatches > MOST:
            why = f"{self.stages} stages of {self.microbatches} microbatches are too many to list"
            raise error("FXP109", where=self.source, why=why, fix="use smaller numbers")
        groups = _groups(self.replicas)
        stages = range(self.stages)
        if any(stage not in stages for group in groups for stage in group):
            why = f"there are only {self.stages} stages"
            raise error("FXP109", where=f"--replicas {self.replicas}", why=why, fix="")
        empty = Schedule(self.source, self.stages, 1, (), tuple(stages), groups)
        edges = implied_edges(empty) if self.edges is None else parse_edges(self.edges)
        ranks = self._ranks(self.stages)
        made = make(
            self.source, ranks, self.microbatches, edges, forward=forward, backward=backward,
            replicas=groups,
        )  # fmt: skip
        if self.weights is not None:
            from fxpart.schedule.version_annotation import annotate_versions

            made = annotate_versions(made, self.weights, self.update(made))
        return made, edges

    def update(self, schedule: Schedule) -> int:
        """Return the microbatches per update: --every, else all if the mode flushes, else 1."""
        from fxpart.schedule.weight_modes import weight_mode

        flushes = self.weights is None or weight_mode(self.weights).flush
        return self.every or (schedule.microbatches if flushes else 1)

    def _ranks(self, stages: int) -> tuple[int, ...]:
        """Return the rank of each stage: one per stage, looped, or V-shaped."""
        from fxpart.schedule.builders import assign_loop_ranks, assign_v_ranks
        from fxpart.schedule.spec import SCHEDULES

        spec = SCHEDULES[self.source]
        virtual = self.virtual or (2 if spec.is_virtual else 1)
        in_v = spec.placement == "V"
        if stages % virtual or (in_v and virtual != 2):
            given = f"--stages {stages} --virtual {virtual}"
            why = "all ranks must have the same number of stages"
            why = f"{self.source} has two stages per rank" if in_v else why
            fix = f"use a multiple of {2 if in_v else virtual} as --stages"
            raise error("FXP109", where=given, why=why, fix=fix)
        return assign_v_ranks(stages) if in_v else assign_loop_ranks(stages, stages // virtual)


def _groups(text: str | None) -> tuple[tuple[int, ...], ...]:
    """Parse replicas of stages such as 0,1|2,3,4; FXP109 if not valid."""
    if text is None:
        return ()
    try:
        return tuple(tuple(int(word) for word in group.split(",")) for group in text.split("|"))
    except ValueError as why:
        fix = "use for example '0,1|2,3,4'"
        where = f"--replicas {text[:60]}"
        raise error("FXP109", where=where, why="it is not a list of stages", fix=fix) from why


def source_options(made: Command) -> Command:
    """Add SOURCE and its options; they are keywords of :class:`ScheduleSource`."""
    for option in reversed(
        (
            click.argument("source"),
            click.option("--stages", "-s", type=click.IntRange(1, 4096), help="Of a named one."),
            click.option("--microbatches", "-m", type=click.IntRange(1, 65536), help="Likewise."),
            click.option(
                "--virtual", "-v", type=click.IntRange(1, 64),
                help="Stages per rank, by default 1, or 2 for schedules of virtual stages.",
            ),
            click.option(
                "--replicas", help="Replicas of stages, such as '0,1|2,3,4'."
            ),
            click.option(
                "--edges", help="Stage graph, such as 0-1,1-2,0-2:forward (without gradient)."
            ),
            click.option(
                "--weights", help=f"Weight mode for weight versions, such as {STASH}, {SPECTRAIN}."
            ),
            click.option(
                "--every", type=click.IntRange(1, 65536),
                help="With --weights: microbatches per update, by default 1.",
            ),
        )
    ):  # fmt: skip
        made = option(made)
    return made


@contextmanager
def report_schedule_errors(as_json: bool) -> Iterator[None]:
    """Report FXP901 as invalid input, as the unsafe schedule is the user's."""
    try:
        yield
    except FxpartError as fault:
        if fault.code != "FXP901":
            raise
        output.failure(fault, as_json=as_json)
        click.get_current_context().exit(EXIT_INPUT)


def numbers(option: str, text: str, stages: int) -> list[float]:
    """Parse a number for each stage, given as one for all or a list; FXP109 if not valid."""
    parts = text.split(",")
    try:
        found = [float(part) for part in parts]
    except ValueError as cause:
        fix = "use one number, or one for each stage such as 1,2,1"
        where = f"{option} {text[:60]}"
        raise error("FXP109", where=where, why="it is not a list of numbers", fix=fix) from cause
    if not all(math.isfinite(figure) and figure >= 0 for figure in found):
        why = "a number is negative or not finite"
        fix = "use finite numbers of 0 or more"
        raise error("FXP109", where=f"{option} {text[:60]}", why=why, fix=fix)
    if len(found) not in (1, stages):
        why = f"{len(found)} numbers are given for {stages} stages"
        fix = "use one number, or one for each stage"
        raise error("FXP109", where=f"{option} {text[:60]}", why=why, fix=fix)
    return found * stages if len(found) == 1 else found


def add_transfers(
    schedule: Schedule,
    edges: Sequence[StageEdge],
    forward: Sequence[float] | None = None,
    backward: Sequence[float] | None = None,
    split: Sequence[tuple[float, float]] | None = None,
) -> Schedule:
    """Return the schedule with transfers, added if needed; FXP901 if it cannot be executed."""
    from fxpart.schedule.lower import lower
    from fxpart.schedule.verify import find_incomplete

    check_schedule_shape(schedule, edges)
    if schedule.is_lowered:
        return schedule
    problems = find_incomplete(schedule, edges)
    if problems:  # Report all of them, as `lower` would stop at the first one.
        raise FxpartError(problems)
    return lower(schedule, edges, forward=forward, backward=backward, split=split)


def check_schedule_shape(schedule: Schedule, edges: Sequence[StageEdge]) -> None:
    """Raise FXP901 if the schedule's numbers are inconsistent."""
    from fxpart.schedule.consistency import find_shape_problems

    problems = find_shape_problems(schedule, edges)
    if problems:
        raise FxpartError(problems)


def verify_schedule(
    schedule: Schedule,
    edges: Sequence[StageEdge],
    source: ScheduleSource,
    memory: Sequence[int] | None = None,
) -> None:
    """Raise FXP901 with all problems.

    Weight versions are those of ``--weights``. Without it, if an action names a version, any
    stashed versions are allowed.
    """
    from fxpart.schedule.verify import verify

    if source.weights is not None:
        often = source.update(schedule)
        verify(schedule, edges, memory=memory, weights=source.weights, every=often)
        return
    named = any(a.version is not None for actions in schedule.ranks for a in actions)
    verify(schedule, edges, memory=memory, weights=STASH if named else FLUSH)


def read_weights(source: ScheduleSource, schedule: Schedule) -> list[str]:
    """Return lines about the checked weight versions."""
    if source.weights is None:
        return []
    from fxpart.schedule.weight_modes import weight_mode
    from fxpart.units import plural

    if weight_mode(source.weights).flush:
        return ["  without weight versions, as all updates precede the next step"]
    often = plural(source.update(schedule), "microbatch")
    return [f"  each computation reads the version of {source.weights}; {often} per update"]


def title(schedule: Schedule) -> str:
    """Return a one-line description."""
    from fxpart.units import plural

    ranks = plural(len(schedule.ranks), "rank")
    microbatches = plural(schedule.microbatches, "microbatch")
    copies = "|".join(",".join(map(str, group)) for group in schedule.replicas)
    text = f"{schedule.name}: {plural(schedule.stages, 'stage')} on {ranks}, {microbatches}"
    return text + (f", replicas {copies}" if copies else "")


def as_data(schedule: Schedule, edges: Sequence[StageEdge]) -> dict[str, object]:
    """Return the schedule's properties as data, without actions."""
    return {
        "name": schedule.name, "stages": schedule.stages, "microbatches": schedule.microbatches,
        "stage_rank": schedule.stage_rank, "replicas": schedule.replicas,
        "lowered": schedule.is_lowered, "edges": [asdict(edge) for edge in edges],
    }  # fmt: skip


def lists(schedule: Schedule) -> list[list[str]]:
    """Return the actions of each rank as texts."""
    return [[str(action) for action in actions] for actions in schedule.ranks]
