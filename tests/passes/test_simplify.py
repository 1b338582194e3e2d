"""simplify removes identities and dead ops, and nothing that has an effect."""

from __future__ import annotations

import torch
from fxpart.passes import all_passes
from inplace_programs import Builder, run, same_bits
from torch import fx, nn

from fxpart.compiler import PassManager

aten = torch.ops.aten
X = torch.arange(12.0).reshape(3, 4)


def simplified(module: fx.GraphModule) -> fx.GraphModule:
    return PassManager(all_passes()).run("simplify", module)


def targets(module: fx.GraphModule) -> list[object]:
    return [n.target for n in module.graph.nodes if n.op == "call_function"][:-2]


def test_identities_go_and_bits_stay() -> None:
    builder = Builder(weight=nn.Parameter(torch.ones(3, 4)))
    y = builder.call(aten.mul.Tensor, builder.input(3, 4), builder.get("weight"))
    y = builder.call(aten.to.dtype, y, torch.float32)
    y = builder.call(aten.dropout.default, y, 0.3, False)
    y = builder.call(aten.dropout.default, y, 0.0, True)
    y = builder.call(aten.expand.default, y, [3, 4])
    y = builder.call(aten.view.default, y, [3, -1])
    y = builder.call(aten.contiguous.default, y)
    y = builder.call(aten.alias.default, y)
    module = builder.finish(y)
    result = simplified(module)
    assert targets(result) == [aten.mul.Tensor]
    for a, b in zip(run(module, X), run(result, X), strict=True):
        assert same_bits(a, b)


def test_what_changes_something_stays() -> None:
    builder = Builder()
    y = builder.input(3, 4)
    y = builder.call(aten.to.dtype, y, torch.float64)
    y = builder.call(aten.to.dtype, y, torch.float64, False, True)
    y = builder.call(aten.dropout.default, y, 0.3, True)
    y = builder.call(aten.expand.default, y, [2, 3, 4])
    y = builder.call(aten.reshape.default, y, [6, 4])
    y = builder.call(aten.contiguous.default, builder.call(aten.t.default, y))
    module = builder.finish(y)
    assert targets(simplified(module)) == targets(module)


def test_dead_ops_go_but_writes_to_state_stay() -> None:
    builder = Builder(count=torch.zeros(()), unused=torch.zeros(2))
    x = builder.input(3, 4)
    builder.call(aten.add_.Tensor, builder.get("count"), 1)
    builder.call(aten.sin.default, builder.call(aten.cos.default, builder.get("unused")))
    builder.call(aten.dropout.default, x, 0.5, True)
    result = simplified(builder.finish(builder.call(aten.relu.default, x)))
    assert targets(result) == [aten.add_.Tensor, aten.relu.default]
    assert [n.target for n in result.graph.nodes if n.op == "get_attr"] == ["count"]


def test_drop_asserts_takes_their_sizes_along() -> None:
    builder = Builder()
    x = builder.input(3, 4)
    builder.call(aten._assert_tensor_metadata.default, x, None, None, torch.float32)
    builder.call(aten.sym_size.int, x, 0)
    builder.call(aten._assert_async.default, builder.call(aten.any.default, x))
    module = builder.finish(builder.call(aten.relu.default, x))
    result = PassManager(all_passes()).run("drop_asserts", module)
    assert targets(result) == [aten.any.default, aten.relu.default]


def test_type_as_reads_no_other_tensor() -> None:
    builder = Builder(example=torch.zeros(2, dtype=torch.float64))
    y = builder.call(aten.type_as.default, builder.input(3, 4), builder.get("example"))
    module = builder.finish(y)
    result = simplified(module)
    assert targets(result) == [aten.to.dtype]
    for a, b in zip(run(module, X), run(result, X), strict=True):
        assert same_bits(a, b)
