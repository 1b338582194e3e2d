"""Versions in actions: named, written down, read back, and proved from the lists."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_schedules import stage_graphs

from fxpart.errors import FxpartError
from fxpart.schedule.action import ActionKind, Schedule
from fxpart.schedule.builders import asynchronous
from fxpart.schedule.dependence import chain
from fxpart.schedule.make import make
from fxpart.schedule.text import from_text, to_text
from fxpart.schedule.verify import check
from fxpart.schedule.version_annotation import annotate_versions
from fxpart.schedule.weight_modes import MODES, WeightMode

STREAMED = [mode for mode in MODES.values() if not mode.flush]


def stream(stages: int, count: int) -> Schedule:
    return make("async", range(stages), count, chain(stages))


def test_stash_by_hand() -> None:
    found = annotate_versions(asynchronous(2, 4), "stash", 1)
    assert [[str(a) for a in actions] for actions in found.ranks] == [
        ["0F0@0", "0F1@0", "0B0@0", "0F2@1", "0B1@0", "0F3@2", "0B2@1", "0B3@2"],
        ["1F0@0", "1B0@0", "1F1@1", "1B1@1", "1F2@2", "1B2@2", "1F3@3", "1B3@3"],
    ]
    naive = annotate_versions(asynchronous(2, 3), MODES["naive"], 1)
    assert " ".join(map(str, naive.ranks[0])) == "0F0@0 0F1@0 0B0@0 0F2@1 0B1@1 0B2@2"
    assert annotate_versions(found, "flush", 1) == asynchronous(2, 4)


@pytest.mark.slow
@given(
    st.data(), st.integers(1, 6), st.integers(1, 20), st.integers(1, 7), st.sampled_from(STREAMED)
)
@settings(max_examples=100, deadline=None)
def test_every_mode_is_proved(
    data: st.DataObject, stages: int, count: int, every: int, mode: WeightMode
) -> None:
    """Whatever is annotated passes the verifier's own count, and only with its own figures."""
    edges = data.draw(stage_graphs(stages))
    bare = make("async", data.draw(st.permutations(range(stages))), count, edges)
    try:
        named = annotate_versions(bare, mode, every)
    except FxpartError as refused:
        assert mode.base == "delayed" and refused.code == "FXP109" and every < stages
        return
    assert not check(named, edges, weights=mode.name, every=every)
    assert not check(named, edges, weights=mode) or mode.backward != "forward"
    assert from_text(to_text(named)) == named
    assert len(check(named, edges)) == 2 * stages * count  # under flush none has a version
    assert len(check(bare, edges, weights=mode, every=every)) == 2 * stages * count


@pytest.mark.slow
def test_damaged_versions_are_caught() -> None:
    source = random.Random(1)
    for mode in STREAMED:
        every = 4 if mode.base == "delayed" else source.randint(1, 3)
        named = annotate_versions(stream(4, 12), mode, every)
        for _ in range(10):
            rank = source.randrange(4)
            actions = list(named.ranks[rank])
            at = source.choice([i for i, a in enumerate(actions) if a.kind.is_compute])
            version = actions[at].version
            assert version is not None
            other = source.choice([v for v in range(13) if v != version] + [None])
            actions[at] = replace(actions[at], version=other)
            ranks = (*named.ranks[:rank], tuple(actions), *named.ranks[rank + 1 :])
            (problem,) = check(
                replace(named, ranks=ranks), chain(4), weights=mode.name, every=every
            )
            assert f"rank {rank}, action {at}" in problem.where
            said = f"reads version {version}" if other is not None else "does not name"
            assert said in problem.why


def test_another_number_of_microbatches_to_an_update() -> None:
    named = annotate_versions(stream(3, 12), "naive", 2)
    assert not check(named, chain(3), weights="naive", every=2)
    for every in (1, 3):
        assert check(named, chain(3), weights="naive", every=every)
    for other in ("stash", "vertical"):
        assert check(named, chain(3), weights=other, every=2)


def test_a_version_that_is_not_there_yet() -> None:
    """Delay one with too few microbatches to an update, annotated by hand."""
    bare = stream(3, 6)
    ranks = tuple(
        tuple(
            replace(a, version=max(0, a.microbatch - 1)) if a.kind.is_compute else a
            for a in actions
        )
        for actions in bare.ranks
    )
    found = check(replace(bare, ranks=ranks), chain(3), weights="2bw", every=1)
    assert {problem.why for problem in found} >= {"Only 1 updates have been applied by then."}


@pytest.mark.parametrize("name", ["zb-h1", "interleaved"])
def test_orders_that_are_no_stream(name: str) -> None:
    ranks = (0, 1, 0, 1) if name == "interleaved" else (0, 1, 2, 3)
    with pytest.raises(FxpartError, match="FXP109"):
        annotate_versions(make(name, ranks, 6, chain(4)), "stash", 1)
    with pytest.raises(FxpartError, match="FXP109"):
        annotate_versions(stream(2, 3), "stash", 0)
    with pytest.raises(FxpartError, match="Unknown weight mode"):
        check(stream(2, 3), chain(2), weights="huh")


def test_copies_of_stages_have_no_versions() -> None:
    from fxpart.schedule.action import StageEdge

    edges = (StageEdge(0, 2), StageEdge(1, 2))
    made = make("1f1b", range(3), 4, edges, replicas=((0, 1),))
    with pytest.raises(FxpartError, match="replicas of a stage"):
        annotate_versions(made, "stash", 1)
    assert any("replicas" in p.why for p in check(made, edges, weights="stash", every=1))


def test_backwards_in_halves_name_the_same() -> None:
    """I reads as B does, and W as I: counted for lists that no builder makes."""
    bare = make("zb-h1", range(2), 4, chain(2))
    ranks = tuple(
        tuple(replace(a, version=0) if a.kind.is_compute else a for a in actions)
        for actions in bare.ranks
    )
    assert not check(replace(bare, ranks=ranks), chain(2), weights="stash", every=8)
    assert any(a.kind is ActionKind.W for a in bare.ranks[0])
    assert check(replace(bare, ranks=ranks), chain(2), weights="stash", every=1)
