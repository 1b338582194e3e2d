"""Sharding rules of ops from outside fxpart: registered, installed, sound, used, and refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_calls import call
from fxpart.passes.rules import OP_RULES, REGISTERED, list_families, rule_of
from outside_op import NOTATION, OP, Net, make_rule
from rule_soundness import Example, check, node_of
from structure import ROOT

import fxpart
from fxpart.errors import FxpartError

NAME = OP.replace("::", ".")
BATCH = (torch.randn(8, 8, generator=torch.Generator().manual_seed(1)), torch.zeros(8, 4))


def example(rows: int = 4) -> Example:
    generator = torch.Generator().manual_seed(0)
    x, w = (
        torch.rand(*shape, generator=generator, dtype=torch.float64)
        for shape in ((rows, 6), (6, 4))
    )
    return Example(torch.ops.fxpart_outside.squared_product.default, (x, w))


@pytest.fixture(params=["notation", "maker"])
def registered(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param == "notation":
        fxpart.register_op_rule(OP, NOTATION)
    else:
        assert fxpart.register_op_rule(OP)(make_rule) is make_rule
    yield
    OP_RULES.unregister(NAME)


def compiled(mesh: str, microbatches: int | None = 2, **constraints: str) -> fxpart.Program:
    torch.manual_seed(0)
    return fxpart.compile(
        Net(), "local:2", example_inputs=BATCH, loss=torch.nn.functional.mse_loss,
        microbatches=microbatches, constraints={"mesh": mesh, **constraints},
    )  # fmt: skip


def test_without_a_rule_the_op_is_replicated() -> None:
    assert rule_of(node_of(example())) is None
    assert REGISTERED not in list_families()


def test_a_registered_rule_is_sound(registered: None) -> None:
    """The op is cut along every factor, run, recombined and compared, gradients included."""
    assert check(example()) >= 9
    assert list_families()[REGISTERED] == [NAME]


def test_an_unsound_rule_is_found() -> None:
    """The soundness test helper sees that a factor of the product cannot stand for two dims."""
    fxpart.register_op_rule(OP, "b _i, _i o -> b o")
    assert check(example()) > 0  # what is cut is right
    OP_RULES.unregister(NAME)
    fxpart.register_op_rule(OP, "i b, b o -> i o")
    assert check(example()) > 0  # other names of the same factors
    OP_RULES.unregister(NAME)
    fxpart.register_op_rule(OP, "b i, j o -> b o")
    try:
        with pytest.raises(AssertionError):
            check(example())
    finally:
        OP_RULES.unregister(NAME)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "annotation"), [("dp=2", ""), ("tp=2", "tp:S(1)"), ("tp=2", "tp:S(0)")]
)
def test_sharded_training_gives_the_results_of_one_process(
    registered: None, mesh: str, annotation: str
) -> None:
    constraints = {}
    if annotation:
        constraints["annotations"] = json.dumps({"annotations": {"weight": annotation}})
    program = compiled(mesh, **constraints)
    sharding = program.plan.sharding
    assert sharding is not None and not sharding.unruled
    if annotation:
        assert any("weight" in p.names and p.placements == annotation for p in sharding.placed)
    found = program.verify(steps=2, batch=BATCH)
    assert found.passed, found
    assert found.ranks == 2


@pytest.mark.slow
def test_without_a_rule_the_plan_says_so() -> None:
    """With more microbatches compile refuses: it does not know that the op keeps rows apart."""
    sharding = compiled("tp=2", microbatches=None).plan.sharding
    assert sharding is not None and [*sharding.unruled] == [NAME + ".default"]
    with pytest.raises(FxpartError, match="FXP114"):
        compiled("tp=2")


@pytest.mark.slow
def test_rule_coverage_of_the_command_line_knows_it(capsys: pytest.CaptureFixture[str]) -> None:
    target = "outside_op:make"
    try:
        found = json.loads(call(capsys, "rules", target, "--json")[0])[target]
        (row,) = [op for op in found["ops"] if "squared_product" in op["op"]]
        assert row["calls"] == row["cuts"] == 1
        assert NAME in call(capsys, "rules")[0]
    finally:
        OP_RULES.unregister(NAME)


@pytest.mark.slow
def test_an_installed_package_adds_a_rule(tmp_path: Path) -> None:
    info = tmp_path / "outside-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[fxpart.op_rules]\n{NAME} = outside_op:NOTATION\n")
    code = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT / 'tests/support')!r}, "
        f"{str(ROOT)!r}]\n"
        "from fxpart.passes.rules import rule_of\n"
        "from rule_soundness import node_of, Example\n"
        "import torch, outside_op\n"
        "op = torch.ops.fxpart_outside.squared_product.default\n"
        "print(rule_of(node_of(Example(op, (torch.ones(2, 3), torch.ones(3, 4))))).operands)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "((('b',), ('i',)), (('i',), ('o',)))", done.stderr


@pytest.mark.parametrize(
    ("op", "rule", "why"),
    [
        ("squared_product", "a -> a", "not the name of an op"),
        ("mylib::op.default", "a -> a", "not the name of an op"),
        ("mylib::op", "a, b", "no single '->'"),
        ("mylib::op", "a -> a -> a", "no single '->'"),
        ("mylib::op", "a (b c) -> a", "not the name of a factor"),
        ("mylib::op", "a a -> a", "names two dims"),
        ("mylib::op", "a -> a b", "is in no operand"),
        ("mylib::op", 3, "neither a notation nor a function"),
        ("aten::linear", "b i, o i, o -> b o", "exists already"),
    ],
)
def test_refused_rules(op: str, rule: Any, why: str) -> None:
    with pytest.raises(FxpartError, match=why) as caught:
        fxpart.register_op_rule(op, rule)
    assert [problem.code for problem in caught.value.problems] == ["FXP109"]


@pytest.mark.parametrize(
    ("rule", "why"),
    [("b i -> b o_", "is in no operand"), ("b i, i o, o -> b o", "3 tensor arguments"),
     ("b i, i o -> b o, b", "2 results"), ("b i, b o -> b o", "factor b has the sizes 4 and 6")],
)  # fmt: skip
def test_a_call_that_contradicts_its_notation(rule: str, why: str) -> None:
    with pytest.raises(FxpartError, match=why):
        fxpart.register_op_rule(OP, rule)
        try:
            rule_of(node_of(example()))
        finally:
            OP_RULES.unregister(NAME)


def test_a_call_with_other_dims_has_no_rule() -> None:
    fxpart.register_op_rule(OP, "b s i, i o -> b s o")
    try:
        assert rule_of(node_of(example())) is None
    finally:
        OP_RULES.unregister(NAME)
