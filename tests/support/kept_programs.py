"""What tests and rank processes run of runs that are kept: each returns plain data to compare."""

from __future__ import annotations

import os
import random
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import stream_programs
import torch
from hand_stages import batch, language
from runtime_programs import Bits, bits, make
from torch.utils.data import DataLoader, Dataset

from fxpart.runtime import InProcess, connect
from fxpart.runtime.callbacks import Callback, EarlyStopping, StepInfo
from fxpart.runtime.training_run import Checkpoints

CUT = (2, 2)
EVERY = 3
STEPS = torch.optim.lr_scheduler.StepLR
Result = tuple[int, int, str, str, dict[str, float], Bits, int]


class Drawn(Dataset[dict[str, torch.Tensor]]):
    """Samples that a user's own code changes at random, each time that they are loaded."""

    def __init__(self, size: int = 20) -> None:
        """size: how many there are."""
        self.rows, self.size = batch(size, seed=5), size
        self.own = np.random.default_rng(3)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        found = {name: self.rows[name][index].clone() for name in ("ids", "labels")}
        ids = found["ids"]
        ids[random.randrange(len(ids))] = int(torch.randint(0, 5, ()))
        ids[np.random.randint(len(ids))] = int(self.own.integers(5))
        return found


def collated(rows: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """A batch for the model; its mask has no rows."""
    return {**batch(len(rows)), **torch.utils.data.default_collate(rows)}


def loader(workers: int = 0) -> DataLoader[Any]:
    """Five batches of an epoch, shuffled."""
    return DataLoader(Drawn(), batch_size=4, shuffle=True, num_workers=workers, collate_fn=collated)


class Stops(Callback):
    """Sends a signal to its own process after a step; counts the steps that it has seen."""

    def __init__(self, at: int = 0, rank: int = 0, kind: int = signal.SIGTERM) -> None:
        """at: 0 is never. rank: whose process it is."""
        self.at, self.rank, self.kind, self.seen = at, rank, kind, 0

    def on_step(self, info: StepInfo) -> None:
        """One more."""
        self.seen += 1
        if info.step == self.at and info.rank == self.rank:
            os.kill(os.getpid(), self.kind)

    def state_dict(self) -> dict[str, Any]:
        """The count."""
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The count that was."""
        self.seen = state["seen"]


def held_out() -> list[Any]:
    """What evaluations are made on."""
    return [batch(4, seed=9)]


# By name: the trainer's options, and those of fit.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {"steps": 13}),
    "epochs": ({"clip_norm": 0.1}, {"epochs": 3}),
    "accumulated": ({}, {"steps": 12, "accumulate": 2}),
    "scheduled": (
        {},
        {
            "epochs": 3, "scheduler_every": "epoch",
            "scheduler": partial(torch.optim.lr_scheduler.MultiStepLR, milestones=[1, 2]),
        },
    ),
    "cycle": (
        {},
        {
            "steps": 12,
            "scheduler": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
        },
    ),
    "plateau": (
        {},
        {
            "steps": 12, "evaluate": held_out, "every": 2,
            "scheduler": partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0),
        },
    ),
    "early": ({}, {"steps": 40, "evaluate": held_out, "every": 2}),
    "workers": ({}, {"steps": 12}),
    "stash": ({"weights": "stash"}, {"steps": 13}),
    "spectrain": (
        {"weights": "spectrain", "optimizer": "adamw", "scheduler": partial(STEPS, step_size=4)},
        {"steps": 25},
    ),
    "delayed": (
        {"weights": "naive", "clip_norm": 0.1, "clip": "delayed"}, {"epochs": 3},
    ),
}  # fmt: skip
STREAMS = tuple(name for name, (options, _) in CASES.items() if "weights" in options)


def trainer(name: str, here: bool) -> Any:
    """Of :func:`hand_stages.language`, in this process or on two ranks."""
    torch.manual_seed(7)
    hand = language(CUT, tied=False)
    transport = InProcess(2) if here else connect(2)
    stages = {i: stage for i, stage in enumerate(hand.stages) if i in transport.local}
    given = {"evaluation": lambda: (hand.spec(), stages), **CASES[name][0]}
    return (stream_programs.make if name in STREAMS else make)(hand, transport, **given)


def seed() -> None:
    """All that the data draws from."""
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)


def go(
    folder: str, name: str, here: bool, stop: tuple[int, int, int] = (0, 0, 0), **kept: Any
) -> Result:
    """One generation: steps, epochs, why it ended, loss, values, state, steps that were seen.

    stop: see :class:`Stops`.
    """
    seed()
    made, run = trainer(name, here), dict(CASES[name][1])
    if name == "early":
        run["early_stopping"] = EarlyStopping(patience=4, min_delta=0.1)
    stops = Stops(*stop)
    data = loader(workers=2 if name == "workers" else 0)
    checkpoints = Checkpoints(Path(folder), **{"every": EVERY, **kept})
    try:
        fitted = made.fit(data, callbacks=[stops], checkpoints=checkpoints, **run)
        state = bits(made.state_dict())
        counts = fitted.steps, fitted.epochs, fitted.why
        return *counts, repr(fitted.loss), dict(fitted.values), state, stops.seen
    finally:
        made.close()


def go_by_paths(paths: list[str], name: str, inside: str) -> tuple[int, str, bool]:
    """As :func:`go`, with a path of the run's folder for each rank, also a relative one in
    ``inside``; then save a checkpoint there and load it. Steps, why it ended, whether it is saved.
    """
    seed()
    made = trainer(name, False)
    before = Path.cwd()
    os.chdir(inside)
    folder = Path(paths[made.rank])
    leave = Callback()
    leave.on_step = lambda info: os.chdir(before)  # type: ignore[method-assign]
    try:
        done = made.fit(
            loader(), callbacks=[leave], checkpoints=Checkpoints(folder, every=EVERY), steps=4
        )
        os.chdir(inside)
        made.load_checkpoint(made.save_checkpoint(folder / "own"))
        return done.steps, done.why, bool(done.saved)
    finally:
        os.chdir(before)
        made.close()


def by_hand(name: str, drains: set[int]) -> tuple[list[float], Bits]:
    """An asynchronous run in a plain loop, which is drained after these steps; losses, state."""
    seed()
    made, run = trainer(name, True), CASES[name][1]
    losses: list[float] = []
    step = epoch = 0
    data = loader()
    while step < run.get("steps", 1 << 30) and epoch < run.get("epochs", 1 << 30):
        for given in data:
            made.submit(given)
            step += 1
            if step in drains:
                losses += [float(loss) for _, loss in made.finish()]
            if step == run.get("steps"):
                break
        epoch += 1
    losses += [float(loss) for _, loss in made.finish()]
    state = bits(made.state_dict())
    made.close()
    return losses, state
