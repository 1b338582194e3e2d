"""Relations between a microbatch's value and the value of the whole batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from torch import fx

from fxpart.sharding import Shard


class BatchRelation(Enum):
    """How the value of the whole batch follows from the microbatches' values."""

    FIXED = "equal in every microbatch"
    ROWS = "the microbatches' values, concatenated along a dim"
    INDEX = "the numbers of the rows"
    SUM = "the sum of the microbatches' values"
    MEAN = "the mean of the microbatches' values, weighted by their rows"
    COUPLED = "no combination of the microbatches' values"


@dataclass(frozen=True)
class ValueKind:
    """The kind of one tensor of a graph.

    place: of ROWS and INDEX, the position of the rows. from_inputs: whether it depends only on
    inputs and constants, so that it can be computed for the whole batch first. total: the value
    must be that of the whole batch, computed from inputs; the relation is then FIXED. cause: the
    node that couples rows, for messages. uniform: of FIXED in a graph with static sizes, whether
    all rows are equal.
    """

    relation: BatchRelation
    place: Shard | None = None
    from_inputs: bool = False
    total: bool = False
    cause: fx.Node | None = None
    uniform: bool = False

    @property
    def coupled(self) -> bool:
        """Whether microbatches cannot compute the value."""
        return self.relation is BatchRelation.COUPLED

    def of(self, from_inputs: bool) -> ValueKind:
        """Return the same kind with another ``from_inputs``."""
        return replace(self, from_inputs=from_inputs)


FIXED = ValueKind(BatchRelation.FIXED)
SUM = ValueKind(BatchRelation.SUM)
MEAN = ValueKind(BatchRelation.MEAN)


def rows(place: Shard) -> ValueKind:
    """Return the kind of rows along a dim."""
    return ValueKind(BatchRelation.ROWS, place)


def make_coupled_kind(cause: fx.Node) -> ValueKind:
    """Return the kind of a value that couples rows, with the node that couples them."""
    return ValueKind(BatchRelation.COUPLED, cause=cause)
