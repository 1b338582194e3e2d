"""Status of one process after a call, the counters expected of all, and status messages."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fxpart.errors import FxpartError, Problem, error
from fxpart.runtime.asynchronous.call_status import CallStatus, Counts, convert_float_to_bits
from fxpart.runtime.asynchronous.stage_executor import AsyncStageExecutor
from fxpart.runtime.asynchronous.stage_group import AsyncStageGroup
from fxpart.runtime.batch.batch_reader import MicrobatchSplit
from fxpart.runtime.executor.instruction import StageFailure
from fxpart.runtime.mesh.mesh_ranks import Ranks
from fxpart.runtime.transport.interface import Transport
from fxpart.runtime.weights.weight_update import ANNEALING_PER_STALENESS
from fxpart.schedule.versions import WeightVersionCounters
from fxpart.schedule.weight_modes import WeightMode


def build_call_status(
    stages: AsyncStageGroup, cut: MicrobatchSplit | None, asks: int, options: int
) -> CallStatus:
    """Build the status of this process.

    cut: the call's minibatch, or None for a flush. asks: request bits. options: digest of the
    recorded optimizer options.
    """
    executors = list(stages.executors.values())
    first = executors[0]
    failed = sum(executor.failure is not None for executor in executors)
    loss = None if cut is None or failed else _loss(stages, cut)
    square = sum(
        update.square for (_, mesh_rank), update in stages.updates.items() if mesh_rank == 0
    )  # equal on all mesh ranks
    skipped = 0
    for update in stages.updates.values():
        skipped += update.skipped
        update.skipped = False
        square = 0.0 if update.deferred else square
    return CallStatus(
        failed, skipped,
        int(loss is not None), convert_float_to_bits(0.0 if loss is None else loss.item()),
        first.forwards, first.backwards, first.updates, first.read_last,
        convert_float_to_bits(square),
        int(any(executor.halted for executor in executors)), asks, _busy(executors), options,
    )  # fmt: skip


def compute_expected_counts(
    versions: WeightVersionCounters,
    mode: WeightMode,
    ranks: Ranks,
    transport: Transport,
    forwards: int,
    ended: int | None,
) -> list[Counts]:
    """Compute the counters of each process's first stage by the schedule.

    forwards: microbatches since the last flush. ended: minibatches since then if the pipeline is
    being flushed, else None.
    """
    alone, found = len(transport.local) == transport.ranks, []
    for rank in transport.local[:1] if alone else range(transport.ranks):
        stage = next(k for k, row in enumerate(ranks) if rank in row)
        back = max(0, forwards - versions.ahead[stage] + 1) if ended is None else forwards
        updates = back // versions.every if ended is None else ended
        read = versions.read(mode, stage, forwards - 1)
        found.append((forwards, back, versions.start + updates, read.version))
    return found


def make_stage_problem(failure: StageFailure) -> Problem:
    """Return the problem that every rank raises for a failed stage."""
    fix = "other stages may be one update ahead; restart from the last checkpoint"
    return failure.problem(fix, of=" since the last flush")


def explain_flush_fallback(call: int) -> str:
    """Explain why the pipeline is flushed after every minibatch from now on."""
    return (
        f"gradients of the minibatch of call {call} are not all finite: its update was "
        "skipped, and from now on the pipeline is flushed after every minibatch"
    )


def make_options_error() -> FxpartError:
    """Return the error for optimizer options that differ between ranks."""
    return error(
        "FXP115",
        where="trainer.optimizer",
        why="its options, such as the learning rate, differ between ranks",
        fix="change options and step schedulers on every rank, between the same calls",
    )


def explain_unknown_total(mode: str) -> str:
    """Warn of the default length of the learning-rate discount."""
    return (
        f"FXP109 weights={mode}: the learning rate of each stage is divided by its staleness "
        f"and grows back over total_updates, which is unknown, so that {ANNEALING_PER_STALENESS} "
        "updates per update of the largest staleness are taken. Use "
        "program.trainer(..., total_updates=N) or fit(steps=N)"
    )


def _busy(executors: Sequence[AsyncStageExecutor]) -> int:
    """Return and reset the nanoseconds of CPU computation; 0 on a GPU, where launches return
    early.
    """
    busy = sum(executor.busy for executor in executors)
    for executor in executors:
        busy = busy if executor.placement.device.type == "cpu" else 0
        executor.busy = 0
    return busy


def _loss(stages: AsyncStageGroup, cut: MicrobatchSplit) -> torch.Tensor | None:
    """Sum the losses of the minibatch as a synchronous trainer does; None if another rank has
    them.
    """
    for executor in stages.executors.values():
        if executor.losses:
            total: torch.Tensor | None = None
            for index, (_, loss) in enumerate(sorted(executor.losses.items())):
                part = loss * cut.weights[index]
                total = part if total is None else total + part
            executor.losses.clear()
            return total
    return None
