"""The objective and the rules, on instances small enough to add up by hand."""

from __future__ import annotations

import pytest
from benchmarks.maxload.instance import (
    Instance,
    MaxLoadAnswer,
    Node,
    evaluate,
    faults,
    groups,
    loads,
    order_edges,
)
from msgspec.structs import replace


def diamond(**changes: object) -> Instance:
    """0 -> 1, 2 -> 3 with works 1, 2, 4, 8, transfers 0.1, 0.2, 0.4, 0.8 and bytes 1, 2, 4, 8."""
    nodes = tuple(
        Node(id=i, accelerator=2.0**i, cpu=100.0 * 2**i, bytes=2.0**i, transfer=2.0**i / 10)
        for i in range(4)
    )
    edges = ((0, 1), (0, 2), (1, 3), (2, 3))
    made = Instance(nodes=nodes, edges=edges, accelerators=2, cpus=1, memory=15)
    return replace(made, **changes)


def test_everything_on_one_accelerator_transfers_nothing() -> None:
    assert loads(diamond(), (0, 0, 0, 0)) == [15.0, 0.0, 0.0]
    assert evaluate(diamond(), (0, 0, 0, 0)) == 15.0


def test_a_value_is_pushed_once_and_pulled_once_by_each_user() -> None:
    # node 0 alone: pushed once for two users on the other accelerator, which pulls it once
    assert loads(diamond(), (0, 1, 1, 1)) == [1 + 0.1, 14 + 0.1, 0.0]
    # users on two devices: still pushed once
    three = loads(diamond(accelerators=3), (0, 1, 2, 2))
    assert three == pytest.approx([1.1, 2 + 0.1 + 0.2, 12 + 0.1 + 0.2, 0])


def test_a_cpu_core_pays_for_its_nodes_alone() -> None:
    assert loads(diamond(), (2, 0, 0, 2)) == pytest.approx([6 + 0.1 + 0.2 + 0.4, 0.0, 900.0])


def test_several_edges_between_the_same_nodes_count_once() -> None:
    twice = diamond(edges=((0, 1), (0, 1), (0, 2), (1, 3), (2, 3)))
    assert loads(twice, (0, 1, 0, 0)) == loads(diamond(), (0, 1, 0, 0))


def test_valid_assignments_have_no_faults() -> None:
    for assignment in ((0, 0, 0, 0), (0, 1, 1, 1), (0, 1, 0, 2), (2, 2, 2, 2)):
        assert faults(diamond(), assignment, "chain") == []


def test_every_rule_is_checked() -> None:
    one = diamond()
    assert "3 nodes" in faults(one, (0, 0, 0), "any")[0]
    assert "device 3 of 3" in faults(one, (0, 0, 0, 3), "any")[0]
    assert "device -1" in faults(one, (-1, 0, 0, 0), "any")[0]
    assert "acc0 holds 15 of 14" in faults(diamond(memory=14), (0, 0, 0, 0), "any")[0]
    assert not faults(diamond(memory=14), (2, 0, 0, 0), "any"), "a core has room for everything"
    unable = diamond(nodes=(*one.nodes[:3], replace(one.nodes[3], runs=False)))
    assert "cannot run" in faults(unable, (0, 0, 0, 0), "any")[0]
    assert not faults(unable, (0, 0, 0, 2), "any")
    tied = tuple(replace(n, group=7) if n.id in (0, 3) else n for n in one.nodes)
    assert "group 7" in faults(diamond(nodes=tied), (0, 0, 0, 1), "any")[0]


def test_a_chain_has_no_circle_of_devices() -> None:
    there_and_back = (0, 1, 0, 0)  # 0 -> 1 -> 3 goes to the other accelerator and returns
    assert faults(diamond(), there_and_back, "any") == []
    assert "circle" in faults(diamond(), there_and_back, "chain")[0]
    assert "circle" in faults(diamond(), (0, 2, 0, 0), "chain")[0], "CPU cores are devices too"
    assert faults(diamond(), (0, 0, 1, 1), "chain") == []


def trained() -> Instance:
    """Forward 0 -> 1, their backward 3 and 2 in the same groups, 4 backward on its own."""
    rows = [(0, 1, False), (1, 2, False), (2, 2, True), (3, 1, True), (4, None, True)]
    nodes = tuple(Node(id=i, accelerator=1.0, group=g, backward=b) for i, g, b in rows)
    edges = ((0, 1), (1, 2), (2, 3), (0, 3), (2, 4), (4, 3), (1, 4))
    return Instance(nodes=nodes, edges=edges, accelerators=3, memory=10)


def test_backward_nodes_follow_their_groups_and_others_are_mirrored() -> None:
    group = groups(trained())
    assert group == [0, 1, 1, 0, 2]
    # 2 -> 4 becomes 4 -> 2's group, 4 -> 3 becomes 3's group -> 4; 1 -> 4 may go either way
    assert order_edges(trained(), group) == [(0, 1), (0, 2), (2, 1)]
    assert faults(trained(), (0, 1, 1, 0, 2), "chain") == []
    assert faults(trained(), (0, 1, 1, 0, 1), "chain") == []


def test_without_a_group_each_node_is_one() -> None:
    nodes = tuple(Node(id=i, accelerator=1.0, group=g) for i, g in enumerate((None, 5, None, 5)))
    assert groups(Instance(nodes=nodes, edges=(), accelerators=1, memory=1)) == [0, 1, 2, 1]


def test_the_gap_of_an_answer() -> None:
    def answer(objective: float, bound: float) -> MaxLoadAnswer:
        return MaxLoadAnswer(
            status="best found", assignment=(0,), objective=objective, lower_bound=bound, solver=""
        )

    assert answer(4.0, 3.0).gap == 0.25
    assert answer(0.0, 0.0).gap == 0.0
    assert replace(answer(4.0, 3.0), assignment=None).gap == float("inf")
