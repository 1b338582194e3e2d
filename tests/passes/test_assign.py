"""assign: stages from starts, and every fault of the starts at once."""

from __future__ import annotations

import pytest
import torch
from fxpart.passes import PREPARE, all_passes
from inplace_programs import Builder
from torch import fx, nn

from fxpart.compiler import KEY, NO_CUT_KEY, Level, PassManager
from fxpart.errors import FxpartError

aten = torch.ops.aten


def prepared(layers: int = 5) -> fx.GraphModule:
    builder = Builder(**{f"w{i}": nn.Parameter(torch.eye(4)) for i in range(layers)})
    y = builder.input(3, 4)
    for i in range(layers):
        y = builder.call(aten.linear.default, y, builder.get(f"w{i}"))
    return PassManager(all_passes()).run(PREPARE, builder.finish(y))


def branched() -> fx.GraphModule:
    """Blocks 0 and 1, and beside them 2 and 3, which block 4 adds to what comes of 1."""
    builder = Builder(**{f"w{i}": nn.Parameter(torch.eye(4)) for i in range(5)})
    inputs = [builder.input(3, 4), builder.input(3, 4)]
    ends = []
    for first, y in zip((0, 2), inputs, strict=True):
        for i in (first, first + 1):
            y = builder.call(aten.linear.default, y, builder.get(f"w{i}"))
        ends.append(y)
    both = builder.call(aten.linear.default, ends[0], builder.get("w4"))
    return PassManager(all_passes()).run(
        PREPARE, builder.finish(builder.call(aten.add.Tensor, both, ends[1]))
    )


def assigned(starts: str) -> fx.GraphModule:
    return PassManager(all_passes()).run(f'assign{{starts="{starts}"}}', prepared())


def test_blocks_get_stages_and_the_rest_none() -> None:
    module = assigned("0,2,3")
    assert module.meta["fxpart_level"] is Level.ASSIGNED
    stages = {}
    for node in module.graph.nodes:
        known = node.meta.get(KEY)
        if node.op == "call_function":
            stages.setdefault(known.block, known.stage)
            assert stages[known.block] == known.stage
        elif known is not None:
            assert known.stage is None
    assert stages == {0: 0, 1: 0, 2: 1, 3: 2, 4: 2}


@pytest.mark.parametrize(
    ("starts", "whys"),
    [
        ("1,2", ["the first stage must start with block 0"]),
        ("0,3,3", ["starts must increase"]),
        ("0,9", ["do not exist"]),
        ("0,x", ["not a list of numbers"]),
        ("", ["not a list of numbers"]),
        ("2,1,7", ["start with block 0", "must increase", "do not exist"]),
    ],
)
def test_all_faults(starts: str, whys: list[str]) -> None:
    with pytest.raises(FxpartError) as caught:
        assigned(starts)
    assert [p.code for p in caught.value.problems] == ["FXP303"] * len(whys)
    for problem, why in zip(caught.value.problems, whys, strict=True):
        assert why in problem.why


def test_closed_cuts_are_respected() -> None:
    module = prepared()
    module.meta[NO_CUT_KEY] = (1,)
    with pytest.raises(FxpartError, match="cannot be cut"):
        PassManager(all_passes()).run('assign{starts="0,2"}', module)
    PassManager(all_passes()).run('assign{starts="0,1,3"}', module)


def ordered(starts: str, order: str, module: fx.GraphModule | None = None) -> list[int]:
    """The stage of each block."""
    text = f'assign{{starts="{starts}",order="{order}"}}'
    module = PassManager(all_passes()).run(text, module or branched())
    known = [node.meta[KEY] for node in module.graph.nodes if node.op == "call_function"]
    stages = {notes.block: notes.stage for notes in known}
    return [stages[block] for block in sorted(stages)]


def test_starts_count_in_the_order_given() -> None:
    assert ordered("0,2,3", "0,1,2,3,4") == [0, 0, 1, 2, 2]
    assert ordered("0,2,4", "2,3,0,1,4") == [1, 1, 0, 0, 2]
    assert ordered("0,2,4", "0,2,1,3,4") == [0, 1, 0, 1, 2]


def test_a_reader_is_not_before_what_it_reads() -> None:
    with pytest.raises(FxpartError) as caught:
        ordered("0,2,4", "1,3,0,2,4")
    assert [p.code for p in caught.value.problems] == ["FXP303"] * 2
    assert "block 1 reads from block 0 of a later stage" in str(caught.value)


@pytest.mark.parametrize("order", ["0,1,2", "0,1,2,3,3", "0,1,2,3,5", "0,1,2,3,x", "0,1,2,3,4,5"])
def test_an_order_names_every_block_once(order: str) -> None:
    with pytest.raises(FxpartError) as caught:
        ordered("0,2", order)
    assert [p.code for p in caught.value.problems] == ["FXP303"]


def test_closed_cuts_are_respected_in_any_order() -> None:
    module = branched()
    module.meta[NO_CUT_KEY] = (1,)
    with pytest.raises(FxpartError, match="cannot be cut"):
        ordered("0,2", "0,1,2,3,4", module)
    assert ordered("0,3", "0,1,2,3,4", module) == [0, 0, 0, 1, 1]
    assert ordered("0,3", "0,2,1,3,4", module) == [0, 0, 0, 1, 1]
