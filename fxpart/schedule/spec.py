"""The table of schedules, which the planner, the runtime, the CLI and the documents read.

A new schedule is a builder function and one entry of `SCHEDULES`, or a call of `register_schedule`
in a user's program, or an entry point of the group "fxpart.schedules" whose object is a
`ScheduleSpec`. No other module depends on the name of a schedule: all read its entry.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from fxpart.errors import FxpartError, error, quoted
from fxpart.registry import Registry
from fxpart.schedule.action import FORWARD, Schedule, StageEdge
from fxpart.schedule.builders.asynchronous import ASYNC, asynchronous, count_async_in_flight
from fxpart.schedule.builders.gpipe_1f1b import (
    GPIPE,
    ONE_F_ONE_B,
    count_1f1b_in_flight,
    forward_only,
    gpipe,
    one_f_one_b,
)
from fxpart.schedule.builders.protocol import (
    BuildFunction,
    Groups,
    Ranks,
    assign_microbatches,
    validate_stage_rank,
)
from fxpart.schedule.builders.virtual_stages import (
    BREADTH_FIRST,
    INTERLEAVED,
    breadth_first,
    interleaved,
)
from fxpart.schedule.builders.zero_bubble import ZB_H1, ZB_V, assign_v_ranks, zb_h1, zb_v
from fxpart.schedule.dependence import depths
from fxpart.schedule.in_flight import count_in_flight

__all__ = [
    "ASYNC",
    "DEFAULT_SCHEDULE",
    "FOUND",
    "GPIPE",
    "INTERLEAVED",
    "SCHEDULES",
    "ScheduleSpec",
    "document_rows",
    "find_built",
    "get_in_flight_limits",
    "list_built",
    "list_closed_forms",
    "list_schedules",
    "register_schedule",
]  # fmt: skip

FOUND = "found"
DEFAULT_SCHEDULE = ONE_F_ONE_B

Placement = Literal["one", "any", "loop", "V"]
InFlightForm = Literal["all", "to end", "depth", "pieces", "asynchronous"]
WarmupFunction = Callable[[int, int, Sequence[StageEdge]], Sequence[int]]

_PLACES: dict[Placement, str] = {
    "one": "one",
    "any": "any",
    "loop": "a loop: 0, 1, 0, 1",
    "V": "a V: 0, 1, 1, 0",
}


class InFlightFunction(Protocol):
    """Signature of a function that counts by stage the microbatches in flight on any graph."""

    def __call__(
        self, stage_rank: Ranks, microbatches: int, replicas: Groups = ()
    ) -> tuple[int, ...]:
        """Return the counts."""
        ...


@dataclass(frozen=True, kw_only=True)
class ScheduleSpec:
    """One schedule and all its properties.

    name: as users write it. order: short description of the order, for the documents. build: makes
    the computations of each rank (:class:`.protocol.BuildFunction`); None if a solver searches them
    for the stages of one plan.

    placement: the ranks of the stages: ``"one"`` per rank, ``"any"``, a ``"loop"`` over the ranks,
    or a ``"V"``, there and back. stages_per_rank: the smallest and largest number of stages of the
    model on a rank. count_in_flight: by default the in-flight counts of the built schedule of a
    chain; they are reached in a chain, and are an upper bound on other stage graphs.

    fill: the pipeline bubble as a fraction of the time of one microbatch through all stages,
    divided by the stages of a rank; 0 if there is no closed form and steps are simulated.
    fill_of_one: the same with a single microbatch, not divided.
    in_flight_form: the closed form of the microbatches in flight of a stage, if the solvers know
    one: ``"all"``; ``"to end"``: the number of stages to the end, itself included; ``"depth"``: the
    number of all stages; ``"pieces"``: of interleaved stages; ``"asynchronous"``: as ``"to end"``,
    without flushes. None: solvers place the stages for the default schedule, and the step is
    simulated. warmup: returns the warm-up forwards of each stage from (stages, microbatches,
    edges), if each stage alternates one backward and one forward after these; used for a fast
    simulation.

    trains: whether it has backwards. flushes: whether its microbatches belong to one step, after
    which all stages update together. splits_backward: whether it has I and W instead of B.
    supports_replicas: whether stages may have replicas. supports_queues: whether replicas may take
    microbatches from queues. runs_unflushed: whether the microbatches of the next step may follow
    without a flush. competes: whether plans may use it without being asked to.
    """

    name: str
    order: str
    build: BuildFunction | None
    placement: Placement = "any"
    stages_per_rank: tuple[int, float] = (1, 1)
    count_in_flight: InFlightFunction | None = None
    fill: float = 0.0
    fill_of_one: float = 1.0
    in_flight_form: InFlightForm | None = None
    warmup: WarmupFunction | None = None
    trains: bool = True
    flushes: bool = True
    splits_backward: bool = False
    supports_replicas: bool = False
    supports_queues: bool = False
    runs_unflushed: bool = False
    competes: bool = False

    def __call__(
        self,
        stage_rank: Ranks,
        microbatches: int,
        edges: Iterable[StageEdge] | None = None,
        *,
        forward: Sequence[float] | None = None,
        backward: Sequence[float] | None = None,
        replicas: Groups = (),
    ) -> Schedule:
        """Build the compute-only schedule; see :class:`.protocol.BuildFunction`.

        Raises FXP109 also for a schedule that a solver searches.
        """
        if self.build is None:
            raise error(
                "FXP109",
                where=f"schedule={self.name}",
                why="A solver searches this schedule for the stages of one plan; nothing builds "
                "it from its name.",
                fix=f"Known names: {', '.join(list_built())}.",
            )
        return self.build(
            stage_rank, microbatches, edges, forward=forward, backward=backward, replicas=replicas
        )

    def in_flight(
        self, stage_rank: Ranks, microbatches: int, replicas: Groups = ()
    ) -> tuple[int, ...]:
        """Return by stage the most microbatches whose activations are stored at once."""
        if self.count_in_flight is not None:
            return self.count_in_flight(stage_rank, microbatches, replicas)
        return count_in_flight(self(stage_rank, microbatches, replicas=replicas))

    @property
    def is_virtual(self) -> bool:
        """Return whether it is built for several stages per rank."""
        return self.build is not None and self.stages_per_rank[1] > 1

    @property
    def chooses_cuts(self) -> bool:
        """Return whether the partition solver has its closed form and can choose cuts for it."""
        return self.in_flight_form in ("all", "to end", "depth") and self.fill > 0

    def count_stages_per_rank(self, requested: int) -> int:
        """Return the number of stages on each rank, given the requested number."""
        least, most = self.stages_per_rank
        return int(most) if least == most else int(min(requested, most))

    def assign_ranks(self, ranks: int, count: int) -> tuple[int, ...]:
        """Return the rank of each stage, with ``count`` stages on each of ``ranks`` ranks."""
        return assign_v_ranks(2 * ranks) if self.placement == "V" else tuple(range(ranks)) * count

    def row(self) -> str:
        """Return its row of the table in the documents."""
        options = {
            "split backwards": self.splits_backward,
            "replicas": self.supports_replicas,
            "queues": self.supports_queues,
        }
        found = ", ".join(name for name, has in options.items() if has)
        place = "searched" if self.build is None else _PLACES[self.placement]
        return f"| `{self.name}` | {self.order} | {place} | {found} |"


def _keep_all(stage_rank: Ranks, microbatches: int, replicas: Groups = ()) -> tuple[int, ...]:
    stages = len(validate_stage_rank(stage_rank, microbatches))
    return tuple(map(len, assign_microbatches(stages, microbatches, replicas)))


def _keep_none(stage_rank: Ranks, microbatches: int, replicas: Groups = ()) -> tuple[int, ...]:
    return (0,) * len(validate_stage_rank(stage_rank, microbatches))


def _warm_up_all(stages: int, microbatches: int, edges: Sequence[StageEdge]) -> Sequence[int]:
    return [microbatches] * stages


def _warm_up_depth(stages: int, microbatches: int, edges: Sequence[StageEdge]) -> Sequence[int]:
    return depths(stages, edges)


def _check_spec(name: str, spec: Any) -> None:
    """Raise FXP109 if the object cannot be registered as a schedule."""
    why = ""
    if not isinstance(spec, ScheduleSpec):
        why = f"A schedule is a ScheduleSpec, not a {type(spec).__name__}."
    elif spec.name != name:
        why = f"The spec has the different name {quoted(spec.name)}."
    elif not callable(spec.build) or not spec.order:
        why = "The spec needs a build function and a description in `order`."
    elif not (spec.trains and spec.flushes) or spec.runs_unflushed:
        why = "A registered schedule must train and flush after each step."
    elif spec.in_flight_form not in (None, "all", "to end", "depth"):
        why = f"The in_flight_form {spec.in_flight_form!r} is reserved for a built-in schedule."
    elif "," in name or name.split() != [name]:
        why = "The name has a comma or a space."
    if why:
        raise error(
            "FXP109",
            where=f"schedule {quoted(name)}",
            why=why,
            fix="`fxpart explain schedules` shows how to register a schedule.",
        )


_SPECS = (
    ScheduleSpec(
        name=GPIPE, order="all forward passes, then all backward passes", build=gpipe,
        count_in_flight=_keep_all, fill=1.0, in_flight_form="all", warmup=_warm_up_all,
        supports_replicas=True, supports_queues=True,
    ),
    ScheduleSpec(
        name=ONE_F_ONE_B, order="one forward, one backward; fewer in flight", build=one_f_one_b,
        count_in_flight=count_1f1b_in_flight, fill=1.0, in_flight_form="to end",
        warmup=_warm_up_depth, supports_replicas=True, supports_queues=True, runs_unflushed=True,
        competes=True,
    ),
    ScheduleSpec(
        name=INTERLEAVED,
        order="1F1B over several stages per rank: shorter bubble, more transfers",
        build=interleaved, placement="loop", stages_per_rank=(2, math.inf), fill=1.0,
        in_flight_form="pieces",
    ),
    ScheduleSpec(
        name=BREADTH_FIRST, order="GPipe over several stages per rank", build=breadth_first,
        stages_per_rank=(1, math.inf), count_in_flight=_keep_all, fill=1.0,
    ),
    ScheduleSpec(
        name=ZB_H1, order="1F1B with split backward passes: W fills the bubble", build=zb_h1,
        fill=1.0 / 3.0, fill_of_one=2.0 / 3.0, in_flight_form="depth", splits_backward=True,
        competes=True,
    ),
    ScheduleSpec(
        name=ZB_V,
        order="two stages per rank in a V, split backward passes: almost no bubble", build=zb_v,
        placement="V", stages_per_rank=(2, 2), splits_backward=True,
    ),
    ScheduleSpec(
        name=FOUND, order="searched by a solver for the stages of a plan", build=None,
        stages_per_rank=(1, math.inf), splits_backward=True,
    ),
    ScheduleSpec(
        name=ASYNC, order="1F1B without flushes: no bubble, stale weights",
        build=asynchronous, placement="one", count_in_flight=count_async_in_flight,
        in_flight_form="asynchronous", flushes=False, runs_unflushed=True,
    ),
    ScheduleSpec(
        name=FORWARD, order="forward passes only, for evaluation", build=forward_only,
        count_in_flight=_keep_none, trains=False, supports_replicas=True,
    ),
)  # fmt: skip

SCHEDULES: Registry[ScheduleSpec] = Registry(
    "schedule", {spec.name: spec for spec in _SPECS}, group="fxpart.schedules", check=_check_spec
)


def register_schedule(spec: ScheduleSpec) -> ScheduleSpec:
    """Add a schedule to this process under the name of its spec, and return the spec.

    Every rank has to register it before it compiles or loads a plan with it. An installed package
    adds it for all processes through the entry point group "fxpart.schedules". Raises FXP109 for a
    name that is already registered and for an invalid spec.
    """
    if not isinstance(spec, ScheduleSpec):
        _check_spec("", spec)
    return SCHEDULES.register(spec.name, spec)


def list_schedules(**wanted: object) -> tuple[str, ...]:
    """Return the names of the schedules whose fields and properties have these values."""
    return tuple(
        name
        for name, spec in SCHEDULES.items()
        if all(getattr(spec, key) == value for key, value in wanted.items())
    )


def list_built() -> tuple[str, ...]:
    """Return the names of the schedules that are built from their name."""
    return tuple(name for name, spec in SCHEDULES.items() if spec.build is not None)


def list_closed_forms() -> tuple[str, ...]:
    """Return the names of the schedules for which the solvers have a closed form."""
    return tuple(name for name, spec in SCHEDULES.items() if spec.in_flight_form is not None)


def find_built(name: str) -> ScheduleSpec | None:
    """Return the schedule of this name; None if no schedule is built from the name."""
    spec = SCHEDULES.get(name)
    return None if spec is None or spec.build is None else spec


def get_in_flight_limits(schedule: Schedule) -> tuple[int, ...] | None:
    """Return the maximum of microbatches in flight by stage, from the schedule's name.

    None if no schedule of the name is built, or it does not support the schedule's ranks.
    """
    spec = find_built(schedule.name)
    if spec is None:
        return None
    used = {rank: place for place, rank in enumerate(sorted(set(schedule.stage_rank)))}
    ranks = [used[rank] for rank in schedule.stage_rank]
    try:
        return spec.in_flight(ranks, schedule.microbatches, schedule.replicas)
    except FxpartError:
        return None


def document_rows() -> Iterator[str]:
    """Yield the table of the built-in schedules as the documents show it."""
    yield "| name | order | stages per rank | supports |"
    yield "|---|---|---|---|"
    yield from (SCHEDULES[name].row() for name in SCHEDULES.builtin)
