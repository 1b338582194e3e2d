"""How fast this machine is at the moment: the same training steps, by torch alone, again and again.

Imported by the benchmarks beside it; run, it is the process that computes beside another one. On a
shared machine the same work takes up to 1.7 times as long a minute later, and two processes at once
are slowed down by more or less than one. What is predicted from measurements of one moment and
measured at another is compared as it came, and with that taken out: seconds of a run are divided by
the pace of its moment and multiplied by the one of the profile's, of one process for a plan of one
rank and of two for others. Plans that are compared with each other train in rounds of a few steps
each (``fxpart.profiling.trial_rounds``), where the pace of a round is nobody's.
"""

from __future__ import annotations

import inspect
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

_STEPS = 3  # of one sample
_PARTS = 4
_APART = 12.0  # seconds between samples while something else is measured


class Work:
    """Training steps of a model of cpu_models.py, each of four microbatches, as plans have them."""

    def __init__(self, name: str) -> None:
        """Build it, and do the first step, which takes longer."""
        import cpu_models

        torch.set_num_threads(1)
        self._work = cpu_models.build(name)
        self._parts = parts(self._work.example, _PARTS)
        self._optimizer = torch.optim.AdamW(self._work.model.parameters(), lr=1e-6)
        self.seconds(1)

    def seconds(self, steps: int) -> float:
        """Of a step, the median of so many."""
        taken = []
        for _ in range(steps):
            start = time.perf_counter()
            for part in self._parts:
                loss_of(self._work.model, part, self._work.loss).backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            taken.append(time.perf_counter() - start)
        return statistics.median(taken)


@dataclass
class Pace:
    """Samples of a model's step by one process and by two at once; a context manager.

    samples: seconds of a step, by the number of processes.
    """

    name: str
    samples: dict[int, list[float]] = field(default_factory=lambda: {1: [], 2: []})
    _last: float = 0.0

    def __enter__(self) -> Pace:
        """Start the other process."""
        self._work = Work(self.name)
        self._other = subprocess.Popen(
            [sys.executable, __file__, self.name], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, bufsize=1, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self._ask()
        self._answer()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """End it."""
        self._other.kill()
        self._other.wait()

    def sample(self, processes: int) -> float:
        """Seconds of a step, now; of two processes the mean."""
        if processes > 1:
            self._ask()
        found = self._work.seconds(_STEPS)
        if processes > 1:
            found = (found + self._answer()) / 2
        self.samples[processes].append(found)
        self._last = time.monotonic()
        return found

    def now_and_then(self, *_: object) -> None:
        """Samples, if the last is some seconds ago: for whatever tells how far it is."""
        if time.monotonic() - self._last > _APART:
            self.sample(1)
            self.sample(2)

    def _ask(self) -> None:
        assert self._other.stdin is not None
        self._other.stdin.write("go\n")

    def _answer(self) -> float:
        assert self._other.stdout is not None
        return float(self._other.stdout.readline())


def compared(rounds: dict[str, list[float]], level: float = 0.0) -> dict[str, float]:
    """Seconds of a step of each plan, as the median round says that they compare.

    rounds: by plan, what it took in each. level: their geometric mean; by default that of the
    plans' median rounds.
    """
    from fxpart.profiling.trial_rounds import normalize_rounds

    middles = [statistics.median(taken) for taken in rounds.values()]
    shares = normalize_rounds(list(zip(*rounds.values(), strict=True)))
    level = level or statistics.geometric_mean(middles)
    return {
        label: level * statistics.median(each) for label, each in zip(rounds, shares, strict=True)
    }


def parts(example: Any, count: int) -> list[Any]:
    """A batch of tensors, a dict or a tuple of them, in so many equal parts."""
    values = example.values() if isinstance(example, dict) else example
    cut = list(zip(*(value.chunk(count) for value in values), strict=True))
    return (
        [dict(zip(example, each, strict=True)) for each in cut]
        if isinstance(example, dict)
        else cut
    )


def loss_of(model: nn.Module, batch: Any, loss: Any) -> Tensor:
    """The model's loss of a batch; what forward does not take is the loss's."""
    if isinstance(batch, dict):
        takes = inspect.signature(model.forward).parameters
        mine = {name: value for name, value in batch.items() if name in takes}
        rest = [value for name, value in batch.items() if name not in takes]
        found = model(**mine)
    else:
        count = len(inspect.signature(model.forward).parameters)
        found, rest = model(*batch[:count]), list(batch[count:])
    result: Tensor = loss(found, *rest) if loss is not None else found.loss
    return result


def at(base: Sequence[float], seconds: float, around: Sequence[float]) -> float:
    """What would have taken ``seconds`` at the median pace of ``base``.

    base, around: samples then, and around what took that long.
    """
    return seconds * statistics.median(base) / statistics.fmean(around)


def beside(name: str) -> None:
    """The other process: some steps whenever it is told to, and what they took."""
    import record  # noqa: F401

    work = Work(name)
    for _ in sys.stdin:
        sys.stdout.write(f"{work.seconds(_STEPS)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    beside(sys.argv[1])
