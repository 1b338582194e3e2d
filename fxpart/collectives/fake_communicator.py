"""Communicator without other ranks, for shapes and counts on fake tensors and symbolic sizes."""

from __future__ import annotations

import torch

from fxpart.collectives.communicator import Communicator, CompletedCollective, Size


class FakeCommunicator(Communicator):
    """Returns results of the right shape and dtype without data; see :class:`Communicator`."""

    fake = slowest = True

    def _reduce(
        self, tensor: torch.Tensor, mesh_ranks: tuple[int, ...], op: str, reuse: bool
    ) -> CompletedCollective:
        return CompletedCollective(torch.empty_like(tensor))

    def _gather(
        self, flat: torch.Tensor, mesh_ranks: tuple[int, ...], counts: list[Size]
    ) -> CompletedCollective:
        return CompletedCollective(flat.new_empty([sum(counts)]))

    def _scatter(
        self, flat: torch.Tensor, mesh_ranks: tuple[int, ...], counts: list[Size]
    ) -> CompletedCollective:
        return CompletedCollective(flat.new_empty([counts[mesh_ranks.index(self.mesh_rank)]]))

    def _exchange(
        self, flat: torch.Tensor, mesh_ranks: tuple[int, ...], give: list[Size], get: list[Size]
    ) -> CompletedCollective:
        return CompletedCollective(flat.new_empty([sum(get)]))
