"""Saving and loading in one process: what is kept, what is refused, what failures leave behind."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_trainers import everything, held, mesh_ranks, pipeline, steps, stream
from hand_stages import batch, language
from runtime_programs import make

from fxpart.checkpoint import folder
from fxpart.checkpoint.manifest import NAME, CheckpointManifest
from fxpart.checkpoint.reader import Checkpoint
from fxpart.errors import FxpartError
from fxpart.runtime import InProcess, Trainer
from fxpart.runtime.checkpointing.loader import restore, restore_newest
from fxpart.runtime.checkpointing.optimizer_tensors import (
    iterate_optimizer_tensors,
    map_optimizer_tensors,
)
from fxpart.runtime.checkpointing.saver import Saver
from fxpart.runtime.checkpointing.snapshot import StagingBuffers, take_snapshot
from fxpart.runtime.stateful_trainer import StatefulTrainer


def problems(do: Callable[[], object]) -> list[tuple[str, str]]:
    """(code, why) of what it raises."""
    with pytest.raises(FxpartError) as caught:
        do()
    return [(p.code, p.why) for p in caught.value.problems]


def flip(path: Path, name: str = "rank-00001.safetensors") -> None:
    data = bytearray((path / name).read_bytes())
    data[-3] ^= 1
    (path / name).write_bytes(data)


def test_a_save_is_of_the_moment_and_two_are_kept(tmp_path: Path) -> None:
    trainer = pipeline("two")
    saver = Saver(trainer, tmp_path)
    states = {}
    for seed in range(4):
        steps(trainer, (seed,))
        saver.save(trainer.updates)
        states[trainer.updates] = everything(trainer)
        steps(trainer, (50 + seed,))  # in place, while the thread may still write
    saver.finish()
    assert (saver.last, saver.problems) == (7, [])
    assert [folder.step_of(path) for path in folder.list_complete(tmp_path)] == [7, 5]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-0000000005", "step-0000000007"]
    for step in (5, 7):
        assert held(tmp_path / folder.step_name(step)) == states[step]


def test_staging_is_used_again() -> None:
    """A second save allocates nothing; without staging the pieces are the trainer's own memory."""
    trainer = mesh_ranks("tp")
    steps(trainer, (0, 1), lambda seed: __import__("hand_lanes").batch(12, seed=seed))
    staging = StagingBuffers()
    first, second = take_snapshot(trainer, staging), take_snapshot(trainer, staging)
    places = [
        {p.key: p.data.ctypes.data for p in taken.pieces[0]}  # type: ignore[union-attr]
        for taken in (first, second)
    ]
    assert places[0] == places[1]
    (piece,) = [p for p in take_snapshot(trainer).pieces[0] if p.key == "model/up.bias"]
    parameter = trainer.parts.state.entries["up.bias"].copies[0, 0]
    assert piece.data.ctypes.data == parameter.data_ptr()  # type: ignore[union-attr]


@pytest.mark.parametrize("strict", [False, True])
def test_a_folder_that_cannot_be_made(strict: bool, tmp_path: Path) -> None:
    """Where a file stands in its place: the save fails, the training does not."""
    root = tmp_path / "checkpoints"
    root.write_text("")
    trainer, other = pipeline("two"), pipeline("two")
    saver = Saver(trainer, root, strict=strict)
    steps(trainer, (0,))
    steps(other, (0,))
    saver.save(1)
    if strict:
        with pytest.raises(FxpartError, match="FXP513"):
            saver.save(1)
    saver.finish()
    assert saver.last is None
    assert [p.code for p in saver.problems] == ["FXP513"]
    root.unlink()
    assert steps(trainer, (1,)) == steps(other, (1,))
    saver.save(2, wait=True)
    assert saver.last == 2
    assert held(root / folder.step_name(2)) == everything(other)


