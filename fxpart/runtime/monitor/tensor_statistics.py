"""Statistics of gradients and activations by name, over the parts of all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import msgspec
import torch

from fxpart.runtime.embedding_tables import get_gradient_values
from fxpart.runtime.optimizer.optimizer_shards import OptimizerShards
from fxpart.runtime.state.model_state import ModelState
from fxpart.runtime.transport.agreement import convert_transport_errors

# Columns of a table of sums: finite elements, their sum, sum of squares and largest absolute
# value, zeros, elements that are not finite.
COLUMNS = 6
_LARGEST = 3


@dataclass(frozen=True)
class TensorStatistics:
    """Statistics of one tensor; norm, mean and largest are of its finite elements.

    norm: Euclidean. largest: absolute value. zeros: fraction of the elements, 0 to 1. nonfinite:
    number of elements that are infinite or not a number. count: all elements.
    """

    norm: float
    mean: float
    largest: float
    zeros: float
    nonfinite: int
    count: int

    @classmethod
    def of(cls, sums: Sequence[float]) -> TensorStatistics:
        """Return the statistics of a row of sums."""
        finite, total, squares, largest, zeros, nonfinite = sums
        count = finite + nonfinite
        return cls(
            math.sqrt(squares), total / finite if finite else 0.0, largest,
            zeros / count if count else 0.0, round(nonfinite), round(count),
        )  # fmt: skip


def name_statistics(prefix: str, found: Mapping[str, TensorStatistics]) -> dict[str, float]:
    """Return all figures as numbers by ``<prefix>_<figure>/<name>``, as loggers write them."""
    return {
        f"{prefix}_{figure}/{name}": float(number)
        for name, statistics in found.items()
        for figure, number in asdict(statistics).items()
        if figure != "count"
    }


def compute_gradient_statistics(
    state: ModelState, shards: OptimizerShards
) -> dict[str, TensorStatistics]:
    """Return the statistics of each gradient by parameter, equal on every rank; collective.

    Each rank sums over the shards that it owns, so nothing is gathered. Elements that a sparse
    gradient does not have are zeros. Parameters without a gradient are missing.
    """
    own: dict[str, list[float]] = {}
    columns: list[tuple[str, int, torch.Tensor]] = []
    for name, entry in state.entries.items():
        sources = shards.pieces(name).sources if entry.trainable else ()
        for mesh_rank, copy in entry.owned().items():
            parameter = shards.of(copy)
            values = get_gradient_values(parameter) if mesh_rank in sources else None
            if values is not None:
                absent = parameter.numel() - values.numel()
                columns.append((name, absent, sum_elements(values.flatten())))
    for (name, absent, _), sums in zip(columns, _read([c[2] for c in columns]), strict=True):
        sums[0], sums[4] = sums[0] + absent, sums[4] + absent
        own[name] = _join([own.get(name, [0.0] * COLUMNS), sums])
    with convert_transport_errors(state.transport, "sharing statistics"):
        raws = state.transport.exchange_bytes(msgspec.msgpack.encode(own))
    parts = [msgspec.msgpack.decode(raw, type=dict[str, list[float]]) for raw in raws]
    return {
        name: TensorStatistics.of(_join([part[name] for part in parts if name in part]))
        for name in state.entries
        if any(name in part for part in parts)
    }


def sum_elements(values: torch.Tensor) -> torch.Tensor:
    """Return the sums of the last dim's elements, as the last dim of the result; float64."""
    values = values.detach().double()
    if not values.shape[-1]:
        return values.new_zeros(*values.shape[:-1], COLUMNS)
    finite = torch.isfinite(values)
    kept = torch.where(finite, values, 0.0)
    sums = (
        finite.sum(-1), kept.sum(-1), kept.square().sum(-1), kept.abs().amax(-1),
        (values == 0).sum(-1), (~finite).sum(-1),
    )  # fmt: skip
    return torch.stack([each.double() for each in sums], -1)


def join_rows(rows: torch.Tensor) -> TensorStatistics:
    """Return the statistics of a tensor from the sums of its rows, [rows, columns] or [columns]."""
    return TensorStatistics.of(_join(rows.reshape(-1, COLUMNS).double().tolist()))


def _join(parts: Sequence[Sequence[float]]) -> list[float]:
    """Return the sums of several parts of a tensor."""
    return [
        (max if column == _LARGEST else math.fsum)(part[column] for part in parts)
        for column in range(COLUMNS)
    ]


def _read(sums: Sequence[torch.Tensor]) -> list[list[float]]:
    """Return rows of sums as numbers, with one host wait per device."""
    found: list[list[float]] = [[] for _ in sums]
    for device in {each.device for each in sums}:
        at = [index for index, each in enumerate(sums) if each.device == device]
        for index, row in zip(at, torch.stack([sums[i] for i in at]).tolist(), strict=True):
            found[index] = row
    return found
