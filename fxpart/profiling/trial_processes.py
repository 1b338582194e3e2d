"""Trial runs: run some steps of plans with real ranks on this host before selecting one.

Predictions from ops and stages have errors of some percent. If the best plans are closer than that,
or if ranks, transfers and the operating system interfere, only trial runs find the fastest plan.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from fxpart.codegen.generated_program import GeneratedProgram, write_program
from fxpart.costmodels.profile_store import TrialRun
from fxpart.errors import FxpartError, error
from fxpart.plan.model import Plan
from fxpart.planner.prediction.trial_correction import kind_of
from fxpart.profiling.outliers import timing
from fxpart.profiling.processes import run_on_processes
from fxpart.profiling.trial_worker import TARGET, WARM, save_batch, write_atomically

_POLL = 0.02  # Seconds between polls for results.
_TIMEOUT = 120.0  # Seconds for one plan.
_LONGEST = 3600.0  # Seconds for all plans.


class TrialProcesses:
    """Processes of this host for trial runs of one plan after another; a context manager.

    They start immediately, to be ready for the first plan.
    """

    def __init__(self, ranks: int, *, threads: int = 1) -> None:
        """ranks: number of processes. threads: computing threads of each."""
        self._folder = tempfile.TemporaryDirectory(prefix="fxpart-")
        self._number = 0
        self._loaded_ranks = 0  # Ranks of the loaded plan.
        self._failure: FxpartError | None = None
        self._thread = threading.Thread(target=self._serve, args=(ranks, threads), daemon=True)
        self._thread.start()

    def run(
        self,
        plan: Plan,
        parts: GeneratedProgram,
        *,
        steps: int = 9,
        optimizer: str = "",
        label: str = "",
    ) -> TrialRun:
        """Run steps of a plan with random weights on the example batch.

        steps: measured steps, after three warm-up steps. optimizer: by default the plan's. Raises
        the error of a rank, or FXP507.
        """
        rows = self._send(
            plan.world, self._program(plan, parts, optimizer) | {"steps": steps, "stay": False}
        )
        taken = [max(row["seconds"][i] for row in rows) for i in range(steps)]
        return TrialRun(
            seconds=timing(taken),
            label=label,
            model=plan.model.fingerprint,
            predicted=plan.prediction.simulated_seconds,
            kind=kind_of(plan),
            peaks=tuple(int(row["peak"]) for row in rows),
            baselines=tuple(int(row["baseline"]) for row in rows),
            cpu=tuple(row["cpu"] for row in rows),
        )

    def load(self, plan: Plan, parts: GeneratedProgram, *, optimizer: str = "") -> None:
        """Load a plan and run warm-up steps; :meth:`train_further` continues."""
        self._send(plan.world, self._program(plan, parts, optimizer) | {"steps": 0, "stay": True})
        self._loaded_ranks = plan.world

    def train_further(self, steps: int, *, warm: int = 1) -> list[float]:
        """Return the seconds of further steps of the loaded plan, after ``warm`` warm-up steps."""
        assert self._loaded_ranks, "a plan is loaded"
        request = {"ranks": self._loaded_ranks, "warm": warm, "steps": steps, "stay": True}
        rows = self._send(self._loaded_ranks, request)
        return [max(row["seconds"][i] for row in rows) for i in range(steps)]

    def close(self) -> None:
        """End the processes; no requests are allowed afterwards."""
        if self._thread.is_alive():
            write_atomically(self._path(f"request-{self._number}.json"), {})
            self._thread.join(_TIMEOUT)
        self._folder.cleanup()

    def _program(self, plan: Plan, parts: GeneratedProgram, optimizer: str) -> dict[str, Any]:
        """Write a plan's program and return the request to load it."""
        folder = Path(self._folder.name) / str(self._number)
        folder.mkdir()
        write_program(plan, parts, folder / "program")
        assert parts.captured.example is not None, "captured with an example"
        save_batch(parts.captured.example(), folder)
        self._loaded_ranks = 0
        return {
            "ranks": plan.world,
            "program": str(folder / "program"),
            "optimizer": optimizer or plan.optimizer,
            "warm": WARM,
            "timeout": _TIMEOUT,
        }

    def _serve(self, ranks: int, threads: int) -> None:
        payload = {"folder": self._folder.name}
        try:
            run_on_processes(ranks, TARGET, payload, _LONGEST, threads=threads)
        except FxpartError as why:
            self._failure = why

    def _send(self, ranks: int, request: dict[str, Any]) -> list[dict[str, Any]]:
        """Send a request and return the ranks' results."""
        number, self._number = self._number, self._number + 1
        write_atomically(self._path(f"request-{number}.json"), request)
        answers = [self._path(f"answer-{number}-{rank}.json") for rank in range(ranks)]
        end = time.monotonic() + _TIMEOUT
        while not all(answer.exists() for answer in answers):
            if not self._thread.is_alive():
                raise self._failure or _timeout_error(request)
            if time.monotonic() > end:
                raise _timeout_error(request)
            time.sleep(_POLL)
        return [json.loads(answer.read_text(encoding="utf-8")) for answer in answers]

    def _path(self, name: str) -> Path:
        return Path(self._folder.name) / name

    def __enter__(self) -> TrialProcesses:
        """Return the object itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """End the processes."""
        self.close()


def _timeout_error(request: dict[str, Any]) -> FxpartError:
    return error(
        "FXP507",
        where=f"trial run of a plan with {request['ranks']} ranks",
        why=f"no result within {_TIMEOUT:g} s",
        fix="profile without trial runs (--no-rehearse), or use a smaller batch",
    )
