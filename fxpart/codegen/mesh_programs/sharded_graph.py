"""A prepared graph with placements over a mesh, and its rank-local graphs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import lcm, prod
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from fxpart.annotations.graph_values import sharding
from fxpart.annotations.placement_origin import is_annotated
from fxpart.compiler import MESH_KEY, PassManager
from fxpart.compiler.attention_ops import ROWS, list_attentions
from fxpart.compiler.graph_edit import annotate
from fxpart.compiler.mixture_ops import DISPATCHED, list_mixtures
from fxpart.compiler.node_annotation import NodeSharding
from fxpart.compiler.work_estimate import is_heavy
from fxpart.passes import all_passes
from fxpart.passes.rules.sharding_rule import factor_of
from fxpart.sharding import (
    Mesh,
    Placements,
    Shard,
    format_placements,
    local_shape,
)
from fxpart.sharding.mesh import parse_axes
from fxpart.sharding.placement import count_dim_parts

if TYPE_CHECKING:
    from fxpart.capture import CapturedModel
    from fxpart.plan.model import Certificate


@dataclass(frozen=True)
class ShardedGraph:
    """A prepared graph in which every op and value has placements over a mesh.

    whole: the graph; undecided axes are replicated. zero: ZeRO stage 0 to 3 over ``zero_axis``, one
    axis or several such as "dp,cp"; with 3, the placements of parameters express it. certificate:
    of the solver's choice of placements. whole_outputs: every rank returns the user's outputs
    unsharded. costs: of the local graph, as far as pricing found them.
    """

    whole: fx.GraphModule
    captured: CapturedModel
    zero: int = 0
    zero_axis: str = ""
    certificate: Certificate | None = None
    whole_outputs: bool = False
    costs: dict[object, Any] = field(default_factory=dict)
    _locals: dict[tuple[object, ...], fx.GraphModule] = field(default_factory=dict)

    @property
    def mesh(self) -> Mesh:
        """The mesh of every stage."""
        mesh = self.whole.meta[MESH_KEY]
        assert isinstance(mesh, Mesh)
        return mesh

    @property
    def provenance(self) -> str:
        """Summary of the origins of the placements, for the plan."""
        known = [k for node in self.whole.graph.nodes if (k := sharding(node)) is not None]
        origins = [o for k in known for o in k.origins if o]
        annotated = sum(map(is_annotated, origins))
        chosen = origins.count(CHOSEN)
        parts = [f"{annotated} annotated", f"{len(origins) - annotated - chosen} by propagation"]
        return ", ".join([*parts, *([f"{chosen} chosen by the solver"] if chosen else [])])

    def local(self, mesh_rank: int) -> fx.GraphModule:
        """Return the graph of one mesh rank; ranks with equal shapes share one."""
        shapes = self._shapes(mesh_rank)
        if shapes not in self._locals:
            whole = ",whole_outputs=true" if self.whole_outputs else ""
            self._locals[shapes] = PassManager(all_passes()).run(
                f'lower{{mesh_rank="{mesh_rank}"{whole}}}', self.whole
            )
        return self._locals[shapes]

    def inputs(self) -> dict[str, Placements]:
        """Return the placements of each input by name; undecided axes are replicated."""
        return _values(self.whole, "placeholder")

    def state(self) -> dict[str, Placements]:
        """Return the placements of each parameter and buffer, by main name."""
        return _values(self.whole, "get_attr")

    def degrees(self) -> tuple[int, int, int, int]:
        """Return the degrees of data, tensor, expert and context parallelism.

        An axis is data-parallel if it shards the rows of every input that has rows, and no
        parameter except by ZeRO-3 and those of distributed experts: another axis that shards
        parameters is tensor-parallel, also where some ops split the batch over it. An axis that
        shards the queries of all attention, but no rows and no parameters of products and lookups,
        is context-parallel.
        """
        axes, shape = self._batch_axes(), self.mesh.shape
        experts = [axis for axis in axes if self._list_distributed(axis)]
        rows = prod(shape[axis] for axis in self._data_axes())
        others = {*range(len(shape))} - {*axes}
        context = prod(shape[axis] for axis in others if self._shards_sequences(axis))
        tensor = self.mesh.size // (rows * context)
        return rows, tensor, prod(shape[axis] for axis in experts), context

    @property
    def shard_degree(self) -> int:
        """The ranks that share ZeRO's shards if these are a part of the data-parallel ones, else 0.

        The others have replicas of the shards (hybrid sharding).
        """
        axes = [self.mesh.names[axis] for axis in self._data_axes()] if self.zero else []
        size = self.mesh.count(*(axis for axis in parse_axes(self.zero_axis) if axis in axes))
        return size if 1 < size < self.mesh.count(*axes) else 0

    def count_batch_parts(self) -> int:
        """Return the number of parts into which the rows of every input are sharded."""
        return prod(self.mesh.shape[axis] for axis in self._batch_axes())

    def _batch_axes(self) -> list[int]:
        """Return the axes that shard the rows of every input that has rows."""
        found = self.inputs()
        cut = [
            [isinstance(p, Shard) and p.dim == i.batch_dim for p in found[i.name]]
            for i in self.captured.inputs
            if i.batch_dim is not None and i.name in found
        ]
        return [k for k in range(len(self.mesh.shape)) if cut and all(c[k] for c in cut)]

    def _data_axes(self) -> list[int]:
        """Return the axes that are data-parallel, as :meth:`degrees` defines it."""
        return [axis for axis in self._batch_axes() if not self._list_sharded(axis)]

    def _list_sharded(self, axis: int) -> set[str]:
        """Return the parameters that the axis shards, other than by ZeRO-3 or by expert."""
        if self.zero == 3 and self.mesh.names[axis] == self.zero_axis:
            return set()
        state, apart = self.state(), self._list_distributed(axis)
        return {
            name
            for name in self.captured.parameters
            if name in state and name not in apart and isinstance(state[name][axis], Shard)
        }

    def _shards_sequences(self, axis: int) -> bool:
        """Return whether the axis shards the queries of all attention, and no other work."""
        nodes = list_attentions(self.whole.graph)
        known = [sharding(node) for node in nodes]
        if not nodes or not all(k and factor_of(k.strategy[axis] or "")[0] == ROWS for k in known):
            return False
        sharded = self._list_sharded(axis)  # may have position tables that are only added
        states = self.whole.graph.find_nodes(op="get_attr")
        return not any(is_heavy(u) for n in states if str(n.target) in sharded for u in n.users)

    def _list_distributed(self, axis: int) -> set[str]:
        """Return the parameters of experts that the axis distributes, with an exchange of rows."""
        found = set()
        for mixture in list_mixtures(self.whole.graph):
            known = sharding(mixture.node)
            if known is not None and known.strategy[axis] == DISPATCHED:
                found |= {*mixture.weights}
        return found

    def multiple(self) -> int:
        """Return the number that must divide the rows of every microbatch."""
        held = self.inputs()
        return lcm(
            *(
                count_dim_parts(self.mesh, held[i.name], i.batch_dim)
                for i in self.captured.inputs
                if i.batch_dim is not None and i.name in held
            )
        )

    def like(self, graph: fx.GraphModule, captured: CapturedModel) -> ShardedGraph:
        """Return the evaluation graph of the model with the same placements of state and inputs."""
        mesh, state = self.mesh, self.state()
        over = self.zero_axis if self.zero == 3 else None
        stored = {name: p for name, p in state.items() if over in self.list_axes(p)}
        seeds = {
            name: text
            for name, placed in state.items()
            if (text := format_placements(self._spread(placed), mesh)) and _cut(placed)
        }
        seeds |= {
            f"input:{name}": format_placements(placed, mesh)
            for name, placed in self.inputs().items()
        }
        present = {str(n.target) for n in graph.graph.find_nodes(op="get_attr")}
        present |= {f"input:{n.name}" for n in graph.graph.find_nodes(op="placeholder")}
        given = {key: text for key, text in seeds.items() if key in present}
        whole = propagate_annotations(graph, mesh, given, {}, close=True)
        for node in whole.graph.find_nodes(op="get_attr"):
            name = str(node.target)
            if name in state:
                place(node, stored.get(name, state[name]), {})
        return replace(self, whole=whole, captured=captured, costs={}, _locals={})

    def list_axes(self, placed: Placements) -> tuple[str, ...]:
        """Return the axes over which a value is sharded."""
        pairs = zip(self.mesh.names, placed, strict=True)
        return tuple(name for name, placement in pairs if isinstance(placement, Shard))

    def _spread(self, placed: Placements) -> Placements:
        """Return the placements that ops see, with ZeRO-3 shards gathered."""
        if self.zero != 3:
            return placed
        at = self.mesh.index(self.zero_axis)
        return (*placed[:at], None, *placed[at + 1 :])

    def _shapes(self, mesh_rank: int) -> tuple[object, ...]:
        """Return the shapes of all values of a mesh rank; symbolic sizes divide evenly."""
        found: list[object] = []
        for node in self.whole.graph.nodes:
            known = sharding(node)
            if known is None:
                continue
            for tensor, placed in zip(_tensors(node), known.results, strict=False):
                if any(isinstance(p, Shard) for p in placed):
                    sizes = [s if isinstance(s, int) else _EVEN for s in tensor.shape]
                    found.append(local_shape(sizes, placed, self.mesh, mesh_rank))
        return tuple(found)


CHOSEN = "chosen by the solver"  # origin of placements that the pass `place` selects
_EVEN = 2**20 * 3**4 * 5**2 * 7  # Substitute for a symbolic size, divisible by all common degrees.


def propagate_annotations(
    graph: fx.GraphModule,
    mesh: Mesh,
    seeds: Mapping[str, str],
    aliases: Mapping[str, str],
    *,
    close: bool,
) -> fx.GraphModule:
    """Return the graph with every placement that follows from these annotations.

    close: replicate what the annotations leave undecided.
    """
    last = "propagate{close=true}" if close else "propagate"
    options = {"mesh": str(mesh), "seeds": json.dumps(seeds), "aliases": json.dumps(aliases)}
    text = ",".join(f"{name}={json.dumps(value)}" for name, value in options.items())
    return PassManager(all_passes()).run(f"annotate{{{text}}},{last}", graph)


def place(node: fx.Node, placed: Placements, origins: Mapping[int, str]) -> None:
    """Set the placements of an input or state. origins: source of the placement, by axis."""
    known = sharding(node)
    old = known.origins if known is not None else ()
    words = tuple(
        origins.get(axis, old[axis] if axis < len(old) else "") for axis in range(len(placed))
    )
    annotate(node, sharding=NodeSharding(("",) * len(placed), (placed,), words))


def _values(graph: fx.GraphModule, op: str) -> dict[str, Placements]:
    found = {}
    for node in graph.graph.find_nodes(op=op):
        known = sharding(node)
        if known is not None and known.results:
            found[str(node.target) if op == "get_attr" else node.name] = known.results[0]
    return found


def _cut(placed: Placements) -> bool:
    return any(isinstance(p, Shard) for p in placed)


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    held = node.meta.get("val")
    if isinstance(held, torch.Tensor):
        return [held]
    return (
        [t for t in held if isinstance(t, torch.Tensor)] if isinstance(held, list | tuple) else []
    )
