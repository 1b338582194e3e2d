"""``fxpart train --routing queue``: copies that take microbatches from queues."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click
import msgspec

from fxpart.cli import output
from fxpart.cli.options import Command
from fxpart.errors import error
from fxpart.plan.constraint_table import QUEUE
from fxpart.planner.execution_mode import parse_staleness
from fxpart.schedule.weight_modes import MODES

TURNS = "turns"


def queue_options(command: Command) -> Command:
    """Add the options of queues; :func:`queued_of` takes them out of the keywords."""
    command = click.option(
        "--staleness",
        metavar="N[,N]",
        help="Updates that gradients may miss, with queues: of all stages, or of each.",
    )(command)
    return click.option(
        "--routing", type=click.Choice(("turns", "queue")),
        help="How copies of a stage share microbatches; by default as the plan says.",
    )(command)  # fmt: skip


def queued_of(
    options: dict[str, Any], weights: str | None, trace: str | None
) -> tuple[dict[str, Any], str | None]:
    """What a trainer is given of queues (nothing where there are none), and the weights left.

    options: of the command, of which those of queues are taken out; its mode and plan say what is
    not said there. weights: a weight mode is the queues'. FXP109 for --trace with queues.
    """
    routing, staleness = options.pop("routing"), options.pop("staleness")
    planned = _planned(options)
    if (routing or planned) != QUEUE:
        if staleness is not None:
            fix = "give --routing queue too"
            raise error("FXP109", where="--staleness", why="copies take turns", fix=fix)
        return ({"routing": routing} if planned == QUEUE else {}), weights
    if trace is not None:
        why = "there is no schedule whose actions could be measured"
        raise error("FXP109", where="--routing queue --trace", why=why, fix="leave --trace out")
    found: dict[str, Any] = {"routing": QUEUE}
    if staleness is not None:
        found["staleness"] = _numbers(staleness)
    if weights in MODES and options["mode"] != QUEUE:
        found["weight_mode"], weights = weights, None
    return found, weights


def _planned(options: Mapping[str, Any]) -> str:
    """The routing of the plan that is given, or asked for by its mode."""
    if options["plan"] is not None:
        from fxpart.plan.model import Plan

        return QUEUE if Plan.load(options["plan"]).staleness else TURNS
    return QUEUE if options["mode"] == QUEUE else TURNS


def _numbers(text: str) -> int | tuple[int, ...]:
    """Of all stages, or of each."""
    found = parse_staleness(text)
    if found is None:
        why = "it is not a count of updates for all stages, nor one for each"
        raise error("FXP109", where=f"--staleness {text}", why=why, fix="2, or 2,0 for two stages")
    return found[0] if len(found) == 1 else found


def on_command_line(queued: Mapping[str, Any]) -> dict[str, object]:
    """As the ranks are given it."""
    names = {"routing": "--routing", "staleness": "--staleness", "weight_mode": "--weights"}
    texts = {n: ",".join(map(str, v)) if isinstance(v, tuple) else v for n, v in queued.items()}
    return {names[name]: text for name, text in texts.items()}


def print_replica_counts(trainer: Any, *, first: bool, as_json: bool) -> bool:
    """What each copy took; whether the trainer is one from queues. Every rank calls it."""
    from fxpart.runtime.queues.trainer import QueueTrainer

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
