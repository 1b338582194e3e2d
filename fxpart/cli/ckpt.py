"""``fxpart ckpt``: inspect, verify, convert and prune checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fxpart.cli import output
from fxpart.cli.options import json_option, load_key, sign_option
from fxpart.errors import FxpartError, Problem, error

if TYPE_CHECKING:
    from fxpart.checkpoint.manifest import CheckpointManifest
    from fxpart.checkpoint.reader import Checkpoint


class CheckpointCommands(click.Group):
    """The verbs of this module, and `convert`, which is imported on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the verbs in the order of typical use."""
        return ["inspect", "verify", "convert", "prune"]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of a verb; None if it is unknown."""
        if cmd_name == "convert":
            from fxpart.cli.ckpt_convert import convert

            return convert
        return super().get_command(ctx, cmd_name)


@click.group(cls=CheckpointCommands)
def command() -> None:
    """Inspect, verify, convert and prune checkpoints.

    RUN is a run's folder, its checkpoints folder, or a checkpoint in it. Each verb takes --json.
    `fxpart explain checkpoint_format` describes the format.
    """


@command.command()
@click.argument("run", type=click.Path())
@click.option("--tensors", is_flag=True, help="List tensors and the locations of their parts.")
@json_option
def inspect(run: str, tensors: bool, as_json: bool) -> int:
    """List the checkpoints of RUN, and show the newest in detail.

    Only sizes and headers of tensors are read; `fxpart ckpt verify` compares their bytes.
    """
    from fxpart.checkpoint import folder
    from fxpart.checkpoint.reader import Checkpoint

    opened: dict[Path, Checkpoint] = {}
    problems: list[Problem] = []
    checkpoints = folder.find_checkpoints(Path(run))
    for path in checkpoints:
        try:
            opened[path] = Checkpoint.open(path)
        except FxpartError as fault:
            problems += fault.problems
    shown = next(iter(opened.values()), None)
    if as_json:
        output.data({
            "checkpoints": [_summary(path, opened.get(path)) for path in checkpoints],
            "newest": _details(shown, tensors) if shown is not None else None,
            "unfinished": [path.name for path in folder.list_unfinished(checkpoints[0].parent)],
            "problems": output.problems(FxpartError(problems)) if problems else [],
        })  # fmt: skip
    else:
        for path in checkpoints:
            output.text(_line(path, opened.get(path)))
        if shown is not None:
            output.text("\n".join(["", *_described(shown, tensors)]))
        if problems:
            output.note(str(FxpartError(problems)))
    return 0 if not problems else FxpartError(problems).exit_code


@command.command()
@click.argument("run", type=click.Path())
@sign_option("Verify signatures with the secret key in this file.")
@json_option
def verify(run: str, sign: str | None, as_json: bool) -> int:
    """Compare all tensors of RUN's checkpoints with their digests.

    Damaged tensors are listed, and the exit status is then 2. It is also 2 if the key has not
    signed a checkpoint, whose tensors are then not compared.
    """
    from fxpart.checkpoint import folder
    from fxpart.checkpoint.reader import Checkpoint
    from fxpart.units import size

    key = load_key(sign)
    problems: list[Problem] = []
    results: list[dict[str, Any]] = []
    for path in folder.find_checkpoints(Path(run)):
        stored: int | None = None
        try:
            checkpoint = Checkpoint.open(path, key)
            stored = checkpoint.size
            with _progress(path.name) as progress:
                mine = checkpoint.verify(progress)
        except FxpartError as fault:
            mine = list(fault.problems)
        problems += mine
        compared = not any(problem.code == "FXP524" for problem in mine)
        unknown = key is None or (compared and stored is None)
        signed = None if unknown else compared
        results.append({
            "checkpoint": path.name, "whole": not mine if compared else None, "signed": signed,
            "bytes": stored,
        })  # fmt: skip
        if not as_json:
            shown = size(stored) if stored is not None else ""
            state = "damaged" if mine else "whole"
            if signed is not None:
                state = f"{state}, signed" if signed else "not signed by the key"
            output.text(f"{path.name}  {state:<{8 if key is None else 15}} {shown}".rstrip())
    if as_json:
        found = output.problems(FxpartError(problems)) if problems else []
        output.data({"checkpoints": results, "problems": found})
    if problems:
        output.note(str(FxpartError(problems)))
        return FxpartError(problems).exit_code
    return 0


@command.command()
@click.argument("run", type=click.Path())
@click.option(
    "--keep",
    type=click.IntRange(2),
    default=2,
    show_default=True,
    help="Number of complete checkpoints to keep.",
)
@click.option(
    "--unfinished", is_flag=True,
    help="Remove incomplete checkpoints, too; only if no run uses the folder.",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="List what would be removed, without removing it.")
