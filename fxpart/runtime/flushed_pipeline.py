"""The pipeline of a synchronous trainer: flushed at every update."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from fxpart.diagnostics.rank_event import ALL, STEP
from fxpart.errors import FxpartError, error
from fxpart.runtime.batch.batch_agreement import BatchAgreement
from fxpart.runtime.batch.batch_reader import LocalBatch
from fxpart.runtime.embedding_tables.managed_tables import ManagedTables
from fxpart.runtime.embedding_tables.row_lookahead import RowLookahead
from fxpart.runtime.gradients.communication import send_tied_gradients
from fxpart.runtime.gradients.gradient_norm import (
    clip_both,
    compute_gradient_norms,
    divide_gradients,
)
from fxpart.runtime.gradients.stage_replicas import reduce_replica_gradients
from fxpart.runtime.mesh.mesh_ranks import MeshRank
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

if TYPE_CHECKING:
    from fxpart.runtime.trainer import Trainer


class FlushedPipeline(Pipeline):
    """Runs steps with results identical to single-process training."""

    def __init__(self, trainer: Trainer) -> None:
        """See :class:`~fxpart.runtime.pipeline.Pipeline`."""
        super().__init__(trainer)
        self._updates = 0
        self._recorder: Recorder | None = None
        self._managed = ManagedTables(self._parts, self._optimizers)
        self._lookahead = RowLookahead(self._parts, self._managed)
        mark = self.events.mark
        self._reads, self._over = mark(READ), mark(STEP, "end")
        # Ranks wait for each other in every phase of an update except the optimizer step.
        self._phase_marks = {OPTIMIZER: mark(OPTIMIZER)} | {
            phase: mark(phase, "wait", peer=ALL)
            for phase in (GRADIENT_REDUCTION, TIED_REDUCTION, CLIP, PARAMETER_GATHER)
        }

    @property
    def updates(self) -> int:
        """Number of updates, including those before a loaded checkpoint."""
        return self._updates

    def step(self, batch: Any, *, accumulate: bool, local: bool) -> torch.Tensor:
        """Run a minibatch, and update unless gradients are accumulated; return its loss."""
        updates = not accumulate and self._optimizers.facade is not None
        loss = self._run(batch, closing=updates, local=local)
        if updates:
            self._update()
        elif not accumulate:
            self.update(total=None)  # Raises for a trainer without an optimizer.
        return loss

    def submit(self, batch: Any, *, accumulate: bool, local: bool) -> int:
        """Run a minibatch and keep its loss; return the number of the call."""
        loss = self.step(batch, accumulate=accumulate, local=local)
        self.losses.append((self._parts.calls - 1, loss))
        return self._parts.calls - 1

    def restart(self, updates: int, calls: int) -> None:
        """Continue after so many updates and calls, without gradients."""
        self.zero_grad()
        self._lookahead.reset()
        self._updates, self._parts.calls = updates, calls

    def prefetch(self, batch: Any, *, local: bool) -> None:
        """Announce the batch behind that of the next call."""
        self._lookahead.announce(batch, local=local)

    def look_up_ids(self, seen: LocalBatch) -> LocalBatch:
        """Return a batch to evaluate with rows in place of managed ids."""
        return self._managed.look_up(seen)

    def cancel_prefetch(self) -> None:
        """Forget the announced batch; receive what other ranks have sent for it."""
        if self._local.broken is None:
            self._lookahead.reset()

    def close(self) -> None:
        """Receive what other ranks have sent."""
        self.cancel_prefetch()

    def skip_update(self) -> None:
        """Count an update that was skipped."""
        self._updates += 1

    def reload_options(self) -> None:
        """Use the options that were loaded into the optimizers."""
        assert self._optimizers.facade is not None, "there is no optimizer"
        self._optimizers.facade.reload()

    def zero_grad(self) -> None:
        """Clear all gradients."""
        self._parts.shards.reset()
        self._parts.accumulation.reset()

    def record(self, baseline: int | None) -> AbstractContextManager[Recorder]:
        """Measure the training steps in the context."""
        parts = self._parts
        recorder = Recorder(
            parts.transport, parts.ranks, parts.devices, schedule=parts.options.schedule_name,
            microbatches=parts.options.microbatches, baseline=baseline,
        )  # fmt: skip
        return recorder.during(self._attach)

    def backward(self, batch: Any, *, local: bool, weight: float | None) -> torch.Tensor:
        """Add the batch's gradients to those since the last update; return the loss."""
        return self._run(batch, closing=False, local=local, weight=weight)

    def _run(
        self, batch: Any, *, closing: bool, local: bool, weight: float | None = None
    ) -> torch.Tensor:
        """Run the forwards and backwards of a minibatch; return its loss.

        closing: an update follows, so final gradients may be reduced at once.
        """
        self.require_loss()
        if self._recorder is not None:
            self._recorder.begin(self._parts.calls)
        self.events.step = self.updates + 1
        self.events.write(self._reads)
        read = self._read(batch, closing=closing, local=local, weight=weight)
        shards, accumulation = self._parts.shards, self._parts.accumulation
        if accumulation.is_reduced:
            self.zero_grad()
        try:
            weight = read.weight if weight is None else weight
            shards.closing = closing
            self._take_lookups()  # Those of evaluations.
            cuts = self._feed.parts(read.cut)
            if self._managed:
                read.confirm()
                self._managed.reset_rows()
            with self._lookahead.serve(cuts):
                result = self._parts.engine.run(
                    cuts, self._parts.keys(read.cut), train=True, gate=read.confirm,
                    factor=accumulation.factor(weight),
                )  # fmt: skip
            self._managed.commit()
            if shards.zero == 2 and self.spec.ties:
                self._communicate(shards.collect)
        except BaseException:
            if read.confirmed:
                self._conclude()
                self.zero_grad()
            raise
        finally:
            shards.closing = False
        assert result.loss is not None
        accumulation.add(weight)
        if self._optimizers.facade is not None:
            self._optimizers.facade.note_gradients()
        self._parts.calls += 1
        self._parts.pace.note(self.updates + 1, self._parts.engine.busy)
        self._trainer.last_rows, self._trainer.last_weight = sum(read.cut.rows), weight
        self._trainer.last_lookups = self._take_lookups()
        self._trainer.last_loss = result.loss
        self._end_recording()
        return result.loss

    def _read(
        self, batch: Any, *, closing: bool, local: bool, weight: float | None
    ) -> BatchAgreement:
        """Read a batch and compare it between the ranks."""
        mode = "last training" if closing else "training"
        mode += "" if weight is None else f" of weight {weight!r}"
        weighed = weight is None and (not closing or self._parts.accumulation.batches > 0)

        def adapt(seen: LocalBatch) -> tuple[LocalBatch, str]:
            found = self._managed.assign(seen, self.updates)
            self._lookahead.check(seen, found)
            text = self._managed.describe()
            return found, text + self._lookahead.look(self.updates + closing)

        return self._agreement.read_checked(
            self._parts.source, batch, mode, local, weighed=weighed, adapt=adapt
        )

    def _take_lookups(self) -> tuple[int, int]:
        return (0, 0) if self._parts.meshes is None else self._parts.meshes.take_lookups()

    def update(self, *, total: float | None) -> None:
        """Update with the accumulated gradients, after the ranks have agreed on it."""
        if self._optimizers.facade is None:
            raise error(
                "FXP109",
                where="update()",
                why="the trainer was created without an optimizer",
                fix="pass one: program.trainer(optimizer=torch.optim.AdamW)",
            )
        if self._parts.accumulation.batches:
            self._agreement.agree("update" if total is None else f"update by {total!r}")
            self._parts.accumulation.divide_by(total)
            self._update()

    def _update(self) -> None:
        """Update after the ranks have agreed on it."""
        optimizer, accepts = self._optimizers.facade, self._trainer.accepts_update
        assert optimizer is not None, "an update needs an optimizer"
        optimizer.check_gradients()
        optimizer.apply()
        self._run_phase(GRADIENT_REDUCTION, lambda: self._communicate(self._parts.shards.finish))
        self._run_phase(TIED_REDUCTION, self._send_gradients)
        if accepts is not None and not accepts():
            self.zero_grad()
            self._trainer.last_grad_norm = None
            optimizer.stepped()
            return
        self._run_phase(CLIP, self._clip)
        self._run_phase(OPTIMIZER, self._optimize)
        self._run_phase(PARAMETER_GATHER, self._gather_parameters)
        if self._optimizers.average is not None:
            self._optimizers.average.update()
        self._parts.accumulation.reset(reduced=True)
        optimizer.stepped()
        self._updates += 1
        self._end_recording()

    def _end_recording(self) -> None:
        self.events.write(self._over)
        if self._recorder is not None:
            self._recorder.end()

    def _conclude(self) -> None:
        """After a failed step, complete pending reductions on all ranks."""
        if self._parts.shards.closing and self._local.broken is None:
            try:
                self._communicate(self._parts.shards.conclude)
            except FxpartError as cause:
                self._local.broken = cause.problems[0].why

    def step_by_hand(self) -> None:
        """Update for ``optimizer.step()``; FXP115 if the gradients were already used."""
        if self._parts.accumulation.is_reduced:
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
        self._parts.engine.record(recorder)
        if self._parts.meshes is not None:
            self._parts.meshes.watch(
                None
                if recorder is None
                else lambda r: recorder.get_rank_recorder(r).measure_collective
            )

    def _run_phase(self, name: str, do: Callable[[], None]) -> None:
        """Run a phase of an update; first record its start."""
        self.events.write(self._phase_marks[name])
        if self._recorder is not None:
            do = self._recorder.timed(name, do)
        do()

    def _communicate(
        self, do: Callable[[MeshRank], object], what: str = "sharing gradients"
    ) -> None:
        """Run communication on all mesh ranks of this process."""
        with convert_transport_errors(self._transport, what):
            self._parts.run_on_mesh_ranks(do)

    def _send_gradients(self) -> None:
        state, shards = self._parts.state, self._parts.shards
        with convert_transport_errors(self._transport, "sharing gradients"):
            shards.share_rows()
            if self.spec.replicas:
                reduce_replica_gradients(state, shards)
            else:
                send_tied_gradients(state, shards)
        for name in self._agreement.frozen:
            for parameter in state.entries[name].copies.values():
                parameter.grad = shards.of(parameter).grad = None
                shards.rows.drop(parameter)

    def _clip(self) -> None:
        """Average over the accumulated batches, then clip."""
        state, shards, options = self._parts.state, self._parts.shards, self._parts.options
        if self._parts.accumulation.is_divided and self._parts.accumulation.total:
            divide_gradients(state, shards, self._parts.accumulation.total)
        if self._trainer.log_gradient_statistics:
            self._trainer.last_gradient_statistics = compute_gradient_statistics(state, shards)
        total = None
        if options.clip_norm is not None or options.log_grad_norm:
            with convert_transport_errors(self._transport, "sharing gradients"):
                norms = compute_gradient_norms(state, shards)
            total = self._trainer.last_grad_norm = norms.total
            self._trainer.last_group_norms = {
                group.label(index): norms.of(group.names)
                for index, group in enumerate(self._optimizers.groups)
            }
        clip_both(state, shards, total, options.clip_norm, options.clip_value)

    def _optimize(self) -> None:
        host = self._parts.shards.host
        try:
            if host is not None:
                host.fetch()
            for optimizer in self._optimizers.by_place.values():
                optimizer.step()
            if host is not None:
                host.store()
        except Exception as cause:
            if not self._parts.is_alone:
                # The other ranks have updated their weights, so no step can follow this one.
                self._local.broken = f"{type(cause).__name__} in the optimizer's step: {cause}"
            raise

    def _gather_parameters(self) -> None:
        self._communicate(self._parts.shards.spread, "sharing parameters")
