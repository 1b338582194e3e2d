"""A process that saves checkpoint after checkpoint until it is killed, and what is left of it.

    python checkpoint_killed.py ROOT FIRST GENERATION WORLD

Says `begin` once; what it has committed is in the folder.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from checkpoint_files import Sample, manifest
from ranks import python_path

from fxpart.checkpoint import folder, manifest_merge
from fxpart.checkpoint.reader import Checkpoint
from fxpart.checkpoint.writer import write_rank

ROOT = Path(__file__).resolve().parents[2]
MOST = 24  # elements of a dim: some 100 kB in all


def save(root: Path, first: int, generation: int, world: int) -> None:
    """Checkpoints of steps from ``first`` on, each rank's file by a thread of its own."""
    step = first
    while True:
        partial = folder.begin(root, step, generation)
        pieces = Sample.make(step, most=MOST).pieces(world, random.Random(step))
        threads = [
            threading.Thread(target=write_rank, args=(partial, rank, mine))
            for rank, mine in enumerate(pieces)
        ]
        for thread in threads:
            thread.start()
        while manifest_merge.list_missing_ranks(partial, world):
            time.sleep(0.0005)
        folder.commit(
            partial,
            manifest(partial, manifest_merge.read_rank_manifests(partial, world), step, generation),
        )
        folder.prune(root, 2, generation=generation)
        step += 1


def killed(root: Path, first: int, generation: int, world: int, after: float) -> None:
    """Run :func:`save` in a process and kill it so many seconds after it began."""
    command = [sys.executable, __file__, str(root), str(first), str(generation), str(world)]
    path = python_path(ROOT, ROOT / "tests" / "support")
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "begin\n"
            time.sleep(after)
            assert process.poll() is None, "it ended by itself"
        finally:
            process.send_signal(signal.SIGKILL)


def left(root: Path) -> int:
    """The step of the newest complete checkpoint, which has to be whole and what was saved."""
    newest = folder.list_complete(root)[0]
    checkpoint = Checkpoint.open(newest)
    assert checkpoint.verify() == []
    step = checkpoint.manifest.step
    for key, tensor in Sample.make(step, most=MOST).tensors.items():
        assert (checkpoint.read(key) == tensor).all(), f"{newest.name}: {key}"
    return step


if __name__ == "__main__":
    sys.stdout.write("begin\n")
    sys.stdout.flush()
    save(Path(sys.argv[1]), *map(int, sys.argv[2:5]))
