"""inline_regions against the model itself: no_grad, nested enable_grad, autocast on and off."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fxpart.passes import all_passes
from inplace_programs import run, same_bits
from torch import fx, nn
from torch.nn import functional

from fxpart.capture import capture
from fxpart.compiler import Level, PassManager
from fxpart.compiler.effects import packet_name
from fxpart.errors import FxpartError

HIGHER = "higher_order"
BATCH = torch.randn(4, 8, generator=torch.Generator().manual_seed(5))


class Model(nn.Module):
    """Two linear layers; what is between them is given."""

    def __init__(self, body: Callable[[Model, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, x)


def no_grad(m: Model, x: torch.Tensor) -> torch.Tensor:
    y = m.a(x)
    with torch.no_grad():
        scale = y.abs().max() + m.b(y).sum()
    return m.b(y * scale)


def enable_inside_no_grad(m: Model, x: torch.Tensor) -> torch.Tensor:
    y = m.a(x)
    with torch.no_grad():
        z = m.b(y) * 2
        with torch.enable_grad():
            w = m.a(y) + z
    return w + m.b(z)


def autocast_off(m: Model, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        y = m.a(x).float()
    return m.b(y)


def autocast_other_device(m: Model, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False):
        y = m.a(x)
    return m.b(y)


def autocast_on(m: Model, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = functional.gelu(m.a(x))
        y = m.a(y) + functional.layer_norm(m.b(y).float(), (8,))
        y = torch.cat([y, m.a(y)], 1).softmax(1)[:, :8] @ m.b.weight
    return m.b(y.float())


def autocast_without_grad(m: Model, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = m.a(x)
        with torch.no_grad():
            z = m.b(y)
        y = y * z
    return m.b(y.float())


BODIES = [
    no_grad,
    enable_inside_no_grad,
    autocast_off,
    autocast_other_device,
    autocast_on,
    autocast_without_grad,
]


@pytest.mark.slow
@pytest.mark.parametrize("body", BODIES, ids=lambda b: b.__name__)
def test_equal_to_the_regions(body: Callable[[Model, torch.Tensor], torch.Tensor]) -> None:
    torch.manual_seed(0)
    captured = capture(Model(body), (BATCH,))
    before = captured.graph
    after = PassManager(all_passes()).run("drop_asserts,inline_regions", before)
    assert after.meta["fxpart_level"] is Level.CAPTURED
    assert any(_regions(before)), "the case has a region"
    assert not any(_regions(after))
    assert not any(isinstance(m, fx.GraphModule) for m in after.children())
    for a, b in zip(run(before, BATCH), run(after, BATCH), strict=True):
        assert same_bits(a, b)


def _regions(module: fx.GraphModule) -> list[bool]:
    return [getattr(n.target, "namespace", "") == HIGHER for n in module.graph.nodes]


@pytest.mark.slow
@pytest.mark.parametrize("cache", [False, True])
def test_conversions_of_a_parameter_are_shared_as_the_cache_does(cache: bool) -> None:
    before = capture(Model(autocast_on), (BATCH,)).graph
    call = next(n for n in before.graph.nodes if getattr(n.target, "namespace", "") == HIGHER)
    call.update_arg(3, cache)
    before.recompile()
    after = PassManager(all_passes()).run("drop_asserts,inline_regions", before)
    weight = next(n for n in after.graph.nodes if n.op == "get_attr" and n.target == "a.weight")
    assert [packet_name(u.target) for u in weight.users] == ["aten.to"] * (1 if cache else 3)
    for a, b in zip(run(before, BATCH), run(after, BATCH), strict=True):
        assert same_bits(a, b)


@pytest.mark.slow
def test_no_gradient_comes_out_of_no_grad() -> None:
    captured = capture(Model(no_grad), (BATCH,))
    graph = (
        PassManager(all_passes())
        .run("drop_asserts,inline_regions,remove_inplace,key_random,mark_gradients", captured.graph)
        .graph
    )
    biggest = next(n for n in graph.nodes if packet_name(n.target) == "aten.max")
    assert not biggest.meta["fxpart"].requires_grad


@pytest.mark.slow
def test_a_composite_op_that_converts_inside_is_refused_with_its_line() -> None:
    def body(m: Model, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = torch.einsum("bi,oi->bo", m.a(x).float(), m.b.weight)
        return m.b(y.float())

    captured = capture(Model(body), (BATCH,))
    with pytest.raises(FxpartError) as caught:
        PassManager(all_passes()).run("drop_asserts,inline_regions", captured.graph)
    assert caught.value.code == "FXP108"
    assert "test_inline_regions.py" in caught.value.problems[0].where
    assert "einsum" in caught.value.problems[0].why
