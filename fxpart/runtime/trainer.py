"""The trainer: steps over a partitioned program with the numbers of one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import Any

import torch

from fxpart.diagnostics.rank_event import ALL, STEP
from fxpart.errors import FxpartError, error
from fxpart.runtime.fit import FitLoop, FitOptions, FitResult
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
from fxpart.runtime.transport.agreement import convert_transport_errors
from fxpart.schedule.measured_timeline import CLIP, OPTIMIZER, READ, SPREAD, SUMS, TIES

Phase = tuple[str, Callable[[], None]]


class Trainer(Inference):
    """Trains a program's stages; every rank makes one and gives it the same global batches.

    updates: how many were made, those before a checkpoint that was loaded among them. last_rows:
    rows of the last global batch. last_weight: of that batch in a mean over batches.
    last_grad_norm: the global norm before clipping, after an update
    with ``clip_gradient_norm`` or ``log_grad_norm``; last_group_norms: that of each parameter
    group, by its name or number.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Arguments: see :class:`~fxpart.runtime.trainer_base.TrainerBase`."""
        super().__init__(*args, **kwargs)
        self.updates = 0
        self.last_rows = 0
        self.last_weight = 1.0
        self.last_grad_norm: torch.Tensor | None = None
        self.last_group_norms: dict[str, float] = {}
        self._recorder: Recorder | None = None
        self._phases = self._update_phases()
        self._doing = tuple(do for _, do in self._phases)
        mark = self.events.mark
        self._reads, self._over = mark(READ), mark(STEP, "end")

    # -- training -------------------------------------------------------------------------------

    def step(self, batch: Any, accumulate: bool = False, *, local: bool = False) -> torch.Tensor:
        """One training step on the global batch; the loss (0-d, equal on every rank).

        accumulate: only add to the gradients; the next step without it updates with the mean over
        all of these batches, as one batch of all their rows would: see :meth:`backward`.
        local: the batch has only the rows that this rank needs (see :attr:`needs`). Inputs that
        this rank does not need may be missing, or None.
        Raises FXP105 for a batch that does not fit, FXP501 if ranks have different ones (nothing
        was sent then), FXP503 and FXP504 for a failed transfer or stage (nothing was updated, the
        gradients are dropped).
        """
        closing = not accumulate and self.optimizer is not None
        loss = self._backward(batch, closing=closing, local=local)
        if closing:
            self._update()
        elif not accumulate:
            self.update()  # which refuses a trainer without an optimizer
        return loss

    def backward(self, batch: Any, *, local: bool = False) -> torch.Tensor:
        """Add the batch's gradients to what was accumulated since the last update; the loss.

        :meth:`update` takes the mean over the batches. A batch weighs what its loss is divided by,
        such as its valid tokens; its rows, where that is not one number that follows from inputs.
        """
        return self._backward(batch, closing=False, local=local)

    def _backward(self, batch: Any, *, closing: bool, local: bool) -> torch.Tensor:
        """closing: an update follows, so that gradients which are final may be summed at once."""
        if not self.spec.loss:
            raise error(
                "FXP106", where="trainer", why="the program has no loss", fix="compile with loss="
            )
        if self._recorder is not None:
            self._recorder.begin(self.calls)
        mode = "last training" if closing else "training"
        self.events.step = self.updates + 1
        self.events.write(self._reads)
        weighed = not closing or self._accumulation.batches > 0
        read = self._read(self._source, batch, mode, local, weighed=weighed)
        self._check_training_rows(read)
        if self._stale:
            self.zero_grad()
        try:
            cuts = self._feed.parts(read.cut)
            keys = self._keys(read.cut)
            weight = read.weight
            factor = self._accumulation.factor(weight)
            self._held.closing = closing
            loss = self._engine.run(cuts, keys, train=True, gate=read.confirm, factor=factor).loss
            if self._held.zero == 2 and self.spec.ties:
                with convert_transport_errors(self._transport, "sharing gradients"):
                    self._each_lane(self._held.collect)
        except BaseException:
            if read.confirmed:
                self._conclude()
                self.zero_grad()
            raise
        finally:
            self._held.closing = False
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
        return loss

    def update(self) -> None:
        """Sum over lanes, share ties, average over the accumulated batches, clip, and let the
        optimizer step; then gradients start from zero.

        Does nothing if no batch came since the last update.
        """
        if self.optimizer is None:
            raise error(
                "FXP109",
                where="update()",
                why="the trainer was made without an optimizer",
                fix="program.trainer(optimizer=torch.optim.AdamW)",
            )
        if self._accumulation.batches:
            self._together("update")
            self._update()

    def _update(self) -> None:
        """As :meth:`update`, where the ranks are known to make it together."""
        assert self.optimizer is not None, "an update needs one"
        self.optimizer.check_gradients()
        self.optimizer.apply()
        for do in self._doing:
            do()
        self._stale = True
        self._accumulation.reset()
        self.optimizer.stepped()
        self.updates += 1
        self.events.write(self._over)
        if self._recorder is not None:
            self._recorder.end()

    def _conclude(self) -> None:
        """After a failed step: sums that are under way end on all ranks, so that none is left."""
        if self._held.closing and self._engine.broken is None:
            try:
                with convert_transport_errors(self._transport, "sharing gradients"):
                    self._each_lane(self._held.conclude)
            except FxpartError as cause:
                self._engine.broken = cause.problems[0].why

    def step_by_hand(self) -> None:
        """Update, as ``optimizer.step()``; FXP115 where the gradients were used already."""
        if not self._accumulation.batches and self._stale:
            raise error(
                "FXP115",
                where="optimizer.step()",
                why="trainer.step() has updated with these gradients already",
                fix="leave the call out, or call trainer.backward(batch) in place of trainer.step",
            )
        self.update()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self._held.reset()
        self._stale = False
        self._accumulation.reset()

    def fit(self, batches: Any, **run: Any) -> FitResult:
        """Train over batches, with evaluations, a scheduler, callbacks and early stopping.

        batches: an iterable of global batches, gone through again for each epoch; or a function
        that returns one; an iterator is one epoch. Keywords
        (:class:`~fxpart.runtime.fit.FitOptions`): steps and epochs: how many updates and passes at
        most (one pass if neither is given); accumulate: batches to an update, which takes their
        mean as :meth:`backward` says (the last update of an epoch may have fewer); evaluate:
        batches, evaluated on after each epoch or after ``every`` updates, with metrics (see
        :meth:`evaluate`); scheduler: a scheduler of :attr:`optimizer`, or a function of the
        optimizer that makes one, stepped after each update (``scheduler_every="epoch"``: each
        pass), or with each evaluation's first number (ReduceLROnPlateau); callbacks:
        :class:`~fxpart.runtime.callbacks.Callback` objects, or functions of a StepInfo;
        early_stopping: an EarlyStopping; local: as for :meth:`step`; checkpoints: a folder, or
        :class:`~fxpart.runtime.training_run.options.Checkpoints`, which the run saves itself into
        and goes on from; progress: whether to show a progress bar on stderr, by default on a
        terminal and in a notebook. The logger "fxpart" reports events (INFO) and steps (DEBUG).

        Every rank ends after the same step. What raises on one rank, be it data, a metric or a
        callback, raises the same error on all.
        """
        try:
            given = FitOptions(**run)
        except TypeError as cause:
            known = ", ".join(field.name for field in fields(FitOptions))
            raise error("FXP109", where="fit", why=str(cause), fix=f"one of {known}") from cause
        return FitLoop(self, batches, given.check()).go()

    def record(self, *, baseline: int | None = None) -> AbstractContextManager[Recorder]:
        """Measure the training steps within: what each rank does when, and its memory.

            with trainer.record() as recorder:
                trainer.step(batch)
            recorder.recording.summary()

        Every rank must begin and end it at the same steps; when it ends, what was measured is
        exchanged. If the block raises, nothing is. Recording changes no number of the training.
        baseline: bytes of this process before it held the model, if they are known.
        """
        recorder = Recorder(
            self._transport, self._ranks, self._devices,
            schedule=self.options.schedule_name, microbatches=self.microbatches, baseline=baseline,
        )  # fmt: skip
        return recorder.during(self._attach)

    # -- inner ----------------------------------------------------------------------------------

    def _attach(self, recorder: Recorder | None) -> None:
        if recorder is not None and self._recorder is not None:
            raise error("FXP109", where="record()", why="a recording is under way", fix="end it")
        self._recorder = recorder
        self._engine.record(recorder)
        if self._meshes is not None:
            self._meshes.watch(None if recorder is None else lambda r: recorder.pen(r).meeting)
        self._doing = tuple(
            do if recorder is None else recorder.timed(name, do) for name, do in self._phases
        )

    def _update_phases(self) -> tuple[Phase, ...]:
        phases: tuple[Phase, ...] = (
            (SUMS, lambda: self._gradients(lambda: self._each_lane(self._held.finish))),
            (TIES, lambda: self._gradients(self._share)),
            (CLIP, self._clip),
            (OPTIMIZER, self._optimize),
            (SPREAD, self._spread),
        )
        return tuple((name, self._noted(name, do)) for name, do in phases)

    def _noted(self, name: str, do: Callable[[], None]) -> Callable[[], None]:
        """A phase, and that it began; in all but one the ranks wait for each other."""
        alone = name == OPTIMIZER
        mark = self.events.mark(name) if alone else self.events.mark(name, "wait", peer=ALL)

        def noted() -> None:
            self.events.write(mark)
            do()

        return noted

    def _share(self) -> None:
        self._held.share_rows()
        reduce_replica_gradients(self._state, self._held)
        send_tied_gradients(self._state, self._held)
        for name in self.frozen:
            for parameter in self._state.entries[name].copies.values():
                parameter.grad = self._held.of(parameter).grad = None
                self._held.rows.drop(parameter)

    def _gradients(self, do: Callable[[], object]) -> None:
        with convert_transport_errors(self._transport, "sharing gradients"):
            do()

    def _clip(self) -> None:
        """Average over the accumulated batches, then clip."""
        options = self.options
        if self._accumulation.batches > 1 and self._accumulation.total:
            divide_gradients(self._state, self._held, self._accumulation.total)
        if options.clip_norm is not None or options.log_grad_norm:
            with convert_transport_errors(self._transport, "sharing gradients"):
                norms = compute_gradient_norms(self._state, self._held)
            self.last_grad_norm = norms.total
            self.last_group_norms = {
                group.label(index): norms.of(group.names)
                for index, group in enumerate(self._groups)
            }
            if options.clip_norm is not None:
                clip_gradient_norm(self._state, self._held, norms.total, options.clip_norm)
        if options.clip_value is not None:
            clip_gradient_value(self._state, self._held, options.clip_value)

    def _optimize(self) -> None:
        try:
            for optimizer in self.optimizers.values():
                optimizer.step()
        except Exception as cause:
            if len(self._transport.local) < self._transport.ranks:
                # The other ranks have updated their weights, so that no step can follow this one.
                self._engine.broken = f"{type(cause).__name__} in the optimizer's step: {cause}"
            raise

    def _spread(self) -> None:
        with convert_transport_errors(self._transport, "sharing parameters"):
            self._each_lane(self._held.spread)
