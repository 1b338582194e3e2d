"""Pass observers: print graphs or diffs, dump numbered files, measure times."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from torch import fx

from fxpart.compiler.pass_manager import Pass
from fxpart.compiler.reproducer import readable
from fxpart.errors import error


@dataclass(frozen=True)
class GraphPrinter:
    """Pass the readable graph to ``write`` after each pass, or only after the named passes."""

    write: Callable[[str], object]
    names: frozenset[str] = frozenset()

    def after(self, index: int, item: Pass, graph_module: fx.GraphModule, seconds: float) -> None:
        """Write a heading and the graph."""
        if not self.names or item.name in self.names:
            self.write(f"# after pass {index}: {item.name}\n{readable(graph_module)}\n")


@dataclass
class GraphDiffPrinter:
    """Pass the lines that a pass changed to ``write``, as a unified diff.

    A line is a node's ``format_node()`` with its annotation. The first pass shows its whole graph.
    """

    write: Callable[[str], object]
    last: list[str] = field(default_factory=list)

    def after(self, index: int, item: Pass, graph_module: fx.GraphModule, seconds: float) -> None:
        """Write the difference from the graph after the previous pass."""
        lines = [
            f"{node.format_node() or node.name} {node.meta.get('fxpart', '')}"
            for node in graph_module.graph.nodes
        ]
        changes = list(difflib.unified_diff(self.last, lines, lineterm="", n=0))[2:]
        self.last = lines
        body = "\n".join(changes) if changes else "(no change)"
        self.write(f"# pass {index}: {item.name}\n{body}\n")


@dataclass(frozen=True)
class GraphDumper:
    """Write ``folder/03-key_random.txt`` after each pass; raise FXP603 if that fails."""

    folder: Path

    def after(self, index: int, item: Pass, graph_module: fx.GraphModule, seconds: float) -> None:
        """Write one numbered file."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / f"{index:02d}-{item.name}.txt"
            path.write_text(readable(graph_module) + "\n")
        except OSError as cause:
            where, fix = str(self.folder), "choose another folder"
            raise error("FXP603", where=where, why=str(cause), fix=fix) from cause


@dataclass
class PassTimer:
    """Collect (pass name, seconds, number of nodes) of each pass, in order."""

    rows: list[tuple[str, float, int]] = field(default_factory=list)

    def after(self, index: int, item: Pass, graph_module: fx.GraphModule, seconds: float) -> None:
        """Append one row."""
        self.rows.append((item.name, seconds, len(graph_module.graph.nodes)))

    def text(self) -> str:
        """Return a readable table whose last line is the total."""
        lines = [
            f"{seconds:8.3f} s  {nodes:6d} nodes  {name}" for name, seconds, nodes in self.rows
        ]
        return "\n".join([*lines, f"{sum(r[1] for r in self.rows):8.3f} s  total"])
