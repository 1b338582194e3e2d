"""Graph levels and the annotation that fxpart attaches to each node.

A graph is a ``torch.fx.GraphModule``. ``meta["fxpart_level"]`` is its level, and each node carries
one frozen :class:`NodeAnnotation` in ``node.meta["fxpart"]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import sympy

from fxpart.sharding import Placements


class Level(IntEnum):
    """Compilation level of a graph; a pass declares the level that it requires and ensures."""

    CAPTURED = 0
    ANNOTATED = 1
    ASSIGNED = 2
    EXPLICIT = 3


KEY = "fxpart"
LEVEL_KEY = "fxpart_level"
BLOCKS_KEY = "fxpart_blocks"
REORDERED_KEY = "fxpart_reordered"  # sums that capture put in another order, as text
SKIPPED_KEY = "fxpart_skipped"  # source lines at which forward skips weights without rows
NO_CUT_KEY = "fxpart_no_cut"
RNG_KEY = "rng_key"
MESH_KEY = "fxpart_mesh"  # a graph with shardings: its Mesh
MESH_RANK_KEY = "fxpart_lane"  # a rank-local graph: its mesh rank
PARTIAL_KEY = "fxpart_partial"  # a rank-local graph: per parameter, gradient-reduction axes
WHOLE_KEY = "fxpart_whole"  # a graph with shardings: per node, axes that its stage does not have
OUTPUTS_KEY = "fxpart_outputs"  # a rank-local graph: placements of each output, or None


@dataclass(frozen=True)
class BlockInfo:
    """A block: a readable name ("transformer.h.3.attn") and the digest of its structure.

    Blocks with equal ``identity`` run the same ops on the same shapes, so they have the same cost.
    """

    name: str
    identity: str


@dataclass(frozen=True)
class SavedTensor:
    """A tensor saved for the backward; equal ``storage`` numbers mean shared storage.

    size: bytes, an int or a sympy expression in the graph's symbols. source: the node that computes
    it, or "" for an internal result of an op (a mask, a log-sum-exp).
    """

    storage: int
    size: int | sympy.Expr
    source: str = ""


@dataclass(frozen=True)
class OpWorkspace:
    """Temporary bytes of an op, as ints or sympy expressions in the graph's symbols.

    forward: peak bytes beyond operands, results and saved tensors. backward: peak bytes including
    the gradients that it computes, beyond saved tensors and incoming gradients. through: names of
    operands whose gradient aliases the gradient of the result.
    """

    forward: int | sympy.Expr = 0
    backward: int | sympy.Expr = 0
    through: tuple[str, ...] = ()


@dataclass(frozen=True)
class NodeSharding:
    """Sharding of a node over the graph's mesh, with one entry per mesh axis.

    strategy: the factor of the op's rule that the axis shards, "" for none, "+0" for a linear set
    of partial operands (see fxpart.passes.rules), None while undecided. results: placements of each
    tensor of the node's value, None where undecided. origins: the source of the placement on each
    axis, for messages.
    """

    strategy: tuple[str | None, ...]
    results: tuple[Placements, ...]
    origins: tuple[str, ...] = ()


@dataclass(frozen=True)
class NodeAnnotation:
    """What fxpart knows about one node; frozen, change it with ``dataclasses.replace``.

    module: module path of the op ("" for the root). source: user source line as "file.py:12", or
    "". requires_grad: whether the node's value requires a gradient. random: index among the graph's
    random ops, None for others. block, stage: the block and the stage it belongs to. saved: tensors
    that autograd saves for this op, without parameters and buffers. regathered: gathered parameters
    that it would save, which the backward gathers again. working: temporary memory.
    """

    module: str = ""
    source: str = ""
    requires_grad: bool = False
    random: int | None = None
    block: int | None = None
    stage: int | None = None
    saved: tuple[SavedTensor, ...] = ()
    regathered: tuple[SavedTensor, ...] = ()
    sharding: NodeSharding | None = None
    working: OpWorkspace = OpWorkspace()
