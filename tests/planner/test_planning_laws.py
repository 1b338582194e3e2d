"""Laws of planning on random models and clusters; ``tests/benchmarks/laws.py`` checks many more."""

from __future__ import annotations

import pytest
from planning_cases import draw_case
from planning_laws import LAWS, check_law

# Cases with two devices.
_SEEDS = {"memory": 34, "space": 34, "what-if": 34}


@pytest.mark.slow
@pytest.mark.parametrize("law", LAWS)
def test_a_random_case(law: str) -> None:
    """A law holds on one case; without constraints, so that every law applies."""
    case = draw_case(_SEEDS.get(law, 21), constrained=False)
    assert check_law(law, case) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("law", "seed"),
    [
        ("fix", 700029),
        ("fix", 42202),
        pytest.param("devices", 700000, marks=pytest.mark.long),
        pytest.param("order", 700009, marks=pytest.mark.long),
    ],
)
def test_a_case_of_unequal_links(law: str, seed: int) -> None:
    """Cases in which the best group of devices depends on more than the order of the cluster, and
    one whose best placements are those for fewer microbatches.
    """
    assert check_law(law, draw_case(seed)) == []


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("law", ["memory", "faster"])
def test_an_asynchronous_case_of_unequal_links(law: str) -> None:
    """With more memory or speed, the best plan of the mode has one stage."""
    assert check_law(law, draw_case(700003)) == []
