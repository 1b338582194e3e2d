"""Every row of the table holds, and the page shows the table."""

from __future__ import annotations

import warnings

import pytest
import torch
from supported import page
from supported.behavior import Behavior, outcome_of
from supported.table import BEHAVIORS

RUNS = [
    pytest.param(entry, layout, id=f"{entry.name}-{layout.replace(' ', '_')}")
    for entry in BEHAVIORS
    for layout in entry.outcome
]


@pytest.mark.slow
@pytest.mark.parametrize(("entry", "layout"), RUNS)
def test_outcome(entry: Behavior, layout: str) -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert outcome_of(entry.build(), layout) == entry.outcome[layout]


def test_page_shows_the_table() -> None:
    shown = page.PAGE.read_text(encoding="utf-8")
    assert shown == page.render(), "run python -m supported.page in tests/"


def test_names_are_unique_and_refusals_have_reasons() -> None:
    names = [entry.name for entry in BEHAVIORS]
    assert len(names) == len(set(names))
    assert all(e.reason for e in BEHAVIORS if set(e.outcome.values()) != {"right"})
