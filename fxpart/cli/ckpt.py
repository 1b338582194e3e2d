"""``fxpart ckpt``: look at checkpoints, compare their digests, convert them, drop old ones."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fxpart.cli import output
from fxpart.cli.options import json_option
from fxpart.errors import FxpartError, Problem, error

if TYPE_CHECKING:
    from fxpart.checkpoint.manifest import CheckpointManifest
    from fxpart.checkpoint.reader import Checkpoint


class CheckpointCommands(click.Group):
    """The verbs of this file, and `convert`, which is loaded when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The verbs in the order in which one needs them."""
        return ["inspect", "verify", "convert", "prune"]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The verb's command, None where there is no such verb."""
        if cmd_name == "convert":
            from fxpart.cli.ckpt_convert import convert

            return convert
        return super().get_command(ctx, cmd_name)


@click.group(cls=CheckpointCommands)
def command() -> None:
    """Look at checkpoints, compare their digests, convert them, drop old ones.

    RUN is a run's folder, its checkpoints folder, or one of the checkpoints in it. Each verb takes
    --json. `fxpart explain checkpoint_format` says what is in one.
    """


@command.command()
@click.argument("run", type=click.Path())
@click.option("--tensors", is_flag=True, help="Each tensor too, and where its parts are.")
@json_option
def inspect(run: str, tensors: bool, as_json: bool) -> int:
    """Say what is in the checkpoints of RUN; the newest in detail.

    Of tensors only sizes and headers are looked at: `fxpart ckpt verify` compares their bytes.
    """
    from fxpart.checkpoint import folder
    from fxpart.checkpoint.reader import Checkpoint

    opened: dict[Path, Checkpoint] = {}
    problems: list[Problem] = []
    there = folder.find_checkpoints(Path(run))
    for path in there:
        try:
            opened[path] = Checkpoint.open(path)
        except FxpartError as fault:
            problems += fault.problems
    shown = next(iter(opened.values()), None)
    if as_json:
        output.data({
            "checkpoints": [_summary(path, opened.get(path)) for path in there],
            "newest": _details(shown, tensors) if shown is not None else None,
            "unfinished": [path.name for path in folder.list_unfinished(there[0].parent)],
            "problems": output.problems(FxpartError(problems)) if problems else [],
        })  # fmt: skip
    else:
        for path in there:
            output.text(_line(path, opened.get(path)))
        if shown is not None:
            output.text("\n".join(["", *_described(shown, tensors)]))
        if problems:
            output.note(str(FxpartError(problems)))
    return 0 if not problems else FxpartError(problems).exit_code


@command.command()
@click.argument("run", type=click.Path())
@json_option
def verify(run: str, as_json: bool) -> int:
    """Compare every tensor of RUN's checkpoints with its digest.

    Exit status 2 where one is damaged; each damaged tensor is named.
    """
    from fxpart.checkpoint import folder
    from fxpart.checkpoint.reader import Checkpoint
    from fxpart.units import size

    problems: list[Problem] = []
    told: list[dict[str, Any]] = []
    for path in folder.find_checkpoints(Path(run)):
        held: int | None = None
        try:
            checkpoint = Checkpoint.open(path)
            held = checkpoint.size
            with _progress(path.name) as progress:
                mine = checkpoint.verify(progress)
        except FxpartError as fault:
            mine = list(fault.problems)
        problems += mine
        told.append({"checkpoint": path.name, "whole": not mine, "bytes": held})
        if not as_json:
            shown = size(held) if held is not None else ""
            output.text(f"{path.name}  {'damaged' if mine else 'whole':<8} {shown}".rstrip())
    if as_json:
        found = output.problems(FxpartError(problems)) if problems else []
        output.data({"checkpoints": told, "problems": found})
    if problems:
        output.note(str(FxpartError(problems)))
        return FxpartError(problems).exit_code
    return 0


