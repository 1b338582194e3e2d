"""Efficiencies by architecture: formula, alignment, attention, and measured kernels of an H100."""

from __future__ import annotations

import re
import tomllib
from math import hypot
from pathlib import Path
from statistics import median

import msgspec
import pytest
from fxpart.costmodels import HERE
from fxpart.costmodels.efficiency import find_efficiency
from fxpart.costmodels.roofline import Roofline

from fxpart.cluster.model import Cluster
from fxpart.cluster.presets import device_data, models
from fxpart.costs import OpSpec, TensorSpec

MEASURED = Path(__file__).resolve().parents[2] / "costmodels" / "devices" / "measured"
(H100,) = Cluster.parse("1xh100").devices


def linear(rows: int, outputs: int, inputs: int, dtype: str = "bfloat16") -> OpSpec:
    x, w = TensorSpec((rows, inputs), dtype), TensorSpec((outputs, inputs), dtype)
    return OpSpec("aten.linear.default", (x, w), (TensorSpec((rows, outputs), dtype),), (), 2)


def test_every_gpu_has_an_architecture() -> None:
    for name in models():
        if device_data(name)["kind"] == "gpu":
            found = find_efficiency(name)
            assert found is not None and 0 < found.matmul < 1 and 0 < found.memory < 1, name
    assert find_efficiency("cpu") is None and find_efficiency("unheard-of") is None


@pytest.mark.parametrize(
    ("model", "best"),
    [
        ("l4", 91.4e12),
        ("l40", 170.3e12),
        ("l40s", 252e12),
        ("rtx-6000-ada", 278.5e12),
        ("rtx-4090", 178.5e12),
        ("a100-pcie-80gb", 256.4e12),
        ("a100-sxm-80gb", 267.9e12),
        ("h100-nvl", 488.5e12),
        ("h100-pcie", 499.5e12),
        ("h100-sxm", 792.1e12),
        ("mi300x", 668.4e12),
        ("mi325x", 784.9e12),
        ("mi355x", 1565e12),
    ],
)
def test_devices_of_little_power_reach_less(model: str, best: float) -> None:
    """Best products of mamf-finder (github.com/mag-/gpu_benchmark, AMD: ML Engineering).

    Those of a training step are slower.
    """
    (device,) = Cluster.parse(f"1x{model}").devices
    found = Roofline().op(linear(8192, 8192, 8192), device, False)
    assert 0.75 * best < found.flops / found.seconds < best


def test_device_without_data_file_keeps_the_plain_roofline() -> None:
    device = msgspec.structs.replace(H100, model="card")
    plain = 2 * 8192**3 / 989.4e12 + device.launch
    op = linear(8192, 8192, 8192)
    assert Roofline().op(op, device, False).seconds == pytest.approx(plain)


def test_op_takes_at_least_its_launch() -> None:
    assert Roofline().op(linear(8, 8, 8), H100, False).seconds == H100.launch
    assert Roofline().op(linear(8, 8, 8), H100, True).seconds == 2 * H100.launch


def test_unaligned_rows_are_slow() -> None:
    """A vocabulary of 50,257 in 16 bit: 94 of 989 TFLOP/s on an H100, as measured."""
    whole, odd = (Roofline().op(linear(8192, n, 768), H100, False) for n in (50264, 50257))
    assert odd.seconds > 4 * whole.seconds
    wide = Roofline().op(linear(8192, 50257, 768, "float32"), H100, False)
    assert wide.seconds == pytest.approx(
        hypot(wide.flops / (0.76 * 6.7e13), wide.bytes / (0.9 * 3.35e12)) + 2e-6
    )


def test_causal_attention_takes_half_of_the_time() -> None:
    q = TensorSpec((1, 32, 8192, 128), "bfloat16")
    name = "aten.scaled_dot_product_attention.default"
    full, causal = (
        Roofline().op(OpSpec(name, (q, q, q), (q,), (("is_causal", c),), 3), H100, False).seconds
        for c in (False, True)
    )
    assert causal == pytest.approx(full / 2, rel=0.01)


def test_measured_kernels_of_an_h100() -> None:
    """Products are predicted 10 % slow: training draws more power than a kernel alone."""
    data = tomllib.loads((MEASURED / "h100-sxm.toml").read_text(encoding="utf-8"))
    assert HERE and data["date"]
    ratios, single = [], msgspec.structs.replace(H100, launch=9.3e-6)  # one op in a loop
    for shape, seconds in data["bfloat16"].items():
        sizes = [int(size) for size in re.findall(r"\d+", shape)]
        ratios.append(Roofline().op(linear(*sizes), single, False).seconds / seconds)
    assert median(ratios) == pytest.approx(1.07, abs=0.05)
    assert 0.6 < min(ratios) and max(ratios) < 1.35
    for what, seconds in data["attention"].items():
        way, b, h, kv, s, d = re.fullmatch(
            r"(\w+) b(\d+) h(\d+)/(\d+) s(\d+) d(\d+)", what
        ).groups()  # type: ignore[union-attr]
        if int(s) < 1024:  # the launch alone
            continue
        q = TensorSpec((int(b), int(h), int(s), int(d)), "bfloat16")
        k = TensorSpec((int(b), int(kv), int(s), int(d)), "bfloat16")
        name = "aten.scaled_dot_product_attention.default"
        op = OpSpec(name, (q, k, k), (q,), (("is_causal", True),), 3)
        found = Roofline().op(op, H100, way == "backward").seconds
        assert found == pytest.approx(seconds, rel=0.45), what
