"""Losses under microbatches and replicas: the objective is that of the whole batch."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from supported.behavior import Script, behavior

AREA = "The loss of the batch"
DIVIDED = ("microbatches", "pipeline", "replicas")


def tagger(classes: int = 5) -> nn.Module:
    """A tagger of tokens: [rows, length, 4] to [rows, length, classes]."""
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, classes))


def padded(rows: int = 8, length: int = 6, fill: int = -100) -> list[tuple[torch.Tensor, ...]]:
    """Batches of token labels whose rows have unequal lengths."""
    made: list[tuple[torch.Tensor, ...]] = []
    for _ in range(3):
        labels = torch.randint(5, (rows, length))
        ends = torch.randint(1, length + 1, (rows, 1))
        labels[torch.arange(length).expand(rows, length) >= ends] = fill
        made.append((torch.randn(rows, length, 4), labels))
    return made


@behavior(AREA, "cross entropy with ignore_index and label smoothing, mean", *DIVIDED)
def smoothed() -> Script:
    def loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.flatten(0, 1), labels.flatten(), label_smoothing=0.1)

    return Script(tagger(), padded(), loss)


@behavior(AREA, "cross entropy with class weights and ignored labels, mean", *DIVIDED)
def weighted_classes() -> Script:
    weight = torch.tensor([0.1, 1.0, 2.0, 0.5, 3.0])

    def loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.transpose(1, 2), labels, weight=weight, ignore_index=-100)

    return Script(tagger(), padded(), loss)


@behavior(AREA, "a masked mean written by hand", *DIVIDED)
def masked_mean() -> Script:
    def loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        mask = (labels >= 0).float()
        each = F.cross_entropy(output.transpose(1, 2), labels.clamp(min=0), reduction="none")
        return (each * mask).sum() / mask.sum().clamp(min=1)

    return Script(tagger(), padded(), loss)


@behavior(AREA, "two masked losses with different normalizers", *DIVIDED)
def two_normalizers() -> Script:
    def loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        token = F.cross_entropy(output.transpose(1, 2), labels)
        rare = (labels == 3).float()
        extra = (output.square().sum(-1) * rare).sum() / (rare.sum() + 1)
        return token + 0.1 * extra

    return Script(tagger(), padded(), loss)


@behavior(AREA, "a sum over the batch", *DIVIDED)
def summed() -> Script:
    def loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return 0.05 * F.cross_entropy(output.transpose(1, 2), labels, reduction="sum")

    return Script(tagger(), padded(), loss)


@behavior(AREA, "a sum divided by the number of rows", *DIVIDED)
def sum_over_rows() -> Script:
    def loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        each = F.cross_entropy(output.transpose(1, 2), labels, reduction="sum")
        return each / labels.shape[0]

    return Script(tagger(), padded(), loss)


@behavior(AREA, "a mean over rows of each row's masked mean", *DIVIDED)
def mean_of_means() -> Script:
    def loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        mask = (labels >= 0).float()
        each = F.cross_entropy(output.transpose(1, 2), labels.clamp(min=0), reduction="none")
        return ((each * mask).sum(1) / mask.sum(1)).mean()

    return Script(tagger(), padded(), loss)


@behavior(AREA, "binary cross entropy with a mask as its weight", *DIVIDED)
def masked_binary() -> Script:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = (target >= 0).float()
        value = F.binary_cross_entropy_with_logits(
            output, target.clamp(min=0), weight=mask, reduction="sum"
        )
        return value / mask.sum()

    batches = [(torch.randn(8, 4), torch.randint(-1, 2, (8, 5)).float()) for _ in range(3)]
    return Script(tagger(), batches, loss)


@behavior(AREA, "focal loss, averaged over valid tokens", *DIVIDED)
def focal() -> Script:
    def loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        each = F.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="none")
        valid = labels.flatten() != -100
        return ((1 - torch.exp(-each)) ** 2 * each * valid).sum() / valid.sum()

    return Script(tagger(), padded(), loss)


@behavior(AREA, "KL divergence with reduction='batchmean'", *DIVIDED)
def batch_mean() -> Script:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.kl_div(output.log_softmax(-1), target, reduction="batchmean")

    batches = [(torch.randn(8, 4), torch.rand(8, 5).softmax(-1)) for _ in range(3)]
    return Script(tagger(), batches, loss)


@behavior(
    AREA, "a contrastive loss over all pairs of the batch", "one rank", "replicas",
    microbatches="FXP114", reason="each row's negatives are the other rows of the whole batch",
)  # fmt: skip
def contrastive() -> Script:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        scores = F.normalize(output, dim=-1) @ F.normalize(target, dim=-1).T
        return F.cross_entropy(scores / 0.1, torch.arange(len(output)))

    return Script(tagger(), [(torch.randn(8, 4), torch.randn(8, 5)) for _ in range(3)], loss)


@behavior(
    AREA, "BatchNorm in training", "one rank", "replicas",
    microbatches="FXP114", pipeline="FXP114",
    reason="batch statistics couple the rows; batch_coupling='per-microbatch' accepts it",
)  # fmt: skip
def batch_norm() -> Script:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    return Script(model, [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(3)], F.mse_loss)


@behavior(AREA, "BatchNorm of a frozen backbone in evaluation mode", "one rank", *DIVIDED)
def frozen_batch_norm() -> Script:
    class Frozen(nn.BatchNorm1d):
        def train(self, mode: bool = True) -> nn.Module:
            return super().train(False)

    model = nn.Sequential(nn.Linear(4, 8), Frozen(8), nn.ReLU(), nn.Linear(8, 1)).train()
    return Script(model, [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(3)], F.mse_loss)


@behavior(
    AREA, "a loss that balances the load of experts over the batch", "one rank",
    microbatches="FXP114", reason="the product of two batch means is no mean over rows",
)  # fmt: skip
def balanced() -> Script:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        gates = output.softmax(-1)
        share = F.one_hot(gates.argmax(-1), 5).float().mean(0)
        return F.mse_loss(output, target) + (share * gates.mean(0)).sum()

    return Script(tagger(), [(torch.randn(8, 4), torch.randn(8, 5)) for _ in range(3)], loss)


@behavior(AREA, "CTC with padded targets, mean", *DIVIDED)
def ctc() -> Script:
    def loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        chances, ends = output.log_softmax(-1).transpose(0, 1), (labels > 0).sum(1)
        return F.ctc_loss(chances, labels, torch.full_like(ends, chances.shape[0]), ends)

    ends = torch.arange(8).unsqueeze(1) % 3 + 1
    labels = torch.randint(1, 5, (8, 3)) * (torch.arange(3) < ends)
    return Script(tagger(), [(torch.randn(8, 9, 4), labels) for _ in range(3)], loss)
