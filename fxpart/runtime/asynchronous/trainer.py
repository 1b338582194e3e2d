"""Trainer of an asynchronous pipeline: every stage updates by itself, without flushes."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

import torch

from fxpart.diagnostics.rank_event import ALL, STEP
from fxpart.errors import FxpartError, error
from fxpart.runtime.asynchronous.call_status import CallStatusQueue, convert_bits_to_float
from fxpart.runtime.asynchronous.fit import AsyncFit, check_fit_arguments
from fxpart.runtime.asynchronous.optimizer_facade import StageOptimizerFacade
from fxpart.runtime.asynchronous.options import AsyncOptions
from fxpart.runtime.asynchronous.stage_factory import build_stages, check_program
from fxpart.runtime.asynchronous.stage_graph import AsyncStageGraph
from fxpart.runtime.asynchronous.stage_optimizers import (
    Optimizers,
    check_stage_optimizers,
    make_stage_optimizers,
    record_options,
)
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
from fxpart.runtime.asynchronous.trainer_base import AsyncTrainerBase
from fxpart.runtime.batch.batch_reader import MicrobatchSplit, Shape
from fxpart.runtime.executor.torch_compile import StageCompiler
from fxpart.runtime.fit import FitResult
from fxpart.runtime.gradients.gradient_norm import (
    clip_gradient_norm,
    clip_gradient_value,
    compute_gradient_norms,
)
from fxpart.runtime.optimizer.factory import describe_groups, make_parameter_groups
from fxpart.runtime.optimizer.parameter_groups import Groups
from fxpart.runtime.trainer_options import check_accumulate
from fxpart.runtime.transport.agreement import (
    AllRanksError,
    agree,
    convert_transport_errors,
    encode_problems,
    merge_problems,
)
from fxpart.runtime.weights import StageCounters, StageWeights
from fxpart.schedule.spec import DEFAULT_SCHEDULE
from fxpart.schedule.versions import WeightVersionCounters
from fxpart.schedule.weight_modes import FLUSH, WeightMode


class AsyncTrainer(AsyncTrainerBase):
    """Trains the stages of a program asynchronously; every rank makes one and passes equal batches.

    optimizers: of this process, by stage and mesh rank; ``optimizer`` is the first. updates:
    certain updates of every stage: minibatches begun, less those in flight. last_rows: rows of the
    last global batch. last_grad_norm: newest known global gradient norm, if it is computed.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Create a trainer; see :class:`~fxpart.runtime.trainer_base.TrainerBase` and
        :class:`~fxpart.runtime.asynchronous.options.AsyncOptions`.

        FXP109 for programs that cannot be trained asynchronously: several stages per rank,
        replicated stages, a sharded optimizer.
        """
        self.async_options = AsyncOptions.pop(kwargs)
        self.optimizers: Optimizers = {}
        super().__init__(*args, **kwargs)
        if not isinstance(self.optimizer, StageOptimizerFacade):
            raise error(
                "FXP109", where="an asynchronous trainer", why="no optimizer was given",
                fix="use program.trainer(optimizer=torch.optim.AdamW)",
            )  # fmt: skip
        self._layout = AsyncStageGraph.of(self.spec)
        self.versions = WeightVersionCounters(self._layout.ahead, self.microbatches)
        self.versions.check(self.async_options.mode)
        self._weights, self._stages = build_stages(self)
        self.update_options = record_options(
            self._transport, self.optimizer, self.async_options.scheduler, self._weights.values()
        )
        self._statuses = CallStatusQueue(self._transport)
        self._losses = deque()
        self._shapes: Mapping[str, Shape] = {}
        self._other_shapes: Mapping[str, Shape] = {}
        self._has_in_flight = False
        self._first_call = 0  # call of the first minibatch since the last flush
        self._tied_weights_equal = True  # tied parameters are equal on all stages
        self._last_split: MicrobatchSplit | None = None
        self.always_flush = self.async_options.mode.flush  # flush after every minibatch from now on
        self.listeners: list[Callable[[str], object]] = []
        self._status_wait_mark = self.events.mark("the status of all ranks", "wait", peer=ALL)
        self._step_end_mark = self.events.mark(STEP, "end")
        self.last_rows = 0
        self.last_grad_norm: torch.Tensor | None = None

    # -- training -------------------------------------------------------------------------------

    def step(
        self, batch: Any, accumulate: bool = False, *, local: bool = False
    ) -> torch.Tensor | None:
        """Submit a minibatch and return the newest loss that every rank knows.

        That is the loss of an earlier call (by :attr:`lag`), or None before the first one.
        :meth:`drain` returns the losses that no call has returned. accumulate: unsupported, FXP109:
        each minibatch ends with an update, so use larger batches and more ``microbatches``. local:
        as for a synchronous trainer. A failure on any rank is raised on every rank as the same
        FXP504, :attr:`lag` calls later; training has then ended.
        """
        check_accumulate(accumulate)
        if accumulate:
            raise error(
                "FXP109", where="step(accumulate=True)",
                why="an asynchronous stage updates after each minibatch, and its backwards end in "
                "later calls", fix="use larger batches and more microbatches",
            )  # fmt: skip
        if not self.spec.loss:
            raise error(
                "FXP106",
                where="trainer",
                why="the program has no loss",
                fix="pass loss= to compile()",
            )
        self.submit(batch, local=local)
        return self._losses.pop()[1] if self._losses else None

    def submit(self, batch: Any, *, local: bool = False) -> int:
        """Submit a minibatch and return the number of the call; :meth:`pop_losses` returns
        losses.
        """
        self._local.check_whole()
        self._check_total()
        cut = self._split_batch(batch, local)
        closing = self._needs_flush(cut)
        self._run(cut, closing=closing)
        self.last_rows = sum(cut.rows)
        return self.calls - 1

    def finish(self) -> list[tuple[int, torch.Tensor]]:
        """Flush the pipeline; return the remaining losses with their calls."""
        self._settle()
        return self.pop_losses()

    @property
    def in_flight(self) -> bool:
        """Return whether minibatches are in flight."""
        return self._has_in_flight

    def abort(self, cause: Exception) -> None:
        """Raise ``cause`` on every rank, :attr:`lag` calls later; this rank sends zeros until then.

        Only while minibatches are in flight; this rank must make the same calls as the others.
        """
        assert self._has_in_flight, "no minibatch is in flight"
        next(iter(self._stages.executors.values())).fail(cause)

    def repeat(self) -> int:
        """Make a call without a new batch, after :meth:`abort`; return its number."""
        assert self._last_split is not None, "a minibatch is in flight"
        self._local.check_whole()
        self._run(self._last_split, closing=self._needs_flush(self._last_split))
        return self.calls - 1

    def fit(self, batches: Any, **run: Any) -> FitResult:
        """Train as :meth:`fxpart.runtime.trainer.Trainer.fit`; only evaluation flushes the
        pipeline.

        Callbacks are called in order when the loss of a step is known, some calls later; remaining
        ones when the pipeline is flushed, before an evaluation and at the end. FXP109 for
        accumulate (each minibatch is an update) and scheduler (each stage has its own; pass it to
        :meth:`fxpart.api.Program.trainer`).
        """
        return AsyncFit(self, batches, check_fit_arguments(run)).go()

    def record(self, **_: Any) -> NoReturn:
        """Raise FXP109: asynchronous steps overlap, so a step cannot be recorded."""
        raise error(
            "FXP109", where="record()",
            why="a recording needs separate steps, but asynchronous steps overlap",
            fix=f'record the same plan with weights="{FLUSH}" and schedule="{DEFAULT_SCHEDULE}"',
        )  # fmt: skip

    @property
    def staleness(self) -> tuple[int, ...]:
        """Most updates between a forward and its backward, per stage, with a full pipeline."""
        stages = range(len(self.spec.stages))
        return tuple(0 if self.always_flush else self.versions.gap(stage) for stage in stages)

    @property
    def weight_mode(self) -> WeightMode:
        """The requested weight mode."""
        return self.async_options.mode

    @property
    def needs_total(self) -> bool:
        """Return whether the learning rate is annealed over an unknown number of updates."""
        discounted = self.async_options.mode.discount and max(self.staleness) > 1
        return discounted and any(w.total is None for w in self._weights.values())

    def anneal_until(self, updates: int) -> None:
        """Set the number of updates after which the learning-rate discount ends."""
        for weights in self._weights.values():
            weights.total = updates

    def weights_of(self) -> Mapping[tuple[int, int], StageWeights]:
        """Return the weights of the stages of this process, by stage and mesh rank."""
        return self._weights

    def restart(self, updates: int, calls: int) -> None:
        """Start with an empty pipeline after this many updates and calls."""
        self.versions = replace(self.versions, start=updates)
        self._stages.begin(self.versions)
        self.calls = calls
        self._losses.clear()
        self._reload_options()

    @property
    def counters(self) -> dict[int, StageCounters]:
        """Counters of each stage of this process since the last flush, by stage."""
        return {stage: w.counters() for (stage, _), w in self._weights.items()}

    def report(self) -> tuple[StageReport, ...]:
        """Report staleness, weight versions and prediction errors of all stages.

        Flushes the pipeline; every rank must call it.
        """
        self._settle()
        self._agree_on_call("report")
        mine = [
            StageReport.of(stage, self.staleness[stage], weights)
            for (stage, mesh_rank), weights in self._weights.items()
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
        return min(executor.updates for executor in self._stages.executors.values())

    def close(self) -> None:
        """Flush the pipeline unless training has failed, then close the trainer.

        Posted receives must complete before the transport closes.
        """
        if self._has_in_flight and self._local.broken is None:
            try:
                self._flush()
            except FxpartError:
                pass  # the other ranks have made other calls, and raise the same error
        super().close()

    # -- a call ---------------------------------------------------------------------------------

    def _split_batch(self, batch: Any, local: bool) -> MicrobatchSplit:
        """Split the batch into microbatches, after the ranks have compared it.

        Ranks compare batches when the pipeline is empty. While minibatches are in flight, only
        equal sizes are accepted; a batch of other sizes flushes the pipeline first, which a rank
        that continues detects from the next message.
        """
        if self._has_in_flight:
            try:
                self._apply_user_changes()
                seen = self._feed.look(batch, local=local)
                if seen.shapes == self._shapes:
                    return self._feed.cut(seen, self.microbatches, self._other_shapes)
            except FxpartError:
                pass  # the ranks compare it below
            self._flush()
        read = self._read(self._source, batch, "asynchronous training", local)
        read.confirm()
        cut = read.cut
        self._check_training_rows(read)
        self._shapes, self._other_shapes = read.value.shapes, read.others
        return cut

    def _needs_flush(self, cut: MicrobatchSplit) -> bool:
        """Return whether the pipeline is flushed after this minibatch."""
        few = len(cut.rows) != self.microbatches
        if self._has_in_flight and few:
            self._flush()
        return few or self.always_flush or self.calls < self.async_options.warm_up

    def _run(self, cut: MicrobatchSplit, *, closing: bool) -> None:
        if not self._has_in_flight:
            self._first_call = self.calls
        for update in self._stages.updates.values():
            update.deferred = closing and self._uses_global_gradients
        self.events.step = self.calls + 1
        self._submit_options(self.versions.start + self.calls - self._first_call)
        self._stages.minibatch(self._feed.parts(cut), self._keys(cut), closing=closing)
        self._last_split, self._has_in_flight, self._tied_weights_equal = cut, not closing, False
        call, self.calls = self.calls, self.calls + 1
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
        return self.options.clip_norm is not None or self.options.log_grad_norm

    def _update_globally(self) -> None:
        """Update as a synchronous trainer, after a minibatch that was flushed."""
        with convert_transport_errors(self._transport, "sharing gradients"):
            self._run_on_mesh_ranks(self._shards.finish)
            norms = compute_gradient_norms(self._state, self._shards)
        self.last_grad_norm = norms.total
        if self.options.clip_norm is not None:
            clip_gradient_norm(self._state, self._shards, norms.total, self.options.clip_norm)
        if self.options.clip_value is not None:
            clip_gradient_value(self._state, self._shards, self.options.clip_value)
        for update in self._stages.updates.values():
            update.step()

    def _start_empty(self) -> None:
        """Start with an empty pipeline."""
        self.versions = WeightVersionCounters(self._layout.ahead, self.microbatches, self.updates)
        self._stages.begin(self.versions)
        self._has_in_flight = False

    def _flush(self) -> None:
        """Flush the pipeline and process all statuses."""
        self._stages.flush()
        while self._statuses:
            self._process_status(flushed=True)
        self._send_status(self.calls, None)
        self._process_status(flushed=True)
        self._start_empty()

    def touch(self) -> None:
        """Mark tied parameters as possibly changed."""
        super().touch()
        self._tied_weights_equal = False

    def _settle(self) -> None:
        """Flush the pipeline and refresh tied parameters, for calls that use the whole model."""
        self._local.check_whole()
        if self._has_in_flight:
            self._flush()
        if not self._tied_weights_equal:
            with convert_transport_errors(self._transport, "sharing parameters"):
                refresh_tied_weights(self._state)
            self._tied_weights_equal = True
        self._settle_options()

    # -- inner ----------------------------------------------------------------------------------

    def _compile(self) -> StageCompiler | None:
        check_program(self.spec, self._ranks, self.options, self.async_options)
        return super()._compile()

    def _make_optimizer(self, given: Any, groups: Groups | None) -> torch.optim.Optimizer:
        """Make one optimizer per stage of this process, with equal groups; return the first."""

        def make() -> tuple[Optimizers, str]:
            self._groups = make_parameter_groups(given, groups, self._state.trainable())
            made = make_stage_optimizers(given, self._state, self._groups)
            names = " ".join(",".join(group.names) for group in self._groups)
            check_stage_optimizers(made, self._state, self._shards)
            return made, f"{describe_groups(next(iter(made.values())))} {names}"

        self.optimizers = agree(self._transport, "the optimizer's parameter groups", make)
        return next(iter(self.optimizers.values()))

    def _describe(self, optimizer: Any) -> str:
        return f"{super()._describe(optimizer)} stream {self.async_options.describe()}"

    # -- status of the other ranks ----------------------------------------------------------------

    def _send_status(self, call: int, cut: MicrobatchSplit | None) -> None:
        """Send this process's status. cut: minibatch of the call, or None for a flush."""
        ended = cut is None or not self._has_in_flight
        done = self._stages.done()
        expected = compute_expected_counts(
            self.versions, self.async_options.mode, self._ranks, self._transport, done,
            self.calls - self._first_call if ended else None,
        )  # fmt: skip
        with convert_transport_errors(self._transport, "sending the status of a call"):
            status = build_call_status(
                self._stages, cut, self.request.mine, self.update_options.digest
            )
            self._statuses.send(call, status, expected)

    def _process_status(self, *, flushed: bool = False) -> None:
        """Process the oldest status, at the same call on every rank."""
        self.events.write(self._status_wait_mark)
        with convert_transport_errors(self._transport, "receiving the status of a call"):
            call, statuses, expected = self._statuses.receive()
        if len({status.options for status in statuses}) > 1:
            next(iter(self._stages.executors.values())).fail(make_options_error())
            self._fail(flushed=flushed)
        if any(status.failed for status in statuses):
            self._fail(flushed=flushed)
        self.request.store([status.requests for status in statuses])
        for rank, (status, expected_counts) in enumerate(zip(statuses, expected, strict=True)):
            assert status.halted or status.counts == expected_counts, (
                f"process {rank}, call {call}: (forwards, backwards, updates, version) must be "
                f"{expected_counts}, but are {status.counts}"
            )
        self.pace.note(call, [status.busy for status in statuses])
        for status in statuses:
            if status.has_loss:
                self._losses.append((call, self._as_loss(convert_bits_to_float(status.loss))))
                break
        total = sum(convert_bits_to_float(status.square) for status in statuses) ** 0.5
        if self._uses_global_gradients and 0 < total < math.inf:
            self.last_grad_norm = torch.tensor(total)
            for update in self._stages.updates.values():
                update.known = total
        if any(status.skipped for status in statuses) and not self.always_flush:
            self.always_flush = True
            self._report_fallback(call)
            if not flushed and self._has_in_flight:
                self._flush()

    def _fail(self, *, flushed: bool) -> None:
        """Raise the same error on every rank after all transfers have completed."""
        executors = self._stages.executors.values()
        failures = [r.failure for r in executors if r.failure is not None]
        self._stages.halt()
        if self._has_in_flight and not flushed:
            self._stages.flush()
        with convert_transport_errors(self._transport, "sharing a failure"):
            while self._statuses:
                self._statuses.receive()
            mine = [make_stage_problem(failure) for failure in failures]
            problems = merge_problems(self._transport.exchange_bytes(encode_problems(mine)))
        self._local.broken = problems[0].why
        raise AllRanksError(problems) from (failures[0].cause if failures else None)

    def _report_fallback(self, call: int) -> None:
        text = explain_flush_fallback(call)
        warnings.warn(text, stacklevel=5)
        for listener in self.listeners:
            listener(text)

    def _check_total(self) -> None:
        if self.calls == 0 and self.needs_total:
            warnings.warn(explain_unknown_total(self.async_options.mode.name), stacklevel=4)