def test_gradients_that_wait_are_not_lost_silently(tmp_path: Path) -> None:
    trainer = pipeline("two")
    assert isinstance(trainer, Trainer)
    trainer.backward(batch())
    ((code, why),) = problems(lambda: trainer.save_checkpoint(tmp_path))
    assert code == "FXP109"
    assert "gradients of 1 batches" in why
    trainer.update()
    trainer.save_checkpoint(tmp_path)


def test_a_step_is_saved_once(tmp_path: Path) -> None:
    trainer = pipeline("two")
    steps(trainer, (0,))
    path = trainer.save_checkpoint(tmp_path)
    assert path.name == "step-0000000001"
    assert problems(lambda: trainer.save_checkpoint(tmp_path)) == [
        ("FXP513", "the checkpoint exists already")
    ]


def test_what_an_earlier_process_left_is_not_taken(tmp_path: Path) -> None:
    """A process was killed while it saved the same step: nothing of its files gets in."""
    old = pipeline("four")
    steps(old, (3,))
    old.save_checkpoint(tmp_path / "other")
    partial = folder.begin(tmp_path, 1, 0)
    for file in (tmp_path / "other" / folder.step_name(1)).glob("rank-*"):
        (partial / file.name).write_bytes(file.read_bytes())
    (partial / "rank-00003.failed").touch()
    new = pipeline("four")
    steps(new, (0,))
    saved = new.save_checkpoint(tmp_path)
    assert held(saved) == everything(new)


def test_another_model_or_optimizer_is_refused_before_anything_changes(tmp_path: Path) -> None:
    old = pipeline("two")
    steps(old, (0,))
    path = old.save_checkpoint(tmp_path)

    other = mesh_ranks("pipeline")
    before = everything(other)
    found = problems(lambda: other.load_checkpoint(path))
    assert {code for code, _ in found} == {"FXP512"}
    assert (
        "FXP512",
        "embed.weight has shape [11, 8] in the checkpoint and [7, 6] in the model",
    ) in found
    assert ("FXP512", "up.bias is missing in the checkpoint") in found
    assert ("FXP512", "the model has no tensor mix.bias of the checkpoint") in found
    assert everything(other) == before

    sgd = pipeline("two", "sgd")
    assert problems(lambda: sgd.load_checkpoint(path)) == [
        ("FXP512", "the checkpoint has the optimizer AdamW, the trainer SGD")
    ]


def test_without_an_optimizer_there_is_the_model(tmp_path: Path) -> None:
    """To evaluate what was trained; and a model without optimizer state into a trainer that has."""
    old = pipeline("four")
    steps(old, (0, 1))
    old.save_checkpoint(tmp_path / "a")
    bare = make(language((2, 2)), InProcess(2), optimizer=None)
    bare.load_checkpoint(tmp_path / "a")
    assert bare.state_dict().keys() == old.state_dict().keys()
    assert all(torch.equal(t, old.state_dict()[n]) for n, t in bare.state_dict().items())
    bare.save_checkpoint(tmp_path / "b")
    new = pipeline("four")
    new.load_checkpoint(tmp_path / "b")
    assert all(torch.equal(t, old.state_dict()[n]) for n, t in new.state_dict().items())


def test_damage_leads_to_the_checkpoint_before(tmp_path: Path) -> None:
    trainer = pipeline("two")
    states = []
    for seed in range(3):
        steps(trainer, (seed,))
        trainer.save_checkpoint(tmp_path, {"seed": seed})
        states.append(everything(trainer))
    flip(tmp_path / folder.step_name(3))
    (tmp_path / folder.step_name(2) / NAME).unlink()
    new = pipeline("four")
    checkpoint, extra = restore_newest(new, tmp_path)
    assert (extra, checkpoint.manifest.step) == ({"seed": 0}, 1)
    assert everything(new) == states[0]
    assert {p.code for p in checkpoint.skipped} == {"FXP510"}
    assert "rank-00001.safetensors" in checkpoint.skipped[0].where
    flip(tmp_path / folder.step_name(1))
    found = problems(lambda: new.load_checkpoint(tmp_path))
    assert [code for code, _ in found] == ["FXP511", "FXP510", "FXP510", "FXP510"]
    assert found[0][1] == "all 3 checkpoints are damaged"
    assert problems(lambda: new.load_checkpoint(tmp_path / "none"))[0][0] == "FXP511"
    one = problems(lambda: new.load_checkpoint(tmp_path / folder.step_name(3)))
    assert [code for code, _ in one] == ["FXP510"]


