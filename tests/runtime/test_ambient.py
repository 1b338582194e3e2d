"""Modes of torch around a trainer's calls: honored alike in every layout, or refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from mode_programs import (
    Context,
    batch,
    compiled,
    every_layout,
    network,
    off,
    plain,
    program,
    sgd,
)
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import fxpart
from fxpart.errors import FxpartError
from fxpart.runtime import Trainer
from fxpart.runtime.entry_point import ENTRY_POINTS
from fxpart.runtime.torch_modes import MODES, TorchModes


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def debug_mode() -> Iterator[None]:
    torch.set_deterministic_debug_mode("warn")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode("default")


@contextmanager
def float32_products() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class Doubled(TorchFunctionMode):
    """Changes what linear layers return."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        return 2 * found if function is nn.functional.linear else found


class Negated(TorchDispatchMode):
    """Changes what the hyperbolic tangent returns."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        return -found if function is torch.ops.aten.tanh.default else found


REFUSED: dict[str, Context] = {
    "autocast in bfloat16": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast in float16": lambda: torch.autocast("cpu", dtype=torch.float16),
    "no_grad": torch.no_grad,
    "gradients off": lambda: torch.set_grad_enabled(False),
    "inference_mode": torch.inference_mode,
    "default dtype": lambda: default_dtype(torch.float64),
    "with a device": lambda: torch.device("meta"),
    "default device": lambda: default_device("meta"),
    "function mode": Doubled,
    "dispatch mode": Negated,
    "operations counted": lambda: FlopCounterMode(display=False),
    "saved tensors": torch.autograd.graph.save_on_cpu,
}
HONORED: dict[str, Context] = {
    "autocast off": lambda: torch.autocast("cpu", enabled=False),
    "autocast of another device": lambda: torch.autocast("cuda", dtype=torch.float16),
    "gradients on": torch.enable_grad,
    "no inference_mode": lambda: torch.inference_mode(False),
    "the usual device": lambda: torch.device("cpu"),
    "deterministic algorithms": deterministic,
    "deterministic debug mode": debug_mode,
    "float32 products": float32_products,
    "anomaly detection": torch.autograd.detect_anomaly,
    "forked generators": torch.random.fork_rng,
}


@pytest.mark.slow
@every_layout
@pytest.mark.parametrize("name", REFUSED)
def test_refused_around_a_step_before_anything_changes(name: str, layout: str) -> None:
    trainer = program(layout).trainer(sgd)
    trainer.step(batch())
    before = trainer.state_dict()
    for call in (trainer.step, trainer.backward, lambda given: trainer.fit([given])):
        with pytest.raises(FxpartError) as caught, REFUSED[name]():
            call(batch())
        assert caught.value.code == "FXP116" and caught.value.problems[0].why
    assert off(trainer.state_dict(), before) == 0
    trainer.step(batch())
    assert off(trainer.state_dict(), plain(network(), 2, torch.enable_grad)) < 1e-6


@pytest.mark.slow
@every_layout
@pytest.mark.parametrize("name", HONORED)
@pytest.mark.filterwarnings("ignore")
def test_honored_around_a_step(name: str, layout: str) -> None:
    trainer = program(layout).trainer(sgd)
    with HONORED[name]():
        for _ in range(2):
            trainer.step(batch())
        assert float(trainer.eval_step(batch())) > 0
        wanted = plain(network(), 2, torch.enable_grad)
    assert off(trainer.state_dict(), wanted) < 1e-6


@pytest.mark.slow
@every_layout
@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_no_gradients_around_all_that_needs_none(around: Context, layout: str) -> None:
    """As in plain PyTorch: an evaluation, an optimizer's step, what reads and writes state."""
    model = network()
    with around():
        made = compiled(layout, model)
        trainer = made.trainer(sgd)
        first = trainer.state_dict()
    assert not any(tensor.is_inference() for tensor in first.values())
    trainer.backward(batch())
    with around():
        trainer.update()
        assert trainer.predict(batch()[:1]).shape == (8, 2)
        assert trainer.evaluate([batch()])["loss"] > 0
        state = trainer.state_dict()
        trainer.load_state_dict(state)
    trainer.step(batch())
    assert off(trainer.state_dict(), plain(network(), 2, torch.enable_grad)) < 1e-6


@pytest.mark.slow
@every_layout
def test_autocast_of_the_programs_own_precision(layout: str) -> None:
    """The program has the conversions already: the region changes nothing."""
    region = REFUSED["autocast in bfloat16"]
    inside, outside = program(layout, "bf16").trainer(sgd), program(layout, "bf16").trainer(sgd)
    for _ in range(2):
        with region():
            inside.step(batch())
        outside.step(batch())
    assert off(inside.state_dict(), outside.state_dict()) == 0
    assert off(inside.state_dict(), plain(network(), 2, region)) < 1e-2
    with pytest.raises(FxpartError, match="float16"), REFUSED["autocast in float16"]():
        inside.step(batch())


