"""Small runs with a folder, in this process: what tests of failures around a run share."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from hand_stages import batch, language
from runtime_programs import make

from fxpart.runtime import InProcess, StepInfo
from fxpart.runtime.training_run import Checkpoints

ROOT = Path(__file__).resolve().parents[2]


def rows(count: int = 12, first: int = 0, size: int = 4) -> list[Any]:
    """Batches that differ."""
    return [batch(size, seed=first + index) for index in range(count)]


def new_trainer(**options: Any) -> Any:
    """Two stages in this process, with the weights that every run begins with."""
    torch.manual_seed(7)
    return make(language((2, 2), tied=False), InProcess(2), **options)


def train(
    folder: Path,
    steps: int,
    *,
    after_step: Callable[[int], object] = lambda step: None,
    data: Any = None,
    fit: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    **kept: Any,
) -> Any:
    """Train a run up to a step; return its result and its trainer, which is closed.

    after_step: called after each step. fit, trainer: their options. kept: of Checkpoints.
    """
    made = new_trainer(**(trainer or {}))

    def on_step(info: StepInfo) -> None:
        after_step(info.step)

    try:
        found = made.fit(
            rows() if data is None else data, steps=steps, callbacks=[on_step],
            checkpoints=Checkpoints(folder, **{"every": 2, **kept}), **(fit or {}),
        )  # fmt: skip
        state = {name: tensor.clone() for name, tensor in made.state_dict().items()}
        return found, state
    finally:
        made.close()
        wait_for_saver()


def wait_for_saver() -> None:
    """Wait for a save that a failed run has left under way."""
    for thread in threading.enumerate():
        if thread.name == "saver":
            thread.join()


@contextmanager
def heard() -> Iterator[list[str]]:
    """Collect the warnings of a block."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(each.message) for each in caught]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether two states are equal to the bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


TARGET = """
import os, time
import fxpart, torch
from torch import nn

BATCH = torch.randn(8, 16, generator=torch.Generator().manual_seed(1)), torch.ones(8, 1)


def data():
    for _ in range(10**6):
        time.sleep(float(os.environ.get("SLOW", 0)))
        yield BATCH


def net():
    layers = [nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)]
    return fxpart.Workload(nn.Sequential(*layers), BATCH, nn.functional.mse_loss, data, 8, "adamw")
"""


def start_command(
    target: Path,
    folder: Path,
    steps: int,
    *more: str,
    slow: float = 0.0,
    before: Sequence[str] = (),
    **process: Any,
) -> subprocess.Popen[str]:
    """Start ``fxpart train`` of the small target in a process of its own.

    before: the command line that runs it, such as a shell's.
    """
    if not target.exists():
        target.write_text(TARGET)
    words = [sys.executable, "-u", "-m", "fxpart", "train", f"{target}:net", "--run", str(folder)]
    words += ["--steps", str(steps), "--cost-model", "roofline", "--check", "off", *more]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "SLOW": str(slow)}
    path = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    given: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(
        [*before, *words], env={**environment, "PYTHONPATH": path}, **{**given, **process}
    )


def read_until(process: subprocess.Popen[str], step: int) -> str:
    """Read the output of a command up to a step; return it."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith(f"step {step:>4} "):
            return "".join(lines)
    raise AssertionError("".join(lines))


def run_commands(commands: Sequence[subprocess.Popen[str]]) -> list[str]:
    """Wait for commands; return their output."""
    try:
        return [command.communicate(timeout=120)[0] for command in commands]
    finally:
        for command in commands:
            command.kill()
