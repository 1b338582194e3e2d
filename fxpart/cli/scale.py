"""``fxpart scale``: change the number of ranks of a running job."""

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
    """Change the number of ranks of the run in folder RUN to RANKS, at its next step.

    The run must have been started by `fxpart train --nproc MIN:MAX --run RUN`. All ranks save after
    the current step and stop, and training resumes with the plan for the new number of ranks. If
    there is no plan, the launcher reports it and the ranks continue. See
    fxpart/docs/checkpoints_and_failures.md.
    """
    from fxpart.checkpoint.run_directory import RunDir
    from fxpart.elastic.scale_request import request_rank_count

    running = request_rank_count(RunDir(Path(run)), ranks)
    if as_json:
        output.data({"asked": ranks, **msgspec.to_builtins(running)})
    elif ranks == running.ranks:
        output.text(f"the run already has {ranks} ranks")
    else:
        output.text(
            f"requested {ranks} ranks instead of {running.ranks} from process {running.pid}"
        )
    return 0
