"""Every zoo model: the captured graph computes what the user's own module computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from zoo import ZOO, Built, Entry

from fxpart.capture import CapturedModel, capture
from fxpart.capture.batch_dims import resize
from fxpart.capture.flat_batch import flatten_batch, look_up, unflatten_batch
from fxpart.compiler import KEY, LEVEL_KEY, Level

pytestmark = pytest.mark.slow


@pytest.fixture(params=ZOO, scope="module")
def named(request: pytest.FixtureRequest) -> tuple[Entry, Built, CapturedModel]:
    entry = ZOO[request.param]
    if not entry.available:
        pytest.skip(f"{request.param} needs {entry.needs}")
    built = entry.build()
    captured = capture(
        built.model,
        built.batch,
        loss=built.loss,
        batch_size=built.batch_size,
        batch_dims=built.batch_dims,
    )
    return entry, built, captured


def inputs_of(captured: CapturedModel, batch: Any) -> list[torch.Tensor]:
    return [look_up(batch, spec.path).clone() for spec in captured.inputs]


def with_rows(captured: CapturedModel, batch: Any, rows: int) -> Any:
    parts = flatten_batch(batch)
    dims = [spec.batch_dim for spec in captured.inputs]
    tensors = [resize(t, d, rows) for t, d in zip(parts.tensors, dims, strict=True)]
    return unflatten_batch(parts.tree, tensors)


def step(
    captured: CapturedModel, run: Callable[[], Any]
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Outputs, and by name gradients and written buffers, of one seeded run; state is put back."""
    parameters = {name: captured.state[name] for name in captured.parameters}
    buffers = {n: t for n, t in captured.state.items() if n not in parameters}
    before = {n: t.clone() for n, t in buffers.items()}
    for parameter in parameters.values():
        parameter.grad = None
    torch.manual_seed(7)
    values = run()
    values[0].backward()
    after: dict[str, Any] = {n: t.clone() for n, t in buffers.items()}
    after |= {f"grad {n}": p.grad for n, p in parameters.items()}
    with torch.no_grad():
        for name, value in before.items():
            buffers[name].copy_(value)
    return [v.detach() for v in values], after


def assert_same(mine: Any, theirs: Any, tolerance: float, name: str = "") -> None:
    if mine is None or theirs is None:
        assert mine is theirs, name
        return
    assert mine.shape == theirs.shape, name
    if tolerance == 0.0:
        assert torch.equal(mine, theirs), name
    else:
        scale = max(1e-3, float(theirs.abs().max())) if theirs.numel() else 1.0
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance * scale, msg=name)


def compare(entry: Entry, captured: CapturedModel, batch: Any) -> None:
    assert captured.eager is not None
    eager = captured.eager
    outputs, state = step(captured, lambda: captured.graph(*inputs_of(captured, batch)))
    expected, expected_state = step(captured, lambda: eager(batch))
    assert len(outputs) == len(expected) == 1 + len(captured.outputs)
    for name, mine, theirs in zip(("loss", *captured.outputs), outputs, expected, strict=True):
        assert_same(mine, theirs, entry.tolerance, name)
    assert state.keys() == expected_state.keys()
    for name in state:
        assert_same(state[name], expected_state[name], entry.tolerance, name)
    assert any(value is not None for name, value in state.items() if name.startswith("grad "))


def test_training_mode_equals_the_module(named: tuple[Entry, Built, CapturedModel]) -> None:
    entry, built, captured = named
    assert captured.training and built.model.training
    compare(entry, captured, built.batch)


def test_evaluation_mode_and_another_batch_size(named: tuple[Entry, Built, CapturedModel]) -> None:
    entry, built, captured = named
    assert captured.again is not None
    evaluated = captured.again(False)
    assert not evaluated.training and built.model.training
    compare(entry, evaluated, built.batch)
    assert evaluated.symbolic == entry.symbolic
    if evaluated.symbolic:
        for rows in (1, built.batch_size + 3):
            compare(entry, evaluated, with_rows(evaluated, built.batch, rows))


def test_names_and_places(named: tuple[Entry, Built, CapturedModel]) -> None:
    _, built, captured = named
    assert captured.graph.meta[LEVEL_KEY] is Level.CAPTURED
    nodes = list(captured.graph.graph.nodes)
    placeholders = [n for n in nodes if n.op == "placeholder"]
    assert [n.name for n in placeholders] == [spec.name for spec in captured.inputs]
    assert all(KEY in n.meta for n in nodes)
    assert all("val" in n.meta for n in nodes if n.op != "get_attr" or n.target in captured.state)
    original = dict(built.model.named_parameters(remove_duplicate=False))
    original |= dict(built.model.named_buffers(remove_duplicate=False))
    for name, tensor in original.items():
        main = captured.aliases.get(name, name)
        assert captured.state[main].data_ptr() == tensor.data_ptr(), name
    assert set(captured.parameters) <= set(original)
    used = {str(n.target) for n in nodes if n.op == "get_attr"}
    regions = {name for name, _ in captured.graph.named_modules()}
    assert used - regions <= set(captured.state)
    ops = [n for n in nodes if n.op == "call_function" and isinstance(n.meta["val"], torch.Tensor)]
    known = dict(built.model.named_modules(remove_duplicate=False))
    placed = [n for n in ops if n.meta[KEY].module in known]
    assert len(placed) > 0.9 * len(ops) - 3
    assert sum(bool(n.meta[KEY].source) for n in ops) > 0.5 * len(ops)


def test_inputs_describe_the_batch(named: tuple[Entry, Built, CapturedModel]) -> None:
    entry, built, captured = named
    assert captured.symbolic == entry.symbolic
    for spec in captured.inputs:
        tensor = look_up(built.batch, spec.path)
        assert str(tensor.dtype) == f"torch.{spec.dtype}"
        sizes = [captured.hints[d] if isinstance(d, str) else d for d in spec.shape]
        assert sizes == list(tensor.shape)
        if captured.symbolic and spec.batch_dim is not None:
            assert isinstance(spec.shape[spec.batch_dim], str)
    for symbol, (name, dim) in captured.symbols.items():
        spec = next(s for s in captured.inputs if s.name == name)
        assert spec.shape[dim] == symbol
    assert captured.batch_size == built.batch_size
    assert len(captured.output_dims) == len(captured.outputs)
