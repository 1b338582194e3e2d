"""Ranks that do not do the same: ``disagreeing_ranks.py NAME``, for a name of ``SCENES``.

Each rank prints one line: its number, the seconds from the disagreement on, and "trained" or the
code and the text of the error.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch
from torch import nn

import fxpart

RANK = int(os.environ["RANK"])
BATCH = torch.ones(8, 4), torch.ones(8, 1)


class Failing(torch.optim.SGD):
    """Its steps raise once it is armed; before that, steps on trial are as any."""

    armed = False

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)

    def step(self, closure: Any = None) -> Any:
        if Failing.armed:
            raise ArithmeticError("the state of rank 1 is gone")
        return super().step(closure)


def failing_factory(parameters: Any) -> torch.optim.Optimizer:
    if RANK == 1:
        raise LookupError("there is no group for these parameters")
    return torch.optim.SGD(parameters, lr=0.1)


def program(**constraints: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return fxpart.compile(
        model, "local:2", example_inputs=BATCH, loss=nn.MSELoss(), microbatches=1,
        constraints=constraints or {"dp": 2, "tp": 1, "stages": 1, "zero": 1},
    )  # fmt: skip


def steps(trainer: Any, count: int = 5) -> None:
    for _ in range(count):
        trainer.step(BATCH)


def fails_after_two_steps(trainer: Any) -> None:
    steps(trainer, 2)
    Failing.armed = RANK == 1
    steps(trainer, 3)


def evaluates_alone(trainer: Any) -> None:
    if RANK == 0:
        trainer.evaluate([BATCH])
    steps(trainer)


def saves_alone(trainer: Any) -> None:
    if RANK == 1:
        trainer.save_checkpoint(Path(gettempdir()) / f"never-{os.getpid()}")
    steps(trainer)


def updates_alone(trainer: Any) -> None:
    trainer.backward(BATCH)
    if RANK == 0:
        trainer.update()
    steps(trainer)


def drops_gradients_alone(trainer: Any) -> None:
    trainer.backward(BATCH)
    if RANK == 1:
        trainer.zero_grad()
    steps(trainer)


def reads_the_whole_model_alone(trainer: Any) -> None:
    if RANK == 1:
        assert len(trainer.state_dict()) == 4
    steps(trainer)


def fits_while_the_other_steps(trainer: Any) -> None:
    if RANK == 0:
        trainer.fit([BATCH] * 3)
    else:
        steps(trainer)


def trains_without_gradients(trainer: Any) -> None:
    with torch.set_grad_enabled(RANK == 0):
        steps(trainer)


def deterministic_alone(trainer: Any) -> None:
    torch.use_deterministic_algorithms(RANK == 1)
    steps(trainer)


def failing_batches(trainer: Any) -> None:
    def batches() -> Iterator[Any]:
        yield BATCH
        if RANK == 1:
            raise EOFError("shard 1 ends early")
        yield BATCH

    trainer.fit(batches())


def catches_and_goes_on(trainer: Any) -> None:
    """Every rank gets the same error, one is slow to go on: nobody is to blame."""
    for _ in range(2):
        try:
            trainer.step((BATCH[0], BATCH[1], BATCH[1]))
        except fxpart.FxpartError:
            time.sleep(5 * RANK)
    steps(trainer)


REPLICAS = {"dp": 2, "tp": 1, "stages": 1, "zero": 0}
STAGES = {"mesh": "none", "stages": 2}
SCENES: dict[str, tuple[Callable[[Any], None], Any, dict[str, Any]]] = {
    "evaluates a stage alone": (evaluates_alone, "sgd", STAGES),
    "saves alone": (saves_alone, "sgd", {}),
    "updates alone": (updates_alone, "sgd", REPLICAS),
    "drops gradients alone": (drops_gradients_alone, "sgd", REPLICAS),
    "reads the whole model alone": (reads_the_whole_model_alone, "sgd", REPLICAS),
    "fits while the other steps": (fits_while_the_other_steps, "sgd", STAGES),
    "trains without gradients": (trains_without_gradients, "sgd", STAGES),
    "deterministic alone": (deterministic_alone, "sgd", REPLICAS),
    "failing optimizer": (fails_after_two_steps, Failing, STAGES),
    "failing optimizer, sharded": (fails_after_two_steps, "sharded", {}),
    "failing factory": (steps, failing_factory, STAGES),
    "failing batches": (failing_batches, "sgd", REPLICAS),
    "catches and goes on": (catches_and_goes_on, "sgd", STAGES),
}


def main(name: str) -> None:
    torch.set_num_threads(1)
    scene, optimizer, constraints = SCENES[name]
    if optimizer == "sharded":
        Failing.elementwise = True  # type: ignore[attr-defined]
        optimizer = Failing
    made = program(**constraints)
    begin = time.monotonic()
    try:
        scene(made.trainer(optimizer))
        found = "trained"
    except Exception as error:
        found = f"{getattr(error, 'code', type(error).__name__)} {' '.join(str(error).split())}"
    sys.stdout.write(f"rank {RANK}, {time.monotonic() - begin:.1f}: {found}\n")
    sys.stdout.flush()
    if found != "trained":
        time.sleep(8)  # as a notebook does: the other rank must not have to see this one end


if __name__ == "__main__":
    main(sys.argv[1])
