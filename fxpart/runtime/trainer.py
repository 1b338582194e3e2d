"""The trainer: steps with results identical to single-process training, or without flushes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, Self

import torch

from fxpart.checkpoint.signature import KeySource
from fxpart.runtime.asynchronous.pipeline import AsyncPipeline
from fxpart.runtime.asynchronous.stage_report import StageReport
from fxpart.runtime.entry_point import announce_call, is_known_to_all_ranks
from fxpart.runtime.fit import FitLoop
from fxpart.runtime.fit_options import FitOptions
from fxpart.runtime.fit_reports import FitResult
from fxpart.runtime.flushed_pipeline import FlushedPipeline
from fxpart.runtime.inference import Inference
from fxpart.runtime.monitor.recorder import Recorder
from fxpart.runtime.monitor.tensor_statistics import TensorStatistics
from fxpart.runtime.pipeline import Pipeline
from fxpart.runtime.queues.pipeline import QueuePipeline
from fxpart.runtime.stateful_trainer import StatefulTrainer
from fxpart.runtime.trainer_options import Kind, check_accumulate
from fxpart.runtime.transport.agreement import agree
from fxpart.schedule.weight_modes import WeightMode

_PIPELINES: dict[Kind, type[Pipeline]] = {
    "synchronous": FlushedPipeline,
    "asynchronous": AsyncPipeline,
    "queue": QueuePipeline,
}


class Trainer(Inference, StatefulTrainer):
    """Trains a program's stages; every rank creates one and passes the same global batches.

    The pipeline is flushed at every update, with the results of single-process training; or, by
    the options ``weights`` and ``routing``, stages update on their own, and losses are known
    :attr:`lag` calls later. ``with program.trainer(...) as trainer:`` closes it at the end of the
    block, also after an exception, which the other ranks report.

    last_rows: rows of the last global batch. last_weight: its weight in a mean over batches.
    last_grad_norm: the newest known global norm before clipping, with ``clip_norm`` or
    ``log_grad_norm``. last_group_norms: the norm of each parameter group, by name or index.
    log_gradient_statistics: set it to True for ``last_gradient_statistics`` of the next updates:
    those of each parameter's gradient before clipping. last_loss: the loss of the last batch.
    last_lookups: ids that this process looked up in row-sharded tables in the last flushed step,
    and the rows that it received for them; equal ids share a row.
    accepts_update: called after the gradients of an update are reduced; if it returns False, on
    every rank, they are discarded and nothing is updated. step_total: the ``total`` of updates by
    ``optimizer.step()``, see :meth:`update`. average: the moving average of the weights (``ema=``).
    pipeline: runs the minibatches.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Arguments: see its base classes."""
        super().__init__(*args, **kwargs)
        self.last_rows = 0
        self.last_weight = 1.0
        self.last_lookups = (0, 0)
        self.last_grad_norm: torch.Tensor | None = None
        self.last_group_norms: dict[str, float] = {}
        self.log_gradient_statistics = False
        self.last_gradient_statistics: dict[str, TensorStatistics] = {}
        self.last_loss: torch.Tensor = torch.zeros(())
        self.accepts_update: Callable[[], bool] | None = None
        self.step_total: float | None = None
        self.pipeline = _PIPELINES[self.kind](self)

    # -- training -------------------------------------------------------------------------------

    def step(
        self, batch: Any, accumulate: bool = False, *, local: bool = False
    ) -> torch.Tensor | None:
        """Run one training step; return the newest known loss (0-d).

        The loss is equal on every rank, and that of this batch; without flushes it is that of the
        batch :attr:`lag` calls before, None before the first one, and :meth:`drain` returns the
        remaining ones. accumulate: only accumulate gradients; the next step without it updates with
        the mean over all of these batches, like one batch of all their rows: see :meth:`backward`.
        local: the batch has only this rank's rows (see :attr:`needs`). Inputs that this rank does
        not need may be missing or None. Raises FXP105 for an invalid batch, FXP501 if batches
        differ between ranks (nothing was sent), FXP503 and FXP504 for a failed transfer or stage
        (nothing was updated, gradients are discarded; without flushes it is raised on every rank
        some calls later, and training has ended), FXP109 for what the pipeline does not support.
        """
        check_accumulate(accumulate)
        return self.pipeline.step(batch, accumulate=accumulate, local=local)

    def prefetch(self, batch: Any, *, local: bool = False) -> None:
        """Announce the batch after that of the next ``step`` or ``backward``.

        During that call the rows of the announced batch's lookups in tables sharded by all-to-all
        are requested, and those that the call does not look up are sent; rows that change later
        are sent again. Results do not change. Every rank must make the same calls; the announced
        batch must follow, complete on every rank: FXP105, FXP109.
        """
        self.pipeline.prefetch(batch, local=local)

    def submit(self, batch: Any, *, accumulate: bool = False, local: bool = False) -> int:
        """Run a step; return its number. :meth:`pop_losses` returns its loss."""
        return self.pipeline.submit(batch, accumulate=accumulate, local=local)

    def pop_losses(self) -> list[tuple[int, torch.Tensor]]:
        """Return new known losses of :meth:`submit`, with their calls."""
        found = list(self.pipeline.losses)
        self.pipeline.losses.clear()
        return found

    def finish(self) -> list[tuple[int, torch.Tensor]]:
        """Flush the pipeline; return the remaining losses with their calls."""
        self.pipeline.finish()
        return self.pop_losses()

    def drain(self) -> list[torch.Tensor]:
        """Flush the pipeline; return the losses that no call has returned."""
        return [loss for _, loss in self.finish()]

    def backward(
        self, batch: Any, *, local: bool = False, weight: float | None = None
    ) -> torch.Tensor:
        """Add the batch's gradients to those since the last update; return the loss.

        :meth:`update` averages over the batches. A batch is weighted by the divisor of its loss,
        such as its valid tokens, or by its rows if the divisor cannot be computed from inputs; or
        by ``weight``, which must be equal on every rank. FXP109 without flushes.
        """
        return self.pipeline.backward(batch, local=local, weight=weight)

    def update(self, *, total: float | None = None) -> None:
        """Reduce the accumulated gradients, clip them, and step the optimizer.

        Gradients are reduced over mesh ranks, tied parameters and replicas, and averaged over the
        accumulated batches. They start from zero afterwards. Does nothing if no batch came since
        the last update. total: what the weighted gradients of the batches are divided by, instead
        of the sum of the weights. FXP109 without flushes.
        """
        self.pipeline.update(total=total)

    def zero_grad(self) -> None:
        """Clear all gradients."""
        self.pipeline.zero_grad()

    @property
    def updates(self) -> int:
        """Certain updates so far, including those before a loaded checkpoint."""
        return self.pipeline.updates

    @property
    def lag(self) -> int:
        """Calls after which the loss of a minibatch is known."""
        return self.pipeline.lag

    @property
    def in_flight(self) -> bool:
        """Whether minibatches are in flight."""
        return self.pipeline.in_flight

    @property
    def staleness(self) -> tuple[int, ...]:
        """Most updates between a forward and its backward, per stage."""
        return self.pipeline.staleness

    @property
    def weight_mode(self) -> WeightMode:
        """The weights that forwards and backwards read."""
        return self.pipeline.weight_mode

    def report(self) -> tuple[StageReport, ...]:
        """Report each stage's staleness, weight versions and prediction errors.

        With queues: microbatches and staleness of every living replica. Flushes the pipeline; every
        rank must call it.
        """
        return self.pipeline.report()

    def save_checkpoint(
        self,
        folder: str | Path,
        extra: Mapping[str, Any] | None = None,
        *,
        sign: KeySource = None,
    ) -> Path:
        """Write a checkpoint to ``folder/step-NNNNNNNNNN``; return that folder.

        It has parameters, buffers, optimizer state and random state, and can be loaded under any
        other plan (:mod:`fxpart.runtime.checkpointing`). extra: plain data that
        :meth:`load_checkpoint` returns. The folder is created atomically, next to earlier ones.
        Ranks write their own parts in parallel to the shared folder. Every rank must call it,
        between two updates; an asynchronous pipeline is flushed. FXP513 on every rank if it cannot
        be written, or the step already exists. sign: a file with a secret key, which signs it.
        """
        from fxpart.runtime.checkpointing.single_save import save_once

        return save_once(self, Path(folder), dict(extra or {}), sign)

    def load_checkpoint(self, path: str | Path, *, sign: KeySource = None) -> dict[str, Any]:
        """Restore a checkpoint of any plan; return its ``extra`` data.

        path: a checkpoint, or a folder of several (or of a run), whose newest complete one is used.
        Each rank reads what it needs, one tensor at a time. Every rank must call it. Raises the
        same error on all ranks: FXP510 and FXP511 for damaged checkpoints, FXP512 for another model
        or optimizer. sign: a file with a secret key; FXP524 for a checkpoint that it has not
        signed.
        """
        from fxpart.runtime.checkpointing.loader import load_from

        return load_from(self, Path(path), sign)

    def fit(self, batches: Any, **run: Any) -> FitResult:
        """Train over batches, with evaluations, a scheduler, callbacks and early stopping.

        batches: an iterable of global batches, iterated again for each epoch; a function that
        returns one; or an iterator, for one epoch. Keywords are those of
        :class:`~fxpart.runtime.fit_options.FitOptions`: steps and epochs: maximum number of updates
        and passes (one pass if neither is given). accumulate: batches per update, averaged as in
        :meth:`backward` (the last update of an epoch may have fewer). evaluate: batches to evaluate
        on after each epoch or after ``every`` updates, with metrics (see :meth:`evaluate`).
        scheduler: a scheduler of :attr:`optimizer`, or a function of the optimizer that creates
        one, stepped after each update (``scheduler_every="epoch"``: each pass), or with each
        evaluation's first value (ReduceLROnPlateau). callbacks:
        :class:`~fxpart.runtime.callbacks.Callback` objects, or functions of a StepInfo.
        early_stopping: an EarlyStopping. local: as for :meth:`step`. checkpoints: a folder, or
        :class:`~fxpart.runtime.training_run.options.Checkpoints`, for automatic saving and
        resuming. prefetch: announce each batch one step ahead (:meth:`prefetch`); data are read one
        update ahead. statistics: updates from one event with statistics of gradients and
        activations to the next, or a :class:`~fxpart.runtime.fit_options.Statistics`. progress:
        whether to show a progress bar on stderr, by default on a terminal and in a notebook. The
        logger "fxpart" reports events (INFO) and steps (DEBUG).

        Every rank ends after the same step. An exception on one rank, in data, a metric or a
        callback, raises the same error on all ranks. Without flushes, callbacks are called in order
        when the loss of a step is known, some calls later; remaining ones when the pipeline is
        flushed, before an evaluation and at the end. FXP109 for options that the trainer does not
        support.
        """

        def check() -> tuple[FitOptions, str]:
            given = FitOptions.of(run)
            if self.is_asynchronous:
                skips = self.kind == "asynchronous" and self.options.guard
                given.check_unflushed(skips=skips)
            return given, given.describe()

        given = agree(self.transport, "the arguments of fit", check)
        return FitLoop(self, batches, given).go()

    def record(self, *, baseline: int | None = None) -> AbstractContextManager[Recorder]:
        """Measure the training steps in the context: activities and memory of each rank.

            with trainer.record() as recorder:
                trainer.step(batch)
            recorder.recording.summary()

        Every rank must start and end it at the same steps; the measurements are gathered at the
        end, unless the block raises. Recording does not change results. baseline: bytes of this
        process before it loaded the model, if known. FXP109 without flushes, as steps overlap.
        """
        return self.pipeline.record(baseline)

    def close(self) -> None:
        """Flush the pipeline unless training has failed, and release resources."""
        if not self.closed:
            self.pipeline.close()
            super().close()

    def __enter__(self) -> Self:
        """Return the trainer, which is closed at the end of the block."""
        return self

    def __exit__(self, kind: object, cause: BaseException | None, trace: object) -> None:
        """Close the trainer; after an exception of this rank alone, without the others."""
        if cause is None or self.parts.is_alone or self.closed or is_known_to_all_ranks(cause):
            self.close()
            return
        with suppress(BaseException), announce_call("with trainer"):
            raise cause
        super().close()
