"""Plans are those of the files: a change of structure changes none of them."""

from __future__ import annotations

import pytest
from golden_plans import CASES, FOLDER, made, path_of, text_of

QUICK = ("chain_layers", "mesh_zero_1", "async_spectrain", "refused_stages")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else (pytest.mark.slow,)) for n in CASES]
)
def test_the_plan_is_the_one_of_the_file(name: str) -> None:
    """Written by `python tests/support/golden_plans.py --only NAME` after an intended change."""
    assert text_of(made(name)) == path_of(name).read_text()


def test_every_file_has_a_case() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == set(CASES)
