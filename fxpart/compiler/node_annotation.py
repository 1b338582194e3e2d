"""What fxpart writes on a graph: its level, and one annotation for each node.

A graph is a ``torch.fx.GraphModule`` whose ``meta["fxpart_level"]`` says how far it has come and
whose nodes carry one frozen :class:`NodeAnnotation` under ``node.meta["fxpart"]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import sympy

from fxpart.sharding import Placements


class Level(IntEnum):
    """How far a graph has come; a pass names the level it needs and the one it leaves."""

    CAPTURED = 0
    ANNOTATED = 1
    ASSIGNED = 2
    EXPLICIT = 3


KEY = "fxpart"
LEVEL_KEY = "fxpart_level"
BLOCKS_KEY = "fxpart_blocks"
NO_CUT_KEY = "fxpart_no_cut"
RNG_KEY = "rng_key"
MESH_KEY = "fxpart_mesh"  # a graph that is being sharded: its Mesh
LANE_KEY = "fxpart_lane"  # a local graph: the lane whose values it has
PARTIAL_KEY = "fxpart_partial"  # a local graph: per parameter, the axes of gradients to be summed
OUTPUTS_KEY = "fxpart_outputs"  # a local graph: per returned value its placements, or None


@dataclass(frozen=True)
class BlockInfo:
    """A block: a readable name ("transformer.h.3.attn") and the digest of its structure.

    Blocks with equal ``identity`` run the same ops on the same shapes: the price of one is that
    of all.
    """

    name: str
    identity: str


@dataclass(frozen=True)
class SavedTensor:
    """A tensor kept for the backward: ``storage`` is equal for tensors that share one storage.

    size: bytes, an int or a sympy expression in the graph's symbols. source: the node whose value
    it is, or "" for an op's private result (a mask, a log-sum-exp).
    """

    storage: int
    size: int | sympy.Expr
    source: str = ""


@dataclass(frozen=True)
class OpWorkspace:
    """Bytes that an op takes while it runs, ints or sympy expressions in the graph's symbols.

    forward: at most, beside operands and what is left (results, saved tensors). backward: at most,
    with the gradients that it makes, beside what was saved and the gradients that it is given.
    through: names of the operands whose gradient is that of the op's result, not a new tensor.
    """

    forward: int | sympy.Expr = 0
    backward: int | sympy.Expr = 0
    through: tuple[str, ...] = ()


@dataclass(frozen=True)
class NodeSharding:
    """How a node is sharded over the graph's mesh; every tuple is per axis or holds such tuples.

    strategy: the factor of the op's rule that the axis cuts, "" for none, "+0" for a linear set of
    partial operands (see fxpart.passes.rules); None while it is open. results: placements of each
    tensor that the node gives (of the value itself for inputs and state), None where open. origins:
    per axis where the placement came from, for a person.
    """

    strategy: tuple[str | None, ...]
    results: tuple[Placements, ...]
    origins: tuple[str, ...] = ()


@dataclass(frozen=True)
class NodeAnnotation:
    """What fxpart knows of one node, frozen; change it with ``dataclasses.replace``.

    module: the module path the op came from ("" for the root). source: "file.py:12" of the user's
    line, "" if unknown. requires_grad: whether the node's value carries a gradient. random: the
    op's index among the graph's random ops, None for others. block: the block it belongs to.
    stage: the stage it is assigned to. saved: what autograd keeps for this op's backward, without
    parameters and buffers. working: what the op takes while it runs.
    """

    module: str = ""
    source: str = ""
    requires_grad: bool = False
    random: int | None = None
    block: int | None = None
    stage: int | None = None
    saved: tuple[SavedTensor, ...] = ()
    sharding: NodeSharding | None = None
    working: OpWorkspace = OpWorkspace()
