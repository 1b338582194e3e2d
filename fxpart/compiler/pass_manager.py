"""The pass manager: runs pipelines, verifies around each pass, tells observers, reproduces."""

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
from fxpart.errors import FxpartError, error


@runtime_checkable
class Pass(Protocol):
    """One step of the compiler: a frozen dataclass whose fields are its options.

    name: as written in a pipeline. requires, ensures: the level it takes and the one it leaves.
    run: changes the given graph (the manager hands it a copy) and returns it.
    """

    name: ClassVar[str]
    requires: ClassVar[Level]
    ensures: ClassVar[Level]

    def run(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        """Do the work; a mistake of the user's raises FxpartError."""
        ...


class PassObserver(Protocol):
    """Told of every pass that ran; see :mod:`fxpart.compiler.pass_observers`."""

    def after(self, index: int, item: Pass, graph_module: fx.GraphModule, seconds: float) -> None:
        """Pass number ``index`` (from 0) took ``seconds`` and left this graph, verified."""
        ...


@dataclass(frozen=True)
class PassManager:
    """Runs pipelines.

    table: name -> pass class, :data:`fxpart.passes.PASSES` by default. observers: told after each
    pass. verify: check the level and all invariants around each pass. reproducers: a folder in
    which a failing pass leaves what :func:`fxpart.compiler.reproducer.rerun` needs to fail again.
    """

    table: Mapping[str, type[Any]] | None = None
    observers: Sequence[PassObserver] = field(default=())
    verify: bool = True
    reproducers: Path | None = None

    def run(self, pipeline: str | Sequence[Pass], graph: fx.GraphModule) -> fx.GraphModule:
        """A new graph after all passes; ``graph`` itself is not changed.

        FXP109 for a wrong pipeline, a user's own problems from the passes, FXP900 for our faults.
        """
        passes = self.parse(pipeline)
        _check_order(passes, graph)
        if self.verify:
            _raise_faults("the given graph", find_faults(graph, graph.meta[LEVEL_KEY]))
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
        """The passes of a pipeline's text; passes are returned as they are."""
        if not isinstance(pipeline, str):
            return tuple(pipeline)
        table = self.table
        if table is None:
            from fxpart.passes import all_passes

            table = all_passes()
        return parse_pipeline(pipeline, table)

    def _run_one(self, item: Pass, graph: fx.GraphModule) -> fx.GraphModule:
        """One pass, then the check of what it left."""
        result = item.run(graph)
        result.meta[LEVEL_KEY] = item.ensures
        if self.verify:
            _raise_faults(f"after pass {item.name}", find_faults(result, item.ensures))
        return result

    def _failed(
        self, cause: Exception, rest: Sequence[Pass], before: fx.GraphModule
    ) -> FxpartError:
        """The error to raise: the user's own problems stay as they are, all else is our fault."""
        theirs = isinstance(cause, FxpartError) and cause.code != "FXP900"
        if theirs:
            assert isinstance(cause, FxpartError)
            return cause
        fix = (
            "please report it; PassManager(reproducers=folder) keeps what is needed to see it again"
        )
        if self.reproducers is not None:
            from fxpart.compiler.reproducer import write_reproducer

            folder = write_reproducer(self.reproducers, before, format_pipeline(rest), str(cause))
            fix = f"please report it with the folder {folder}, which runs the pass again"
        if isinstance(cause, FxpartError):
            why = "\n".join(p.why for p in cause.problems)
        else:
            why = f"{type(cause).__name__}: {cause}"
        return error("FXP900", where=f"pass {rest[0].name}", why=why, fix=fix)


def _check_order(passes: Sequence[Pass], graph: fx.GraphModule) -> None:
    """Each pass finds the level it requires; otherwise FXP109 names the pass."""
    level = graph.meta.get(LEVEL_KEY)
    if not isinstance(level, Level):
        raise error(
            "FXP109",
            where="the graph given to the pass manager",
            why="it has no level: it was not made by fxpart.capture",
            fix="give it the graph of fxpart.capture.capture(model)",
        )
    for item in passes:
        if item.requires != level:
            raise error(
                "FXP109",
                where=f"pass {item.name}",
                why=f"it needs a graph at level {item.requires.name.lower()}, and gets one at "
                f"level {level.name.lower()}",
                fix=f"the whole pipeline is {format_pipeline(passes)}; change its order",
            )
        level = item.ensures


def _raise_faults(where: str, found: list[str]) -> None:
    """FXP900 with all faults, if there are any."""
    if found:
        more = [f"and {len(found) - 10} more"] if len(found) > 10 else []
        raise error("FXP900", where=where, why="\n".join(found[:10] + more))
