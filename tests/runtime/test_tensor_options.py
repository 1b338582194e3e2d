"""Optimizers whose learning rate, or betas, are tensors: state dicts and checkpoints keep them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_trainers import steps
from hand_stages import language
from ranks import Pool
from runtime_programs import bits, make

from fxpart.runtime import InProcess, Trainer, connect
from fxpart.runtime.optimizer.optimizer_state import convert_option
from fxpart.schedule.weight_modes import MODES

CUT = (2, 2)
SYNCHRONOUS = ("", "optimizer")  # what is offloaded
STREAMS = ("stash", "spectrain", "2bw-ef", "xpipe")


def rate() -> torch.Tensor:
    """A number that has no short decimal text."""
    return torch.tensor(1 / 3, dtype=torch.float32) * 0.03


def trainer(mode: str, transport: Any = None, **given: Any) -> Any:
    """Synchronous ("") or a stream, on AdamW with a tensor as its rate."""
    optimizer = partial(torch.optim.AdamW, **{"lr": rate(), **given})
    transport = transport or InProcess(len(CUT))
    hand = language(CUT)
    if mode in SYNCHRONOUS:
        return make(hand, transport, optimizer=optimizer, offload=mode or "none")
    return Trainer(
        hand.spec(), dict(enumerate(hand.stages)), ranks=range(len(CUT)), transport=transport,
        microbatches=4 if mode == "2bw-ef" else 2, optimizer=optimizer, weights=MODES[mode],
    )  # fmt: skip


@pytest.mark.parametrize("mode", [*SYNCHRONOUS, *STREAMS])
def test_state_dicts(mode: str) -> None:
    """As torch's own: a tensor; what is loaded trains on to the bit, whatever rate was there."""
    one = trainer(mode)
    steps(one, range(3))
    found = one.optimizer_state_dict()
    (group,) = found["param_groups"]
    assert isinstance(group["lr"], torch.Tensor) and torch.equal(group["lr"], rate())
    assert group["weight_decay"] == 0.01 and tuple(group["betas"]) == (0.9, 0.999)
    other = trainer(mode, lr=torch.tensor(0.5))
    other.load_state_dict(one.state_dict())
    other.load_optimizer_state_dict(found)
    other.calls = one.calls
    (again,) = other.optimizer_state_dict()["param_groups"]
    assert torch.equal(again["lr"], rate())
    if mode in SYNCHRONOUS:  # a stream's predictors are of the checkpoint
        assert isinstance(other.optimizer.param_groups[0]["lr"], torch.Tensor)
        assert steps(other, range(3, 5)) == steps(one, range(3, 5))
        assert bits(other.state_dict()) == bits(one.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["", *STREAMS])
def test_checkpoints(mode: str, tmp_path: Path) -> None:
    one, other = trainer(mode), trainer(mode, lr=torch.tensor(0.5))
    steps(one, range(3))
    one.save_checkpoint(tmp_path)
    other.load_checkpoint(tmp_path)
    (group,) = other.optimizer_state_dict()["param_groups"]
    assert isinstance(group["lr"], torch.Tensor) and torch.equal(group["lr"], rate())
    assert steps(other, range(3, 6)) == steps(one, range(3, 6))
    assert bits(other.state_dict()) == bits(one.state_dict())


def test_a_rate_that_is_a_number_again(tmp_path: Path) -> None:
    """From a tensor to a float and back, by a checkpoint: the kind is that of who loads."""
    one, plain = trainer(""), trainer("", lr=0.5)
    steps(one, range(1))
    one.save_checkpoint(tmp_path)
    plain.load_checkpoint(tmp_path)
    lr = plain.optimizer.param_groups[0]["lr"]
    assert type(lr) is float and lr == rate().item()


def test_tensors_within_tuples_and_shared_ones() -> None:
    current = (torch.tensor(0.5), 0.999)
    first, second = convert_option(current, [0.9, 0.99])
    assert torch.equal(first, torch.tensor(0.9)) and second == 0.99
    given = torch.tensor(0.1)
    assert convert_option(torch.tensor(0.0), given) is not given
    assert convert_option((1, 2), [3]) == (3,) and convert_option(0.1, 0.2) == 0.2


def told_by_ranks() -> list[Any]:
    """What each rank gathers, and what it has after loading it."""
    one = trainer("", connect(len(CUT)))
    steps(one, range(2))
    found = one.optimizer_state_dict()
    one.optimizer.param_groups[0]["lr"].fill_(0.5)
    one.load_optimizer_state_dict(found)
    mine = one.optimizer.param_groups[0]["lr"]
    return [type(mine).__name__, mine.item(), found["param_groups"][0]["lr"].item()]


@pytest.mark.slow
def test_on_ranks(pool: Pool) -> None:
    assert pool.run(told_by_ranks, ranks=2) == [["Tensor", rate().item(), rate().item()]] * 2
