"""A run whose ranks are killed at random moments, beside the same run that is left alone.

What is looked at is outside of the processes: which of them there are, and the files of the run's
folder. ``kill -9`` it is, always.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import kill_points
from ranks import python_path

from fxpart.checkpoint.run_directory import RunDir
from fxpart.runtime.training_run import ledger

T = TypeVar("T")
TESTS = Path(__file__).resolve().parents[1]
RANKS = 4
MOMENTS = ("start", "meet", "step", "save")
# Within one call of the process itself, which it finds by tests/support/kill_points.py.
POINTS = (
    "rename-before", "rename-after", "append-before", "append-half", "append-after",
    "agree-before", "agree-half", "agree-after",
)  # fmt: skip
ALL = "all"
AIMED = (*POINTS, ALL)
_LONGEST = {"start": 3.0, "meet": 0.5, "step": 0.2, "save": 0.02}  # seconds after the moment
_LOOK = 0.002


@dataclass(frozen=True)
class Kill:
    """Ranks killed so many seconds after a moment.

    moment: "start": all processes are there, and load; "meet": the ranks have met, and read the
    checkpoint; "step": an update has been done; "save": a checkpoint is being written; "all": as
    "step", for all ranks. Others are points within the process, reached after that time.
    """

    moment: str
    ranks: tuple[int, ...]
    delay: float


def draw(seed: int, count: int, moments: Sequence[str] = MOMENTS) -> list[Kill]:
    """Random kills: one rank, the store's owner among them, or two at once."""
    draws = random.Random(seed)
    found = []
    for index in range(count):
        moment = moments[(index + seed) % len(moments)]
        moment = moment if index < len(moments) else draws.choice(moments)
        ranks = tuple(sorted(draws.sample(range(RANKS), draws.choice((1, 1, 2)))))
        if moment in POINTS:  # checkpoints and the ledger are rank 0's
            ranks = ranks[:1] if moment.startswith("agree") else (0,)
        ranks = tuple(range(RANKS)) if moment == ALL else ranks
        longest = _LONGEST.get(moment, _LONGEST["step"])
        found.append(Kill(moment, ranks, round(draws.uniform(0, longest), 4)))
    draws.shuffle(found)
    return found


@dataclass(frozen=True)
class Outcome:
    """How a run ended: its exit status, what it printed, kills that were made, seconds."""

    status: int
    output: str
    killed: tuple[Kill, ...]
    seconds: float


def run(
    command: Sequence[str],
    folder: Path,
    kills: Sequence[Kill] = (),
    *,
    limit: float = 300.0,
    launched: bool = True,
) -> Outcome:
    """The program under torchrun's agent, with these kills; all its processes have ended then.

    launched: without it all ranks are in one process.
    """
    start = time.monotonic()
    launch = [sys.executable, *command]
    if launched:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launch += ["--monitor-interval", "0.1", "--nproc-per-node", str(RANKS)]
        launch += ["--max-restarts", "1000", "--", *command]
    with open(folder.with_suffix(".log"), "w+b") as log:
        process = subprocess.Popen(
            launch, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            env={
                **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(TESTS / "support"),
            },
            cwd=TESTS.parent,
        )  # fmt: skip
        made: list[Kill] = []
        try:
            for each in _shoot(process, RunDir(folder), kills, start + limit):
                made.append(each)
            status = process.wait(max(1.0, start + limit - time.monotonic()))
        finally:
            _end(process)
        log.seek(0)
        text = log.read().decode(errors="replace")
    return Outcome(status, text, tuple(made), time.monotonic() - start)


