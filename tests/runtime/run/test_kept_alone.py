"""A run that goes on in another trainer of one process: as if it had never ended."""

from __future__ import annotations

import os
import random
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stream_programs
import torch
from hand_stages import batch, language
from runtime_programs import bits, make
from torch.utils.data import DataLoader, Dataset

from fxpart.runtime import InProcess
from fxpart.runtime.callbacks import Callback, Event, StepInfo
from fxpart.runtime.run import Checkpoints
from fxpart.runtime.run.generations import read
from fxpart.runtime.run.ledger import check, updates

CUT = (2, 2)


class Drawn(Dataset[dict[str, torch.Tensor]]):
    """Samples that a user's own code changes at random, each time that they are loaded."""

    def __init__(self, size: int = 20) -> None:
        self.rows = batch(size, seed=5)
        self.size, self.own = size, np.random.default_rng(3)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        found = {name: self.rows[name][index].clone() for name in ("ids", "labels")}
        tokens = found["ids"]
        tokens[random.randrange(len(tokens))] = int(torch.randint(0, 5, ()))
        tokens[np.random.randint(len(tokens))] = int(self.own.integers(5))
        return found


def collated(rows: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """A batch for the model; its mask has no rows."""
    return {**batch(len(rows)), **torch.utils.data.default_collate(rows)}


class Stops(Callback):
    """Asks the run to end after a step, as a signal does; counts what it has seen."""

    def __init__(self, at: int = 0, kill: int = signal.SIGTERM) -> None:
        self.at, self.kind, self.seen = at, kill, 0

    def on_step(self, info: StepInfo) -> None:
        self.seen += 1
        if info.step == self.at:
            os.kill(os.getpid(), self.kind)

    def on_event(self, event: Event) -> None:
        if event.kind == "failure":
            raise AssertionError(event.error)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def trainer(**options: Any) -> Any:
    torch.manual_seed(7)
    hand = language(CUT, tied=False)
    stages = dict(enumerate(hand.stages))
    given = {"evaluation": lambda: (hand.spec(), stages), **options}
    if "weights" in given:
        return stream_programs.make(hand, InProcess(2), **given)
    return make(hand, InProcess(2), **given)


def go(folder: Path, stop: Stops, made: Any = None, workers: int = 0, **run: Any) -> Any:
    """One generation; what it gave, and the digest of the state."""
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    made = trainer() if made is None else made
    data = DataLoader(Drawn(), batch_size=4, shuffle=True, num_workers=workers, collate_fn=collated)
    checkpoints = Checkpoints(folder, every=3, **run.pop("kept", {}))
    fitted = made.fit(data, callbacks=[stop], checkpoints=checkpoints, **run)
    return fitted, bits(made.state_dict()), stop.seen


RUNS: dict[str, dict[str, Any]] = {
    "plain": {"steps": 13},
    "epochs": {"epochs": 3},
    "accumulated": {"steps": 8, "accumulate": 2},
    "scheduled": {
        "epochs": 3, "scheduler_every": "epoch",
        "scheduler": partial(torch.optim.lr_scheduler.MultiStepLR, milestones=[1, 2]),
    },
    "cycle": {
        "steps": 12,
        "scheduler": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_was_stopped_goes_on(name: str, tmp_path: Path) -> None:
    whole = go(tmp_path / "whole", Stops(), **RUNS[name])
    first, _, _ = go(tmp_path / "parts", Stops(4), **RUNS[name])
    assert (first.steps, first.why) == (4, "SIGTERM to rank 0")
    second, _, seen = go(tmp_path / "parts", Stops(7, signal.SIGUSR1), **RUNS[name])
    assert (second.steps, second.why, seen) == (7, "SIGUSR1 to rank 0", 7)
    assert go(tmp_path / "parts", Stops(), **RUNS[name]) == whole
    parts, ledger = (updates(tmp_path / f / "steps.jsonl") for f in ("parts", "whole"))
    assert parts == ledger and len(ledger) == whole[0].steps
    told = check(tmp_path / "parts" / "steps.jsonl")
    assert (told.problems, told.generations, told.redone) == ((), 3, 0)
    # A run that has ended in order has nothing left to do.
    again = go(tmp_path / "parts", Stops(), **RUNS[name])
    assert again == whole
    assert [g.ended.how for g in read(tmp_path / "parts" / "generations.jsonl") if g.ended] == [
        "SIGTERM to rank 0", "SIGUSR1 to rank 0", whole[0].why, whole[0].why,
    ]  # fmt: skip
