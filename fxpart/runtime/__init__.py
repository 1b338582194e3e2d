"""Runs a partitioned program: an interpreter of actions over a transport."""

from __future__ import annotations

from fxpart.runtime.connect import connect, local_device
from fxpart.runtime.distributed import Distributed
from fxpart.runtime.inprocess import InProcess
from fxpart.runtime.trainer import Trainer

__all__ = ["Distributed", "InProcess", "Trainer", "connect", "local_device"]
