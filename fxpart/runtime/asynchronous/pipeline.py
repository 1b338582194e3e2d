"""The pipeline without flushes: every stage updates on its own, in the order of a schedule."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from fxpart.diagnostics.rank_event import ALL, STEP
from fxpart.errors import FxpartError
from fxpart.runtime.asynchronous.call_status import CallStatusQueue, convert_bits_to_float
from fxpart.runtime.asynchronous.stage_graph import AsyncStageGraph
from fxpart.runtime.asynchronous.stage_group import AsyncStageGroup
from fxpart.runtime.asynchronous.stage_optimizers import record_options
from fxpart.runtime.asynchronous.stage_report import StageReport, gather_stage_reports
from fxpart.runtime.asynchronous.status_builder import (
    build_call_status,
    compute_expected_counts,
    explain_flush_fallback,
    explain_unknown_total,
    make_options_error,
    make_stage_problem,
)
from fxpart.runtime.asynchronous.tied_parameters import refresh_tied_weights
from fxpart.runtime.asynchronous.unflushed_pipeline import UnflushedPipeline
from fxpart.runtime.batch.batch_agreement import check_repetition
from fxpart.runtime.batch.batch_iterator import make_user_error
from fxpart.runtime.batch.batch_reader import MicrobatchSplit, Shape
from fxpart.runtime.gradients.gradient_norm import clip_both, compute_gradient_norms
from fxpart.runtime.transport.agreement import (
    AllRanksError,
    agree,
    convert_transport_errors,
    encode_problems,
    merge_problems,
)
from fxpart.runtime.weights import StageCounters
from fxpart.schedule.versions import WeightVersionCounters
from fxpart.schedule.weight_modes import WeightMode

if TYPE_CHECKING:
    from fxpart.runtime.trainer import Trainer


class AsyncPipeline(UnflushedPipeline):
    """Runs stages by asynchronous 1F1B.

    versions: the weight versions that computations read. stages: of this process. always_flush:
    whether every minibatch is flushed from now on.
    """

    def __init__(self, trainer: Trainer) -> None:
        """See :class:`~fxpart.runtime.pipeline.Pipeline`.

        FXP109 for a weight mode that does not support the number of microbatches.
        """
        super().__init__(trainer)
        parts, layout = self._parts, AsyncStageGraph.of(self.spec)
        self.versions = WeightVersionCounters(layout.ahead, parts.options.microbatches)
        self.versions.check(self.weight_mode)
        self.stages = AsyncStageGroup(parts, self._optimizers, layout, self.versions)
        self.weights = self.stages.weights
        self.update_options = record_options(
            self._transport, self._facade, parts.options.scheduler, self.stages.weights.values()
        )
        self._statuses = CallStatusQueue(self._transport)
        self._shapes: Mapping[str, Shape] = {}
        self._other_shapes: Mapping[str, Shape] = {}
        self._has_in_flight = False
        self._first_call = 0  # call of the first minibatch since the last flush
        self._tied_weights_equal = True  # tied parameters are equal on all stages
        self._last_split: MicrobatchSplit | None = None
        self.always_flush = self.weight_mode.flush
        self._status_wait_mark = self.events.mark("the status of all ranks", "wait", peer=ALL)
        self._step_end_mark = self.events.mark(STEP, "end")

    # -- training -------------------------------------------------------------------------------

    def step(self, batch: Any, *, accumulate: bool, local: bool) -> torch.Tensor | None:
        """Submit a minibatch; return the newest loss that every rank knows."""
        self.submit(batch, accumulate=accumulate, local=local)
        return self.losses.pop()[1] if self.losses else None

    def submit(self, batch: Any, *, accumulate: bool, local: bool) -> int:
        """Submit a minibatch and return the number of the call."""
        self._refuse_accumulation(accumulate)
        self.require_loss()
        self._local.check_whole()
        if self._parts.calls == 0 and self._needs_total:
            warnings.warn(explain_unknown_total(self.weight_mode.name), stacklevel=5)
        cut = self._split_batch(batch, local)
        closing = self._needs_flush(cut)
        self._run(cut, closing=closing)
        self._trainer.last_rows = sum(cut.rows)
        return self._parts.calls - 1

    def finish(self) -> None:
        """Flush the pipeline."""
        self.settle()

    @property
    def in_flight(self) -> bool:
        """Return whether minibatches are in flight."""
        return self._has_in_flight

    def abort(self, cause: Exception) -> None:
        """Raise ``cause`` on every rank, :attr:`lag` calls later; this rank sends zeros until then.

        Only while minibatches are in flight; this rank must make the same calls as the others.
        """
        assert self._has_in_flight, "no minibatch is in flight"
        next(iter(self.stages.executors.values())).fail(cause)

    def repeat(self) -> int:
        """Make a call without a new batch, after :meth:`abort`; return its number."""
        assert self._last_split is not None, "a minibatch is in flight"
        self._local.check_whole()
        self._run(self._last_split, closing=self._needs_flush(self._last_split))
        return self._parts.calls - 1

    @property
    def staleness(self) -> tuple[int, ...]:
        """Most updates between a forward and its backward, per stage, with a full pipeline."""
        stages = range(len(self.spec.stages))
        return tuple(0 if self.always_flush else self.versions.gap(stage) for stage in stages)

    @property
    def weight_mode(self) -> WeightMode:
        """The requested weight mode."""
        return self._parts.options.mode

    def anneal_over(self, updates: int | None) -> None:
        """End the learning-rate discount after this many more updates, unless its end is known."""
        if not self._has_in_flight and self._needs_total:
            agree(self._transport, "the length of the run", lambda: (True, str(updates)))
            if updates is not None:
                for weights in self.stages.weights.values():
                    weights.total = self.updates + updates

    @property
    def _needs_total(self) -> bool:
        """Whether the learning rate is annealed over an unknown number of updates."""
        discounted = self._parts.options.mode.discount and max(self.staleness) > 1
        return discounted and any(w.total is None for w in self.stages.weights.values())

    def restart(self, updates: int, calls: int) -> None:
        """Start with an empty pipeline after this many updates and calls."""
        self.versions = replace(self.versions, start=updates)
        self.stages.begin(self.versions)
        self._parts.calls = calls
        self.losses.clear()
        self.reload_options()

    @property
    def counters(self) -> dict[int, StageCounters]:
        """Counters of each stage of this process since the last flush, by stage."""
        return {stage: w.counters() for (stage, _), w in self.stages.weights.items()}

    def report(self) -> tuple[StageReport, ...]:
        """Report staleness, weight versions and prediction errors of all stages.

        Flushes the pipeline; every rank must call it.
        """
        self.settle()
        self._agreement.agree("report")
        mine = [
            StageReport.of(
                stage,
                self.staleness[stage],
                weights,
                self.stages.executors[stage, mesh_rank].computed,
            )
            for (stage, mesh_rank), weights in self.stages.weights.items()
            if mesh_rank == 0
        ]
        with convert_transport_errors(self._transport, "sharing reports"):
            return gather_stage_reports(self._transport, mine)

    @property
    def lag(self) -> int:
        """Number of calls after which the loss of a minibatch is known."""
        return 0 if self.always_flush else self.versions.lag

    @property
    def updates(self) -> int:
        """Number of updates that every stage of this process has made."""
        return min(executor.updates for executor in self.stages.executors.values())

    def close(self) -> None:
        """Flush the pipeline unless training has failed.

        Posted receives must complete before the transport closes.
        """
        if self._has_in_flight and self._local.broken is None:
            try:
                self._flush()
            except FxpartError:
                pass  # the other ranks have made other calls, and raise the same error

    # -- a call ---------------------------------------------------------------------------------

    def _split_batch(self, batch: Any, local: bool) -> MicrobatchSplit:
        """Split the batch into microbatches, after the ranks have compared it.

        Ranks compare batches when the pipeline is empty. While minibatches are in flight, only
        equal sizes are accepted; a batch of other sizes flushes the pipeline first, which a rank
        that continues detects from the next message.
        """
        if self._has_in_flight:
            try:
                self._agreement.apply_user_changes()
                seen = self._feed.look(batch, local=local)
                if seen.shapes == self._shapes:
                    return self._feed.cut(
                        seen, self._parts.options.microbatches, self._other_shapes
                    )
            except FxpartError:
                pass  # the ranks compare it below
            self._flush()
        source = self._parts.source
        read = self._agreement.read(source, batch, "asynchronous training", local)
        read.confirm()
        cut = read.cut
        check_repetition(self._transport, source, read)
        self._shapes, self._other_shapes = read.value.shapes, read.others
        return cut

    def _needs_flush(self, cut: MicrobatchSplit) -> bool:
        """Return whether the pipeline is flushed after this minibatch."""
        few = len(cut.rows) != self._parts.options.microbatches
        if self._has_in_flight and few:
            self._flush()
        return few or self.always_flush or self._parts.calls < self._parts.options.warm_up

    def _run(self, cut: MicrobatchSplit, *, closing: bool) -> None:
        if not self._has_in_flight:
            self._first_call = self._parts.calls
        for update in self.stages.updates.values():
            update.deferred = closing and self._uses_global_gradients
        self.events.step = self._parts.calls + 1
        try:
            self._submit_options(self.versions.start + self._parts.calls - self._first_call)
        except Exception as cause:  # Other ranks learn of it as of a failure of a stage.
            next(iter(self.stages.executors.values())).fail(make_user_error("the scheduler", cause))
        self.stages.minibatch(self._feed.parts(cut), self._parts.keys(cut), closing=closing)
        self._last_split, self._has_in_flight, self._tied_weights_equal = cut, not closing, False
        call, self._parts.calls = self._parts.calls, self._parts.calls + 1
        self._send_status(call, cut)
        while len(self._statuses) > (0 if closing else self.versions.lag):
            self._process_status()
        if closing:
            if self._uses_global_gradients:
                self._update_globally()
            self._start_empty()
        self.events.write(self._step_end_mark)

    @property
    def _uses_global_gradients(self) -> bool:
        """Whether an update after a flush needs the gradients of all stages at once."""
        return self._parts.options.clip_norm is not None or self._parts.options.log_grad_norm

    def _update_globally(self) -> None:
        """Update as a synchronous trainer, after a minibatch that was flushed."""
        state, shards, options = self._parts.state, self._parts.shards, self._parts.options
        with convert_transport_errors(self._transport, "sharing gradients"):
            self._parts.run_on_mesh_ranks(shards.finish)
            norms = compute_gradient_norms(state, shards)
        self._trainer.last_grad_norm = norms.total
        clip_both(state, shards, norms.total, options.clip_norm, options.clip_value)
        for update in self.stages.updates.values():
            update.step()

    def _start_empty(self) -> None:
        """Start with an empty pipeline."""
        self.versions = replace(self.versions, start=self.updates)
        self.stages.begin(self.versions)
        self._has_in_flight = False

    def _flush(self) -> None:
        """Flush the pipeline and process all statuses."""
        self.stages.flush()
        while self._statuses:
            self._process_status(flushed=True)
        self._send_status(self._parts.calls, None)
        self._process_status(flushed=True)
        self._start_empty()

    def touch(self) -> None:
        """Note that tied parameters may have changed."""
        super().touch()
        self._tied_weights_equal = False

    def settle(self) -> None:
        """Flush the pipeline and refresh tied parameters, for calls that use the whole model."""
        self._local.check_whole()
        if self._has_in_flight:
            self._flush()
        if not self._tied_weights_equal:
            with convert_transport_errors(self._transport, "sharing parameters"):
                refresh_tied_weights(self._parts.state)
            self._tied_weights_equal = True
        self._settle_options()

    # -- checkpoints ------------------------------------------------------------------------------

    def capture(self) -> dict[str, Any]:
        """Return plain data for a checkpoint, equal on every rank."""
        update = next(iter(self.stages.updates.values()))
        return {**super().capture(), "draining": self.always_flush, "known": update.known}

    def restore(self, values: Mapping[str, Any]) -> None:
        """Restore plain data of a checkpoint; norms if it has as many stages."""
        same = values.get("trainer/stages") == len(self.spec.stages)
        self.always_flush = self.weight_mode.flush or bool(values.get("trainer/draining"))
        for (stage, _), update in self.stages.updates.items():
            update.square = float(values.get(_name_norm(stage), 0.0)) if same else 0.0
            update.known = values.get("trainer/known")
        super().restore(values)

    def gradient_norms(self) -> Iterator[tuple[int, str, float]]:
        """Yield (rank, key, squared norm of the last gradients) of each stage's first mesh rank."""
        for (stage, mesh_rank), update in self.stages.updates.items():
            if mesh_rank == 0:
                yield self._parts.state.rank(stage, mesh_rank), _name_norm(stage), update.square

    # -- status of the other ranks ----------------------------------------------------------------

    def _send_status(self, call: int, cut: MicrobatchSplit | None) -> None:
        """Send this process's status. cut: minibatch of the call, or None for a flush."""
        ended = cut is None or not self._has_in_flight
        done = self.stages.done()
        expected = compute_expected_counts(
            self.versions, self._parts.options.mode, self._parts.ranks, self._transport, done,
            self._parts.calls - self._first_call if ended else None,
        )  # fmt: skip
        with convert_transport_errors(self._transport, "sending the status of a call"):
            status = build_call_status(
                self.stages, cut, self._parts.request.mine, self.update_options.digest
            )
            self._statuses.send(call, status, expected)

    def _process_status(self, *, flushed: bool = False) -> None:
        """Process the oldest status, at the same call on every rank."""
        self.events.write(self._status_wait_mark)
        with convert_transport_errors(self._transport, "receiving the status of a call"):
            call, statuses, expected = self._statuses.receive()
        if any(status.failed for status in statuses):
            self._fail(flushed=flushed)
        if len({status.options for status in statuses}) > 1:
            next(iter(self.stages.executors.values())).fail(make_options_error())
            self._fail(flushed=flushed)
        self._parts.request.store([status.requests for status in statuses])
        for rank, (status, expected_counts) in enumerate(zip(statuses, expected, strict=True)):
            assert status.halted or status.counts == expected_counts, (
                f"process {rank}, call {call}: (forwards, backwards, updates, version) must be "
                f"{expected_counts}, but are {status.counts}"
            )
        self._parts.pace.note(call, [status.busy for status in statuses])
        for status in statuses:
            if status.has_loss:
                self.losses.append((call, self._as_loss(convert_bits_to_float(status.loss))))
                break
        total = sum(convert_bits_to_float(status.square) for status in statuses) ** 0.5
        if self._uses_global_gradients and 0 < total < math.inf:
            self._trainer.last_grad_norm = torch.tensor(total)
            for update in self.stages.updates.values():
                update.known = total
        if any(status.skipped for status in statuses) and not self.always_flush:
            self.always_flush = True
            self._report_fallback(call)
            if not flushed and self._has_in_flight:
                self._flush()

    def _fail(self, *, flushed: bool) -> None:
        """Raise the same error on every rank after all transfers have completed."""
        executors = self.stages.executors.values()
        failures = [r.failure for r in executors if r.failure is not None]
        self.stages.halt()
        if self._has_in_flight and not flushed:
            self.stages.flush()
        with convert_transport_errors(self._transport, "sharing a failure"):
            while self._statuses:
                self._statuses.receive()
            mine = [make_stage_problem(failure) for failure in failures]
            problems = merge_problems(self._transport.exchange_bytes(encode_problems(mine)))
        self._local.broken = problems[0].why
        raise AllRanksError(problems) from (failures[0].cause if failures else None)

    def _report_fallback(self, call: int) -> None:
        warnings.warn(text := explain_flush_fallback(call), stacklevel=5)
        for listener in self.listeners:
            listener(text)


def _name_norm(stage: int) -> str:
    return f"stage/{stage}/square"
