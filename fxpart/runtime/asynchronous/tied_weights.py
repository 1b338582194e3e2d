"""Refresh of tied weights while the pipeline is empty."""

from __future__ import annotations

import torch

from fxpart.runtime.gradients.communication import find_tied_entries
from fxpart.runtime.state.model_state import ModelState, StateEntry
from fxpart.runtime.transport.interface import STATE


def refresh_tied_weights(state: ModelState) -> None:
    """Copy the owner's weights to every stage with a tied parameter; every rank must call it.

    During asynchronous training stages use the weights sent with each microbatch; evaluation and
    saving read their own parameters.
    """
    with torch.no_grad():
        for _, entry in find_tied_entries(state):
            for lane in state.lanes:
                _refresh(state, entry, lane.index)


def _refresh(state: ModelState, entry: StateEntry, lane: int) -> None:
    transport, owner = state.transport, entry.spec.owner
    home = state.rank(owner, lane)
    for stage in sorted(entry.stages):
        copy, rank = entry.copies.get((stage, lane)), state.rank(stage, lane)
        if stage == owner:
            continue
        if home in transport.local:
            whole = entry.copies[owner, lane].detach()
            if copy is not None:
                copy.copy_(whole)
            else:
                transport.wait(transport.send(home, rank, STATE, whole.contiguous()))
        elif copy is not None:
            handle = transport.post(home, rank, STATE, copy.shape, copy.dtype, copy.device)
            copy.copy_(transport.wait(handle))
