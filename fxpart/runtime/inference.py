"""Evaluation and prediction: pipelined forwards in evaluation mode."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import msgspec
import torch

from fxpart.errors import error
from fxpart.runtime.batch.batch_agreement import BatchAgreement
from fxpart.runtime.batch.batch_iterator import call_user_function, iterate_batches
from fxpart.runtime.batch.batch_reader import MicrobatchSplit
from fxpart.runtime.batch.outputs import Outputs, gather_outputs
from fxpart.runtime.batch.repetition_check import check_repetition
from fxpart.runtime.batch.row_repetition import drop_repeated_rows
from fxpart.runtime.engine import PipelineResult
from fxpart.runtime.stateful_trainer import StatefulTrainer
from fxpart.runtime.transport.agreement import convert_transport_errors

Metric = Callable[[Any, Any], Any]


class Inference(StatefulTrainer):
    """Calls without gradients; every rank must make each call."""

    def eval_step(self, batch: Any, *, local: bool = False) -> torch.Tensor:
        """Return the loss of a batch in evaluation mode, equal on every rank."""
        return self._eval_loss(batch, local)[0]

    def predict(self, batch: Any, *, first_only: bool = False, local: bool = False) -> Any:
        """Return the model's outputs for a batch in evaluation mode, in the model's own structure.

        Microbatches run through the stages as in training; outputs are concatenated along the batch
        dim (a scalar is the mean weighted by rows). The batch needs only the inputs of the outputs:
        no labels if only a loss reads them. If the model returns its loss, None replaces it.
        first_only: only rank 0 receives outputs, others None. local: as for ``step``. FXP104 for an
        output without a batch dim that differs between microbatches.
        """
        reading, result, outputs = self._outputs(batch, local, loss=False)
        return self._build_outputs(reading, result, outputs, first_only=first_only)

    def predict_with_loss(
        self, batch: Any, *, first_only: bool = False, local: bool = False
    ) -> tuple[torch.Tensor | None, Any]:
        """Return loss and outputs of a batch with one pipelined forward in evaluation mode.

        The loss is equal on every rank, None if the program has none. Outputs and arguments are
        those of :meth:`predict`.
        """
        reading, result, outputs = self._outputs(batch, local, loss=True)
        found = self._build_outputs(reading, result, outputs, first_only=first_only)
        return result.loss, found

    def evaluate(
        self,
        batches: Iterable[Any],
        metrics: Mapping[str, Metric | Any] | None = None,
        *,
        local: bool = False,
    ) -> dict[str, float]:
        """Return loss and metrics over batches in evaluation mode, equal on every rank.

        The loss is the mean over all rows. metrics: by name a function (outputs, batch) -> number
        of one batch, averaged weighted by rows; or an object with ``update(outputs, batch)`` and
        ``compute()`` (and ``reset()``, which is called first). They run only on rank 0, with whole
        outputs and rank 0's batch; other ranks receive the results. A program without a loss
        returns only metrics. Raises FXP507 on every rank if a metric or the data raises, FXP501 if
        a rank has more batches than another, FXP109 if there are no batches.
        """
        tally = _Tally(dict(metrics or {}))
        first = 0 in self._transport.local
        if first:
            call_user_function(self._transport, "a metric", tally.reset)
        for batch in iterate_batches(self._transport, batches):
            if not metrics:
                loss, rows = self._eval_loss(batch, local)
                tally.add_loss(loss, rows)
                continue
            reading, result, outputs = self._outputs(batch, local, loss=True)
            found = self._build_outputs(reading, result, outputs, first_only=True)
            rows = sum(reading.cut.rows)
            if result.loss is not None:
                tally.add_loss(result.loss, rows)
            tally.rows += 0 if result.loss is not None else rows
            if first:
                call_user_function(
                    self._transport, "a metric", partial(tally.add, found, batch, rows)
                )
        return self._share_values(tally, first)

    # -- internals --------------------------------------------------------------------------------

    def _eval_loss(self, batch: Any, local: bool) -> tuple[torch.Tensor, int]:
        source, engine = self._evaluator()
        read = self._read(source, batch, "evaluation", local)

        def run(cut: MicrobatchSplit) -> torch.Tensor:
            cuts, keys = source.feed.parts(cut), self._keys(cut)
            loss = engine.run(cuts, keys, train=False, gate=read.confirm).loss
            if loss is None:
                fix = "pass loss= to compile()"
                raise error("FXP106", where="eval_step", why="the program has no loss", fix=fix)
            return loss

        check_repetition(self._transport, source, read)
        return run(read.cut), sum(read.cut.rows)

    def _outputs(
        self, batch: Any, local: bool, *, loss: bool
    ) -> tuple[BatchAgreement, PipelineResult, Outputs]:
        source, engine, outputs = self._predictor(loss)
        read = self._read(source, batch, "evaluation" if loss else "prediction", local)

        def run(cut: MicrobatchSplit) -> PipelineResult:
            cuts, keys = source.feed.parts(cut), self._keys(cut)
            return engine.run(cuts, keys, train=False, gate=read.confirm, keep_outputs=True)

        check_repetition(self._transport, source, read)
        return read, run(read.cut), outputs

    def _gather_whole_outputs(
        self, cut: MicrobatchSplit, result: PipelineResult, outputs: Outputs, *, first_only: bool
    ) -> dict[str, torch.Tensor] | None:
        """Return whole outputs by name, without repeated rows."""
        device = self._devices[self._transport.local[0]]
        dims = {spec.value: spec.dim for spec in outputs.specs}
        parts = {
            name: {
                m: drop_repeated_rows(tensor, cut.repeats[m], dims[name])
                for m, tensor in found.items()
            }
            for name, found in result.outputs.items()
        }
        return gather_outputs(
            self._transport, outputs, parts, cut.rows, device, first_only=first_only
        )

    def _build_outputs(
        self, reading: BatchAgreement, result: PipelineResult, outputs: Outputs, *, first_only: bool
    ) -> Any:
        found = self._gather_whole_outputs(reading.cut, result, outputs, first_only=first_only)
        return None if found is None else outputs.build(found)

    def _share_values(self, tally: _Tally, first: bool) -> dict[str, float]:
        """Return rank 0's values on every rank."""
        if not tally.rows:
            fix = "pass at least one batch"
            raise error("FXP109", where="evaluate", why="there are no batches", fix=fix)
        found = {"loss": tally.loss / tally.rows} if tally.has_loss else {}
        if not tally.metrics:
            return found
        numbers: dict[str, float] = {}
        if first:
            numbers = call_user_function(self._transport, "a metric", tally.numbers)
        self._agree_on_call("metrics")
        with convert_transport_errors(self._transport, "sharing metrics"):
            raws = self._transport.exchange_bytes(msgspec.json.encode(numbers))
        return {**found, **msgspec.json.decode(raws[0], type=dict[str, float])}


