"""Batches of which a rank is given only what it needs."""

from __future__ import annotations

from typing import Any

import hand_lanes
import pytest
import torch
from hand_stages import batch, language
from ranks import Pool
from runtime_programs import bits, make

from fxpart.errors import FxpartError
from fxpart.runtime import InProcess, connect
from fxpart.runtime.batch.batch_reader import BatchReader
from fxpart.runtime.batch.batch_requirements import BatchRequirements

SHAPES = ((8, 5), (8, 5), (5, 7), (8, 5), (1, 3))


def test_absent_inputs_are_cut_by_the_sizes_of_others() -> None:
    reader = BatchReader(language().spec(), needed=frozenset({"labels"}))
    whole, given = BatchReader(language().spec()).read(batch(), 3), batch()
    seen = reader.look({"labels": given["labels"], "ids": None})
    assert seen.absent == ("ids", "mask")
    others = {"ids": ("int64", (8, 5)), "mask": ("float32", (5, 5))}
    cut = reader.cut(seen, 3, others)
    assert (cut.sizes, cut.rows, cut.weights) == (whole.sizes, whole.rows, whole.weights)
    for mine, theirs in zip(cut.inputs, whole.inputs, strict=True):
        assert torch.equal(mine["labels"], theirs["labels"])
        assert mine["ids"].is_meta and mine["ids"].shape == theirs["ids"].shape


def test_what_no_rank_has() -> None:
    reader = BatchReader(language().spec(), needed=frozenset())
    with pytest.raises(FxpartError, match="no rank was given this input"):
        reader.cut(reader.look(None), 4)
    with pytest.raises(FxpartError, match="it is missing"):
        BatchReader(language().spec(), needed=frozenset({"mask"})).look({})


def train_on_parts(partial: bool) -> Any:
    """Steps of four ranks; each gets the whole batch, or what it needs, some by None."""
    made = make(language(), connect(4))
    losses, counts = [], []
    for seed, (rows, length) in enumerate(SHAPES):
        given = batch(rows, length, seed)
        if partial:
            given = made.needs.select(given)
            if seed % 2:
                given = {key: value for key, value in given.items() if value is not None}
        losses.append(made.step(given).item())
        counts.append(len(made.parts.source.known))
    names = sorted(made.needs.names)
    return losses, bits(made.state_dict()), (names, counts)


@pytest.mark.slow
def test_each_rank_gives_what_it_needs(pool: Pool) -> None:
    """The same losses and state; shapes are told once, and remembered."""
    losses, state, _ = train_on_parts(False)
    found = pool.run(train_on_parts, True, ranks=4)
    assert [part[:2] for part in found] == [(losses, state)] * 4
    names = [["ids"], ["mask"], [], ["labels"]]
    assert [part[2] for part in found] == [(mine, [1, 1, 2, 2, 3]) for mine in names]


def wrong_parts(kind: str) -> Any:
    """One rank's part does not fit the others'; then a good step."""
    made = make(language(), connect(4))
    given = made.needs.select(batch())
    if kind == "rows" and made.rank == 3:
        given = made.needs.select(batch(6))
    elif kind == "needed" and made.rank == 1:
        given = {}
    elif kind == "differs" and made.rank == 2:
        given = {"ids": batch(6)["ids"]}
    elif kind == "call" and made.rank == 2:
        made.calls += 1
    try:
        made.step(given)
    except FxpartError as failure:
        made.calls = 0
        made.step(made.needs.select(batch()))
        return [(p.code, p.where) for p in failure.problems]
    return []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("rows", [("FXP105", "batch")]),
        ("needed", [("FXP105", "batch['mask']")]),
        ("differs", [("FXP501", "the batches")]),
        ("call", [("FXP501", "the batches")]),
    ],
)
def test_parts_that_do_not_fit(pool: Pool, kind: str, expected: Any) -> None:
    assert pool.run(wrong_parts, kind, ranks=4) == [expected] * 4


def train_on_rows(local: bool, zero: int) -> Any:
    """Two stages of two data-parallel mesh ranks; each rank the global batch, or its rows alone."""
    made = hand_lanes.trainer(connect(4), "dp=2", zero=zero, microbatches=3)
    losses = []
    for seed, count in enumerate((8, 8, 6)):
        given = hand_lanes.batch(count, seed=seed)
        if local:
            rows = made.needs.rows(count)
            assert len(rows) == count // 2
            given = made.needs.select({key: value[rows] for key, value in given.items()})
        losses.append(made.step(given, local=local).item())
    return losses, bits(made.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1])
def test_lanes_give_their_rows_alone(pool: Pool, zero: int) -> None:
    whole = pool.run(train_on_rows, False, zero, ranks=4)
    assert pool.run(train_on_rows, True, zero, ranks=4) == whole


def needs(mesh: str, mesh_rank: int, microbatches: int = 2) -> BatchRequirements:
    given = hand_lanes.sharding(mesh)
    return BatchRequirements.of(
        [hand_lanes.mesh_rank(mesh_rank, given, [0])], frozenset({"ids"}), microbatches
    )


def test_rows_of_lanes() -> None:
    """Each microbatch is shared; together the mesh ranks have every row once."""
    assert [needs("dp=2", mesh_rank).rows(8) for mesh_rank in (0, 1)] == [
        [0, 1, 4, 5],
        [2, 3, 6, 7],
    ]
    assert needs("tp=2", 1).rows(5) == [0, 1, 2, 3, 4]
    every = [row for mesh_rank in (0, 2) for row in needs("dp=2,tp=2", mesh_rank, 4).rows(10)]
    assert sorted(every) == list(range(10))
    with pytest.raises(FxpartError, match="multiple of 2"):
        needs("dp=2", 0).rows(7)


@pytest.mark.parametrize("shuffle", [False, True])
def test_samplers_load_every_row_once(shuffle: bool) -> None:
    """Also of a smaller last batch, as far as the mesh ranks can share it."""
    loaders = [
        needs("dp=2", mesh_rank).sampler(11, 4, shuffle=shuffle, seed=3) for mesh_rank in (0, 1)
    ]
    batches = [list(loader) for loader in loaders]
    assert len(loaders[0]) == len(batches[0]) == 3
    assert [[len(rows) for rows in mesh_rank] for mesh_rank in batches] == [[2, 2, 1]] * 2
    every = [row for mesh_rank in batches for rows in mesh_rank for row in rows]
    assert len(set(every)) == 10 and set(every) <= set(range(11))
    loaders[0].epoch = 1
    assert (list(loaders[0]) != batches[0]) == shuffle
    with pytest.raises(FxpartError, match="multiple of 2"):
        needs("dp=2", 0).sampler(11, 3)


def test_one_process_of_several_lanes_takes_the_global_batch() -> None:
    made = hand_lanes.trainer(InProcess(4), "dp=2")
    with pytest.raises(FxpartError, match="several mesh ranks"):
        made.step(hand_lanes.batch(4), local=True)
    alone = make(language(), InProcess(4))
    whole = make(language(), InProcess(4))
    assert torch.equal(alone.step(batch(), local=True), whole.step(batch()))
