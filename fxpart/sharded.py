"""A prepared graph and a mesh: annotate, propagate, choose, and the graph of each lane."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import lcm
from typing import TYPE_CHECKING

import torch
from torch import fx

from fxpart.annotations import annotations_of, load_annotations
from fxpart.annotations.entries import Key, merged, read_placements
from fxpart.annotations.files import parse_annotations
from fxpart.annotations.origin import annotated, is_annotated
from fxpart.annotations.values import sharding
from fxpart.pipeline import MESH_KEY, PassManager
from fxpart.pipeline.annotation import PARTIAL_KEY, NodeSharding
from fxpart.pipeline.edit import annotate
from fxpart.pricing.sharing import Sharing
from fxpart.requests import DATA_AXIS
from fxpart.runtime.lane_batch import parts_of
from fxpart.sharding import (
    Mesh,
    Placements,
    Shard,
    format_placements,
    local_shape,
)

if TYPE_CHECKING:
    from fxpart.capture import Captured
    from fxpart.plan import Certificate
    from fxpart.requests import Request


@dataclass(frozen=True)
class Sharded:
    """A prepared graph whose every op and value has its placements over a mesh.

    whole: the graph; what is open in it is replicated. zero: 0 to 3, over ``zero_axis``; with 3 the
    placements of parameters say it. certificate: of the choice of what annotations left open.
    """

    whole: fx.GraphModule
    captured: Captured
    zero: int = 0
    zero_axis: str = ""
    certificate: Certificate | None = None
    _locals: dict[tuple[object, ...], fx.GraphModule] = field(default_factory=dict)

    @property
    def mesh(self) -> Mesh:
        """The ranks of every stage."""
        mesh = self.whole.meta[MESH_KEY]
        assert isinstance(mesh, Mesh)
        return mesh

    def local(self, lane: int) -> fx.GraphModule:
        """The graph that one lane runs; lanes with equal shapes share one."""
        shapes = self._shapes(lane)
        if shapes not in self._locals:
            self._locals[shapes] = PassManager().run(f'lower{{lane="{lane}"}}', self.whole)
        return self._locals[shapes]

    def inputs(self) -> dict[str, Placements]:
        """By name how each input lies; open axes are replicated."""
        return _values(self.whole, "placeholder")

    def state(self) -> dict[str, Placements]:
        """By main name how each parameter and buffer lies."""
        return _values(self.whole, "get_attr")

    def degrees(self) -> tuple[int, int]:
        """Into how many parts the batch is cut, and how many ranks share each part."""
        held = self.inputs()
        rows = lcm(*(
            parts_of(self.mesh, held[i.name], i.batch_dim)
            for i in self.captured.inputs
            if i.batch_dim is not None and i.name in held
        ))  # fmt: skip
        return rows, max(1, self.mesh.size // rows)

    def sharing(self) -> Sharing:
        """What pricing has to know."""
        held = self.inputs()
        cut = {name for name, placed in self.state().items() if self._over_zero(placed)}
        return Sharing(
            self.mesh,
            rows=self.degrees()[0],
            parts={
                symbol: parts_of(self.mesh, held[name], dim)
                for symbol, (name, dim) in self.captured.symbols.items()
                if name in held
            },
            partial=self.local(0).meta[PARTIAL_KEY],
            zero=self.zero,
            zero_axis=self.zero_axis,
            cut=frozenset(cut),
        )

    def like(self, graph: fx.GraphModule, captured: Captured) -> Sharded:
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
        whole = propagated(graph, mesh, given, {}, close=True)
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


_EVEN = 2**20 * 3**4 * 5**2 * 7  # in place of a symbolic size: it can be cut into any equal parts


def find_annotations(model: torch.nn.Module, request: Request) -> dict[str, str]:
    """What :func:`fxpart.annotate` put on the model, DTensors, and those of the constraint."""
    return merged(annotations_of(model), given_annotations(request))


def given_annotations(request: Request) -> dict[str, str]:
    """The constraint ``annotations``: a file's, or as text a TOML table or JSON object."""
    given = str(request.constraints.get("annotations", ""))
    if not given:
        return {}
    if given.endswith((".toml", ".json")) and "\n" not in given:
        return load_annotations(given)
    return parse_annotations(given, ".json" if given.lstrip().startswith("{") else ".toml")


def shard(
    graph: fx.GraphModule, captured: Captured, request: Request, given: Mapping[str, str]
) -> Sharded:
    """Annotate, propagate and choose. given: the user's annotations, from all sources.

    Raises FXP111 and FXP112 for annotations that are wrong or contradict each other.
    """
    seeds = merged(_batch_cut(captured, request.mesh, given), given)
    whole = propagated(graph, request.mesh, seeds, captured.aliases, close=True)
    if request.zero == 3:
        _store_in_parts(whole, captured, request)
    return Sharded(whole, captured, request.zero, request.zero_axis)


def propagated(
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


def _batch_cut(captured: Captured, mesh: Mesh, given: Mapping[str, str]) -> dict[str, str]:
    """The data axis cuts the batch dim of every input that no annotation places on that axis."""
    if DATA_AXIS not in mesh.names:
        return {}
    found = {}
    for item in captured.inputs:
        key = f"input:{item.name}"
        if item.batch_dim is None or _says(given, key, DATA_AXIS):
            continue
        found[key] = f"{DATA_AXIS}:S({item.batch_dim})"
    return found


def _says(given: Mapping[str, str], name: str, axis: str) -> bool:
    """Whether an annotation places an input along an axis."""
    for text, placements in given.items():
        key = Key.parse(text)
        if key.kind == "input" and key.matches(name.removeprefix("input:")):
            if axis in read_placements(placements):
                return True
    return False


def _store_in_parts(graph: fx.GraphModule, captured: Captured, request: Request) -> None:
    """ZeRO-3: parameters lie in parts over the axis, and are put together where they are used.

    The first dim that no other axis cuts and that falls into equal parts is cut, else the first
    dim unevenly; a parameter too small for that, or annotated on the axis, stays as it is.
    """
    mesh, at = request.mesh, request.mesh.index(request.zero_axis)
    parts, parameters = mesh.shape[at], frozenset(captured.parameters)
    for node in graph.graph.find_nodes(op="get_attr"):
        known = sharding(node)
        if known is None or str(node.target) not in parameters:
            continue
        if at < len(known.origins) and is_annotated(known.origins[at]):
            continue
        placed, shape = known.results[0], tuple(node.meta["val"].shape)
        dim = _dim_to_cut(shape, placed, parts)
        if dim is not None:
            now = (*placed[:at], Shard(dim), *placed[at + 1 :])
            place(node, now, {at: annotated("zero=3")})


def _dim_to_cut(shape: tuple[int, ...], placed: Placements, parts: int) -> int | None:
    cut = {p.dim for p in placed if isinstance(p, Shard)}
    free = [dim for dim in range(len(shape)) if dim not in cut]
    even = [dim for dim in free if shape[dim] % parts == 0 and shape[dim]]
    if even:
        return even[0]
    return 0 if 0 in free and shape[0] >= parts else None


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
