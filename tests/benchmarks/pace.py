"""How fast this machine is at the moment: steps of a model by plain torch, no fxpart in it.

Imported by the benchmarks beside it, and run by them as ``python pace.py MODEL`` (a model of
cpu_models.py, in a process that takes steps when a line says how many). A host that others share
changes its pace within seconds, by more than what a benchmark is to tell; seconds that are taken
between two looks at the pace can be told as those of a host that had kept the one it had.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fxpart.target import Workload

_STEPS = 3  # of a look


class Pace:
    """Processes of one thread, one for each core, that take steps of a model; a context."""

    def __init__(self, model: str) -> None:
        """model: of cpu_models.py; it trains with AdamW."""
        command = [sys.executable, str(Path(__file__).resolve()), model]
        variables = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._runs = [
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, text=True, env=variables,
            )
            for _ in range(len(os.sched_getaffinity(0)))
        ]  # fmt: skip
        self.look(len(self._runs))  # what is loaded once is loaded then

    def look(self, ranks: int) -> float:
        """Seconds of a step while as many compute at once as so many ranks do on these cores."""
        asked = self._runs[: max(1, ranks)]
        for run in asked:
            assert run.stdin is not None
            run.stdin.write(f"{_STEPS}\n")
            run.stdin.flush()
        return statistics.mean(_answer(run) for run in asked)

    def __enter__(self) -> Pace:
        """Itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """End the processes."""
        for run in self._runs:
            run.kill()
            run.communicate()


def _answer(run: subprocess.Popen[str]) -> float:
    assert run.stdout is not None
    line = run.stdout.readline()
    if not line:
        raise RuntimeError(f"the process that looks at the pace has ended with {run.poll()}")
    return float(line)


def step_of(work: Workload) -> Any:
    """A step of a workload by plain torch: what to call for each."""
    import torch

    optimizer = torch.optim.AdamW(work.model.parameters())
    batch: Any = work.example

    def loss() -> Any:
        if work.loss is None:
            return work.model(**batch).loss
        if isinstance(batch, dict):
            *inputs, (_, target) = batch.items()
            return work.loss(work.model(**dict(inputs)), target)
        *values, target = batch
        return work.loss(work.model(*values), target)

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step


def main() -> None:
    """Read how many steps, write their median seconds, until there is nothing more to read."""
    import cpu_models
    import torch

    from fxpart.runtime.heap import keep_freed

    torch.set_num_threads(1)
    keep_freed()  # as ranks do
    step = step_of(cpu_models.build(sys.argv[1]))
    step()
    for line in sys.stdin:
        taken = []
        for _ in range(int(line)):
            start = time.perf_counter()
            step()
            taken.append(time.perf_counter() - start)
        sys.stdout.write(f"{statistics.median(taken)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
