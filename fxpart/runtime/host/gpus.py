"""The GPU of a process, and ranks that would share one."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable

import torch

from fxpart.accelerator import get_device_module
from fxpart.environment import read_launch
from fxpart.errors import FxpartError, Problem, error


def local_device(device: str = "cpu") -> torch.device:
    """Return the device of this process: the CPU, or its GPU.

    device: "cpu", "cuda" or the type of another accelerator. The GPU is the visible one with index
    LOCAL_RANK, or the only visible one, as where a batch system shows each task its own. FXP602 if
    several GPUs are visible, and fewer than LOCAL_RANK needs.
    """
    if device == "cpu":
        return torch.device(device)
    found = read_launch()
    index = 0 if found is None else found.local_rank
    visible = get_device_module(device).device_count()
    if index < visible or visible == 0:  # without GPUs torch raises its own error on first use
        return torch.device(device, index)
    if visible == 1:
        return torch.device(device, 0)
    raise error(
        "FXP602",
        where=f"LOCAL_RANK={index}",
        why=f"this process sees {visible} GPUs, too few for the ranks of its host",
        fix=f"start {visible} ranks per host (torchrun --nproc-per-node {visible}), or show each "
        "process one GPU (CUDA_VISIBLE_DEVICES)",
    )


def check_distinct_gpus(exchange: Callable[[bytes], list[bytes]]) -> None:
    """Raise FXP602 on every rank if two ranks of one host use the same GPU.

    NCCL cannot connect processes that share a GPU, and reports it only in the first step. exchange:
    sends a message to all ranks and returns those of all ranks.
    """
    found = read_launch()
    device = torch.cuda.current_device()
    identity = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    host = -1 if found is None else found.host
    rows = [json.loads(row) for row in exchange(json.dumps([host, identity]).encode())]
    ranks: dict[tuple[int, str], list[int]] = defaultdict(list)
    for rank, (where, which) in enumerate(rows):
        if which:
            ranks[where, which].append(rank)
    shared = [own for own in ranks.values() if len(own) > 1]
    if shared:
        raise FxpartError(
            [
                Problem(
                    "FXP602",
                    f"ranks {', '.join(map(str, own))}",
                    "these processes use the same GPU, and NCCL connects only processes with GPUs "
                    "of their own",
                    "start one process per GPU, or run all ranks in one process: the same program "
                    "without torchrun",
                )
                for own in shared
            ]
        )
