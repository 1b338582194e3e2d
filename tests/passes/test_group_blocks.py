"""group_blocks: invariants on the zoo, where transformers are cut, what stays together."""

from __future__ import annotations

import operator

import pytest
import torch
from fxpart.passes import PREPARE, all_passes
from inplace_programs import Builder
from torch import fx, nn
from zoo import ZOO
from zoo_graphs import captured, prepared

from fxpart.compiler import BLOCKS_KEY, KEY, NO_CUT_KEY, PassManager
from fxpart.compiler.effects import packet_name
from fxpart.compiler.graph_cuts import closed_cuts, crossing, operations
from fxpart.compiler.tensor_sizes import tensors
from fxpart.compiler.work_estimate import is_heavy
from fxpart.errors import FxpartError

aten = torch.ops.aten
NAMES = [n for n, entry in ZOO.items() if entry.available]


def blocks_of(module: fx.GraphModule) -> list[list[fx.Node]]:
    result: list[list[fx.Node]] = [[] for _ in module.meta[BLOCKS_KEY]]
    for node in operations(module.graph):
        result[node.meta[KEY].block].append(node)
    return result


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_invariants_of_the_zoo(name: str) -> None:
    module = prepared(name)
    blocks = blocks_of(module)
    order = [n.meta[KEY].block for n in operations(module.graph)]
    assert order == sorted(order)
    assert all(blocks)
    assert 2 <= len(blocks) <= 256
    infos = module.meta[BLOCKS_KEY]
    assert len({i.name for i in infos}) == len(infos)
    for node in module.graph.nodes:
        known = node.meta[KEY].block if KEY in node.meta else None
        if node.op in ("placeholder", "get_attr"):
            assert known is None
        for user in node.users:
            if user.op == "call_function" and user.target is operator.getitem:
                assert user.meta[KEY].block == known
    if any(is_heavy(n) for b in blocks for n in b):
        assert all(any(is_heavy(n) for n in b) for b in blocks)
    ends = {sum(map(len, blocks[: i + 1])) - 1 for i in range(len(blocks) - 1)}
    assert not ends & closed_cuts(module.graph, operations(module.graph))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layer", "parts"),
    [
        ("gpt2", "transformer.h.{}", (".attn", ".mlp")),
        ("llama", "model.layers.{}", (".self_attn", ".mlp")),
        ("vit", "vit.layers.{}", (".attention", ".mlp")),
    ],
)
def test_transformers_are_cut_at_the_residual_stream(
    name: str, layer: str, parts: tuple[str, ...]
) -> None:
    if name not in NAMES:
        pytest.skip("transformers is not installed")
    module = prepared(name)
    names = [i.name for i in module.meta[BLOCKS_KEY]]
    layers = sum(layer.format(i) + parts[0] in names for i in range(99))
    assert layers >= 2
    expected = [layer.format(i) + p for i in range(layers) for p in parts]
    assert [n for n in names if n.startswith(layer.partition("{")[0])] == expected
    # equal layers share one identity, apart from the first, whose input may need no gradient
    for part in parts:
        same = {i.identity for i in module.meta[BLOCKS_KEY] if i.name.endswith(part)}
        assert len(same) <= 2
    for cut in range(1, len(names)):
        if names[cut - 1] in expected and names[cut] in expected:
            over = [n for n in operations(module.graph) if _crosses(n, cut)]
            assert len(over) == 1, "between the parts of layers the residual stream alone crosses"


def _crosses(node: fx.Node, cut: int) -> bool:
    """Whether a value with a gradient is made before a block and used in it or later."""
    known = node.meta[KEY]
    used = [u.meta[KEY].block for u in node.users if u.op == "call_function"]
    return (
        known.requires_grad and known.block < cut and any(b is not None and b >= cut for b in used)
    )


@pytest.mark.slow
def test_op_granularity_is_finer_and_bounded() -> None:
    graph = captured("mlp").graph
    fine = PassManager(all_passes()).run(
        PREPARE.replace("group_blocks", 'group_blocks{granularity="op"}'), graph
    )
    assert len(fine.meta[BLOCKS_KEY]) > len(prepared("mlp").meta[BLOCKS_KEY])
    for most in (1, 2, 5):
        few = PassManager(all_passes()).run(PREPARE + f"{{max_blocks={most}}}", graph)
        assert len(few.meta[BLOCKS_KEY]) == most
        assert len(blocks_of(few)) == most


@pytest.mark.parametrize("option", ['granularity="layer"', "max_blocks=0"])
def test_wrong_options(option: str) -> None:
    builder = Builder()
    module = builder.finish(builder.call(aten.relu.default, builder.input(2)))
    with pytest.raises(FxpartError) as caught:
        PassManager(all_passes()).run(f"key_random,group_blocks{{{option}}}", module)
    assert caught.value.code == "FXP109"


