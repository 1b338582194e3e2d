"""A workload for ``fxpart train``, of which one rank's process kills itself. Imported by ranks.

Where: the environment says FXPART_TEST_DIES=RANK:BATCH:SECONDS: so long after it has read a batch.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import torch
from queued_batches import ROWS, adagrad, batch
from queued_programs import model
from torch import nn

import fxpart


def data() -> Iterator[tuple[torch.Tensor, ...]]:
    """One pass over the batches."""
    rank, number, seconds = os.environ.get("FXPART_TEST_DIES", "-1:0:0").split(":")
    for step, rows in enumerate(ROWS):
        if os.environ.get("RANK") == rank and step == int(number):
            end = threading.Timer(float(seconds), os.kill, (os.getpid(), signal.SIGKILL))
            end.daemon = True
            end.start()
        yield batch(rows, step)


def clicks() -> fxpart.Workload:
    """Two tables and some layers."""
    return fxpart.Workload(
        model(), example=batch(), loss=nn.functional.cross_entropy, data=data, optimizer=adagrad
    )
