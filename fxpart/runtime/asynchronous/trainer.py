"""The trainer of a stream: every stage updates by itself, and the pipeline does not drain."""

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
from fxpart.runtime.asynchronous.stage_factory import build, check_program
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
    differing_options,
    explain_flush_fallback,
    make_stage_problem,
    unknown_total,
)
from fxpart.runtime.asynchronous.tied_weights import refresh_tied_weights
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
from fxpart.runtime.transport.agreement import (
    AllRanksError,
    agree,
    convert_transport_errors,
    encode_problems,
    merge_problems,
)
from fxpart.runtime.weights import StageCounters, StageWeights
from fxpart.schedule.versions import WeightVersionCounters
from fxpart.schedule.weight_modes import WeightMode


class AsyncTrainer(AsyncTrainerBase):
    """Trains a program's stages asynchronously; every rank makes one and gives it equal batches.

    optimizers: of this process, by stage and lane; ``optimizer`` is the first. updates: of every
    stage that are certain: minibatches begun, less those in flight. last_rows: of the last global
    batch. last_grad_norm: the newest global norm that is known, where it is computed.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Arguments: see :class:`~fxpart.runtime.trainer_base.TrainerBase` and
        :class:`AsyncOptions`.

        FXP109 for what cannot be trained so: several stages a rank, copies of stages, a sharded
        optimizer.
        """
        self.stream = AsyncOptions.taken(kwargs)
        self.optimizers: Optimizers = {}
        super().__init__(*args, **kwargs)
        if not isinstance(self.optimizer, StageOptimizerFacade):
            raise error(
                "FXP109", where="an asynchronous trainer", why="it was given no optimizer",
                fix="program.trainer(optimizer=torch.optim.AdamW)",
            )  # fmt: skip
        self._layout = AsyncStageGraph.of(self.spec)
        self.versions = WeightVersionCounters(self._layout.ahead, self.microbatches)
        self.versions.check(self.stream.mode)
        self._weights, self._stages = build(self)
        self.update_options = record_options(
            self._transport, self.optimizer, self.stream.scheduler, self._weights.values()
        )
        self._words = CallStatusQueue(self._transport)
        self._losses = deque()
        self._shapes: Mapping[str, Shape] = {}
        self._others: Mapping[str, Shape] = {}
        self._streaming = False  # something is in flight
        self._first = 0  # the call that began the stream
        self._spread = True  # holders of shared parameters have their owners' weights
        self._cut: MicrobatchSplit | None = None
        self.draining = self.stream.mode.flush  # after every minibatch, for good
        self.listeners: list[Callable[[str], object]] = []
        self._hears = self.events.mark("hearing of the others", "wait", peer=ALL)
        self._over = self.events.mark(STEP, "end")
        self.last_rows = 0
        self.last_grad_norm: torch.Tensor | None = None

    # -- training -------------------------------------------------------------------------------

    def step(
        self, batch: Any, accumulate: bool = False, *, local: bool = False
    ) -> torch.Tensor | None:
        """One more minibatch into the pipeline; the newest loss that every rank knows.

        That is the loss of an earlier call (by :attr:`lag`), and None before there is one; losses
        that no call has returned come with :meth:`drain`. accumulate: refused, FXP109: each
        minibatch ends with an update, and one update to several batches is ``microbatches``. local:
        as for a synchronous trainer. A failure on any rank is raised on every rank as the same
        FXP504, as many calls later; the training has ended then.
        """
        if accumulate:
            raise error(
                "FXP109", where="step(accumulate=True)",
                why="an asynchronous stage updates after each minibatch, whose backwards end calls "
                "later", fix="give larger batches, and more microbatches",
            )  # fmt: skip
        if not self.spec.loss:
            raise error(
                "FXP106",
                where="trainer",
                why="the program has no loss",
                fix="pass loss= to compile()",
            )
        self.feed(batch, local=local)
        return self._losses.pop()[1] if self._losses else None

    def feed(self, batch: Any, *, local: bool = False) -> int:
        """As :meth:`step`, and losses wait to be :meth:`taken`; the number of this call."""
        self._check_whole()
        self._check_total()
        cut = self._next(batch, local)
        closing = self._closes(cut)
        self._run(cut, closing=closing)
        self.last_rows = sum(cut.rows)
        return self.calls - 1

    def finish(self) -> list[tuple[int, torch.Tensor]]:
        """As :meth:`drain`, with the calls."""
        self._settle()
        return self.taken()

    @property
    def in_flight(self) -> bool:
        """Whether something is."""
        return self._streaming

    def spoil(self, cause: Exception) -> None:
        """Raise it on every rank, as many calls later: this one goes on with zeros until then.

        Only where something is in flight; it has to make the calls that the others make.
        """
        assert self._streaming, "nothing is in flight: tell it directly"
        next(iter(self._stages.runners.values())).fail(cause)

    def again(self) -> int:
        """A call without a batch, after :meth:`spoil`; its number."""
        assert self._cut is not None, "a stream has begun"
        self._check_whole()
        self._run(self._cut, closing=self._closes(self._cut))
        return self.calls - 1

    def fit(self, batches: Any, **run: Any) -> FitResult:
        """As :meth:`fxpart.runtime.trainer.Trainer.fit`; nothing drains but for evaluations.

        Callbacks hear of a step when its loss is known, some calls later, in order; those that are
        left when the pipeline drains, which it does before an evaluation and at the end. FXP109 for
        accumulate (each minibatch is an update) and scheduler (each stage has its own: give it to
        :meth:`fxpart.api.Program.trainer`).
        """
        return AsyncFit(self, batches, check_fit_arguments(run)).go()

    def record(self, **_: Any) -> NoReturn:
        """Refused, FXP109: a recording is of whole steps, and here none ends where it began."""
        raise error(
            "FXP109", where="record()",
            why="a recording is of whole steps; a stream's minibatches end calls after they begin",
            fix='record the same plan with weights="flush" and schedule="1f1b"',
        )  # fmt: skip

    @property
    def staleness(self) -> tuple[int, ...]:
        """Per stage the most updates between a forward and its backward, in a full pipeline."""
        stages = range(len(self.spec.stages))
        return tuple(0 if self.draining else self.versions.gap(stage) for stage in stages)

    @property
    def weight_mode(self) -> WeightMode:
        """As it was asked for."""
        return self.stream.mode

    @property
    def needs_total(self) -> bool:
        """Whether the learning rate is annealed over a number of updates that is not known."""
        discounted = self.stream.mode.discount and max(self.staleness) > 1
        return discounted and any(w.total is None for w in self._weights.values())

    def anneal_until(self, updates: int) -> None:
        """Say after how many updates in all a discount of the learning rate has gone."""
        for weights in self._weights.values():
            weights.total = updates

    def weights_of(self) -> Mapping[tuple[int, int], StageWeights]:
        """Of the stages of this process."""
        return self._weights

    def restart(self, updates: int, calls: int) -> None:
        """Begin a stream after so many updates."""
        self.versions = replace(self.versions, start=updates)
        self._stages.begin(self.versions)
        self.calls = calls
        self._losses.clear()
        self._reload_options()

    @property
    def counters(self) -> dict[int, StageCounters]:
        """What each stage of this process has run and read since the stream began, by stage."""
        return {stage: w.counters() for (stage, _), w in self._weights.items()}

    def report(self) -> tuple[StageReport, ...]:
        """Of all stages: staleness, copies, predictions. Drains; every rank must call it."""
        self._settle()
        self._agree_on_call("report")
        mine = [
            StageReport.of(stage, self.staleness[stage], weights)
            for (stage, lane), weights in self._weights.items()
            if lane == 0
        ]
        with convert_transport_errors(self._transport, "sharing reports"):
            return gather_stage_reports(self._transport, mine)

    @property
    def lag(self) -> int:
        """After how many calls a minibatch's loss is known."""
        return 0 if self.draining else self.versions.lag

    @property
    def updates(self) -> int:
        """Minibatches that every stage of this process has updated with."""
        return min(runner.updates for runner in self._stages.runners.values())

    def close(self) -> None:
        """Finish what is in flight, unless the training has failed; then as any trainer.

        Receives stand ready for messages that a stream has yet to send: they must not be left.
        """
        if self._streaming and self._stages.broken is None:
            try:
                self._drain()
            except FxpartError:
                pass  # the others have parted ways, as they have said themselves
        super().close()

    # -- a call ---------------------------------------------------------------------------------

    def _next(self, batch: Any, local: bool) -> MicrobatchSplit:
        """The batch in microbatches, as all ranks are known to have it.

        They compare it where the pipeline is empty. In a stream it is of the same sizes; a batch of
        others ends the stream first, which ranks that go on hear from the next message.
        """
        if self._streaming:
            try:
                self._apply_user_changes()
                seen = self._feed.look(batch, local=local)
                if seen.shapes == self._shapes:
                    return self._feed.cut(seen, self.microbatches, self._others)
            except FxpartError:
                pass  # all ranks hear of it below
            self._drain()
        read = self._read(self._source, batch, "asynchronous training", local)
        read.confirm()
        cut = read.cut
        self._check_training_rows(read)
        self._shapes, self._others = read.value.shapes, read.others
        return cut

    def _closes(self, cut: MicrobatchSplit) -> bool:
        """Whether the pipeline drains behind the minibatch."""
        few = len(cut.rows) != self.microbatches
        if self._streaming and few:
            self._drain()
        return few or self.draining or self.calls < self.stream.warm_up

    def _run(self, cut: MicrobatchSplit, *, closing: bool) -> None:
        if not self._streaming:
            self._first = self.calls
        for update in self._stages.updates.values():
            update.waits = closing and self._globally
        self.events.step = self.calls + 1
        self._submit_options(self.versions.start + self.calls - self._first)
        self._stages.minibatch(self._feed.parts(cut), self._keys(cut), closing=closing)
        self._cut, self._streaming, self._spread = cut, not closing, False
        call, self.calls = self.calls, self.calls + 1
        self._say(call, cut)
        while len(self._words) > (0 if closing else self.versions.lag):
            self._hear()
        if closing:
            if self._globally:
                self._update_together()
            self._begin()
        self.events.write(self._over)

    @property
    def _globally(self) -> bool:
        """Whether a drained minibatch's update looks at all stages' gradients at once."""
        return self.options.clip_norm is not None or self.options.log_grad_norm

    def _update_together(self) -> None:
        """After a drained minibatch: the update of a synchronous trainer."""
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

    def _begin(self) -> None:
        """The pipeline is empty: the next minibatch begins a stream."""
        self.versions = WeightVersionCounters(self._layout.ahead, self.microbatches, self.updates)
        self._stages.begin(self.versions)
        self._streaming = False

    def _drain(self) -> None:
        """End the stream: all that is in flight, and all that was said."""
        self._stages.drain()
        while self._words:
            self._hear(drained=True)
        self._say(self.calls, None)
        self._hear(drained=True)
        self._begin()

    def touch(self) -> None:
        """As any; holders of shared parameters get what is written to their owners'."""
        super().touch()
        self._spread = False

    def _settle(self) -> None:
        """For calls that look at the whole model: drain, and give holders their owners' weights."""
        self._check_whole()
        if self._streaming:
            self._drain()
        if not self._spread:
            with convert_transport_errors(self._transport, "sharing parameters"):
                refresh_tied_weights(self._state)
            self._spread = True
        self._settle_options()

    # -- inner ----------------------------------------------------------------------------------

    def _compile(self, splits: bool) -> StageCompiler | None:
        check_program(self.spec, self._ranks, self.options, self.stream)
        return super()._compile(splits)

    def _make_optimizer(self, given: Any, groups: Groups | None) -> torch.optim.Optimizer:
        """One for each stage of this process, with the same groups everywhere; the first."""

        def make() -> tuple[Optimizers, str]:
            self._groups = make_parameter_groups(given, groups, self._state.trainable())
            made = make_stage_optimizers(given, self._state, self._groups)
            names = " ".join(",".join(group.names) for group in self._groups)
            check_stage_optimizers(made, self._state, self._shards)
            return made, f"{describe_groups(next(iter(made.values())))} {names}"

        self.optimizers = agree(self._transport, "the optimizer's parameter groups", make)
        return next(iter(self.optimizers.values()))

    def _describe(self, optimizer: Any) -> str:
        return f"{super()._describe(optimizer)} stream {self.stream.describe()}"

    # -- word of the other ranks ------------------------------------------------------------------

    def _say(self, call: int, cut: MicrobatchSplit | None) -> None:
        """Tell the others of a call; cut: its minibatch, None of a drain."""
        ended = cut is None or not self._streaming
        done = self._stages.done()
        expected = compute_expected_counts(
            self.versions, self.stream.mode, self._ranks, self._transport, done,
            self.calls - self._first if ended else None,
        )  # fmt: skip
        with convert_transport_errors(self._transport, "telling the other ranks"):
            word = build_call_status(
                self._stages, cut, self.request.mine, self.update_options.digest
            )
            self._words.say(call, word, expected)

    def _hear(self, *, drained: bool = False) -> None:
        """Act on the oldest word: the same on every rank, at the same call."""
        self.events.write(self._hears)
        with convert_transport_errors(self._transport, "hearing of the other ranks"):
            call, words, expected = self._words.hear()
        if len({word.options for word in words}) > 1:
            next(iter(self._stages.runners.values())).fail(differing_options())
            self._fail(drained=drained)
        if any(word.failed for word in words):
            self._fail(drained=drained)
        self.request.store([word.asks for word in words])
        for rank, (word, counted) in enumerate(zip(words, expected, strict=True)):
            assert word.halted or word.counts == counted, (
                f"process {rank}, call {call}: (forwards, backwards, updates, version) are "
                f"{counted} by the schedule, {word.counts} found"
            )
        self.pace.note(call, [word.busy for word in words])
        for word in words:
            if word.told:
                self._losses.append((call, self._as_loss(convert_bits_to_float(word.loss))))
                break
        total = sum(convert_bits_to_float(word.square) for word in words) ** 0.5
        if self._globally and 0 < total < math.inf:
            self.last_grad_norm = torch.tensor(total)
            for update in self._stages.updates.values():
                update.known = total
        if any(word.skipped for word in words) and not self.draining:
            self.draining = True
            self._tell_of_fallback(call)
            if not drained and self._streaming:
                self._drain()

    def _fail(self, *, drained: bool) -> None:
        """Raise the same error on every rank, with nothing left under way."""
        runners = self._stages.runners.values()
        failures = [r.failure for r in runners if r.failure is not None]
        self._stages.halt()
        if self._streaming and not drained:
            self._stages.drain()
        with convert_transport_errors(self._transport, "sharing a failure"):
            while self._words:
                self._words.hear()
            mine = [make_stage_problem(failure) for failure in failures]
            problems = merge_problems(self._transport.exchange_bytes(encode_problems(mine)))
        self._stages.broken = problems[0].why
        raise AllRanksError(problems) from (failures[0].cause if failures else None)

    def _tell_of_fallback(self, call: int) -> None:
        text = explain_flush_fallback(call)
        warnings.warn(text, stacklevel=5)
        for listener in self.listeners:
            listener(text)

    def _check_total(self) -> None:
        if self.calls == 0 and self.needs_total:
            warnings.warn(unknown_total(self.stream.mode.name), stacklevel=4)

    def _check_whole(self) -> None:
        if self._stages.broken is not None:
            raise error(
                "FXP504", where="this process",
                why=f"an earlier failure ended the training: {self._stages.broken}",
                fix="start the job again from its last checkpoint",
            )  # fmt: skip
