"""Run ops with internal collectives (parallel forms) on a single rank to time their computation.

Only the computation is measured, as communication is priced by links. The other mesh ranks are
assumed to have the same tensors as this one, and their part of a collective is available at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from fxpart.collectives.communicator import Communicator, CompletedCollective, Size
from fxpart.compiler.collective_calls import is_collective, is_random_shard
from fxpart.pricing.collective_traffic import is_plain
from fxpart.sharding import Mesh

_BEFORE = 3  # Parameters of a form before those of the op: communicator, axes, size.
# The op of a form, if it is not the name before "_rows".
_OPS = {
    **dict.fromkeys(
        (
            "embedding_bag_bags",
            "embedding_bag_rows",
            "embedding_bag_bags_rows",
            "embedding_bag_sent",
        ),
        "embedding_bag",
    ),
    "embedding_sent": "embedding",
    **dict.fromkeys(
        ("cross_entropy_classes", "cross_entropy_rows", "cross_entropy_rows_classes"),
        "cross_entropy_loss",
    ),
    **dict.fromkeys(("experts_cut", "experts_dispatched"), "fxpart.experts"),
    "index_own_rows": "index",
    "attention_rows": "scaled_dot_product_attention",
}
# Forms with indices into the whole factor: position of its size among the sizes.
_WHOLE = {
    **dict.fromkeys(("embedding_rows", "embedding_bag_rows", "cross_entropy_classes"), 0),
    **dict.fromkeys(("embedding_sent", "embedding_bag_sent"), 0),
    **dict.fromkeys(("experts_cut", "experts_dispatched"), 0),
    **dict.fromkeys(("cross_entropy_rows_classes", "embedding_bag_bags_rows"), 1),
}


@dataclass(frozen=True)
class CollectiveOpCall:
    """The op call within a call of a parallel form.

    op: name without "aten.". args, names: the op's own arguments and their names. whole: global
    size that indices refer to, None if they refer to a local tensor.
    """

    op: str
    args: tuple[Any, ...]
    names: tuple[str, ...]
    whole: Any = None

    @property
    def before(self) -> int:
        """The number of arguments before those of the op."""
        return _BEFORE - 1


def form_of(node: fx.Node) -> CollectiveOpCall | None:
    """Return the form that a node calls; None for ops, plain communication and random numbers."""
    if not is_collective(node.target) or is_random_shard(node.target) or is_plain(node):
        return None
    assert callable(node.target)
    name = node.target.__name__
    names = tuple(inspect.signature(node.target).parameters)[_BEFORE:]
    _, size, *args = node.args
    which = _WHOLE.get(name)
    sizes = size if isinstance(size, tuple | list) else (size,)
    return CollectiveOpCall(
        _OPS.get(name, name.removesuffix("_rows")),
        tuple(args),
        names,
        None if which is None else sizes[which],
    )


def bind_single_rank(form: Callable[..., Any], mesh: Mesh, mesh_rank: int) -> Callable[..., Any]:
    """Bind a form to one mesh rank that runs it without the other ranks."""
    return partial(form, IdenticalRanksCommunicator(mesh, mesh_rank))


class IdenticalRanksCommunicator(Communicator):
    """A communicator for one rank that assumes equal tensors on all ranks and never waits.

    Results equal those of real ranks with equal tensors. If counts differ between ranks, the
    rank's own part is repeated.
    """

    slowest = True

    def _reduce(
        self, tensor: torch.Tensor, mesh_ranks: tuple[int, ...], op: str, reuse: bool
    ) -> CompletedCollective:
        return CompletedCollective(tensor.clone() if op == "max" else tensor * len(mesh_ranks))

    def _gather(
        self, flat: torch.Tensor, mesh_ranks: tuple[int, ...], counts: list[Size]
    ) -> CompletedCollective:
        return CompletedCollective(_filled(flat, _total(counts)))

    def _scatter(
        self, flat: torch.Tensor, mesh_ranks: tuple[int, ...], counts: list[Size]
    ) -> CompletedCollective:
        return CompletedCollective(self._own(flat, mesh_ranks, counts) * len(mesh_ranks))

    def _exchange(
        self, flat: torch.Tensor, mesh_ranks: tuple[int, ...], give: list[Size], get: list[Size]
    ) -> CompletedCollective:
        return CompletedCollective(_filled(self._own(flat, mesh_ranks, give), _total(get)))

    def _own(
        self, flat: torch.Tensor, mesh_ranks: tuple[int, ...], counts: list[Size]
    ) -> torch.Tensor:
        place = mesh_ranks.index(self.mesh_rank)
        return flat.narrow(0, _total(counts[:place]), int(counts[place]))


def _total(counts: list[Size]) -> int:
    return sum(map(int, counts))


def _filled(flat: torch.Tensor, length: int) -> torch.Tensor:
    """Return ``length`` elements: those of ``flat`` repeated, or zeros if it is empty."""
    if flat.numel() == 0:
        return flat.new_zeros(length)
    return flat.repeat(-(-length // flat.numel()))[:length]
