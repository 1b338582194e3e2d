"""Split a graph that another program has priced, so that the largest load is least.

    python -m tests.benchmarks.maxload graph.json            (from the root of the checkout)

README.md beside this file describes the problem, the files and the answers.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from typing import TYPE_CHECKING, Any

import click

from fxpart.cli import output
from fxpart.cli.options import Command, json_option
from fxpart.errors import EXIT_INPUT, FxpartError

if TYPE_CHECKING:
    from .instance import Instance, MaxLoadAnswer, Mode


def device_options(command: Command) -> Command:
    """Add what a file may leave out."""
    for option in reversed(
        (
            click.option("--devices", type=click.IntRange(0), help="Accelerators there are."),
            click.option("--cpus", type=click.IntRange(0), help="CPU cores there are."),
            click.option("--memory", type=float, metavar="BYTES", help="Of each accelerator."),
            click.option("--bandwidth", type=float, metavar="BYTES/S", help="Of each accelerator."),
        )
    ):
        command = option(command)
    return command


@click.command()
@click.argument("file", type=click.Path())
@click.option(
    "--mode",
    type=click.Choice(["chain", "any"]),
    default="chain",
    show_default=True,
    help="chain: devices form a pipeline; any: a device may hold several pieces.",
)
@click.option(
    "--time-limit", type=click.FloatRange(0), default=60.0, show_default=True, metavar="SECONDS"
)
@click.option(
    "--solver",
    type=click.Choice(["auto", "dp", "cp-sat"]),
    default="auto",
    show_default=True,
    help="dp: dynamic programme over ideals; cp-sat: integer programme.",
)
@click.option("--output", "-o", "path", type=click.Path(), help="Write the split as JSON.")
@device_options
@click.option("--seed", type=int, default=0, show_default=True)
@json_option
def command(
    file: str, mode: Mode, time_limit: float, solver: str, path: str | None,
    devices: int | None, cpus: int | None, memory: float | None, bandwidth: float | None,
    seed: int, as_json: bool,
) -> int:  # fmt: skip
    """Place the nodes of FILE on devices; say the largest load and what is proven of it.

    FILE: a max-load instance (JSON), Piper's profile (JSON), or a graph.txt of PipeDream's
    profiler. Ctrl-C ends the search with the best found so far.
    """
    from .explain import no_answer
    from .formats import read_instance
    from .formats.overrides import DeviceOverrides
    from .portfolio import solve

    overrides = DeviceOverrides(accelerators=devices, cpus=cpus, memory=memory, bandwidth=bandwidth)
    instance = read_instance(file, overrides)
    with until_interrupted() as stopped, meter(time_limit, quiet=as_json) as progress:
        answer = solve(
            instance, mode=mode, solver=solver, time_limit=time_limit, seed=seed,
            progress=progress, stopped=stopped,
        )  # fmt: skip
    if answer.assignment is None:
        raise no_answer(instance, mode, answer, file, time_limit)
    split = as_split(instance, answer)
    if path is not None:
        from fxpart.cli.report import write

        write(path, output.as_json(split) + "\n")
        output.note(f"wrote {path}")
    if as_json:
        output.data(
            {**split, "mode": mode, "solver": answer.solver, **per_device(instance, answer)}
        )
    else:
        show(instance, answer, mode, file)
    return 0


def as_split(instance: Instance, answer: MaxLoadAnswer) -> dict[str, Any]:
    """What is written: a device for each node id, and what is proven."""
    assert answer.assignment is not None
    names = instance.devices
    return {
        "assignment": {
            str(node.id): names[d]
            for node, d in zip(instance.nodes, answer.assignment, strict=True)
        },
        "objective": answer.objective,
        "lower_bound": answer.lower_bound,
        "gap": answer.gap,
        "status": answer.status,
    }


def per_device(instance: Instance, answer: MaxLoadAnswer) -> dict[str, Any]:
    """Load, nodes and bytes of each device."""
    from .instance import bytes_held, loads

    assert answer.assignment is not None
    held = bytes_held(instance, answer.assignment)
    return {
        "devices": [
            {
                "device": name,
                "load": load,
                "nodes": answer.assignment.count(d),
                "bytes": held[d] if d < instance.accelerators else None,
            }
            for d, (name, load) in enumerate(
                zip(instance.devices, loads(instance, answer.assignment), strict=True)
            )
        ]
    }


def show(instance: Instance, answer: MaxLoadAnswer, mode: str, file: str) -> None:
    """The answer for a person."""
    from fxpart import units

    kinds = units.plural(instance.accelerators, "accelerator")
    kinds += f", {units.plural(instance.cpus, 'CPU core')}" if instance.cpus else ""
    output.text(f"{file}: {units.plural(len(instance.nodes), 'node')} on {kinds}, mode {mode}")
    output.text(
        f"{answer.status}: largest load {answer.objective:.6g}, no less than "
        f"{answer.lower_bound:.6g}, gap {100 * answer.gap:.2g} % (solver {answer.solver})"
    )
    for row in per_device(instance, answer)["devices"]:
        held = "" if row["bytes"] is None else f", {units.size(row['bytes'])}"
        share = row["load"] / answer.objective if answer.objective else 0.0
        output.text(
            f"  {row['device']:<6} load {row['load']:>10.6g} ({100 * share:.0f} %), "
            f"{units.plural(row['nodes'], 'node')}{held}"
        )


@contextmanager
def until_interrupted() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed; a second one ends the command as usual."""
    pressed = False

    def press(number: int, frame: object) -> None:
        nonlocal pressed
        pressed = True
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def meter(time_limit: float, *, quiet: bool) -> Iterator[Callable[[float, float], None] | None]:
    """Best, bound, gap and seconds left, on a terminal; None elsewhere."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.live import Live

    end, best, proven = time.monotonic() + time_limit, inf, 0.0

    def progress(objective: float, bound: float) -> None:
        nonlocal best, proven
        best, proven = objective, bound

    def words() -> str:
        left = f"{max(0.0, end - time.monotonic()):.0f} s left"
        if best == inf:
            return f"no split yet, {left}"
        gap = 100 * (1 - proven / best) if best else 0.0
        return f"largest load {best:.6g}, no less than {proven:.6g}, gap {gap:.2g} %, {left}"

    console = Console(stderr=True)
    with Live(get_renderable=words, console=console, transient=True, refresh_per_second=4):
        yield progress


def run(arguments: list[str]) -> int:
    """Run the command and return its exit status; a user's mistake shows no traceback."""
    try:
        return int(command.main(arguments, prog_name="maxload", standalone_mode=False) or 0)
    except click.ClickException as fault:
        fault.show()
        return EXIT_INPUT
    except (click.Abort, KeyboardInterrupt):
        output.note("interrupted")
        return 130
    except FxpartError as fault:
        output.failure(fault, as_json="--json" in arguments)
        return fault.exit_code


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
