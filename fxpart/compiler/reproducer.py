"""Reproducers: a folder with a failing pipeline and its graph, and the function that reruns it."""

from __future__ import annotations

import hashlib
import json
import platform
from pathlib import Path

import msgspec
import torch
from torch import fx

from fxpart.compiler.graph_json import graph_from_json, graph_to_json
from fxpart.errors import error
from fxpart.files import read_bytes

FORMAT = 1


def write_reproducer(folder: Path, graph: fx.GraphModule, pipeline: str, fault: str) -> Path:
    """Write ``folder/NAME-DIGEST`` with pipeline.json, graph.json and graph.txt; return its path.

    graph: the graph before the failing pass, which is the first of ``pipeline``. The same failure
    gives the same folder and the same bytes. Raise FXP603 if the files cannot be written.
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
        fix = "choose another folder"
        raise error("FXP603", where=str(path), why=str(cause), fix=fix) from cause
    return path


def readable(graph: fx.GraphModule) -> str:
    """Return the graph as torch.fx prints it, including shapes."""
    graph.recompile()
    return graph.print_readable(print_output=False)


class _ReproducerInfo(msgspec.Struct):
    """Contents of pipeline.json."""

    format: int
    pipeline: str = ""


def read_reproducer(folder: Path | str) -> tuple[str, fx.GraphModule]:
    """Return the pipeline and graph of a reproducer, which may be untrusted; raise FXP109."""
    path = Path(folder)
    try:
        about = msgspec.json.decode(read_bytes(path / "pipeline.json"), type=_ReproducerInfo)
        if about.format != FORMAT:
            raise ValueError(f"its format is {about.format}, not {FORMAT}")
        graph = graph_from_json(json.loads(read_bytes(path / "graph.json")))
    except Exception as cause:  # torch raises many types for invalid graphs
        why = f"it contains no valid reproducer: {type(cause).__name__}: {str(cause)[:500]}"
        fix = "pass the folder that an FXP900 error names"
        raise error("FXP109", where=str(path), why=why, fix=fix) from cause
    return about.pipeline, graph
