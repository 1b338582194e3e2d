"""The trainer: steps with results identical to single-process training."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import Any

import torch

from fxpart.diagnostics.rank_event import ALL, STEP
from fxpart.errors import FxpartError, error
from fxpart.runtime.fit import FitLoop, FitResult
from fxpart.runtime.fit_options import FitOptions
from fxpart.runtime.gradients.communication import send_tied_gradients
from fxpart.runtime.gradients.gradient_norm import (
    clip_gradient_norm,
    clip_gradient_value,
    compute_gradient_norms,
    divide_gradients,
)
from fxpart.runtime.gradients.stage_replicas import reduce_replica_gradients
from fxpart.runtime.inference import Inference
from fxpart.runtime.monitor.recorder import Recorder
from fxpart.runtime.monitor.tensor_statistics import (
    TensorStatistics,
    compute_gradient_statistics,
)
from fxpart.runtime.optimizer.weight_average import WeightAverage
from fxpart.runtime.trainer_options import check_accumulate
from fxpart.runtime.transport.agreement import convert_transport_errors
from fxpart.schedule.measured_timeline import (
    CLIP,
    GRADIENT_REDUCTION,
    OPTIMIZER,
    PARAMETER_GATHER,
    READ,
    TIED_REDUCTION,
)

Phase = tuple[str, Callable[[], None]]


class Trainer(Inference):
    """Trains a program's stages; every rank creates one and passes the same global batches.

    updates: number of updates, including those before a loaded checkpoint. last_rows: rows of the
    last global batch. last_weight: its weight in a mean over batches. last_grad_norm: the global
    norm before clipping, after an update with ``clip_norm`` or ``log_grad_norm``. last_group_norms:
    the norm of each parameter group, by name or index. log_gradient_statistics: set it to True for
    ``last_gradient_statistics`` of the next updates: those of each parameter's gradient before
    clipping. last_loss: the loss of the last batch.
    accepts_update: called after the gradients of an update are reduced; if it returns False, on
    every rank, they are discarded and nothing is updated. step_total: the ``total`` of updates by
    ``optimizer.step()``, see :meth:`update`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Arguments: see :class:`~fxpart.runtime.trainer_base.TrainerBase`."""
        super().__init__(*args, **kwargs)
        self.updates = 0
        self.last_rows = 0
        self.last_weight = 1.0
        self.last_grad_norm: torch.Tensor | None = None
        self.last_group_norms: dict[str, float] = {}
        self.log_gradient_statistics = False
        self.last_gradient_statistics: dict[str, TensorStatistics] = {}
        self.last_loss: torch.Tensor = torch.zeros(())
        self.accepts_update: Callable[[], bool] | None = None
        self.step_total: float | None = None
        self._average: WeightAverage | None = None
        if self.options.ema is not None:
            self._average = WeightAverage(self._state, self._shards, self.options.ema)
        self._recorder: Recorder | None = None
        self._phases = self._update_phases()
        self._set_phase_calls(tuple(do for _, do in self._phases))
        mark = self.events.mark
        self._reads, self._over = mark(READ), mark(STEP, "end")

    # -- training -------------------------------------------------------------------------------

    def step(self, batch: Any, accumulate: bool = False, *, local: bool = False) -> torch.Tensor:
        """Run one training step on the global batch; return the loss (0-d, equal on every rank).

        accumulate: only accumulate gradients; the next step without it updates with the mean over
        all of these batches, like one batch of all their rows: see :meth:`backward`. local: the
        batch has only this rank's rows (see :attr:`needs`). Inputs that this rank does not need may
        be missing or None. Raises FXP105 for an invalid batch, FXP501 if batches differ between
        ranks (nothing was sent), FXP503 and FXP504 for a failed transfer or stage (nothing was
        updated, gradients are discarded).
        """
        check_accumulate(accumulate)
        closing = not accumulate and self.optimizer is not None
        loss = self._backward(batch, closing=closing, local=local)
        if closing:
            self._update()
        elif not accumulate:
            self.update()  # Raises for a trainer without an optimizer.
        return loss

    def backward(
        self, batch: Any, *, local: bool = False, weight: float | None = None
    ) -> torch.Tensor:
        """Add the batch's gradients to those since the last update; return the loss.

        :meth:`update` averages over the batches. A batch is weighted by the divisor of its loss,
        such as its valid tokens, or by its rows if the divisor cannot be computed from inputs; or
        by ``weight``, which must be equal on every rank.
        """
        return self._backward(batch, closing=False, local=local, weight=weight)

    def _backward(
        self, batch: Any, *, closing: bool, local: bool, weight: float | None = None
    ) -> torch.Tensor:
        """closing: an update follows, so final gradients may be reduced at once."""
        if not self.spec.loss:
            raise error(
                "FXP106",
                where="trainer",
                why="the program has no loss",
                fix="pass loss= to compile()",
            )
        if self._recorder is not None:
            self._recorder.begin(self.calls)
        mode = "last training" if closing else "training"
        self.events.step = self.updates + 1
        self.events.write(self._reads)
        weighed = weight is None and (not closing or self._accumulation.batches > 0)
        mode += "" if weight is None else f" of weight {weight!r}"
        read = self._read(self._source, batch, mode, local, weighed=weighed)
        self._check_training_rows(read)
        if self._stale:
            self.zero_grad()
        try:
            cuts = self._feed.parts(read.cut)
            keys = self._keys(read.cut)
            weight = read.weight if weight is None else weight
            factor = self._accumulation.factor(weight)
            self._shards.closing = closing
            loss = self._engine.run(cuts, keys, train=True, gate=read.confirm, factor=factor).loss
            if self._shards.zero == 2 and self.spec.ties:
                with convert_transport_errors(self._transport, "sharing gradients"):
                    self._run_on_mesh_ranks(self._shards.collect)
        except BaseException:
            if read.confirmed:
                self._conclude()
                self.zero_grad()
            raise
        finally:
            self._shards.closing = False
        self.pace.note(self.updates + 1, self._engine.busy)
        self.calls += 1
        self.last_rows, self.last_weight = sum(read.cut.rows), weight
        self._accumulation.add(weight)
        if self.optimizer is not None:
            self.optimizer.note_gradients()
        self.events.write(self._over)
        if self._recorder is not None:
            self._recorder.end()
        assert loss is not None
        self.last_loss = loss
        return loss

    def update(self, *, total: float | None = None) -> None:
        """Reduce the accumulated gradients, clip them, and step the optimizer.

        Gradients are reduced over mesh ranks, tied parameters and replicas, and averaged over the
        accumulated batches. They start from zero afterwards. Does nothing if no batch came since
        the last update. total: what the weighted gradients of the batches are divided by, instead
        of the sum of the weights.
        """
        if self.optimizer is None:
            raise error(
                "FXP109",
                where="update()",
                why="the trainer was created without an optimizer",
                fix="pass one: program.trainer(optimizer=torch.optim.AdamW)",
            )
        if self._accumulation.batches:
            self._agree_on_call("update" if total is None else f"update by {total!r}")
            self._accumulation.divide_by(total)
            self._update()

    def _update(self) -> None:
        """Update after the ranks have agreed on it."""
        assert self.optimizer is not None, "an update needs an optimizer"
        self.optimizer.check_gradients()
        self.optimizer.apply()
        for do in self._reductions:
            do()
        if self.accepts_update is not None and not self.accepts_update():
            self.zero_grad()
            self.last_grad_norm = None
            self.optimizer.stepped()
            return
        for do in self._phase_calls:
            do()
        if self._average is not None:
            self._average.update()
        self._stale = True
        self._accumulation.reset()
        self.optimizer.stepped()
        self.updates += 1
        self.events.write(self._over)
        if self._recorder is not None:
            self._recorder.end()

    def _conclude(self) -> None:
        """After a failed step, complete pending reductions on all ranks."""
        if self._shards.closing and self._local.broken is None:
            try:
                with convert_transport_errors(self._transport, "sharing gradients"):
                    self._run_on_mesh_ranks(self._shards.conclude)
            except FxpartError as cause:
                self._local.broken = cause.problems[0].why

    def step_by_hand(self) -> None:
        """Update for ``optimizer.step()``; FXP115 if the gradients were already used."""
        if not self._accumulation.batches and self._stale:
            raise error(
                "FXP115",
                where="optimizer.step()",
                why="trainer.step() has already updated with these gradients",
                fix="leave the call out, or use trainer.backward(batch) instead of trainer.step",
            )
        self.update(total=self.step_total)

    def zero_grad(self) -> None:
        """Clear all gradients."""
        self._shards.reset()
        self._stale = False
        self._accumulation.reset()

    def ema_state_dict(self, *, first_only: bool = False) -> dict[str, torch.Tensor]:
        """Return the moving average of the weights (``ema=``) by original name, and all buffers.

        Frozen parameters and buffers are the present ones. Each rank averages its own parts, and
        only this call gathers them; every rank must make it. first_only: only rank 0 receives
        them, others an empty dict. FXP109 without ``ema=``.
        """
        average = self._average
        if average is None:
            raise error(
                "FXP109",
                where="ema_state_dict()",
                why="the trainer was created without a moving average of the weights",
                fix="pass its decay: program.trainer(..., ema=0.999)",
            )
        self._agree_on_call(f"ema_state_dict {first_only}")
        saved = dict(self._state.saved())
        fixed = {name: entry.owned() for name, entry in saved.items() if not entry.trainable}
        with convert_transport_errors(self._transport, "gathering state"):
            found = self._state.gather(fixed, first_only=first_only)
            found |= average.gather(first_only=first_only)
        if first_only and 0 not in self._transport.local:
            return {}
        ordered = {name: found[name] for name in saved}
        ordered.update({name: tensor.detach().clone() for name, tensor in self._unused.items()})
        ordered.update({a: ordered[m] for a, m in self.spec.aliases.items() if m in ordered})
        return ordered

    def fit(self, batches: Any, **run: Any) -> FitResult:
        """Train over batches, with evaluations, a scheduler, callbacks and early stopping.

        batches: an iterable of global batches, iterated again for each epoch; a function that
        returns one; or an iterator, for one epoch. Keywords
        (:class:`~fxpart.runtime.fit.FitOptions`): steps and epochs: maximum number of updates and
        passes (one pass if neither is given). accumulate: batches per update, averaged as in
        :meth:`backward` (the last update of an epoch may have fewer). evaluate: batches to evaluate
        on after each epoch or after ``every`` updates, with metrics (see :meth:`evaluate`).
        scheduler: a scheduler of :attr:`optimizer`, or a function of the optimizer that creates
        one, stepped after each update (``scheduler_every="epoch"``: each pass), or with each
        evaluation's first value (ReduceLROnPlateau). callbacks:
        :class:`~fxpart.runtime.callbacks.Callback` objects, or functions of a StepInfo.
        early_stopping: an EarlyStopping. local: as for :meth:`step`. checkpoints: a folder, or
        :class:`~fxpart.runtime.training_run.options.Checkpoints`, for automatic saving and
        resuming. statistics: updates from one event with statistics of gradients and activations to
        the next, or a :class:`~fxpart.runtime.fit_options.Statistics`. progress: whether to show a
        progress bar on stderr, by default on a terminal and in a notebook. The logger "fxpart"
        reports events (INFO) and steps (DEBUG).

        Every rank ends after the same step. An exception on one rank, in data, a metric or a
        callback, raises the same error on all ranks.
        """
        try:
            given = FitOptions(**run)
        except TypeError as cause:
            known = ", ".join(field.name for field in fields(FitOptions))
            fix = f"use one of {known}"
            raise error("FXP109", where="fit", why=str(cause), fix=fix) from cause
        return FitLoop(self, batches, given.check()).go()

    def record(self, *, baseline: int | None = None) -> AbstractContextManager[Recorder]:
        """Measure the training steps in the context: activities and memory of each rank.

            with trainer.record() as recorder:
                trainer.step(batch)
            recorder.recording.summary()

        Every rank must start and end it at the same steps; the measurements are gathered at the
        end, unless the block raises. Recording does not change results. baseline: bytes of this
        process before it loaded the model, if known.
        """
        recorder = Recorder(
            self._transport, self._ranks, self._devices,
            schedule=self.options.schedule_name, microbatches=self.microbatches, baseline=baseline,
        )  # fmt: skip
        return recorder.during(self._attach)

    # -- internals --------------------------------------------------------------------------------

    def _attach(self, recorder: Recorder | None) -> None:
        if recorder is not None and self._recorder is not None:
            fix = "end it before you start another one"
            raise error("FXP109", where="record()", why="a recording is in progress", fix=fix)
        self._recorder = recorder
        self._engine.record(recorder)
        if self._meshes is not None:
            self._meshes.watch(
                None
                if recorder is None
                else lambda r: recorder.get_rank_recorder(r).measure_collective
            )
        self._set_phase_calls(
            tuple(do if recorder is None else recorder.timed(name, do) for name, do in self._phases)
        )

    def _set_phase_calls(self, calls: tuple[Callable[[], None], ...]) -> None:
        """Set the functions of an update's phases; gradients are complete before the clipping."""
        complete = [name for name, _ in self._phases].index(CLIP)
        self._reductions, self._phase_calls = calls[:complete], calls[complete:]

    def _update_phases(self) -> tuple[Phase, ...]:
        phases: tuple[Phase, ...] = (
            (
                GRADIENT_REDUCTION,
                lambda: self._gradients(lambda: self._run_on_mesh_ranks(self._shards.finish)),
            ),
            (TIED_REDUCTION, lambda: self._gradients(self._send_gradients)),
            (CLIP, self._clip),
            (OPTIMIZER, self._optimize),
            (PARAMETER_GATHER, self._gather_parameters),
        )
        return tuple((name, self._record_start(name, do)) for name, do in phases)

    def _record_start(self, name: str, do: Callable[[], None]) -> Callable[[], None]:
        """Return a phase that first records its start; ranks wait for each other in all but one."""
        alone = name == OPTIMIZER
        mark = self.events.mark(name) if alone else self.events.mark(name, "wait", peer=ALL)

        def recorded() -> None:
            self.events.write(mark)
            do()

        return recorded

    def _send_gradients(self) -> None:
        self._shards.share_rows()
        reduce_replica_gradients(self._state, self._shards)
        send_tied_gradients(self._state, self._shards)
        for name in self.frozen:
            for parameter in self._state.entries[name].copies.values():
                parameter.grad = self._shards.of(parameter).grad = None
                self._shards.rows.drop(parameter)

    def _gradients(self, do: Callable[[], object]) -> None:
        with convert_transport_errors(self._transport, "sharing gradients"):
            do()

    def _clip(self) -> None:
        """Average over the accumulated batches, then clip."""
        options = self.options
        if self._accumulation.is_divided and self._accumulation.total:
            divide_gradients(self._state, self._shards, self._accumulation.total)
        if self.log_gradient_statistics:
            self.last_gradient_statistics = compute_gradient_statistics(self._state, self._shards)
        if options.clip_norm is not None or options.log_grad_norm:
            with convert_transport_errors(self._transport, "sharing gradients"):
                norms = compute_gradient_norms(self._state, self._shards)
            self.last_grad_norm = norms.total
            self.last_group_norms = {
                group.label(index): norms.of(group.names)
                for index, group in enumerate(self._groups)
            }
            if options.clip_norm is not None:
                clip_gradient_norm(self._state, self._shards, norms.total, options.clip_norm)
        if options.clip_value is not None:
            clip_gradient_value(self._state, self._shards, options.clip_value)

    def _optimize(self) -> None:
        try:
            for optimizer in self.optimizers.values():
                optimizer.step()
        except Exception as cause:
            if len(self._transport.local) < self._transport.ranks:
                # The other ranks have updated their weights, so no step can follow this one.
                self._local.broken = f"{type(cause).__name__} in the optimizer's step: {cause}"
            raise

    def _gather_parameters(self) -> None:
        with convert_transport_errors(self._transport, "sharing parameters"):
            self._run_on_mesh_ranks(self._shards.spread)
