"""Programs that train on batches of different sizes, beside plain PyTorch on the same batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import fxpart
from fxpart.runtime.fit_reports import FitResult

Batch = tuple[torch.Tensor, torch.Tensor]
FEATURES, HIDDEN, TARGETS = 4, 8, 3


class Tagger(nn.Module):
    """An embedding that the head shares, and a layer between: tokens in, scores of tokens out."""

    def __init__(self, *, sparse: bool = False, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, HIDDEN, sparse=sparse)
        self.middle = nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.middle(self.embed(tokens)))).transpose(1, 2)


def tagger_batch(rows: int, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(100 * rows + seed)
    tokens, labels = torch.randint(0, 11, (2, rows, 5), generator=generator)
    return tokens, labels


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, TARGETS))


def dense_batch(rows: int, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(100 * rows + seed)
    inputs = torch.randn(rows, FEATURES, generator=generator)
    return inputs, torch.randn(rows, TARGETS, generator=generator)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return make()


def trainer(
    model: nn.Module,
    example: Batch,
    loss: Callable[..., torch.Tensor],
    constraints: dict[str, Any],
    *,
    microbatches: int = 2,
    optimizer: Any = sgd,
    cluster: str = "local:4",
    **options: Any,
) -> Any:
    program = fxpart.compile(
        copy.deepcopy(model), cluster, example_inputs=example, loss=loss, microbatches=microbatches,
        constraints=constraints,
    )  # fmt: skip
    return program.trainer(optimizer, **options)


class Plain:
    """The same training in plain PyTorch, an update for each group of batches as one batch."""

    def __init__(self, model: nn.Module, loss: Callable[..., torch.Tensor], optimizer: Any = sgd):
        self.model, self.loss = copy.deepcopy(model), loss
        self.optimizer = optimizer(self.model.parameters())

    def update(self, batches: Sequence[Batch], clip: float | None = None) -> float:
        inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        self.optimizer.zero_grad()
        loss = self.loss(self.model(inputs), targets)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        self.optimizer.step()
        return float(loss.detach())

    def evaluate(self, batch: Batch) -> tuple[float, torch.Tensor]:
        training = self.model.training
        self.model.eval()
        with torch.no_grad():
            found = self.model(batch[0])
            value = float(self.loss(found, batch[1]))
        self.model.train(training)
        return value, found

    def off(self, state: dict[str, torch.Tensor]) -> float:
        """The largest difference of any parameter or buffer."""
        expected = self.model.state_dict()
        return max(float((state[name] - value).abs().max()) for name, value in expected.items())


def train_and_evaluate(constraints: dict[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    """Steps, an evaluation and predictions; the largest differences from plain PyTorch."""
    model, loss = seeded(dense), nn.MSELoss()
    made = trainer(model, dense_batch(rows[0]), loss, constraints)
    plain = Plain(model, loss)
    batches = [dense_batch(count, seed) for seed, count in enumerate(rows)]
    losses = [abs(made.step(b).item() - plain.update([b])) for b in batches]
    expected = [plain.evaluate(batch) for batch in batches]
    mean = sum(v * n for (v, _), n in zip(expected, rows, strict=True)) / sum(rows)
    outputs = [made.predict(batch[:1]) for batch in batches]
    return {
        "loss": max(losses),
        "state": plain.off(made.state_dict()),
        "evaluation": abs(made.evaluate(batches)["loss"] - mean),
        "shapes": all(o.shape == e.shape for o, (_, e) in zip(outputs, expected, strict=True)),
        "outputs": max(
            float((o - e).abs().max()) for o, (_, e) in zip(outputs, expected, strict=True)
        ),
    }


def refused(rows: int) -> list[str]:
    """The codes of a step, and of an evaluation, of an objective that is a sum over rows."""
    model, loss = seeded(dense), nn.MSELoss(reduction="sum")
    made = trainer(model, dense_batch(8), loss, {"mesh": "dp=2"}, microbatches=1)
    codes = []
    for call in (made.step, made.eval_step):
        try:
            call(dense_batch(rows))
        except fxpart.FxpartError as fault:
            codes.append(fault.code)
    made.step(dense_batch(4))
    return codes


def fit_accumulated(constraints: dict[str, Any], clip: float | None) -> dict[str, Any]:
    """Three batches to an update, of which the last update of an epoch has fewer."""
    model, loss = seeded(dense), nn.MSELoss()
    rows = (8, 8, 4, 8, 4)
    batches = [dense_batch(count, seed) for seed, count in enumerate(rows)]
    made = trainer(model, batches[0], loss, constraints, clip_norm=clip)
    plain, reported = Plain(model, loss), []
    fitted: FitResult = made.fit(
        batches, epochs=2, accumulate=3, callbacks=[lambda info: reported.append(info.loss)]
    )
    groups = (batches[:3], batches[3:]) * 2
    losses = [plain.update(group, clip) for group in groups]
    return {
        "steps": fitted.steps,
        "loss": max(abs(a - b) for a, b in zip(reported, losses, strict=True)),
        "state": plain.off(made.state_dict()),
    }


def accumulate_in_parts(microbatches: int) -> tuple[float, float]:
    """How far the loss and weights are from plain PyTorch's, where each rank is given its inputs.

    Two stages on two ranks: the first is given tokens, the last labels, of which some are ignored.
    """
    loss, model = nn.CrossEntropyLoss(ignore_index=0), seeded(Tagger)
    batches = [tagger_batch(rows, seed) for seed, rows in enumerate((8, 4, 8))]
    whole = tuple(torch.cat(parts) for parts in zip(*batches, strict=True))
    plain = copy.deepcopy(model)
    expected = loss(plain(whole[0]), whole[1])
    expected.backward()
    sgd(plain.parameters()).step()
    program = fxpart.compile(
        model, "local:2", example_inputs=batches[0], loss=loss, microbatches=microbatches,
        constraints={"mesh": "none", "stages": 2},
    )  # fmt: skip
    made = program.trainer(sgd)
    mine = [(tokens, None) if made.rank == 0 else (None, labels) for tokens, labels in batches]
    fitted = made.fit(mine, accumulate=3)
    state, there = made.state_dict(), plain.state_dict()
    made.close()
    off = max((state[name] - there[name]).abs().max().item() for name in there)
    return abs(fitted.loss - expected.item()), off
