"""``fxpart train --routing queue``: copies that take microbatches from queues."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click
import msgspec

from fxpart.cli import output
from fxpart.cli.options import Command
from fxpart.errors import error
from fxpart.schedule.weight_modes import MODES


def queue_options(command: Command) -> Command:
    """Add the options of queues; :func:`queued_of` takes them out of the keywords."""
    command = click.option(
        "--staleness", type=click.IntRange(0), help="Updates that gradients may miss, with queues."
    )(command)
    return click.option(
        "--routing", type=click.Choice(("turns", "queue")), default="turns", show_default=True,
        help="How copies of a stage share microbatches.",
    )(command)  # fmt: skip


def queued_of(
    options: dict[str, Any], weights: str | None, trace: str | None
) -> tuple[dict[str, Any], str | None]:
    """What a trainer from queues is given (nothing else is), and the weights that are left.

    weights: a weight mode is the queues'. FXP109 for --trace with queues.
    """
    routing, staleness = options.pop("routing"), options.pop("staleness")
    if routing != "queue":
        if staleness is not None:
            fix = "give --routing queue too"
            raise error("FXP109", where="--staleness", why="copies take turns", fix=fix)
        return {}, weights
    if trace is not None:
        why = "there is no schedule whose actions could be measured"
        raise error("FXP109", where="--routing queue --trace", why=why, fix="leave --trace out")
    found: dict[str, Any] = {"routing": routing, "staleness": staleness or 0}
    if weights in MODES:
        found["weight_mode"], weights = weights, None
    return found, weights


def on_command_line(queued: Mapping[str, Any]) -> dict[str, object]:
    """As the ranks are given it."""
    names = {"routing": "--routing", "staleness": "--staleness", "weight_mode": "--weights"}
    return {names[name]: value for name, value in queued.items()}


def tell_copies(trainer: Any, *, first: bool, as_json: bool) -> bool:
    """What each copy took; whether the trainer is one from queues. Every rank calls it."""
    from fxpart.runtime.queued.trainer import QueueTrainer

    if not isinstance(trainer, QueueTrainer):
        return False
    copies = trainer.report()
    if first and as_json:
        output.line({"copies": msgspec.to_builtins(copies), "lost": trainer.lost})
    elif first:
        for copy in copies:
            output.note(
                f"stage {copy.stage}: {copy.microbatches} microbatches, gradients missed "
                f"{copy.staleness} updates at most, {copy.sets} sets of weights at most"
            )
        if trainer.lost:
            output.note(f"lost on the way: stage {', '.join(map(str, trainer.lost))}")
    return True
