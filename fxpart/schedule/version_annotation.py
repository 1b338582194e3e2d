"""Weight versions in a schedule's actions: ``0F7@4`` reads the weights after four updates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fxpart.errors import FxpartError, error
from fxpart.schedule.action import Action, ActionKind, Schedule
from fxpart.schedule.spec import ASYNC, DEFAULT_SCHEDULE
from fxpart.schedule.versions import WeightVersionCounters
from fxpart.schedule.weight_modes import FLUSH, WeightMode, weight_mode


def annotate_versions(schedule: Schedule, mode: str | WeightMode, every: int) -> Schedule:
    """Return the schedule with the weight version of each computation in this weight mode.

    schedule: asynchronous, with or without transfers: each stage runs warm-up forwards, then
    alternates. every: microbatches per update. A forward names the version it starts from; a
    backward names the same version if it reads the forward's weights, otherwise the number of
    updates applied by then. Modes that flush have no versions. Raises FXP109 for every below 1, for
    other orders of actions, and if the mode needs more microbatches per update
    (:meth:`WeightVersionCounters.check`).
    """
    how = weight_mode(mode)
    if how.flush:
        return _with_version(schedule, lambda action: None)
    versions = derive_version_counters(schedule, every)
    versions.check(how)

    def version(action: Action) -> int:
        read = versions.read(how, action.stage, action.microbatch)
        late = action.kind is ActionKind.B and how.backward != "forward"
        return read.backward if late else read.version

    return _with_version(schedule, version)


def derive_version_counters(schedule: Schedule, every: int) -> WeightVersionCounters:
    """Return the version counters of an asynchronous schedule; raise FXP109 for other schedules."""
    if every < 1:
        raise error("FXP109", where=f"every={every}", why="The value must be at least 1.", fix="")
    if schedule.replicas:
        raise _make_order_error(schedule, "The replicas of a stage share its microbatches.", 0)
    lists: list[list[Action]] = [[] for _ in range(schedule.stages)]
    for actions in schedule.ranks:
        for action in actions:
            if action.kind.is_compute:
                lists[action.stage].append(action)
    ahead = []
    for stage, mine in enumerate(lists):
        kinds = [action.kind for action in mine]
        first = kinds.index(ActionKind.B) if ActionKind.B in kinds else 0
        if not first or [a.plain for a in mine] != _list_async_order(
            stage, first, schedule.microbatches
        ):
            raise _make_order_error(
                schedule,
                "The order is not warm-up forwards followed by alternating backwards and forwards.",
                stage,
            )
        ahead.append(first)
    return WeightVersionCounters(tuple(ahead), every)


def _list_async_order(stage: int, ahead: int, microbatches: int) -> list[Action]:
    """Return the only order in which a stage may update without a flush."""
    found = [Action(stage, ActionKind.F, m) for m in range(min(ahead, microbatches))]
    for m in range(microbatches):
        found.append(Action(stage, ActionKind.B, m))
        if m + ahead < microbatches:
            found.append(Action(stage, ActionKind.F, m + ahead))
    return found


def _make_order_error(schedule: Schedule, why: str, stage: int) -> FxpartError:
    return error(
        "FXP109",
        where=f"weight versions of schedule {schedule.name}, stage {stage}",
        why=why,
        fix=f"Use schedule {ASYNC} ({DEFAULT_SCHEDULE} has the same order), or weights={FLUSH}.",
    )


def _with_version(schedule: Schedule, version: Callable[[Action], int | None]) -> Schedule:
    ranks = tuple(
        tuple(replace(a, version=version(a) if a.kind.is_compute else None) for a in actions)
        for actions in schedule.ranks
    )
    return replace(schedule, ranks=ranks)