def test_a_runs_folder_is_as_good(tmp_path: Path) -> None:
    trainer = pipeline("two")
    steps(trainer, (0,))
    trainer.save_checkpoint(tmp_path / "checkpoints", {"a": (1, float("inf"))})
    assert pipeline("four").load_checkpoint(tmp_path) == {"a": (1, float("inf"))}


class Factored(torch.optim.Optimizer):
    """State of all sorts: vectors of another shape, numbers, text, nothing, no state at all."""

    def __init__(self, params: Any, lr: Any = 0.1) -> None:
        super().__init__(params, {"lr": lr, "name": "x", "pair": (1, 2.5)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None or p.dim() < 2:
                    continue
                state = self.state[p]
                state.setdefault("rows", torch.zeros(p.shape[0], dtype=torch.float64))
                state["rows"] += p.grad.square().mean(1)
                state["count"] = state.get("count", 0) + 1
                state["factor"] = 0.1 * state["count"]
                state["last"] = None if state["count"] == 1 else "again"
                p -= group["lr"] * p.grad / (state["rows"].sqrt().to(p.dtype)[:, None] + 1e-3)


def test_odd_state_and_options(tmp_path: Path) -> None:
    """Whatever an optimizer keeps, as its own types; a rate that is a tensor stays one."""

    def made(cut: tuple[int, ...], lr: float) -> Trainer:
        def optimizer(params: Any) -> Any:
            return Factored(params, torch.tensor(lr))

        return make(language(cut), InProcess(len(cut)), optimizer=optimizer)

    old = made((2, 2), 0.125)
    steps(old, range(2))
    old.save_checkpoint(tmp_path)
    new = made((1, 1, 1, 1), 0.5)
    steps(new, (4,))
    new.load_checkpoint(tmp_path)
    assert old.optimizer is not None
    assert new.optimizer is not None
    rate, pair = (new.optimizer.param_groups[0][key] for key in ("lr", "pair"))
    assert torch.equal(rate, torch.tensor(0.125))
    assert pair == (1, 2.5)
    assert everything_odd(new) == everything_odd(old)
    assert steps(new, (5, 6)) == steps(old, (5, 6))


def everything_odd(trainer: Trainer) -> dict[str, Any]:
    return {
        holder.name: {
            k: v.tolist() if isinstance(v, torch.Tensor) else v
            for k, v in optimizer.state.get(parameter, {}).items()
        }
        for optimizer, _, parameter, holder in iterate_optimizer_tensors(
            trainer, map_optimizer_tensors(trainer)
        )
    }


class Listed(torch.optim.SGD):
    """Keeps a list of tensors, as LBFGS does."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = [p.detach().clone()]


def test_state_that_no_checkpoint_holds(tmp_path: Path) -> None:
    trainer = make(language((2, 2)), InProcess(2), optimizer=lambda p: Listed(p, lr=0.1))
    steps(trainer, (0,))
    ((code, why),) = problems(lambda: trainer.save_checkpoint(tmp_path))
    assert code == "FXP513"
    assert "old" in why
    assert not list(tmp_path.glob("step-*"))
    assert not list(tmp_path.glob(".partial*/rank-*"))


def test_groups_come_back_by_names(tmp_path: Path) -> None:
    groups = [{"params": "*bias", "lr": 0.5, "weight_decay": 0.0}, {"lr": 0.25}]
    old = make(language((2, 2)), InProcess(2), groups=groups)
    steps(old, (0,))
    assert old.optimizer is not None
    old.optimizer.param_groups[0]["lr"] = 0.0625
    old.save_checkpoint(tmp_path)
    new = make(language((1, 1, 1, 1)), InProcess(4), groups=groups)
    new.load_checkpoint(tmp_path)
    assert new.optimizer is not None
    assert [g["lr"] for g in new.optimizer.param_groups] == [0.0625, 0.25]
    assert steps(new, (5,)) == steps(old, (5,))


def test_copies_are_told(tmp_path: Path) -> None:
    told: list[tuple[int, Path, CheckpointManifest]] = []

    class Keeper:
        def keep(self, step: int, folder: Path, manifest: CheckpointManifest) -> None:
            told.append((step, folder, manifest))

    trainer = pipeline("two")
    saver = Saver(trainer, tmp_path, copies=Keeper(), fingerprint="abc", plan_text="{}", keep=0)
    saver.save(0, {"x": 1})
    saver.finish()
    ((step, path, manifest),) = told
    assert (step, path) == (0, tmp_path / folder.step_name(0))
    assert Checkpoint.open(path).manifest.tensors == manifest.tensors
    assert (manifest.fingerprint, manifest.extra) == ("abc", {"x": 1})
    assert Checkpoint.open(path).plan() == "{}"


def test_buffers_that_are_not_saved_with_the_model_go_on(tmp_path: Path) -> None:
    def made() -> StatefulTrainer:
        trainer = pipeline("two")
        for name in ("norm.running_mean", "norm.running_var"):
            entry = trainer.parts.state.entries[name]
            spec = entry.spec.__class__(
                **{f: getattr(entry.spec, f) for f in entry.spec.__struct_fields__}
                | {"persistent": False}
            )
            object.__setattr__(entry, "spec", spec)
        return trainer

    old, new = made(), made()
    steps(old, range(2))
    old.save_checkpoint(tmp_path)
    new.load_checkpoint(tmp_path)
    assert "norm.running_mean" not in new.state_dict()
    for name in ("norm.running_mean", "norm.running_var"):
        mine, theirs = (next(iter(t.parts.state.entries[name].copies.values())) for t in (new, old))
        assert torch.equal(mine, theirs)
        assert mine.abs().sum() > 0


def test_a_stream_is_not_drained_twice(tmp_path: Path) -> None:
    """The losses of what was in flight are there after a save, and none is lost or repeated."""
    trainer = stream("spectrain linear")
    told = [trainer.step(batch(seed=seed)) for seed in range(5)]
    trainer.save_checkpoint(tmp_path)
    known = [loss for loss in told if loss is not None]
    assert len(known) + len(trainer.pop_losses()) == 5


@pytest.mark.slow
def test_a_load_holds_one_part_at_a_time(tmp_path: Path) -> None:
    """Beside the trainer's own memory: what is read, and one part in the file."""

    class Wide(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(300, 300) for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x

    import fxpart

    torch.manual_seed(0)
    given = torch.randn(4, 300), torch.randn(4, 300)
    program = fxpart.compile(
        Wide(), "local:2", example_inputs=given, loss=torch.nn.functional.mse_loss,
        microbatches=2, constraints={"mesh": "none", "stages": 2},
    )  # fmt: skip
    trainer = program.trainer(torch.optim.AdamW)
    trainer.step(given)
    path = trainer.save_checkpoint(tmp_path)
    checkpoint = Checkpoint.open(path)
    assert checkpoint.plan() == program.plan.dumps()
    assert checkpoint.manifest.fingerprint == program.plan.model.fingerprint
    tracemalloc.start()
    try:
        restore(trainer, checkpoint)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    largest = 300 * 300 * 4
    assert peak < 2.5 * largest
