"""Builders against their pictures, the closed forms, and torch's own schedules."""

from __future__ import annotations

import inspect
import re
import textwrap

import pytest
from built_schedules import BUILDERS

from fxpart.errors import FxpartError
from fxpart.schedule.action import Schedule, StageEdge
from fxpart.schedule.builders import (
    asynchronous,
    breadth_first,
    forward_only,
    gpipe,
    interleaved,
    one_f_one_b,
    zb_h1,
    zb_v,
)  # fmt: skip
from fxpart.schedule.builders.protocol import BuildFunction
from fxpart.schedule.dependence import chain
from fxpart.schedule.in_flight import activation_peak, count_in_flight
from fxpart.schedule.lower import lower
from fxpart.schedule.rank_merge import merge_onto_ranks
from fxpart.schedule.simulate import simulate
from fxpart.schedule.text import draw
from fxpart.schedule.verify import check

LOOP = (0, 1, 0, 1)
PICTURES: list[tuple[BuildFunction, int | tuple[int, ...], int]] = [
    (gpipe, 3, 4), (one_f_one_b, 3, 4), (forward_only, 3, 4), (interleaved, LOOP, 3),
    (breadth_first, LOOP, 3), (zb_h1, 3, 5), (zb_v, 4, 3), (asynchronous, 3, 4),
]  # fmt: skip


@pytest.mark.parametrize(("builder", "ranks", "m"), PICTURES)
def test_picture_in_the_docstring_is_what_is_built(
    builder: BuildFunction, ranks: int | tuple[int, ...], m: int
) -> None:
    text = inspect.getdoc(builder)
    assert text is not None
    picture = draw(builder(ranks, m))
    assert textwrap.indent(picture, "    ") in text
    shown = list(ranks) if isinstance(ranks, tuple) else ranks
    assert f"``{builder.__name__}({shown}, {m})``::" in text  # type: ignore[attr-defined]


def test_every_builder_has_a_picture() -> None:
    assert {id(builder) for builder, *_ in PICTURES} == {id(b.build) for b in BUILDERS.values()}


def test_the_table_names_the_schedules() -> None:
    for name, builder in BUILDERS.items():
        assert builder(4, 4).name == name
        assert inspect.getdoc(builder.build)


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 7, 16])
def test_in_flight_is_the_closed_form(stages: int, microbatches: int) -> None:
    assert count_in_flight(gpipe(stages, microbatches)) == (microbatches,) * stages
    expected = tuple(min(microbatches, stages - s) for s in range(stages))
    assert count_in_flight(one_f_one_b(stages, microbatches)) == expected
    assert count_in_flight(forward_only(stages, microbatches)) == (0,) * stages
    for name, builder in BUILDERS.items():
        if name == "zb-v" and stages % 2:
            continue
        assert builder.in_flight(stages, microbatches) == count_in_flight(
            builder(stages, microbatches)
        )


def texts(schedule: Schedule) -> list[list[str]]:
    return [[str(action) for action in actions] for actions in schedule.ranks]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "theirs"), [("gpipe", "GPipe"), ("1f1b", "1F1B")])
def test_same_order_as_torch(name: str, theirs: str) -> None:
    """torch.distributed.pipelining tabulates the same lists."""
    visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    for ranks, microbatches in [(1, 1), (1, 5), (2, 2), (2, 8), (4, 4), (4, 12), (6, 9)]:
        rows = visualizer.get_schedule_ops(theirs, ranks, microbatches)
        expected = [[str(a) for a in row if a and "REDUCE" not in str(a)] for row in rows]
        found = texts(BUILDERS[name](ranks, microbatches))
        if expected[-1][0] == f"{ranks - 1}F1":
            # torch 2.13's table (not its run) numbers the last stage's forwards of 1F1B from 1.
            expected[-1] = [
                re.sub(r"F(\d+)", lambda m: f"F{int(m[1]) - 1}", a) for a in expected[-1]
            ]
        assert found == expected


@pytest.mark.parametrize(("stages", "microbatches"), [(0, 1), (1, 0), (-1, 3)])
def test_sizes_below_one(stages: int, microbatches: int) -> None:
    for builder in BUILDERS.values():
        with pytest.raises(FxpartError, match="FXP109"):
            builder(stages, microbatches)


def test_warm_up_follows_the_longest_path() -> None:
    """Four towers of one stage, one trunk: two in flight, at the rate of a pipeline of two."""
    towers, m = 4, 12
    edges = tuple(StageEdge(k, towers) for k in range(towers))
    by_depth = one_f_one_b(towers + 1, m, edges)
    assert count_in_flight(by_depth) == (2, 2, 2, 2, 1)
    assert count_in_flight(one_f_one_b(towers + 1, m)) == (5, 4, 3, 2, 1)
    lowered = lower(by_depth, edges)
    assert not check(lowered, edges)
    found = simulate(lowered, edges, [1.0] * 5, [2.0] * 5).step_seconds
    assert found == (m - 1) * 3 + 2 * 3  # (m - 1) max t + the longest path: solver notes, E


def test_several_stages_on_a_rank() -> None:
    """Each stage keeps its order and its bound; the ranks work without a gap they need not have."""
    stages, m = 4, 4
    folded = merge_onto_ranks(one_f_one_b(stages, m), [0, 1, 0, 1])
    assert count_in_flight(folded) == count_in_flight(one_f_one_b(stages, m))
    for stage in range(stages):
        (row,) = [r for r in one_f_one_b(stages, m).ranks if r[0].stage == stage]
        merged = folded.ranks[folded.stage_rank[stage]]
        assert tuple(a for a in merged if a.stage == stage) == row
    step = simulate(folded, chain(stages), [1.0] * stages, [2.0] * stages).step_seconds
    # Two virtual stages a rank halve the bubble of two stages of twice the size: 2 m t + t.
    assert step == 2 * m * 3 + 3
    one_rank = merge_onto_ranks(gpipe(3, 2), [0, 0, 0])
    assert len(one_rank.ranks) == 1
    assert not check(lower(one_rank, chain(3)), chain(3))
    assert not lower(one_rank, chain(3)).is_lowered  # nothing to transfer


def test_place_refuses() -> None:
    for ranks in ([0, 2], [0], [1, 1], [0, 1, 1]):
        with pytest.raises(FxpartError, match="FXP109"):
            merge_onto_ranks(gpipe(2, 2), ranks)
    with pytest.raises(FxpartError, match="FXP109"):
        merge_onto_ranks(lower(gpipe(2, 2), chain(2)), [0, 0])


def test_peaks_of_several_stages_need_not_coincide() -> None:
    folded = merge_onto_ranks(one_f_one_b(4, 8), [0, 1, 0, 1])
    sizes = (100, 10, 1, 1000)
    held = activation_peak(folded, sizes)
    sums = [0, 0]
    for stage, most in enumerate(count_in_flight(folded)):
        sums[folded.stage_rank[stage]] += most * sizes[stage]
    assert all(peak <= limit for peak, limit in zip(held, sums, strict=True))
    assert activation_peak(one_f_one_b(4, 8), sizes) == (400, 30, 2, 1000)
    assert held[0] > 400  # at least all of stage 0's, and something of stage 2's
