"""The schedules that are built from their name, for tests of all of them."""

from fxpart.schedule.spec import SCHEDULES, ScheduleSpec

BUILDERS: dict[str, ScheduleSpec] = {
    name: spec for name, spec in SCHEDULES.items() if spec.build is not None
}
