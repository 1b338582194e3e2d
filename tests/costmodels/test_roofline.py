"""Rates that were measured on a device stand in the place of its nominal ones."""

from __future__ import annotations

from math import hypot

import msgspec
import pytest
from fxpart.costmodels.roofline import Roofline

from fxpart.cluster.model import Cluster
from fxpart.costs import OpSpec, TensorSpec

(NOMINAL,) = Cluster.parse("1xh100").devices
X = TensorSpec((4096, 4096), "bfloat16")
LINEAR = OpSpec("aten.mm.default", (X, X), (X,))
GELU = OpSpec("aten.gelu.default", (X,), (X,))


@pytest.mark.slow
def test_measured_rates_come_first() -> None:
    device = msgspec.structs.replace(NOMINAL, measured={"bfloat16": 4e14, "bandwidth": 2e12})
    model = Roofline()
    product = hypot(2 * 4096**3 / 4e14, 6 * 4096**2 / 2e12) + 2e-6
    assert model.op(LINEAR, device, False).seconds == pytest.approx(product)
    assert model.op(GELU, device, False).seconds == pytest.approx(4 * 4096**2 / 2e12 + 2e-6)


def test_what_was_not_measured_is_nominal() -> None:
    device = msgspec.structs.replace(NOMINAL, measured={"float64": 1.0})
    for op in (LINEAR, GELU):
        assert Roofline().op(op, device, False) == Roofline().op(op, NOMINAL, False)


def test_a_measured_dtype_needs_no_nominal_one() -> None:
    """The note about another dtype's rate goes away."""
    known = {name: rate for name, rate in NOMINAL.flops.items() if name != "bfloat16"}
    device = msgspec.structs.replace(NOMINAL, flops=known)
    assert "float32 rate" in Roofline().op(LINEAR, device, False).source
    measured = msgspec.structs.replace(device, measured={"bfloat16": 4e14})
    assert Roofline().op(LINEAR, measured, False).source == "roofline"
