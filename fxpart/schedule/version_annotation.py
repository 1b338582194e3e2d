"""Weight versions in a schedule's actions: ``0F7@4`` reads the weights of four updates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fxpart.errors import FxpartError, error
from fxpart.schedule.action import Action, ActionKind, Schedule
from fxpart.schedule.spec import ASYNC, DEFAULT_SCHEDULE
from fxpart.schedule.versions import WeightVersionCounters
from fxpart.schedule.weight_modes import FLUSH, WeightMode, weight_mode


def annotate_versions(schedule: Schedule, mode: str | WeightMode, every: int) -> Schedule:
    """The schedule with each computation's version named, as the weight mode has it.

    schedule: a stream, with transfers or without: each stage runs forwards ahead, then alternates.
    every: microbatches to an update. A forward names the version it starts from, a backward the
    same where it sees the forward's weights and otherwise what has been applied by then; modes that
    flush know no versions. Raises FXP109 for every below 1, for other orders of actions, and where
    the mode needs more microbatches to an update (:meth:`WeightVersionCounters.check`).
    """
    how = weight_mode(mode)
    if how.flush:
        return _named(schedule, lambda action: None)
    versions = derive_version_counters(schedule, every)
    versions.check(how)

    def version(action: Action) -> int:
        read = versions.read(how, action.stage, action.microbatch)
        late = action.kind is ActionKind.B and how.backward != "forward"
        return read.backward if late else read.version

    return _named(schedule, version)


def derive_version_counters(schedule: Schedule, every: int) -> WeightVersionCounters:
    """The version counters of a stream, by its own lists; FXP109 where it is none."""
    if every < 1:
        raise error("FXP109", where=f"every={every}", why="at least 1 is needed", fix="")
    if schedule.replicas:
        raise _no_stream(schedule, "copies of a stage share its microbatches", 0)
    lists: list[list[Action]] = [[] for _ in range(schedule.stages)]
    for actions in schedule.ranks:
        for action in actions:
            if action.kind.is_compute:
                lists[action.stage].append(action)
    ahead = []
    for stage, mine in enumerate(lists):
        kinds = [action.kind for action in mine]
        first = kinds.index(ActionKind.B) if ActionKind.B in kinds else 0
        if not first or [a.plain for a in mine] != _stream(stage, first, schedule.microbatches):
            raise _no_stream(schedule, "it is not forwards ahead, then backward and forward", stage)
        ahead.append(first)
    return WeightVersionCounters(tuple(ahead), every)


def _stream(stage: int, ahead: int, microbatches: int) -> list[Action]:
    """The one order in which a stage may update while others go on."""
    found = [Action(stage, ActionKind.F, m) for m in range(min(ahead, microbatches))]
    for m in range(microbatches):
        found.append(Action(stage, ActionKind.B, m))
        if m + ahead < microbatches:
            found.append(Action(stage, ActionKind.F, m + ahead))
    return found


def _no_stream(schedule: Schedule, why: str, stage: int) -> FxpartError:
    return error(
        "FXP109",
        where=f"weight versions of schedule {schedule.name}, stage {stage}",
        why=why,
        fix=f"take {ASYNC} ({DEFAULT_SCHEDULE} has its order), or weights={FLUSH}",
    )


def _named(schedule: Schedule, version: Callable[[Action], int | None]) -> Schedule:
    ranks = tuple(
        tuple(replace(a, version=version(a) if a.kind.is_compute else None) for a in actions)
        for actions in schedule.ranks
    )
    return replace(schedule, ranks=ranks)
