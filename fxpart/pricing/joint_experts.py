"""Mixtures of experts whose experts are distributed over data replicas (as in GShard).

Each of ``degree`` replicas has an equal part of every mixture's experts, sends the rows of its
tokens to the replicas of the selected experts, and receives the results: two all-to-all forward,
two backward. On average as many rows are received as sent; that is what is priced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import fx

from fxpart.compiler.collective_calls import unwrap_seeded_call
from fxpart.compiler.mixture_ops import WEIGHTS, list_mixtures
from fxpart.costmodels.tensor_sizes import tensor_bytes
from fxpart.costs import OpSpec, TensorSpec
from fxpart.pricing.joint_block_kinds import BlockKinds, SavedStorage
from fxpart.pricing.joint_cost_sheet import BlockCollective, BlockLayout

if TYPE_CHECKING:
    from fxpart.costs import Size
    from fxpart.pricing.specs import Specs
    from fxpart.solver.problem import Weight


@dataclass(frozen=True)
class ExpertMixtures:
    """nodes: kind of block by op of a mixture. weights: its parameters by name.

    numbers: the number of experts of each mixture; empty where there are no mixtures.
    """

    nodes: Mapping[fx.Node, int]
    weights: frozenset[str]
    numbers: tuple[int, ...]


def find_mixtures(kinds: BlockKinds) -> ExpertMixtures:
    """Return the mixtures of all kinds of blocks, with the parameters that their ops read."""
    nodes: dict[fx.Node, int] = {}
    names: set[str] = set()
    numbers = []
    for kind, block in enumerate(kinds.samples):
        for one in list_mixtures(block.nodes):
            nodes[one.node] = kind
            names |= {*one.weights}
            numbers.append(one.experts)
    return ExpertMixtures(nodes, frozenset(names), tuple(numbers))


class ExpertParallelLayout(BlockLayout):
    """The part of a layout on each of ``degree`` replicas that share the experts."""

    def __init__(
        self, inner: BlockLayout, degree: int, mixtures: ExpertMixtures, specs: Specs
    ) -> None:
        """Add two all-to-all per direction for each mixture, of all rows that are sent together."""
        self.parts, self._inner = inner.parts * degree, inner
        self._degree, self._mixtures = degree, mixtures
        exchanges = []
        for node, kind in mixtures.nodes.items():
            _, args, _ = unwrap_seeded_call(node)
            (hidden,), (index,) = (specs.tensors(a) for a in args[:2])
            size = tensor_bytes(hidden) * index.shape[1] * degree
            back = specs.op(node)
            ways = (False, False, True, True) if back is None or back.gradients else (False, False)
            exchanges += [
                BlockCollective(kind, "shard(0)", "shard(1)", size, way, "expert") for way in ways
            ]
        self.messages = (*inner.messages, *exchanges)

    def op(self, node: fx.Node, spec: OpSpec) -> OpSpec:
        """Return the op; a mixture has its part of the experts, and as many rows as before."""
        found = self._inner.op(node, spec)
        if node not in self._mixtures.nodes:
            return found
        inputs = tuple(self._part(t) if i in WEIGHTS else t for i, t in enumerate(found.inputs))
        return OpSpec(
            found.name, inputs, found.outputs, found.attributes, found.gradients,
            found.gradient_inputs,
        )  # fmt: skip

    def tensors(self, node: fx.Node, whole: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
        """Return the rank's part of the node's tensors."""
        found = self._inner.tensors(node, whole)
        if node.op == "get_attr" and str(node.target) in self._mixtures.weights:
            return tuple(map(self._part, found))
        return found

    def shared(self, node: fx.Node, whole: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
        """Return the rank's part of a value that other blocks use."""
        return self._inner.shared(node, whole)

    def storage(self, storage: SavedStorage) -> Size:
        """Return the rank's bytes of a saved storage."""
        return self._inner.storage(storage)

    def weight(self, weight: Weight) -> int:
        """Return the number of parts into which a parameter is sharded."""
        own = self._degree if weight.name in self._mixtures.weights else 1
        return own * self._inner.weight(weight)

    def waits(self, weight: Weight) -> bool:
        """Return whether its gradient is reduced over the tensor ranks per step."""
        return self._inner.waits(weight)

    def _part(self, tensor: TensorSpec) -> TensorSpec:
        number = tensor.shape[0]
        assert isinstance(number, int), "the number of experts is not symbolic"
        return TensorSpec((-(-number // self._degree), *tensor.shape[1:]), tensor.dtype)
