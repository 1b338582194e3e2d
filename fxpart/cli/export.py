"""``fxpart export``: each rank's program as readable Python, or a plan for another engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fxpart.cli import output
from fxpart.cli.options import (
    CommandLineRequest,
    compile_options,
    json_option,
    load_key,
    sign_option,
)
from fxpart.errors import error
from fxpart.interop.engines import ENGINES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fxpart.interop.engines import EngineConfiguration, EngineSpec
    from fxpart.plan.model import Plan


@click.command()
@compile_options
@click.option("--plan", type=click.Path(), help="Use this plan instead of choosing one.")
@click.option("--output", "-o", "path", type=click.Path(), help="The folder.")
@click.option(
    "--to", "engine", metavar="ENGINE",
    help=f"Write the plan for another engine: {', '.join(ENGINES.builtin)}.",
)  # fmt: skip
@sign_option("Sign the manifest with the secret key in this file.")
@json_option
def command(
    path: str | None, engine: str | None, sign: str | None, as_json: bool, **options: Any
) -> int:
    """Write plan.json, the manifest and each rank's stages and actions into a folder.

    With --to ENGINE, write the configuration of another engine, and list what it cannot express.
    TARGET is then a plan file, or a model to plan; neither a GPU nor the engine is needed.
    """
    request = CommandLineRequest(**options)
    if engine is not None:
        if sign is not None:
            raise error(
                "FXP109", where=f"--sign --to {engine}",
                why="The configuration of another engine is not signed.", fix="Omit --sign.",
            )  # fmt: skip
        spec = ENGINES.lookup(engine, where=f"--to {engine}")
        _export_configuration(spec, request, path, as_json)
        return 0
    if path is None:
        raise error(
            "FXP109", where="fxpart export", why="No folder is given.",
            fix="Pass -o FOLDER, or --to ENGINE for another engine.",
        )  # fmt: skip
    key = load_key(sign)
    program = request.compile(request.workload())
    program.export(path, sign=key)
    _list_files(path, as_json)
    return 0


def _list_files(path: str, as_json: bool) -> None:
    """Print the files of an exported program with their sizes."""
    files = sorted(p for p in Path(path).rglob("*") if p.is_file())
    if as_json:
        output.data(
            {
                "directory": path,
                "files": {str(p.relative_to(path)): p.stat().st_size for p in files},
            }
        )
        return
    output.text(f"wrote {path}:")
    width = max(len(str(file.relative_to(path))) for file in files)
    for file in files:
        size = file.stat().st_size
        output.text(f"  {file.relative_to(path)!s:<{width}}  {size:>8} bytes")


def _export_configuration(
    spec: EngineSpec, request: CommandLineRequest, path: str | None, as_json: bool
) -> None:
    """Write or print the configuration of an engine, its command and what is lost."""
    from fxpart.interop.engines import find_degrees

    made = spec.write(find_degrees(*_find_plan(request)))
    if path is not None:
        _write_files(Path(path), made)
    if as_json:
        output.data(
            {
                "engine": spec.name, "version": spec.version, "files": made.files,
                "launch": made.launch, "lost": made.lost,
            }
        )  # fmt: skip
        return
    for name, text in made.files.items():
        if path is None:
            output.text(f"# {name}\n{text}")
        else:
            output.text(f"wrote {Path(path) / name} ({len(text.encode())} bytes)")
    output.text(f"launch: {made.launch}")
    for sentence in made.lost:
        output.text(f"lost: {sentence}")
    if not made.lost:
        output.text(f"lost: nothing; {spec.name} expresses the whole plan.")


def _find_plan(request: CommandLineRequest) -> tuple[Plan, Sequence[str]]:
    """Return the plan in the file that the target names, or that of the target, with its blocks."""
    from fxpart.plan.model import Plan
    from fxpart.solver.archive import get_problem_path, load_joint_problem

    if not request.target.endswith(".json"):
        from fxpart.compiler import BLOCKS_KEY

        program = request.compile(request.workload())
        return program.plan, [block.name for block in program.prepared.meta[BLOCKS_KEY]]
    plan = Plan.load(request.target)
    costed = get_problem_path(request.target)
    return plan, load_joint_problem(costed).blocks if costed.exists() else ()


def _write_files(folder: Path, made: EngineConfiguration) -> None:
    """Write the files into the folder, which is created; FXP603 if that fails."""
    from fxpart.cli.report import write

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as why:
        raise error(
            "FXP603", where=str(folder), why=why.strerror or str(why),
            fix="Pass a folder that can be written with -o.",
        ) from why  # fmt: skip
    for name, text in made.files.items():
        write(str(folder / name), text)
