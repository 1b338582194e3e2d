"""``fxpart export``: each rank's program as readable Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from fxpart.cli import output
from fxpart.cli.options import CommandLineRequest, compile_options, json_option


@click.command()
@compile_options
@click.option("--plan", type=click.Path(), help="Use this plan instead of choosing one.")
@click.option("--output", "-o", "path", type=click.Path(), required=True, help="The folder.")
@json_option
def command(path: str, as_json: bool, **options: Any) -> int:
    """Write plan.json, the manifest and each rank's stages and actions into a folder."""
    request = CommandLineRequest(**options)
    program = request.compile(request.workload())
    program.export(path)
    files = sorted(p for p in Path(path).rglob("*") if p.is_file())
    if as_json:
        output.data(
            {
                "directory": path,
                "files": {str(p.relative_to(path)): p.stat().st_size for p in files},
            }
        )
        return 0
    output.text(f"wrote {path}:")
    width = max(len(str(file.relative_to(path))) for file in files)
    for file in files:
        size = file.stat().st_size
        output.text(f"  {file.relative_to(path)!s:<{width}}  {size:>8} bytes")
    return 0
