"""What ``--trace`` of a verb that trains asks for, and the files that it writes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fxpart.cli import output
from fxpart.errors import FxpartError, error
from fxpart.schedule.spec import SCHEDULES

if TYPE_CHECKING:
    from fxpart.plan.model import Plan
    from fxpart.schedule.measured_timeline import MeasuredTimeline


@dataclass(frozen=True)
class TraceRequest:
    """A trace of the last ``steps`` steps, to be written to ``path``, an absolute one."""

    path: Path
    steps: int

    def write(self, recording: MeasuredTimeline, plan: Plan, as_json: bool) -> None:
        """Write the trace and its summary, and say where; FXP603 where that cannot be."""
        from fxpart.cli.report import write
        from fxpart.planner.prediction.plan_digest import decisions

        kept = msgspec.structs.replace(recording, decisions=decisions(plan))
        summary = self.path.with_name(self.path.name + ".summary.json")
        texts = {
            self.path: msgspec.json.encode(kept.chrome_trace()).decode(),
            summary: output.as_json(kept.summary()),
        }
        files = {str(path): write(str(path), text) for path, text in texts.items()}
        if as_json:
            output.line({"files": files, "recorded": len(kept.steps)})
        for name, size in files.items():
            output.note(f"wrote {name} ({size} bytes)")


def asked_trace(path: str, recorded: int, steps: int) -> TraceRequest:
    """What was asked for; FXP109 where no step is left to warm up, FXP603 for a missing folder."""
    if recorded >= steps:
        raise error(
            "FXP109",
            where=f"--trace-steps {recorded}",
            why=f"of {steps} steps none would be left to warm up, and the first ones are slow",
            fix=f"--steps {recorded + 3}, or fewer --trace-steps",
        )
    found = Path(path).absolute()
    if not found.parent.is_dir():
        fix = "make it first, or give another path"
        raise error("FXP603", where=path, why=f"there is no folder {found.parent}", fix=fix)
    return TraceRequest(found, recorded)


def check_traced(plan: Plan) -> None:
    """FXP109 for an asynchronous plan: its minibatches overlap, and there is no step to measure."""
    if not SCHEDULES[plan.schedule].flushes:
        raise error(
            "FXP109",
            where="--trace",
            why="the plan is asynchronous: minibatches overlap, and there is no step to measure",
            fix="leave --trace out; `fxpart simulate PLAN` says what is expected of its stream",
        )


def make_data_ended_error(done: int) -> FxpartError:
    """FXP109: the data ended before the first recorded step."""
    return error(
        "FXP109",
        where="--trace",
        why=f"the data ended after {done} steps, before those that were to be recorded",
        fix="fewer --steps, or more data",
    )


def bare_bytes() -> int:
    """Bytes of this process now: before a trainer is made, those that are not the ranks' own."""
    from fxpart.runtime.monitor.memory_footprint import read_resident_bytes

    return read_resident_bytes()