@pytest.mark.parametrize(
    "name", sorted(REFUSED.keys() - {"no_grad", "gradients off", "inference_mode", "default dtype"})
)
def test_refused_around_compile(name: str) -> None:
    with pytest.raises(FxpartError) as caught, REFUSED[name]():
        compiled("pipeline")
    assert caught.value.code == "FXP116"
    assert caught.value.problems[0].where == "fxpart.compile"


@pytest.mark.slow
def test_autocast_around_compile_and_replan_of_that_precision() -> None:
    with REFUSED["autocast in bfloat16"]():
        made = compiled("pipeline", precision="bf16")
        again = made.replan("local:1")
        with pytest.raises(FxpartError, match="FXP116"):
            program("pipeline").replan("local:1")
    trainer, wanted = again.trainer(sgd), program("pipeline", "bf16").trainer(sgd)
    trainer.step(batch())
    wanted.step(batch())
    assert off(trainer.state_dict(), wanted.state_dict()) < 1e-6


@pytest.mark.slow
def test_the_default_dtype_is_that_of_compile() -> None:
    compiled_before = program("pipeline")
    with default_dtype(torch.float64):
        with pytest.raises(FxpartError, match="was float32 when the program"):
            compiled_before.trainer(sgd)


def test_a_model_made_in_inference_mode_is_refused() -> None:
    with torch.inference_mode():
        model = network()
    with pytest.raises(FxpartError) as caught:
        compiled("pipeline", model)
    assert caught.value.code == "FXP116" and caught.value.problems[0].where == "0.weight"


@pytest.mark.slow
@every_layout
def test_anomaly_detection_finds_what_it_finds_in_a_module(layout: str) -> None:
    class Root(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sub(x).sqrt()  # its gradient is 0 * inf

    trainer = compiled(layout, nn.Sequential(*network(), Root())).trainer(sgd)
    before = trainer.state_dict()
    with pytest.warns(UserWarning, match="Anomaly"), pytest.raises(FxpartError) as caught:
        with torch.autograd.detect_anomaly():
            trainer.step(batch())
    assert caught.value.code == "FXP504" and "nan" in str(caught.value)
    assert off(trainer.state_dict(), before) == 0


@pytest.mark.slow
@every_layout
def test_denormal_numbers_are_flushed_in_every_thread(layout: str) -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot")
    torch.set_flush_denormal(False)
    model = nn.Sequential(*network(), nn.Hardtanh(-1e-40, 1e-40))
    made = compiled(layout, model)
    x, _ = batch()
    for flushed in (True, False, True):
        torch.set_flush_denormal(flushed)
        try:
            found, wanted = made.trainer(sgd).predict((x,)), model(x)
        finally:
            torch.set_flush_denormal(False)
        assert bool((found.view(torch.int32) << 1).any()) is not flushed
        assert torch.equal(found.view(torch.int32) << 1, wanted.view(torch.int32) << 1)


# -- the tables ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_asynchronous_trainer_refuses_the_same() -> None:
    made = fxpart.compile(
        network(), "local:2", example_inputs=batch(), loss=nn.MSELoss(), microbatches=1,
        constraints={"mesh": "none", "stages": 2}, mode="async",
    )  # fmt: skip
    trainer = made.trainer(sgd)
    trainer.step(batch())
    for name in ("autocast in bfloat16", "inference_mode", "default dtype"):
        with pytest.raises(FxpartError) as caught, REFUSED[name]():
            trainer.step(batch())
        assert caught.value.code == "FXP116"
    with torch.no_grad():
        assert trainer.evaluate([batch()])["loss"] > 0
    assert trainer.updates == 1


def test_every_public_call_is_an_entry_point() -> None:
    """A new method that computes or reads state belongs into the table, or here."""
    others = {
        "close", "record", "zero_grad", "pop_losses", "drain", "is_collective", "note_loaded",
        "prefetch",
    }  # fmt: skip
    for name in dir(Trainer):
        method = getattr(Trainer, name)
        if name.startswith("_") or not callable(method) or name in others:
            continue
        assert name in ENTRY_POINTS and hasattr(method, "__wrapped__"), name


def test_every_mode_has_a_reason_and_a_fix() -> None:
    assert all(mode.name and mode.fix and mode.refused for mode in MODES)
    assert not any(mode.read(TorchModes()) for mode in MODES)
