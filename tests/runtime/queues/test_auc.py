"""What asynchrony costs a recommender's ranking, at the bound that is documented."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import mean
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import fxpart
from fxpart.planner.prediction.stage_replicas import StageReplicas, plan_replicas

pytestmark = pytest.mark.slow
EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "recommender.py"
TRAIN, NEW, WARM = 256, 32, 32  # batches


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_recommender", EXAMPLE)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def both(ours: ModuleType, seed: int, folder: Path) -> tuple[float, float]:
    """AUC after one pass, synchronous and where gradients may miss two updates."""
    train = ours.write_logs(folder / f"train-{seed}.npy", TRAIN * ours.BATCH, seed=2 * seed)
    new = ours.write_logs(folder / f"new-{seed}.npy", NEW * ours.BATCH, seed=2 * seed + 1)
    compiled = partial(
        fxpart.compile, example_inputs=next(ours.batches(train)), optimizer=ours.adagrad,
        loss=nn.functional.binary_cross_entropy_with_logits,
    )  # fmt: skip

    def model() -> nn.Module:
        torch.manual_seed(seed)
        made: nn.Module = ours.Recommender()
        return made

    constraints = {"mesh": "none", "stages": 2}
    chain = compiled(model(), "local:3", microbatches=2, constraints=constraints).plan
    first, second = sorted(chain.prediction.ranks, key=lambda row: row.stage)
    copies = [StageReplicas((0, 1), (0, 1), (first, first)), StageReplicas((2,), (0,), (second,))]
    plan = plan_replicas(chain, copies, 0.0)

    def batches() -> Iterator[Any]:
        return ours.batches(train)  # type: ignore[no-any-return]

    def auc(staleness: int) -> float:
        trainer = compiled(model(), plan.cluster, plan=plan).trainer(
            ours.adagrad, routing="queue", staleness=staleness, warm_up=WARM
        )
        trainer.fit(batches)
        found = trainer.evaluate(ours.batches(new), metrics={"auc": ours.Auc()})["auc"]
        stale = max(each.staleness for each in trainer.report())
        assert (stale > 0) == (staleness > 0) and stale <= staleness
        trainer.close()
        return float(found)

    return auc(0), auc(2)


def test_auc_within_two_thousandths(tmp_path: Path) -> None:
    """Two copies of the tables feed the tower: the mean of three seeds."""
    ours = example()
    pairs = [both(ours, seed, tmp_path) for seed in range(3)]
    synchronous, stale = (mean(values) for values in zip(*pairs, strict=True))
    assert synchronous > 0.69, "it has learnt"
    assert stale == pytest.approx(synchronous, rel=2e-3), pairs
