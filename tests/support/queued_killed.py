"""A rank of an exported program, which may kill itself: ``python -m queued_killed FOLDER ANSWER``.

FXPART_TEST_DIES=RANK:BATCH:TURN:SIGNAL: in the midst of that step, after so many computations of
its own. Rank 0 writes losses, weights and reports to ANSWER, and all that live a checkpoint beside
it ("saved"). Needs no capture: it starts fast.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
from queued_batches import ROWS, adagrad, batch
from safetensors.torch import load_file

from fxpart.environment import take_launcher_pid
from fxpart.launch import die_with_parent
from fxpart.training.trainer_factory import load_trainer


def main(folder: Path, answer: Path) -> None:
    """Train, and say how it went."""
    parent = take_launcher_pid()
    if parent is not None:
        die_with_parent(parent)
    *numbers, name = os.environ["FXPART_TEST_DIES"].split(":")
    dies, number, turn = map(int, numbers)
    end = signal.Signals[name]
    trainer = load_trainer(
        folder, adagrad, weights=load_file(folder / "weights.safetensors"), routing="queue",
        patience=30.0 if end == signal.SIGKILL else 3.0,
    )  # fmt: skip
    losses = []
    for step, rows in enumerate(ROWS):
        if trainer.rank == dies and step + 1 == len(ROWS):  # others were so fast that it had none
            os.kill(os.getpid(), end)
        if (trainer.rank, step) == (dies, number):
            (worker,) = trainer._workers.values()
            left, own = [turn], worker.turn

            def counted(left: list[int] = left, own=own) -> bool:  # type: ignore[no-untyped-def]
                if left[0] == 0:
                    os.kill(os.getpid(), end)
                done: bool = own()
                left[0] -= done
                return done

            worker.turn = counted
        losses.append(float(trainer.step(batch(rows, step))))
    trainer.save_checkpoint(answer.parent / "saved")
    state = {name: value.tolist() for name, value in trainer.state_dict().items()}
    copies = [(each.stage, each.updates) for each in trainer.report()]
    if trainer.rank == 0:
        found = {"losses": losses, "state": state, "copies": copies, "lost": trainer.pipeline.lost}
        answer.write_text(json.dumps(found))
    trainer.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
