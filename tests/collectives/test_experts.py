"""Mixtures of experts on mesh ranks: every cut against the whole op, forward and gradient."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from fxpart.passes.rules import RuleLayout, ShardingRule, choices, layout, rule_of
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Pool
from torch import fx

from fxpart import collectives
from fxpart.collectives import Communicator, FakeCommunicator, GroupCommunicator, InProcessHub
from fxpart.collectives.expert_parallel import owned
from fxpart.collectives.experts import GROUPED, HALVES, LOOP, PAIRS, WHOLE, statements
from fxpart.compat import fake_mode
from fxpart.sharding import Mesh, Partial, Placements, Replicate, Shard, indices, local_shape

OP = torch.ops.fxpart.experts.default
BODIES = {HALVES: "silu.default %0; mul.Tensor %2 %1", WHOLE: "relu.default %0; square.default %1"}
BODIES[PAIRS] = "clamp.default %0 None 0.5; sigmoid.default %2; mul.Tensor %2 %3; mul.Tensor %1 %4"
NAMES = ("hidden", "index", "weights", "up", "down", "up_bias", "down_bias")


@dataclass
class Case:
    """One mixture's arguments."""

    tensors: list[torch.Tensor | None]
    rest: tuple[Any, ...]

    @property
    def given(self) -> list[torch.Tensor]:
        return [t for t in self.tensors if t is not None]

    def arguments(self, held: list[torch.Tensor]) -> list[Any]:
        """The op's arguments with these tensors in place of the whole ones."""
        left = iter(held)
        return [None if t is None else next(left) for t in self.tensors] + list(self.rest)


def case(
    seed: int,
    tokens: int = 7,
    experts: int = 4,
    chosen: int = 2,
    inner: int = 4,
    width: int = 3,
    parts: str = HALVES,
    plain: bool = False,
    bias: bool = False,
    routing: str = "random",
    product: str = LOOP,
    dtype: torch.dtype = torch.float64,
) -> Case:
    """A seeded mixture. routing: "random", "none" (expert 0 has no token), "one" (all to one)."""
    make = torch.Generator().manual_seed(seed)
    wide = inner if parts == WHOLE else 2 * inner

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=make, dtype=dtype)

    scores = torch.rand(tokens, experts, generator=make)
    if routing == "none" and experts > chosen:
        scores[:, 0] = -1
    if routing == "one":
        scores[:, experts - 1] = 2
    up, down = draw(experts, wide, width), draw(experts, width, inner)
    if plain:
        up, down = up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
    biases = [draw(experts, wide), draw(experts, width)] if bias else [None, None]
    weights = torch.rand(tokens, chosen, generator=make, dtype=dtype)
    tensors = [draw(tokens, width), scores.topk(chosen).indices, weights, up, down, *biases]
    return Case(tensors, (BODIES[parts], parts, plain, product))


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for rounding: sums are made in another order."""
    limit = 1e-10 if found.dtype == torch.float64 else 1e-4
    torch.testing.assert_close(found, expected, rtol=limit, atol=limit)


def rule(made: Case) -> ShardingRule:
    """The op's rule, asked as a pass asks."""
    graph = fx.Graph()
    nodes = []
    for name, held in zip(NAMES, made.tensors, strict=True):
        node = graph.placeholder(name) if held is not None else None
        if node is not None:
            node.meta["val"] = held
        nodes.append(node)
    call = graph.call_function(OP, (*nodes, *made.rest))
    call.meta["val"] = made.tensors[0]
    found = rule_of(call)
    assert found is not None
    return found


def forward_backward(
    function: Any, held: list[torch.Tensor], made: Case, back: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """The result and the gradients of all tensors."""
    leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in held]
    out = function(*made.arguments(leaves))
    out.backward(back)
    return out.detach(), [leaf.grad for leaf in leaves]


def part(tensor: torch.Tensor, placements: Placements, mesh: Mesh, mesh_rank: int) -> torch.Tensor:
    """What the mesh rank holds."""
    return tensor[np.ix_(*indices(tensor.shape, placements, mesh, mesh_rank))].contiguous()


def joined(
    shape: torch.Size, parts: list[torch.Tensor], placements: Placements, mesh: Mesh
) -> torch.Tensor:
    """The whole tensor of what the mesh ranks hold; replicas must be equal."""
    whole = parts[0].new_zeros(shape)
    for mesh_rank, held in enumerate(parts):
        assert tuple(held.shape) == local_shape(shape, placements, mesh, mesh_rank)
        here = mesh.coordinate(mesh_rank)
        first = tuple(
            0 if isinstance(p, Replicate) else at for p, at in zip(placements, here, strict=True)
        )
        if first != here:
            close(held, parts[mesh.mesh_rank(first)])
            continue
        whole[np.ix_(*indices(shape, placements, mesh, mesh_rank))] += held
    return whole


