"""What others get silently wrong, on every schedule, as pipelines and as pipelines of mesh ranks.

Ties across stages, k accumulated calls, the global norm, skips, smaller batches and new lengths,
evaluation before training, a mask without batch dim, None among the inputs: the numbers of one
process. Frozen stages and failures on every schedule are in test_virtual_stages.py.
"""

from __future__ import annotations

from typing import Any

import overlap_programs
import pytest
import torch
from built_schedules import BUILDERS
from hand_lanes import data_parallel
from hand_stages import ADAMW, Whole, batch, branches, language
from lane_programs import assert_close, one_process
from ranks import Pool
from runtime_programs import Bits, bits, make

from fxpart.runtime import InProcess, connect
from fxpart.runtime.transport.interface import Transport

TRAINING = [name for name, b in BUILDERS.items() if name != "forward" and b.flushes]
SEATS = {"interleaved": (0, 1, 0, 1), "breadth-first": (0, 1, 0, 1), "zb-v": (0, 1, 1, 0)}
SHAPES = ((8, 5), (8, 7), (5, 7), (1, 3), (8, 5))
EVALUATED = (6, 4, 9)


def seats(schedule: str) -> tuple[int, ...]:
    return SEATS.get(schedule, (0, 1, 2, 3))


def rows(schedule: str, transport: Transport) -> tuple[list[bytes], list[bytes], Bits]:
    """Evaluation, then steps, each second one accumulated: losses, norms, state."""
    hand, other = language(), language()
    ranks = seats(schedule)
    local = {i: s for i, s in enumerate(hand.stages) if ranks[i] in transport.local}

    def evaluation() -> Any:
        spec = other.spec()
        for index, stage in local.items():
            mine = other.stages[index].eval()
            for attribute in stage.names:
                setattr(mine, attribute, getattr(stage, attribute))
        return spec, {i: other.stages[i] for i in local}

    trainer = make(
        hand, transport, schedule=schedule, ranks=ranks, clip_norm=0.1, evaluation=evaluation
    )
    losses, norms = [trainer.eval_step(batch(*EVALUATED))], []
    for seed, shape in enumerate(SHAPES):
        losses.append(trainer.step(batch(*shape, seed), accumulate=seed % 2 == 1))
        if seed % 2 == 0:
            norms.append(trainer.last_grad_norm)
    losses.append(trainer.eval_step(batch(*EVALUATED)))
    return [_bytes(x) for x in losses], [_bytes(x) for x in norms], bits(trainer.state_dict())


def _bytes(number: torch.Tensor | None) -> bytes:
    assert number is not None
    return number.detach().numpy().tobytes()


def expected() -> tuple[list[bytes], list[bytes], Bits]:
    """The same in one process."""
    whole = Whole(language(), ADAMW, 0.1)
    losses, norms = [evaluated(whole)], []
    for seed, shape in enumerate(SHAPES):
        losses.append(whole.backward(batch(*shape, seed), 4))
        if seed % 2 == 0:
            whole.update()
            norms.append(whole.norm)
    losses.append(evaluated(whole))
    return [_bytes(x) for x in losses], [_bytes(x) for x in norms], bits(whole.state())


@torch.no_grad()
def evaluated(whole: Whole) -> torch.Tensor:
    """The loss in evaluation mode, weighed by rows, microbatch by microbatch."""
    given = batch(*EVALUATED)
    cut = {n: torch.tensor_split(given[n], 4) for n in ("ids", "labels")}
    total = torch.zeros(())
    for stage in whole.stages:
        stage.eval()
    for index in range(4):
        piece = {n: parts[index] for n, parts in cut.items()}
        loss = whole.run(piece | {"mask": given["mask"]}, index)["loss"]
        part = loss * (piece["ids"].shape[0] / len(given["ids"]))
        total = part if index == 0 else total + part
    for stage in whole.stages:
        stage.train()
    return total


@pytest.mark.parametrize("schedule", TRAINING)
def test_every_row_gives_the_bits_of_one_process(schedule: str) -> None:
    losses, norms, state = rows(schedule, InProcess(len(set(seats(schedule)))))
    want = expected()
    assert losses == want[0]
    assert norms == want[1]
    assert want[2].items() <= state.items()


@pytest.mark.parametrize("schedule", TRAINING)
def test_k_calls_give_k_times(schedule: str) -> None:
    """Not 1.25 times."""
    ranks = seats(schedule)
    made = [
        make(
            language(dropout=0.0), InProcess(len(set(ranks))), schedule=schedule, ranks=ranks,
            optimizer=None,
        )
        for _ in range(2)
    ]  # fmt: skip
    made[0].backward(batch())
    for _ in range(3):
        made[1].backward(batch())
    once, thrice = made[0].gradients(), made[1].gradients()
    assert once.keys() == thrice.keys() and len(once) == 5
    for name, gradient in once.items():
        assert torch.allclose(thrice[name], 3 * gradient, rtol=1e-5, atol=1e-7), name


@pytest.mark.slow
@pytest.mark.parametrize("schedule", TRAINING)
@pytest.mark.parametrize("zero", [0, 1])
def test_lanes_of_every_schedule(schedule: str, zero: int) -> None:
    """Data 2 x pipeline, several stages a rank: accumulation, smaller batches, the norm, a tie."""
    made = data_parallel(
        branches, 2, zero, seats(schedule), schedule=schedule, optimizer=ADAMW, clip_norm=0.1
    )
    whole = Whole(branches(), ADAMW, 0.1)
    for seed, count in enumerate((16, 8, 8, 16, 2)):
        loss = made.step(batch(count, seed=seed), accumulate=seed % 2 == 1)
        assert_close(loss, whole.backward(batch(count, seed=seed), min(4, count // 2)))
        if seed % 2 == 0:
            whole.update()
            assert made.last_grad_norm is not None and whole.norm is not None
            assert_close(made.last_grad_norm, whole.norm)
            state = made.state_dict()
            assert_close({name: state[name] for name in whole.named}, whole.state())
    entry = made.parts.state.entries["shared.weight"]
    copies = {t.detach().numpy().tobytes() for t in entry.copies.values()}
    assert len(copies) == 1, "copies of a tie, and of a mesh rank, are equal in every bit"


def gloo_rows(schedule: str) -> tuple[list[bytes], list[bytes], Bits]:
    """On a rank."""
    return rows(schedule, connect(len(set(seats(schedule)))))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["zb-h1", "interleaved"])
def test_gloo_gives_every_row(pool: Pool, schedule: str) -> None:
    ranks = len(set(seats(schedule)))
    want = expected()
    for losses, norms, state in pool.run(gloo_rows, schedule, ranks=ranks):
        assert (losses, norms) == want[:2]
        assert want[2].items() <= state.items()


@pytest.mark.slow
def test_gloo_lanes_with_split_backwards(pool: Pool) -> None:
    """Two mesh ranks of two stages; the last half of a backward is when sums start."""
    options = {"schedule": "zb-h1", "clip_norm": 0.5}
    results = pool.run(overlap_programs.train, "dp=2", options, ranks=4)
    assert results == [overlap_programs.train("dp=2", options)] * 4
    assert_close(results[0]["numbers"], one_process()[-1]["state"])
