"""What a value of one microbatch is to the value of the whole batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from torch import fx

from fxpart.sharding import Shard


class BatchRelation(Enum):
    """How the value of the whole batch follows from the values of the microbatches."""

    FIXED = "equal in every microbatch"
    ROWS = "the microbatches' values, concatenated along a dim"
    INDEX = "the numbers of the rows"
    SUM = "the sum of the microbatches' values"
    MEAN = "the mean of the microbatches' values, weighted by their rows"
    COUPLED = "no combination of the microbatches' values"


@dataclass(frozen=True)
class ValueKind:
    """One tensor of a graph.

    place: of ROWS and INDEX, where the rows are. from_inputs: whether it follows from inputs and
    constants alone, so that it can be computed for the whole batch before training. total: the
    value has to be that of the whole batch, computed from inputs; then the relation is FIXED.
    cause: the node that couples rows, for an error message. uniform: of FIXED, every row of it is
    equal, in a graph of one size, whose shapes do not tell which dims are rows.
    """

    relation: BatchRelation
    place: Shard | None = None
    from_inputs: bool = False
    total: bool = False
    cause: fx.Node | None = None
    uniform: bool = False

    @property
    def coupled(self) -> bool:
        """Whether the value cannot be had from microbatches."""
        return self.relation is BatchRelation.COUPLED

    def of(self, from_inputs: bool) -> ValueKind:
        """The same kind of a value that depends on inputs alone, or not."""
        return replace(self, from_inputs=from_inputs)


FIXED = ValueKind(BatchRelation.FIXED)
SUM = ValueKind(BatchRelation.SUM)
MEAN = ValueKind(BatchRelation.MEAN)


def rows(place: Shard) -> ValueKind:
    """Rows along a dim."""
    return ValueKind(BatchRelation.ROWS, place)


def make_coupled_kind(cause: fx.Node) -> ValueKind:
    """A value that couples rows of different microbatches, by the node that couples them."""
    return ValueKind(BatchRelation.COUPLED, cause=cause)
