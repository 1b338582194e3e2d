"""Meshes, placements and layouts: text round trips, and every element held as it must be."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxpart.errors import FxpartError
from fxpart.sharding import (
    PARTIAL,
    REPLICATE,
    Mesh,
    Placements,
    Shard,
    chunk,
    format_placements,
    indices,
    local_shape,
    parse_placements,
)

MESH = Mesh.parse("dp=2,tp=3")
PLACEMENTS = st.one_of(
    st.just(REPLICATE),
    st.just(PARTIAL),
    st.builds(Shard, st.integers(0, 3), st.sampled_from([1, 2, 3])),
)


@given(st.integers(0, 40), st.integers(1, 8))
def test_chunks_are_torch_chunks(size: int, parts: int) -> None:
    pieces = [list(range(*chunk(size, parts, i))) for i in range(parts)]
    theirs = [t.tolist() for t in torch.arange(size).chunk(parts)] if size else []
    assert [p for p in pieces if p] == [p for p in theirs if p]


def test_lanes_and_coordinates() -> None:
    assert [MESH.coordinate(k) for k in range(6)] == list(itertools.product(range(2), range(3)))
    assert [MESH.mesh_rank(MESH.coordinate(k)) for k in range(6)] == list(range(6))
    assert MESH.group(4, "tp") == (3, 4, 5)
    assert MESH.group(4, "dp") == (1, 4)
    assert str(MESH) == "dp=2,tp=3"
    assert Mesh.parse("").size == 1


@given(st.tuples(PLACEMENTS, PLACEMENTS))
def test_placement_text_round_trips(placements: Placements) -> None:
    assert parse_placements(format_placements(placements, MESH), MESH) == placements


@pytest.mark.parametrize("text", ["dp", "dp:X", "xx:R", "dp:R,dp:R", "dp:S(-1)", "dp:S(0,0)"])
def test_bad_placements(text: str) -> None:
    with pytest.raises(FxpartError) as caught:
        parse_placements(text, MESH)
    assert caught.value.problems[0].code == "FXP109"


@pytest.mark.parametrize("text", ["dp", "dp=0", "dp=2,dp=2", "=2", "d p=2", "dp=99999999"])
def test_bad_meshes(text: str) -> None:
    with pytest.raises(FxpartError):
        Mesh.parse(text)


@given(st.integers(0, 17), st.integers(0, 9), st.booleans())
def test_shards_partition_the_tensor(rows: int, columns: int, same: bool) -> None:
    placements = (Shard(0), Shard(0 if same else 1))
    count = np.zeros((rows, columns), dtype=int)
    for mesh_rank in range(MESH.size):
        held = indices((rows, columns), placements, MESH, mesh_rank)
        count[np.ix_(*held)] += 1
        shape = local_shape((rows, columns), placements, MESH, mesh_rank)
        assert shape == tuple(len(h) for h in held)
    assert (count == 1).all()


def test_an_outer_shard_has_a_piece_of_each_part() -> None:
    mesh = Mesh.parse("tp=2")
    assert indices((12,), (Shard(0, 3),), mesh, 1)[0].tolist() == [2, 3, 6, 7, 10, 11]
    assert local_shape((12,), (Shard(0, 3),), mesh, 1) == (6,)
