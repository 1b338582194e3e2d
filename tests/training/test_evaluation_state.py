"""State that only evaluation reads: of the model, of a loaded state dict or of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxpart
from fxpart.errors import FxpartError

LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {"constraints": {"mesh": "none", "stages": 1}, "microbatches": 1},
    "pipeline": {"constraints": {"mesh": "none", "stages": 2}, "microbatches": 2},
    "replicas": {"constraints": {"mesh": "dp=2", "stages": 1, "zero": 1}, "microbatches": 2},
    "tensor": {"constraints": {"mesh": "tp=2", "stages": 1}, "microbatches": 1},
}


class Calibrated(nn.Module):
    """A layer, a scale and a buffer that training skips."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 8)
        self.adapter = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.scale = nn.Parameter(torch.randn(8))
        self.register_buffer("offset", torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        if not self.training:
            x = self.adapter(x) * self.scale + self.offset
        return self.second(x)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_evaluation_reads_state_that_training_skips(layout: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    batch = torch.randn(8, 4), torch.randn(8, 8)
    program = fxpart.compile(
        Calibrated(), "local:2", example_inputs=batch, loss=nn.MSELoss(), **LAYOUTS[layout]
    )
    trainer = program.trainer(lambda p: torch.optim.AdamW(p, lr=0.1))

    def check() -> None:
        plain = Calibrated()
        plain.load_state_dict(trainer.state_dict())
        plain.eval()
        with torch.no_grad():
            expected = plain(batch[0])
        torch.testing.assert_close(trainer.predict(batch[:1]), expected)
        loss = nn.functional.mse_loss(expected, batch[1])
        torch.testing.assert_close(trainer.eval_step(batch).float(), loss)

    try:
        trainer.step(batch)
        check()
        trainer.save_checkpoint(tmp_path / "saved")
        trainer.load_state_dict(Calibrated().state_dict())
        check()
        trainer.load_checkpoint(tmp_path / "saved")
        check()
        trainer.step(batch)
        check()
    finally:
        trainer.close()


def test_a_state_dict_has_the_names_and_shapes_of_the_model() -> None:
    """``code`` is no name of state in a graph; the trainer's messages have the model's names."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.code, self.head = nn.Linear(4, 8), nn.Linear(8, 1)
            self.extra = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.tanh(self.code(x)))

    model, batch = Named(), (torch.randn(4, 4), torch.randn(4, 1))
    program = fxpart.compile(model, "local:1", example_inputs=batch, loss=nn.MSELoss())
    trainer = program.trainer(lambda p: torch.optim.SGD(p, lr=0.1))
    state = trainer.state_dict()
    trainer.load_state_dict(state)
    assert set(state) == set(model.state_dict())
    for name in ("code.weight", "extra.weight"):
        for changed in ({**state, name: torch.zeros(1)}, {n: state[n] for n in state if n != name}):
            with pytest.raises(FxpartError) as refused:
                trainer.load_state_dict(changed)
            assert [p.where for p in refused.value.problems] == [name]
    with torch.no_grad():
        model.code.weight.zero_()
    with pytest.raises(FxpartError, match="the module's code.weight"):
        trainer.step(batch)
    trainer.close()
