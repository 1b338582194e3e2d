"""What asynchrony costs a recommender's ranking, at the bound that is documented."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import fxpart
from fxpart.planned.copied import Copied, with_copies

pytestmark = pytest.mark.slow
EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "recommender.py"
TRAIN, NEW = 48, 16  # batches


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_recommender", EXAMPLE)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.mark.parametrize("seed", range(3))
def test_auc_within_two_thousandths(seed: int, tmp_path: Path) -> None:
    """Two copies of the tables feed the tower; gradients may miss two updates."""
    ours = example()
    train = ours.write_logs(tmp_path / "train.npy", TRAIN * ours.BATCH, seed=2 * seed)
    new = ours.write_logs(tmp_path / "new.npy", NEW * ours.BATCH, seed=2 * seed + 1)
    compiled = partial(
        fxpart.compile, example_inputs=next(ours.batches(train)), optimizer=ours.adagrad,
        loss=nn.functional.binary_cross_entropy_with_logits,
    )  # fmt: skip

    def model() -> nn.Module:
        torch.manual_seed(seed)
        made: nn.Module = ours.Recommender()
        return made

    constraints = {"mesh": "none", "stages": 2}
    chain = compiled(model(), "local:3", microbatches=4, constraints=constraints).plan
    first, second = sorted(chain.prediction.ranks, key=lambda row: row.stage)
    copies = [Copied((0, 1), (0, 1), (first, first)), Copied((2,), (0,), (second,))]
    plan = with_copies(chain, copies, 0.0)

    def batches() -> Iterator[Any]:
        return ours.batches(train)  # type: ignore[no-any-return]

    def auc(staleness: int) -> float:
        trainer = compiled(model(), plan.cluster, plan=plan).trainer(
            ours.adagrad, routing="queue", staleness=staleness
        )
        trainer.fit(batches)
        found = trainer.evaluate(ours.batches(new), metrics={"auc": ours.Auc()})["auc"]
        stale = max(each.staleness for each in trainer.report())
        assert (stale > 0) == (staleness > 0) and stale <= staleness
        trainer.close()
        return float(found)

    synchronous = auc(0)
    assert synchronous > 0.6, "it has learnt"
    assert auc(2) == pytest.approx(synchronous, rel=2e-3)
