"""PaddlePaddle's ``np`` syntax."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpart.elastic.rank_bounds import RankBounds
from fxpart.errors import FxpartError


@pytest.mark.parametrize(
    ("text", "least", "most"),
    [("4", 4, 4), ("2:4", 2, 4), (" 1 : 131072 ", 1, 131072), ("3:3", 3, 3), ("004", 4, 4)],
)
def test_what_is_read(text: str, least: int, most: int) -> None:
    assert RankBounds.parse(text) == RankBounds(least, most)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "a number is missing"),
        ("2:", "a number is missing"),
        (":4", "a number is missing"),
        ("0:4", "0 ranks are not between 1 and 131072"),
        ("4:2", "the minimum, 4, is above the maximum, 2"),
        ("2:3:4", "it has 3 numbers"),
        ("-1:4", "'-1' is not a number"),
        ("two", "'two' is not a number"),
        ("2.0:4", "'2.0' is not a number"),
        ("²:4", "'²' is not a number"),
        ("1:131073", "131073 ranks are not between 1 and 131072"),
        ("1:" + "9" * 5000, "ranks are not between 1 and 131072"),
    ],
)
def test_what_is_refused(text: str, why: str) -> None:
    with pytest.raises(FxpartError) as caught:
        RankBounds.parse(text, "--nnodes")
    (problem,) = caught.value.problems
    assert problem.code == "FXP109"
    assert why in problem.why
    assert problem.where.startswith("--nnodes ")
    assert "MIN:MAX" in problem.fix


@given(st.integers(1, 500), st.integers(0, 500))
def test_as_text_and_back(least: int, more: int) -> None:
    bounds = RankBounds(least, least + more)
    assert RankBounds.parse(str(bounds)) == bounds
    assert bounds.elastic == (more > 0)
    assert least in bounds and least + more in bounds
    assert least - 1 not in bounds and least + more + 1 not in bounds


@given(st.text(max_size=12))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        bounds = RankBounds.parse(text)
    except FxpartError as fault:
        assert fault.code == "FXP109"
    else:
        assert 1 <= bounds.least <= bounds.most
