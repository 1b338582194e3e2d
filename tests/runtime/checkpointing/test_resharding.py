"""A checkpoint of any plan loads into any other: every bit, and what follows from it."""

from __future__ import annotations

from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import hand_lanes
import pytest
import torch
from checkpoint_trainers import (
    LANES,
    OPTIMIZERS,
    PIPELINES,
    STREAMS,
    everything,
    held,
    mesh_ranks,
    moved,
    pipeline,
    steps,
    stream,
)
from hand_stages import batch, language
from runtime_programs import make

from fxpart.runtime import InProcess

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_pipelines_go_on_as_if_nothing_had_been(optimizer: str, tmp_path: Path) -> None:
    """All plans of it train with equal bits: each goes on as the one that was never stopped."""
    ways = list(PIPELINES) if optimizer == "adamw" else ["four", "two", "interleaved"]
    for number, way in enumerate(ways):
        old = pipeline(way, optimizer)
        steps(old, range(3))
        saved = old.save_checkpoint(tmp_path / str(number), {"epoch": number})
        state = everything(old)
        assert held(saved) == state
        expected = steps(old, (7, 8)), everything(old)
        for other in ways:
            new = pipeline(other, optimizer)
            steps(new, (11,))  # what it has been before is of no account
            assert new.load_checkpoint(saved) == {"epoch": number}
            assert everything(new) == state, (way, other)
            assert (steps(new, (7, 8)), everything(new)) == expected, (way, other)


LANED = [(way, "adamw") for way in LANES] + [("tp and zero-1", "sgd"), ("zero-2 of 3", "sgd")]


@pytest.mark.parametrize(("way", "optimizer"), LANED)
def test_lanes_take_what_any_other_has_written(way: str, optimizer: str, tmp_path: Path) -> None:
    """Data, tensor, ZeRO-1, -2 and -3, uneven pieces: as by whole tensors, then as unstopped."""
    given = partial(hand_lanes.batch, 12)
    old = mesh_ranks(way, optimizer)
    steps(old, (0, 1, 2), given)
    saved = old.save_checkpoint(tmp_path)
    state = everything(old)
    assert held(saved) == state
    for other in LANES:
        new, compared = mesh_ranks(other, optimizer), mesh_ranks(other, optimizer)
        steps(new, (11,), given)
        new.load_checkpoint(tmp_path)
        assert everything(new) == state, other
        moved(old, compared)
        assert steps(new, (7, 8), given) == steps(compared, (7, 8), given), other
        assert everything(new) == everything(compared), other
    again = mesh_ranks(way, optimizer)
    again.load_checkpoint(tmp_path)
    assert steps(again, (7, 8), given) == steps(old, (7, 8), given)
    assert everything(again) == everything(old)


PREDICTED = [(mode, "sgd") for mode in STREAMS]
PREDICTED += [("spectrain linear", "adamw"), ("spectrain linear", "nadam"), ("pipemare", "adamw")]


@pytest.mark.parametrize(("mode", "optimizer"), PREDICTED)
def test_a_stream_goes_on_with_its_predictions(mode: str, optimizer: str, tmp_path: Path) -> None:
    """What a rule keeps is saved: a new trainer goes on as the one that was drained there."""
    given: dict[str, Any] = {"optimizer": optimizer, "clip_norm": 0.3, "clip": "delayed"}
    scheduler = torch.optim.lr_scheduler.ExponentialLR
    given["scheduler"] = lambda made: scheduler(made, 0.9)
    old = stream(mode, **given)
    for seed in range(7):
        old.step(batch(seed=seed))
    saved = old.save_checkpoint(tmp_path)
    state = everything(old)
    assert held(saved) == state
    assert old.updates == 7
    new = stream(mode, **given)
    steps(new, (11, 12, 13))
    new.load_checkpoint(tmp_path)
    assert everything(new) == state
    assert (new.updates, new.calls) == (7, 7)
    old.pop_losses()
    assert steps(new, range(20, 27)) == steps(old, range(20, 27))
    assert everything(new) == everything(old)


@pytest.mark.parametrize("mode", ["spectrain difference", "stash", "pipemare"])
def test_streams_of_other_stages_and_flushing_ones(mode: str, tmp_path: Path) -> None:
    """Async on four stages to two, to a synchronous pipeline, and back to async."""
    old = stream(mode)
    steps(old, range(5))
    old.save_checkpoint(tmp_path / "a")
    two = stream(mode, (2, 2))
    two.load_checkpoint(tmp_path / "a")
    assert everything(two) == everything(old)
    steps(two, (5, 6))
    assert two.updates == 7
    plain = make(language((2, 2)), InProcess(2), optimizer=OPTIMIZERS["sgd"])
    two.save_checkpoint(tmp_path / "b")
    plain.load_checkpoint(tmp_path / "b")
    assert everything(plain) == everything(two)
    assert (plain.updates, plain.calls) == (7, 7)
    steps(plain, (7,))
    plain.save_checkpoint(tmp_path / "c")
    last = stream(mode)
    last.load_checkpoint(tmp_path / "c")
    assert everything(last) == everything(plain)
    steps(last, range(5))
    assert last.updates == 13


def test_frozen_parameters_go_along(tmp_path: Path) -> None:
    for way, other in permutations(("four", "two", "zb-v"), 2):
        old = pipeline(way, frozen=True)
        steps(old, range(2))
        root = tmp_path / f"{way} {other}"
        old.save_checkpoint(root)
        new = pipeline(other, frozen=True)
        with torch.no_grad():
            for entry in new.parts.state.entries.values():
                for copy in entry.copies.values():
                    copy.zero_()
        new.load_checkpoint(root)
        assert everything(new) == everything(old)
        assert steps(new, (4, 5)) == steps(old, (4, 5))
