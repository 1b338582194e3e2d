"""What gradients need between the last backward and the update: ties summed, the norm clipped."""

from __future__ import annotations

import torch

from fxpart.runtime.state import Entry, ModelState
from fxpart.runtime.transport import STATE


def share_ties(state: ModelState) -> None:
    """Give every copy of a shared parameter the owner's gradient, which is the sum of all.

    The sums themselves are made during the backward passes (:mod:`fxpart.runtime.ties`).
    """
    for _, entry in tied(state):
        _share_tie(state, entry)


def tied(state: ModelState) -> list[tuple[str, Entry]]:
    """The trainable entries that several stages hold, sorted by name."""
    return sorted(
        (name, entry)
        for name, entry in state.entries.items()
        if entry.trainable and len(entry.stages) > 1
    )


def _share_tie(state: ModelState, entry: Entry) -> None:
    transport, ranks, owner = state.transport, state.ranks, entry.spec.owner
    home = ranks[owner]
    shared = [s for s, t in entry.copies.items() if t is entry.copies.get(owner) and s != owner]
    others = [s for s in sorted(entry.stages, reverse=True) if s != owner and s not in shared]
    sends = []
    if owner in entry.copies:
        total = _gradient(entry.copies[owner])
        for stage in others:
            # In one process a message is the tensor itself, and copies must not share memory.
            message = total.clone() if ranks[stage] in transport.local else total.contiguous()
            sends.append(transport.send(home, ranks[stage], STATE, message))
    for stage in others:
        if stage in entry.copies:
            copy = entry.copies[stage]
            copy.grad = transport.wait(_post(state, home, ranks[stage], copy))
    for handle in sends:
        transport.wait(handle)


def clip(state: ModelState, largest: float) -> torch.Tensor:
    """Scale all gradients so that their global norm is at most ``largest``; the norm before it.

    The same operations as torch.nn.utils.clip_grad_norm_ on one process, in the model's own order
    of parameters and each tie once, so the result is the same bit for bit. Call it after
    :func:`share_ties`.
    """
    names = [name for name, entry in state.entries.items() if entry.trainable]
    local = state.transport.local
    norms: dict[int, torch.Tensor] = {}
    for index, name in enumerate(names):
        entry = state.entries[name]
        if state.owner_rank(entry) in local:
            gradient = entry.copies[entry.spec.owner].grad
            if gradient is not None:
                norms[index] = torch.linalg.vector_norm(gradient, 2.0)
    # Sums with zeros are exact, and so is float64 for every smaller type.
    table = torch.zeros(2, len(names), dtype=torch.float64)
    if norms:
        at = torch.tensor(list(norms))
        table[0, at] = torch.stack([n.double() for n in norms.values()]).cpu()
        table[1, at] = 1.0
    state.transport.total(table)
    dtype = _norm_dtype(state, names)
    present = table[0][table[1] > 0].to(dtype)
    parameters = [parameter for _, parameter in state.parameters()]
    device = parameters[0].device if parameters else torch.device("cpu")
    norm = torch.linalg.vector_norm(present.to(device), 2.0)
    factor = torch.clamp(largest / (norm + 1e-6), max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor.to(parameter.grad.device))
    assert isinstance(norm, torch.Tensor)
    return norm


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
