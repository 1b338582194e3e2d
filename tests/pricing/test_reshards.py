"""What changes of placement cost: by the model, with copies, forward and back."""

from __future__ import annotations

import pytest

from fxpart import costmodels
from fxpart.cluster.model import Cluster
from fxpart.pricing.device_groups import Rings
from fxpart.pricing.placement_edges import ReshardCosts, get_gradient_placements
from fxpart.sharding import Mesh, Placements, parse_placements

CLUSTER = Cluster.parse("2x8xh100")


def reshards(text: str) -> ReshardCosts:
    """On a mesh over the cluster."""
    mesh = Mesh.parse(text)
    return ReshardCosts(mesh, costmodels.find("roofline"), Rings(CLUSTER, mesh))


def at(text: str, mesh: str) -> Placements:
    """Placements from text."""
    return parse_placements(text, Mesh.parse(mesh))


@pytest.mark.parametrize(
    ("source", "target", "words"),
    [
        ("x:S(0)", "x:R", ("shard(0)", "replicate")),
        ("x:P", "x:R", ("partial", "replicate")),
        ("x:P", "x:S(1)", ("partial", "shard(1)")),
        ("x:S(0)", "x:S(1)", ("shard(0)", "shard(1)")),
        ("x:R", "x:S(1)", None),
        ("x:R", "x:P", None),
        ("x:S(1)", "x:S(1)", None),
    ],
)
def test_a_reshard_costs_what_the_model_says(
    source: str, target: str, words: tuple[str, str] | None
) -> None:
    found = reshards("x=8")
    wanted = 0.0
    if words is not None:
        ring = Rings(CLUSTER, Mesh.parse("x=8"))("x")
        wanted = costmodels.find("roofline").reshard(*words, 1e6, ring).seconds
        assert wanted > 0
    assert found.seconds(at(source, "x=8"), at(target, "x=8"), 1e6) == wanted


@pytest.mark.parametrize(
    ("source", "target", "times"),
    [
        ("x:S(0)", "x:R", 0.0),
        ("x:S(1)", "x:R", 2.0),
        ("x:S(0,3)", "x:R", 2.0),
        ("x:P", "x:S(0)", 0.0),
        ("x:P", "x:S(1)", 2.0),
        ("x:P", "x:R", 0.0),
        ("x:S(0)", "x:S(1)", 2.0 / 8),
        ("x:S(2)", "x:S(1)", 4.0 / 8),
    ],
)
def test_pieces_that_lie_apart_are_copied(source: str, target: str, times: float) -> None:
    """A second per byte: what was read and written shows."""
    mesh = Mesh.parse("x=8")
    slow = ReshardCosts(mesh, costmodels.find("roofline"), Rings(CLUSTER, mesh), 1.0)
    fast = reshards("x=8").seconds(at(source, "x=8"), at(target, "x=8"), 1e6)
    assert slow.seconds(at(source, "x=8"), at(target, "x=8"), 1e6) - fast == times * 1e6


def test_what_is_gathered_is_gathered_again_for_the_backward() -> None:
    """Parameters alone; what is sent in other ways is kept."""
    found = reshards("x=8")
    r, p, s, t = (at(f"x:{text}", "x=8") for text in ("R", "P", "S(0)", "S(1)"))
    givers, takers = found.ports([(r, r), (s, s)]), found.ports([(r, p), (t, t)])
    once = found.matrix(givers, takers, 1e6, True)
    again = found.matrix(givers, takers, 1e6, True, True)
    gather = found.seconds(s, r, 1e6)
    assert again.tolist() == [[once[0, 0], once[0, 1]], [once[1, 0] + gather, once[1, 1]]]


def test_a_reshard_moves_what_the_other_axis_leaves() -> None:
    found, mesh = reshards("a=2,b=8"), "a=2,b=8"
    whole = found.seconds(at("a:R,b:S(1)", mesh), at("a:R,b:R", mesh), 8e6)
    half = found.seconds(at("a:S(0),b:S(1)", mesh), at("a:S(0),b:R", mesh), 16e6)
    assert whole == half > 0
    # pieces of pieces are joined innermost first
    both = found.seconds(at("a:S(0),b:S(0)", mesh), at("a:R,b:R", mesh), 8e6)
    inner = found.seconds(at("a:S(0),b:S(0)", mesh), at("a:S(0),b:R", mesh), 8e6)
    outer = found.seconds(at("a:S(0),b:R", mesh), at("a:R,b:R", mesh), 8e6)
    assert both == pytest.approx(inner + outer)


def test_gradients_go_the_way_back() -> None:
    """Column-parallel: a replicated operand leaves a Partial gradient, an all-reduce away."""
    found = reshards("x=8")
    r, p, s = (at(f"x:{text}", "x=8") for text in ("R", "P", "S(0)"))
    givers = found.ports(
        [
            (r, get_gradient_placements(r)),
            (p, get_gradient_placements(p)),
            (s, get_gradient_placements(s)),
            (r, p),
        ]
    )
    takers = found.ports([(r, p), (s, s), (r, r)])
    values = found.matrix(givers, takers, 1e6, True)
    forward = found.matrix(givers, takers, 1e6, False)
    reduce, gather = found.seconds(p, r, 1e6), found.seconds(s, r, 1e6)
    scatter = found.seconds(p, s, 1e6)
    assert forward.tolist() == [
        [0, 0, 0], [reduce, scatter, reduce], [gather, 0, gather], [0, 0, 0]
    ]  # fmt: skip
    assert (values - forward).tolist() == [
        [reduce, gather, 0],  # replicated: all-reduce, all-gather, nothing
        [reduce, gather, 0],  # partial: the same, its gradient is whole
        [scatter, 0, 0],  # sharded: reduce-scatter, nothing, a slice
        [0, 0, 0],  # replicated, its sum may wait: nothing at all
    ]
