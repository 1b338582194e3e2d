"""Whether a rule tells the truth: cut the operands, run each mesh rank, recombine, compare.

Everything is checked that a layout claims: results, gradients of operands, and operands that the op
writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from fxpart.passes.rules import RuleLayout, ShardingRule, choices, layout, operands, rule_of
from fxpart.passes.rules.sharding_rule import factor_of
from torch import fx

from fxpart import collectives
from fxpart.collectives import Communicator, InProcessHub
from fxpart.rng import seeded
from fxpart.sharding import (
    PARTIAL,
    REPLICATE,
    Mesh,
    Partial,
    Placement,
    Placements,
    Shard,
    chunk,
    format_placements,
    local_shape,
)

MESHES = tuple(map(Mesh.parse, ("a=2", "a=3", "a=2,b=2")))


@dataclass(frozen=True)
class Made:
    """A tensor that the graph computes by this call, where a rule looks at it."""

    op: Any
    args: tuple[Any, ...]

    @property
    def tensor(self) -> torch.Tensor:
        """Its value."""
        args = [a.tensor if isinstance(a, Made) else a for a in self.args]
        found: torch.Tensor = self.op(*args)
        return found


@dataclass(frozen=True)
class Example:
    """A call with real arguments.

    values: False where only shapes can be compared (empty). gradients: False for an op that has
    none, or writes in place. frozen: operands that the op cannot differentiate.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    seeded: bool = False
    values: bool = True
    gradients: bool = True
    frozen: tuple[int, ...] = ()


def node_of(example: Example) -> fx.Node:
    """The call in a graph, with real tensors as abstract values."""
    graph = fx.Graph()

    def place(value: Any) -> Any:
        if isinstance(value, Made):
            node = graph.call_function(value.op, place(value.args))
            node.meta["val"] = value.tensor
            return node
        if isinstance(value, torch.Tensor):
            node = graph.placeholder("x")
            node.meta["val"] = value
            return node
        if isinstance(value, list | tuple):
            return type(value)(place(v) for v in value)
        return value

    args = place(example.args)
    kwargs = {name: place(v) for name, v in example.kwargs.items()}
    if example.seeded:
        node = graph.call_function(seeded, (7, 3, example.op, *args), kwargs)
    else:
        node = graph.call_function(example.op, args, kwargs)
    values = [n.meta["val"].clone() for n in operands(node)]
    node.meta["val"] = run(node.target, *given(node, (node.args, node.kwargs), values))
    return node


def given(
    node: fx.Node, arguments: tuple[Any, Any], values: Sequence[torch.Tensor]
) -> tuple[Any, Any]:
    """Arguments with the operands' nodes replaced by tensors."""
    table = dict(zip(operands(node), values, strict=True))
    args, kwargs = arguments
    replaced = fx.node.map_arg((tuple(args), dict(kwargs)), lambda n: table[n])
    return replaced  # type: ignore[return-value]


