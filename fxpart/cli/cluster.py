"""``fxpart cluster``: find out what a cluster is, write it down, look at it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fxpart.cli import output
from fxpart.cli.options import json_option
from fxpart.errors import FxpartError

if TYPE_CHECKING:
    from fxpart.cluster.importers.source_facts import ImportedCluster, ImportOptions
    from fxpart.cluster.model import Cluster

Command = TypeVar("Command", bound=Callable[..., Any])
FORMATS = ("auto", "paddle", "topo", "nccl-tests", "slurm")


class ClusterCommands(click.Group):
    """The verbs of this file, and `bench`, which needs torch and is loaded when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The verbs in the order in which one needs them."""
        return ["detect", "bench", "import", "export", "show", "validate"]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The verb's command, None where there is no such verb."""
        if cmd_name == "bench":
            from fxpart.cli.cluster_bench import bench

            return bench
        return super().get_command(ctx, cmd_name)


@click.group(cls=ClusterCommands)
def command() -> None:
    """Find out what a cluster is, write it to a file, look at it.

    CLUSTER is a file or a preset such as local:4 or 2x8xh100. Each verb takes --json.
    `fxpart explain planning_for_a_cluster` says what is in a file.
    """


def fact_options(made: Command) -> Command:
    """Add the options for what no text says; they arrive as keywords of :func:`_facts`."""
    rate = click.FloatRange(0, min_open=True)
    for option in reversed(
        (
            click.option(
                "--pcie-gbs", type=rate, help="GB/s of PCIe in one direction: 31.5 for 4.0 x16."
            ),
            click.option(
                "--nvlink-gbs", type=rate, help="GB/s of one NVLink lane in one direction."
            ),
            click.option("--network-gbs", type=rate, help="GB/s between two hosts."),
            click.option(
                "--network-us",
                type=click.FloatRange(0),
                default=0.0,
                help="Microseconds before the first byte between two hosts.",
            ),
        )
    ):
        made = option(made)
    return made


@command.command()
@click.option("-o", "--out", type=click.Path(), help="Write the cluster: .toml or .json.")
@fact_options
@json_option
def detect(out: str | None, as_json: bool, **given: Any) -> int:
    """Describe this host, and the hosts of the job that torchrun or SLURM started.

    GPUs and how they are connected come from nvidia-smi, cores and memory from the system, hosts
    from WORLD_SIZE or SLURM_JOB_NODELIST. What is not known is said, and left out.
    """
    from fxpart.cluster.job_detection import detect as found_here

    _done(found_here(_facts(**given)), out, as_json)
    return 0


@command.command("import")
@click.argument("file", type=click.Path())
@click.option("--format", "form", type=click.Choice(FORMATS), default="auto", show_default=True)
@click.option("-o", "--out", type=click.Path(), help="Write the cluster: .toml or .json.")
@click.option("--into", help="The cluster that FILE says more about.")
@click.option("--host", "hosts", multiple=True, help="The host of --into that FILE is about.")
@click.option("--device", metavar="MODEL", help="What the devices are, such as a100-sxm-80gb.")
@click.option("--per-host", type=click.IntRange(1), help="Devices of each host of a node list.")
@click.option("--memory-gbs", type=click.FloatRange(0, min_open=True), help="Of a device's memory.")
@click.option("--operation", help="The collective of a table that does not name it: all_reduce.")
@click.option("--mapping", type=click.Path(), help="PaddlePaddle's rank mapping, for the order.")
@fact_options
@json_option
def import_(
    file: str, form: str, out: str | None, as_json: bool, mapping: str | None, **given: Any
) -> int:
    """Read a cluster, or more about one, from another tool's FILE.

    \b
    paddle      {"machines": [...]}, PaddlePaddle's cluster JSON
    topo        nvidia-smi topo -m; how fast PCIe is has to be given: --pcie-gbs
    nccl-tests  what all_reduce_perf and the like print, or write with -J
    slurm       a node list such as node[01-04], or env | grep SLURM

    A topology and measurements go onto the devices of --into; without it, --device says what
    the devices are.
    """
    from fxpart.cluster.importers import registry
    from fxpart.cluster.importers.paddle_rank_map import reorder_devices
    from fxpart.cluster.importers.source_facts import ImportedCluster

    found = registry.load(Path(file), form, _facts(**given))
    if mapping is not None:
        found = ImportedCluster(reorder_devices(found.cluster, _text(mapping)), found.notes)
    _done(found, out, as_json)
    return 0


@command.command()
@click.argument("cluster")
@click.option("--format", "form", type=click.Choice(["paddle"]), default="paddle")
@click.option("-o", "--out", type=click.Path(), help="Write the cluster; else it is printed.")
@click.option("--plan", type=click.Path(), help="The plan whose ranks --mapping is of.")
@click.option("--mapping", type=click.Path(), help="Write PaddlePaddle's rank mapping.")
@json_option
def export(
    cluster: str, form: str, out: str | None, plan: str | None, mapping: str | None, as_json: bool
) -> int:
    """Write a cluster as PaddlePaddle's cluster JSON; --mapping, as its rank mapping too.

    A cluster that was imported from it comes out as it was, with what has changed since.
    """
    from fxpart.cluster.importers.paddle_export import document_of
    from fxpart.cluster.importers.paddle_rank_map import mapping_of
    from fxpart.cluster.model import Cluster

    given = Cluster.parse(cluster)
    document = document_of(given)
    ranks = [device.name for device in given.devices] if plan is None else _ranks(plan, given)
    files = {}
    for path, value in ((out, document), (mapping, mapping_of(given, ranks))):
        if path is not None:
            files[path] = _write(path, value)
    if as_json:
        output.data({"files": files} if files else document)
    elif not files:
        output.data(document)
    return 0


