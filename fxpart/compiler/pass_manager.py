"""Pass manager: runs pipelines, verifies around each pass, calls observers, writes reproducers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

from torch import fx

from fxpart.compiler.graph_edit import fork
from fxpart.compiler.graph_verifier import find_faults
from fxpart.compiler.node_annotation import LEVEL_KEY, Level
from fxpart.compiler.pipeline_text import format_pipeline, parse_pipeline
from fxpart.compiler.reproducer import read_reproducer, write_reproducer
from fxpart.errors import FxpartError, error


@runtime_checkable
class Pass(Protocol):
    """One compiler pass: a frozen dataclass whose fields are its options.

    name: as written in a pipeline. requires, ensures: the level of its input and of its result.
    run: changes the given graph (a copy that the manager makes) and returns it.
    """

    name: ClassVar[str]
    requires: ClassVar[Level]
    ensures: ClassVar[Level]

    def run(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        """Transform the graph; raise FxpartError for a mistake of the user."""
        ...


class PassObserver(Protocol):
    """Observer that is called after every pass; see :mod:`fxpart.compiler.pass_observers`."""

    def after(self, index: int, item: Pass, graph_module: fx.GraphModule, seconds: float) -> None:
        """Observe pass number ``index`` (from 0), its time in seconds and its verified result."""
        ...


@dataclass(frozen=True)
class PassManager:
    """Runs pipelines of passes.

    table: name -> pass class, such as :func:`fxpart.passes.all_passes`. observers: called after
    each pass. verify: check the level and all invariants around each pass. reproducers: a folder
    where a failing pass leaves a reproducer for :func:`fxpart.compiler.pass_manager.rerun`.
    """

    table: Mapping[str, type[Any]]
    observers: Sequence[PassObserver] = field(default=())
    verify: bool = True
    reproducers: Path | None = None

    def run(self, pipeline: str | Sequence[Pass], graph: fx.GraphModule) -> fx.GraphModule:
        """Return a new graph after all passes; ``graph`` itself is not changed.

        Raise FXP109 for an invalid pipeline, the passes' own errors for problems of the model, and
        FXP900 for internal errors.
        """
        passes = self.parse(pipeline)
        _check_order(passes, graph)
        if self.verify:
            _raise_faults("the input graph", find_faults(graph, graph.meta[LEVEL_KEY]))
        current = fork(graph)
        for index, item in enumerate(passes):
            started = time.perf_counter()
            before = current if self.reproducers is None else fork(current)
            try:
                current = self._run_one(item, current)
            except Exception as cause:
                raise self._failed(cause, passes[index:], before) from cause
            seconds = time.perf_counter() - started
            for observer in self.observers:
                observer.after(index, item, current, seconds)
        current.recompile()
        return current

    def parse(self, pipeline: str | Sequence[Pass]) -> tuple[Pass, ...]:
        """Return the passes of a pipeline; pass objects are returned unchanged."""
        if not isinstance(pipeline, str):
            return tuple(pipeline)
        return parse_pipeline(pipeline, self.table)

    def _run_one(self, item: Pass, graph: fx.GraphModule) -> fx.GraphModule:
        """Run one pass and verify its result."""
        result = item.run(graph)
        result.meta[LEVEL_KEY] = item.ensures
        if self.verify:
            _raise_faults(f"after pass {item.name}", find_faults(result, item.ensures))
        return result

    def _failed(
        self, cause: Exception, rest: Sequence[Pass], before: fx.GraphModule
    ) -> FxpartError:
        """Return the error to raise: errors of the user's model unchanged, all others as FXP900."""
        theirs = isinstance(cause, FxpartError) and cause.code != "FXP900"
        if theirs:
            assert isinstance(cause, FxpartError)
            return cause
        fix = "please report it; PassManager(reproducers=folder) saves a reproducer for the report"
        if self.reproducers is not None:
            folder = write_reproducer(self.reproducers, before, format_pipeline(rest), str(cause))
            fix = f"please report it with the folder {folder}, which reruns the pass"
        if isinstance(cause, FxpartError):
            why = "\n".join(p.why for p in cause.problems)
        else:
            why = f"{type(cause).__name__}: {cause}"
        return error("FXP900", where=f"pass {rest[0].name}", why=why, fix=fix)


def _check_order(passes: Sequence[Pass], graph: fx.GraphModule) -> None:
    """Raise FXP109 unless each pass gets a graph of the level that it requires."""
    level = graph.meta.get(LEVEL_KEY)
    if not isinstance(level, Level):
        raise error(
            "FXP109",
            where="input graph of the pass manager",
            why="it has no level, so it was not created by fxpart.capture",
            fix="pass the graph that fxpart.capture.capture(model) returns",
        )
    for item in passes:
        if item.requires != level:
            raise error(
                "FXP109",
                where=f"pass {item.name}",
                why=f"it requires a graph at level {item.requires.name.lower()}, but its input is "
                f"at level {level.name.lower()}",
                fix=f"change the order of the pipeline {format_pipeline(passes)}",
            )
        level = item.ensures


def _raise_faults(where: str, found: list[str]) -> None:
    """Raise FXP900 with all violations, if there are any."""
    if found:
        more = [f"and {len(found) - 10} more"] if len(found) > 10 else []
        raise error("FXP900", where=where, why="\n".join(found[:10] + more))


def rerun(folder: Path | str, table: Mapping[str, type[Any]]) -> fx.GraphModule:
    """Rerun a reproducer's pipeline on its graph: fail the same way, or return the result.

    table: pass classes by name. Raise FXP109 if the folder does not contain a reproducer of this
    format.
    """
    pipeline, graph = read_reproducer(folder)
    return PassManager(table=table).run(pipeline, graph)