@command.command()
@click.argument("run", type=click.Path())
@click.option(
    "--keep", type=click.IntRange(2), default=2, show_default=True, help="How many whole ones stay."
)
@click.option(
    "--unfinished", is_flag=True,
    help="What was begun and not completed too: only while no run uses the folder.",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Say what would go, and keep it.")
@json_option
def prune(run: str, keep: int, unfinished: bool, dry_run: bool, as_json: bool) -> int:
    """Remove all checkpoints of RUN but the newest that are whole.

    Those that stay are compared with their digests first: a damaged one does not count.
    """
    from fxpart.checkpoint import folder

    there = folder.find_checkpoints(Path(run))
    if there == [Path(run)]:
        fix = f"fxpart ckpt prune {there[0].parent}"
        raise error("FXP109", where=run, why="it is one checkpoint, not a folder of them", fix=fix)
    root = there[0].parent
    removed = folder.prune(
        root, keep, generation=1 << 62 if unfinished else 0, verify=True, dry=dry_run
    )
    names = [path.name for path in removed]
    if as_json:
        output.data({"removed": names, "kept": [p.name for p in folder.list_complete(root)]})
    else:
        word = "would go" if dry_run else "removed"
        output.text("\n".join(f"{name} {word}" for name in names) or "nothing to remove")
    return 0


@contextmanager
def _progress(name: str) -> Iterator[Callable[[int, int], None] | None]:
    """How far a comparison is: on a terminal only."""
    if not sys.stderr.isatty():
        yield None
        return
    with output.show_messages(f"comparing {name}", True) as tell:
        assert tell is not None
        yield lambda done, total: tell(f"{done * 100 // max(total, 1)} %")


def _summary(path: Path, checkpoint: Checkpoint | None) -> dict[str, Any]:
    """One checkpoint of several; null fields where it does not open."""
    held = checkpoint.manifest if checkpoint is not None else None
    return {
        "checkpoint": path.name,
        "opens": checkpoint is not None,
        "step": held.step if held is not None else None,
        "world": held.world if held is not None else None,
        "bytes": checkpoint.size if checkpoint is not None else None,
    }


def _line(path: Path, checkpoint: Checkpoint | None) -> str:
    """The same for a person."""
    from fxpart.units import plural, size

    if checkpoint is None:
        return f"{path.name}  damaged"
    held = checkpoint.manifest
    return f"{path.name}  {plural(held.world, 'rank'):<9} {size(checkpoint.size)}"


def _details(checkpoint: Checkpoint, tensors: bool) -> dict[str, Any]:
    """The manifest without its long lists, which ``tensors`` asks for."""
    import msgspec

    held = checkpoint.manifest
    names = ("step", "calls", "seed", "fingerprint", "plan", "world", "generation", "weights")
    found = {name: getattr(held, name) for name in names}
    found |= {"kinds": _kinds(held), "extra": sorted(held.extra), "groups": len(held.groups)}
    if tensors:
        found["tensors"] = msgspec.to_builtins(held.tensors)
    return found


def _kinds(held: CheckpointManifest) -> dict[str, dict[str, int]]:
    """Tensors and bytes by the first word of their keys."""
    from math import prod

    from fxpart.checkpoint.dtypes import itemsize

    found: dict[str, dict[str, int]] = {}
    for key, tensor in held.tensors.items():
        kind = found.setdefault(key.split("/")[0], {"tensors": 0, "parts": 0, "bytes": 0})
        kind["tensors"] += 1
        kind["parts"] += len(tensor.parts)
        kind["bytes"] += prod(tensor.shape) * itemsize(tensor.dtype)
    return found


def _described(checkpoint: Checkpoint, tensors: bool) -> list[str]:
    """One checkpoint in detail."""
    from fxpart.units import plural, size

    held = checkpoint.manifest
    lines = [
        f"{checkpoint.path.name}: {plural(held.step, 'step')}, by {plural(held.world, 'rank')} "
        f"of generation {held.generation}",
        f"  of model   {held.fingerprint}",
        f"  by plan    {held.plan}",
        f"  weights    {held.weights}",
    ]
    for kind, count in _kinds(held).items():
        lines.append(
            f"  {kind:<10} {plural(count['tensors'], 'tensor')} in "
            f"{plural(count['parts'], 'part')}, {size(count['bytes'])}"
        )
    if held.extra:
        lines.append(f"  extra      {', '.join(sorted(held.extra))}")
    for key, tensor in held.tensors.items() if tensors else ():
        lines.append(f"  {key}  {tensor.dtype} {list(tensor.shape)}")
        for part in tensor.parts:
            box = ", ".join("+".join(f"{a}:{b}" for a, b in dim) for dim in part.ranges)
            flat = f" elements {part.flat[0]}:{part.flat[1]}" if part.flat is not None else ""
            lines.append(f"    {part.file}  [{box}]{flat}")
    return lines
