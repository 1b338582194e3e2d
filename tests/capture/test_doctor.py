"""The diagnosis of models that can be captured."""

from __future__ import annotations

import msgspec
import pytest
from zoo import ZOO

from fxpart.capture import Diagnosis, diagnose

pytestmark = pytest.mark.slow


def examine(name: str) -> Diagnosis:
    built = ZOO[name].build()
    return diagnose(built.model, built.batch, loss=built.loss)


def test_regions_buffers_and_ops_in_place() -> None:
    found = examine("regions")
    assert found.captured and found.method == "export" and found.symbolic
    assert found.buffers_written == ("mean",)
    assert len(found.regions) == 2
    # detach_ comes with torch.tensor inside forward.
    assert {use.op for use in found.in_place} >= {"aten.mul_", "aten.add_"}
    assert all("zoo_small.py" in use.source for use in found.in_place)
    assert msgspec.json.decode(msgspec.json.encode(found), type=Diagnosis) == found


def test_dropout() -> None:
    found = examine("dropouts")
    assert sum(use.count for use in found.random) == 5
    assert not found.in_place and not found.regions


def test_frozen_parameters_ties_and_inputs() -> None:
    found = examine("frozen")
    assert 0 < found.frozen < found.parameters and found.unused == ()
    assert examine("shared_mlp").ties["last.weight"] == "first.weight"
    found = examine("side_mask")
    assert {i.name: i.batch_dim for i in found.inputs}["mask"] is None
    assert any("positions" in note and "mask" in note for note in found.notes)


def test_batch_norm_is_told() -> None:
    found = examine("resnet50")
    assert any("normalization" in note for note in found.notes)
    assert any(name.endswith("running_mean") for name in found.buffers_written)
    assert {use.op for use in found.in_place} >= {"aten.relu_"}
