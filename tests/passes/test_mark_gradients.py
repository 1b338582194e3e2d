"""mark_gradients against autograd on real tensors: the same gradients and saved bytes."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
from fxpart.passes import all_passes
from inplace_programs import Builder
from torch import fx, nn
from zoo import ZOO
from zoo_graphs import captured, inputs, prepared

from fxpart.compiler import KEY, PassManager
from fxpart.compiler.tensor_sizes import tensors

aten = torch.ops.aten


def marked(module: fx.GraphModule) -> fx.GraphModule:
    return PassManager(all_passes()).run("mark_gradients", module)


class _Watcher(fx.Interpreter):
    """Runs a graph for real and notes, per node, the gradient of its value and what it saves."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.state = {
            t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())
        }
        self.grads: dict[str, bool] = {}
        self.saved: dict[int, int] = {}
        self.kept: list[torch.Tensor] = []

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op != "output":
            self.grads[n.name] = any(t.requires_grad for t in tensors(result))
        return result

    def pack(self, t: torch.Tensor) -> torch.Tensor:
        held = t.untyped_storage()
        self.kept.append(t)
        if held.data_ptr() not in self.state:
            self.saved[held.data_ptr()] = held.nbytes()
        return t


def watch(module: fx.GraphModule, *given: Any) -> _Watcher:
    watcher = _Watcher(module)
    with torch.autograd.graph.saved_tensors_hooks(watcher.pack, lambda t: t):
        watcher.run(*given)
    return watcher


def ours(module: fx.GraphModule, hints: dict[str, int]) -> tuple[dict[str, bool], int]:
    """Gradients by name and all saved bytes, each storage once."""
    sizes: dict[int, Any] = {}
    grads = {}
    for node in module.graph.nodes:
        if node.op == "output":
            continue
        grads[node.name] = node.meta[KEY].requires_grad
        for saved in node.meta[KEY].saved:
            assert sizes.setdefault(saved.storage, saved.size) == saved.size
    return grads, sum(number(s, hints) for s in sizes.values())


def number(size: int | sympy.Expr, hints: dict[str, int]) -> int:
    """A size at the example inputs."""
    if isinstance(size, int):
        return size
    given = {symbol: sympy.Integer(hints[str(symbol)]) for symbol in size.free_symbols}
    return int(size.xreplace(given))


@pytest.mark.slow
@pytest.mark.parametrize("name", list(ZOO))
def test_gradients_and_saved_bytes_of_the_zoo(name: str) -> None:
    if not ZOO[name].available:
        pytest.skip(f"{ZOO[name].needs} is not installed")
    module = prepared(name)
    watcher = watch(module, 3, *inputs(name))
    grads, total = ours(module, captured(name).hints)
    assert grads == watcher.grads
    assert total == sum(watcher.saved.values())


def test_aliases_count_once_and_state_not_at_all() -> None:
    builder = Builder(weight=nn.Parameter(torch.ones(4, 4)))
    x = builder.input(3, 4)
    y = builder.call(aten.linear.default, x, builder.get("weight"))
    view = builder.call(aten.view.default, y, [12])
    builder.call(aten.sin.default, view)
    sin, cos = builder.call(aten.sin.default, y), builder.call(aten.cos.default, view)
    module = marked(builder.finish(sin, cos))
    by_name = {n.name: n.meta[KEY] for n in module.graph.nodes if KEY in n.meta}
    assert [(s.size, s.source) for s in by_name[y.name].saved] == [(48, x.name)]
    assert by_name[sin.name].saved == by_name[cos.name].saved
    assert [(s.size, s.source) for s in by_name[sin.name].saved] == [(48, y.name)]


def test_private_results_have_no_source() -> None:
    builder = Builder(weight=nn.Parameter(torch.ones(3, 4)))
    y = builder.call(aten.mul.Tensor, builder.input(3, 4), builder.get("weight"))
    drop = builder.call(aten.dropout.default, y, 0.5, True)
    module = marked(builder.finish(drop))
    saved = next(n.meta[KEY].saved for n in module.graph.nodes if n.name == drop.name)
    assert [s.source for s in saved] == [""]


@pytest.mark.slow
def test_a_symbolic_batch_gives_expressions() -> None:
    module = prepared("mlp")
    found = {s.size for n in module.graph.nodes if KEY in n.meta for s in n.meta[KEY].saved}
    (symbol,) = captured("mlp").symbols
    assert found <= {4 * 16 * sympy.Symbol(symbol), 4 * 32 * sympy.Symbol(symbol)} or all(
        str(next(iter(s.free_symbols))) == symbol for s in found
    )
    assert any(isinstance(s, sympy.Expr) for s in found)


def test_equal_layers_are_observed_once() -> None:
    builder = Builder(**{f"w{i}": nn.Parameter(torch.eye(4)) for i in range(30)})
    y = builder.input(3, 4)
    for i in range(30):
        y = builder.call(
            aten.relu.default, builder.call(aten.linear.default, y, builder.get(f"w{i}"))
        )
    module = marked(builder.finish(y))
    # the first linear's input has no gradient; all others are alike; mul and sum of the loss
    assert len(module.meta["fxpart_behaviors"]) == 5
