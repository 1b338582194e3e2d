"""Metrics of torchmetrics in an evaluation: those of one process, on every layout of ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from ranks import Pool
from torch import nn

import fxpart
from fxpart.errors import FxpartError
from fxpart.runtime.metrics import MetricTally, select_predictions_and_targets

LAYOUTS: dict[str, dict[str, Any]] = {
    "pipeline": {"mesh": "none", "stages": 2},
    "data": {"mesh": "dp=2", "stages": 1},
}


def make_trainer(constraints: dict[str, Any]) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Dropout(0.5), nn.Linear(12, 3))
    ranks = constraints["stages"] * (2 if "=2" in constraints["mesh"] else 1)
    program = fxpart.compile(
        model, f"local:{ranks}", example_inputs=data()[0], loss=nn.functional.cross_entropy,
        microbatches=2, constraints=constraints, check="off",
    )  # fmt: skip
    return model, program.trainer("sgd")


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Three batches, the last one smaller."""
    draw = torch.Generator().manual_seed(0)
    return [
        (torch.randn(rows, 6, generator=draw), torch.randint(3, (rows,), generator=draw))
        for rows in (8, 8, 5)
    ]


def make_metrics() -> dict[str, Any]:
    from torchmetrics import MetricCollection
    from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score
    from torchmetrics.regression import MeanSquaredError

    return {
        "auroc": MulticlassAUROC(3, thresholds=None),
        "recall": MulticlassAccuracy(3, average=None),
        "both": MetricCollection({"f1": MulticlassF1Score(3), "accuracy": MulticlassAccuracy(3)}),
        "distance": (MeanSquaredError(), lambda outputs, batch: (outputs[:, 0], batch[0][:, 0])),
    }


def evaluate(constraints: dict[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    """The values of fxpart, twice, and of a loop in one process."""
    model, trainer = make_trainer(constraints)
    metrics = make_metrics()
    trainer.evaluate(data()[:1], metrics)
    found = trainer.evaluate(data(), metrics)
    assert metrics["auroc"].distributed_available_fn(), "the metric is as before"
    plain, model = make_metrics(), model.eval()
    for x, y in data():
        with torch.no_grad():
            outputs = model(x)
        for name in ("auroc", "recall", "both"):
            plain[name].update(outputs, y)
        plain["distance"][0].update(outputs[:, 0], x[:, 0])
    expected = {
        "auroc": float(plain["auroc"].compute()),
        **{f"recall/{i}": v for i, v in enumerate(plain["recall"].compute().tolist())},
        **{f"both/{k}": float(v) for k, v in plain["both"].compute().items()},
        "distance": float(plain["distance"][0].compute()),
    }
    return found, expected


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_metrics_are_those_of_one_process(layout: str, pool: Pool) -> None:
    """On two ranks, in a process group, whose ranks other than 0 have no part of the sums."""
    pytest.importorskip("torchmetrics")
    results = pool.run(evaluate, LAYOUTS[layout])
    assert results[0][0] == results[1][0]
    found, expected = results[0]
    loss = found.pop("loss")
    assert loss > 0 and found == pytest.approx(expected, rel=1e-5)


def share_nan() -> dict[str, float]:
    _, trainer = make_trainer({"mesh": "none", "stages": 2})
    return trainer.evaluate(data()[:1], {"nan": lambda outputs, batch: math.nan})


@pytest.mark.slow
def test_a_metric_that_is_no_number(pool: Pool) -> None:
    assert all(math.isnan(found["nan"]) for found in pool.run(share_nan))


def test_what_a_metric_compares() -> None:
    logits, labels, other = torch.zeros(2, 3), torch.ones(2), torch.full((2,), 7.0)
    select = select_predictions_and_targets
    for outputs in (logits, {"logits": logits, "x": other}, (logits,)):
        for batch in ({"labels": labels, "x": other}, (other, labels)):
            predictions, targets = select(outputs, batch)
            assert predictions is logits and targets is labels
    for outputs, batch in (((logits, other), (other, labels)), (logits, {"x": labels})):
        with pytest.raises(FxpartError, match="FXP109"):
            select(outputs, batch)


def test_a_pair_needs_a_metric_of_torchmetrics() -> None:
    with pytest.raises(FxpartError, match="not a metric of torchmetrics"):
        MetricTally({"own": (len, lambda outputs, batch: (outputs,))})
