"""The one way from a name to a schedule that may be run."""

from __future__ import annotations

import pytest
from built_schedules import BUILDERS
from hypothesis import given, settings
from hypothesis import strategies as st
from random_schedules import stage_graphs

from fxpart.errors import FxpartError
from fxpart.schedule.action import StageEdge
from fxpart.schedule.dependence import chain
from fxpart.schedule.lower import lower
from fxpart.schedule.make import make


@pytest.mark.slow
@given(
    st.data(),
    st.integers(1, 6),
    st.integers(1, 6),
    st.sampled_from(sorted(set(BUILDERS) - {"zb-v"})),
)
@settings(max_examples=80, deadline=None)
def test_stages_in_any_order_on_ranks(
    data: st.DataObject, stages: int, microbatches: int, name: str
) -> None:
    """A permutation moves the lists and changes nothing in them."""
    ranks = data.draw(st.permutations(range(stages)))
    edges = data.draw(stage_graphs(stages))
    made = make(name, ranks, microbatches, edges)
    assert made.stage_rank == tuple(ranks)
    straight = lower(BUILDERS[name](stages, microbatches, edges), edges)
    for stage, rank in enumerate(ranks):
        own = [a for a in made.ranks[rank] if a.kind.is_compute]
        assert own == [a for a in straight.ranks[stage] if a.kind.is_compute]


def test_same_arguments_same_lists() -> None:
    edges = (*chain(4), StageEdge(0, 3), StageEdge(1, 3, backward=False))
    costs = [0.1, 0.30000000000000004, 0.2, 0.1]
    one, two = (
        make("1f1b", (0, 1, 2, 3), 9, edges, forward=costs, backward=costs) for _ in range(2)
    )
    assert one == two


def test_refusals() -> None:
    for name, ranks, microbatches in (("huh", (0, 1), 1), ("1f1b", (0, 2), 1), ("1f1b", (0, 1), 0)):
        with pytest.raises(FxpartError, match="FXP109"):
            make(name, ranks, microbatches, chain(2))
    for name in BUILDERS:
        with pytest.raises(FxpartError) as caught:
            ranks = (0, 0) if name == "zb-v" else (0, 1)
            make(name, ranks, 1, (StageEdge(1, 0), StageEdge(0, 7), *chain(2), *chain(2)))
        assert [p.where for p in caught.value.problems] == [
            "edge 1 -> 0", "edge 0 -> 7", "edge 0 -> 1",
        ]  # fmt: skip
