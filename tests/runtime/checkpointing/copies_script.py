"""A rank of a run whose checkpoints stand in memory too: trains, and says what came of it.

    torchrun ... copies_script.py RUN MEMORY STEPS HOLD

HOLD: a step at which it waits to be killed; 0 for none.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from ranks import die_with_parent


def train(run: Path, memory: Path, steps: int, hold: int) -> dict[str, Any]:
    """Go on with the run; where it began and ended, and a digest of all that it has learnt."""
    import torch
    from hand_stages import batch, language
    from runtime_programs import make

    from fxpart.runtime import StepInfo, connect
    from fxpart.runtime.training_run import Checkpoints

    torch.set_num_threads(1)
    seen: list[int] = []

    def note(info: StepInfo) -> None:
        seen.append(info.step)
        while info.step == hold:
            time.sleep(0.1)

    trainer = make(language((2, 2)), connect(2, timeout=20))
    kept = Checkpoints(run, every=2, copies=memory)
    trainer.fit([batch(seed=i) for i in range(12)], steps=steps, checkpoints=kept, callbacks=[note])
    told = hashlib.sha256()
    state = trainer.optimizer_state_dict()["state"]
    slots = {
        f"{name} {slot}": value for name, held in state.items() for slot, value in held.items()
    }
    for name, value in sorted({**trainer.state_dict(), **slots}.items()):
        told.update(name.encode() + torch.as_tensor(value).numpy().tobytes())
    trainer.close()
    return {"first": seen[0], "last": seen[-1], "digest": told.hexdigest()}


if __name__ == "__main__":
    die_with_parent()
    found = train(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    sys.stdout.write(json.dumps(found) + "\n")