def finely(module: fx.GraphModule) -> fx.GraphModule:
    return PassManager(all_passes()).run(
        PREPARE.replace("group_blocks", 'group_blocks{granularity="op"}'), module
    )


def test_uses_of_written_state_stay_together() -> None:
    """The ops that read or write the buffer are one block; later uses take the written value."""
    builder = Builder(mean=torch.zeros(4))
    y = builder.call(aten.relu.default, builder.input(3, 4))
    mean = builder.get("mean")
    builder.call(aten.mul_.Scalar, mean, 0.9)
    y = builder.call(aten.sin.default, y)
    y = builder.call(aten.cos.default, y)
    y = builder.call(aten.add.Tensor, y, builder.call(aten.view.default, mean, [1, 4]))
    module = finely(builder.finish(builder.call(aten.exp.default, y)))
    nodes = operations(module.graph)
    touching = {
        packet_name(n.target): n.meta[KEY].block
        for n in nodes
        if any(source.op == "get_attr" for source in n.all_input_nodes)
    }
    assert set(touching) == {"aten.mul", "aten.copy_"} and len(set(touching.values())) == 1
    of = {packet_name(n.target): n.meta[KEY].block for n in nodes}
    assert of["aten.relu"] < of["aten.copy_"] < of["aten.view"] < of["aten.exp"]
    assert module.meta[NO_CUT_KEY] == ()


def test_lists_stay_with_their_items() -> None:
    builder = Builder()
    pieces = builder.call(aten.split.Tensor, builder.input(4, 4), 2)
    a = builder.call(aten.sin.default, builder.call(operator.getitem, pieces, 0))
    b = builder.call(aten.cos.default, builder.call(operator.getitem, pieces, 1))
    module = finely(builder.finish(builder.call(aten.add.Tensor, a, b)))
    listed = [n for n in operations(module.graph) if n.target is operator.getitem]
    assert {n.meta[KEY].block for n in listed} == {
        n.meta[KEY].block for n in operations(module.graph) if not tensors_only(n)
    }


def tensors_only(node: fx.Node) -> bool:
    return isinstance(node.meta["val"], torch.Tensor) and bool(tensors(node.meta["val"]))


@pytest.mark.slow
def test_data_dependent_sizes_do_not_cross() -> None:
    builder = Builder(symbolic=True)
    y = builder.call(aten.relu.default, builder.input(6, 4))
    flags = builder.call(aten.gt.Scalar, builder.call(aten.select.int, y, 1, 0), 0)
    some = builder.call(aten.nonzero.default, flags)
    z = builder.call(aten.exp.default, builder.call(aten.to.dtype, some, torch.float32))
    total = builder.call(aten.sum.default, z)
    last = builder.call(aten.sin.default, builder.call(aten.cos.default, total))
    module = finely(builder.finish(last, y))
    of: dict[str, int] = {}
    for node in operations(module.graph):  # the loss has sums of its own, later
        of.setdefault(packet_name(node.target), node.meta[KEY].block)
    assert of["aten.nonzero"] == of["aten.to"] == of["aten.exp"] == of["aten.sum"]
    assert of["aten.relu"] < of["aten.gt"] < of["aten.nonzero"] < of["aten.cos"] < of["aten.sin"]


def test_ops_of_other_packages_are_heavy() -> None:
    library = torch.library.Library("fxpart_test_ops", "DEF")
    library.define("mix(Tensor x) -> Tensor")
    library.impl("mix", lambda x: x * 1.0, "CompositeExplicitAutograd")
    builder = Builder()
    y = builder.call(torch.ops.fxpart_test_ops.mix.default, builder.input(3, 4))
    assert is_heavy(y)


def test_crossing_bytes_count_each_value_once_and_no_inputs() -> None:
    builder = Builder(weight=nn.Parameter(torch.ones(3, 4)))
    x, weight = builder.input(3, 4), builder.get("weight")
    a = builder.call(aten.mul.Tensor, x, weight)  # 48 bytes, used twice later
    b = builder.call(aten.select.int, a, 0, 0)  # 16 bytes
    c = builder.call(aten.add.Tensor, a, b)
    d = builder.call(aten.mul.Tensor, c, x)
    module = builder.finish(builder.call(aten.t.default, d))
    sizes, strided = crossing(operations(module.graph))
    assert sizes[:5] == [48, 48 + 16, 48, 48, 48]
    assert strided[:5] == [0, 0, 0, 0, 1]
