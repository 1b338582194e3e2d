"""``fxpart launch``: write a job for SLURM, Kubernetes or Ray, and submit it."""

from __future__ import annotations

import shlex
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from fxpart.cli import output
from fxpart.cli.options import json_option
from fxpart.errors import error
from fxpart.launch.schedulers import SCHEDULERS, JobDescription, SchedulerSpec


def _scheduler_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add a flag for each scheduler."""
    for name, spec in reversed(SCHEDULERS.items()):
        command = click.option(
            f"--{name}", "scheduler", flag_value=name, help=f"Write {spec.summary}."
        )(command)
    return command


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
@_scheduler_options
@click.option("--plan", type=click.Path(), help="Take nodes and devices from this plan.")
@click.option("--nodes", type=click.IntRange(1), help="Nodes.  [default: 1]")
@click.option("--devices", type=click.IntRange(1), help="Processes per node.  [default: 1]")
@click.option("--cpu", is_flag=True, help="The processes need no GPUs.")
@click.option("--cpus", type=click.IntRange(1), help="CPU cores of a node (Ray: of a process).")
@click.option("--name", default="fxpart", show_default=True, help="Name of the job.")
@click.option("--run", "folder", default="runs/fxpart", show_default=True, help="Run folder.")
@click.option(
    "--restarts", type=click.IntRange(0), default=3, show_default=True,
    help="Restarts after failures.",
)  # fmt: skip
@click.option("--time", "hours", default="", metavar="HH:MM:SS", help="Time limit.")
@click.option("--port", type=click.IntRange(1024, 65535), default=29500, show_default=True)
@click.option("--image", default="", help="Kubernetes: the container.")
@click.option("--claim", default="", help="Kubernetes: volume claim that has the run folder.")
@click.option(
    "--set", "options", multiple=True, metavar="NAME=VALUE",
    help="Option of the scheduler: partition=gpu, namespace=team; may be repeated.",
)  # fmt: skip
@click.option("--output", "-o", "path", type=click.Path(), help="The job file.")
@click.option("--submit", is_flag=True, help="Submit the job, too.")
@json_option
def command(
    scheduler: str | None,
    plan: str | None,
    cpu: bool,
    path: str | None,
    submit: bool,
    as_json: bool,
    **given: Any,
) -> int:
    """Write a job that runs PROGRAM under torchrun on several nodes.

    PROGRAM is a script or `-m MODULE`, with its arguments, after `--`:
    `fxpart launch --slurm --nodes 2 --devices 8 -- train.py --lr 1e-3`.
    """
    if scheduler is None:
        names = ", ".join(f"--{name}" for name in SCHEDULERS)
        raise error(
            "FXP109",
            where="fxpart launch",
            why="No scheduler is given.",
            fix=f"Pass one of {names}.",
        )
    spec = SCHEDULERS[scheduler]
    nodes, devices, gpus = _find_size(plan, given.pop("nodes"), given.pop("devices"), not cpu)
    job = JobDescription(nodes=nodes, devices=devices, gpus=gpus, **given).check()
    target = Path(path or spec.file)
    _write(target, spec.write(job), job.folder if spec.needs_folder else None)
    submitted = _submit(spec, target) if submit else ""
    shown = shlex.join(spec.submit(str(target)))
    if as_json:
        output.data(
            {
                "file": str(target), "scheduler": scheduler, "nodes": nodes, "devices": devices,
                "submit": shown, "submitted": submitted,
            }
        )  # fmt: skip
        return 0
    output.text(f"wrote {target}: {nodes} x {devices} processes")
    output.text(submitted if submit else f"submit it with: {shown}")
    return 0


def _find_size(
    path: str | None, nodes: int | None, devices: int | None, gpus: bool
) -> tuple[int, int, bool]:
    """Return nodes, processes per node and whether they use GPUs, from the options or a plan."""
    if path is None:
        return nodes or 1, devices or 1, gpus
    from fxpart.plan.model import Plan

    plan = Plan.load(path)
    used = [plan.device(rank) for rank in range(plan.world)]
    counts = Counter(device.host for device in used)
    each = set(counts.values())
    if len(each) > 1:
        listed = ", ".join(f"{host}: {count}" for host, count in counts.items())
        raise error(
            "FXP502", where=path, why=f"The nodes have different numbers of ranks ({listed}), and "
            "torchrun starts as many on each.",
            fix="Plan for devices that are the same on all nodes.",
        )  # fmt: skip
    found = (len(counts), each.pop())
    for option, value, own in zip(("nodes", "devices"), (nodes, devices), found, strict=True):
        if value not in (None, own):
            raise error(
                "FXP502", where=f"--{option} {value}", why=f"The plan has {own}.",
                fix=f"Omit --{option}, or plan again.",
            )  # fmt: skip
    return *found, gpus and any(device.kind == "gpu" for device in used)


def _write(path: Path, text: str, folder: str | None) -> None:
    """Write the job file, and create the run folder; FXP603."""
    from fxpart.cli.report import write

    write(str(path), text)
    if folder is not None:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as why:
            raise error(
                "FXP603", where=folder, why=why.strerror or str(why), fix="Pass another --run."
            ) from why


def _submit(spec: SchedulerSpec, path: Path) -> str:
    """Submit the file and return what the scheduler printed; FXP601 or FXP602 if it fails."""
    command = spec.submit(str(path))
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as why:
        raise error(
            "FXP601", where=command[0], why=f"The command cannot be run: {why.strerror}.",
            fix=f"Install it, or submit {path} on a machine of the cluster.",
        ) from why  # fmt: skip
    if done.returncode:
        raise error(
            "FXP109", where=shlex.join(command), why=(done.stderr or done.stdout).strip(),
            fix="Correct what the scheduler reports; the job file is written.",
        )  # fmt: skip
    return done.stdout.strip()
