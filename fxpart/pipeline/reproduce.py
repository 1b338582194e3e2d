"""Reproducers: a folder with a failing pipeline and its graph, and the call that reruns it."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import fx

from fxpart.errors import error
from fxpart.pipeline.graph_json import graph_from_json, graph_to_json

FORMAT = 1


def write_reproducer(folder: Path, graph: fx.GraphModule, pipeline: str, fault: str) -> Path:
    """Write ``folder/NAME-DIGEST`` with pipeline.json, graph.json and graph.txt; returns its path.

    graph: as it was before the failing pass, the first of ``pipeline``. The same failure gives the
    same folder and the same bytes. FXP603 if it cannot be written.
    """
    body = json.dumps(graph_to_json(graph), indent=1, sort_keys=True)
    about = {
        "format": FORMAT,
        "pipeline": pipeline,
        "fault": fault,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    digest = hashlib.sha256((body + pipeline).encode()).hexdigest()[:8]
    path = folder / f"{pipeline.split(',')[0].split('{')[0]}-{digest}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / "pipeline.json").write_text(json.dumps(about, indent=1, sort_keys=True) + "\n")
        (path / "graph.json").write_text(body + "\n")
        (path / "graph.txt").write_text(readable(graph) + "\n")
    except OSError as cause:
        raise error("FXP603", where=str(path), why=str(cause), fix="name another folder") from cause
    return path


def readable(graph: fx.GraphModule) -> str:
    """The graph as torch.fx prints it, shapes included."""
    graph.recompile()
    return graph.print_readable(print_output=False)


def rerun(folder: Path | str, table: Mapping[str, type[Any]] | None = None) -> fx.GraphModule:
    """Run the pipeline of a reproducer on its graph again: fails as it did, or returns the result.

    table: pass classes by name, by default all that are installed. FXP109 if the folder holds no
    reproducer that this version reads.
    """
    from fxpart.pipeline.manager import PassManager

    path = Path(folder)
    try:
        about = json.loads((path / "pipeline.json").read_text())
        data = json.loads((path / "graph.json").read_text())
    except (OSError, ValueError) as cause:
        raise error(
            "FXP109",
            where=str(path),
            why=f"it holds no reproducer: {cause}",
            fix="give the folder that an FXP900 error named",
        ) from cause
    if about.get("format") != FORMAT:
        raise error(
            "FXP109", where=str(path), why=f"its format is {about.get('format')}, not {FORMAT}"
        )
    return PassManager(table=table).run(about["pipeline"], graph_from_json(data))
