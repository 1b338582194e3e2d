"""CONTRIBUTING shows an op rule and a cost model as diffs, which work when they are applied."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from contributing_diffs import patched, read_diffs

OP_RULE, COST_MODEL = read_diffs("passes/rules/"), read_diffs("costmodels/")

CHECK_RULE = """
from rule_drawing import Draw
from rule_examples_products import EXAMPLES
from rule_soundness import check

cut = [check(EXAMPLES["aten.linalg_vecdot"](Draw(seed)), limit=8) for seed in range(3)]
assert sum(cut) > 6, cut
"""

USE_MODEL = """
import torch
import fxpart

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
batch = (torch.randn(4, 8), torch.randn(4, 8))
program = fxpart.compile(
    model, "local:2", example_inputs=batch, loss=torch.nn.functional.mse_loss,
    cost_model="traffic", constraints={"mesh": "none", "stages": 2},
)
assert program.plan.provenance["compute"] == "traffic", program.plan.provenance
assert program.verify(steps=1, batch=batch).exact
"""


def run(code: str, source: Path) -> None:
    """Run a script against a copy of the product."""
    paths = os.pathsep.join((str(source), str(source / "tests" / "support")))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=source, capture_output=True, text=True, timeout=250,
        env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_each_is_one_short_diff() -> None:
    for diffs in (OP_RULE, COST_MODEL):
        assert len(diffs) == 1
        assert len(diffs[0].splitlines()) < 30


@pytest.mark.slow
def test_the_diff_adds_an_op_rule(tmp_path: Path) -> None:
    """The rule passes the numeric soundness test with the example of the diff."""
    run(CHECK_RULE, patched(OP_RULE, tmp_path / "source"))


@pytest.mark.slow
def test_the_diff_adds_a_cost_model(tmp_path: Path) -> None:
    """A model is compiled with it by name, and trains as in one process."""
    run(USE_MODEL, patched(COST_MODEL, tmp_path / "source"))
