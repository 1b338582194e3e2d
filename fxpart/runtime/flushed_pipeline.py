"""The pipeline of a synchronous trainer: flushed at every update."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from fxpart.diagnostics.rank_event import ALL, STEP
from fxpart.errors import FxpartError, error
from fxpart.runtime.gradients.communication import send_tied_gradients
from fxpart.runtime.gradients.gradient_norm import (
    clip_both,
    compute_gradient_norms,
    divide_gradients,
)
from fxpart.runtime.gradients.stage_replicas import reduce_replica_gradients
from fxpart.runtime.monitor.recorder import Recorder
from fxpart.runtime.monitor.tensor_statistics import compute_gradient_statistics
from fxpart.runtime.pipeline import Pipeline
from fxpart.runtime.transport.agreement import convert_transport_errors
from fxpart.schedule.measured_timeline import (
    CLIP,
    GRADIENT_REDUCTION,
    OPTIMIZER,
    PARAMETER_GATHER,
    READ,
    TIED_REDUCTION,
)
from fxpart.schedule.weight_modes import FLUSH, WeightMode, weight_mode

if TYPE_CHECKING:
    from fxpart.runtime.asynchronous.stage_report import StageReport
    from fxpart.runtime.trainer import Trainer

Phase = tuple[str, Callable[[], None]]


class FlushedPipeline(Pipeline):
    """Runs steps with results identical to single-process training."""

    def __init__(self, trainer: Trainer) -> None:
        """See :class:`~fxpart.runtime.pipeline.Pipeline`."""
        super().__init__(trainer)
        self._updates = 0
        self._recorder: Recorder | None = None
        self._phases = self._update_phases()
        self._set_phase_calls(tuple(do for _, do in self._phases))
        mark = self.events.mark
        self._reads, self._over = mark(READ), mark(STEP, "end")

    @property
    def updates(self) -> int:
        """Number of updates, including those before a loaded checkpoint."""
        return self._updates

    @property
    def lag(self) -> int:
        """0: the loss of a minibatch is known after its call."""
        return 0

    @property
    def staleness(self) -> tuple[int, ...]:
        """0 on every stage."""
        return (0,) * len(self.spec.stages)

    @property
    def weight_mode(self) -> WeightMode:
        """The newest weights, after a flush."""
        return weight_mode(FLUSH)

    @property
    def in_flight(self) -> bool:
        """False: every call ends with an empty pipeline."""
        return False

    def step(self, batch: Any, *, accumulate: bool, local: bool) -> torch.Tensor:
        """Run a minibatch, and update unless gradients are accumulated; return its loss."""
        closing = not accumulate and self._trainer.optimizer is not None
        loss = self._backward(batch, closing=closing, local=local)
        if closing:
            self._update()
        elif not accumulate:
            self.update(total=None)  # Raises for a trainer without an optimizer.
        return loss

    def submit(self, batch: Any, *, accumulate: bool, local: bool) -> int:
        """Run a minibatch and keep its loss; return the number of the call."""
        loss = self.step(batch, accumulate=accumulate, local=local)
        self.losses.append((self._trainer.calls - 1, loss))
        return self._trainer.calls - 1

    def settle(self) -> None:
        """Do nothing: the pipeline is empty."""

    def finish(self) -> None:
        """Do nothing: the pipeline is empty."""

    def restart(self, updates: int, calls: int) -> None:
        """Continue after so many updates and calls, without gradients."""
        self.zero_grad()
        self._updates, self._trainer.calls = updates, calls

    def skip_update(self) -> None:
        """Count an update that was skipped."""
        self._updates += 1

    def report(self) -> tuple[StageReport, ...]:
        """Return nothing: all stages have the same weights."""
        return ()

    def reload_options(self) -> None:
        """Use the options that were loaded into the optimizers."""
        assert self._trainer.optimizer is not None, "there is no optimizer"
        self._trainer.optimizer.reload()

    def zero_grad(self) -> None:
        """Clear all gradients."""
        self._shards.reset()
        self._trainer._stale = False
        self._trainer._accumulation.reset()

    def record(self, baseline: int | None) -> AbstractContextManager[Recorder]:
        """Measure the training steps in the context."""
        trainer = self._trainer
        recorder = Recorder(
            self._transport, trainer._ranks, trainer._devices,
            schedule=trainer.options.schedule_name, microbatches=trainer.microbatches,
            baseline=baseline,
        )  # fmt: skip
        return recorder.during(self._attach)

    def backward(self, batch: Any, *, local: bool, weight: float | None) -> torch.Tensor:
        """Add the batch's gradients to those since the last update; return the loss."""
        return self._backward(batch, closing=False, local=local, weight=weight)

    def _backward(
        self, batch: Any, *, closing: bool, local: bool, weight: float | None = None
    ) -> torch.Tensor:
        """closing: an update follows, so final gradients may be reduced at once."""
        self.require_loss()
        if self._recorder is not None:
            self._recorder.begin(self._trainer.calls)
        mode = "last training" if closing else "training"
        self.events.step = self.updates + 1
        self.events.write(self._reads)
        weighed = weight is None and (not closing or self._trainer._accumulation.batches > 0)
        mode += "" if weight is None else f" of weight {weight!r}"
        read = self._trainer._read(self._source, batch, mode, local, weighed=weighed)
        self._trainer._check_training_rows(read)
        if self._trainer._stale:
            self.zero_grad()
        try:
            cuts = self._feed.parts(read.cut)
            keys = self._trainer._keys(read.cut)
            weight = read.weight if weight is None else weight
            factor = self._trainer._accumulation.factor(weight)
            self._shards.closing = closing
            engine = self._trainer._engine
            loss = engine.run(cuts, keys, train=True, gate=read.confirm, factor=factor).loss
            if self._shards.zero == 2 and self.spec.ties:
                with convert_transport_errors(self._transport, "sharing gradients"):
                    self._trainer._run_on_mesh_ranks(self._shards.collect)
        except BaseException:
            if read.confirmed:
                self._conclude()
                self.zero_grad()
            raise
        finally:
            self._shards.closing = False
        self._trainer.pace.note(self.updates + 1, self._trainer._engine.busy)
        self._trainer.calls += 1
        self._trainer.last_rows, self._trainer.last_weight = sum(read.cut.rows), weight
        self._trainer._accumulation.add(weight)
        if self._trainer.optimizer is not None:
            self._trainer.optimizer.note_gradients()
        self.events.write(self._over)
        if self._recorder is not None:
            self._recorder.end()
        assert loss is not None
        self._trainer.last_loss = loss
        return loss

    def update(self, *, total: float | None) -> None:
        """Update with the accumulated gradients, after the ranks have agreed on it."""
        if self._trainer.optimizer is None:
            raise error(
                "FXP109",
                where="update()",
                why="the trainer was created without an optimizer",
                fix="pass one: program.trainer(optimizer=torch.optim.AdamW)",
            )
        if self._trainer._accumulation.batches:
            self._trainer._agree_on_call("update" if total is None else f"update by {total!r}")
            self._trainer._accumulation.divide_by(total)
            self._update()

    def _update(self) -> None:
        """Update after the ranks have agreed on it."""
        assert self._trainer.optimizer is not None, "an update needs an optimizer"
        self._trainer.optimizer.check_gradients()
        self._trainer.optimizer.apply()
        for do in self._reductions:
            do()
        if self._trainer.accepts_update is not None and not self._trainer.accepts_update():
            self.zero_grad()
            self._trainer.last_grad_norm = None
            self._trainer.optimizer.stepped()
            return
        for do in self._phase_calls:
            do()
        if self._trainer.average is not None:
            self._trainer.average.update()
        self._trainer._stale = True
        self._trainer._accumulation.reset()
        self._trainer.optimizer.stepped()
        self._updates += 1
        self.events.write(self._over)
        if self._recorder is not None:
            self._recorder.end()

    def _conclude(self) -> None:
        """After a failed step, complete pending reductions on all ranks."""
        if self._shards.closing and self._local.broken is None:
            try:
                with convert_transport_errors(self._transport, "sharing gradients"):
                    self._trainer._run_on_mesh_ranks(self._shards.conclude)
            except FxpartError as cause:
                self._local.broken = cause.problems[0].why

    def step_by_hand(self) -> None:
        """Update for ``optimizer.step()``; FXP115 if the gradients were already used."""
        if not self._trainer._accumulation.batches and self._trainer._stale:
            raise error(
                "FXP115",
                where="optimizer.step()",
                why="trainer.step() has already updated with these gradients",
                fix="leave the call out, or use trainer.backward(batch) instead of trainer.step",
            )
        self.update(total=self._trainer.step_total)

    # -- internals --------------------------------------------------------------------------------

    def _attach(self, recorder: Recorder | None) -> None:
        if recorder is not None and self._recorder is not None:
            fix = "end it before you start another one"
            raise error("FXP109", where="record()", why="a recording is in progress", fix=fix)
        self._recorder = recorder
        self._trainer._engine.record(recorder)
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
            (GRADIENT_REDUCTION, lambda: self._gradients(self._finish_reductions)),
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

    def _finish_reductions(self) -> None:
        self._trainer._run_on_mesh_ranks(self._shards.finish)

    def _send_gradients(self) -> None:
        self._shards.share_rows()
        if self.spec.replicas:
            reduce_replica_gradients(self._state, self._shards)
        else:
            send_tied_gradients(self._state, self._shards)
        for name in self._trainer.frozen:
            for parameter in self._state.entries[name].copies.values():
                parameter.grad = self._shards.of(parameter).grad = None
                self._shards.rows.drop(parameter)

    def _gradients(self, do: Callable[[], object]) -> None:
        with convert_transport_errors(self._transport, "sharing gradients"):
            do()

    def _clip(self) -> None:
        """Average over the accumulated batches, then clip."""
        options = self._trainer.options
        if self._trainer._accumulation.is_divided and self._trainer._accumulation.total:
            divide_gradients(self._state, self._shards, self._trainer._accumulation.total)
        if self._trainer.log_gradient_statistics:
            found = compute_gradient_statistics(self._state, self._shards)
            self._trainer.last_gradient_statistics = found
        total = None
        if options.clip_norm is not None or options.log_grad_norm:
            with convert_transport_errors(self._transport, "sharing gradients"):
                norms = compute_gradient_norms(self._state, self._shards)
            total = self._trainer.last_grad_norm = norms.total
            self._trainer.last_group_norms = {
                group.label(index): norms.of(group.names)
                for index, group in enumerate(self._trainer._groups)
            }
        clip_both(self._state, self._shards, total, options.clip_norm, options.clip_value)

    def _optimize(self) -> None:
        host = self._shards.host
        try:
            if host is not None:
                host.fetch()
            for optimizer in self._trainer.optimizers.values():
                optimizer.step()
            if host is not None:
                host.store()
        except Exception as cause:
            if len(self._transport.local) < self._transport.ranks:
                # The other ranks have updated their weights, so no step can follow this one.
                self._local.broken = f"{type(cause).__name__} in the optimizer's step: {cause}"
            raise

    def _gather_parameters(self) -> None:
        with convert_transport_errors(self._transport, "sharing parameters"):
            self._trainer._run_on_mesh_ranks(self._shards.spread)
