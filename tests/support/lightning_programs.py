"""A LightningModule trained by Lightning itself or by a plan; also on rank processes."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore", module="lightning")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Classifier(lightning.LightningModule):
    """A small network that logs its losses."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Dropout(dropout),
            torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3),
        )  # fmt: skip

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rows, targets = batch
        loss = torch.nn.functional.cross_entropy(self.net(rows), targets)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        rows, targets = batch
        self.log("val_loss", torch.nn.functional.cross_entropy(self.net(rows), targets))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-6)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


class Losses(lightning.Callback):
    """Losses of steps and validations."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.validations: list[float] = []

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int
    ) -> None:
        self.steps.append(outputs["loss"].item())

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        self.validations.append(trainer.callback_metrics["val_loss"].item())


def train(
    folder: str,
    options: dict[str, Any] | None = None,
    epochs: int = 4,
    resume: str = "",
    model: Any = None,
    **changes: Any,
) -> tuple[list[float], list[float], list[list[float]]]:
    """Train; losses of steps, of validations, and weights. ``folder/last.ckpt`` is saved.

    options: of the strategy, None for Lightning's own.
    """
    if options is None:
        strategy: Any = "auto"
    else:
        from fxpart.integrations.lightning import PlannedStrategy

        strategy = PlannedStrategy(**options)
    torch.manual_seed(0)
    module = Classifier() if model is None else model
    draw = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(18, 8, generator=draw), torch.randint(3, (18,), generator=draw)
    )
    heard = Losses()
    given = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3, **changes}
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", devices=1, strategy=strategy, callbacks=[heard],
        default_root_dir=folder, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, num_sanity_val_steps=0, **given,
    )  # fmt: skip
    loaders = [DataLoader(data, batch_size=4) for _ in range(2)]
    trainer.fit(module, *loaders, ckpt_path=resume or None)
    trainer.save_checkpoint(f"{folder}/last.ckpt")
    weights = [p.detach().flatten().tolist() for p in module.parameters()]
    return heard.steps, heard.validations, weights
