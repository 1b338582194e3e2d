"""Every call on the whole model between two steps: as after a flush, in modes that keep state."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_programs import bits
from torch import nn

import fxpart
from fxpart.errors import FxpartError
from fxpart.optim import BasisRotation, Muon

MODES = {"spectrain": 1, "2bw-ef": 2, "pipemare": 1}
OPTIMIZERS = {
    "spectrain": partial(Muon, lr=0.02),
    "2bw-ef": partial(BasisRotation, lr=0.02, refresh=2),
    "pipemare": partial(torch.optim.NAdam, lr=0.02, betas=(0.99, 0.999)),
}
CALLS: dict[str, Callable[[Any, Any, Path], object]] = {
    "state_dict": lambda t, b, f: t.state_dict(),
    "optimizer_state_dict": lambda t, b, f: t.optimizer_state_dict(),
    "load_state_dict": lambda t, b, f: t.load_state_dict(t.state_dict()),
    "load_optimizer": lambda t, b, f: t.load_optimizer_state_dict(t.optimizer_state_dict()),
    "save_checkpoint": lambda t, b, f: t.save_checkpoint(f),
    "load_checkpoint": lambda t, b, f: t.load_checkpoint(t.save_checkpoint(f)),
    "predict": lambda t, b, f: t.predict(b[:1]),
    "evaluate": lambda t, b, f: t.evaluate([b]),
    "eval_step": lambda t, b, f: t.eval_step(b),
    "report": lambda t, b, f: t.report(),
    "settle": lambda t, b, f: t.settle(),
}


def batches() -> list[Any]:
    draw = torch.Generator().manual_seed(0)
    pairs = torch.randn(7, 2, 4, 6, generator=draw)
    return [(x, y) for x, y in pairs]


@cache
def program(mode: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(6, 6), nn.Tanh())))
    made = fxpart.compile(
        model, "local:2", example_inputs=batches()[0], loss=nn.MSELoss(), mode="async",
        weights=mode, constraints={"mesh": "none", "stages": 2, "microbatches": MODES[mode]},
    )  # fmt: skip
    return model, made


def run(mode: str, call: Callable[[Any], object]) -> tuple[Any, object]:
    """Four steps, the call, three steps; the bits at the end, and what the call returned."""
    options = {"total_updates": 7} if mode == "pipemare" else {}
    scheduler = partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)
    trainer = program(mode)[1].trainer(OPTIMIZERS[mode], scheduler=scheduler, **options)
    for each in batches()[:4]:
        trainer.step(each)
    assert trainer.in_flight
    given = call(trainer)
    assert not trainer.in_flight and trainer.updates == 4
    for each in batches()[4:]:
        trainer.step(each)
    found = bits(trainer.state_dict())
    trainer.close()
    return found, given


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_call_in_the_stream_is_one_after_a_flush(mode: str, tmp_path: Path) -> None:
    expected, _ = run(mode, lambda trainer: trainer.drain())
    x, y = batches()[6]
    for name, call in CALLS.items():
        found, given = run(mode, lambda t, c=call, n=name: c(t, (x, y), tmp_path / n))  # type: ignore[misc]
        assert found == expected, name
        if name == "predict":
            _, state = run(mode, lambda trainer: trainer.state_dict())
            with torch.no_grad():
                plain = torch.func.functional_call(program(mode)[0], state, (x,))  # type: ignore[arg-type]
            torch.testing.assert_close(given, plain, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("call", ["gradients", "record"])
def test_what_has_no_meaning_in_a_stream_is_refused(call: str) -> None:
    trainer = program("spectrain")[1].trainer("sgd")
    for each in batches()[:3]:
        trainer.step(each)
    with pytest.raises(FxpartError) as raised:
        getattr(trainer, call)()
    assert raised.value.code == "FXP109"
    trainer.drain()
    trainer.close()
