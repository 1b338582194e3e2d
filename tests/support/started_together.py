"""Processes that start the same run at the same time: one trains, the others are refused.

The one that trains waits in its data until all others have ended.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple

from launcher_kills import differences
from ranks import die_with_parent, python_path

from fxpart.checkpoint.run_directory import RunDir
from fxpart.errors import FxpartError
from fxpart.runtime.training_run.generations import load_generations
from fxpart.runtime.training_run.ledger import check_ledger, read_updates

KINDS = ("command", "supervisor", "torchrun", "script")
SUPPORT = Path(__file__).resolve().parent
STEPS = 6  # updates in a round
MOST_RANKS = 4  # of all starters
_WAIT = 300.0  # seconds, on a busy machine
_LONGEST = 1.5  # seconds between the first start and the last
_TARGET = """
import os, sys, time
import fxpart, torch
from fxpart.runtime.training_run import Checkpoints
from torch import nn

AFTER, GATE = int(os.environ["AFTER"]), os.environ["GATE"]


def data():
    draw = torch.Generator().manual_seed(1)
    for index in range(10**6):
        while index >= AFTER + 3 and not os.path.exists(GATE):
            time.sleep(0.02)
        yield torch.randn(8, 16, generator=draw), torch.randn(8, 1, generator=draw)


def net():
    layers = [nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)]
    model, example = nn.Sequential(*layers), (torch.randn(8, 16), torch.randn(8, 1))
    return fxpart.Workload(model, example, nn.functional.mse_loss, data, 8, "adamw")


if __name__ == "__main__":
    folder, steps, ranks = sys.argv[1:]
    torch.manual_seed(0)
    made = net()
    program = fxpart.compile(
        made.model, f"local:{ranks}", example_inputs=made.example, loss=made.loss,
        optimizer="adamw", batch_size=8, cost_model="roofline",
    )
    program.trainer().fit(
        data, steps=int(steps), checkpoints=Checkpoints(folder, every=3)
    )
"""


class Round(NamedTuple):
    """The starters of a round with their delays in seconds, and how many ranks each has."""

    kinds: tuple[str, ...]
    delays: tuple[float, ...]
    ranks: int


def draw_round(draw: random.Random, ranks: int) -> Round:
    """Two to four starters of random kinds, with ``MOST_RANKS`` ranks together at most."""
    kinds = draw.sample(KINDS * 2, draw.randint(2, max(2, MOST_RANKS // ranks)))
    delays = [round(draw.uniform(0.0, _LONGEST), 3) for _ in kinds]
    return Round(tuple(kinds), tuple(delays), ranks)


@dataclass
class Compared:
    """What was found in rounds. trained: how many rounds each kind trained. starters: of all."""

    trained: dict[str, int]
    starters: int = 0
    faults: list[str] = field(default_factory=list)


def compare(root: Path, *, seed: int, rounds: int) -> Compared:
    """Play rounds of one run, beside the same run that is started alone."""
    draw = random.Random(seed)
    ranks = draw.choice((1, 2))
    target, gate = root / "nets.py", root / "gate"
    target.write_text(_TARGET)
    gate.touch()
    calm, shared = RunDir(root / "calm"), RunDir(root / "shared")
    found = Compared(dict.fromkeys(KINDS, 0))
    alone = _Starter("command", root, calm, rounds * STEPS, 0, ranks)
    if alone.wait(time.monotonic() + _WAIT) != 0:
        found.faults.append(f"seed {seed}: alone, {alone.describe()}")
        return found
    for index in range(rounds):
        gate.unlink()
        now, after = draw_round(draw, ranks), index * STEPS
        where = f"seed {seed}, round {index}, {now}"
        faults, kind = _play(now, root, shared, after)
        gate.touch()
        if faults:
            found.faults += [f"{where}: {fault}" for fault in faults]
            return found
        found.trained[kind] += 1
        found.starters += len(now.kinds)
    found.faults += [f"seed {seed}: {each}" for each in differences(calm, shared, "sync")]
    return found


def _play(now: Round, root: Path, run: RunDir, after: int) -> tuple[list[str], str]:
    """One round; return its faults, and the kind that trained."""
    starters, found = list[_Starter](), list[str]()
    limit = time.monotonic() + _WAIT
    before = len(_generations(run))
    try:
        for delay, kind in sorted(zip(now.delays, now.kinds, strict=True)):
            time.sleep(max(0.0, delay - (starters[-1].delay if starters else 0.0)))
            starters.append(_Starter(kind, root, run, after + STEPS, after, now.ranks, delay))
        while len(left := [each for each in starters if each.runs]) > 1:
            if time.monotonic() > limit:
                found.append(f"{len(left)} train or wait: {[each.describe() for each in left]}")
                return found, ""
            time.sleep(0.05)
        (root / "gate").touch()
        found += [each.describe() for each in starters if each not in left and not each.refused]
        if not left:
            found.append("nobody trains")
        elif left[0].wait(limit) != 0:
            found.append(left[0].describe())
    finally:
        for each in starters:
            each.kill()
    found += check_ledger(run.ledger).problems
    if (steps := len(read_updates(run.ledger))) != after + STEPS:
        found.append(f"the ledger has {steps} steps instead of {after + STEPS}")
    if (count := len(_generations(run)) - before) != 1:
        found.append(f"{count} generations began")
    return found, left[0].kind if left else ""


def _generations(run: RunDir) -> Sequence[object]:
    try:
        return load_generations(run.generations)
    except FxpartError as failure:
        return [str(failure)] * 1000


class _Starter:
    """A process that starts the run. kind: of KINDS. delay: seconds after the round's begin."""

    def __init__(
        self, kind: str, root: Path, run: RunDir, steps: int, after: int, ranks: int,
        delay: float = 0.0,
    ) -> None:  # fmt: skip
        self.kind, self.delay = kind, delay
        target, python = root / "nets.py", [sys.executable, "-u"]
        train = ["-m", "fxpart", "train", f"{target}:net", "-c", f"local:{ranks}"]
        train += ["--cost-model", "roofline", "--run-dir", str(run.path), "--every", "3"]
        train += ["--steps", str(steps)]
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        words = {
            "command": train,
            "supervisor": [*train, "--nproc", str(ranks)],
            "torchrun": [*torchrun, *train],
            "script": [str(target), str(run.path), str(steps), str(ranks)],
        }[kind]
        self._output: IO[bytes] = open(root / f"output-{len(list(root.iterdir()))}", "w+b")
        more = {"AFTER": str(after), "GATE": str(root / "gate"), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [*python, *words], stdout=self._output, stderr=subprocess.STDOUT,
            env={**os.environ, **more, "PYTHONPATH": python_path(SUPPORT)}, start_new_session=True,
            preexec_fn=die_with_parent,
        )  # fmt: skip

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    @property
    def refused(self) -> bool:
        """Whether it has ended with one error, and the status of its kind for it."""
        status = 1 if self.kind in ("script", "torchrun") else 2
        text = self.read()
        clear = "FXP521 " in text and "internal error" not in text and "\nstep " not in text
        return self._process.poll() == status and clear

    def wait(self, limit: float) -> int | None:
        """The status, or None if it runs at the limit, in which case it is killed."""
        try:
            return self._process.wait(max(0.1, limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()
            return None

    def read(self) -> str:
        """What it has printed."""
        self._output.seek(0)
        return self._output.read().decode(errors="replace")

    def describe(self) -> str:
        """Its kind, status and output."""
        return f"{self.kind}, status {self._process.poll()}\n{self.read()[-3000:]}"

    def kill(self) -> None:
        """End its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
