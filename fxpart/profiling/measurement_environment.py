"""Where this process measures: device, chip, threads, torch, and what a container leaves of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import torch

from fxpart.cluster.cpu_quota import quota
from fxpart.cluster.devices import Device
from fxpart.costmodels.profile_store import MeasurementEnvironment, chip
from fxpart.errors import error
from fxpart.runtime.host.heap import keep_freed_memory


def get_measurement_environment(
    model: str, device: torch.device | None = None
) -> MeasurementEnvironment:
    """The setting of this process. model: of the device, as the cluster says it."""
    version = str(torch.__version__)
    if device is not None and device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        return MeasurementEnvironment(device=model, chip=name, threads=0, torch=version)
    threads = torch.get_num_threads()
    left = quota() or threads
    held = round(left, 4) if left < threads else 0.0
    return MeasurementEnvironment(
        device=model, chip=chip(), threads=threads, torch=version, quota=held
    )


@contextmanager
def on_device(device: Device) -> Iterator[torch.device]:
    """This machine's device of the cluster's kind, with as many threads as a rank has there."""
    if device.kind == "gpu":
        if not torch.cuda.is_available():
            raise error(
                "FXP602",
                where=f"profiling {device.name} ({device.model})",
                why="torch sees no GPU here",
                fix="profile on a machine that has one, and merge the files",
            )
        yield torch.device("cuda", 0)
        return
    keep_freed_memory()  # as the ranks do
    before = torch.get_num_threads()
    if not isinstance(device.threads, msgspec.UnsetType):
        torch.set_num_threads(device.threads)
    try:
        yield torch.device("cpu")
    finally:
        torch.set_num_threads(before)
