"""``fxpart verify``: compare partitioned with single-process training."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import click

from fxpart.cli import output
from fxpart.cli.options import CommandLineRequest, compile_options, json_option
from fxpart.errors import EXIT_DIFFERENCE

if TYPE_CHECKING:
    from fxpart.verification.verification_result import ParameterDifference, Verification

SHOWN = 12


@click.command()
@compile_options
@click.option("--plan", type=click.Path(), help="Use this plan instead of choosing one.")
@click.option(
    "--ranks", "-n", type=click.IntRange(1), help="Partition the model for this number of ranks."
)
@click.option("--nproc", type=click.IntRange(1), help="Train on this number of processes.")
@click.option("--steps", type=click.IntRange(1), default=3, show_default=True)
@json_option
def command(ranks: int | None, nproc: int | None, steps: int, as_json: bool, **options: Any) -> int:
    """Train TARGET partitioned and in a single process; compare losses, gradients and parameters.

    All ranks run in this process, or with --nproc in separate ones. The exit status is 1 if the
    difference exceeds the tolerance: 0, or 1e-6 relative if sums over ranks are added in another
    order than in a single process.
    """
    from fxpart.environment import read_launch

    request = CommandLineRequest(**options)
    started = read_launch()
    if started is None and nproc is not None and nproc > 1:
        from fxpart.cli.process_launch import run_on

        return run_on(request, nproc, "verify", {"--steps": steps}, as_json)
    if ranks is not None:
        request = request.on_ranks(ranks, "--ranks")
    workload = request.workload()
    first = started is None or started.rank == 0
    program = request.compile(workload, quiet=started is not None)
    with output.show_activity(f"training {steps} steps both ways") if first else nullcontext():
        found = program.verify(steps)
    if not first:
        return 0
    if as_json:
        output.data(found)
    else:
        output.text("\n".join(describe(found)))
    return 0 if found.passed else EXIT_DIFFERENCE


def describe(found: Verification) -> list[str]:
    """Return the comparison as text: losses, the parameters that differ most, the verdict."""
    from fxpart import units
    from fxpart.report.table import shortened, table

    head = (
        units.plural(found.stages, "stage"), units.plural(found.ranks, "rank"),
        units.plural(found.microbatches, "microbatch"), units.plural(found.steps, "step"),
    )  # fmt: skip
    lines = [f"{head[0]} on {', '.join(head[1:])}", ""]
    losses = [(str(i), f"{a:.8g}", f"{b:.8g}") for i, (a, b) in enumerate(found.losses, 1)]
    lines += [*table(("step", "loss partitioned", "loss single process"), ">>>", losses), ""]
    worst = sorted(found.differences, key=_largest, reverse=True)
    rows = [
        (shortened(d.name, 60), _number(d.gradient), _number(d.parameter))
        for d in worst[:SHOWN]
        if not d.equal
    ]
    if rows:
        lines += table(("parameter", "gradient differs by", "value differs by"), "<>>", rows)
    others = worst[len(rows) :]
    if others:
        most, count = _largest(others[0]), units.plural(len(others), "parameter")
        text = f"differ by {_number(most)} at most" if most else "with bit-equal gradient and value"
        lines.append(f"{count} {text}")
    return [*lines, "", *_verdict(found)]


def _verdict(found: Verification) -> list[str]:
    lines = []
    if found.equal:
        lines.append("equal: all losses, gradients, parameters and buffers, bit for bit")
    elif found.largest <= found.tolerance:
        lines.append(
            f"equal within {found.tolerance:g} relative (largest {found.largest:.1e}), the "
            "tolerance for sums over ranks in another order"
        )
        lines += _describe_rounding(found)
    else:
        allowed = "0" if found.exact else f"{found.tolerance:g}"
        lines.append(
            f"DIFFERENT: largest relative difference {found.largest:.1e}, tolerance {allowed} "
            "(fxpart explain FXP506)"
        )
    if found.eager_differences:
        lines.append("DIFFERENT from the original module (fxpart explain FXP113):")
        lines += [f"  {each}" for each in found.eager_differences]
    if found.eager_loss is not None and found.eager_gradient is not None:
        lines.append(
            f"difference to the original module: loss {_number(found.eager_loss)}, "
            f"gradients {_number(found.eager_gradient)} relative"
        )
    return lines


def _describe_rounding(found: Verification) -> list[str]:
    """Return a line about differences above the tolerance that rounding explains."""
    from fxpart import units

    above = sum(d.noise and _largest(d) > found.tolerance for d in found.differences)
    if not above:
        return []
    verb = "differs" if above == 1 else "differ"
    return [
        f"{units.plural(above, 'parameter')} {verb} by more, but not by more than rounding errors"
    ]


def _largest(difference: ParameterDifference) -> float:
    return max(difference.gradient, difference.parameter)


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"
