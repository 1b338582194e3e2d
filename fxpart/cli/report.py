"""``fxpart report``: a plan as one HTML file, with measured steps if there are any."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from fxpart.cli import output
from fxpart.cli.options import json_option
from fxpart.errors import error
from fxpart.plan.model import Plan

if TYPE_CHECKING:
    from fxpart.report.comparison import RecordingComparison
    from fxpart.schedule.measured_timeline import MeasuredTimeline


@click.command()
@click.argument("plan", type=click.Path())
@click.option("--output", "-o", "path", default="report.html", show_default=True)
@click.option("--measured", type=click.Path(), help="A trace written by `fxpart train --trace`.")
@click.option("--trace", type=click.Path(), help="Write a trace for Chrome or Perfetto.")
@json_option
def command(plan: str, path: str, measured: str | None, trace: str | None, as_json: bool) -> int:
    """Write PLAN as one HTML file: timeline, memory, stages, certificate.

    The file needs no network and is smaller than 1 MB. With --measured, the predicted step time is
    compared with the measured steps of a trace, part by part.
    """
    from fxpart.report.html import report_html

    loaded = Plan.load(plan)
    recording, found = (None, None) if measured is None else _compared(loaded, measured)
    written = {path: write(path, report_html(loaded, recording, found))}
    if trace is not None:
        from fxpart.planner.prediction.plan_timeline import plan_timeline

        events = plan_timeline(loaded).chrome_trace()
        written[trace] = write(trace, output.as_json(events))
    if as_json:
        made = {"files": written, "step_time": loaded.prediction.expected_seconds}
        output.data(made | ({} if found is None else {"comparison": _data(found)}))
    elif found is not None:
        from fxpart.report.comparison_text import format_comparison

        output.text(format_comparison(found).rstrip("\n"))
    for name, size in written.items():
        output.note(f"wrote {name} ({size} bytes)")
    return 0


def _compared(plan: Plan, measured: str) -> tuple[MeasuredTimeline, RecordingComparison]:
    """Return the recording and its comparison with the plan; raises FXP109 and FXP304."""
    from fxpart.report.comparison_builder import compare
    from fxpart.report.recording_file import check_recording, load

    recording = load(measured)
    check_recording(recording, plan, measured)
    return recording, compare(plan, recording)


def _data(found: RecordingComparison) -> dict[str, object]:
    """Return the comparison as plain data with ratios and differences."""
    from dataclasses import asdict

    data = asdict(found)
    data["step"] |= {"ratio": found.step.ratio, "difference": found.step.difference}
    for stage, made in zip(data["stages"], found.stages, strict=True):
        for kind, parts in (("each", made.each), ("step", made.step)):
            for name, part in parts.items():
                stage[kind][name] |= {"ratio": part.ratio}
    return data


def write(path: str, text: str) -> int:
    """Write a text file and return its bytes; FXP603 if that fails."""
    encoded = text.encode("utf-8", "backslashreplace")
    try:
        Path(path).write_bytes(encoded)
    except OSError as why:
        fix = "pass a writable path with -o"
        raise error("FXP603", where=path, why=why.strerror or str(why), fix=fix) from why
    return len(encoded)
