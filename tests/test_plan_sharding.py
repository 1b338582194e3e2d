"""Plans of sharded stages: read, written, migrated, and every fault found."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
import sample_plans

from fxpart.errors import FxpartError
from fxpart.plan import Certificate, Placed, Plan, PlanSharding
from fxpart.report.explain import explain
from fxpart.report.html import report_html
from fxpart.report.sharding import why


def plan(stages: int = 2, mesh: str = "dp=2,tp=2") -> Plan:
    """A plan whose stages are four ranks each."""
    lanes = 4
    whole = sample_plans.plan(stages)
    cluster = sample_plans.cluster(stages * lanes, f"local:{stages * lanes}")
    entries = {entry.stage: entry for entry in whole.prediction.ranks}
    ranks = tuple(
        msgspec.structs.replace(entries[r // lanes], rank=r, device=cluster.devices[r].name)
        for r in range(stages * lanes)
    )
    return msgspec.structs.replace(
        whole,
        cluster=cluster,
        cluster_hash=cluster.hash,
        mesh={"pipeline": stages, "dp": 2, "tp": 2},
        stages=tuple(
            msgspec.structs.replace(
                stage,
                ranks=tuple(range(stage.index * lanes, (stage.index + 1) * lanes)),
                data_parallel=2,
                tensor_parallel=2,
            )
            for stage in whole.stages
        ),
        prediction=msgspec.structs.replace(whole.prediction, ranks=ranks),
        sharding=PlanSharding(
            mesh=mesh,
            zero=1,
            zero_axis="dp",
            placed=(
                Placed(
                    kind="input",
                    names=(whole.model.inputs[0].name,),
                    placements="dp:S(0)",
                    origins={"dp": "the axis dp cuts the batch"},
                ),
                Placed(kind="state", names=("h.0.up.weight",), placements="tp:S(0)"),
                Placed(kind="op", names=("linear", "linear_2"), strategy="dp:b,tp:o"),
            ),
            unruled={"aten.foo.default": 2},
            certificate=Certificate(
                status="optimal", objective=1.0, lower_bound=1.0, gap=0.0, solver="dp", over="ops"
            ),
        ),
    )


def altered(**changes: Any) -> Plan:
    """The plan with other fields in its sharding."""
    whole = plan()
    assert whole.sharding is not None
    return msgspec.structs.replace(
        whole, sharding=msgspec.structs.replace(whole.sharding, **changes)
    )


def test_a_plan_of_lanes_is_valid_and_round_trips() -> None:
    whole = plan()
    assert whole.problems() == ()
    assert Plan.loads(whole.dumps()) == whole
    assert Plan.loads(whole.dumps()).dumps() == whole.dumps()


def test_a_plan_of_version_1_still_loads() -> None:
    whole = sample_plans.plan()
    raw = json.loads(whole.dumps())
    del raw["sharding"]
    raw["version"] = 1
    assert Plan.loads(json.dumps(raw)) == whole


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mesh": "dp=2,tp"}, "sharding.mesh"),
        ({"mesh": ""}, "one rank"),
        ({"mesh": "dp=4"}, "the stages and sharding.mesh make"),
        ({"zero": 4}, "is not 0, 1, 2 or 3"),
        ({"zero_axis": "pp"}, "no axis 'pp'"),
        ({"zero": 0}, "nothing is cut over it"),
        ({"placed": (Placed(kind="state", names=(), placements="dp:S(0)"),)}, "names nothing"),
        ({"placed": (Placed(kind="state", names=("a",), placements="dp:S"),)}, "S(dim)"),
        ({"placed": (Placed(kind="state", names=("a",), placements="x:R"),)}, "the mesh has"),
        ({"placed": (Placed(kind="state", names=("a",), strategy="dp:b"),)}, "only ops"),
        ({"placed": (Placed(kind="op", names=("a",), strategy="pp:b"),)}, "no axis 'pp'"),
        ({"placed": (Placed(kind="op", names=("a",), origins={"pp": "b"}),)}, "no axis 'pp'"),
        ({"placed": (Placed(kind="input", names=("nope",), placements="dp:R"),)}, "no input"),
        ({"placed": (Placed(kind="op", names=("a", "a"), strategy="dp:b"),)}, "2 times"),
        (
            {"certificate": Certificate(
                status="optimal", objective=1.0, lower_bound=2.0, gap=0.0, solver="x", over=""
            )},
            "sharding.certificate.lower_bound",
        ),
    ],
)  # fmt: skip
def test_each_fault_is_found(changes: dict[str, Any], words: str) -> None:
    found = altered(**changes).problems()
    assert any(words in f"{p.where} {p.why}" for p in found), found
    assert {p.code for p in found} == {"FXP303"}


def test_ranks_stand_by_stage_and_lane() -> None:
    whole = plan()
    first, second = whole.stages
    swapped = msgspec.structs.replace(
        whole,
        stages=(
            msgspec.structs.replace(first, ranks=second.ranks),
            msgspec.structs.replace(second, ranks=first.ranks),
        ),
    )
    assert any("are not 0 to 3" in p.why for p in swapped.problems())


def test_the_report_shows_mesh_ranks_and_placements() -> None:
    whole = plan()
    for text in (explain(whole), report_html(whole)):
        for words in ("0-3", "4-7", "dp=2,tp=2", "ZeRO 1 over dp", "h.0.up.weight", "aten.foo"):
            assert words in text, words


def test_why_says_where_a_placement_is_from() -> None:
    whole = plan()
    assert why(whole, whole.model.inputs[0].name).splitlines() == [
        "input input_ids: dp:S(0)",
        "  dp  the axis dp cuts the batch",
    ]
    with pytest.raises(FxpartError) as caught:
        why(whole, "linaer")
    assert "linear" in caught.value.problems[0].fix
    with pytest.raises(FxpartError):
        why(sample_plans.plan(), "linear")
