"""Ranks that make different calls, or one that raises alone: all end soon, and say who did what."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ranks import torchrun

SCRIPT = Path(__file__).with_name("disagreeing_ranks.py")
pytestmark = pytest.mark.slow
SECONDS = 20.0  # an exception or a disagreement is known on every rank within it

# By scene: what every rank prints.
CALLS = {
    "evaluates a stage alone": r"FXP501 .*0 called trainer.evaluate\(\) .*1 called trainer.step",
    "saves alone": r"FXP501 .*0 called trainer.step\(\) .*1 called trainer.save_checkpoint\(\)",
    "updates alone": r"FXP501 .*0 called trainer.update\(\) .*1 called trainer.step\(\)",
    "drops gradients alone": r"FXP501 .*rank 0: .*call 1 after 1 .*rank 1: .*call 1",
    "reads the whole model alone": r"trained",
    "fits while the other steps": r"FXP501 .*0 called trainer.fit\(\) .*1 called trainer.step\(\)",
    "deterministic alone": r"FXP501 .*rank 0: .*rank 1: .*deterministic",
    "failing factory": r"FXP115 .*where rank 1, optimizer .*LookupError: there is no group",
    "failing batches": r"FXP507 .*rank 1, .*EOFError: shard 1 ends early",
    "catches and goes on": r"trained",
}
# What rank 1 raises, and what rank 0 says of it; or rank 0 ends itself with the same words.
ALONE = {
    "trains without gradients": "torch.no_grad is active",
    "failing optimizer": "ArithmeticError: the state of rank 1 is gone",
    "failing optimizer, sharded": "ArithmeticError: the state of rank 1 is gone",
}


def run(name: str) -> tuple[dict[int, tuple[float, str]], str]:
    """By rank the seconds and what it printed; all that was written to stderr."""
    found = torchrun(SCRIPT, name, ranks=2, timeout=120)
    lines = re.findall(r"^rank (\d), ([\d.]+): (.*)$", found.stdout, re.M)
    return {int(rank): (float(seconds), text) for rank, seconds, text in lines}, found.stderr


@pytest.mark.parametrize("name", CALLS)
def test_every_rank_names_the_calls(name: str) -> None:
    said, stderr = run(name)
    assert sorted(said) == [0, 1], stderr
    for seconds, text in said.values():
        assert re.match(CALLS[name], text), text
        assert seconds < SECONDS


@pytest.mark.parametrize("name", ALONE)
def test_an_exception_of_one_rank_ends_all(name: str) -> None:
    said, stderr = run(name)
    assert ALONE[name].split(": ")[-1] in said[1][1], stderr
    if 0 in said:
        seconds, text = said[0]
        assert seconds < SECONDS and re.match(r"FXP(116|507) .*rank 1 .* raised", text), text
    else:
        text = stderr
        assert "ends itself" in text
    assert ALONE[name] in text
