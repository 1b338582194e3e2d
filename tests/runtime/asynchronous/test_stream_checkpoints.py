"""Checkpoints of a stream that has minibatches in flight: flushed, counted, continued."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import stream_programs
from hand_stages import batch, language
from ranks import Pool
from runtime_programs import bits
from stream_programs import make
from torch.optim import lr_scheduler

from fxpart.checkpoint.reader import Checkpoint
from fxpart.errors import FxpartError
from fxpart.runtime import InProcess, Trainer
from fxpart.runtime.training_run.options import Checkpoints

CUTS = {1: (4,), 2: (2, 2), 3: (1, 1, 2), 4: (1, 1, 1, 1)}


def stream(stages: int, *, here: bool = True, **options: Any) -> Trainer:
    transport: Any = InProcess(stages) if here else stream_programs.connect(stages)
    hand = language(CUTS[stages], tied=stages == 4)
    made = make(
        hand, transport, "adamw", **{"weights": "spectrain", "microbatches": 1, **options},
        evaluation=lambda: (hand.spec(), {i: hand.stages[i] for i in transport.local}),
    )  # fmt: skip
    assert made.is_asynchronous
    return made


def train(trainer: Trainer, first: int, last: int) -> None:
    for seed in range(first, last):
        trainer.step(batch(seed=seed))


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("mode", ["stash", "naive", "2bw", "2bw-ef", "flush"])
def test_a_checkpoint_counts_every_update(mode: str, stages: int, tmp_path: Path) -> None:
    """In its name, its manifest and the trainer that loads it, after any number of calls."""
    count = stages if mode.startswith("2bw") else 1
    for steps in range(1, 11):
        trainer = stream(stages, weights=mode, microbatches=count)
        train(trainer, 0, steps)
        path = trainer.save_checkpoint(tmp_path / str(steps))
        assert path.name == f"step-{steps:010d}"
        manifest = Checkpoint.open(path).manifest
        assert (manifest.step, manifest.values["trainer/updates"]) == (steps, steps)
        if steps % 5 == 0:
            again = stream(stages, weights=mode, microbatches=count)
            again.load_checkpoint(path)
            assert again.updates == trainer.updates == steps
            assert bits(again.state_dict()) == bits(trainer.state_dict())


def look(trainer: Trainer) -> None:
    """Evaluate; modules made by hand are those of training."""
    modules = [m for mesh_rank in trainer.parts.mesh_ranks for m in mesh_rank.modules.values()]
    for module in modules:
        module.eval()
    trainer.eval_step(batch(seed=3))
    for module in modules:
        module.train()


def saved_twice(folder: str, stages: int, here: bool) -> list[Any]:
    """Save, look at the model, go on, save again; against a run that is flushed at both places."""
    options: dict[str, Any] = {"scheduler": partial(lr_scheduler.StepLR, step_size=3, gamma=0.5)}
    trainer = stream(stages, here=here, **options)
    train(trainer, 0, 5)
    names = [trainer.save_checkpoint(folder).name]
    first = bits(trainer.state_dict())
    look(trainer)
    train(trainer, 5, 8)
    names.append(trainer.save_checkpoint(folder).name)
    last = bits(trainer.state_dict())
    train(trainer, 8, 10)
    end = bits(trainer.state_dict())
    trainer.close()
    found = []
    for name, expected, start in ((names[0], first, 5), (names[1], last, 8)):
        again = stream(stages, here=here, **options)
        again.load_checkpoint(Path(folder) / name)
        found.append(bits(again.state_dict()) == expected)
        if start == 5:
            train(again, 5, 8)
            again.drain()
        train(again, 8, 10)
        found.append(bits(again.state_dict()) == end)
        again.close()
    flushed = stream(stages, here=here, **options)
    for begin, stop in ((0, 5), (5, 8), (8, 10)):
        train(flushed, begin, stop)
        flushed.drain()
    found.append(bits(flushed.state_dict()) == end)
    flushed.close()
    return [names, found]


EXPECTED = [["step-0000000005", "step-0000000008"], [True] * 5]


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 4])
def test_saving_goes_on_as_after_a_flush(stages: int, tmp_path: Path) -> None:
    assert saved_twice(str(tmp_path), stages, True) == EXPECTED


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 4])
def test_ranks_save_a_running_stream(stages: int, tmp_path: Path, pool: Pool) -> None:
    found = pool.run(saved_twice, str(tmp_path), stages, False, ranks=stages, timeout=120.0)
    assert found == [EXPECTED] * stages


def test_saving_again_without_an_update_is_refused(tmp_path: Path) -> None:
    trainer = stream(2)
    train(trainer, 0, 3)
    trainer.save_checkpoint(tmp_path)
    with pytest.raises(FxpartError) as raised:
        trainer.save_checkpoint(tmp_path)
    assert raised.value.code == "FXP513"
    train(trainer, 3, 4)
    assert trainer.save_checkpoint(tmp_path).name == "step-0000000004"


def test_options_set_before_saving_are_saved(tmp_path: Path) -> None:
    """Of a scheduler in a loop the checkpoint has the rate of the next update."""
    trainer = stream(4)
    assert trainer.optimizer is not None
    first = trainer.optimizer.param_groups[0]["lr"]
    scheduler = lr_scheduler.ExponentialLR(trainer.optimizer, 0.5)
    for seed in range(5):
        trainer.step(batch(seed=seed))
        scheduler.step()
    path = trainer.save_checkpoint(tmp_path)
    again = stream(4)
    again.load_checkpoint(path)
    assert again.optimizer is not None
    assert again.optimizer.param_groups[0]["lr"] == first * 0.5**5
    state = trainer.optimizer_state_dict()
    assert [group["lr"] for group in state["param_groups"]] == [first * 0.5**5]
    for made in (trainer, again):
        train(made, 5, 8)
    assert bits(trainer.state_dict()) == bits(again.state_dict())
    fresh = stream(4)
    fresh.load_optimizer_state_dict(state)
    assert fresh.optimizer is not None and fresh.optimizer.param_groups[0]["lr"] == first * 0.5**5


def test_a_run_that_saves_itself_counts_alike(tmp_path: Path) -> None:
    batches = [batch(seed=seed) for seed in range(7)]
    trainer = stream(4)
    trainer.fit(batches, checkpoints=Checkpoints(tmp_path, every=3))
    names = sorted(path.name for path in tmp_path.rglob("step-*") if path.is_dir())
    steps = [Checkpoint.open(next(tmp_path.rglob(name))).manifest for name in names]
    assert steps and all(m.step == m.values["trainer/updates"] for m in steps)
    assert max(m.step for m in steps) == 7


@pytest.mark.parametrize("where", ["the trainer", "fit"])
def test_a_run_resumed_with_another_schedule_is_refused(where: str, tmp_path: Path) -> None:
    for gamma in (0.5, 0.4):
        schedule = partial(lr_scheduler.ExponentialLR, gamma=gamma)
        trainer = stream(2, **({"scheduler": schedule} if where == "the trainer" else {}))
        run = {"scheduler": schedule} if where == "fit" else {}
        data = [batch(seed=seed) for seed in range(4)]
        if gamma == 0.5:
            trainer.fit(data, steps=2, checkpoints=tmp_path, **run)
            continue
        with pytest.raises(FxpartError, match="scheduler gamma 0.4 instead of 0.5"):
            trainer.fit(data, checkpoints=tmp_path, **run)