def run(target: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The call."""
    return target(*args, **kwargs)


def results_of(value: Any) -> list[torch.Tensor]:
    """The tensors of a result, without gradients that no mask asks for."""
    if value is None:
        return []
    return [value] if isinstance(value, torch.Tensor) else [t for v in value for t in results_of(v)]


# --- cutting and recombining -------------------------------------------------------------------


def cut(x: torch.Tensor, places: Placements, mesh: Mesh, seed: int) -> list[torch.Tensor]:
    """The mesh ranks' parts; Partial ones are random parts of the sum."""
    generator = torch.Generator().manual_seed(seed)
    held = [x]
    for placement, parts in zip(places, mesh.shape, strict=True):
        # mesh ranks that hold the same get the same parts of it
        pieces = {id(t): t for t in held}
        made = {key: _pieces(t, placement, parts, generator) for key, t in pieces.items()}
        held = [p for t in held for p in made[id(t)]]
    return [t.clone() for t in held]


def _pieces(
    x: torch.Tensor, placement: Placement | None, parts: int, generator: torch.Generator
) -> list[torch.Tensor]:
    if isinstance(placement, Shard):
        dim = placement.dim
        view = x.unflatten(dim, (placement.outer, -1)) if x.shape[dim] else x.unsqueeze(dim)
        spans = [chunk(view.shape[dim + 1], parts, i) for i in range(parts)]
        return [view.narrow(dim + 1, a, b - a).flatten(dim, dim + 1) for a, b in spans]
    if isinstance(placement, Partial):
        if x.is_floating_point() or x.is_complex():
            noise = [torch.rand(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) - 0.5
                     for _ in range(parts - 1)]  # fmt: skip
        else:
            noise = [torch.randint(0, 9, x.shape, generator=generator).to(x.dtype)
                     for _ in range(parts - 1)]  # fmt: skip
        return [x - sum(noise), *noise]
    return [x] * parts


def whole(
    held: Sequence[torch.Tensor], places: Placements, mesh: Mesh, tolerance: dict[str, float]
) -> torch.Tensor:
    """The tensor of which the mesh ranks hold these parts; mesh ranks that should agree must."""
    parts = list(held)
    for placement, count in reversed(list(zip(places, mesh.shape, strict=True))):
        groups = [parts[i : i + count] for i in range(0, len(parts), count)]
        parts = [_join(group, placement, tolerance) for group in groups]
    return parts[0]


def _join(
    group: Sequence[torch.Tensor], placement: Placement | None, tolerance: dict[str, float]
) -> torch.Tensor:
    if isinstance(placement, Shard):
        dim, outer = placement.dim, placement.outer
        views = [t.reshape(*t.shape[:dim], outer, t.shape[dim] // outer, *t.shape[dim + 1 :])
                 for t in group]  # fmt: skip
        return torch.cat(views, dim + 1).flatten(dim, dim + 1)
    if isinstance(placement, Partial):
        total = group[0].clone()
        for t in group[1:]:
            total = total + t
        return total
    for t in group[1:]:
        torch.testing.assert_close(t, group[0], equal_nan=True, **tolerance)
    return group[0]


# --- one strategy ------------------------------------------------------------------------------


@dataclass
class Whole:
    """The op on whole tensors: results, gradients of results and operands, operands afterwards."""

    values: list[torch.Tensor]
    results: list[torch.Tensor]
    towards: list[torch.Tensor | None]
    gradients: list[torch.Tensor | None]
    after: list[torch.Tensor]


def run_whole(node: fx.Node, example: Example) -> Whole:
    """Run the op once, forward and backward."""
    values = [n.meta["val"].clone() for n in operands(node)]
    leaves = _leaves(values, example)
    used = _used(leaves, node)
    found = run(node.target, *given(node, (node.args, node.kwargs), used))
    results = results_of(found)
    generator = torch.Generator().manual_seed(5)
    towards = [_like(r, generator) if r.requires_grad else None for r in results]
    gradients = _backward(leaves, results, towards)
    return Whole(values, [r.detach() for r in results], towards, gradients,
                 [u.detach() for u in used])  # fmt: skip


def _leaves(values: Sequence[torch.Tensor], example: Example) -> list[torch.Tensor]:
    wanted = example.gradients and example.values
    return [
        v.detach()
        .clone()
        .requires_grad_(
            wanted and i not in example.frozen and (v.is_floating_point() or v.is_complex())
        )
        for i, v in enumerate(values)
    ]


def _used(leaves: Sequence[torch.Tensor], node: fx.Node) -> list[torch.Tensor]:
    """Leaves, or copies where the op may write into them."""
    return [x if x.requires_grad else x.clone() for x in leaves]


def _like(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.rand(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) + 0.5


def _backward(
    leaves: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
    towards: Sequence[torch.Tensor | None],
) -> list[torch.Tensor | None]:
    pairs = [(r, t) for r, t in zip(results, towards, strict=True)
             if t is not None and r.requires_grad]  # fmt: skip
    wanted = [x for x in leaves if x.requires_grad]
    if not pairs or not wanted:
        return [None] * len(leaves)
    found = iter(torch.autograd.grad(
        [r for r, _ in pairs], wanted, [t for _, t in pairs], allow_unused=True
    ))  # fmt: skip
    gradients = [next(found) if x.requires_grad else None for x in leaves]
    gradients = [g.to_dense() if g is not None and g.is_sparse else g for g in gradients]
    return [torch.zeros_like(x) if g is None and x.requires_grad else g
            for x, g in zip(leaves, gradients, strict=True)]  # fmt: skip


def strategies(rule: ShardingRule, mesh: Mesh, limit: int) -> Iterator[tuple[str, ...]]:
    """Every choice for one axis, factors in equal parts too; pairs for two (every k-th if many)."""
    each = list(choices(rule))
    for factor in rule.factors:
        if factor not in rule.whole and factor not in rule.forms:
            each.append(f"{factor}/2")
    found = list(product(each, repeat=len(mesh.axes)))
    step = max(1, len(found) // limit)
    yield from found[:: step + (len(each) % step == 0 and step > 1)]


def check(example: Example, limit: int = 24) -> int:
    """Check every strategy of the example's rule; the number of those that cut something."""
    node = node_of(example)
    rule = rule_of(node)
    assert rule is not None, f"{example.op} has no rule for {_shapes(node)}"
    assert len(rule.operands) == len(operands(node))
    reference = run_whole(node, example)
    assert len(rule.results) == len(reference.results)
    done = 0
    for mesh in MESHES:
        for strategy in strategies(rule, mesh, limit):
            known = layout(rule, strategy, mesh)
            if known is None:
                continue
            try:
                _check(node, example, rule, strategy, mesh, known, reference)
            except Exception as cause:
                told = f"{example.op} {_shapes(node)} {strategy} on {mesh}: {rule}\n{known}"
                raise AssertionError(f"{told}\n{cause}") from cause
            done += any(strategy)
    return done


def _shapes(node: fx.Node) -> list[tuple[int, ...]]:
    return [tuple(n.meta["val"].shape) for n in operands(node)]


def _check(
    node: fx.Node,
    example: Example,
    rule: ShardingRule,
    strategy: tuple[str, ...],
    mesh: Mesh,
    known: RuleLayout,
    reference: Whole,
) -> None:
    held = [
        cut(v, p, mesh, 11 + i)
        for i, (v, p) in enumerate(zip(reference.values, known.operands, strict=True))
    ]
    towards = [
        None if t is None else cut(t, tuple(REPLICATE if p == PARTIAL else p for p in places),
                                   mesh, 0)
        for t, places in zip(reference.towards, known.results, strict=True)
    ]  # fmt: skip

    def mesh_rank(mesh_of: Communicator) -> tuple[list[torch.Tensor], Any, list[torch.Tensor]]:
        at = mesh_of.mesh_rank
        leaves = _leaves([h[at] for h in held], example)
        used = _used(leaves, node)
        target, arguments = local_call(node, rule, strategy, known, mesh_of)
        results = results_of(run(target, *given(node, arguments, used)))
        here = [None if t is None else t[at] for t in towards]
        gradients = _backward(leaves, results, here)
        return [r.detach() for r in results], gradients, [u.detach() for u in used]

    hub = InProcessHub(mesh, timeout=30.0)
    if not rule.forms and node.target is not seeded:  # nothing to say to each other: no threads
        mesh_ranks = [mesh_rank(communicator) for communicator in hub.communicators]
    else:
        mesh_ranks = hub.run(mesh_rank)
    tolerance = _tolerance(reference)
    for i, result in enumerate(reference.results):
        parts = [found[0][i] for found in mesh_ranks]
        for at, part in enumerate(parts):
            assert part.shape == local_shape(tuple(result.shape), known.results[i], mesh, at)
            assert part.dtype == result.dtype
        if example.values:
            made = whole(parts, known.results[i], mesh, tolerance)
            torch.testing.assert_close(made, result, equal_nan=True, **tolerance)
    for i, gradient in enumerate(reference.gradients):
        if gradient is not None:
            made = whole([found[1][i] for found in mesh_ranks], known.gradients[i], mesh, tolerance)
            torch.testing.assert_close(
                made, gradient, equal_nan=True, **tolerance, msg=lambda m, i=i: f"gradient {i}: {m}"
            )
    for i, after in enumerate(reference.after):
        made = whole([found[2][i] for found in mesh_ranks], known.operands[i], mesh, tolerance)
        torch.testing.assert_close(made, after, equal_nan=True, **tolerance)


def _tolerance(reference: Whole) -> dict[str, float]:
    narrow = any(v.dtype in (torch.float32, torch.complex64)
                 for v in (*reference.values, *reference.results))  # fmt: skip
    return {"rtol": 2e-4, "atol": 2e-4} if narrow else {"rtol": 1e-8, "atol": 1e-9}


def local_call(
    node: fx.Node,
    rule: ShardingRule,
    strategy: tuple[str, ...],
    known: RuleLayout,
    mesh: Communicator,
) -> tuple[Callable[..., Any], tuple[Any, Any]]:
    """What one mesh rank runs: target and arguments, as the lowering makes them."""
    shapes = [tuple(n.meta["val"].shape) for n in operands(node)]
    outs = [tuple(t.shape) for t in results_of(node.meta["val"])]
    arguments: tuple[Any, Any] = (node.args, dict(node.kwargs))
    if rule.localise is not None:
        arguments = rule.localise(
            node,
            arguments,
            [local_shape(s, p, mesh.mesh, mesh.mesh_rank)
             for s, p in zip(shapes, known.operands, strict=True)],
            [local_shape(s, p, mesh.mesh, mesh.mesh_rank)
             for s, p in zip(outs, known.results, strict=True)],
        )  # fmt: skip
    args, kwargs = arguments
    axes: dict[str, tuple[str, ...]] = {}
    for name, axis in zip(strategy, mesh.mesh.names, strict=True):
        factor, _ = factor_of(name)
        if factor in rule.forms:
            axes[factor] = (*axes.get(factor, ()), axis)
    if axes:
        key = next(k for k in rule.forms if set(k.split()) == set(axes))
        form = getattr(collectives, rule.forms[key])
        if key in axes:
            return form, ((mesh, axes[key], rule.sizes[key], *args), kwargs)
        names = key.split()
        both = tuple(axes[n] for n in names), tuple(rule.sizes[n] for n in names)
        return form, ((mesh, *both, *args), kwargs)
    if node.target is seeded and any(isinstance(p, Shard) for p in known.results[0]):
        text = format_placements(known.results[0], mesh.mesh)
        return collectives.random_shard, ((mesh, outs[0], text, *args), kwargs)
    return node.target, (args, kwargs)
