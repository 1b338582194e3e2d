"""``fxpart scale``: another number of ranks for a run that is under way."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from fxpart.cli import output
from fxpart.cli.options import json_option


@click.command()
@click.argument("run", type=click.Path())
@click.argument("ranks", type=click.IntRange(1))
@json_option
def command(run: str, ranks: int, as_json: bool) -> int:
    """Ask the run in folder RUN to go on with RANKS ranks, at its next step.

    It has to be under way: started by `fxpart train --nproc MIN:MAX --run RUN`. All ranks save
    after the step they are at and stop, and training goes on from there by the plan for the new
    number. Where there is none, the launcher says so, and nobody stops. More:
    fxpart/docs/checkpoints_and_failures.md.
    """
    from fxpart.checkpoint.run_directory import RunDir
    from fxpart.elastic.scale_request import request_rank_count

    held = request_rank_count(RunDir(Path(run)), ranks)
    if as_json:
        output.data({"asked": ranks, **msgspec.to_builtins(held)})
    elif ranks == held.ranks:
        output.text(f"it has {ranks} ranks already")
    else:
        output.text(f"asked process {held.pid} for {ranks} ranks in place of {held.ranks}")
    return 0
