"""trainer.prefetch: rows that are requested while the batch before runs, and no other numbers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Pool
from sparse_models import SENT, batch, program

from fxpart.errors import FxpartError

WAYS: dict[str, tuple[int, tuple[Any, ...]]] = {
    "data": (2, (("mesh", "dp=2"), ("stages", 1))),
    "recomputed": (2, (("mesh", "dp=2"), ("stages", 1), ("recompute", "full"))),
    "stages": (4, (("mesh", "dp=2"), ("stages", 2))),
    "one rank": (1, (("stages", 1),)),
}


def made(way: str, optimizer: str) -> Any:
    ranks, constraints = WAYS[way]
    return program(optimizer, ranks, SENT if ranks > 1 else (), constraints, trained=True)


def run(way: str, optimizer: str, ahead: bool) -> tuple[list[float], dict[str, Any], list[int]]:
    """Six steps, in which weights change by other means too, and batches are evaluated."""
    trainer = made(way, optimizer).trainer()
    losses, rows = [], []
    for number in range(6):
        if ahead and number != 2:
            trainer.prefetch(batch(number + 1))
        if number == 4:
            trainer.load_state_dict({n: t / 2 for n, t in trainer.state_dict().items()})
            losses.append(trainer.evaluate([batch(9)])["loss"])
        losses.append(trainer.step(batch(number)).item())
        rows.append(trainer.last_lookups[1])
    losses.append(trainer.backward(batch(6)).item())
    trainer.update()
    state = trainer.state_dict()
    trainer.close()
    return losses, state, rows


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_the_numbers_do_not_change(way: str) -> None:
    for optimizer in ("rowwise", "momentum"):
        (losses, state, rows), found = (run(way, optimizer, ahead) for ahead in (False, True))
        assert found[0] == losses
        assert all(torch.equal(found[1][name], tensor) for name, tensor in state.items())
        if way == "data":
            assert sum(found[2]) < sum(rows), "a row is sent once for all microbatches"


def _gloo(way: str) -> list[Any]:
    (losses, state, _), found = (run(way, "momentum", ahead) for ahead in (False, True))
    trainer = made(way, "momentum").trainer()
    trainer.prefetch(batch(1))
    with pytest.raises(FxpartError, match="is not a row of a table"):
        trainer.step({**batch(0), "ids": batch(0)["ids"] + 16})
    again = [trainer.step(batch(number)).item() for number in (0, 1)]
    trainer.close()
    equal = all(torch.equal(found[1][n], t) for n, t in state.items())
    return [losses == found[0], equal, again == losses[:2]]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["data", "stages"])
def test_gloo(pool: Pool, way: str) -> None:
    for found in pool.run(_gloo, way, ranks=WAYS[way][0], timeout=150):
        assert found == [True, True, True]


@pytest.mark.slow
def test_another_batch_than_the_announced_one() -> None:
    trainer = made("data", "rowwise").trainer()
    trainer.prefetch(batch(1))
    trainer.step(batch(0))
    with pytest.raises(FxpartError, match="announced another batch") as caught:
        trainer.step(batch(2))
    assert caught.value.code == "FXP105"
    changed = batch(1)
    trainer.step(batch(1))  # equal, in other tensors
    trainer.prefetch(changed)
    trainer.step(batch(0))
    changed["ids"][0, 0] += 1
    with pytest.raises(FxpartError, match="announced another batch"):
        trainer.step(changed)
    wrong = {**batch(3), "ids": batch(3)["ids"] + 16}
    trainer.pipeline.cancel_prefetch()
    trainer.prefetch(wrong)
    with pytest.raises(FxpartError, match="is not a row of a table of 16 rows") as caught:
        trainer.step(batch(0))
    assert caught.value.code == "FXP105"
    trainer.step(batch(0))
    trainer.close()


def _draw(count: int) -> Any:
    """Batches that depend on the global generator."""
    for _ in range(count):
        yield batch(int(torch.randint(1000, ())))


@pytest.mark.slow
def test_fit_reads_one_update_ahead(tmp_path: Path) -> None:
    """Also where a run is resumed, and with several batches per update."""
    found = []
    for ahead, stops in ((False, ()), (True, ()), (True, (2, 3))):
        for stop in (*stops, 5):
            torch.manual_seed(1)
            trainer = made("data", "momentum").trainer()
            trainer.fit(
                partial(_draw, 7), steps=stop, accumulate=2, prefetch=ahead,
                checkpoints=tmp_path / f"{ahead}{len(stops)}",
            )  # fmt: skip
            state = trainer.state_dict()
            trainer.close()
        found.append(state)
    for state in found[1:]:
        assert all(torch.equal(state[name], tensor) for name, tensor in found[0].items())
