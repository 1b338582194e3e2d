"""A loop of accelerate by a plan: losses and weights of the plain Accelerator."""

from __future__ import annotations

import importlib.util
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Pool

if any(importlib.util.find_spec(name) is None for name in ("transformers", "accelerate")):
    pytest.skip("transformers and accelerate are not installed", allow_module_level=True)

import accelerate_programs as programs
from integration_programs import make_model

from fxpart.errors import FxpartError
from fxpart.integrations.accelerate import PlannedAccelerator

pytestmark = pytest.mark.slow
TWO_STAGES = {"cluster": "local:2", "constraints": {"stages": 2}, "check": "off"}


@cache
def plain() -> programs.Numbers:
    return programs.train(tempfile.mkdtemp())


def check(mine: programs.Numbers, theirs: programs.Numbers, first: int = 0) -> None:
    for one, other in zip(mine[:3], theirs[:3], strict=True):
        assert one == pytest.approx(other[len(other) - len(one) :], rel=1e-5, abs=1e-6)
    for one, other in zip(mine[3], theirs[3], strict=True):
        assert torch.tensor(one) == pytest.approx(torch.tensor(other), abs=1e-5)


def test_the_loop_trains_as_with_accelerate(tmp_path: Path) -> None:
    """Accumulation with a short last one, clipping, a scheduler, evaluation, a resumed run."""
    check(programs.train(str(tmp_path), options=TWO_STAGES), plain())
    resumed = programs.train(str(tmp_path / "b"), options=TWO_STAGES, resume=str(tmp_path))
    assert len(resumed[0]) == len(plain()[0]) // 2
    check(resumed, plain())


def test_states_are_those_of_accelerate(tmp_path: Path) -> None:
    """Either loads what the other has saved."""
    programs.train(str(tmp_path / "planned"), options=TWO_STAGES)
    check(programs.train(tempfile.mkdtemp(), resume=str(tmp_path / "planned")), plain())
    programs.train(str(tmp_path / "plain"))
    again = programs.train(tempfile.mkdtemp(), options=TWO_STAGES, resume=str(tmp_path / "plain"))
    check(again, plain())


@pytest.mark.parametrize("constraints", [{"stages": 2}, {"dp": 2}], ids=str)
def test_two_ranks(pool: Pool, tmp_path: Path, constraints: dict[str, int]) -> None:
    """Half the rows per process give the same global batch; the plain one runs data-parallel."""
    options = {**TWO_STAGES, "constraints": constraints}
    theirs = pool.run(programs.train, str(tmp_path / "plain"), None, "", 2)
    mine = pool.run(programs.train, str(tmp_path / "planned"), options, "", 2)
    for one, other in zip(mine, theirs, strict=True):
        check(one, other)
        check(one, plain())
    resumed = pool.run(
        programs.train, str(tmp_path / "again"), options, str(tmp_path / "planned"), 2
    )
    for one in resumed:
        check(one, plain())


def test_a_loss_outside_of_the_model() -> None:
    """The five lines that change where the script computes the loss itself."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    start = {name: t.clone() for name, t in model.state_dict().items()}
    data = torch.utils.data.TensorDataset(torch.randn(10, 8), torch.randint(3, (10,)))
    accelerator = PlannedAccelerator(cpu=True, loss=torch.nn.functional.cross_entropy, **TWO_STAGES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    planned, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for x, y in loader:
        loss = planned(x, y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    planned.eval()
    outputs, evaluated = planned(data[:][0]), planned(*data[:])
    trained = accelerator.unwrap_model(planned)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    model.load_state_dict(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for index, (x, y) in enumerate(torch.utils.data.DataLoader(data, batch_size=4)):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert losses[index] == pytest.approx(loss.item(), rel=1e-6)
    for one, other in zip(trained.parameters(), model.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    assert torch.allclose(outputs, model(data[:][0]), atol=1e-6)
    known = torch.nn.functional.cross_entropy(model(data[:][0]), data[:][1])
    assert evaluated.item() == pytest.approx(known.item(), rel=1e-6)


def prepared(**options: Any) -> Any:
    accelerator = PlannedAccelerator(cpu=True, **{**TWO_STAGES, **options})
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return accelerator, *accelerator.prepare(model, optimizer)


def test_processes_that_accelerate_does_not_use(monkeypatch: pytest.MonkeyPatch) -> None:
    torchrun = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}
    PlannedAccelerator(cpu=True)  # Its state, of one process, is shared by the next.
    for name, value in {**torchrun, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(FxpartError, match="started 2 processes"):
        PlannedAccelerator(cpu=True)


def test_what_the_loop_must_not_do() -> None:
    accelerator, model, optimizer = prepared()
    batch = {"input_ids": torch.randint(96, (4, 12))}
    batch["labels"] = batch["input_ids"]
    outputs = model(**batch)
    assert outputs["loss"] is outputs.loss
    for wrong in (outputs.loss * 2, torch.zeros(())):
        with pytest.raises(FxpartError, match="not the loss of the last call"):
            accelerator.backward(wrong)
    with pytest.raises(FxpartError, match="only the loss leaves the stages"):
        _ = outputs.logits
    with pytest.raises(FxpartError, match=r"accelerator\.backward was not called"):
        optimizer.step()
    with pytest.raises(FxpartError, match="prepared another model"):
        accelerator.prepare(torch.nn.Linear(2, 2))
    with pytest.raises(FxpartError, match="prepared another optimizer"):
        accelerator.prepare(torch.optim.SGD(make_model().parameters(), lr=0.1))
    with pytest.raises(FxpartError, match="no such argument"):
        PlannedAccelerator(cpu=True, gradient_accumulate=2)
    with pytest.raises(FxpartError, match="how the model and the batch are divided"):
        PlannedAccelerator(cpu=True, split_batches=True)
