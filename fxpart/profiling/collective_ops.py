"""Forms alone: ops that use collectives inside, run without their other lanes.

What a form computes is measured; what travels is priced by the links. So the other lanes are taken
to hold what this one does: their part of a collective is there at once, with values that are as
plausible as the lane's own.
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

_BEFORE = 3  # parameters of a form before the op's own: communicator, axes, size
# The op that a form stands for, where that is not the name before "_rows".
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
}
# Forms whose indices count over the whole factor: of their sizes the one that it is.
_WHOLE = {
    **dict.fromkeys(("embedding_rows", "embedding_bag_rows", "cross_entropy_classes"), 0),
    **dict.fromkeys(("embedding_sent", "embedding_bag_sent"), 0),
    **dict.fromkeys(("experts_cut", "experts_dispatched"), 0),
    **dict.fromkeys(("cross_entropy_rows_classes", "embedding_bag_bags_rows"), 1),
}


@dataclass(frozen=True)
class CollectiveOpCall:
    """What a call of a form says of the op that it stands for.

    op: its name without "aten."; args: its own arguments; names: of these. whole: the size that
    its indices count over, None where they count over a local tensor.
    """

    op: str
    args: tuple[Any, ...]
    names: tuple[str, ...]
    whole: Any = None

    @property
    def before(self) -> int:
        """Arguments of the call before the op's own."""
        return _BEFORE - 1


def form_of(node: fx.Node) -> CollectiveOpCall | None:
    """The form that a node calls; None for ops, plain moves and random numbers."""
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
    """The form as this lane of the mesh runs it, without the others."""
    return partial(form, IdenticalRanksCommunicator(mesh, mesh_rank))


class IdenticalRanksCommunicator(Communicator):
    """A lane whose others hold the same tensors as it does; nothing travels, nothing waits.

    Results are those of real lanes that all give the same; where counts differ between lanes, the
    lane's own part again and again.
    """

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
    """So many elements: those of ``flat`` over and over, zeros where it has none."""
    if flat.numel() == 0:
        return flat.new_zeros(length)
    return flat.repeat(-(-length // flat.numel()))[:length]
