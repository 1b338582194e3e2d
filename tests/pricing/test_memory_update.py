"""What optimizers take for a moment, beside torch's allocator; limits leave room for it."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import pytest
import torch
from torch import nn

import fxpart
from fxpart.cluster.model import Cluster
from fxpart.compat.optimizer_choice import choose
from fxpart.errors import FxpartError
from fxpart.pricing.optimizer_temporaries import UNKNOWN, OptimizerTemporaries, temporaries
from fxpart.profiling.memory import allocations

ROWS, WIDTH = 40_000, 4


class Words(nn.Module):
    """A table that is most of the model, for batches of a few words."""

    def __init__(self) -> None:
        """Half a million parameters, nearly all in the table."""
        super().__init__()
        self.table = nn.Embedding(30_000, 16)
        self.out = nn.Linear(16, 4)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """The mean word's logits."""
        found: torch.Tensor = self.out(self.table(words).mean(1))
        return found


NAMES = (
    "adadelta", "adagrad", "adam", "adamax", "adamw", "asgd", "nadam", "radam", "rmsprop", "rprop",
    "sgd",
)  # fmt: skip
USABLE = 0.92  # of a device's memory
WORDS = torch.zeros(4, 3, dtype=torch.long)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_what_the_allocator_gives(name: str) -> None:
    """Weight after weight; of the one before something may still be held."""
    sizes = (1 << 16, 1 << 18, 1 << 18, 1 << 14, 1 << 17)
    weights = [nn.Parameter(torch.randn(size)) for size in sizes]
    choice = choose(name)
    optimizer, counted = choice.make(weights), temporaries(choice)
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer.step()  # its state is made
    expected = max(
        counted.of(weight.nbytes, before) for weight, before in zip(
            weights, (0, *(w.nbytes for w in weights)), strict=False
        )
    )  # fmt: skip
    real = allocations(optimizer.step).peak
    assert expected == pytest.approx(real, rel=0.01, abs=4096)


@pytest.mark.parametrize(
    ("name", "bytes_of_row"), [("adagrad", 4 * WIDTH + 8), ("rowwiseadagrad", 4)]
)
def test_state_of_a_table_and_its_row_numbers(name: str, bytes_of_row: int) -> None:
    """Adagrad calls sparse_mask, which numbers all rows; row-wise Adagrad does not."""
    bag = nn.EmbeddingBag(ROWS, WIDTH, sparse=True)
    program = fxpart.compile(
        bag, "local:1", example_inputs=(torch.zeros(4, 2, dtype=torch.long),), optimizer=name,
        loss=lambda out: out.sum(), check="off",
    )  # fmt: skip
    found = program.plan.prediction.ranks[0].memory.optimizer
    steps = 4 if name == "adagrad" else 0  # its counter
    assert found == ROWS * bytes_of_row + steps


def test_what_cannot_be_stepped_alone_counts_as_adamw() -> None:
    def refuses(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        raise ValueError(f"not for {len(list(parameters))}")

    assert temporaries(choose(refuses)) == UNKNOWN == temporaries(choose("adamw"))


def test_several_count_as_the_largest() -> None:
    found = temporaries(choose({"a*": "adamax", "b*": "rmsprop", "*": "radam"}))
    assert found == OptimizerTemporaries(own=2.0, carried=1.0)


def plan_for(memory: int) -> fxpart.Plan:
    """On one device of so many usable bytes."""
    one = Cluster.local(1)
    device = msgspec.structs.replace(one.devices[0], memory=round(memory / USABLE))
    cluster = msgspec.structs.replace(one, devices=(device,))
    return fxpart.compile(
        Words(),
        cluster,
        example_inputs=(WORDS,),
        loss=lambda y: y.square().mean(),
        cost_model="roofline",
    ).plan


@pytest.mark.slow
def test_a_limit_leaves_room_for_it() -> None:
    row = plan_for(1 << 30).prediction.ranks[0]
    table = 30_000 * 16 * 4
    assert row.update > row.memory.total
    assert row.update - 2 * table == row.memory.total - row.memory.activations
    assert plan_for(row.update + 1).prediction.ranks[0].tensors == row.update
    with pytest.raises(FxpartError) as caught:
        plan_for(row.update - 2)
    problem = caught.value.problems[0]
    assert problem.code == "FXP204" and "the optimizer's temporaries 3.66 MiB" in problem.why
