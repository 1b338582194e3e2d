"""The stability limits of the notes on weight versions, section 4, found with real predictors."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from delayed_quadratic import DELAYS, PAGE, largest_stable, table

# The notes' figures; the gradient of update u is delay updates late, lr * curvature at the limit.
NOTED = {
    ("", 0.0): (2, 1, 0.6180, 0.4450, 0.3473, 0.2091),
    ("", 0.9): (3.80, 0.1006, 0.0516, 0.0352, 0.0267, 0.0158),
    ("linear", 0.9): (None, 0.2705, 0.1216, 0.0725, 0.0495, 0.0232),
    ("decaying", 0.9): (None, 0.2533, 0.1142, 0.0695, 0.0484, 0.0244),
}
# The one that is not within 1 % of the root of the characteristic polynomial, 0.03478.
ROUGH = ("", 0.9, 3)
CASES = [
    (rule, momentum, delay, noted)
    for (rule, momentum), row in NOTED.items()
    for delay, noted in zip(DELAYS, row, strict=True)
    if noted is not None
]


def polynomial(rule: str, momentum: float, delay: int, step: float) -> np.ndarray:
    """The characteristic polynomial of W and v, highest power first.

    v <- m v + c P, W <- W - v, P of ``delay`` updates before being W - k v, c = lr * curvature:
    (z - 1)(z - m) z^delay + c (z + k (z - 1)). Without momentum k v is delay times the last c P:
    (z - 1)(z^(delay + 1) + delay c) + c z.
    """
    made = np.zeros(delay + 3)
    if rule == "linear" and not momentum:
        made[:2] += (1, -1)
        made[-2:] += (delay * step, -delay * step)
        made[-2] += step
        return made
    ahead = {"": 0.0, "linear": delay}.get(rule)
    ahead = sum(momentum**j for j in range(1, delay + 1)) if ahead is None else ahead
    made[:3] += (1, -(1 + momentum), momentum)
    made[-2:] += (step * (1 + ahead), -step * ahead)
    return made


def exact(rule: str, momentum: float, delay: int) -> float:
    """The smallest step at which a root leaves the unit circle."""

    def stable(step: float) -> bool:
        return bool(abs(np.roots(polynomial(rule, momentum, delay, step))).max() <= 1 + 1e-12)

    steps = np.geomspace(0.01, 5, 500)
    first = next(n for n, step in enumerate(steps) if not stable(step))
    low, high = steps[first - 1], steps[first]
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if stable(middle) else (low, middle)
    return float(low)


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "momentum", "delay", "noted"), CASES)
def test_the_limits(rule: str, momentum: float, delay: int, noted: float) -> None:
    found = largest_stable(rule, momentum, delay)
    assert found == pytest.approx(exact(rule, momentum, delay), rel=0.01)
    most = 0.0125 if (rule, momentum, delay) == ROUGH else 0.01
    assert found == pytest.approx(noted, rel=most)
    if not momentum:
        assert found == pytest.approx(2 * math.sin(math.pi / (4 * delay + 2)), rel=0.005)


@pytest.mark.slow
@pytest.mark.parametrize("delay", DELAYS[1:])
def test_linear_prediction_lowers_the_limit_without_momentum(delay: int) -> None:
    found = largest_stable("linear", 0.0, delay)
    assert found == pytest.approx(exact("linear", 0.0, delay), rel=0.01)
    assert found < 0.65 * largest_stable("", 0.0, delay)


@pytest.mark.slow
def test_the_page_has_these_limits() -> None:
    """python tests/support/delayed_quadratic.py writes them."""
    page = PAGE.read_text(encoding="utf-8")
    written = re.search(r"\| staleness \|.*?\n(?=\n)", page, re.DOTALL)
    assert written is not None
    for theirs, ours in zip(written[0].splitlines(), table().splitlines(), strict=True):
        pairs = list(zip(theirs.split("|"), ours.split("|"), strict=True))
        assert pairs[1][0] == pairs[1][1]
        for there, here in pairs[2:]:
            if here.strip() and "-" not in here:
                assert float(there) == pytest.approx(float(here), rel=0.01)
            else:
                assert there == here
