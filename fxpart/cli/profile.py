"""``fxpart profile``: measure what plans of a model are made of, and say what a profile holds."""

from __future__ import annotations

import datetime
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
    help="local:4, auto, or a cluster file; measured is the device that this process has.",
)  # fmt: skip
@click.option("--batch-size", "-b", type=click.IntRange(1), help="Global batch.")
@click.option("--microbatches", "-m", type=click.IntRange(1), help="Fix their number.")
@click.option("--optimizer", help="Its name, such as adamw.")
@click.option("--constraint", multiple=True, metavar="KEY=VALUE", help="As for fxpart plan.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--budget", default="60s", show_default=True, help="Time for measuring: 60s, 2m.")
@click.option(
    "--rehearse/--no-rehearse", default=True, show_default=True,
    help="Run the plans that may be the best, where all devices are this host's processors.",
)  # fmt: skip
@click.option(
    "--for", "plans", multiple=True, type=click.Path(), metavar="PLAN",
    help="Measure the stages that this plan puts on such devices; may be repeated.",
)  # fmt: skip
@click.option("--output", "-o", "path", type=click.Path(), help="The profile; made or added to.")
@click.option(
    "--merge", multiple=True, type=click.Path(), metavar="OTHER",
    help="Take another profile's measurements into it; may be repeated.",
)  # fmt: skip
@click.option("--show", type=click.Path(), metavar="FILE", help="Say what a profile holds.")
@json_option
def command(
    target: str | None,
    path: str | None,
    merge: tuple[str, ...],
    show: str | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Measure TARGET's ops, stages, contention of ranks and best plans here; write a profile.

    What the profile holds already is not measured again. Plan with it: --cost-model FILE. Use an
    idle machine. Under torchrun, with one rank for each device of the cluster, each kind of device
    is measured by its first rank, and rank 0 writes one profile for all.
    """
    if show is not None:
        return _show(show, as_json)
    if path is None:
        path = "model.profile"
    if target is None:
        if not merge:
            fix = "fxpart profile TARGET -o FILE, --show FILE, or -o FILE --merge OTHER"
            raise error("FXP109", where="fxpart profile", why="there is nothing to do", fix=fix)
        return _merge(path, merge, as_json)
    started = read_launch()
    first = started is None or started.rank == 0
    found = _measure(target, path, first, **options)
    if not first:
        return 0
    if merge:
        _merge(path, merge, as_json=True, quiet=True)
    _tell(found, path, as_json)
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
    **asked: Any,
) -> list[ProfilingReport]:
    """One run here, or under torchrun one for each kind of device."""
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
    _writable(path)
    with output.show_messages(f"profiling {target}", first) as show:
        constraints = parse_constraints(constraint) or {}
        made = ProfilingSession.of(
            workload, given,
            PlanningArguments(**asked, cost_model=AUTO, constraints=constraints),
            date=datetime.date.today().isoformat(), progress=_counted(show), trial_runs=rehearse,
            plans=wanted,
        )  # fmt: skip

        def run(place: int, where: Path, share: float) -> ProfilingReport:
            return made.run(where, share * seconds, place=place)

        if started is None:
            return [made.run(path, seconds)]
        return profile_group(started, given, Path(path), run, timeout=300.0 + 10 * seconds)


def _writable(path: str) -> None:
    """Its folder is there; FXP603 before anything is measured."""
    folder = Path(path).parent
    if not folder.is_dir():
        raise error("FXP603", where=path, why=f"there is no folder {folder}", fix="make it first")


def _tell(found: list[ProfilingReport], path: str, as_json: bool) -> None:
    from fxpart.report.profile import describe_run

    output.note(f"wrote {path}")
    if as_json:
        output.data(found)
        return
    for number, one in enumerate(found):
        output.text("\n".join([*([""] if number else []), *describe_run(one)]))


def _merge(path: str, others: tuple[str, ...], as_json: bool, *, quiet: bool = False) -> int:
    """Other profiles into the one at ``path``; says how many measurements each gave."""
    from fxpart.costmodels.profile_store import Profile

    _writable(path)
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


def _counted(show: Callable[[str], None] | None) -> Callable[[str, int, int], None] | None:
    """Progress by counts, told in words."""
    if show is None:
        return None
    return lambda what, done, of: show(f"{what} {done} of {of}" if of else f"{what} {done}")
