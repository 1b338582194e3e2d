"""Plans that are run before one is chosen: real ranks on this host, some steps of each.

Predictions made of ops and stages are good to some percent at best; where the best plans are closer
together than that, and where ranks, their transfers and the operating system get into each other's
way, only running them tells which is fastest.
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

_POLL = 0.02  # seconds between looks for answers
_TIMEOUT = 120.0  # seconds of one plan
_LONGEST = 3600.0  # seconds of all plans


class TrialProcesses:
    """Processes of this host that rehearse one plan after the other; a context manager.

    They start at once, so that they are ready when the first plan comes.
    """

    def __init__(self, ranks: int, *, threads: int = 1) -> None:
        """ranks: as many processes, each with so many threads of computation."""
        self._folder = tempfile.TemporaryDirectory(prefix="fxpart-")
        self._number = 0
        self._held = 0  # ranks of the plan that is held
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
        """The plan's steps with drawn weights on the example batch, as real ranks train it.

        steps: that count, after three that do not. optimizer: by default the plan's. Raises what a
        rank raised, or FXP507.
        """
        rows = self._ask(
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

    def hold(self, plan: Plan, parts: GeneratedProgram, *, optimizer: str = "") -> None:
        """Load a plan, and do the steps that do not count; :meth:`go_on` trains it further."""
        self._ask(plan.world, self._program(plan, parts, optimizer) | {"steps": 0, "stay": True})
        self._held = plan.world

    def go_on(self, steps: int, *, warm: int = 1) -> list[float]:
        """Seconds of so many steps more of the plan that is held, after ``warm`` ones."""
        assert self._held, "a plan is held"
        request = {"ranks": self._held, "warm": warm, "steps": steps, "stay": True}
        rows = self._ask(self._held, request)
        return [max(row["seconds"][i] for row in rows) for i in range(steps)]

    def close(self) -> None:
        """End the processes; nothing may be asked after it."""
        if self._thread.is_alive():
            write_atomically(self._path(f"request-{self._number}.json"), {})
            self._thread.join(_TIMEOUT)
        self._folder.cleanup()

    def _program(self, plan: Plan, parts: GeneratedProgram, optimizer: str) -> dict[str, Any]:
        """The request to load a plan, which is written for it."""
        folder = Path(self._folder.name) / str(self._number)
        folder.mkdir()
        write_program(plan, parts, folder / "program")
        assert parts.captured.example is not None, "captured with an example"
        save_batch(parts.captured.example(), folder)
        self._held = 0
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

    def _ask(self, ranks: int, request: dict[str, Any]) -> list[dict[str, Any]]:
        """What the ranks answer."""
        number, self._number = self._number, self._number + 1
        write_atomically(self._path(f"request-{number}.json"), request)
        answers = [self._path(f"answer-{number}-{rank}.json") for rank in range(ranks)]
        end = time.monotonic() + _TIMEOUT
        while not all(answer.exists() for answer in answers):
            if not self._thread.is_alive():
                raise self._failure or _silent(request)
            if time.monotonic() > end:
                raise _silent(request)
            time.sleep(_POLL)
        return [json.loads(answer.read_text(encoding="utf-8")) for answer in answers]

    def _path(self, name: str) -> Path:
        return Path(self._folder.name) / name

    def __enter__(self) -> TrialProcesses:
        """Itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """End the processes."""
        self.close()


def _silent(request: dict[str, Any]) -> FxpartError:
    return error(
        "FXP507",
        where=f"rehearsing a plan of {request['ranks']} ranks",
        why=f"no answer within {_TIMEOUT:g} s",
        fix="profile without trial runs (--no-rehearse), or a smaller batch",
    )
