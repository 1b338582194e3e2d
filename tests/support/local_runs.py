"""Runs the local graphs of all mesh ranks of a mesh in one process, and puts their results
together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from fxpart.passes import all_passes
from fxpart.passes.lower import LowerPass
from fxpart.passes.rules import layout, rule_of
from torch import fx

from fxpart.collectives import Communicator, InProcessHub
from fxpart.compiler import MESH_KEY, NodeSharding, PassManager
from fxpart.compiler.collective_calls import is_collective
from fxpart.compiler.graph_edit import annotate, annotation, fork
from fxpart.compiler.node_annotation import OUTPUTS_KEY, PARTIAL_KEY
from fxpart.sharding import (
    PARTIAL,
    REPLICATE,
    Mesh,
    Placements,
    indices,
    parse_placements,
)
from fxpart.verification.single_process import WholeGraph


def by_hand(
    graph: fx.GraphModule,
    mesh: str,
    placements: Mapping[str, str],
    strategies: Mapping[str, Sequence[str]],
) -> fx.GraphModule:
    """A copy with shardings: placements of inputs and state, strategies of ops by node name.

    What is not named is replicated. The results of ops are those of their layouts.
    """
    result = fork(graph)
    parsed = result.meta[MESH_KEY] = Mesh.parse(mesh)
    plain = ("",) * len(parsed.axes)
    named = set(placements) | set(strategies)
    for node in result.graph.nodes:
        named -= {node.name, str(node.target)}
        if node.op in ("placeholder", "get_attr"):
            text = placements.get(node.name, placements.get(str(node.target), ""))
            held = tuple(p or REPLICATE for p in parse_placements(text, parsed))
            annotate(node, sharding=NodeSharding(plain, (held,)))
        elif node.op == "call_function" and node.name in strategies:
            rule = rule_of(node)
            assert rule is not None, node.name
            strategy = tuple(strategies[node.name])
            made = layout(rule, strategy, parsed)
            assert made is not None, (node.name, strategy)
            annotate(node, sharding=NodeSharding(strategy, made.results))
    assert not named, f"the graph has no {sorted(named)}"
    return result


def lower_all(graph: fx.GraphModule, *, whole_outputs: bool = False) -> list[fx.GraphModule]:
    """The local graph of every mesh rank, verified."""
    mesh_ranks = range(graph.meta[MESH_KEY].size)
    passes = [
        LowerPass(mesh_rank=str(mesh_rank), whole_outputs=whole_outputs) for mesh_rank in mesh_ranks
    ]
    return [PassManager(all_passes()).run([item], graph) for item in passes]


def cut(whole: torch.Tensor, placements: Placements, mesh: Mesh, mesh_rank: int) -> torch.Tensor:
    """The mesh rank's part of a tensor, a copy."""
    if not whole.dim():
        return whole.detach().clone()
    held = np.ix_(*indices(whole.shape, placements, mesh, mesh_rank))
    return whole.detach()[tuple(torch.from_numpy(i) for i in held)].clone()


def join(
    pieces: Sequence[torch.Tensor],
    placements: Placements,
    mesh: Mesh,
    shape: Sequence[int],
    rtol: float = 1e-9,
) -> torch.Tensor:
    """A whole tensor out of what all mesh ranks hold: partial axes are summed, copies must be
    equal.

    rtol: of copies, by the largest entry.
    """
    whole = torch.zeros(tuple(shape), dtype=pieces[0].dtype)
    seen: dict[Any, torch.Tensor] = {}
    for mesh_rank, piece in enumerate(pieces):
        key = tuple(
            place if p is None or p == REPLICATE else -1
            for place, p in zip(mesh.coordinate(mesh_rank), placements, strict=True)
        )
        other = seen.setdefault(key, torch.zeros_like(whole))
        if whole.dim():
            held = np.ix_(*indices(shape, placements, mesh, mesh_rank))
            other[tuple(torch.from_numpy(i) for i in held)] += piece.detach()
        else:
            other += piece.detach()
    first, *others = seen.values()
    for other in others:
        top = float(first.abs().max()) if first.numel() else 0.0
        torch.testing.assert_close(other, first, rtol=rtol, atol=rtol * top, equal_nan=True)
    return first