@command.command()
@click.argument("cluster")
@json_option
def show(cluster: str, as_json: bool) -> int:
    """Show devices, hosts, links and measurements; what is alike on one line."""
    from fxpart.cluster.completeness import missing_facts
    from fxpart.cluster.files import to_builtins
    from fxpart.cluster.model import Cluster
    from fxpart.report.cluster import format_cluster

    given = Cluster.parse(cluster)
    missing = missing_facts(given)
    if as_json:
        output.data({"cluster": to_builtins(given), "hash": given.hash, "missing": missing})
    else:
        output.text("\n".join(format_cluster(given, missing)))
    return 0


@command.command()
@click.argument("clusters", nargs=-1, required=True, metavar="CLUSTER...")
@json_option
def validate(clusters: tuple[str, ...], as_json: bool) -> int:
    """Check cluster files: every fault, every pair without a link; what is not known.

    Exit status 2 where one has a fault.
    """
    from fxpart.cluster.completeness import find_misspelled_keys, missing_facts, missing_links
    from fxpart.cluster.model import Cluster

    status, answers = 0, []
    for name in clusters:
        answer: dict[str, Any] = {"cluster": name, "problems": [], "missing": (), "misspelt": ()}
        try:
            found = Cluster.parse(name).validate()
            if faults := missing_links(found):
                raise FxpartError(faults)
            answer["missing"] = missing_facts(found)
            answer["misspelt"] = find_misspelled_keys(found)
        except FxpartError as fault:
            status = fault.exit_code
            answer["problems"] = output.problems(fault)
            output.note(str(fault))
        answers.append(answer)
        if not as_json and not answer["problems"]:
            output.text("\n".join([f"{name}: valid", *_remarks(answer)]))
    if as_json:
        output.data(answers)
    return status


def _remarks(answer: dict[str, Any]) -> list[str]:
    """What is no fault, and still worth knowing."""
    missing = [f"  not known: {fact}" for fact in answer["missing"]]
    return [*(f"  {words}" for words in answer["misspelt"]), *missing]


def _facts(
    pcie_gbs: float | None,
    nvlink_gbs: float | None,
    network_gbs: float | None,
    network_us: float,
    memory_gbs: float | None = None,
    into: str | None = None,
    **rest: Any,
) -> ImportOptions:
    """The options, in bytes/s and seconds."""
    from fxpart.cluster.importers.source_facts import ImportOptions
    from fxpart.cluster.model import Cluster

    def scaled(value: float | None) -> float | None:
        return None if value is None else value * 1e9

    return ImportOptions(
        into=None if into is None else Cluster.parse(into),
        pcie=scaled(pcie_gbs),
        nvlink=scaled(nvlink_gbs),
        network=scaled(network_gbs),
        network_latency=network_us / 1e6,
        memory=scaled(memory_gbs),
        **rest,
    )


def _done(found: ImportedCluster, out: str | None, as_json: bool) -> None:
    """Write or print a cluster that was found, and say what a person should know of it."""
    from fxpart.cluster.files import to_builtins, to_toml

    for note in found.notes:
        output.note(f"note: {note}")
    if out is not None:
        found.cluster.dump(out)
        output.note(f"wrote {out}")
    if as_json:
        output.data({"cluster": to_builtins(found.cluster), "notes": found.notes})
    elif out is None:
        output.text(to_toml(found.cluster).rstrip("\n"))


def _ranks(plan: str, cluster: Cluster) -> list[str]:
    """The devices of a plan's ranks, in order; FXP305 where the cluster is another one."""
    from fxpart.errors import error
    from fxpart.plan.model import Plan

    found = Plan.load(plan)
    places = found.devices or range(len(found.cluster.devices))
    names = [found.cluster.devices[place].name for place in places]
    known = {device.name for device in cluster.devices}
    if not known.issuperset(names):
        other = next(name for name in names if name not in known)
        why = f"rank {names.index(other)} runs on {other!r}, which the cluster does not have"
        raise error("FXP305", where=plan, why=why, fix=f"give the plan's cluster {cluster.name!r}")
    return names


def _text(path: str) -> str:
    """A file's text; FXP401."""
    from fxpart.errors import error
    from fxpart.files import read_bytes

    try:
        return read_bytes(path).decode("utf-8")
    except (OSError, ValueError) as why:
        raise error("FXP401", where=path, why=str(why), fix="give a readable file") from why


def _write(path: str, value: Any) -> int:
    """Write a value as JSON; the bytes written. FXP603."""
    from fxpart.errors import error

    text = output.as_json(value) + "\n"
    try:
        Path(path).write_text(text, encoding="utf-8", newline="\n")
    except OSError as why:
        fix = "give a writable path"
        raise error("FXP603", where=path, why=why.strerror or str(why), fix=fix) from why
    output.note(f"wrote {path}")
    return len(text.encode())
