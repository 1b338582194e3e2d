"""Runs of ``fxpart train`` whose launcher, its shell or all processes are killed, beside another.

After each kill the ranks end by themselves, or train on under the launcher that is left; the same
command then resumes the run, or is refused while the run is alive.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from run_folders import start_command

from fxpart.checkpoint import folder
from fxpart.checkpoint.reader import Checkpoint
from fxpart.checkpoint.run_directory import RunDir
from fxpart.runtime.training_run import ledger

# By name: further options of the command.
PLANS: dict[str, tuple[str, ...]] = {
    "sync": ("--nproc", "2"),
    "async": ("--nproc", "2", "--mode", "async"),
    "queue": ("--nproc", "3", "--mode", "queue"),
}
KINDS = ("supervisor", "shell", "all", "rank")
_WAIT = 600.0  # seconds; a busy machine needs minutes to start three processes
_SHELL = ("bash", "-c", '"$@"; exit $?', "bash")  # it stays: the command is not its last


def compare(plan: str, root: Path, *, seed: int, kinds: Sequence[str]) -> list[str]:
    """Run it calmly, and with these kills; return what is not as it should be."""
    target, draw = root / "nets.py", random.Random(seed)
    steps = 20 + 12 * len(kinds) + 60 * kinds.count("shell")
    calm, shot = RunDir(root / "calm"), RunDir(root / "shot")
    # A requested end flushes an asynchronous pipeline where the calm run does not.
    last = signal.SIGKILL if plan == "async" else signal.SIGTERM
    where, found = f"{plan}, seed {seed}, {list(kinds)}", list[str]()

    def start(run: RunDir, slow: float = 0.25) -> subprocess.Popen[str]:
        more = (*PLANS[plan], "--every", "3", "--stop-on-failed-save")
        return start_command(
            target, run.path, steps, *more, before=_SHELL, start_new_session=True, slow=slow
        )

    def end(process: subprocess.Popen[str], *right: int) -> str:
        output = process.communicate(timeout=_WAIT)[0]
        if process.returncode not in (right or (0,)):
            found.append(f"{where}: status {process.returncode}\n{output[-3000:]}")
        return output

    def await_steps(process: subprocess.Popen[str]) -> None:
        done = _lines(shot.ledger)
        _until(lambda: _lines(shot.ledger) > done + 2 or process.poll() is not None)

    def are_gone(pids: Sequence[int]) -> bool:
        return _until(lambda: not any(map(_runs, pids)))

    end(start(calm, 0.0))
    for kind in kinds:
        process = start(shot)
        await_steps(process)
        time.sleep(draw.uniform(0.0, 0.5))
        (launcher,) = _children(process.pid) or [0]
        ranks = _children(launcher)
        if not ranks:
            found.append(f"{where}: {kind} found no rank\n{end(process)[-3000:]}")
            break
        _kill({"supervisor": [launcher], "shell": [process.pid], "rank": [draw.choice(ranks)],
               "all": [process.pid, launcher, *ranks]}[kind])  # fmt: skip
        if kind == "shell":
            refused = end(start(shot), 2)
            if "FXP521" not in refused:
                found.append(f"{where}: a second start was not refused\n{refused[-3000:]}")
            _kill([launcher], last)
        if kind == "rank":  # the others train on, or all do after a restart
            await_steps(process)
            _kill([launcher], last)
            # with queues, a stage of one replica or rank 0 is not replaced
            output = end(process, *((0, 5) if plan == "queue" else (0, 128 + last)))
            if process.returncode == 5 and "FXP5" not in output:
                found.append(f"{where}: unexplained\n{output[-3000:]}")
        if not are_gone([launcher, *ranks]):
            found.append(f"{where}: after {kind}, {list(filter(_runs, ranks))} run on")
            _kill([launcher, *ranks])
        process.communicate(timeout=_WAIT)
    end(start(shot, 0.0))
    return found or [f"{where}: {each}" for each in differences(calm, shot, plan)]


def differences(calm: RunDir, shot: RunDir, plan: str) -> list[str]:
    """What is different in the ledgers and the last checkpoints."""
    found = list(ledger.check_ledger(shot.ledger).problems)
    losses = [ledger.read_updates(run.ledger) for run in (calm, shot)]
    ends = [Checkpoint.open(folder.list_complete(run.checkpoints)[0]) for run in (calm, shot)]
    found += [str(problem) for end in ends for problem in end.verify()]
    if ends[0].manifest.step != ends[1].manifest.step:
        found.append(f"{[end.manifest.step for end in ends]} steps")
    if plan == "queue":  # replicas add the gradients of microbatches in the order of their arrival
        pairs = zip(*losses, strict=True)
        if len(losses[0]) != len(losses[1]) or any(
            abs(a.loss - b.loss) > 1e-5 * abs(a.loss) for a, b in pairs
        ):
            found.append("the ledgers have other losses")
        return found
    if losses[0] != losses[1]:
        found.append("the ledgers have other losses or samples")
    for key in ends[0].manifest.tensors:
        if not key.startswith("random/") and (ends[0].read(key) != ends[1].read(key)).any():
            found.append(f"{key} is different")
    return found


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _until(is_done: Callable[[], object]) -> bool:
    limit = time.monotonic() + _WAIT
    while not (done := is_done()) and time.monotonic() < limit:
        time.sleep(0.01)
    return bool(done)


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _runs(pid: int) -> bool:
    """Whether it is there, and no zombie."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def _kill(pids: Sequence[int], number: int = signal.SIGKILL) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