def _shoot(
    process: subprocess.Popen[bytes], folder: RunDir, kills: Sequence[Kill], limit: float
) -> Iterator[Kill]:
    """Make the kills, each in a generation of its own."""
    shot: set[int] = set()  # processes of generations that are over
    for kill in kills:
        pids = _until(process, limit, partial(_all, process.pid, shot))
        if pids is None:
            return
        told, lines = _generations(folder), _lines(folder.ledger)
        if not _until(process, limit, partial(_come, folder, kill.moment, told, lines)):
            return
        time.sleep(kill.delay)
        if kill.moment in POINTS:
            point = folder.path / kill_points.NAME
            point.write_text(f"{kill.moment} {kill.ranks[0]}")
            if not _until(process, limit, lambda point=point: not point.exists()):  # type: ignore[misc]
                return
        for rank in kill.ranks if kill.moment not in POINTS else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[rank], signal.SIGKILL)
        shot |= set(pids.values())
        yield kill


def _come(folder: RunDir, moment: str, told: int, lines: int) -> bool:
    """Whether the moment has come. told, lines: generations and steps when this one began."""
    if moment == "meet":
        return _generations(folder) > told
    if moment == "save":
        return any(folder.checkpoints.glob(".partial-*"))
    return moment == "start" or _lines(folder.ledger) > lines + 1


def _until(process: subprocess.Popen[bytes], limit: float, look: Callable[[], T]) -> T | None:
    """What it finds, once it finds something; None if the run has ended, or the time."""
    while process.poll() is None and time.monotonic() < limit:
        if found := look():
            return found
        time.sleep(_LOOK)
    return None


def _all(launcher: int, shot: set[int]) -> dict[int, int] | None:
    """The processes of a new generation by rank, once all are there."""
    found = {}
    for pid in _children(launcher):
        with contextlib.suppress(OSError):
            for pair in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                name, _, value = pair.partition(b"=")
                if name == b"RANK" and pid not in shot:
                    found[int(value)] = pid
    return found if len(found) == RANKS else None


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _generations(folder: RunDir) -> int:
    return len(list((folder.path / "events").glob("generation-*")))


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _end(process: subprocess.Popen[bytes]) -> None:
    """Nothing of the run is left."""
    for pid in (process.pid, *_children(process.pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


@dataclass(frozen=True)
class Compared:
    """Both runs of a case. calm: the one that nobody disturbed."""

    case: str
    seed: int
    folders: tuple[Path, Path]
    calm: Outcome
    shot: Outcome

    def faults(self) -> list[str]:
        """What is not as it should be; the seed says which kills they were."""
        found = [
            f"{name} run of {self.case}, seed {self.seed}, {outcome.killed}: status "
            f"{outcome.status}\n{outcome.output[-4000:]}"
            for name, outcome in (("calm", self.calm), ("shot", self.shot))
            if outcome.status
        ]
        if found:
            return found
        calm, shot = (ledger.read_updates(RunDir(folder).ledger) for folder in self.folders)
        found += ledger.check_ledger(RunDir(self.folders[1]).ledger).problems
        if calm != shot:
            found.append("the ledgers have other losses or samples")
        first, second = ((folder / "final.json").read_text() for folder in self.folders)
        if first != second:
            found.append(f"final parameters or optimizer state: {first}, {second}")
        where = f"{self.case}, seed {self.seed}, {self.shot.killed}"
        return [f"{where}: {fault}" for fault in found]


def compare(
    case: str,
    folder: Path,
    *,
    seed: int,
    kills: int,
    launched: bool = True,
    moments: Sequence[str] = MOMENTS,
) -> Compared:
    """The case left alone, and with so many random kills; the program is made once.

    launched: whether the one that is left alone has a process for each rank too.
    """
    steps, limit = 20 + 10 * kills, 120.0 + 60.0 * kills
    folders = folder / f"{case}-calm", folder / f"{case}-shot"
    outcomes = []
    kinds = ([], launched), (draw(seed, kills, moments), True)
    for each, (planned, apart) in zip(folders, kinds, strict=True):
        each.mkdir()
        command = [str(TESTS / "support" / "chaos_programs.py"), "--run", str(each), "--case", case]
        command += ["--steps", str(steps), "--every", "3", "--restarts", "50"]
        command += ["--programs", str(folder / "programs")]
        outcomes.append(run(command, each, planned, limit=limit, launched=apart))
    return Compared(case, seed, folders, *outcomes)
