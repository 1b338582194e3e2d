"""Metrics of an evaluation: functions, objects with sums of their own, and those of torchmetrics.

A metric of torchmetrics sees predictions and targets as in one process: rank 0 updates it with
whole outputs, and it does not communicate. By default they are the output ``logits`` or the only
one, and ``labels`` or the last tensor of the batch. A pair ``(metric, function)`` selects others:
the function takes outputs and batch, and returns the arguments of ``update``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fxpart.errors import error

Metric = Callable[[Any, Any], Any] | tuple[Any, Callable[[Any, Any], Sequence[Any]]] | Any


class MetricTally:
    """Sums over the batches of an evaluation. rows: number of rows so far."""

    def __init__(self, metrics: dict[str, Any]) -> None:
        self.metrics = {name: _adapt(name, metric) for name, metric in metrics.items()}
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
        """Return the result of each metric; several of one metric as ``name/part``."""
        found: dict[str, float] = {}
        for name, metric in self.metrics.items():
            if _accumulates(metric):
                _flatten(name, metric.compute(), found)
            else:
                found[name] = self._sums[name] / self.rows
        return found


class _TorchMetric:
    """A metric or collection of torchmetrics, as an object with ``update(outputs, batch)``."""

    def __init__(self, metric: Any, select: Callable[[Any, Any], Sequence[Any]]) -> None:
        self._metric, self._select = metric, select

    def reset(self) -> None:
        """Start from no batches."""
        self._metric.reset()

    def update(self, outputs: Any, batch: Any) -> None:
        """Add a batch, on the device of its first tensor."""
        given = self._select(outputs, batch)
        device = next((each.device for each in given if isinstance(each, torch.Tensor)), None)
        if device is not None:
            self._metric.to(device)
        self._metric.update(
            *(each.to(device) if isinstance(each, torch.Tensor) else each for each in given)
        )

    def compute(self) -> Any:
        """Return the metric over all batches, without waiting for ranks that have no sums."""
        name = "distributed_available_fn"
        parts = [each for each in self._metric.modules() if hasattr(each, name)]
        before = [getattr(each, name) for each in parts]
        try:
            for each in parts:
                setattr(each, name, _is_never_distributed)
            return self._metric.compute()
        finally:
            for each, known in zip(parts, before, strict=True):
                setattr(each, name, known)


def _is_never_distributed() -> bool:
    """Return that there are no other processes."""
    return False


def select_predictions_and_targets(outputs: Any, batch: Any) -> tuple[Any, Any]:
    """Return logits and labels of an evaluation batch; FXP109 if it is not clear which they are."""
    predictions = _find(outputs, "logits", whole=True)
    targets = _find(batch, "labels", whole=False)
    if predictions is None or targets is None:
        what = "output logits" if predictions is None else "tensor labels"
        raise error(
            "FXP109", where="evaluate(metrics=)",
            why=f"there is no {what}, so it is not known what a metric of torchmetrics compares",
            fix="pass (metric, function), where the function takes outputs and batch and returns "
            "the arguments of the metric's update",
        )  # fmt: skip
    return predictions, targets


def _find(value: Any, name: str, *, whole: bool) -> torch.Tensor | None:
    """Return the tensor of that name; otherwise the only one, or the last one of a batch."""
    if isinstance(value, torch.Tensor):
        return value if whole else None
    if isinstance(value, Mapping):
        found = value.get(name)
        return found if isinstance(found, torch.Tensor) else None
    found = getattr(value, name, None)
    if isinstance(found, torch.Tensor):
        return found
    tensors = [each for each in value or () if isinstance(each, torch.Tensor)]
    return tensors[-1] if len(tensors) == 1 or (tensors and not whole) else None


def _adapt(name: str, metric: Any) -> Any:
    """Return a metric of torchmetrics as an object with ``update(outputs, batch)``."""
    select = select_predictions_and_targets
    if isinstance(metric, tuple):
        metric, select = metric
        if not _is_torch_metric(metric):
            raise error(
                "FXP109", where=f"evaluate(metrics={{{name!r}: ...}})",
                why="the first of a pair is not a metric of torchmetrics",
                fix="pass a function of outputs and batch that returns a number",
            )  # fmt: skip
    return _TorchMetric(metric, select) if _is_torch_metric(metric) else metric


def _is_torch_metric(metric: Any) -> bool:
    """Return whether the metric is of torchmetrics, which is imported if there is one."""
    module = sys.modules.get("torchmetrics")
    return module is not None and isinstance(metric, (module.Metric, module.MetricCollection))


def _accumulates(metric: Any) -> bool:
    return hasattr(metric, "update") and hasattr(metric, "compute")


def _flatten(name: str, value: Any, found: dict[str, float]) -> None:
    """Add a number, or the numbers of a dict or vector, to what was found."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _flatten(f"{name}/{key}", inner, found)
    elif isinstance(value, torch.Tensor) and value.numel() > 1:
        for index, inner in enumerate(value.flatten().tolist()):
            found[f"{name}/{index}"] = inner
    else:
        found[name] = float(value)
