"""Checks of what a pipeline without flushes supports."""

from __future__ import annotations

from fxpart.errors import FxpartError, Problem
from fxpart.program.spec import ProgramSpec
from fxpart.runtime.mesh.mesh_ranks import Ranks
from fxpart.runtime.trainer_options import TrainerOptions


def check_async_program(spec: ProgramSpec, ranks: Ranks, options: TrainerOptions) -> None:
    """Raise FXP109 for programs that cannot be trained asynchronously."""
    problems = []
    sharding = spec.sharding
    first_ranks = [row[0] for row in ranks]
    if len(set(first_ranks)) < len(first_ranks):
        problems.append(("several stages per rank", "use one stage per rank"))
    if spec.replicas:
        problems.append(("replicated stages with round-robin routing", 'use mesh="dp=2"'))
    if sharding is not None and sharding.zero:
        problems.append(("a sharded optimizer (ZeRO)", "use zero=0"))
    cut = sharding is not None and any("S(" in s.placements for s in sharding.state.values())
    if cut and (options.clip_norm is not None or options.log_grad_norm):
        problems.append(("gradient norms of sharded parameters", "use clip_value="))
    if problems:
        where = f"weights={options.mode.name}"
        raise FxpartError(
            Problem("FXP109", where, f"an asynchronous trainer does not support {why}", fix)
            for why, fix in problems
        )
