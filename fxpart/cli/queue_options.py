"""``fxpart train --routing queue``: replicas that take microbatches from queues."""

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
    """Add the options of queue routing; :func:`parse_queue_options` removes them from keywords."""
    command = click.option(
        "--staleness",
        metavar="N[,N]",
        help="With queues: updates that gradients may miss, of all stages or by stage.",
    )(command)
    return click.option(
        "--routing", type=click.Choice(("turns", "queue")),
        help="Routing of microbatches to replicas (turns: round-robin), by default the plan's.",
    )(command)  # fmt: skip


def parse_queue_options(
    options: dict[str, Any], weights: str | None, trace: str | None
) -> tuple[dict[str, Any], str | None]:
    """Return the trainer's queue options, empty without queues, and the remaining weights.

    options: of the command, from which queue options are removed; mode and plan give the defaults.
    weights: used for queues if it is a weight mode. Raises FXP109 for --trace with queues.
    """
    routing, staleness = options.pop("routing"), options.pop("staleness")
    planned = _planned(options)
    if (routing or planned) != QUEUE:
        if staleness is not None:
            why = "round-robin routing has no staleness"
            raise error("FXP109", where="--staleness", why=why, fix="pass --routing queue, too")
        return ({"routing": routing} if planned == QUEUE else {}), weights
    if trace is not None:
        why = "queue routing has no schedule whose actions could be measured"
        raise error("FXP109", where="--routing queue --trace", why=why, fix="omit --trace")
    found: dict[str, Any] = {"routing": QUEUE}
    if staleness is not None:
        found["staleness"] = _numbers(staleness)
    if weights in MODES and options["mode"] != QUEUE:
        found["weight_mode"], weights = weights, None
    return found, weights


def _planned(options: Mapping[str, Any]) -> str:
    """Return the routing of the given plan, or of the requested mode."""
    if options["plan"] is not None:
        from fxpart.plan.model import Plan

        return QUEUE if Plan.load(options["plan"]).staleness else TURNS
    return QUEUE if options["mode"] == QUEUE else TURNS


def _numbers(text: str) -> int | tuple[int, ...]:
    """Parse the staleness of all stages, or by stage."""
    found = parse_staleness(text)
    if found is None:
        why = "it is neither a number of updates nor a list with one number per stage"
        fix = "use for example 2, or 2,0 for two stages"
        raise error("FXP109", where=f"--staleness {text}", why=why, fix=fix)
    return found[0] if len(found) == 1 else found


def on_command_line(queued: Mapping[str, Any]) -> dict[str, object]:
    """Return the options for the command line of ranks."""
    names = {"routing": "--routing", "staleness": "--staleness", "weight_mode": "--weights"}
    texts = {n: ",".join(map(str, v)) if isinstance(v, tuple) else v for n, v in queued.items()}
    return {names[name]: text for name, text in texts.items()}


def print_replica_counts(trainer: Any, *, first: bool, as_json: bool) -> bool:
    """Print the counts of each replica; return whether the trainer uses queues.

    All ranks must call this.
    """
    if trainer.kind != "queue":
        return False
    copies = trainer.report()
    if first and as_json:
        output.line({"copies": msgspec.to_builtins(copies), "lost": trainer.pipeline.lost})
    elif first:
        for copy in copies:
            output.note(
                f"stage {copy.stage}: {copy.microbatches} microbatches, gradients missed "
                f"{copy.staleness} updates at most, {copy.copies} weight versions at most"
            )
        if trainer.pipeline.lost:
            lost = ", ".join(map(str, trainer.pipeline.lost))
            output.note(f"replicas lost during the run: stage {lost}")
    return True
