"""Lightning's loop by a plan: losses and weights of Lightning itself."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Pool

if importlib.util.find_spec("lightning") is None:
    pytest.skip("lightning is not installed", allow_module_level=True)

import lightning
import lightning_programs as programs

from fxpart.errors import FxpartError
from fxpart.integrations.lightning import PlannedStrategy

pytestmark = pytest.mark.slow
TWO_STAGES = {"cluster": "local:2", "constraints": {"stages": 2}, "check": "off"}


def check(mine: Any, theirs: Any) -> None:
    for one, other in zip(mine[:2], theirs[:2], strict=True):
        assert one and one == pytest.approx(other[len(other) - len(one) :], rel=1e-5)
    for one, other in zip(mine[2], theirs[2], strict=True):
        assert torch.tensor(one) == pytest.approx(torch.tensor(other), abs=1e-5)


@pytest.mark.parametrize(
    "changes", [{}, {"gradient_clip_algorithm": "value"}], ids=["norm", "value"]
)
def test_losses_and_weights(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Accumulation with a short last one, clipping, a scheduler, validation."""
    theirs = programs.train(str(tmp_path / "plain"), **changes)
    check(programs.train(str(tmp_path / "planned"), TWO_STAGES, **changes), theirs)


def test_checkpoints_are_those_of_lightning(tmp_path: Path) -> None:
    """Either resumes in the middle from the checkpoint of the other."""
    whole = programs.train(str(tmp_path / "whole"))
    for name, options in (("planned", TWO_STAGES), ("plain", None)):
        programs.train(str(tmp_path / name), options, epochs=2)
    for name, options in (("planned", None), ("plain", TWO_STAGES), ("planned", TWO_STAGES)):
        saved = str(tmp_path / name / "last.ckpt")
        check(programs.train(str(tmp_path / "again"), options, resume=saved), whole)


def test_dropout_continues_after_a_checkpoint(tmp_path: Path) -> None:
    def train(**changes: Any) -> Any:
        torch.manual_seed(0)
        model = programs.Classifier(dropout=0.4)
        return programs.train(str(tmp_path), TWO_STAGES, model=model, **changes)

    whole = train()
    train(epochs=2)
    assert train(resume=str(tmp_path / "last.ckpt"))[2] == whole[2]


@pytest.mark.parametrize("constraints", [{"stages": 2}, {"dp": 2, "zero": 1}], ids=str)
def test_two_ranks(pool: Pool, tmp_path: Path, constraints: dict[str, int]) -> None:
    whole = programs.train(str(tmp_path / "whole"))
    options = {**TWO_STAGES, "constraints": constraints}
    for found in pool.run(programs.train, str(tmp_path / "a"), options, 2):
        assert len(found[0]) == 10
    saved = str(tmp_path / "a" / "last.ckpt")
    for found in pool.run(programs.train, str(tmp_path / "b"), options, 4, saved):
        check(found, whole)


class LogsMore(programs.Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("share", (batch[1] == 0).float().mean())
        return loss


class TwoOptimizers(programs.Classifier):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net[0].parameters(), lr=0.1) for _ in range(2)]


def test_what_is_refused(tmp_path: Path) -> None:
    for model, text in ((LogsMore(), "logs share"), (TwoOptimizers(), "one optimizer")):
        if isinstance(model, TwoOptimizers):
            model.automatic_optimization = False
        with pytest.raises(FxpartError, match=text):
            programs.train(
                str(tmp_path), TWO_STAGES, model=model, accumulate_grad_batches=1,
                gradient_clip_val=None,
            )  # fmt: skip
    with pytest.raises(FxpartError, match="training_step computes the loss"):
        PlannedStrategy(loss=torch.nn.functional.mse_loss)
    with pytest.raises(FxpartError, match="bf16-mixed"):
        lightning.Trainer(
            accelerator="cpu", precision="64-true", strategy=PlannedStrategy(), logger=False
        )