def call_of(found: ShardingRule, strategy: tuple[str, ...], mesh: Mesh) -> Any:
    """What a mesh rank calls: the op, or the form of the factor that needs one."""
    axes: dict[str, list[str]] = {}
    for name, axis in zip(strategy, mesh.names, strict=True):
        if name in found.forms:
            axes.setdefault(name, []).append(axis)
    if not axes:
        return lambda communicator: OP
    ((name, cut),) = axes.items()
    form = getattr(collectives, found.forms[name])
    return lambda communicator: (
        lambda *args: form(communicator, tuple(cut), found.sizes[name], *args)
    )


def check(made: Case, mesh: Mesh, strategy: tuple[str, ...]) -> None:
    """The mesh ranks' results and gradients together are those of the whole op."""
    found = rule(made)
    how = layout(found, strategy, mesh)
    if how is None:
        return
    back = torch.randn(made.given[0].shape, dtype=made.given[0].dtype)
    expected, gradients = forward_backward(OP, made.given, made, back)
    function = call_of(found, strategy, mesh)
    passed = tuple(Replicate() if isinstance(p, Partial) else p for p in how.results[0])

    def mesh_rank(communicator: Communicator) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        here = communicator.mesh_rank
        held = [part(t, p, mesh, here) for t, p in zip(made.given, how.operands, strict=True)]
        held = _summed(held, how, communicator)
        return forward_backward(function(communicator), held, made, part(back, passed, mesh, here))

    ran = InProcessHub(mesh, timeout=20).run(mesh_rank)
    outs = [out for out, _ in ran]
    close(joined(back.shape, outs, how.results[0], mesh), expected)
    for index, gradient in enumerate(gradients):
        if gradient is not None:
            parts = [grads[index] for _, grads in ran]
            assert all(p is not None for p in parts)
            whole = joined(gradient.shape, parts, how.gradients[index], mesh)  # type: ignore[arg-type]
            close(whole, gradient)


def _summed(
    held: list[torch.Tensor], how: RuleLayout, communicator: Communicator
) -> list[torch.Tensor]:
    """Partial operands: the first mesh rank of each such axis has all, the others zeros."""
    here = communicator.mesh.coordinate(communicator.mesh_rank)
    kept = [
        all(at == 0 or not isinstance(p, Partial) for p, at in zip(placed, here, strict=True))
        for placed in how.operands
    ]
    return [t if keep else torch.zeros_like(t) for t, keep in zip(held, kept, strict=True)]


def test_strategies() -> None:
    found = rule(case(0))
    assert set(choices(found)) == {"", "t", "e", "i", "t&e"}
    mesh = Mesh((("d", 2),))
    how = layout(found, ("t&e",), mesh)
    assert how is not None
    assert how.operands == ((Shard(0),),) * 5
    assert how.results == ((Shard(0),),)
    assert how.gradients == ((Shard(0),),) * 5
    inside = layout(found, ("i",), mesh)
    assert inside is not None
    assert inside.operands[3:] == ((Shard(1, 2),), (Shard(2),))
    assert layout(found, ("e", "t&e"), Mesh((("a", 2), ("b", 2)))) is None


@pytest.mark.parametrize("routing", ["random", "none", "one"])
@pytest.mark.parametrize("strategy", ["t", "e", "i", "t&e"])
def test_one_axis(strategy: str, routing: str) -> None:
    for parts, plain, bias in [(HALVES, False, False), (PAIRS, True, True), (WHOLE, False, True)]:
        made = case(3, parts=parts, plain=plain, bias=bias, routing=routing)
        check(made, Mesh((("m", 2),)), (strategy,))


@pytest.mark.parametrize("strategy", list(product(["t", "e", "i", "t&e"], repeat=2)))
def test_two_axes(strategy: tuple[str, str]) -> None:
    check(case(5, tokens=8, bias=True), Mesh((("a", 2), ("b", 2))), strategy)


@pytest.mark.parametrize("strategy", ["e", "t&e"])
@pytest.mark.parametrize("experts", [3, 5, 7])
def test_experts_that_do_not_divide(strategy: str, experts: int) -> None:
    for mesh_ranks in (2, 3, 4):  # 5 experts on 4 mesh ranks: 2, 2, 1 and none
        check(case(7, experts=experts), Mesh((("m", mesh_ranks),)), (strategy,))


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 1000),
    tokens=st.integers(2, 9),
    experts=st.integers(2, 6),
    inner=st.sampled_from([2, 3, 4]),
    parts=st.sampled_from([HALVES, PAIRS, WHOLE]),
    plain=st.booleans(),
    bias=st.booleans(),
    routing=st.sampled_from(["random", "none", "one"]),
    mesh=st.sampled_from(["m=2", "m=3", "m=2,n=2"]),
    data=st.data(),
)
def test_any_cut_of_any_mixture(data: Any, mesh: str, **options: Any) -> None:
    made = case(chosen=data.draw(st.integers(1, options["experts"])), **options)
    strategy = tuple(data.draw(st.sampled_from(choices(rule(made)))) for _ in Mesh.parse(mesh).axes)
    check(made, Mesh.parse(mesh), strategy)