class _Tally:
    """Sums over the batches of an evaluation. rows: number of rows so far."""

    def __init__(self, metrics: dict[str, Any]) -> None:
        self.metrics = metrics
        self.loss, self.rows, self.has_loss = 0.0, 0, False
        self._sums = dict.fromkeys(metrics, 0.0)

    def reset(self) -> None:
        """Reset metrics that accumulate."""
        for metric in self.metrics.values():
            if hasattr(metric, "reset"):
                metric.reset()

    def add_loss(self, loss: torch.Tensor, rows: int) -> None:
        """Add one batch's mean loss."""
        self.loss += float(loss) * rows
        self.rows += rows
        self.has_loss = True

    def add(self, outputs: Any, batch: Any, rows: int) -> None:
        """Add one batch to the metrics."""
        for name, metric in self.metrics.items():
            if _accumulates(metric):
                metric.update(outputs, batch)
            else:
                self._sums[name] += float(metric(outputs, batch)) * rows

    def numbers(self) -> dict[str, float]:
        """Return the result of each metric."""
        return {
            name: float(metric.compute()) if _accumulates(metric) else self._sums[name] / self.rows
            for name, metric in self.metrics.items()
        }


def _accumulates(metric: Any) -> bool:
    return hasattr(metric, "update") and hasattr(metric, "compute")
