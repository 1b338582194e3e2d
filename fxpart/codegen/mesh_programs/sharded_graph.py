"""A prepared graph whose placements over a mesh are decided, and the graph of each lane."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import lcm, prod
from typing import TYPE_CHECKING

import torch
from torch import fx

from fxpart.annotations.graph_values import sharding
from fxpart.annotations.placement_origin import is_annotated
from fxpart.compiler import MESH_KEY, PassManager
from fxpart.compiler.graph_edit import annotate
from fxpart.compiler.node_annotation import PARTIAL_KEY, NodeSharding
from fxpart.pricing.stage_parallelism import StageParallelism
from fxpart.runtime.batch.mesh_rank_batch import count_dim_parts
from fxpart.sharding import (
    Mesh,
    Placements,
    Shard,
    format_placements,
    local_shape,
)

if TYPE_CHECKING:
    from fxpart.capture import CapturedModel
    from fxpart.plan.model import Certificate


@dataclass(frozen=True)
class ShardedGraph:
    """A prepared graph whose every op and value has its placements over a mesh.

    whole: the graph; what is open in it is replicated. zero: 0 to 3, over ``zero_axis``; with 3 the
    placements of parameters say it. certificate: of the choice of what annotations left open.
    whole_outputs: every lane returns the user's outputs whole, not as they lie.
    """

    whole: fx.GraphModule
    captured: CapturedModel
    zero: int = 0
    zero_axis: str = ""
    certificate: Certificate | None = None
    whole_outputs: bool = False
    _locals: dict[tuple[object, ...], fx.GraphModule] = field(default_factory=dict)

    @property
    def mesh(self) -> Mesh:
        """The ranks of every stage."""
        mesh = self.whole.meta[MESH_KEY]
        assert isinstance(mesh, Mesh)
        return mesh

    @property
    def provenance(self) -> str:
        """Where the placements come from, for the plan."""
        known = [k for node in self.whole.graph.nodes if (k := sharding(node)) is not None]
        origins = [o for k in known for o in k.origins if o]
        said = sum(map(is_annotated, origins))
        chosen = origins.count(CHOSEN)
        parts = [f"{said} annotated", f"{len(origins) - said - chosen} by propagation"]
        return ", ".join([*parts, *([f"{chosen} chosen by the solver"] if chosen else [])])

    def local(self, lane: int) -> fx.GraphModule:
        """The graph that one lane runs; lanes with equal shapes share one."""
        shapes = self._shapes(lane)
        if shapes not in self._locals:
            whole = ",whole_outputs=true" if self.whole_outputs else ""
            self._locals[shapes] = PassManager().run(f'lower{{lane="{lane}"{whole}}}', self.whole)
        return self._locals[shapes]

    def inputs(self) -> dict[str, Placements]:
        """By name how each input lies; open axes are replicated."""
        return _values(self.whole, "placeholder")

    def state(self) -> dict[str, Placements]:
        """By main name how each parameter and buffer lies."""
        return _values(self.whole, "get_attr")

    def degrees(self) -> tuple[int, int]:
        """Into how many parts the batch is cut, and how many ranks share each part.

        An axis cuts the batch if it cuts the rows of every input that has rows.
        """
        held = self.inputs()
        cut = [
            [isinstance(p, Shard) and p.dim == i.batch_dim for p in held[i.name]]
            for i in self.captured.inputs
            if i.batch_dim is not None and i.name in held
        ]
        rows = prod(
            size for axis, size in enumerate(self.mesh.shape) if cut and all(c[axis] for c in cut)
        )
        return rows, self.mesh.size // rows

    def multiple(self) -> int:
        """What the rows of every microbatch have to be a multiple of."""
        held = self.inputs()
        return lcm(
            *(
                count_dim_parts(self.mesh, held[i.name], i.batch_dim)
                for i in self.captured.inputs
                if i.batch_dim is not None and i.name in held
            )
        )

    def sharing(self) -> StageParallelism:
        """What pricing has to know."""
        held = self.inputs()
        cut = {name for name, placed in self.state().items() if self._over_zero(placed)}
        return StageParallelism(
            self.mesh,
            rows=self.degrees()[0],
            multiple=self.multiple(),
            parts={
                symbol: count_dim_parts(self.mesh, held[name], dim)
                for symbol, (name, dim) in self.captured.symbols.items()
                if name in held
            },
            partial=self.local(0).meta[PARTIAL_KEY],
            zero=self.zero,
            zero_axis=self.zero_axis,
            cut=frozenset(cut),
        )

    def like(self, graph: fx.GraphModule, captured: CapturedModel) -> ShardedGraph:
        """The same model's graph in evaluation mode, with state and inputs where they are here."""
        mesh, state = self.mesh, self.state()
        stored = {n: p for n, p in state.items() if self.zero == 3 and self._over_zero(p)}
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
        return replace(self, whole=whole, captured=captured, _locals={})

    def _over_zero(self, placed: Placements) -> bool:
        """Whether a value lies in parts over ZeRO's axis."""
        return bool(self.zero_axis) and isinstance(placed[self.mesh.index(self.zero_axis)], Shard)

    def _spread(self, placed: Placements) -> Placements:
        """The placements that ops see: without the parts of ZeRO-3, which are put together."""
        if self.zero != 3:
            return placed
        at = self.mesh.index(self.zero_axis)
        return (*placed[:at], None, *placed[at + 1 :])

    def _shapes(self, lane: int) -> tuple[object, ...]:
        """The shapes of all that a lane holds; symbolic sizes fall into equal parts."""
        found: list[object] = []
        for node in self.whole.graph.nodes:
            known = sharding(node)
            if known is None:
                continue
            for tensor, placed in zip(_tensors(node), known.results, strict=False):
                if any(isinstance(p, Shard) for p in placed):
                    sizes = [s if isinstance(s, int) else _EVEN for s in tensor.shape]
                    found.append(local_shape(sizes, placed, self.mesh, lane))
        return tuple(found)


CHOSEN = "chosen by the solver"  # the origin of what the pass `place` decides
_EVEN = 2**20 * 3**4 * 5**2 * 7  # in place of a symbolic size: it can be cut into any equal parts


def propagate_annotations(
    graph: fx.GraphModule,
    mesh: Mesh,
    seeds: Mapping[str, str],
    aliases: Mapping[str, str],
    *,
    close: bool,
) -> fx.GraphModule:
    """The graph with every placement that follows from these annotations.

    close: replicate what they leave open.
    """
    last = "propagate{close=true}" if close else "propagate"
    options = {"mesh": str(mesh), "seeds": json.dumps(seeds), "aliases": json.dumps(aliases)}
    text = ",".join(f"{name}={json.dumps(value)}" for name, value in options.items())
    return PassManager().run(f"annotate{{{text}}},{last}", graph)


def place(node: fx.Node, placed: Placements, origins: Mapping[int, str]) -> None:
    """Give an input or state its placements. origins: by axis, where they come from."""
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
