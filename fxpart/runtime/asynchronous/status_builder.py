"""What a process has to say of a call, and what the schedule expects all to say."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fxpart.errors import FxpartError, Problem, error
from fxpart.runtime.asynchronous.call_status import CallStatus, Counts, convert_float_to_bits
from fxpart.runtime.asynchronous.stage_group import AsyncStageGroup
from fxpart.runtime.asynchronous.stage_runner import AsyncStageRunner
from fxpart.runtime.batch.batch_reader import MicrobatchSplit
from fxpart.runtime.executor.instruction import StageFailure
from fxpart.runtime.mesh.mesh_ranks import Ranks
from fxpart.runtime.transport.interface import Transport
from fxpart.schedule.versions import WeightVersionCounters
from fxpart.schedule.weight_modes import WeightMode


def build_call_status(
    stages: AsyncStageGroup, cut: MicrobatchSplit | None, asks: int, options: int
) -> CallStatus:
    """What this process says; cut: the call's minibatch, None of a drain; asks: of all.

    options: the digest of the changes of the optimizer's options.
    """
    runners = list(stages.runners.values())
    first = runners[0]
    failed = sum(runner.failure is not None for runner in runners)
    loss = None if cut is None or failed else _loss(stages, cut)
    square = sum(
        update.square for (_, lane), update in stages.updates.items() if lane == 0
    )  # equal on all lanes
    skipped = 0
    for update in stages.updates.values():
        skipped += update.skipped
        update.skipped = False
        square = 0.0 if update.waits else square
    return CallStatus(
        failed, skipped,
        int(loss is not None), convert_float_to_bits(0.0 if loss is None else loss.item()),
        first.forwards, first.backwards, first.updates, first.read_last,
        convert_float_to_bits(square),
        int(any(runner.halted for runner in runners)), asks, _busy(runners), options,
    )  # fmt: skip


def compute_expected_counts(
    versions: WeightVersionCounters,
    mode: WeightMode,
    ranks: Ranks,
    transport: Transport,
    forwards: int,
    ended: int | None,
) -> list[Counts]:
    """What each process's first stage has done by the schedule.

    forwards: microbatches in the stream so far. ended: after so many minibatches the stream has.
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
    """What a stage's failure is called on every rank."""
    fix = "other stages may have made an update more: go on from the last checkpoint"
    return failure.problem(fix, of=" of the stream")


def explain_flush_fallback(call: int) -> str:
    """Why a stream drains after every minibatch from now on."""
    return (
        f"gradients of the minibatch of call {call} are not all finite: its update was left "
        "out, and from now on the pipeline drains after every minibatch"
    )


def differing_options() -> FxpartError:
    """Ranks have set other options on the optimizer."""
    return error(
        "FXP115",
        where="trainer.optimizer",
        why="its options, such as the learning rate, were changed otherwise on another rank",
        fix="change them, and step schedulers, on every rank alike and between the same calls",
    )


def unknown_total(mode: str) -> str:
    """A warning: the learning rate stays divided by a power of the staleness."""
    return (
        f"FXP109 weights={mode}: the learning rate of a stage is divided by its staleness at "
        "first, and comes back over total_updates, which is not known: it stays divided. Give "
        "program.trainer(..., total_updates=N), or train with fit(steps=N)"
    )


def _busy(runners: Sequence[AsyncStageRunner]) -> int:
    """The host's clock says how long a CPU computed; of a GPU only how long it took to launch."""
    busy = sum(runner.busy for runner in runners)
    for runner in runners:
        busy = busy if runner.seat.device.type == "cpu" else 0
        runner.busy = 0
    return busy


def _loss(stages: AsyncStageGroup, cut: MicrobatchSplit) -> torch.Tensor | None:
    """The minibatch's loss, where it is computed here: as a synchronous trainer sums it."""
    for runner in stages.runners.values():
        if runner.losses:
            total: torch.Tensor | None = None
            for index, (_, loss) in enumerate(sorted(runner.losses.items())):
                part = loss * cut.weights[index]
                total = part if total is None else total + part
            runner.losses.clear()
            return total
    return None
