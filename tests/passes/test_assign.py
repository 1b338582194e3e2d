"""assign: stages from starts, and every fault of the starts at once."""

from __future__ import annotations

import pytest
import torch
from fxpart.passes import PREPARE
from inplace_programs import Builder
from torch import fx, nn

from fxpart.errors import FxpartError
from fxpart.pipeline import KEY, NO_CUT_KEY, Level, PassManager

aten = torch.ops.aten


def prepared(layers: int = 5) -> fx.GraphModule:
    builder = Builder(**{f"w{i}": nn.Parameter(torch.eye(4)) for i in range(layers)})
    y = builder.input(3, 4)
    for i in range(layers):
        y = builder.call(aten.linear.default, y, builder.get(f"w{i}"))
    return PassManager().run(PREPARE, builder.finish(y))


def assigned(starts: str) -> fx.GraphModule:
    return PassManager().run(f'assign{{starts="{starts}"}}', prepared())


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
        ("0,3,3", ["they must increase"]),
        ("0,9", ["do not exist"]),
        ("0,x", ["not numbers"]),
        ("", ["not numbers"]),
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
        PassManager().run('assign{starts="0,2"}', module)
    PassManager().run('assign{starts="0,1,3"}', module)
