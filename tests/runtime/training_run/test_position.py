"""The data's position: the batches that come next are those of one pass that nobody stopped."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from kept_programs import loader, seed
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from fxpart.checkpoint.value_codec import from_json_value, to_json_value
from fxpart.errors import FxpartError
from fxpart.runtime.training_run.data_position import DataPosition

EPOCHS = 3
COUNT = 5  # batches of each


def function() -> Iterator[torch.Tensor]:
    """Batches of a generator, with random numbers of three kinds."""
    order = torch.randperm(COUNT)
    for index in order:
        yield torch.tensor([float(index), random.random(), np.random.rand(), float(torch.rand(()))])


class Stream(IterableDataset[torch.Tensor]):
    """A data set without indices, which draws from a generator of its own."""

    def __init__(self) -> None:
        self.generator = random.Random(4)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(4 * COUNT):
            yield torch.tensor([index, self.generator.random()])


class Knows:
    """A loader that knows its own place."""

    def __init__(self) -> None:
        self.at, self.loaded = 0, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < COUNT:
            self.at, self.loaded = self.at + 1, self.loaded + 1
            yield torch.tensor(self.at)
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def rows() -> TensorDataset:
    return TensorDataset(torch.arange(20.0))


def sharded() -> DataLoader[Any]:
    sampler = DistributedSampler(rows(), num_replicas=1, rank=0, shuffle=True, seed=3)
    return DataLoader(rows(), batch_size=4, sampler=sampler)


def own_generator() -> DataLoader[Any]:
    return DataLoader(
        rows(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(2)
    )


DATA: dict[str, Callable[[], Any]] = {
    "list": lambda: [torch.tensor(i) for i in range(COUNT)],
    "function": lambda: function,
    "shuffled": lambda: loader(),
    "workers": lambda: loader(workers=2),
    "generator": own_generator,
    "set_epoch": sharded,
    "stream": lambda: DataLoader(Stream(), batch_size=4),
    "state_dict": Knows,
}


def told(batch: Any) -> str:
    return repr(batch)


def whole(make: Callable[[], Any]) -> list[list[str]]:
    """The batches of each epoch, in one go."""
    seed()
    position, found = DataPosition(make(), records=True), []
    for _ in range(EPOCHS):
        found.append([])
        for batch in position:
            found[-1].append(told(batch))
            position.used += 1
            torch.rand(2)  # others draw, too
        position.next_epoch()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("at", [0, 1, 3, 5, 8, 12])
def test_it_goes_on(name: str, at: int) -> None:
    """Stopped after so many batches, by another object in another random state."""
    expected = whole(DATA[name])
    seed()
    position, count = DataPosition(DATA[name](), records=True), 0
    state = position.state()
    while count < at:
        for batch in position:
            assert told(batch) == expected[position.epoch][position.used]
            position.used, count = position.used + 1, count + 1
            torch.rand(2)
            if count == at:
                state = position.state()
                break
        else:
            position.next_epoch()
    state = from_json_value(to_json_value(state))
    random.seed(99), np.random.seed(99), torch.manual_seed(99)
    again = DataPosition(DATA[name](), records=True)
    again.load(state)
    while again.epoch < EPOCHS:
        for batch in again:
            assert told(batch) == expected[again.epoch][again.used]
            again.used += 1
            torch.rand(2)
        assert again.used == len(expected[again.epoch])
        again.next_epoch()


def test_batches_before_are_not_loaded() -> None:
    class Counts(TensorDataset):
        loaded = 0

        def __getitem__(self, index: Any) -> Any:
            Counts.loaded += 1
            return super().__getitem__(index)

    position = DataPosition(DataLoader(Counts(torch.arange(20.0)), batch_size=4), records=True)
    batches = iter(position)
    for _ in range(3):
        next(batches)
        position.used += 1
    state, Counts.loaded = position.state(), 0
    again = DataPosition(DataLoader(Counts(torch.arange(20.0)), batch_size=4), records=True)
    again.load(state)
    assert len(list(again)) == 2 and Counts.loaded == 8
    knows = Knows()
    other = DataPosition(knows, records=True)
    other.load({**state, "now": {**state["now"], "parts": {"": {"at": 3}}}})
    assert len(list(other)) == 2 and knows.loaded == 2


@pytest.mark.parametrize("make", [DATA["list"], lambda: DataLoader(rows(), batch_size=4)])
def test_data_that_has_become_shorter(make: Callable[[], Any]) -> None:
    position = DataPosition(make(), records=True)
    list(position)
    position.used = 9
    state = position.state()
    again = DataPosition(make(), records=True)
    again.load(state)
    with pytest.raises(FxpartError, match="9 batches were used before, but there are only 5 now"):
        list(again)
