"""The moving average of the weights: that of torch in one process, on every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Pool
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fxpart
from fxpart.errors import FxpartError

DECAY = 0.7
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {"mesh": "none", "stages": 1},
    "pipeline": {"mesh": "none", "stages": 2},
    "tensor": {"mesh": "tp=2", "stages": 1},
    "zero 1": {"mesh": "dp=2", "stages": 1, "zero": 1},
    "zero 2": {"mesh": "dp=2", "stages": 2, "zero": 2},
    "zero 3": {"mesh": "dp=2", "stages": 1, "zero": 3},
}


class Tied(nn.Module):
    """An embedding that is also the output layer, a frozen layer, a buffer, odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 7)
        self.inner = nn.Sequential(nn.Linear(7, 10), nn.Tanh(), nn.Linear(10, 7))
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.head = nn.Linear(7, 13, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.full((), 2.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(self.inner(self.embedding(tokens)))
        return self.head(hidden * self.scale).mT


def model() -> Tied:
    torch.manual_seed(0)
    return Tied()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    tokens = torch.randint(13, (4, 5), generator=draw)
    return tokens, tokens.roll(1, 1)


def make_trainer(constraints: dict[str, Any], **options: Any) -> Any:
    ranks = constraints["stages"] * (2 if "=2" in constraints["mesh"] else 1)
    program = fxpart.compile(
        model(), f"local:{ranks}", example_inputs=batch(0), loss=nn.functional.cross_entropy,
        microbatches=1, constraints=constraints, check="off",
    )  # fmt: skip
    given = {"ema": DECAY, **options}
    return program.trainer(lambda ps: torch.optim.SGD(ps, lr=0.3, momentum=0.9), **given)


def torch_average(steps: int) -> dict[str, torch.Tensor]:
    """The average of torch over a loop in one process."""
    plain = model()
    averaged = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    optimizer = torch.optim.SGD(
        [p for p in plain.parameters() if p.requires_grad], lr=0.3, momentum=0.9
    )
    for step in range(steps):
        tokens, targets = batch(step)
        nn.functional.cross_entropy(plain(tokens), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        averaged.update_parameters(plain)
    return {name: t.detach() for name, t in averaged.module.state_dict().items()}


def check(found: dict[str, torch.Tensor], steps: int) -> None:
    expected = torch_average(steps)
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, atol=1e-6), name


def run(constraints: dict[str, Any], folder: str, saved: str = "") -> None:
    """Average three updates, save, and two more; or resume from the saved ones."""
    trainer = make_trainer(constraints)
    if saved:
        trainer.load_checkpoint(saved)
    else:
        check(trainer.ema_state_dict(), 0)
        for step in range(3):
            trainer.step(batch(step))
        trainer.save_checkpoint(folder)
    check(trainer.ema_state_dict(), 3)
    for step in range(3, 5):
        trainer.step(batch(step))
    first = trainer.ema_state_dict(first_only=True)
    assert bool(first) == (trainer.rank == 0)
    check(trainer.ema_state_dict(), 5)
    weights = trainer.state_dict()
    assert not torch.equal(weights["inner.0.weight"], trainer.ema_state_dict()["inner.0.weight"])
    trainer.close()


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_that_of_torch(layout: str, tmp_path: Path) -> None:
    """Also resumed, by the same plan and in one rank."""
    run(LAYOUTS[layout], str(tmp_path))
    for other in {layout, "one rank"}:
        run(LAYOUTS[other], str(tmp_path / "other"), str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pipeline", "zero 3"])
def test_over_gloo(layout: str, pool: Pool, tmp_path: Path) -> None:
    pool.run(run, LAYOUTS[layout], str(tmp_path))
    pool.run(run, LAYOUTS[layout], str(tmp_path / "other"), str(tmp_path))


def test_of_stages_that_update_alone(tmp_path: Path) -> None:
    """Flushed at each update as torch's; else the average of every stage's weights in turn."""
    flushed = make_trainer(LAYOUTS["pipeline"], weight_mode="flush")
    for step in range(3):
        flushed.step(batch(step))
    check(flushed.ema_state_dict(), 3)
    trainer = make_trainer(LAYOUTS["pipeline"], weight_mode="stash")
    expected: dict[str, torch.Tensor] = {}

    def follow(stage: int) -> None:
        for name, entry in trainer.parts.state.entries.items():
            if entry.trainable and entry.spec.owner == stage:
                weight = entry.copies[stage, 0].detach().clone()
                mean = expected.get(name)
                expected[name] = weight if mean is None else DECAY * mean + (1 - DECAY) * weight

    for (stage, _), weights in trainer.pipeline.stages.weights.items():
        weights.listeners.append(lambda updates, stage=stage: follow(stage))
    for step in range(6):
        trainer.step(batch(step))
    found = trainer.ema_state_dict()
    assert trainer.updates == 6 and len(expected) == 5
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, atol=1e-6), name
    trainer.save_checkpoint(tmp_path)
    other = make_trainer(LAYOUTS["pipeline"], weight_mode="stash")
    other.load_checkpoint(tmp_path)
    assert all(torch.equal(t, other.ema_state_dict()[name]) for name, t in found.items())


def make_stages() -> Any:
    """A trainer of two stages with weights that update alone."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    program = fxpart.compile(
        module, "local:2", example_inputs=rows(0), loss=nn.functional.cross_entropy,
        microbatches=1, constraints={"mesh": "none", "stage": "0=0;2=1"}, check="off",
    )  # fmt: skip
    return program.trainer("sgd", weight_mode="stash", ema=DECAY)


def rows(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=draw), torch.randint(4, (8,), generator=draw)


def run_after_a_skip(folder: str) -> list[bool]:
    """Whether each average is the weight after an update that only stage 0 has skipped."""
    trainer, left = make_stages(), [True]
    for module in trainer.parts.mesh_ranks[0].modules.values():
        for name, parameter in module.named_parameters():
            if name.startswith("p_0_weight"):
                parameter.register_hook(lambda g: g * float("nan") if left and left.pop() else g)
    trainer.step(rows(0))
    averages, weights = trainer.ema_state_dict(), trainer.state_dict()
    assert [report.skipped for report in trainer.report()] == [1, 0]
    trainer.save_checkpoint(folder)
    other = make_stages()
    other.load_checkpoint(folder)
    again = other.ema_state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in averages.items())
    for each in (trainer, other):
        each.step(rows(1))
    first, second = trainer.ema_state_dict(), other.ema_state_dict()
    assert all(torch.equal(second[name], tensor) for name, tensor in first.items())
    return [torch.equal(averages[name], weights[name]) for name in weights]


def test_an_average_of_a_skipped_first_update(tmp_path: Path) -> None:
    """It begins with the first update that is made; until then it is the weights."""
    assert all(run_after_a_skip(str(tmp_path)))


@pytest.mark.slow
def test_an_average_of_a_skipped_first_update_over_gloo(pool: Pool, tmp_path: Path) -> None:
    assert all(map(all, pool.run(run_after_a_skip, str(tmp_path))))


def test_a_rejected_update_is_not_averaged() -> None:
    trainer = make_trainer(LAYOUTS["one rank"])
    trainer.step(batch(0))
    before = trainer.ema_state_dict()
    trainer.accepts_update = lambda: False
    trainer.step(batch(1))
    after = trainer.ema_state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_checkpoint_without_an_average(tmp_path: Path) -> None:
    """The average begins with the next update; a trainer without one ignores it."""
    plain = make_trainer(LAYOUTS["one rank"], ema=None)
    plain.step(batch(0))
    plain.save_checkpoint(tmp_path)
    trainer = make_trainer(LAYOUTS["one rank"])
    trainer.step(batch(5))
    trainer.load_checkpoint(tmp_path)
    loaded = trainer.ema_state_dict()
    assert all(torch.equal(loaded[name], t) for name, t in plain.state_dict().items())
    trainer.step(batch(1))
    trainer.save_checkpoint(tmp_path)
    plain.load_checkpoint(tmp_path)
    with pytest.raises(FxpartError, match="without a moving average"):
        plain.ema_state_dict()


@pytest.mark.parametrize("name", ["microbatches", "schedule"])
def test_what_the_plan_sets_is_no_option(name: str) -> None:
    with pytest.raises(FxpartError, match="the plan sets it"):
        make_trainer(LAYOUTS["one rank"], **{name: 2})


@pytest.mark.parametrize("decay", [1.0, -0.1])
def test_decays_that_are_refused(decay: float) -> None:
    with pytest.raises(FxpartError, match="a decay is at least 0 and less than 1"):
        make_trainer(LAYOUTS["one rank"], ema=decay)


def test_queues_have_none() -> None:
    program = fxpart.compile(
        model(), "local:2", example_inputs=batch(0), loss=nn.functional.cross_entropy,
        microbatches=1, constraints={"mesh": "none", "stages": 2}, check="off",
    )  # fmt: skip
    with pytest.raises(FxpartError, match="a moving average of the weights"):
        program.trainer("sgd", routing="queue", ema=0.9)
