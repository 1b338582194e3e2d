"""``fxpart report``: a plan as one HTML file."""

from __future__ import annotations

from pathlib import Path

import click

from fxpart.cli import output
from fxpart.cli.options import json_option
from fxpart.errors import error
from fxpart.plan import Plan


@click.command()
@click.argument("plan", type=click.Path())
@click.option("--output", "-o", "path", default="report.html", show_default=True)
@click.option("--trace", type=click.Path(), help="Also a trace for Chrome or Perfetto.")
@json_option
def command(plan: str, path: str, trace: str | None, as_json: bool) -> int:
    """Draw PLAN: timeline, memory, stages, certificate. One file, no network, under 1 MB."""
    from fxpart.report.html import report_html

    loaded = Plan.load(plan)
    written = {path: write(path, report_html(loaded))}
    if trace is not None:
        from fxpart.report.timeline import plan_timeline

        events = plan_timeline(loaded).chrome_trace()
        written[trace] = write(trace, output.as_json(events))
    if as_json:
        output.data({"files": written})
    for name, size in written.items():
        output.note(f"wrote {name} ({size} bytes)")
    return 0


def write(path: str, text: str) -> int:
    """Write a text file and return its bytes; FXP603 where it cannot be."""
    encoded = text.encode("utf-8", "backslashreplace")
    try:
        Path(path).write_bytes(encoded)
    except OSError as why:
        fix = "give a writable path with -o"
        raise error("FXP603", where=path, why=why.strerror or str(why), fix=fix) from why
    return len(encoded)
