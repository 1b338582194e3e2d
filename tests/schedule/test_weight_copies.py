"""Copies of weights at a stage: the notes' table, and a stage that really keeps and frees them."""

from __future__ import annotations

import pytest

from fxpart.errors import FxpartError
from fxpart.schedule.versions import WeightVersionCounters, count_chain_warmup
from fxpart.schedule.weight_copies import WeightCopies, compute_stage_staleness, count_weight_copies
from fxpart.schedule.weight_modes import MODES, WeightMode


@pytest.mark.parametrize("stages", [1, 2, 4, 8, 16])
def test_the_notes_table(stages: int) -> None:
    """One microbatch to an update; 2BW with as many as there are stages."""
    for k in range(stages):
        last, flying = k == stages - 1, stages - k

        def of(name: str, every: int = 1, k: int = k) -> WeightCopies:
            return count_weight_copies(
                MODES[name], WeightVersionCounters(count_chain_warmup(stages), every), k
            )

        assert of("flush") == of("naive") == WeightCopies(1)
        assert of("stash") == of("nadam-stash") == WeightCopies(flying)
        assert of("vertical") == WeightCopies(stages)
        for every in (stages, 3 * stages):
            late = int(stages > 1)
            assert of("2bw", every) == WeightCopies(1 + late)
            assert of("2bw-ef", every) == WeightCopies(1 + late, deltas=late)
        assert of("spectrain") == WeightCopies(1, transient=int(k >= 2 or not last))
        assert of("spectrain-v2") == WeightCopies(1 if last else 1 + flying)
        assert of("pipeoptim") == WeightCopies(1, transient=int(not last))
        assert of("xpipe") == WeightCopies(1 if last else 1 + flying)
        assert of("pipemare") == WeightCopies(1, transient=int(not last), deltas=int(not last))


def test_xpipe_keeps_one_for_each_minibatch() -> None:
    """Four microbatches to an update: of the microbatches in flight none is of a third."""
    versions = WeightVersionCounters(count_chain_warmup(4), 4)
    assert [count_weight_copies(MODES["xpipe"], versions, k).kept for k in range(4)] == [3, 3, 3, 1]
    assert [count_weight_copies(MODES["stash"], versions, k).kept for k in range(4)] == [2, 2, 2, 1]


def test_copies_beside_the_weights() -> None:
    assert WeightCopies(3, 1, 1).extra == 4
    assert WeightCopies(1).extra == 0


def test_a_mode_that_does_not_fit() -> None:
    with pytest.raises(FxpartError, match="FXP109"):
        count_weight_copies(MODES["2bw"], WeightVersionCounters(count_chain_warmup(4), 3), 0)


def kept(mode: WeightMode, versions: WeightVersionCounters, stage: int) -> int:
    """A stage with a shelf: what a microbatch, in flight or to come, still reads stays there."""
    count = 3 * (max(versions.ahead) + 3 * versions.every)
    ahead, every = versions.ahead[stage], versions.every
    later = {("F", m) for m in range(count)} | {("B", m) for m in range(count)}
    order = [("F", m) for m in range(min(ahead, count))]
    for m in range(count):
        order += [("B", m)] + ([("F", m + ahead)] if m + ahead < count else [])

    def reads(kind: str, m: int) -> tuple[int, int]:
        read = versions.read(mode, stage, m)
        if kind == "B" and mode.backward != "forward":
            return read.backward, 0
        return read.version, read.look_forward

    shelf, most, back = {(0, 0)}, 1, 0
    for event in order:
        shelf.add(reads(*event))
        most = max(most, len(shelf))
        later.discard(event)
        back += event[0] == "B"
        now = back // every
        shelf.add((now, 0))
        wanted = {reads(*one) for one in later} | {(now, 0)}
        # Of what is still wanted only what is on the shelf already has been made.
        shelf &= wanted
        most = max(most, len(shelf))
    return most


@pytest.mark.parametrize("name", ["stash", "vertical", "2bw", "naive", "spectrain-v2"])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_a_shelf_of_weights(name: str, every: int) -> None:
    """What is kept and freed step by step, for chains and for other graphs' depths."""
    for ahead in ((1,), (3, 2, 1), (5, 4, 3, 2, 1), (2, 4, 3, 2, 1)):
        versions = WeightVersionCounters(ahead, every)
        if name == "2bw" and every < max(ahead):
            continue
        for stage in range(len(ahead)):
            assert count_weight_copies(MODES[name], versions, stage).kept == kept(
                MODES[name], versions, stage
            )


def test_the_table_of_a_stream() -> None:
    rows = compute_stage_staleness(
        MODES["pipemare"], WeightVersionCounters(count_chain_warmup(4), 2)
    )
    assert [row.staleness for row in rows] == [(1, 2), (1, 1), (0, 1), (0, 0)]
    assert [row.in_flight for row in rows] == [4, 3, 2, 1]
    rows = compute_stage_staleness(
        MODES["vertical"], WeightVersionCounters(count_chain_warmup(4), 1)
    )
    assert [row.behind for row in rows] == [(3, 3)] * 4
    assert [row.staleness for row in rows] == [(3, 3), (2, 2), (1, 1), (0, 0)]
    rows = compute_stage_staleness(
        MODES["lookahead"], WeightVersionCounters(count_chain_warmup(4), 2)
    )
    assert [row.in_flight for row in rows] == [2, 2, 2, 1]
    assert {row.staleness for row in rows} == {(0, 0)}
