"""The option ``--trace`` of training, and the files that it writes."""

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
    """A trace of the last ``steps`` steps for the absolute ``path``."""

    path: Path
    steps: int

    def write(self, recording: MeasuredTimeline, plan: Plan, as_json: bool) -> None:
        """Write the trace and its summary, and print the paths; FXP603 if that fails."""
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


def make_trace_request(path: str, recorded: int, steps: int) -> TraceRequest:
    """Return the request; FXP109 without warm-up steps, FXP603 for a missing folder."""
    if recorded >= steps:
        raise error(
            "FXP109",
            where=f"--trace-steps {recorded}",
            why=f"no warm-up steps would be left of {steps} steps, and the first steps are slow",
            fix=f"pass --steps {recorded + 3}, or fewer --trace-steps",
        )
    found = Path(path).absolute()
    if not found.parent.is_dir():
        fix = "create it first, or use another path"
        raise error("FXP603", where=path, why=f"there is no folder {found.parent}", fix=fix)
    return TraceRequest(found, recorded)


def check_traced(plan: Plan) -> None:
    """Raise FXP109 for an asynchronous plan, whose minibatches overlap."""
    if not SCHEDULES[plan.schedule].flushes:
        raise error(
            "FXP109",
            where="--trace",
            why="the plan is asynchronous, so minibatches overlap and there are no separate steps",
            fix="omit --trace; `fxpart simulate PLAN` shows the predicted times",
        )


def make_data_ended_error(done: int) -> FxpartError:
    """Return an FXP109: the data ended before the first recorded step."""
    return error(
        "FXP109",
        where="--trace",
        why=f"the data ended after {done} steps, before the steps to record",
        fix="use fewer --steps, or more data",
    )


def measure_baseline_bytes() -> int:
    """Return the resident bytes of this process, called before a trainer is created."""
    from fxpart.runtime.monitor.memory_footprint import read_resident_bytes

    return read_resident_bytes()
