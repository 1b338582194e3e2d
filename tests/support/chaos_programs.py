"""A run that may be killed at any moment and started again: the same command goes on with it.

    torchrun --nproc-per-node 4 -- tests/support/chaos_programs.py --run DIR --case NAME --steps 30

When it has ended, ``DIR/final.json`` holds digests of parameters and optimizer state, and
``DIR/steps.jsonl`` every loss: equal to the bit to those of a run that nobody disturbed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import asynchronous_models as models
import kill_points
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import fxpart
from fxpart.environment import read_launch
from fxpart.runtime import StepInfo
from fxpart.runtime.training_run import Checkpoints
from fxpart.training.trainer_factory import load_trainer

RANKS = 4
ROWS, BATCH = 44, 8  # five batches of an epoch, and a smaller one


@dataclass(frozen=True)
class Case:
    """A model, on a plan. mode: "sync" or "async"."""

    model: str
    plan: str
    mode: str

    @property
    def name(self) -> str:
        """Such as "gpt-pipeline4-sync"."""
        return f"{self.model}-{self.plan}-{self.mode}"

    @property
    def constraints(self) -> dict[str, Any]:
        """What the planner is told."""
        return {"pipeline4": {"stages": 4}, "pipeline2": {"stages": 2, "mesh": "dp=2"}}[self.plan]


CASES = {
    case.name: case
    for model in ("mlp", "gpt")
    for plan in ("pipeline4", "pipeline2")
    for mode in ("sync", "async")
    for case in [Case(model, plan, mode)]
}


class Rows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Rows of the model's task; one number in each is drawn anew whenever it is loaded."""

    def __init__(self, model: str) -> None:
        """model: "mlp" or "gpt"."""
        self._mlp = model == "mlp"
        make: Any = models.mlp_batches if self._mlp else models.gpt_batches
        ((self._inputs, self._targets),) = make(1, ROWS)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        row = self._inputs[index].clone()
        row[0] = torch.randn(()) if self._mlp else torch.randint(0, 11, ())
        return row, self._targets[index]


def model_of(case: Case) -> nn.Module:
    """The module, with the weights that it always begins with."""
    torch.manual_seed(0)
    return models.mlp(4) if case.model == "mlp" else models.Gpt(4)


def prepare(case: Case, folder: Path) -> Path:
    """Compile the case into a program of ``folder``, unless it is there; the program's folder."""
    target = folder / case.name
    if not target.exists():
        program = fxpart.compile(
            model_of(case), "local:4", example_inputs=next(iter(loader(case))), microbatches=4,
            loss=functional.cross_entropy if case.model == "mlp" else models.gpt_loss,
            mode=case.mode, constraints=case.constraints,
        )  # fmt: skip
        beside = folder / f".{case.name}-{os.getpid()}"
        program.export(beside)
        try:
            beside.rename(target)
        except OSError:
            assert target.exists(), "another process has made it"
    return target


def loader(case: Case) -> DataLoader[Any]:
    """Shuffled anew in each epoch, by torch's own generator."""
    return DataLoader(Rows(case.model), batch_size=BATCH, shuffle=True)


def trainer_of(case: Case, program: Path) -> Any:
    """A trainer of this process's ranks."""
    weights = {name: t.detach() for name, t in model_of(case).state_dict().items()}
    adamw, sgd = (
        partial(torch.optim.AdamW, lr=0.01),
        partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    )
    options: dict[str, Any] = {"clip_norm": 1.0} if case.plan == "pipeline4" else {}
    if case.mode == "async":
        options["scheduler"] = partial(torch.optim.lr_scheduler.StepLR, step_size=7, gamma=0.8)
    optimizer = adamw if case.model == "gpt" else sgd
    return load_trainer(program, optimizer, weights=weights, **options)


def digests(trainer: Any) -> dict[str, str]:
    """Of parameters, and of the optimizer's state."""
    parameters = trainer.state_dict()
    optimizer = trainer.optimizer_state_dict()["state"]
    slots = {f"{n}/{slot}": value for n, held in optimizer.items() for slot, value in held.items()}
    return {"parameters": _digest(parameters), "optimizer": _digest(slots)}


def _digest(values: dict[str, Any]) -> str:
    found = hashlib.sha256()
    for name, value in sorted(values.items()):
        tensor = torch.as_tensor(value).detach().cpu().contiguous()
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def main(arguments: Sequence[str]) -> int:
    """One generation of the run."""
    given = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    case, folder = CASES[given.case], Path(given.run)
    programs = Path(given.programs) if given.programs else folder / "programs"
    programs.mkdir(parents=True, exist_ok=True)
    here = read_launch()
    first = here is None or here.rank == 0
    if given.prepare:
        prepare(case, programs)
        return 0
    program = prepare(case, programs) if first else _awaited(programs / case.name)
    if here is not None:
        kill_points.install(folder, here.rank)
    trainer = trainer_of(case, program)
    torch.manual_seed(1)
    kept = Checkpoints(folder, every=given.every, keep=given.keep, restarts=given.restarts)
    run: dict[str, Any] = {"steps": given.steps, "checkpoints": kept}
    if case.mode == "sync":
        run["scheduler"] = partial(torch.optim.lr_scheduler.StepLR, step_size=7, gamma=0.8)

    def pause(info: StepInfo) -> None:
        time.sleep(given.pause)

    fitted = trainer.fit(loader(case), callbacks=[pause], **run)
    found = digests(trainer) | {"steps": fitted.steps, "why": fitted.why}
    if first:
        beside = folder / f".final-{os.getpid()}"
        beside.write_text(json.dumps(found))
        beside.replace(folder / "final.json")
        sys.stdout.write(json.dumps(found) + "\n")
    trainer.close()
    return 0


def _awaited(program: Path) -> Path:
    for _ in _seconds(120.0):
        if program.exists():
            return program
    raise SystemExit(f"nobody made {program}")


def _seconds(limit: float) -> Iterator[None]:
    end = time.monotonic() + limit
    while time.monotonic() < end:
        yield
        time.sleep(0.05)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", required=True, help="the run's folder")
    parser.add_argument("--case", required=True, choices=sorted(CASES))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--every", type=int, default=5, help="updates between checkpoints")
    parser.add_argument("--keep", type=int, default=2)
    parser.add_argument("--restarts", type=int, default=3, help="in a row without progress")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step")
    parser.add_argument("--programs", help="where compiled cases are, by default in the run")
    parser.add_argument("--prepare", action="store_true", help="compile the case, and no more")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
