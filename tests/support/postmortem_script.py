"""A small pipeline whose rank is killed, stopped or raises: a script for torchrun."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

from hand_stages import batch, language
from runtime_programs import Faulty, make

from fxpart.checkpoint.run_directory import RunDir
from fxpart.diagnostics.failure_record import record_failure
from fxpart.runtime import connect

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def main(folder: Path, what: str, faulty: int) -> None:
    """Train until what happens to the rank ``faulty`` ends it."""
    cut = (1, 1, 2)
    transport = connect(len(cut), timeout=20.0)
    trainer = make(language(cut), transport)
    rank, run = trainer.rank, RunDir(folder)
    trainer.events.keep(run.events(1, rank), generation=1)
    # After some steps, and in the middle of one.
    if rank == faulty and what in SIGNALS:
        own = os.getpid()
        threading.Timer(1.0, lambda: os.kill(own, SIGNALS[what])).start()
    try:
        if rank == faulty and what == "raise":
            for module in trainer.parts.mesh_ranks[0].modules.values():
                module.forward = Faulty(trainer, module, "raise", 30)
        for number in range(100_000):
            if rank == faulty and what == "script" and number == 20:
                raise KeyError("a row that is missing")
            trainer.step(batch(8, 5, number))
    except Exception as cause:
        record_failure(run.failure(1, rank), cause, rank=rank, generation=1, events=trainer.events)
        os._exit(1)  # gloo's threads wait on for the stopped one otherwise


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
