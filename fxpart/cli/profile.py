"""``fxpart profile``: measure the parts of a model's plans, and show profiles."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fxpart.cli import output
from fxpart.cli.options import json_option, parse_constraints, parse_seconds
from fxpart.environment import read_launch
from fxpart.errors import error

if TYPE_CHECKING:
    from fxpart.profiling.report import ProfilingReport


@click.command()
@click.argument("target", required=False)
@click.option(
    "--cluster", "-c", default="auto", show_default=True,
    help="local:4, auto, or a cluster file; the device of this process is measured.",
)  # fmt: skip
@click.option("--batch-size", "-b", type=click.IntRange(1), help="Global batch.")
@click.option("--microbatches", "-m", type=click.IntRange(1), help="Number of microbatches.")
@click.option("--optimizer", help="Its name, such as adamw.")
@click.option("--constraint", multiple=True, metavar="KEY=VALUE", help="As for fxpart plan.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--budget", default="60s", show_default=True, help="Time for measurements: 60s, 2m.")
@click.option(
    "--rehearse/--no-rehearse", default=True, show_default=True,
    help="Run candidates for the best plan, if all devices are CPUs of this host.",
)  # fmt: skip
@click.option(
    "--for", "plans", multiple=True, type=click.Path(), metavar="PLAN",
    help="Measure the stages of this plan on such devices; may be repeated.",
)  # fmt: skip
@click.option(
    "--output", "-o", "path", type=click.Path(), help="Profile file, created or extended."
)
@click.option(
    "--merge", multiple=True, type=click.Path(), metavar="OTHER",
    help="Merge another profile's measurements; may be repeated.",
)  # fmt: skip
@click.option("--show", type=click.Path(), metavar="FILE", help="Show the content of a profile.")
@json_option
def command(
    target: str | None,
    path: str | None,
    merge: tuple[str, ...],
    show: str | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Measure TARGET's ops, stages, CPU contention and best plans, and write a profile.

    Known measurements are not repeated. Use the profile in planning with --cost-model FILE. Measure
    on an idle machine. Under torchrun, with one rank for each device of the cluster, each kind of
    device is measured by its first rank, and rank 0 writes one profile for all.
    """
    if show is not None:
        return _show(show, as_json)
    if path is None:
        path = "model.profile"
    if target is None:
        if not merge:
            fix = "pass TARGET -o FILE, --show FILE, or -o FILE --merge OTHER"
            why = "neither a target nor --show nor --merge is given"
            raise error("FXP109", where="fxpart profile", why=why, fix=fix)
        return _merge(path, merge, as_json)
    started = read_launch()
    first = started is None or started.rank == 0
    found = _measure(target, path, first, **options)
    if not first:
        return 0
    if merge:
        _merge(path, merge, as_json=True, quiet=True)
    _print_reports(found, path, as_json)
    return 0


def _measure(
    target: str,
    path: str,
    first: bool,
    *,
    cluster: str,
    budget: str,
    constraint: tuple[str, ...],
    plans: tuple[str, ...],
    rehearse: bool,
    **arguments: Any,
) -> list[ProfilingReport]:
    """Profile here, or under torchrun once for each kind of device."""
    from fxpart.capture.workload import load_target
    from fxpart.cluster.model import Cluster
    from fxpart.costmodels import AUTO
    from fxpart.plan.model import Plan
    from fxpart.planner.prepared_model import PlanningArguments
    from fxpart.profiling.device_group import profile_group
    from fxpart.profiling.plan_stages import check_places
    from fxpart.profiling.session import ProfilingSession

    seconds = parse_seconds(budget, "--budget")
    given = Cluster.parse(cluster)
    wanted = tuple(map(Plan.load, plans))
    started = read_launch()
    check_places(wanted, given.devices if started is not None else given.devices[:1])
    workload = load_target(target)
    _check_folder(path)
    with output.show_messages(f"profiling {target}", first) as show:
        constraints = parse_constraints(constraint) or {}
        made = ProfilingSession.of(
            workload, given,
            PlanningArguments(**arguments, cost_model=AUTO, constraints=constraints),
            date=datetime.date.today().isoformat(), progress=_format_progress(show),
            trial_runs=rehearse, plans=wanted,
        )  # fmt: skip

        def run(place: int, where: Path, share: float) -> ProfilingReport:
            return made.run(where, share * seconds, place=place)

        if started is None:
            return [made.run(path, seconds)]
        return profile_group(started, given, Path(path), run, timeout=300.0 + 10 * seconds)


def _check_folder(path: str) -> None:
    """Raise FXP603 if the folder does not exist, before anything is measured."""
    folder = Path(path).parent
    if not folder.is_dir():
        raise error("FXP603", where=path, why=f"there is no folder {folder}", fix="create it first")


def _print_reports(found: list[ProfilingReport], path: str, as_json: bool) -> None:
    from fxpart.report.profile import describe_run

    output.note(f"wrote {path}")
    if as_json:
        output.data(found)
        return
    for number, one in enumerate(found):
        output.text("\n".join([*([""] if number else []), *describe_run(one)]))


def _merge(path: str, others: tuple[str, ...], as_json: bool, *, quiet: bool = False) -> int:
    """Merge other profiles into the one at ``path``; print the measurements of each."""
    from fxpart.costmodels.profile_store import Profile

    _check_folder(path)
    taken = {}
    with Profile(path, create=True) as whole:
        for other in others:
            with Profile(other) as part:
                taken[other] = whole.merge(part)
    if quiet:
        return 0
    if as_json:
        output.data({"path": path, "taken": taken})
    else:
        for other, count in taken.items():
            output.text(f"{path}: {count} measurements from {other}")
    return 0


def _show(path: str, as_json: bool) -> int:
    from fxpart.costmodels.profile_store import Profile
    from fxpart.report.profile import contents, describe_profile

    with Profile(path) as profile:
        if as_json:
            output.data(contents(profile))
        else:
            output.text("\n".join(describe_profile(profile)))
    return 0


def _format_progress(show: Callable[[str], None] | None) -> Callable[[str, int, int], None] | None:
    """Return a function that shows progress as text, with the time that is left of a phase."""
    if show is None:
        return None
    began: dict[str, tuple[float, int]] = {}

    def report(what: str, done: int, of: int) -> None:
        start, first = began.setdefault(what, (time.monotonic(), done))
        left = ""
        if done > first and of > done:
            seconds = (time.monotonic() - start) / (done - first) * (of - done)
            left = f", about {seconds:.0f} s left"
        show(f"{what} {done} of {of}{left}" if of else f"{what} {done}")

    return report
