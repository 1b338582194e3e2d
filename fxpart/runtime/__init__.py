"""Runs a partitioned program: an interpreter of actions over a transport."""

from __future__ import annotations

from fxpart.runtime.callbacks import Callback, EarlyStopping, Event, JsonLines, StepInfo
from fxpart.runtime.connect import connect, local_device
from fxpart.runtime.distributed import Distributed
from fxpart.runtime.groups import no_decay
from fxpart.runtime.inprocess import InProcess
from fxpart.runtime.run import Checkpoints
from fxpart.runtime.trainer import Trainer

__all__ = [
    "Callback", "Checkpoints", "Distributed", "EarlyStopping", "Event", "InProcess", "JsonLines",
    "StepInfo", "Trainer", "connect", "local_device", "no_decay",
]  # fmt: skip