@pytest.mark.parametrize("strategy", ["t", "e", "i", "t&e"])
def test_grouped_products_of_torch(strategy: str) -> None:
    """They refuse float64; with all tokens on one expert a mesh rank has no row for them."""
    for routing in ("random", "one"):
        made = case(1, inner=16, width=16, product=GROUPED, dtype=torch.float32, routing=routing)
        check(made, Mesh((("m", 2),)), (strategy,))
    loops, back = Case(made.tensors, (*made.rest[:-1], LOOP)), torch.randn(7, 16)
    pairs = [forward_backward(OP, made.given, each, back) for each in (made, loops)]
    for a, b in zip(*([out, *grads] for out, grads in pairs), strict=True):
        if a is not None and b is not None:  # the choices are no floats
            close(a, b)


def test_experts_by_lane() -> None:
    assert owned(5, [4]) == [(0, 2), (2, 4), (4, 5), (5, 5)]
    assert owned(8, [2, 2]) == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert owned(5, [2, 2]) == [(0, 2), (2, 3), (3, 4), (4, 5)]


def test_two_transfers_forward_and_two_back() -> None:
    made, mesh = case(2, tokens=6), Mesh((("m", 2),))
    found = rule(made)
    how = layout(found, ("t&e",), mesh)
    assert how is not None
    function = call_of(found, ("t&e",), mesh)

    def mesh_rank(communicator: Communicator) -> tuple[int, int]:
        held = [
            part(t, p, mesh, communicator.mesh_rank)
            for t, p in zip(made.given, how.operands, strict=True)
        ]
        forward_backward(function(communicator), held, made, torch.ones(3, 3, dtype=torch.float64))
        key = ("all_to_all", "m")
        return communicator.counts.calls[key], communicator.counts.bytes[key]

    # the counts of 4 experts, and 3 tokens x 2 experts x 3 numbers: there, back, and gradients
    (calls, first), (_, second) = InProcessHub(mesh, timeout=20).run(mesh_rank)
    assert calls == 5
    sent = 6 * 3 * 8
    assert first + second == 2 * (4 * 8) + 4 * 2 * sent


@pytest.mark.parametrize("strategy", ["e", "t&e"])
def test_shapes_without_other_lanes(strategy: str) -> None:
    made, mesh = case(2, tokens=6), Mesh((("m", 2),))
    found = rule(made)
    how = layout(found, (strategy,), mesh)
    assert how is not None
    function = call_of(found, (strategy,), mesh)(FakeCommunicator(mesh, 0))
    held = [part(t, p, mesh, 0) for t, p in zip(made.given, how.operands, strict=True)]
    with fake_mode() as mode:
        out = function(*made.arguments([mode.from_tensor(t) for t in held]))
    assert tuple(out.shape) == local_shape((6, 3), how.results[0], mesh, 0)


def test_bodies_hold_pointwise_ops_alone() -> None:
    assert len(statements(BODIES[PAIRS])) == 4
    with pytest.raises(ValueError, match="not a pointwise op"):
        statements("sum.default %0")


def _over_gloo(strategy: str, routing: str) -> list[list[float]]:
    """On two ranks: result and gradients of hidden and up, as numbers."""
    made, mesh = case(11, tokens=6, routing=routing), Mesh((("m", 2),))
    communicator = GroupCommunicator(mesh)
    found = rule(made)
    how = layout(found, (strategy,), mesh)
    assert how is not None
    here = communicator.mesh_rank
    held = [part(t, p, mesh, here) for t, p in zip(made.given, how.operands, strict=True)]
    back = part(
        torch.ones(6, 3, dtype=torch.float64),
        how.results[0] if strategy == "t&e" else (Replicate(),),
        mesh,
        here,
    )
    out, grads = forward_backward(call_of(found, (strategy,), mesh)(communicator), held, made, back)
    return [t.reshape(-1).tolist() for t in (out, grads[0], grads[3]) if t is not None]


@pytest.mark.slow
@pytest.mark.parametrize("routing", ["random", "one"])
@pytest.mark.parametrize("strategy", ["e", "t&e"])
def test_over_gloo(pool: Pool, strategy: str, routing: str) -> None:
    made, mesh = case(11, tokens=6, routing=routing), Mesh((("m", 2),))
    how = layout(rule(made), (strategy,), mesh)
    assert how is not None
    out, grads = forward_backward(OP, made.given, made, torch.ones(6, 3, dtype=torch.float64))
    wanted = [(out, how.results[0]), (grads[0], how.gradients[0]), (grads[3], how.gradients[3])]
    ran = pool.run(_over_gloo, strategy, routing, ranks=2)
    for index, (whole, placed) in enumerate(wanted):
        assert whole is not None
        parts = [
            torch.tensor(ran[mesh_rank][index], dtype=torch.float64).view(
                local_shape(whole.shape, placed, mesh, mesh_rank)
            )
            for mesh_rank in (0, 1)
        ]
        close(joined(whole.shape, parts, placed, mesh), whole)
