"""A rank of a watched job: ``watched_job.py FOLDER SECONDS OPTIONS``, options as JSON.

Trains until the file ``end`` is in the folder. Says what it does in files of the folder: ``pid-R``,
``step-R``, ``error-R`` (JSON: code, where, why, when by the monotonic clock).
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from hand_stages import batch, language
from runtime_programs import make

from fxpart.environment import read_launch
from fxpart.errors import FxpartError
from fxpart.runtime import connect, heartbeat
from fxpart.runtime.transport.agreement import convert_transport_errors


def main(folder: Path, timeout: float | None, options: dict[str, Any]) -> int:
    """Train; the exit status."""
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR2)
    found = read_launch()
    assert found is not None
    rank, ranks = found.rank, found.world

    def say(name: str, text: str) -> None:
        beside = folder / f".{name}-{rank}-{os.getpid()}"
        beside.write_text(text)
        beside.rename(folder / f"{name}-{rank}")

    say("pid", f"{os.getpid()} {found.restarts}")
    step = 0
    try:
        transport = connect(ranks, timeout=timeout, shared_memory=options.get("memory", True))
        trainer = make(language({2: (2, 2), 3: (2, 1, 1), 4: (1,) * 4}[ranks]), transport)
        heartbeat.report_last_event(trainer.events.last)
        while not trainer_agrees(transport, (folder / "end").exists()):
            trainer.step(batch())
            step += 1
            say("step", f"{step} {found.restarts}")
            if rank == options.get("slow"):
                time.sleep(0.05)
            if rank == options.get("raises") and step == 3:
                raise ValueError("no more files")
            if rank == options.get("sleeps") and step == 3:
                time.sleep(60)
    except FxpartError as fault:
        problem = fault.problems[0]
        found_out = [problem.code, problem.where, problem.why, time.monotonic()]
        say("error", json.dumps(found_out))
        return fault.exit_code
    say("done", str(step))
    return 0


def trainer_agrees(transport: Any, end: bool) -> bool:
    """Whether any rank has seen the end."""
    with convert_transport_errors(transport, "asking for the end"):
        return any(row[0] for row in transport.exchange([int(end)]))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])))
