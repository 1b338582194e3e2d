"""The runtime of a partitioned program: an interpreter of actions over a transport."""

from __future__ import annotations

from fxpart.runtime.callbacks import Callback, EarlyStopping, Event, JsonLines, StepInfo
from fxpart.runtime.fit_options import Statistics
from fxpart.runtime.host.gpus import local_device
from fxpart.runtime.optimizer.parameter_groups import no_decay
from fxpart.runtime.run_loggers import (
    MLflowLogger,
    PrometheusFile,
    TensorBoardLogger,
    WandbLogger,
)
from fxpart.runtime.trainer import Trainer
from fxpart.runtime.training_run import Checkpoints
from fxpart.runtime.transport.in_process import InProcess
from fxpart.runtime.transport.process_group import connect
from fxpart.runtime.transport.process_group_transport import ProcessGroupTransport

__all__ = [
    "Callback",
    "Checkpoints",
    "EarlyStopping",
    "Event",
    "InProcess",
    "JsonLines",
    "MLflowLogger",
    "ProcessGroupTransport",
    "PrometheusFile",
    "Statistics",
    "StepInfo",
    "TensorBoardLogger",
    "Trainer",
    "WandbLogger",
    "connect",
    "local_device",
    "no_decay",
]  # fmt: skip
