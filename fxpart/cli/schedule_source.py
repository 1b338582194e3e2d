"""Where ``fxpart schedule`` gets its schedules from, and how it lists them."""

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

MOST = 1 << 20  # pairs of a stage and a microbatch in a built schedule
Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass(frozen=True)
class ScheduleSource:
    """Where a schedule comes from: a file, or a name and sizes; weights, every: its versions."""

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
        """The schedule and its stage graph; a file's as it is, a named one with transfers.

        forward, backward: seconds of each stage, as far as they are known. Raises FXP109 for
        options that do not fit, FXP301 and FXP303 for a file that is no schedule.
        """
        from fxpart.schedule.files import implied_edges, load, parse_edges
        from fxpart.schedule.spec import find_built, list_built

        if self.every is not None and self.weights is None:
            fix = "give --weights too, such as --weights stash"
            raise error("FXP109", where=f"--every {self.every}", why="no versions asked", fix=fix)
        if find_built(self.source) is not None:
            return self._built(forward, backward)
        own = ("stages", "microbatches", "virtual", "replicas")
        given = [name for name in own if getattr(self, name) is not None]
        if given:
            why = f"{self.source} is a file, and no schedule's name: {', '.join(list_built())}"
            raise error("FXP109", where=f"--{given[0]}", why=why, fix="")
        found = load(self.source)
        return found, implied_edges(found) if self.edges is None else parse_edges(self.edges)

    def _built(
        self, forward: Sequence[float] | None, backward: Sequence[float] | None
    ) -> tuple[Schedule, tuple[StageEdge, ...]]:
        from fxpart.schedule.action import Schedule
        from fxpart.schedule.files import implied_edges, parse_edges
        from fxpart.schedule.make import make

        if self.stages is None or self.microbatches is None:
            why = f"{self.source} is built for a number of stages and of microbatches"
            fix = "give --stages and --microbatches"
            raise error("FXP109", where=self.source, why=why, fix=fix)
        if self.stages * self.microbatches > MOST:
            why = f"{self.stages} stages of {self.microbatches} microbatches are too many to list"
            raise error("FXP109", where=self.source, why=why, fix="ask for fewer")
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
        """Microbatches to an update: as asked; else 1, or all where the mode drains before it."""
        from fxpart.schedule.weight_modes import weight_mode

        flushes = self.weights is None or weight_mode(self.weights).flush
        return self.every or (schedule.microbatches if flushes else 1)

    def _ranks(self, stages: int) -> tuple[int, ...]:
        """Where each stage is: on its own rank, in a loop over fewer, or there and back."""
        from fxpart.schedule.builders import assign_loop_ranks, assign_v_ranks
        from fxpart.schedule.spec import SCHEDULES

        spec = SCHEDULES[self.source]
        virtual = self.virtual or (2 if spec.is_virtual else 1)
        in_v = spec.placement == "V"
        if stages % virtual or (in_v and virtual != 2):
            given = f"--stages {stages} --virtual {virtual}"
            why = f"{self.source} has two stages a rank" if in_v else "each rank has as many stages"
            fix = f"give a multiple of {2 if in_v else virtual} as --stages"
            raise error("FXP109", where=given, why=why, fix=fix)
        return assign_v_ranks(stages) if in_v else assign_loop_ranks(stages, stages // virtual)


def _groups(text: str | None) -> tuple[tuple[int, ...], ...]:
    """Copies of stages from 0,1|2,3,4; FXP109."""
    if text is None:
        return ()
    try:
        return tuple(tuple(int(word) for word in group.split(",")) for group in text.split("|"))
    except ValueError as why:
        fix = "write for example '0,1|2,3,4'"
        where = f"--replicas {text[:60]}"
        raise error("FXP109", where=where, why="it is no list of stages", fix=fix) from why


def source_options(made: Command) -> Command:
    """Add SOURCE and what completes it; they arrive as keywords of :class:`ScheduleSource`."""
    for option in reversed(
        (
            click.argument("source"),
            click.option("--stages", "-s", type=click.IntRange(1, 4096), help="Of a named one."),
            click.option("--microbatches", "-m", type=click.IntRange(1, 65536), help="The same."),
            click.option(
                "--virtual", "-v", type=click.IntRange(1, 64),
                help="Stages a rank: 1, or 2 for a schedule of virtual stages.",
            ),
            click.option(
                "--replicas", help="Stages that are copies of one another, such as '0,1|2,3,4'."
            ),
            click.option(
                "--edges", help="Stage graph, such as 0-1,1-2,0-2:forward (no gradient back)."
            ),
            click.option(
                "--weights", help=f"Weight versions by a mode: {STASH}, {SPECTRAIN} and others."
            ),
            click.option(
                "--every", type=click.IntRange(1, 65536),
                help="With --weights: microbatches to an update; 1 if not given.",
            ),
        )
    ):  # fmt: skip
        made = option(made)
    return made


@contextmanager
def report_schedule_errors(as_json: bool) -> Iterator[None]:
    """Whatever is unsafe here is the user's schedule: FXP901 ends the verb with bad input."""
    try:
        yield
    except FxpartError as fault:
        if fault.code != "FXP901":
            raise
        output.failure(fault, as_json=as_json)
        click.get_current_context().exit(EXIT_INPUT)


def numbers(option: str, text: str, stages: int) -> list[float]:
    """One figure for each stage, from one for all or a list of them; FXP109."""
    words = text.split(",")
    try:
        found = [float(word) for word in words]
    except ValueError as cause:
        fix = "write one number, or one for each stage: 1,2,1"
        where = f"{option} {text[:60]}"
        raise error("FXP109", where=where, why="it is no list of numbers", fix=fix) from cause
    if not all(math.isfinite(figure) and figure >= 0 for figure in found):
        raise error("FXP109", where=f"{option} {text[:60]}", why="negative, or no number", fix="")
    if len(found) not in (1, stages):
        why = f"{len(found)} numbers for {stages} stages"
        raise error("FXP109", where=f"{option} {text[:60]}", why=why, fix="give one, or one each")
    return found * stages if len(found) == 1 else found


def add_transfers(
    schedule: Schedule,
    edges: Sequence[StageEdge],
    forward: Sequence[float] | None = None,
    backward: Sequence[float] | None = None,
    split: Sequence[tuple[float, float]] | None = None,
) -> Schedule:
    """The schedule with transfers: its own, or added; FXP901 where it cannot be run at all."""
    from fxpart.schedule.lower import lower
    from fxpart.schedule.verify import incomplete

    check_schedule_shape(schedule, edges)
    if schedule.is_lowered:
        return schedule
    problems = incomplete(schedule, edges)
    if problems:  # all of them: what follows would stop at the first
        raise FxpartError(problems)
    return lower(schedule, edges, forward=forward, backward=backward, split=split)


def check_schedule_shape(schedule: Schedule, edges: Sequence[StageEdge]) -> None:
    """Raise FXP901 where the schedule's numbers do not fit together."""
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
    """Raise FXP901 with all that is unsafe.

    Versions are those of ``--weights``; without it, where an action names one, those of any stash.
    """
    from fxpart.schedule.verify import verify

    if source.weights is not None:
        often = source.update(schedule)
        verify(schedule, edges, memory=memory, weights=source.weights, every=often)
        return
    named = any(a.version is not None for actions in schedule.ranks for a in actions)
    verify(schedule, edges, memory=memory, weights=STASH if named else FLUSH)


def read_weights(source: ScheduleSource, schedule: Schedule) -> list[str]:
    """What a proof says of weights."""
    if source.weights is None:
        return []
    from fxpart.schedule.weight_modes import weight_mode
    from fxpart.units import plural

    if weight_mode(source.weights).flush:
        return ["  no weight versions: all updates are made before the next step"]
    often = plural(source.update(schedule), "microbatch")
    return [f"  each computation names the version that {source.weights} reads; update: {often}"]


def title(schedule: Schedule) -> str:
    """What it is, in a line."""
    from fxpart.units import plural

    ranks = plural(len(schedule.ranks), "rank")
    microbatches = plural(schedule.microbatches, "microbatch")
    copies = "|".join(",".join(map(str, group)) for group in schedule.replicas)
    said = f"{schedule.name}: {plural(schedule.stages, 'stage')} on {ranks}, {microbatches}"
    return said + (f", copies {copies}" if copies else "")


def as_data(schedule: Schedule, edges: Sequence[StageEdge]) -> dict[str, object]:
    """What a machine may want to know, without the actions."""
    return {
        "name": schedule.name, "stages": schedule.stages, "microbatches": schedule.microbatches,
        "stage_rank": schedule.stage_rank, "replicas": schedule.replicas,
        "lowered": schedule.is_lowered, "edges": [asdict(edge) for edge in edges],
    }  # fmt: skip


def lists(schedule: Schedule) -> list[list[str]]:
    """Each rank's actions, written out."""
    return [[str(action) for action in actions] for actions in schedule.ranks]
