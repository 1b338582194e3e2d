"""Join the user's outputs from microbatches and gather them from the stages to the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from fxpart.errors import error
from fxpart.runtime.dtypes import torch_dtype
from fxpart.runtime.transport.agreement import agree, convert_transport_errors
from fxpart.runtime.transport.interface import STATE, Transport

Parts = Mapping[str, Mapping[int, torch.Tensor]]


@dataclass(frozen=True)
class OutputSpec:
    """One output. value: its name in the program. name: the user's name. dim: the batch dim."""

    value: str
    name: str
    dim: int | None = None


@dataclass(frozen=True)
class Outputs:
    """The outputs of a model. form: builds the model's own structure from tensors by name."""

    specs: tuple[OutputSpec, ...]
    form: Callable[[Mapping[str, Any]], Any] | None = None

    def build(self, found: Mapping[str, torch.Tensor]) -> Any:
        """Return the model's own structure; without one, the single tensor or a dict by name."""
        if self.form is not None:
            return self.form(found)
        return found["output"] if list(found) == ["output"] else dict(found)


class _LocalOutput(msgspec.Struct, frozen=True):
    """A tensor that a process has. microbatch: -1 for all microbatches joined."""

    output: int
    microbatch: int
    dtype: str
    shape: tuple[int, ...]


def gather_outputs(
    transport: Transport,
    outputs: Outputs,
    parts: Parts,
    rows: Sequence[int],
    device: torch.device,
    *,
    first_only: bool,
) -> dict[str, torch.Tensor] | None:
    """Return whole outputs by the user's names, on every process or only on rank 0 (else None).

    parts: what this process has, by value name and microbatch. rows: of each microbatch. FXP104 on
    every rank for an output that has no batch dim and differs between microbatches.
    """
    mine: dict[tuple[int, int], torch.Tensor] = {}

    def join() -> tuple[bool, str]:
        for index, spec in enumerate(outputs.specs):
            pieces_here = dict(parts.get(spec.value, {}))
            if len(pieces_here) == len(rows):
                mine[index, -1] = join_microbatches(
                    spec, [pieces_here[m] for m in sorted(pieces_here)], rows
                )
            else:  # Replicas of a stage share the microbatches.
                mine.update({(index, m): tensor for m, tensor in pieces_here.items()})
        return True, "outputs"

    agree(transport, "the outputs", join)
    with convert_transport_errors(transport, "gathering outputs"):
        found = _exchange(transport, mine, device, first_only=first_only)
    if first_only and 0 not in transport.local:
        return None
    pieces: dict[int, dict[int, torch.Tensor]] = {}
    for (index, microbatch), tensor in found.items():
        pieces.setdefault(index, {})[microbatch] = tensor
    return {
        spec.name: pieces[index][-1]
        if -1 in pieces[index]
        else join_microbatches(spec, [pieces[index][m] for m in sorted(pieces[index])], rows)
        for index, spec in enumerate(outputs.specs)
    }


def join_microbatches(
    spec: OutputSpec, pieces: Sequence[torch.Tensor], rows: Sequence[int]
) -> torch.Tensor:
    """Join one output of all microbatches.

    An output with a batch dim is concatenated; a floating-point scalar is averaged, weighted by
    rows.
    """
    first = pieces[0]
    if len(pieces) == 1:
        return first
    if spec.dim is not None:
        return torch.cat(list(pieces), spec.dim)
    if not first.dim() and first.is_floating_point():
        weights = torch.tensor(rows, dtype=torch.float64) / sum(rows)
        stacked = torch.stack([piece.double().cpu() for piece in pieces])
        return (stacked * weights).sum().to(first)
    if all(piece.shape == first.shape and torch.equal(piece, first) for piece in pieces[1:]):
        return first
    raise error(
        "FXP104",
        where=f"output {spec.name}",
        why="it has no batch dim, and it differs between microbatches",
        fix="return a tensor with a batch dim, or predict with at most one microbatch of rows",
    )


def _exchange(
    transport: Transport,
    mine: Mapping[tuple[int, int], torch.Tensor],
    device: torch.device,
    *,
    first_only: bool,
) -> dict[tuple[int, int], torch.Tensor]:
    """Return every tensor that any process has, from the first process that has it."""
    reports = [_LocalOutput(*key, str(t.dtype)[6:], tuple(t.shape)) for key, t in mine.items()]
    raws = transport.exchange_bytes(msgspec.json.encode(reports))
    found: dict[tuple[int, int], torch.Tensor] = {}
    alone = len(raws) == 1
    for process, raw in enumerate(raws):
        for item in msgspec.json.decode(raw, type=list[_LocalOutput]):
            key = (item.output, item.microbatch)
            if key in found:
                continue
            here = alone or process == transport.local[0]
            if here:
                tensor = mine[key].to(device).contiguous()
            else:
                tensor = torch.empty(item.shape, dtype=torch_dtype(item.dtype), device=device)
            found[key] = tensor if alone else _transfer(transport, tensor, process, first_only)
    return found


def _transfer(
    transport: Transport, tensor: torch.Tensor, root: int, first_only: bool
) -> torch.Tensor:
    """Return the tensor of process ``root`` on every rank or on rank 0."""
    if not first_only:
        return transport.broadcast(tensor, root)
    rank = transport.local[0]
    if rank == root != 0:
        transport.wait(transport.send(root, 0, STATE, tensor))
    elif rank == 0 != root:
        like = (tensor.shape, tensor.dtype, tensor.device)
        return transport.wait(transport.post(root, 0, STATE, *like))
    return tensor
