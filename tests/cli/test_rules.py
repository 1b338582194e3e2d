"""``fxpart rules``: the table, coverage of targets, proposals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fxpart.passes.rules import RULES

from fxpart import cli

SOURCE = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(6, 8)

    def forward(self, x):
        return torch.linalg.solve(torch.eye(8), self.linear(x).T)

def make():
    return Model(), (torch.rand(4, 6),)
"""


def run(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> tuple[str, str]:
    assert cli.run(["rules", *arguments]) == status
    caught = capsys.readouterr()
    return caught.out, caught.err


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = run(capsys)
    assert f"{sum(map(len, RULES.values()))} ops in {len(RULES)} families" in out
    found: dict[str, Any] = json.loads(run(capsys, "--json")[0])
    assert found == {name: sorted(table) for name, table in RULES.items()}


@pytest.mark.slow
def test_coverage_of_a_target(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "own.py"
    target.write_text(SOURCE)
    out, _ = run(capsys, f"{target}:make")
    assert "none    aten.linalg_solve.default x1: replicated" in out
    assert "whole   aten.eye.default x1" in out
    found = json.loads(run(capsys, f"{target}:make", "--json")[0])[f"{target}:make"]
    assert found["flops"] == found["flops_cut"] == 2 * 4 * 6 * 8
    assert found["calls"] > found["ruled"] > found["cut"]
    (linear,) = [op for op in found["ops"] if op["op"] == "aten.linear.default"]
    assert linear["cuts"] == 1 and linear["flops"] == found["flops"]


def test_discover(capsys: pytest.CaptureFixture[str]) -> None:
    given = '{"A": "4x6x6", "B": "4x6x8"}'
    out, _ = run(capsys, "discover", "aten.linalg_solve", "--arguments", given)
    assert '"aten.linalg_solve": notation("a _o01 _o02, a _o11 b -> a _r01 b"' in out
    found = json.loads(run(capsys, "discover", "aten.fliplr", "--json")[0])
    assert found["notation"] == "a _o01 b -> a _r01 b"


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["discover"],
        ["discover", "aten.nope"],
        ["discover", "mm"],
        ["discover", "aten.mm.nope"],
        ["discover", "aten.chain_matmul"],
        ["discover", "aten.mm", "--arguments", "{"],
        ["discover", "aten.mm", "--arguments", "3"],
        ["no_such_file.py:make"],
    ],
)
def test_mistakes_are_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    _, err = run(capsys, *arguments, status=2)
    assert "FXP" in err
