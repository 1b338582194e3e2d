"""Random schedules and damaged ones against brute force; ten thousand of them: see
``tests/benchmarks/schedules_checked.py``.
"""

from __future__ import annotations

import pytest
from schedule_agreement import many
from schedule_draws import BREAKS


def test_some() -> None:
    many(5, seed=1)


@pytest.mark.slow
def test_many() -> None:
    """Every sort of damage is seen to be wrong; what does no harm is seen to be right."""
    tally = many(150, seed=0)
    for how in BREAKS:
        assert tally[f"{how}: wrong"] > 0, (how, tally)
    harmless = {how for how in BREAKS if tally[f"{how}: right"]}
    assert {"neighbours", "rank", "halve", "microbatch"} <= harmless
    assert not harmless & {"drop", "double", "peer", "kind"}
    assert tally["deadlock"] > 0
    assert min(tally["copies"], tally["virtual"], tally["split"]) > 30
