"""Stages compiled by torch.compile: the numbers of eager, few compilations, clear refusals."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from precision_models import WIDTH, WORDS, tiny, words
from torch import nn

from fxpart import compat
from fxpart.api import Program
from fxpart.errors import FxpartError
from fxpart.runtime.executor import torch_compile
from fxpart.runtime.executor.torch_compile import StageCompilation
from fxpart.verification.comparison import relative

pytestmark = pytest.mark.slow  # torch.compile takes seconds
EVEN, UNEVEN = (8, 8), (8, 7, 5, 6, 8)  # rows of each step's batch, cut into two microbatches


@cache
def program(dropout: float = 0.0) -> Program:
    """A small model on two stages."""
    layers = (nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout), nn.Linear(WIDTH, WORDS))
    return tiny(2, nn.Sequential(nn.Embedding(WORDS, WIDTH), *layers), microbatches=2)


def train(
    made: Program, rows: Sequence[int], **options: Any
) -> tuple[list[float], dict[str, Any], StageCompilation | None]:
    """Losses of batches of so many rows, parameters at the end, and what was compiled."""
    trainer = made.trainer("sgd", **options)
    losses = [float(trainer.step(words(count))) for count in rows]
    state, found = trainer.state_dict(), trainer.compiled
    trainer.close()
    return losses, state, found


def test_the_numbers_of_eager_with_random_ops() -> None:
    """aot_eager runs the same kernels; dropout stays seeded op by op, between the graphs."""
    losses, state, _ = train(program(0.1), EVEN)
    mine, found, report = train(program(0.1), EVEN, compile_stages="aot_eager")
    assert mine == losses
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    assert report is not None and any("seeded" in why or "disable" in why for why in report.breaks)


def test_sizes_that_vary_do_not_compile_each_time() -> None:
    _, _, report = train(program(), UNEVEN, compile_stages="aot_eager")
    assert report is not None and not report.breaks
    assert 4 <= report.graphs <= 6  # of 20 calls: each stage at one size, then at symbols


@pytest.mark.skipif(compat.compiler_fault("inductor") is not None, reason="no compiler")
def test_inductor_is_near() -> None:
    losses, state, _ = train(program(), EVEN)
    mine, found, report = train(program(), EVEN, compile_stages=True)
    assert report is not None and report.backend == "inductor" and report.graphs
    assert mine == pytest.approx(losses, rel=1e-5)
    assert max(relative(found[name], tensor) for name, tensor in state.items()) < 1e-5


def test_what_cannot_be_compiled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for options, words_of in (
        ({"compile_stages": "nope"}, "no such backend"),
        ({"compile_stages": "aot_eager", "recompute": "full"}, "piece by piece"),
    ):
        with pytest.raises(FxpartError, match="FXP109") as found:
            program().trainer("sgd", **options)
        assert words_of in found.value.problems[0].why
    monkeypatch.setattr(
        torch_compile, "compiler_fault", lambda backend, kind: "there is no compiler"
    )
    with pytest.raises(FxpartError, match="FXP601") as missing:
        program().trainer("sgd", compile_stages=True)
    assert "there is no compiler" in missing.value.problems[0].why


def test_stages_of_several_ranks_are_refused() -> None:
    shared = tiny(1, constraints={"mesh": "dp=2", "stages": 1})
    with pytest.raises(FxpartError, match="FXP109") as found:
        shared.trainer("sgd", compile_stages="aot_eager")
    assert "call collectives inside" in found.value.problems[0].why
