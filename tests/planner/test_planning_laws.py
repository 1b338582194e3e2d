"""Laws of planning on random models and clusters; ``tests/benchmarks/laws.py`` checks many more."""

from __future__ import annotations

import pytest
from planning_cases import draw_case
from planning_laws import LAWS, check_law

# Cases with two devices.
_SEEDS = {"memory": 34, "space": 34}


@pytest.mark.slow
@pytest.mark.parametrize("law", LAWS)
def test_a_random_case(law: str) -> None:
    """A law holds on one case; without constraints, so that every law applies."""
    case = draw_case(_SEEDS.get(law, 21), constrained=False)
    assert check_law(law, case) == []
