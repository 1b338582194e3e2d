"""Reproducers: a folder with a failing pipeline and its graph, and the call that reruns it."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import fx

from fxpart.compiler.graph_json import graph_from_json, graph_to_json
from fxpart.errors import error
from fxpart.files import read_bytes

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


class _ReproducerInfo(msgspec.Struct):
    """What pipeline.json has to say."""

    format: int
    pipeline: str = ""


def rerun(folder: Path | str, table: Mapping[str, type[Any]] | None = None) -> fx.GraphModule:
    """Run the pipeline of a reproducer on its graph again: fails as it did, or returns the result.

    table: pass classes by name, by default all that are installed. FXP109 if the folder holds no
    reproducer that this version reads.
    """
    from fxpart.compiler.pass_manager import PassManager

    pipeline, graph = read_reproducer(folder)
    return PassManager(table=table).run(pipeline, graph)


def read_reproducer(folder: Path | str) -> tuple[str, fx.GraphModule]:
    """The pipeline and the graph of a reproducer, which may come from anyone. FXP109."""
    path = Path(folder)
    try:
        about = msgspec.json.decode(read_bytes(path / "pipeline.json"), type=_ReproducerInfo)
        if about.format != FORMAT:
            raise ValueError(f"its format is {about.format}, not {FORMAT}")
        graph = graph_from_json(json.loads(read_bytes(path / "graph.json")))
    except Exception as cause:  # torch has an error of its own for each way to be no graph
        why = f"it holds no reproducer: {type(cause).__name__}: {str(cause)[:500]}"
        fix = "give the folder that an FXP900 error named"
        raise error("FXP109", where=str(path), why=why, fix=fix) from cause
    return about.pipeline, graph
