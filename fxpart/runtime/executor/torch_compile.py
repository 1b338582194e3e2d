"""Stages compiled by torch.compile: generated code for forward and backward.

The stage modules keep their parameters, and the executor calls them in the same order. A stage is
rejected, with the reason, if its compiled results would differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fxpart.compat import compile_counters, compiler_fault
from fxpart.errors import FxpartError, Problem, error
from fxpart.runtime.executor.compiled_regions import RegionCompiler
from fxpart.runtime.mesh.mesh_ranks import MeshRank

DEFAULT = "inductor"


@dataclass(frozen=True)
class StageCompilation:
    """The result of torch.compile on this process's stages so far.

    graphs: number of compiled graphs: one per distinct region (of layers that occur once, or of
    equal layers), another if a size varies, and others for evaluation. regions: number of distinct
    regions. breaks: why regions are not compiled, with counts; they run in eager mode.
    """

    backend: str
    graphs: int = 0
    regions: int = 0
    breaks: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class StageCompiler:
    """Compiles stages and reports the result. before: torch's counters at the start."""

    regions: RegionCompiler
    before: Mapping[str, Mapping[str, int]]

    def found(self) -> StageCompilation:
        """Return graphs and breaks in this process since the start."""
        now = compile_counters()
        breaks = dict(self.regions.faults)
        for why, count in _subtract_counters(now, self.before, "graph_break").items():
            first = why.strip().partition("\n")[0]  # torch appends hints for its own users.
            breaks[first] = breaks.get(first, 0) + count
        graphs = _subtract_counters(now, self.before, "stats").get("unique_graphs", 0)
        return StageCompilation(self.regions.backend, graphs, self.regions.regions, breaks)


def get_compile_backend(wanted: bool | str) -> str:
    """Return the backend's name, "" if nothing is to be compiled."""
    return (DEFAULT if wanted else "") if isinstance(wanted, bool) else wanted


def compile_stages(
    wanted: bool | str,
    mesh_ranks: Sequence[MeshRank],
    devices: Sequence[torch.device],
    *,
    recompute: Mapping[int, Any],
) -> StageCompiler | None:
    """Compile the stage modules of these mesh ranks at their first call; None if disabled.

    wanted: a backend of torch.compile, or whether to use inductor. recompute: by stage, its
    recompute mode. Raises FXP601 if the backend does not work here, FXP109 for an unknown backend
    and for selective recomputation. Equal blocks share a compiled graph; random ops are in the
    graphs and draw the numbers of eager mode; collectives run between graphs. A split backward runs
    the whole backward of a compiled region in its first half.
    """
    backend = get_compile_backend(wanted)
    if not backend:
        return None
    if problems := list(_find_problems(backend, recompute)):
        raise FxpartError(problems)
    kind = "cuda" if any(device.type == "cuda" for device in devices) else "cpu"
    fault = compiler_fault(backend, kind)
    if fault is not None:
        raise error(
            "FXP601",
            where=f"compile_stages={backend!r}",
            why=fault,
            fix="install it, or leave the option out; `fxpart env` shows what works here",
        )
    regions = RegionCompiler(backend)
    for mesh_rank in mesh_ranks:
        for module in mesh_rank.modules.values():
            regions.install(module)
    return StageCompiler(regions, compile_counters())


def _find_problems(backend: str, recompute: Mapping[int, Any]) -> list[Problem]:
    """Return why these stages cannot be compiled."""
    where, found = f"compile_stages={backend!r}", []
    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        found.append(
            Problem("FXP109", where, "torch has no such backend", "use one of " + ", ".join(known))
        )
    if "selective" in recompute.values():
        why = "selective recomputation stores results of ops inside of compiled regions"
        found.append(Problem("FXP109", where, why, 'use recompute="full" or "none"'))
    return found


def _subtract_counters(
    now: Mapping[str, Mapping[str, int]], before: Mapping[str, Mapping[str, int]], kind: str
) -> dict[str, int]:
    old = before.get(kind, {})
    return {k: n - old.get(k, 0) for k, n in now.get(kind, {}).items() if n > old.get(k, 0)}
