"""Four, three, two and four ranks again: what moves is equal to the bit, and losses are one's."""

from __future__ import annotations

from pathlib import Path

import elastic_programs as programs
import pytest
import torch
from ranks import Pool
from safetensors.torch import save_model

import fxpart

# Pipeline and data parallel with ZeRO; pipeline; tensor parallel.
PLANS: dict[int, dict[str, int | float | str | bool]] = {
    4: {"mesh": "dp=2", "stages": 2, "zero": 1},
    3: {"mesh": "none", "stages": 3},
    2: {"mesh": "tp=2", "stages": 1},
}
EACH = 3


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program for each number of ranks, of one capture, and the weights to begin with."""
    folder = tmp_path_factory.mktemp("programs")
    first = fxpart.compile(
        programs.model(), "local:4", example_inputs=programs.batch(0),
        loss=torch.nn.functional.cross_entropy, microbatches=4, optimizer="adamw",
        cost_model="roofline", constraints=PLANS[4],
    )  # fmt: skip
    first.export(folder / "4")
    for ranks in (3, 2):
        again = first.replan(
            f"local:{ranks}", microbatches=4, constraints=PLANS[ranks], cost_model="roofline"
        )
        assert again.plan.world == ranks
        again.export(folder / str(ranks))
    save_model(programs.model(), str(folder / "weights.safetensors"))
    return folder


@pytest.mark.slow
def test_four_three_two_four(exported: Path, tmp_path: Path, pool: Pool) -> None:
    worlds = [4, 3, 2, 4]
    losses: list[float] = []
    for place, ranks in enumerate(worlds):
        first = place * EACH
        found = pool.run(
            programs.generation, str(exported / str(ranks)), str(exported / "weights.safetensors"),
            str(tmp_path / "run"), str(tmp_path / f"proof-{place}"), first, first + EACH,
            ranks=ranks, timeout=240,
        )  # fmt: skip
        assert all(row == found[0] for row in found)
        losses += found[0]
        if first:
            step = f"step-{first:010d}"
            wrong = programs.differences(
                tmp_path / "run" / step, tmp_path / f"proof-{place}" / step
            )
            assert not wrong, f"after {worlds[place - 1]} -> {ranks} ranks"
    assert losses == pytest.approx(programs.one_process(EACH * len(worlds)), rel=1e-5)
