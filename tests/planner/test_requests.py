"""What compile() is asked: decisions beside a mesh."""

from __future__ import annotations

from typing import Any

import pytest

from fxpart.cluster.model import Cluster
from fxpart.errors import FxpartError
from fxpart.planner.request import make_request


def request(**constraints: Any) -> Any:
    return make_request(Cluster.parse("local:4"), "adamw", "auto", constraints, 0)


@pytest.mark.parametrize(
    ("constraints", "words"),
    [
        ({"mode": "queue", "recompute": "full"}, "recompute=none"),
        ({"mode": "async", "mesh": "none", "recompute": "full"}, "recompute=none"),
        ({"mesh": "dp=2", "tp": 2}, "tp=1"),
        ({"mesh": "dp=2,tp=2", "dp": "1,4"}, "dp=2"),
        ({"mesh": "none", "ep": 2}, "ep=1"),
        ({"mode": "queue", "dp": 2}, "dp=1"),
    ],
)
def test_what_a_mesh_rules_out_is_refused(constraints: dict[str, Any], words: str) -> None:
    """It would be passed over in silence."""
    with pytest.raises(FxpartError, match="FXP109") as caught:
        request(**constraints)
    (problem,) = caught.value.problems
    assert words in problem.why and problem.fix


@pytest.mark.parametrize(
    "constraints",
    [
        {"mesh": "dp=2,tp=2", "dp": 2, "tp": "2,4", "recompute": "none"},
        {"mesh": "none", "dp": 1, "stages": 2, "forbid": "recompute;tp"},
        {"mesh": "auto", "tp": 2, "recompute": "full"},
        {"dp": 2, "tp": 2},
        {"mode": "queue", "stages": 2},
    ],
)
def test_what_agrees_is_not(constraints: dict[str, Any]) -> None:
    assert request(**constraints).constraints == constraints
