"""The quick simulation ends every stage when the full one does."""

from __future__ import annotations

import random

import pytest
from built_schedules import BUILDERS

from fxpart.schedule.action import ActionKind, StageEdge
from fxpart.schedule.fast_simulation import compute_last_backward_ends
from fxpart.schedule.lower import lower
from fxpart.schedule.simulate import simulate

NAMES = [name for name, spec in BUILDERS.items() if spec.warmup is not None]


def instance(seed: int) -> tuple[str, int, tuple[StageEdge, ...], list[float], list[float]]:
    """A random stage graph: skips, branches, edges without gradients, unequal stages."""
    rng = random.Random(seed)
    stages = rng.randint(1, 7)
    pairs = [(a, b) for a in range(stages) for b in range(a + 1, stages)]
    chosen = [p for p in pairs if rng.random() < (0.9 if p[1] == p[0] + 1 else 0.25)]
    edges = tuple(StageEdge(a, b, rng.random() < 0.85) for a, b in chosen)
    forward = [rng.choice((0.0, 1.0, rng.uniform(0.1, 3))) for _ in range(stages)]
    backward = [rng.choice((0.0, 2.0, rng.uniform(0.1, 5))) for _ in range(stages)]
    return rng.choice(NAMES), rng.randint(1, 12), edges, forward, backward


@pytest.mark.parametrize("seed", range(120))
def test_as_the_full_simulation(seed: int) -> None:
    name, microbatches, edges, forward, backward = instance(seed)
    rng = random.Random(-seed)
    moved = {(e.source, e.target): rng.choice((0.0, 0.3, rng.uniform(0, 2))) for e in edges}

    def transfer(stage: int, peer: int, kind: ActionKind) -> float:
        return moved[(stage, peer) if kind is ActionKind.SEND_F else (peer, stage)]

    built = BUILDERS[name](len(forward), microbatches, edges)
    # With other costs a stage's order and its links stay as they are; only the times differ.
    lowered = lower(built, edges, forward=forward, backward=backward)
    timeline = simulate(lowered, edges, forward, backward, transfer)
    ends = [0.0] * len(forward)
    for span in timeline.spans:
        if span.track == "compute":
            ends[span.action.stage] = max(ends[span.action.stage], span.end)
    found = compute_last_backward_ends(name, microbatches, edges, forward, backward, moved)
    assert found == pytest.approx(ends, rel=1e-12, abs=1e-12)


def test_equal_stages_take_the_closed_form() -> None:
    edges = tuple(StageEdge(k, k + 1) for k in range(3))
    for name in NAMES:
        ends = compute_last_backward_ends(name, 9, edges, [1.0] * 4, [2.0] * 4, {})
        assert max(ends) == pytest.approx((4 + 9 - 1) * 3)
