"""One rank of a job on the device under torchrun. Argument: "gloo" (the user's group) or "own"."""

from __future__ import annotations

import json
import os
import sys

import torch.distributed as dist
from training import Job, compiled, llama, tokens, train

world = int(os.environ["WORLD_SIZE"])
if sys.argv[1] == "gloo":
    dist.init_process_group("gloo")
model, vocabulary = llama("small")
job = Job(model, tokens(vocabulary, 8, 128))
constraints = {"mesh": "none", "stages": world}
program = compiled(job, world, microbatches=2, constraints=constraints)
losses, _, trainer = train(program, job.batch, 3, timeout=30.0)
if os.environ["RANK"] == "0":
    print("ROW " + json.dumps({"name": f"torchrun {sys.argv[1]} {world}", "losses": losses,
                               "device": str(trainer.parts.devices), "passed": True}))  # fmt: skip
