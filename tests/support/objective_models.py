"""A small language model, losses with their own normalizers, and training in plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import fxpart

WORDS = 11
LENGTH = 5
Batch = tuple[torch.Tensor, torch.Tensor]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Language(nn.Module):
    """Scores of words for each position."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner = nn.Embedding(WORDS, 6), nn.Linear(6, 6)
        self.outer = nn.Linear(6, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.tanh(self.inner(self.table(ids))))


def batches(rows: int, count: int = 2, seed: int = 0) -> list[Batch]:
    """Inputs and labels; rows have unequal numbers of labels that are not 0."""
    made = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        ids = torch.randint(1, WORDS, (rows, LENGTH), generator=made)
        lengths = torch.randint(1, LENGTH + 1, (rows, 1), generator=made)
        found.append((ids, ids * (torch.arange(LENGTH) < lengths)))
    return found


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def per_token(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores.transpose(1, 2), labels, reduction="none")


def masked_pixels(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Binary terms with a weight for positive ones, averaged over a mask."""
    wanted = F.one_hot(labels, WORDS).to(scores.dtype)
    mask = (labels > 0).to(scores.dtype).unsqueeze(-1)
    weight = torch.linspace(0.5, 2.0, WORDS, dtype=scores.dtype)
    terms = F.binary_cross_entropy_with_logits(scores, wanted, pos_weight=weight, reduction="none")
    return (terms * mask).sum() / (mask.sum() * WORDS)


def two_masks(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Two terms with masks of their own, and a plain mean."""
    one, two = (labels > 4).to(scores.dtype), (labels != 3).to(scores.dtype)
    first = (scores.pow(2).mean(-1) * one).sum() / one.sum().clamp(min=1)
    second = (per_token(scores, labels) * two).sum() / (two.sum() + 1e-6)
    return first + 0.5 * second + 0.1 * scores.abs().mean()


def sample_weights(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    weight = 1.0 + labels[:, 0].to(scores.dtype)
    return (per_token(scores, labels).mean(1) * weight).sum() / weight.sum()


def rows_then_batch(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean over rows of each row's mean over its own tokens."""
    mask = (labels != 0).to(scores.dtype)
    return ((per_token(scores, labels) * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()


def seen_as(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Terms of all tokens in one line, and then in the shape of the mask."""
    mask = (labels > 2).to(scores.dtype)
    terms = F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="none")
    return (terms.view_as(mask) * mask).sum() / mask.sum().clamp(min=1)


def focal(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Divided by the number of positive entries."""
    wanted = F.one_hot(labels, WORDS).to(scores.dtype)
    chance = torch.sigmoid(scores)
    sure = chance * wanted + (1 - chance) * (1 - wanted)
    terms = F.binary_cross_entropy_with_logits(scores, wanted, reduction="none") * (1 - sure) ** 2
    return terms.sum() / wanted.sum()


def distillation(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """KL to softened labels per row of the batch, and the mean over valid tokens."""
    soft = F.one_hot(labels, WORDS).to(scores.dtype) * 0.7 + 0.3 / WORDS
    hard = F.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=0)
    return F.kl_div(F.log_softmax(scores, -1), soft, reduction="batchmean") + hard


def class_weights(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    weight = torch.linspace(0.2, 3.0, WORDS, dtype=scores.dtype)
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), weight=weight, ignore_index=2)


def smoothed(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(
        scores.flatten(0, 1), labels.flatten(), ignore_index=0, label_smoothing=0.2
    )


def by_size(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A sum, divided by the batch size."""
    return per_token(scores, labels).sum() / scores.shape[0]


def normalized_weights(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Weights whose mean over the batch is 1."""
    weight = labels.to(scores.dtype) + 1
    return (per_token(scores, labels) * (weight / weight.mean())).mean()


def likelihood(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    chances = F.log_softmax(scores, -1).flatten(0, 1)
    return F.nll_loss(chances, labels.flatten(), ignore_index=0)


def balanced(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Weights of classes from the batch's own labels."""
    counts = F.one_hot(labels, WORDS).sum((0, 1)).to(scores.dtype)
    flat = scores.flatten(0, 1), labels.flatten()
    return F.cross_entropy(*flat, weight=1 / (counts + 1), ignore_index=3)


def explained(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Squared errors over those of the labels' own mean."""
    wanted = F.one_hot(labels, WORDS).to(scores.dtype)
    return (scores - wanted).pow(2).sum() / (wanted - wanted.mean(0)).pow(2).sum()


def by_peak(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Weights relative to the largest label."""
    weight = labels.to(scores.dtype) / labels.abs().max()
    return (per_token(scores, labels) * weight).sum() / weight.sum()


def best_rows(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The rows whose labels have the two largest sums."""
    sums = labels.sum(1)
    mask = (sums >= sums.topk(2).values.min()).to(scores.dtype)
    return (per_token(scores, labels).mean(1) * mask).sum() / mask.sum()


LOSSES: dict[str, Loss] = {
    made.__name__: made
    for made in (
        masked_pixels, two_masks, sample_weights, rows_then_batch, seen_as, focal, distillation,
        class_weights, smoothed, by_size, normalized_weights, likelihood, balanced, explained,
        by_peak, best_rows,
    )
}  # fmt: skip


def pairs(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Contrasts each row with all others."""
    rows = F.normalize(scores.flatten(1), dim=-1)
    return F.cross_entropy(rows @ rows.T, torch.arange(rows.shape[0]))


def overlap(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Dice: a quotient of two sums over the batch that both depend on the scores."""
    wanted, chance = F.one_hot(labels, WORDS), torch.sigmoid(scores)
    return 1 - 2 * (chance * wanted).sum() / (chance.sum() + wanted.sum())


def root(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(scores, F.one_hot(labels, WORDS).to(scores.dtype)).sqrt()


COUPLED: dict[str, Loss] = {made.__name__: made for made in (pairs, overlap, root)}


def model(seed: int = 0) -> Language:
    """In float64, so that only rounding of the order of 1e-15 is left."""
    torch.manual_seed(seed)
    return Language().double()


def plainly(given: nn.Module, loss: Loss, data: Sequence[Batch]) -> tuple[list[float], nn.Module]:
    """Losses and the model after a step for each batch, in one piece."""
    trained = copy.deepcopy(given)
    optimizer, losses = sgd(trained.parameters()), []
    for inputs, labels in data:
        optimizer.zero_grad()
        value = loss(trained(inputs), labels)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses, trained


def difference(loss: Loss, data: Sequence[Batch], *, seed: int = 0, **options: Any) -> float:
    """The largest difference of a loss or weight between fxpart and plain PyTorch."""
    given = model(seed)
    program = fxpart.compile(given, "local:4", example_inputs=data[0], loss=loss, **options)
    return program_difference(program, given, loss, data)


def program_difference(
    program: fxpart.Program, given: nn.Module, loss: Loss, data: Sequence[Batch]
) -> float:
    """The largest difference of a loss or weight between a program and plain PyTorch."""
    losses, trained = plainly(given, loss, data)
    trainer = program.trainer(sgd)
    try:
        found = [trainer.step(batch).item() for batch in data]
        state = trainer.state_dict()
        value = trainer.eval_step(data[0]).item()
    finally:
        trainer.close()
    worst = max(abs(a - b) for a, b in zip(losses, found, strict=True))
    with torch.no_grad():
        worst = max(worst, abs(value - loss(trained(data[0][0]), data[0][1]).item()))
    return max(worst, *((state[n] - t).abs().max().item() for n, t in trained.state_dict().items()))
