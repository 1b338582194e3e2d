"""Stages compiled by torch.compile: forward and backward of each as generated code.

Everything else stays as it is: the stage modules hold the same parameters, the executor calls them
in the same order. What cannot be compiled with the promised numbers is refused with the reason.
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
    """What torch.compile made of this process's stages up to now.

    graphs: how many were compiled; one for each stage where nothing breaks, and another where a
    size turned out to vary. breaks: why a stage became several graphs, with how often; the code in
    between runs in eager.
    """

    backend: str
    graphs: int = 0
    breaks: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class StageCompiler:
    """Compiles stages and tells what came of it. before: torch's counters when it began."""

    backend: str
    before: Mapping[str, Mapping[str, int]]

    def found(self) -> StageCompilation:
        """Graphs and breaks since it began, in this process."""
        now = compile_counters()
        breaks: dict[str, int] = {}
        for why, count in _since(now, self.before, "graph_break").items():
            first = why.strip().partition("\n")[0]  # torch goes on with hints for its own users
            breaks[first] = breaks.get(first, 0) + count
        graphs = _since(now, self.before, "stats").get("unique_graphs", 0)
        return StageCompilation(self.backend, graphs, breaks)


def get_compile_backend(wanted: bool | str) -> str:
    """The backend's name; "" where nothing is to be compiled."""
    return (DEFAULT if wanted else "") if isinstance(wanted, bool) else wanted


def compile_stages(
    wanted: bool | str,
    lanes: Sequence[MeshRank],
    devices: Sequence[torch.device],
    *,
    recompute: Mapping[int, Any],
    splits: bool,
) -> StageCompiler | None:
    """Have the stage modules of these lanes compiled when they are first called; None if not asked.

    wanted: a backend of torch.compile, or whether to take inductor. recompute: by stage, what does
    not keep its activations. splits: backwards are done in halves. Raises FXP601 where the backend
    cannot work here, FXP109 for an unknown one and for what compiled stages cannot do. Random ops
    stay as they are, seeded one by one between the graphs, so that they draw the same numbers.
    """
    backend = get_compile_backend(wanted)
    if not backend:
        return None
    if problems := list(_faults(backend, lanes, recompute, splits)):
        raise FxpartError(problems)
    kind = "cuda" if any(device.type == "cuda" for device in devices) else "cpu"
    fault = compiler_fault(backend, kind)
    if fault is not None:
        raise error(
            "FXP601",
            where=f"compile_stages={backend!r}",
            why=fault,
            fix="install it, or leave the option out; `fxpart env` tells what works here",
        )
    for lane in lanes:
        for module in lane.modules.values():
            _compile(module, backend)
    return StageCompiler(backend, compile_counters())


def _compile(module: nn.Module, backend: str) -> None:
    """In place: parameters, names and hooks of the module stay.

    Sizes are constants until one varies, and are then symbols: a batch that is cut unevenly
    compiles a stage twice, not once for each microbatch.
    """
    own = type(module).forward.__globals__
    if "seeded" in own:
        own["seeded"] = torch.compiler.disable(own["seeded"])
    module.compile(backend=backend)


def _faults(
    backend: str, lanes: Sequence[MeshRank], recompute: Mapping[int, Any], splits: bool
) -> list[Problem]:
    """Why these stages cannot be compiled."""
    where, found = f"compile_stages={backend!r}", []
    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        found.append(Problem("FXP109", where, "torch knows no such backend", ", ".join(known)))
    if lanes and lanes[0].spec.sharding is not None:
        why = "ranks that share a stage exchange tensors inside it, which torch.compile cannot see"
        found.append(
            Problem("FXP109", where, why, 'one rank a stage: constraints={"mesh": "none"}')
        )
    if recompute:
        why = "a stage that recomputes its activations is run piece by piece"
        found.append(Problem("FXP109", where, why, 'recompute="none"'))
    if splits:
        why = "the schedule does backwards in halves, and a compiled backward is one piece"
        whole = list_schedules(trains=True, flushes=True, splits_backward=False)
        found.append(Problem("FXP109", where, why, f"schedule {' or '.join(whole)}"))
    return found


def _since(
    now: Mapping[str, Mapping[str, int]], before: Mapping[str, Mapping[str, int]], kind: str
) -> dict[str, int]:
    old = before.get(kind, {})
    return {k: n - old.get(k, 0) for k, n in now.get(kind, {}).items() if n > old.get(k, 0)}