@sign_option("Count only checkpoints that the secret key in this file has signed.")
@json_option
def prune(
    run: str, keep: int, unfinished: bool, dry_run: bool, sign: str | None, as_json: bool
) -> int:
    """Remove all checkpoints of RUN except the newest complete ones.

    Checkpoints to keep are verified first; damaged ones do not count.
    """
    from fxpart.checkpoint import folder

    key = load_key(sign)
    checkpoints = folder.find_checkpoints(Path(run))
    if checkpoints == [Path(run)]:
        fix = f"run fxpart ckpt prune {checkpoints[0].parent}"
        raise error(
            "FXP109", where=run, why="it is a checkpoint and not a folder of checkpoints", fix=fix
        )
    root = checkpoints[0].parent
    removed = folder.prune(
        root, keep, generation=1 << 62 if unfinished else 0, verify=True, dry=dry_run, key=key
    )
    names = [path.name for path in removed]
    if as_json:
        output.data({"removed": names, "kept": [p.name for p in folder.list_complete(root)]})
    else:
        action = "would be removed" if dry_run else "removed"
        output.text("\n".join(f"{name} {action}" for name in names) or "nothing to remove")
    return 0


@contextmanager
def _progress(name: str) -> Iterator[Callable[[int, int], None] | None]:
    """Show the progress of a comparison, on a terminal only."""
    if not sys.stderr.isatty():
        yield None
        return
    with output.show_messages(f"comparing {name}", True) as show:
        assert show is not None
        yield lambda done, total: show(f"{done * 100 // max(total, 1)} %")


def _summary(path: Path, checkpoint: Checkpoint | None) -> dict[str, Any]:
    """Return a summary of a checkpoint; fields are null if it cannot be opened."""
    manifest = checkpoint.manifest if checkpoint is not None else None
    return {
        "checkpoint": path.name,
        "opens": checkpoint is not None,
        "step": manifest.step if manifest is not None else None,
        "world": manifest.world if manifest is not None else None,
        "bytes": checkpoint.size if checkpoint is not None else None,
    }


def _line(path: Path, checkpoint: Checkpoint | None) -> str:
    """Return the summary as a line of text."""
    from fxpart.units import plural, size

    if checkpoint is None:
        return f"{path.name}  damaged"
    manifest = checkpoint.manifest
    return f"{path.name}  {plural(manifest.world, 'rank'):<9} {size(checkpoint.size)}"


def _details(checkpoint: Checkpoint, tensors: bool) -> dict[str, Any]:
    """Return the manifest; tensors are included on request."""
    import msgspec

    manifest = checkpoint.manifest
    names = ("step", "calls", "seed", "fingerprint", "plan", "world", "generation", "weights")
    found = {name: getattr(manifest, name) for name in names}
    found |= {
        "kinds": _kinds(manifest),
        "extra": sorted(manifest.extra),
        "groups": len(manifest.groups),
    }
    if tensors:
        found["tensors"] = msgspec.to_builtins(manifest.tensors)
    return found


def _kinds(manifest: CheckpointManifest) -> dict[str, dict[str, int]]:
    """Return the numbers of tensors and bytes by the first part of keys."""
    from math import prod

    from fxpart.checkpoint.dtypes import itemsize

    found: dict[str, dict[str, int]] = {}
    for key, tensor in manifest.tensors.items():
        kind = found.setdefault(key.split("/")[0], {"tensors": 0, "parts": 0, "bytes": 0})
        kind["tensors"] += 1
        kind["parts"] += len(tensor.parts)
        kind["bytes"] += prod(tensor.shape) * itemsize(tensor.dtype)
    return found


def _described(checkpoint: Checkpoint, tensors: bool) -> list[str]:
    """Return the details of a checkpoint as lines of text."""
    from fxpart.units import plural, size

    manifest = checkpoint.manifest
    lines = [
        f"{checkpoint.path.name}: {plural(manifest.step, 'step')}, "
        f"by {plural(manifest.world, 'rank')} of generation {manifest.generation}",
        f"  of model   {manifest.fingerprint}",
        f"  by plan    {manifest.plan}",
        f"  weights    {manifest.weights}",
    ]
    for kind, count in _kinds(manifest).items():
        lines.append(
            f"  {kind:<10} {plural(count['tensors'], 'tensor')} in "
            f"{plural(count['parts'], 'part')}, {size(count['bytes'])}"
        )
    if manifest.extra:
        lines.append(f"  extra      {', '.join(sorted(manifest.extra))}")
    for key, tensor in manifest.tensors.items() if tensors else ():
        lines.append(f"  {key}  {tensor.dtype} {list(tensor.shape)}")
        for part in tensor.parts:
            box = ", ".join("+".join(f"{a}:{b}" for a, b in dim) for dim in part.ranges)
            flat = f" elements {part.flat[0]}:{part.flat[1]}" if part.flat is not None else ""
            lines.append(f"    {part.file}  [{box}]{flat}")
    return lines