class LocalGraph(WholeGraph):
    """Runs a local graph with a mesh rank's communicator."""

    def __init__(
        self, graph: fx.GraphModule, state: dict[str, torch.Tensor], mesh: Communicator
    ) -> None:
        super().__init__(graph, state)
        self.mesh = mesh

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Collectives take the communicator first."""
        if is_collective(target):
            return target(self.mesh, *args, **kwargs)
        return super().call_function(target, args, kwargs)


@dataclass(frozen=True)
class Outcome:
    """loss, outputs, gradients and state of a step, whole; counts: of mesh rank 0's
    communicator."""

    loss: torch.Tensor
    outputs: tuple[torch.Tensor | None, ...]
    gradients: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]
    calls: dict[tuple[str, str], Any]
    bytes: dict[tuple[str, str], Any]


def run_whole(
    graph: fx.GraphModule, state: Mapping[str, torch.Tensor], inputs: Sequence[Any], key: int
) -> Outcome:
    """The oracle: the graph that was given, in one piece."""
    held = {n: t.detach().clone().requires_grad_(t.requires_grad) for n, t in state.items()}
    loss, *outputs = WholeGraph(graph, held).run(key, *inputs)
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        loss.backward()
    gradients = {n: t.grad for n, t in held.items() if t.grad is not None}
    return Outcome(loss, tuple(outputs), gradients, held, {}, {})


def run_lanes(
    mesh_ranks: Sequence[fx.GraphModule],
    state: Mapping[str, torch.Tensor],
    inputs: Sequence[Any],
    key: int,
    like: Outcome,
) -> Outcome:
    """All mesh ranks of the local graphs on parts of the state and inputs, and their results
    joined.

    like: the oracle's, for the shapes of outputs.
    """
    mesh: Mesh = mesh_ranks[0].meta[MESH_KEY]
    homes = {str(n.target): homes_of(n) for n in mesh_ranks[0].graph.find_nodes(op="get_attr")}
    users = list(mesh_ranks[0].graph.find_nodes(op="placeholder"))[1:]

    def one(mine: Communicator) -> tuple[Any, dict[str, torch.Tensor], Communicator]:
        held = {
            n: cut(state[n], home, mesh, mine.mesh_rank).requires_grad_(state[n].requires_grad)
            for n, home in homes.items()
        }
        given = [
            cut(t, homes_of(n), mesh, mine.mesh_rank) for t, n in zip(inputs, users, strict=True)
        ]
        results = LocalGraph(mesh_ranks[mine.mesh_rank], held, mine).run(key, *given)
        if results[0].requires_grad:
            results[0].backward()
        return results, held, mine

    done = InProcessHub(mesh, timeout=60.0).run(one)
    partial = mesh_ranks[0].meta[PARTIAL_KEY]
    gradients = {}
    for name, home in homes.items():
        grads = [held[name].grad for _, held, _ in done]
        if all(g is None for g in grads):
            continue
        sums = tuple(
            PARTIAL if axis in partial.get(name, ()) else p
            for axis, p in zip(mesh.names, home, strict=True)
        )
        filled = [
            torch.zeros_like(held[name]) if g is None else g
            for g, (_, held, _) in zip(grads, done, strict=True)
        ]
        gradients[name] = join(filled, sums, mesh, state[name].shape)
    after = {
        n: join([held[n] for _, held, _ in done], home, mesh, state[n].shape)
        for n, home in homes.items()
    }
    shapes = [None if t is None else t.shape for t in (like.loss, *like.outputs)]
    outputs = [
        None
        if home is None or shape is None
        else join([r[i] for r, _, _ in done], home, mesh, shape)
        for i, (home, shape) in enumerate(zip(mesh_ranks[0].meta[OUTPUTS_KEY], shapes, strict=True))
    ]
    counts = done[0][2].counts
    assert outputs[0] is not None
    return Outcome(outputs[0], tuple(outputs[1:]), gradients, after, counts.calls, counts.bytes)


def homes_of(node: fx.Node) -> Placements:
    """Placements of an input or a piece of state."""
    known = annotation(node).sharding
    assert known is not None
    return known.results[0]


def check(
    graph: fx.GraphModule,
    state: Mapping[str, torch.Tensor],
    inputs: Sequence[Any],
    *,
    key: int = 0,
    rtol: float = 1e-9,
    whole_outputs: bool = False,
) -> tuple[list[fx.GraphModule], Outcome]:
    """Lower the sharded graph, run it whole and on all mesh ranks, and compare."""
    mesh_ranks = lower_all(graph, whole_outputs=whole_outputs)
    wanted = run_whole(graph, state, inputs, key)
    got = run_lanes(mesh_ranks, state, inputs, key, wanted)
    assert_same(got, wanted, rtol=rtol)
    return mesh_ranks, got


def assert_same(got: Outcome, wanted: Outcome, *, rtol: float = 1e-9) -> None:
    """Loss, outputs, gradients and state agree, relative to the largest entry of each."""
    _close(got.loss, wanted.loss, rtol, "loss")
    for index, (a, b) in enumerate(zip(got.outputs, wanted.outputs, strict=True)):
        if a is not None and b is not None:
            _close(a, b, rtol, f"output {index}")
    assert got.gradients.keys() == wanted.gradients.keys()
    top = max((float(g.abs().max()) for g in wanted.gradients.values() if g.numel()), default=0.0)
    for name, gradient in wanted.gradients.items():
        _close(got.gradients[name], gradient, rtol, f"gradient {name}", floor=top * 1e-3)
    for name, held in got.state.items():
        _close(held, wanted.state[name], rtol, f"state {name}")


def _close(
    got: torch.Tensor, wanted: torch.Tensor, rtol: float, what: str, floor: float = 1e-30
) -> None:
    assert got.shape == wanted.shape, f"{what}: {list(got.shape)} for {list(wanted.shape)}"
    a, b = got.detach().double(), wanted.detach().double()
    if not a.numel():
        return
    size = max(float(b.abs().max()), floor)
    difference = float((a - b).abs().max())
    assert difference <= rtol * size, f"{what} is off by {difference} of {size}"


__all__ = [
    "LocalGraph", "Outcome", "assert_same", "by_hand", "check", "cut", "homes_of", "join",
    "lower_all", "run_lanes", "run_whole",
]  # fmt: skip
