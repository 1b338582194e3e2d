"""Check that ranks with the same tensor start with the same values.

Every process creates the model itself. If it draws random weights from an unseeded generator,
replicas and tied parameters start with different values, and no later check would notice.
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
    """Raise FXP501 on every process if a tensor differs between processes that use it.

    Tensors are compared by checksum. names: of the tensors of ``state`` that this process uses,
    also in part.
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
            f"they differ between ranks that share them: {', '.join(shown)}{more}",
            "call torch.manual_seed(0) on every rank before the model is created,\n"
            "or pass a checkpoint as weights=",
        ),
    ))  # fmt: skip


def checksum(tensor: torch.Tensor) -> int:
    """Return the CRC-32 of the tensor's bytes."""
    line = tensor.detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(line.view(torch.uint8).numpy().data) if line.numel() else 0
