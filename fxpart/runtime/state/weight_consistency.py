"""Whether ranks that hold the same tensor began with the same numbers in it.

Every process makes the model by itself. Where it draws random weights from a generator that is not
seeded, replicas and the holders of a shared parameter begin apart, and nothing later would say so.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping

import msgspec
import torch

from fxpart.errors import Problem
from fxpart.runtime.transport.agreement import AllRanksError, convert_transport_errors
from fxpart.runtime.transport.interface import Transport

_SHOWN = 3


def check_same_weights(
    transport: Transport, state: Mapping[str, torch.Tensor], names: Iterable[str]
) -> None:
    """Raise FXP501 on every process if a tensor that several use is not the same on all of them.

    names: of the tensors of ``state`` that this process uses, or parts of which. By checksum.
    """
    if len(transport.local) == transport.ranks:
        return
    mine = {name: checksum(state[name]) for name in sorted(set(names)) if name in state}
    with convert_transport_errors(transport, "comparing the weights"):
        raws = transport.exchange_bytes(msgspec.json.encode(mine))
    known: dict[str, tuple[int, int]] = {}
    apart: dict[str, tuple[int, int]] = {}
    for rank, raw in enumerate(raws):
        for name, found in msgspec.json.decode(raw, type=dict[str, int]).items():
            first, expected = known.setdefault(name, (rank, found))
            if found != expected:
                apart.setdefault(name, (first, rank))
    if not apart:
        return
    shown = [f"{name} on ranks {a} and {b}" for name, (a, b) in list(apart.items())[:_SHOWN]]
    more = f" and {len(apart) - _SHOWN} more" if len(apart) > _SHOWN else ""
    raise AllRanksError((
        Problem(
            "FXP501",
            "the model's weights",
            f"they are not the same on ranks that share them: {', '.join(shown)}{more}",
            "seed the generator before the model is made, torch.manual_seed(0), on every rank\n"
            "alike; or give weights= a checkpoint",
        ),
    ))  # fmt: skip


def checksum(tensor: torch.Tensor) -> int:
    """CRC-32 of the tensor's bytes."""
    line = tensor.detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(line.view(torch.uint8).numpy().data) if line.numel() else 0
