"""Several stages on one rank: every schedule gives the numbers of one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from built_schedules import BUILDERS
from hand_stages import ADAMW, Whole, batch, branches, language
from ranks import Pool
from runtime_programs import Bits, Faulty, bits, make, train_placed

from fxpart.errors import FxpartError
from fxpart.runtime import InProcess
from fxpart.schedule.action import ActionKind

TRAINING = [name for name, b in BUILDERS.items() if name != "forward" and b.flushes]
RANKS = ((0, 1, 2, 3), (0, 1, 0, 1), (0, 1, 1, 0), (0, 0, 1, 1), (1, 0, 1, 0), (0, 0, 0, 0))


@cache
def oracle(tied: bool) -> tuple[list[float], Bits]:
    whole = Whole(language(tied=tied), ADAMW, 0.1)
    return [float(whole.step(batch(seed=s), 4)) for s in range(3)], bits(whole.state())


def placed(schedule: str, ranks: tuple[int, ...], hand: Any = None, **options: Any) -> Any:
    """A trainer; skips where the schedule is not made for such ranks."""
    transport = InProcess(max(ranks) + 1)
    try:
        return make(hand or language(), transport, schedule=schedule, ranks=ranks, **options)
    except FxpartError as refused:
        if refused.problems[0].where.startswith("schedule="):
            pytest.skip(refused.problems[0].why)
        raise


@pytest.mark.slow
@pytest.mark.parametrize("schedule", TRAINING)
@pytest.mark.parametrize("ranks", RANKS, ids=lambda r: "".join(map(str, r)))
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "plain"])
def test_every_bit_is_that_of_one_process(
    schedule: str, ranks: tuple[int, ...], tied: bool
) -> None:
    """Dropout, batch statistics, a skip, a tie, a mask without batch dim, clipping."""
    parts = placed(schedule, ranks, language(tied=tied), clip_norm=0.1)
    losses, state = oracle(tied)
    assert [float(parts.step(batch(seed=s))) for s in range(3)] == losses
    assert state.items() <= bits(parts.state_dict()).items()


@pytest.mark.parametrize("schedule", TRAINING)
@pytest.mark.parametrize("ranks", [(0, 1, 1, 0), (0, 1, 0, 1)], ids=["0110", "0101"])
def test_branches_that_share_a_matrix(schedule: str, ranks: tuple[int, ...]) -> None:
    """A stage graph that is no chain, and a tie whose sums come late."""
    whole = Whole(branches(), ADAMW, 0.1)
    parts = placed(schedule, ranks, branches(), clip_norm=0.1)
    for seed in range(2):
        assert float(parts.step(batch(seed=seed))) == float(whole.step(batch(seed=seed), 4))
    assert bits(whole.state()).items() <= bits(parts.state_dict()).items()


@pytest.mark.parametrize("schedule", TRAINING)
def test_frozen_stages_go_along(schedule: str) -> None:
    """Nothing below the embedding's stage needs a gradient: no backward, no transfer there."""
    whole = Whole(language(frozen=True), ADAMW, 0.1)
    parts = placed(schedule, (0, 1, 1, 0), language(frozen=True), clip_norm=0.1)
    for seed in range(2):
        assert float(parts.step(batch(seed=seed))) == float(whole.step(batch(seed=seed), 4))
    assert bits(whole.state()).items() <= bits(parts.state_dict()).items()
    (executors,) = next(iter(parts.parts.engine._executors.values()))
    for executor in executors:
        sends = [i.action for i in executor._instructions if i.action.kind is ActionKind.SEND_B]
        assert all(action.peer != 0 for action in sends)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", TRAINING)
@pytest.mark.parametrize("what", ["raise", "backward", "shape"])
def test_a_stage_that_fails(schedule: str, what: str) -> None:
    """One error; nothing was updated; the next step is as good as ever."""
    parts = placed(schedule, (0, 1, 1, 0))
    module = parts.parts.mesh_ranks[0].modules[1]
    before = bits(parts.state_dict())
    inner = module.forward
    module.forward = Faulty(parts, module, what, 2)
    with pytest.raises(FxpartError) as failure:
        parts.step(batch())
    assert {p.code for p in failure.value.problems} <= {"FXP504", "FXP900"}
    # On one rank a wrong shape is found by the stage that gets it.
    assert any(f"stage {k}" in str(failure.value) for k in ((1, 2) if what == "shape" else (1,)))
    module.forward = inner
    after = bits(parts.state_dict())
    assert {n: v for n, v in before.items() if "running" not in n}.items() <= after.items()
    assert not parts.gradients()
    (executors,) = next(iter(parts.parts.engine._executors.values()))
    assert not any(executor._cells or executor._weight_backwards for executor in executors)
    parts.step(batch())


def test_nothing_outlives_a_step() -> None:
    parts = placed("zb-v", (0, 1, 1, 0))
    parts.step(batch())
    (executors,) = next(iter(parts.parts.engine._executors.values()))
    assert not any(executor._cells or executor._weight_backwards for executor in executors)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "ranks"), [("breadth-first", (0, 1, 0, 1)), ("zb-v", (0, 1, 1, 0))]
)
def test_gloo_gives_the_same_bits(pool: Pool, schedule: str, ranks: tuple[int, ...]) -> None:
    """Two ranks with two stages each, a tie between them, many microbatches in flight."""
    given = (schedule, ranks, 16)
    assert pool.run(train_placed, *given, ranks=2) == [train_placed(*given)] * 2
