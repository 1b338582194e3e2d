"""Where this process measures: device, chip, threads, torch."""

from __future__ import annotations

import torch

from fxpart.profile import Setting, chip


def setting(model: str, device: torch.device | None = None) -> Setting:
    """The setting of this process. model: of the device, as the cluster says it."""
    if device is not None and device.type == "cuda":
        name, threads = torch.cuda.get_device_name(device), 0
    else:
        name, threads = chip(), torch.get_num_threads()
    return Setting(device=model, chip=name, threads=threads, torch=str(torch.__version__))
