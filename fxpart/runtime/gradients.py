"""What gradients need between the last backward and the update: ties summed, the norm clipped."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fxpart.runtime.held import Held
from fxpart.runtime.state import Entry, ModelState
from fxpart.runtime.transport import STATE


def share_ties(state: ModelState, held: Held) -> None:
    """Give every copy of a shared parameter the owner's gradient, which is the sum of all.

    The sums themselves are made during the backward passes (:mod:`fxpart.runtime.ties`). Each lane
    sends within its own pipeline.
    """
    for _, entry in tied(state):
        for lane in state.lanes:
            _share_tie(state, held, entry, lane.index)


def tied(state: ModelState) -> list[tuple[str, Entry]]:
    """The trainable entries that several stages hold, sorted by name."""
    return sorted(
        (name, entry)
        for name, entry in state.entries.items()
        if entry.trainable and len(entry.stages) > 1
    )


def _share_tie(state: ModelState, held: Held, entry: Entry, lane: int) -> None:
    transport, owner = state.transport, entry.spec.owner
    home = state.rank(owner, lane)
    copies = {stage: t for (stage, at), t in entry.copies.items() if at == lane}
    shared = [s for s, t in copies.items() if t is copies.get(owner) and s != owner]
    others = [s for s in sorted(entry.stages, reverse=True) if s != owner and s not in shared]
    sends = []
    if owner in copies:
        total = _gradient(held.of(copies[owner]))
        for stage in others:
            # In one process a message is the tensor itself, and copies must not share memory.
            rank = state.rank(stage, lane)
            message = total.clone() if rank in transport.local else total.contiguous()
            sends.append(transport.send(home, rank, STATE, message))
    for stage in others:
        if stage in copies:
            copy = held.of(copies[stage])
            copy.grad = transport.wait(_post(state, home, state.rank(stage, lane), copy))
    for handle in sends:
        transport.wait(handle)


def clip(state: ModelState, held: Held, largest: float) -> torch.Tensor:
    """Scale all gradients so that their global norm is at most ``largest``; the norm before it.

    The same operations as torch.nn.utils.clip_grad_norm_ on one process, in the model's own order
    of parameters and each tie once, so the result is the same bit for bit where nothing is cut.
    Call it after :func:`share_ties`.
    """
    names = [name for name, entry in state.entries.items() if entry.trainable]
    # Sums with zeros are exact, and so is float64 for every smaller type.
    table = torch.zeros(2, len(names), dtype=torch.float64)
    for index, name in enumerate(names):
        _note_norms(table, index, state, held, name)
    state.transport.total(table)
    cut = torch.tensor([len(held.pieces(name).sources) > 1 for name in names], dtype=torch.bool)
    norms = torch.where(cut, table[0].sqrt(), table[0])
    dtype = _norm_dtype(state, names)
    present = norms[table[1] > 0].to(dtype)
    parameters = [held.of(parameter) for _, parameter in state.parameters()]
    device = parameters[0].device if parameters else torch.device("cpu")
    norm = torch.linalg.vector_norm(present.to(device), 2.0)
    factor = torch.clamp(largest / (norm + 1e-6), max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor.to(parameter.grad.device))
    assert isinstance(norm, torch.Tensor)
    return norm


def _note_norms(table: torch.Tensor, index: int, state: ModelState, held: Held, name: str) -> None:
    """Put a parameter's norm into the table; squared where several lanes hold pieces of it."""
    entry, sources = state.entries[name], held.pieces(name).sources
    for lane, parameter in entry.owned().items():
        gradient = held.of(parameter).grad
        if gradient is None or lane not in sources:
            continue
        norm = torch.linalg.vector_norm(gradient, 2.0).double().cpu()
        table[0, index] += norm if len(sources) == 1 else norm**2
        table[1, index] = 1.0


def gather_gradients(
    state: ModelState, held: Held, own: Mapping[int, Mapping[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Whole gradients by name on every process, where there are any.

    own: per lane of this process the owners' gradients, in parts as the lane or its optimizer has
    them.
    """
    names = [name for name, entry in state.entries.items() if entry.trainable]
    found: dict[str, dict[int, torch.Tensor]] = {name: {} for name in names}
    flat = {}
    for lane, gradients in own.items():
        for name, gradient in gradients.items():
            found[name][lane] = gradient
            if tuple(gradient.shape) != state.entries[name].pieces.local_shape(lane):
                flat[name] = held.axis(name)
    # 1: there is one; 3: each lane's optimizer has a piece of it
    message = bytes(bool(found[name]) + 2 * (name in flat) for name in names)
    rows = state.transport.exchange_bytes(message)
    there = {name: max(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}
    wanted = {name: found[name] for name in names if there[name]}
    cut = {name: held.axis(name) for name in wanted if there[name] == 3}
    return state.gather(wanted, flat=cut)


def _norm_dtype(state: ModelState, names: list[str]) -> torch.dtype:
    dtype = torch.float32
    found = [getattr(torch, state.entries[name].spec.dtype) for name in names]
    if found:
        dtype = found[0]
        for other in found[1:]:
            dtype = torch.promote_types(dtype, other)
    return dtype


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _post(state: ModelState, source: int, target: int, like: torch.Tensor) -> object:
    return state.transport.post(source, target, STATE, like.shape, like.dtype, like.device)
