"""Parts of whole tensors: against the indices that define them; read from files piece by piece."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hand_lanes import SHAPES, mesh_rank, sharding, weights
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from fxpart.codegen.materialization import materialize
from fxpart.codegen.tensor_files import TensorFiles
from fxpart.errors import FxpartError
from fxpart.runtime.state.model_state import shard_along_axis
from fxpart.runtime.state.shard_layout import ShardLayout, StateSlicer
from fxpart.sharding import REPLICATE, Mesh, Shard, indices


@st.composite
def layouts(draw: st.DrawFn) -> ShardLayout:
    """A tensor of two or three dims on a mesh of one or two axes, fused dims among them."""
    mesh = Mesh(
        tuple((name, draw(st.integers(1, 3))) for name in draw(st.sampled_from(["a", "ab"])))
    )
    dims = draw(st.integers(1, 3))
    outer = draw(st.sampled_from([1, 1, 2, 3]))
    placements = [
        draw(st.sampled_from([REPLICATE, *(Shard(d, outer) for d in range(dims))]))
        for _ in mesh.axes
    ]
    if len(mesh.axes) == 2 and placements[0] == placements[1]:
        placements[1] = REPLICATE  # a fused dim need not fall into parts a second time
    shape = tuple(outer * draw(st.integers(0 if d else 1, 5)) for d in range(dims))
    return ShardLayout(shape, tuple(placements), mesh)


@pytest.mark.slow
@given(layouts(), st.booleans())
def test_parts_are_what_the_indices_say(pieces: ShardLayout, flat: bool) -> None:
    """Taken out, they are the mesh rank's elements; put in, the sources set each element once."""
    whole = torch.arange(math.prod(pieces.shape)).view(pieces.shape)
    axis = pieces.mesh.names[0]
    cut = shard_along_axis(pieces, axis) if flat and axis not in pieces.axes else pieces
    rebuilt, written = torch.full_like(whole, -1), 0
    for at in range(pieces.mesh.size):
        held = indices(pieces.shape, pieces.placements, pieces.mesh, at)
        expected = whole.numpy()[np.ix_(*held)]
        part = cut.part(whole, at)
        assert tuple(part.shape) == cut.local_shape(at)
        if not cut.flat:
            assert np.array_equal(part.numpy(), expected)
            slices = cut.slices(at)
            if slices is not None:
                assert np.array_equal(whole[slices].numpy(), expected)
        else:
            start, stop = cut.range(at, expected.size)
            assert np.array_equal(part.numpy(), expected.reshape(-1)[start:stop])
        if at in cut.sources:
            cut.put(rebuilt, at, part)
            written += part.numel()
    assert torch.equal(rebuilt, whole)
    assert written == whole.numel()


def test_a_part_in_one_range_is_a_view() -> None:
    mesh = Mesh((("tp", 2),))
    whole = torch.zeros(6, 4)
    storage = whole.untyped_storage().data_ptr()
    for dim in (0, 1):
        part = ShardLayout((6, 4), (Shard(dim),), mesh).part(whole, 1)
        assert part.untyped_storage().data_ptr() == storage
    fused = ShardLayout((6, 4), (Shard(0, 3),), mesh).part(whole, 1)
    assert fused.untyped_storage().data_ptr() != storage


def stage_zero(index: int, mesh: str) -> tuple[Any, nn.Module, StateSlicer]:
    """A mesh rank's spec, its first stage without weights, and what cuts them."""
    given = sharding(mesh)
    made = mesh_rank(index, given, [0])
    module = made.modules[0]
    vars(module)["INDEX"], vars(module)["device"] = 0, torch.device("cpu")
    for state in made.spec.stages[0].state:
        setattr(module, state.attribute, nn.Parameter(torch.zeros(state.shape)))
    return made.spec, module, StateSlicer(given, index)


@pytest.mark.parametrize("source", ["file", "tensors", "function"])
@pytest.mark.parametrize("index", [0, 1])
def test_weights_come_in_parts(
    source: str, index: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a file nothing is read but the mesh rank's part."""
    whole, sizes = weights(), []
    original = TensorFiles.read_part

    def read_part(self: TensorFiles, name: str, slices: tuple[slice, ...]) -> torch.Tensor:
        sizes.append(original(self, name, slices).numel())
        return original(self, name, slices)

    monkeypatch.setattr(TensorFiles, "read_part", read_part)
    monkeypatch.setattr(TensorFiles, "read", None)
    given: Any = whole
    if source == "file":
        save_file(whole, tmp_path / "w.safetensors")
        given = tmp_path / "w.safetensors"
    elif source == "function":
        given = lambda name, meta: whole[name].reshape(meta.shape)  # noqa: E731
    spec, module, part = stage_zero(index, "tp=2")
    materialize(module, spec, given, part=part)
    expected = 0
    for state in spec.stages[0].state:
        mine = getattr(module, state.attribute)
        assert torch.equal(mine, part(state.name, whole[state.name]))
        expected += mine.numel()
    assert sum(sizes) == (expected if source == "file" else 0)
    assert expected < sum(math.prod(s) for n, s in SHAPES.items() if n != "scale")


def test_a_stored_shape_that_is_wrong_is_told_whole(tmp_path: Path) -> None:
    whole = weights()
    whole["up.weight"] = torch.zeros(5, 6)
    save_file(whole, tmp_path / "w.safetensors")
    spec, module, part = stage_zero(0, "tp=2")
    with pytest.raises(FxpartError, match=r"its shape is \[5, 6\], but the model needs \[10, 6\]"):
        materialize(module, spec, tmp_path, part=part)
