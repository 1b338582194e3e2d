"""State by original name: gathered, loaded, moved between numbers of ranks; evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hand_stages import Whole, batch, language
from ranks import Pool
from runtime_programs import bits, evaluate, make, move, save
from torch import nn

import fxpart
from fxpart.errors import FxpartError
from fxpart.runtime import InProcess, Trainer

FOUR, TWO = (1, 1, 1, 1), (2, 2)


def trained(cut: tuple[int, ...] = FOUR, steps: int = 2, **options: Any) -> Trainer:
    trainer = make(language(cut), InProcess(len(cut)), **options)
    for seed in range(steps):
        trainer.step(batch(seed=seed))
    return trainer


def test_a_state_dict_has_the_original_names_and_aliases() -> None:
    state = trained().state_dict()
    assert set(state) == {
        "embed.weight", "head.tied", "mix.weight", "mix.bias", "norm.weight", "norm.bias",
        "norm.running_mean", "norm.running_var",
    }  # fmt: skip
    before = {name: tensor.clone() for name, tensor in state.items()}
    trainer = trained(steps=0)
    trainer.load_state_dict(state)
    trainer.step(batch())
    assert bits(before) == bits(state), "a state dict is a copy"


def test_training_goes_on_from_a_state_on_other_ranks() -> None:
    """Model and optimizer state move from four stages to two, and every number stays."""
    old = trained(FOUR)
    new = make(language(TWO), InProcess(2))
    new.load_state_dict(old.state_dict())
    new.load_optimizer_state_dict(old.optimizer_state_dict())
    new.calls = old.calls
    for seed in (5, 6):
        assert torch.equal(old.step(batch(seed=seed)), new.step(batch(seed=seed)))
    assert bits(old.state_dict()) == bits(new.state_dict())


def test_optimizer_options_come_back() -> None:
    old = trained()
    assert old.optimizer is not None
    old.optimizer.param_groups[0]["lr"] = 0.125
    new = trained(steps=0)
    new.load_optimizer_state_dict(old.optimizer_state_dict())
    assert new.optimizer is not None
    assert new.optimizer.param_groups[0]["lr"] == 0.125
    assert isinstance(new.optimizer.param_groups[0]["betas"], tuple)


def test_a_wrong_state_changes_nothing() -> None:
    trainer = trained(steps=0)
    before = bits(trainer.state_dict())
    state = trainer.state_dict()
    state["mix.bias"] = torch.ones(3)
    state["unknown"] = torch.ones(1)
    del state["norm.bias"]
    with pytest.raises(FxpartError) as caught:
        trainer.load_state_dict(state)
    assert {(p.code, p.where) for p in caught.value.problems} == {
        ("FXP110", "mix.bias"), ("FXP110", "unknown"), ("FXP110", "norm.bias"),
    }  # fmt: skip
    assert bits(trainer.state_dict()) == before


def test_an_alias_alone_is_enough() -> None:
    source, trainer = trained(), trained(steps=0)
    state = source.state_dict()
    del state["embed.weight"]
    trainer.load_state_dict(state)
    assert bits(trainer.state_dict()) == bits(source.state_dict())


def test_evaluation_before_between_and_after_training() -> None:
    """Evaluation shares the state, draws nothing, and leaves gradients and buffers alone."""
    found, losses = evaluate(FOUR)
    whole = Whole(language(), lambda p: torch.optim.AdamW(p, lr=0.01))
    expected = []
    for seed in range(3):
        for stage in whole.stages:
            stage.eval()
        with torch.no_grad():
            values = {k: v for k, v in batch(6, 4, 9).items() if k != "scale"}
            pieces = {n: torch.tensor_split(values[n], 4) for n in ("ids", "labels")}
            total = torch.zeros(())
            for i in range(4):
                piece = {n: p[i] for n, p in pieces.items()} | {"mask": values["mask"]}
                part = whole.run(piece, i)["loss"] * (pieces["ids"][i].shape[0] / 6)
                total = part if i == 0 else total + part
        expected.append(total.numpy().tobytes())
        for stage in whole.stages:
            stage.train()
        whole.step(batch(seed=seed), 4)
    assert found == expected
    assert len(losses) == 3


def test_without_a_loss_or_an_optimizer_it_says_so() -> None:
    trainer = trained(steps=0, optimizer=None)
    trainer.backward(batch())
    with pytest.raises(FxpartError, match="without an optimizer"):
        trainer.update()
    with pytest.raises(FxpartError, match="no evaluation program"):
        trainer.eval_step(batch())


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(FxpartError, match="FXP109"):
        make(language(), InProcess(4), schedule="2f2b")


@pytest.mark.slow
def test_gloo_gathers_on_all_ranks_or_the_first(pool: Pool) -> None:
    expected = save(FOUR, False)
    for found in pool.run(save, FOUR, False, ranks=4):
        assert found == expected
    first, *others = pool.run(save, FOUR, True, ranks=4)
    assert first == expected
    assert others == [({}, {})] * 3


@pytest.mark.slow
def test_gloo_moves_state_between_numbers_of_ranks(pool: Pool) -> None:
    """Trained on four ranks, loaded on two processes: the same next steps."""
    old = pool.run(move, FOUR, None, ranks=4)[0]
    new = pool.run(move, TWO, old["saved"], ranks=2)
    assert [found["after"] for found in new] == [old["after"]] * 2


@pytest.mark.slow
def test_gloo_evaluates_like_one_process(pool: Pool) -> None:
    assert pool.run(evaluate, TWO, ranks=2) == [evaluate(TWO)] * 2


class Clash(nn.Module):
    """Names of attributes that torch.fx has itself."""

    def __init__(self) -> None:
        super().__init__()
        self.code, self.graph = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.graph(torch.tanh(self.code(x)))


def test_names_that_a_graph_cannot_have_are_the_models_own(tmp_path: Path) -> None:
    model = Clash()
    names = set(model.state_dict())
    data = (torch.randn(4, 4), torch.randn(4, 1))
    program = fxpart.compile(
        model, "local:2", example_inputs=data, loss=nn.functional.mse_loss, microbatches=2,
        constraints={"mesh": "none", "stages": 2}, check="off",
    )  # fmt: skip
    groups = [{"params": "code.*", "lr": 0.01}]
    trainer = program.trainer(torch.optim.Adam, groups=groups, ema=0.9)
    trainer.step(data)
    state, optimizer = trainer.state_dict(), trainer.optimizer_state_dict()
    assert names == set(state) == set(trainer.ema_state_dict()) == set(trainer.gradients())
    assert names == set(optimizer["state"])
    assert optimizer["param_groups"][0]["params"] == ["code.weight", "code.bias"]
    trainer.load_optimizer_state_dict(optimizer)
    trainer.load_state_dict(state)
    (file,) = trainer.save_pretrained(tmp_path)
    assert names == set(safetensors.torch.load_file(file))
    trainer.parts.unused["table"] = torch.zeros(2, dtype=torch.complex128)
    with pytest.raises(FxpartError, match="safetensors has no complex128"):
        trainer.save_pretrained(tmp_path)
    model.load_state_dict(state)
