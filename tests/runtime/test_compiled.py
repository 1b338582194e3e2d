"""Stages compiled by torch.compile: the numbers of eager, few compilations, clear refusals."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from model_families import FAMILIES
from precision_models import WIDTH, WORDS, tiny, words
from torch import nn

import fxpart
from fxpart import compat
from fxpart.api import Program
from fxpart.errors import FxpartError
from fxpart.runtime.executor import torch_compile
from fxpart.runtime.executor.torch_compile import StageCompilation
from fxpart.verification.verification_result import relative

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
    """aot_eager runs the same kernels; dropout is in the graphs and draws the same numbers."""
    losses, state, _ = train(program(0.1), EVEN)
    mine, found, report = train(program(0.1), EVEN, compile_stages="aot_eager")
    assert mine == losses
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    assert report is not None and not report.breaks and report.graphs == report.regions


@pytest.mark.parametrize("mode", ["stash", "spectrain-v2"])
def test_the_numbers_of_eager_without_flushes(mode: str) -> None:
    """Where a backward reads what its forward read, though updates have come between them."""
    found = []
    for backend in (False, "aot_eager"):
        trainer = program(0.1).trainer("sgd", weight_mode=mode, compile_stages=backend)
        losses = [trainer.step(words(8)) for _ in range(6)] + trainer.drain()
        report = trainer.report()
        found.append(([None if x is None else float(x) for x in losses], trainer.state_dict()))
        trainer.close()
    assert report[0].staleness == 1 and report[0].copies > 1
    (losses, state), (mine, compiled) = found
    assert mine == losses
    assert all(torch.equal(compiled[name], tensor) for name, tensor in state.items())


def test_recomputation_as_an_option_of_the_trainer() -> None:
    """A whole stage is recomputed, whose code calls compiled regions."""
    losses, state, _ = train(program(0.1), EVEN)
    mine, found, _ = train(program(0.1), EVEN, compile_stages="aot_eager", recompute="full")
    assert mine == losses
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


# Constraints, and the distinct regions of all stages.
KINDS = {
    "plain": ({"stages": 2}, 3),  # a layer; the model before and after the layers
    "recompute": ({"stages": 2, "recompute": "full"}, 9),
    "split backward": ({"stages": 2, "schedule": "zb-h1"}, 3),
    "tensor parallel": ({"stages": 1, "mesh": "tp=2"}, 4),
    "data parallel": ({"stages": 1, "mesh": "dp=2"}, 6),
}


@pytest.mark.parametrize("kind", KINDS)
def test_equal_layers_share_a_graph(kind: str) -> None:
    """GPT-2 with dropout in attention: one graph a region, no breaks, the numbers of eager."""
    constraints, regions = KINDS[kind]
    model, batch = FAMILIES["gpt2"].build(6)
    made = fxpart.compile(
        model, "local:2", example_kwargs=batch, constraints=constraints, microbatches=2,
        check="off",
    )  # fmt: skip
    runs = []
    for backend in (False, "aot_eager"):
        trainer = made.trainer("sgd", compile_stages=backend)
        runs.append(([trainer.step(batch).item() for _ in range(2)], trainer.state_dict()))
        report = trainer.compiled
        trainer.close()
    (losses, state), (mine, trained) = runs
    assert mine == losses
    assert all(torch.equal(trained[name], tensor) for name, tensor in state.items())
    assert report is not None and not report.breaks
    assert report.graphs == report.regions == regions


class _Draws(nn.Module):
    """Random ops that are no dropout: of a tensor, of sizes, and with a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.last = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.embed(x)
        found = found + torch.rand_like(found) + torch.randn(found.shape[-1], dtype=found.dtype)
        found = nn.functional.rrelu(found, training=True)
        return self.last(nn.functional.alpha_dropout(found, 0.1, training=True))


def test_other_random_ops_draw_the_same_numbers() -> None:
    made = tiny(2, _Draws(), microbatches=2)
    losses, state, _ = train(made, EVEN)
    mine, found, report = train(made, EVEN, compile_stages="aot_eager")
    assert report is not None and not report.breaks
    assert mine == losses
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def test_the_document_quotes_the_benchmark() -> None:
    folder = Path(__file__).parents[1] / "benchmarks" / "results"
    figures = json.loads((folder / "compiled_stages.json").read_text(encoding="utf-8"))["figures"]
    page = Path(fxpart.__file__).parent / "docs" / "converting_a_script.md"
    quoted = f"GPT-2 {figures['gpt2']['speedup']} and Llama {figures['llama']['speedup']} times"
    assert quoted in page.read_text(encoding="utf-8")


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
        ({"compile_stages": "aot_eager", "recompute": "selective"}, "inside of compiled regions"),
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
