"""``fxpart cluster``: detect, import, export, show and validate clusters."""

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
    """The verbs of this module, and `bench`, which needs torch and is imported on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the verbs in the order of typical use."""
        return ["detect", "bench", "import", "export", "show", "validate"]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of a verb; None if it is unknown."""
        if cmd_name == "bench":
            from fxpart.cli.cluster_bench import bench

            return bench
        return super().get_command(ctx, cmd_name)


@click.group(cls=ClusterCommands)
def command() -> None:
    """Detect, measure, import, export, show and validate clusters.

    CLUSTER is a file or a preset such as local:4 or 2x8xh100. Each verb takes --json.
    `fxpart explain planning_for_a_cluster` describes cluster files.
    """


def fact_options(made: Command) -> Command:
    """Add options for facts that no text contains; they are keywords of :func:`_facts`."""
    rate = click.FloatRange(0, min_open=True)
    for option in reversed(
        (
            click.option(
                "--pcie-gbs",
                type=rate,
                help="GB/s of PCIe in one direction, such as 31.5 for 4.0 x16.",
            ),
            click.option("--nvlink-gbs", type=rate, help="GB/s of one NVLink in one direction."),
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

    GPUs come from nvidia-smi, NVML, rocm-smi or torch, and how they are connected from nvidia-smi.
    Cores and memory come from the system, hosts from WORLD_SIZE or SLURM_JOB_NODELIST. Unknown
    facts are listed and omitted.
    """
    from fxpart.cluster.job_detection import detect as found_here

    _done(found_here(_facts(**given)), out, as_json)
    return 0


@command.command("import")
@click.argument("file", type=click.Path())
@click.option("--format", "form", type=click.Choice(FORMATS), default="auto", show_default=True)
@click.option("-o", "--out", type=click.Path(), help="Write the cluster: .toml or .json.")
@click.option("--into", help="Cluster to which the facts in FILE are added.")
@click.option(
    "--host", "hosts", multiple=True, help="Host of --into that FILE describes; may be repeated."
)
@click.option("--device", metavar="MODEL", help="Model of the devices, such as a100-sxm-80gb.")
@click.option("--per-host", type=click.IntRange(1), help="Devices per host of a node list.")
@click.option(
    "--memory-gbs", type=click.FloatRange(0, min_open=True), help="GB/s of device memory."
)
@click.option(
    "--operation", help="Collective of a table that does not name it, such as all_reduce."
)
@click.option(
    "--mapping", type=click.Path(), help="PaddlePaddle's rank mapping, to order the devices."
)
@fact_options
@json_option
def import_(
    file: str, form: str, out: str | None, as_json: bool, mapping: str | None, **given: Any
) -> int:
    """Import a cluster, or facts about one, from another tool's FILE.

    \b
    paddle      {"machines": [...]}, PaddlePaddle's cluster JSON
    topo        output of nvidia-smi topo -m; needs --pcie-gbs if GPUs are connected by PCIe
    nccl-tests  output of all_reduce_perf and similar programs, as a table or as JSON (-J)
    slurm       a node list such as node[01-04], or the output of env | grep SLURM

    Topologies and measurements are added to the cluster --into. Without it, --device is the model
    of the devices.
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
@click.option("-o", "--out", type=click.Path(), help="File for the cluster, by default printed.")
@click.option("--plan", type=click.Path(), help="Plan with the ranks of --mapping.")
@click.option("--mapping", type=click.Path(), help="Write PaddlePaddle's rank mapping.")
@json_option
def export(
    cluster: str, form: str, out: str | None, plan: str | None, mapping: str | None, as_json: bool
) -> int:
    """Export a cluster as PaddlePaddle's cluster JSON, with --mapping also its rank mapping.

    A cluster that was imported from this format is exported unchanged, apart from later changes.
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
    """Show devices, hosts, links and measurements, grouping equal ones."""
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
    """Check cluster files; list all problems, missing links and missing facts.

    The exit status is 2 if there are problems.
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
    """Return remarks: misspelled keys and missing facts."""
    missing = [f"  missing: {fact}" for fact in answer["missing"]]
    return [*(f"  {remark}" for remark in answer["misspelt"]), *missing]


def _facts(
    pcie_gbs: float | None,
    nvlink_gbs: float | None,
    network_gbs: float | None,
    network_us: float,
    memory_gbs: float | None = None,
    into: str | None = None,
    **others: Any,
) -> ImportOptions:
    """Return the import options, in bytes/s and seconds."""
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
        **others,
    )


def _done(found: ImportedCluster, out: str | None, as_json: bool) -> None:
    """Write or print an imported cluster, and print the notes."""
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
    """Return the devices of a plan's ranks, in order; FXP305 if the cluster lacks one."""
    from fxpart.errors import error
    from fxpart.plan.model import Plan

    found = Plan.load(plan)
    places = found.devices or range(len(found.cluster.devices))
    names = [found.cluster.devices[place].name for place in places]
    known = {device.name for device in cluster.devices}
    if not known.issuperset(names):
        other = next(name for name in names if name not in known)
        why = f"rank {names.index(other)} runs on {other!r}, which the cluster does not have"
        raise error(
            "FXP305", where=plan, why=why, fix=f"use the plan's cluster {found.cluster.name!r}"
        )
    return names


def _text(path: str) -> str:
    """Return a file's text; FXP401 if it cannot be read."""
    from fxpart.errors import error
    from fxpart.files import read_bytes

    try:
        return read_bytes(path).decode("utf-8")
    except (OSError, ValueError) as why:
        raise error("FXP401", where=path, why=str(why), fix="give a readable file") from why


def _write(path: str, value: Any) -> int:
    """Write a value as JSON and return the bytes; FXP603 if that fails."""
    from fxpart.errors import error

    text = output.as_json(value) + "\n"
    try:
        Path(path).write_text(text, encoding="utf-8", newline="\n")
    except OSError as why:
        fix = "give a writable path"
        raise error("FXP603", where=path, why=why.strerror or str(why), fix=fix) from why
    output.note(f"wrote {path}")
    return len(text.encode())
