"""Stages compiled by torch.compile: generated code for forward and backward.

The stage modules keep their parameters, and the executor calls them in the same order. A stage is
rejected, with the reason, if its compiled results would differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fxpart.compat import compile_counters, compiler_fault
from fxpart.errors import FxpartError, Problem, error
from fxpart.runtime.mesh.mesh_ranks import MeshRank
from fxpart.schedule.spec import list_schedules

DEFAULT = "inductor"


@dataclass(frozen=True)
class StageCompilation:
    """The result of torch.compile on this process's stages so far.

    graphs: number of compiled graphs: one per stage without graph breaks, and another if a size
    varies. breaks: why a stage became several graphs, with counts; the code in between runs in
    eager mode.
    """

    backend: str
    graphs: int = 0
    breaks: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class StageCompiler:
    """Compiles stages and reports the result. before: torch's counters at the start."""

    backend: str
    before: Mapping[str, Mapping[str, int]]

    def found(self) -> StageCompilation:
        """Return graphs and breaks in this process since the start."""
        now = compile_counters()
        breaks: dict[str, int] = {}
        for why, count in _subtract_counters(now, self.before, "graph_break").items():
            first = why.strip().partition("\n")[0]  # torch appends hints for its own users.
            breaks[first] = breaks.get(first, 0) + count
        graphs = _subtract_counters(now, self.before, "stats").get("unique_graphs", 0)
        return StageCompilation(self.backend, graphs, breaks)


def get_compile_backend(wanted: bool | str) -> str:
    """Return the backend's name, "" if nothing is to be compiled."""
    return (DEFAULT if wanted else "") if isinstance(wanted, bool) else wanted


def compile_stages(
    wanted: bool | str,
    mesh_ranks: Sequence[MeshRank],
    devices: Sequence[torch.device],
    *,
    recompute: Mapping[int, Any],
    splits: bool,
) -> StageCompiler | None:
    """Compile the stage modules of these mesh ranks at their first call; None if disabled.

    wanted: a backend of torch.compile, or whether to use inductor. recompute: by stage, its
    recompute mode. splits: backwards are split. Raises FXP601 if the backend does not work here,
    FXP109 for an unknown backend and for what compiled stages do not support. Random ops stay
    uncompiled and seeded one by one between the graphs, so that they draw the same numbers.
    """
    backend = get_compile_backend(wanted)
    if not backend:
        return None
    if problems := list(_find_problems(backend, mesh_ranks, recompute, splits)):
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
    for mesh_rank in mesh_ranks:
        for module in mesh_rank.modules.values():
            _compile(module, backend)
    return StageCompiler(backend, compile_counters())


def _compile(module: nn.Module, backend: str) -> None:
    """Compile in place: parameters, names and hooks of the module stay.

    Sizes are constants until one varies, and then become symbols: a batch that is split unevenly
    compiles a stage twice, not once per microbatch.
    """
    own = type(module).forward.__globals__
    if "seeded" in own:
        own["seeded"] = torch.compiler.disable(own["seeded"])
    module.compile(backend=backend)


def _find_problems(
    backend: str, mesh_ranks: Sequence[MeshRank], recompute: Mapping[int, Any], splits: bool
) -> list[Problem]:
    """Return why these stages cannot be compiled."""
    where, found = f"compile_stages={backend!r}", []
    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        found.append(
            Problem("FXP109", where, "torch has no such backend", "use one of " + ", ".join(known))
        )
    if mesh_ranks and mesh_ranks[0].spec.sharding is not None:
        why = "the ranks of a stage call collectives inside it, which torch.compile cannot see"
        fix = 'use one rank per stage: constraints={"mesh": "none"}'
        found.append(Problem("FXP109", where, why, fix))
    if recompute:
        why = "a stage that recomputes its activations runs piece by piece"
        found.append(Problem("FXP109", where, why, 'use recompute="none"'))
    if splits:
        why = "the schedule splits backwards, and a compiled backward cannot be split"
        whole = list_schedules(trains=True, flushes=True, splits_backward=False)
        found.append(Problem("FXP109", where, why, f"use schedule {' or '.join(whole)}"))
    return found


def _subtract_counters(
    now: Mapping[str, Mapping[str, int]], before: Mapping[str, Mapping[str, int]], kind: str
) -> dict[str, int]:
    old = before.get(kind, {})
    return {k: n - old.get(k, 0) for k, n in now.get(kind, {}).items() if n > old.get(k, 0)}
